//go:build linux

package tests

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
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

// TestR7AttackEnding: the daemon carries the death of an owner out to the end, of many locks
// with content in the last one, also where the mount goes meanwhile.
func TestR7AttackEnding(t *testing.T) {
	m := mount(t)
	a := agent(t)
	const locks = 1000
	for i := range locks {
		openDir(t, m.Back("K"+itoa(i)))
		a.must("creat", m.At("K"+itoa(i), "devserver"), "wronly,creat,excl")
	}
	openDir(t, m.Back("D"))
	openFile(t, m.Back("D/old"), "")
	a.mustCommand(m, "acquire D on-crash=destroy")
	if got := a.Get("sh", "cd "+m.At("D")+" && for i in $(seq 2000); do : >new$i; done"); got != "0 " {
		t.Fatal(got)
	}
	a.Kill()
	eventually(t, "the first lock ends", func() bool { return !exists(m.Back("K0/devserver")) })
	mustDo(t, unix.Unmount(m.Path, 0))
	<-m.gone
	if left := tree(t, m.Back("D")); len(left) != 1 {
		t.Errorf("%d files are left in D, of what was to be destroyed\n%s", len(left)-1, m.Log())
	}
}
