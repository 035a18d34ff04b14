//go:build linux

package tests

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"
)

// TestA12AttackMeanwhile attacks A12 and A2: what an owner's other process makes in
// the chain, while that is narrowed, is covered by one lock or another.
func TestA12AttackMeanwhile(t *testing.T) {
	m := mount(t)
	owner := agent(t)
	child := owner.Child()
	rounds := 2000
	if testing.Short() {
		rounds = 200
	}
	narrowed, last := 0, []string{"all"}
	for i := range rounds {
		top := fmt.Sprint("a", i)
		owner.must(append(last, "mkdir", m.At(top), ";", "mkdir", m.At(top, "b"), ";", "mkdir", m.At(top, "b/c"))...)
		made := child.Start("mkdir", m.At(top+"/x"))
		locked := owner.Start("creat", m.At(top+"/b/c/devserver"), "wronly,creat,excl")
		if a, b := made(), locked(); a != "ok" || b != "ok" {
			t.Fatalf("round %d: mkdir %s, lock file %s", i, a, b)
		}
		got, by := owner.call([]string{"getxattr", m.At(top + "/x"), "user.stagefs.owner"})
		if got != "ok" {
			t.Fatalf("round %d: what was made beneath the lock has none: %s", i, got)
		}
		if strings.HasPrefix(by, fmt.Sprint(child.Pid, " ")) {
			narrowed++
		}
		last = []string{"all", "unlink", m.At(top + "/b/c/devserver"), ";"}
	}
	t.Logf("narrowed before in %d of %d rounds", narrowed, rounds)
}

// TestR7AttackNarrowed attacks R7 and R5: a lock file's name elsewhere makes no artifact
// one: who moves such a thing into his directory has changed that, and it is not destroyed
// with what he made, whichever lock he goes on with.
func TestR7AttackNarrowed(t *testing.T) {
	for name, test := range map[string]struct {
		opts []string
		lock []string
	}{
		"narrowed":                  {opts: []string{"--on-crash", "destroy"}, lock: []string{"creat", "a/x/devserver", "wronly,creat,excl"}},
		"by a command that says so": {lock: []string{"ctl", ".stagefs/ctl", "acquire a/x on-crash=destroy"}},
		"replaced":                  {lock: []string{"ctl", ".stagefs/ctl", "acquire a on-crash=destroy"}},
	} {
		t.Run(name, func(t *testing.T) {
			m := mount(t, test.opts...)
			openDir(t, m.Back("E"))
			openDir(t, m.Back("E/devserver"))
			mustDo(t, os.WriteFile(m.Back("E/devserver/artifact"), []byte("old"), 0o666))
			p := agent(t)
			p.must("mkdir", m.At("a"))
			p.must("rename", m.At("E/devserver"), m.At("a/x"))
			test.lock[1] = m.At(test.lock[1])
			p.must(test.lock...)
			p.Kill()
			m.awaitFree("a")
			m.awaitFree("a/x")
			if b, err := os.ReadFile(m.Back("a/x/artifact")); string(b) != "old" {
				t.Errorf("what was there before the lock: %q, %v", b, err)
			}
		})
	}
	for name, busy := range map[string]bool{"as a lock directory": false, "as a lock directory, beside a lock with a policy": true} {
		t.Run(name, func(t *testing.T) {
			m := mount(t)
			openDir(t, m.Back("E"))
			artifact := bytes.Repeat([]byte("old"), 1<<20) // a locker's files are small
			for _, name := range []string{"build", "devserver", "other"} {
				openDir(t, m.Back("E", name))
				mustDo(t, os.WriteFile(m.Back("E", name, "artifact"), artifact, 0o666))
			}
			if busy {
				openDir(t, m.Back("F"))
				agent(t).mustCommand(m, "acquire F on-crash=destroy")
			}
			p := agent(t)
			for _, dir := range []string{"a", "b", "c"} {
				p.must("mkdir", m.At(dir))
			}
			p.must("rename", m.At("E/build"), m.At("a/devserver"))
			p.must("rename", m.At("E/devserver"), m.At("b/devserver"))
			p.must("mkdir", m.At("c/devserver"))
			p.must("rename", m.At("c/devserver"), m.At("E/other"), "exchange")
			for _, dir := range []string{"a", "b", "c"} {
				p.mustCommand(m, "acquire %s on-crash=destroy", dir)
			}
			p.Kill()
			for _, dir := range []string{"a", "b", "c"} {
				m.awaitFree(dir)
				if b, err := os.ReadFile(m.Back(dir, "devserver/artifact")); !bytes.Equal(b, artifact) {
					t.Errorf("%s: what was there before the lock: %d bytes, %v", dir, len(b), err)
				}
			}
		})
	}
	t.Run("handed over", func(t *testing.T) {
		m := mount(t)
		openDir(t, m.Back("E"))
		openDir(t, m.Back("D"))
		for _, f := range []string{"E/devserver", "D/tmp"} {
			mustDo(t, os.WriteFile(m.Back(f), []byte("old"), 0o666))
		}
		openDir(t, m.Back("D/sub"))
		a := agent(t)
		b, c := a.Child(), a.Child()
		b.must("mkdir", m.At("a"))
		b.must("rename", m.At("E/devserver"), m.At("a/x"))
		b.Exit(0)
		m.awaitFree("a")
		// What becomes the lock file in the same directory, or above it, is none.
		c.must("rename", m.At("D/tmp"), m.At("D/sub/tmp"))
		c.must("rename", m.At("D/sub/tmp"), m.At("D/devserver"))
		c.Exit(0)
		eventually(t, "the parent has it", func() bool { return m.Locks()["D"].Pid == a.Pid })
	})
}
