//go:build linux

package tests

import (
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

// TestC3dAttackPending: who is about to get a directory lets nobody keep what he has open
// in it: it may come to nothing, and then he would write beneath somebody else's lock.
func TestC3dAttackPending(t *testing.T) {
	need(t, "root", "fuse")
	m := mount(t)
	openDir(t, m.Back("D"))
	openDir(t, m.Back("D/sub"))
	for _, f := range []string{"slow", "sub/f", "sub/devserver"} {
		openFile(t, m.Back("D", f), "of before")
	}
	taker, member, other, looks := carrier(t, 0, "x"), carrier(t, 0, "x"), agent(t), agent(t)
	taker.must("open", "h", m.At("D/sub/f"), "wronly")
	member.must("open", "l", m.At("D/sub/devserver"), "rdonly")

	answer := unansweredOpen(t, m.Back("D/slow"))
	defer answer()
	stuck := other.Start("truncate", m.At("D/slow"), "1")
	waiting := m.waiting()
	eventually(t, "the truncation is stuck", func() bool { return waiting() >= 1 })
	got := taker.Start("ctl", m.control("ctl"), "acquire D client=x wait=10ms")
	eventually(t, "the lease is on its way", func() bool { return looks.Try("getxattr", m.At("D"), "user.stagefs.token") == "ok" })
	if s := member.Try("flock", "l"); s == "ok" {
		interrupt(t, taker.Pid)
		t.Logf("the lease: %s", got())
		if s := taker.Try("write", "h", "evil"); s == "ok" {
			t.Error("written beneath somebody else's lock")
		}
	} else if s != "EAGAIN" {
		t.Errorf("flock = %s, want ok or EAGAIN", s)
	}
	answer()
	stuck()
}

// interrupt sends each thread of an agent a signal that ends a call, and nothing else.
func interrupt(t *testing.T, pid int) {
	t.Helper()
	tasks, err := filepath.Glob("/proc/" + itoa(pid) + "/task/*")
	mustDo(t, err)
	for _, task := range tasks {
		if tid, err := strconv.Atoi(filepath.Base(task)); err == nil {
			_ = unix.Tgkill(pid, tid, unix.SIGURG)
		}
	}
}
