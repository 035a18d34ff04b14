//go:build linux

package tests

import (
	"syscall"
	"testing"
)

// TestW3SignalEarly: nor does a signal that kills come too early to end that wait: one that
// came while its receiver waited for somebody else's call in the directory.
func TestW3SignalEarly(t *testing.T) {
	byTransport(t, func(t *testing.T, opts ...string) {
		m, goOn := stuck(t, opts)
		defer goOn() // before anything is waited for that is stuck
		killWaiting(t, m.At("D/devserver"), m.At("D/devserver.lock"))
		m.wantFree("D")
	})
}

// TestC5FaultFrozenEarly: the same while the backing is frozen, and a dead owner stands in
// the way.
func TestC5FaultFrozenEarly(t *testing.T) {
	byTransport(t, func(t *testing.T, opts ...string) {
		disk := newImage(t, 16)
		m := disk.mount(opts...)
		openDir(t, m.Back("D"))
		owner := agent(t)
		owner.must("creat", m.At("D/devserver"), "wronly,creat,excl")
		thaw := disk.freeze()
		defer thaw() // before anything is waited for that is stuck
		owner.Kill()
		killWaiting(t, m.At("D/devserver.lock"), m.At("D/x"))
	})
}

// killWaiting kills who makes the second of two directories and waits for who makes the
// first one, which is stuck; and then that one.
func killWaiting(t *testing.T, one, other string) {
	t.Helper()
	first, second := locker(t), locker(t)
	first.Start("mkdir", one)
	awaitCalled(t, first)
	second.Start("mkdir", other)
	awaitCalled(t, second)
	mustDo(t, syscall.Kill(second.Pid, syscall.SIGKILL))
	first.Kill()
	second.awaitEnd("it is gone")
}
