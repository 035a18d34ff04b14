//go:build linux

package tests

import (
	"syscall"
	"testing"
)

// S1, R2: after a restart a lock on a descriptor counts as long as the
// descriptor is open, whatever became of the file's name meanwhile.
func TestS1AttackLostName(t *testing.T) {
	need(t, "root", "fuse")
	restart := func(m *Mount) {
		old := m.daemon()
		mustDo(t, syscall.Kill(old, syscall.SIGKILL))
		m.awaitNext(old)
	}
	// The locker holds the directory against all others, until it has closed its
	// descriptor.
	held := func(m *Mount, rival *Agent, dir string) {
		t.Helper()
		rival.want("EBUSY", "put", m.control("ctl"), "acquire "+dir, "wronly")
	}
	free := func(t *testing.T, m *Mount, rival *Agent, dir string) {
		t.Helper()
		eventually(t, dir+" is free", func() bool { return rival.Try("put", m.control("ctl"), "acquire "+dir, "wronly") == "ok" })
	}

	t.Run("unlinked", func(t *testing.T) {
		m := mountOver(t, "--supervise", "--depth", "2")
		maker, locker, rival := agent(t), agent(t), stranger(t)
		openDir(t, m.At("b"))
		openDir(t, m.At("b/D"))
		maker.must("creat", m.At("b/D/devserver"), "wronly,creat,excl")
		locker.must("open", "f", m.At("b/D/devserver"), "rdwr")
		locked := locker.Start("flockw", "f")
		eventually(t, "it waits", func() bool { return len(m.Listing().Waiters) == 1 })
		maker.must("unlink", m.At("b/D/devserver"))
		if got := locked(); got != "ok" {
			t.Fatalf("flock = %s", got)
		}
		held(m, rival, "b/D")
		restart(m)
		held(m, rival, "b/D")
		locker.want("ok", "creat", m.At("b/D/file"), "wronly,creat")
		locker.Try("close", "f") // of the dead mount: ENOTCONN, and closed
		free(t, m, rival, "b/D")
	})
	t.Run("renamed", func(t *testing.T) {
		m := mountOver(t, "--supervise", "--depth", "2")
		locker, rival := agent(t), stranger(t)
		openDir(t, m.At("b"))
		openDir(t, m.At("b/D"))
		locker.must("open", "f", m.At("b/D/devserver"), "rdwr,creat")
		locker.must("flock", "f")
		restart(m)
		locker.want("ok", "rename", m.At("b/D"), m.At("b/E"))
		held(m, rival, "b/E")
		locker.Try("close", "f") // of the dead mount: ENOTCONN, and closed
		free(t, m, rival, "b/E")
	})
}

// L1, S1: a renewal counts from its answer on, also if the daemon is killed at
// once and nothing else is written down meanwhile.
func TestS1AttackRenewed(t *testing.T) {
	need(t, "root", "fuse")
	m := mountOver(t)
	openDir(t, m.At("D"))
	m.Ctl("break D it must end")
	a := agent(t)
	a.mustCommand(m, "acquire D client=x ttl=1h")
	for hours := 2; hours < 8; hours++ {
		a.mustCommand(m, "renew D client=x ttl=%dh", hours)
		m.restart(func() {})
		if r := m.Locks()["D"]; r.Deadline <= float64(hours-1)*3600 {
			t.Errorf("renewed for %d h, but %v s are left after a restart", hours, r.Deadline)
		}
	}
}
