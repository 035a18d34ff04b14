//go:build linux

package tests

import (
	"os"
	"testing"
	"time"
)

// TestR6AttackRetaken: an owner that takes its lock again while somebody breaks it has
// one afterwards, or what it made does not stand in the next one's way: no lock file and
// no lock on a descriptor is left that locks nothing. The more lock files there are to be
// removed, the more time it has.
func TestR6AttackRetaken(t *testing.T) {
	m := mount(t, "--lock-name", "devserver", "--lock-name", "more*")
	for name, again := range map[string][]string{
		"create": {"until", "creat", m.At("create/devserver"), "wronly,creat,excl"},
		"rename": {"until", "rename", m.At("rename/file"), m.At("rename/devserver"), "noreplace"},
		"flock":  {"flock", "l"},
		"fcntl":  {"setlk", "l", "wr"},
	} {
		t.Run(name, func(t *testing.T) {
			m := m.on(t)
			openDir(t, m.Back(name))
			lock := func(a *Agent) string {
				if name == "create" || name == "rename" {
					return a.Try("creat", m.At(name, "devserver"), "wronly,creat,excl")
				}
				a.must("open", "l", m.At(name, "devserver"), "rdwr,creat")
				return a.Try(again...)
			}
			for i := range 12 {
				owner, next := agent(t), agent(t)
				if got := lock(owner); got != "ok" {
					t.Fatalf("to lock it = %s", got)
				}
				for j := range 20 {
					owner.must("creat", m.At(name, "more"+itoa(j)), "wronly,creat,excl")
				}
				openFile(t, m.Back(name, "file"), "")
				broken := make(chan string)
				go func() { broken <- m.Ctl("break " + name + " test") }()
				time.Sleep(time.Duration(i) * 300 * time.Microsecond)
				got := owner.Try(again...)
				if s := <-broken; s != "ok" {
					t.Fatalf("break = %s", s)
				}
				if _, locked := m.Locks()[name]; !locked {
					if s := lock(next); s != "ok" {
						t.Errorf("try %d: nobody holds it, but to lock it = %s; its owner heard %s during the break", i, s, got)
					}
				}
				owner.Kill()
				next.Kill()
				m.awaitFree(name)
				os.Remove(m.Back(name, "devserver"))
			}
		})
	}
}
