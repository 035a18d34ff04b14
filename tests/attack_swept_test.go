//go:build linux

package tests

import (
	"os"
	"testing"
)

// TestR7AttackSweptBeneath attacks R7: a directory that is put aside, out of one that
// stays, is nobody's any more: who waits for it hears so, and who has a file in it
// open stands in nobody's way.
func TestR7AttackSweptBeneath(t *testing.T) {
	m := mount(t, "--on-crash", "quarantine")
	openDir(t, m.Back("D"))
	owner, waiter, next := agent(t), agent(t), agent(t)
	owner.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	owner.must("mkdir", m.At("D/sub"))
	child := owner.Child()
	child.must("open", "f", m.At("D/sub/f"), "wronly,creat")
	waiter.must("open", "h", m.At("D/sub/devserver"), "rdwr,creat")
	got := waiter.Start("flockw", "h")
	m.awaitWaiters("D/sub", 1)
	owner.Kill()
	eventually(t, "what was made is put aside", func() bool { return len(m.quarantine()) == 1 })
	m.awaitFree("D")
	m.wantWoken(got, waiter)
	next.mustCommand(m, "acquire D")
	next.must("mkdir", m.At("D/sub"))
	next.must("put", m.At("D/sub/f"), "next", "creat")
	child.must("write", "f", "late")
	if b, _ := os.ReadFile(m.Back("D/sub/f")); string(b) != "next" {
		t.Errorf("D/sub/f has %q", b)
	}
}
