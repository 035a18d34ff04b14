//go:build linux

package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// stopAt has the next daemon stop for good before the nth call, from arm on, by which it
// changes something in the backing or in its journal.
func (m *Mount) stopAt(n int) (arm func(), stopped <-chan struct{}) {
	var mu sync.Mutex
	armed, calls := false, 0
	at, forever := make(chan struct{}), make(chan struct{})
	var all []*fault
	for _, call := range []int{unix.SYS_UNLINKAT, unix.SYS_RENAMEAT2, unix.SYS_MKDIRAT, unix.SYS_PWRITE64} {
		all = append(all, &fault{call: call, until: func(a asked) <-chan struct{} {
			mu.Lock()
			defer mu.Unlock()
			if !armed || call == unix.SYS_PWRITE64 && !a.inJournal(0) {
				return nil
			}
			if calls++; calls < n {
				return nil
			}
			if calls == n {
				close(at)
			}
			return forever
		}})
	}
	m.inject(all...)
	m.t.Cleanup(func() { close(forever) })
	return func() { mu.Lock(); armed = true; mu.Unlock() }, at
}

// inJournal reports whether a descriptor is one of a journal.
func (a asked) inJournal(arg int) bool {
	to, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", a.pid, a.args[arg]))
	return strings.Contains(to, ".journal.")
}

// TestR6AttackMidway: a daemon that is killed before any of the steps by which it ends a
// lock, and clears away what its owner has made, leaves the lock in force or gone with its
// lock file. What was there before stays, and what has been made is there or not, but for
// what is swept from a directory that was there. A living owner that has its lock still has
// not crashed (R7): it may go on, and nothing is lost when it exits.
func TestR6AttackMidway(t *testing.T) {
	needInject(t)
	command := func(line string) func(m *Mount, a *Agent) func() string {
		return func(m *Mount, a *Agent) func() string { return a.Start("ctl", m.control("ctl"), line) }
	}
	dies := func(m *Mount, a *Agent) func() string {
		a.Kill()
		return func() string {
			for { // until nothing is locked any more, or the daemon is killed
				if b, err := os.ReadFile(m.control("locks.json")); err != nil || !strings.Contains(string(b), `"token"`) {
					return "ok"
				}
				time.Sleep(time.Millisecond)
			}
		}
	}
	old := []string{"old/", "old/deep=1"}
	for _, c := range []struct {
		how, policy string
		fresh       bool // the directory is made under the lock
		end         func(m *Mount, a *Agent) func() string
	}{
		{"break", "destroy", true, func(m *Mount, _ *Agent) func() string { return command("break D enough")(m, agent(m.t)) }},
		{"failed", "destroy", true, command("release D failed")},
		{"dies", "quarantine", true, dies},
		{"dies", "destroy", false, dies},
	} {
		t.Run(fmt.Sprintf("%s, %s, fresh %v", c.how, c.policy, c.fresh), func(t *testing.T) {
			for n := range someSteps(2) {
				reached := true
				m := newMount(t, staticDir(t), filepath.Join(tempDir(t), "mnt"))
				arm, stopped := m.stopAt(n)
				m.serve("--on-crash", c.policy)
				m.healthy()
				a := agent(t)
				if c.fresh {
					a.must("mkdir", m.At("D"))
				} else {
					openDir(t, m.Back("D/old"))
					mustDo(t, os.WriteFile(m.Back("D/old/deep"), []byte("1"), 0o666))
				}
				a.must("creat", m.At("D/devserver"), "wronly,creat,excl")
				stageIn(a, m.At("D"))
				token := m.Locks()["D"].Token
				arm()
				ended := inBackground(c.end(m, a))
				select {
				case <-stopped:
				case s := <-ended:
					if reached = false; s != "ok" {
						t.Errorf("%s = %s", c.how, s)
					}
				}
				m.kill()
				m.start([]string{"--on-crash", c.policy})
				m.awaitReady()
				if reached {
					<-ended
				}
				if c.how == "dies" {
					m.awaitFree("D")
				}
				row, held := m.Locks()["D"]
				if held && row.Token != token {
					t.Errorf("call %d: the lock has token %d, want %d", n, row.Token, token)
				}
				if !held && exists(m.Back("D/devserver")) {
					t.Errorf("call %d: the lock file is left", n)
				}
				if held {
					a.must("put", m.At("D/later"), "1", "wronly,creat")
					a.Exit(0)
					m.awaitFree("D")
					wantContent(t, m.Back("D/later"), "1")
				}
				if exists(m.Back("D")) {
					there := slices.DeleteFunc(tree(t, m.Back("D")), func(line string) bool { return line == "later=1" })
					if c.fresh && !slices.Equal(there, freshMade) {
						t.Errorf("call %d: in D: %q, want %q", n, there, freshMade)
					}
					agent(t).must("creat", m.At("D/devserver"), "wronly,creat,excl")
				}
				if !c.fresh {
					for _, line := range old {
						if !slices.Contains(tree(t, m.Back("D")), line) {
							t.Errorf("call %d: %s is gone", n, line)
						}
					}
				}
				eventually(t, "the trash is empty", func() bool {
					left, _ := filepath.Glob(m.Back(".stagefs/trash/*"))
					return len(left) == 0
				})
				if !reached || t.Failed() {
					break
				}
			}
		})
	}
}

// TestR6MidwayScope: so has a scope not crashed whose release was cut short, if another
// process stands for it by then (H3).
func TestR6MidwayScope(t *testing.T) {
	needInject(t)
	m := newMount(t, staticDir(t), filepath.Join(tempDir(t), "mnt"))
	moving, killed := make(chan struct{}), make(chan struct{})
	defer close(killed)
	m.inject(&fault{call: unix.SYS_RENAMEAT2, until: func(a asked) <-chan struct{} {
		if a.path(1) != "D" {
			return nil
		}
		close(moving)
		return killed
	}})
	opts := []string{"--owner", "session", "--on-crash", "destroy"}
	m.serve(opts...)
	m.healthy()
	leader := agent(t).Child("setsid")
	other := leader.Child()
	leader.must("mkdir", m.At("D"))
	released := inBackground(leader.Start("ctl", m.control("ctl"), "release D failed"))
	<-moving
	m.restart(func() {
		<-released
		leader.Kill()
	}, opts...)
	other.must("put", m.At("D/later"), "1", "creat")
	other.Exit(0)
	m.awaitFree("D")
	wantContent(t, m.Back("D/later"), "1")
}
