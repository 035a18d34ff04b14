//go:build linux

package tests

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// memoryCgroup makes a cgroup that may have so many bytes.
func memoryCgroup(t *testing.T, bytes int) (dir string) {
	t.Helper()
	root, file := "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
	if !exists(filepath.Join(root, file)) {
		root, file = "/sys/fs/cgroup", "memory.max"
		if b, _ := os.ReadFile(filepath.Join(root, "cgroup.subtree_control")); !strings.Contains(string(b), "memory") {
			t.Skip("no cgroup can be given memory here")
		}
	}
	dir = cgroupIn(t, root)
	mustDo(t, os.WriteFile(filepath.Join(dir, file), []byte(itoa(bytes)), 0))
	return dir
}

// mountLimited serves with so many bytes of memory, and with twenty locks on long names.
func mountLimited(t *testing.T, bytes int, opts ...string) *Mount {
	need(t, "root", "fuse")
	dir := staticDir(t)
	m := newMount(t, dir, dir+".mnt")
	m.startedBy("echo $$ >"+memoryCgroup(t, bytes)+"/cgroup.procs || exit", opts...)
	m.awaitReady()
	m.lockLongNames(agent(t))
	return m
}

// TestFaultMemoryLimit: a daemon is not killed because what it no longer needs fills the
// memory of its control group.
func TestFaultMemoryLimit(t *testing.T) {
	m := mountLimited(t, 128<<20)
	a, pid := agent(t), m.daemon()
	// What is shown takes a quarter of it, and is made again and again.
	for i := 0; i < 120 && !m.dead(); i++ {
		a.Try("open", itoa(i%40), m.control("locks.json"), "rdonly")
		if i >= 39 {
			a.Try("close", itoa((i+1)%40))
		}
	}
	if b, _ := m.version(); m.dead() || !strings.Contains(string(b), "\npid "+itoa(pid)+"\n") {
		t.Errorf("the daemon was ended: %v", m.cmd.ProcessState)
	}
}

// TestFaultMemoryLimitSupervised: where it needs more than that, its supervisor says why it
// was killed; the locks are there with the next one.
func TestFaultMemoryLimitSupervised(t *testing.T) {
	m := mountLimited(t, 32<<20, "--supervise")
	a, pid := agent(t), m.daemon()
	held := m.Listing()
	for i := 0; i < 200 && running(pid); i++ {
		a.Try("open", itoa(i), m.control("locks.json"), "rdonly")
	}
	m.awaitNext(pid)
	if want := "killed, for want of memory: its control group may have 32 MiB; starting another one"; !strings.Contains(m.Log(), want) {
		t.Errorf("the log has no %q", want)
	}
	if now := m.Listing(); len(now.Locks) != len(held.Locks) {
		t.Errorf("%d locks are there, of %d", len(now.Locks), len(held.Locks))
	}
}
