//go:build linux

package tests

import (
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestR7AttackNarrowedContent: what has come into a directory from elsewhere does not become
// its owner's when the lock on it takes the place of the one above (A12), also if the
// daemon is killed before or after that.
func TestR7AttackNarrowedContent(t *testing.T) {
	for name, kill := range map[string]struct{ before, after bool }{
		"": {}, "daemon killed before": {before: true}, "daemon killed after": {after: true},
	} {
		for _, policy := range []string{"keep", "destroy"} {
			t.Run(policy+" "+name, func(t *testing.T) {
				opts := []string{"--shared-name", "staged.timestamp", "--on-crash", policy}
				m := mountOver(t, opts...)
				owner, other := agent(t), agent(t)
				owner.must("mkdir", m.At("a"))
				owner.must("mkdir", m.At("a", "c"))
				other.must("put", m.At("a", "c", "staged.timestamp"), "theirs", "wronly,creat")
				if kill.before {
					m.restart(nil, opts...)
				}
				owner.must("creat", m.At("a", "c", "devserver"), "wronly,creat,excl")
				m.wantFree("a")
				if kill.after {
					m.restart(nil, opts...)
				}
				owner.mustCommand(m, "acquire a/c on-crash=destroy")
				owner.Kill()
				m.awaitFree("a/c")
				wantContent(t, m.At("a", "c", "staged.timestamp"), "theirs")
			})
		}
	}
	t.Run("lock directory", func(t *testing.T) {
		m := mount(t, "--on-crash", "destroy")
		openDir(t, m.Back("out"))
		openDir(t, m.Back("out", "l"))
		big := strings.Repeat("old ", 100) // larger than what a lock directory holds
		openFile(t, m.Back("out", "l", "f"), big)
		owner := agent(t)
		owner.must("mkdir", m.At("a"))
		owner.must("mkdir", m.At("a", "c"))
		owner.must("rename", m.At("out", "l"), m.At("a", "c", "devserver"))
		owner.Kill()
		m.awaitFree("a/c")
		wantContent(t, m.Back("a", "c", "devserver", "f"), big)
	})
}

func wantContent(t *testing.T, path, want string) {
	t.Helper()
	if b, err := os.ReadFile(path); string(b) != want {
		t.Errorf("%s: %q, %v, want %q", path, b, err, want)
	}
}

// TestR5AttackKilled: an owner that has changed something leaves its lock to nobody, also
// if the daemon is killed right after the first change.
func TestR5AttackKilled(t *testing.T) {
	m := mountOver(t)
	for name, change := range map[string]func(a *Agent, dir string){
		"symlink": func(a *Agent, dir string) { a.must("symlink", "nowhere", dir+"/s") },
		"unlink":  func(a *Agent, dir string) { a.must("unlink", dir+"/f") },
		"rename":  func(a *Agent, dir string) { a.must("rename", dir+"/f", dir+"/g") },
		"chmod":   func(a *Agent, dir string) { a.must("chmod", dir+"/f", "0600") },
	} {
		t.Run(name, func(t *testing.T) {
			m := m.on(t)
			openDir(t, m.At(name))
			openFile(t, m.At(name, "f"), "")
			if s := m.Ctl("release " + name); s != "ok" {
				t.Fatal(s)
			}
			owner := agent(t)
			owner.mustCommand(m, "acquire %s", name)
			change(owner, m.At(name))
			m.restart(nil)
			m.wantOwner(name, owner.Pid)
			owner.Exit(0)
			m.awaitFree(name)
		})
	}
}

// TestR5AttackKilledWriting: so it is if that change is still being written down when another
// one has been made, and the daemon is killed then: what has come into the directory by the
// other one is not its owner's for the next one either (R7).
func TestR5AttackKilledWriting(t *testing.T) {
	needInject(t)
	for name, c := range map[string]struct {
		change func(m *Mount) []string
		policy string // of the next daemon
		after  func(m *Mount, owner *Agent)
	}{
		"handed over": {func(m *Mount) []string { return []string{"symlink", "nowhere", m.At("D/s")} }, "keep", func(m *Mount, owner *Agent) {
			m.wantOwner("D", owner.Pid)
			owner.Exit(0)
			m.awaitFree("D")
		}},
		"destroyed": {func(m *Mount) []string { return []string{"link", m.At("out/f"), m.At("D/in")} }, "destroy", func(m *Mount, owner *Agent) {
			owner.Kill()
			m.awaitFree("D")
			wantContent(m.t, m.At("D/in"), "old")
		}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := staticDir(t)
			m := newMount(t, dir, dir)
			var slow atomic.Bool
			writing, goesOn := make(chan struct{}), make(chan struct{})
			defer close(goesOn)
			m.inject(&fault{call: unix.SYS_PWRITE64, until: func(a asked) <-chan struct{} {
				if !a.inJournal(0) || !slow.CompareAndSwap(true, false) {
					return nil
				}
				close(writing)
				return goesOn
			}})
			m.serve()
			m.healthy()
			openDir(t, m.At("out"))
			openFile(t, m.At("out/f"), "old")
			if s := m.Ctl("release out"); s != "ok" {
				t.Fatal(s)
			}
			owner := agent(t)
			owner.must("mkdir", m.At("D"))
			child := owner.Child()
			child.must("mkdir", m.At("D/sub"))
			child.must("chmod", m.At("D/sub"), "0755") // that is no change (R5)
			slow.Store(true)
			first := child.Start("symlink", "nowhere", m.At("D/sub/first"))
			<-writing
			second := owner.Start(c.change(m)...)
			time.Sleep(100 * time.Millisecond) // or it is answered only when it is written down
			m.kill()
			first()
			made := second() == "ok"
			m.start([]string{"--on-crash", c.policy})
			m.awaitReady()
			if made {
				c.after(m, owner)
			}
		})
	}
}

// TestR7AttackOtherPolicy: the next daemon may have another policy. What came into a
// directory while the content was to be kept, and so nobody noted it, is not the owner's.
func TestR7AttackOtherPolicy(t *testing.T) {
	m := mountOver(t)
	openDir(t, m.At("out"))
	for _, name := range []string{"1", "2"} {
		openFile(t, m.At("out", name), "old")
	}
	if s := m.Ctl("release out"); s != "ok" {
		t.Fatal(s)
	}
	a, b := agent(t), agent(t)
	a.must("mkdir", m.At("A"))
	a.must("rename", m.At("out", "1"), m.At("A", "f"))
	m.restart(nil, "--on-crash", "quarantine")
	b.must("mkdir", m.At("B"))
	b.must("put", m.At("B", "own"), "1", "wronly,creat")
	m.restart(nil) // it is b's second change that nobody notes
	b.must("rename", m.At("out", "2"), m.At("B", "f"))
	m.restart(nil, "--on-crash", "destroy")
	a.Kill()
	b.Kill()
	m.awaitFree("A")
	m.awaitFree("B")
	wantContent(t, m.At("A", "f"), "old")
	wantContent(t, m.At("B", "f"), "old")
}

// TestR7AttackLockFile: what has come as a lock file, and is called otherwise later, was
// not made by the owner, whenever that one says what is to become of what it has made.
func TestR7AttackLockFile(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("out"))
	for _, how := range []string{"rename", "link"} {
		t.Run(how, func(t *testing.T) {
			m := m.on(t)
			openFile(t, m.Back("out", how), "old")
			a := agent(t)
			a.must("mkdir", m.At(how))
			a.must("mkdir", m.At(how, "x"))
			a.must(how, m.At("out", how), m.At(how, "devserver"))
			a.must("rename", m.At(how, "devserver"), m.At(how, "x"), "exchange")
			a.mustCommand(m, "acquire %s on-crash=destroy", how)
			a.Kill()
			m.awaitFree(how)
			wantContent(t, m.Back(how, "x"), "old")
		})
	}
}

// killClearing kills the daemon when it has cleared away so much of a directory that there are
// but so many entries, and waits until the next one is through with it.
func (m *Mount) killClearing(dir string, most int, opts ...string) {
	m.t.Helper()
	for len(readNames(m.t, m.At(dir))) > most {
	}
	m.kill()
	m.start(opts)
	m.awaitReady()
	m.t.Logf("%d entries were left", len(readNames(m.t, m.At(dir))))
	m.awaitFree(dir)
}

// TestR7AttackGoesOn: what a killed daemon was clearing away the next one goes on with,
// also if it was a lock file that kept the lock, which is gone already.
func TestR7AttackGoesOn(t *testing.T) {
	for name, lock := range map[string]func(a *Agent, dir string){
		"mkdir":     func(*Agent, string) {},
		"lock file": func(a *Agent, dir string) { a.must("creat", dir+"/devserver", "wronly,creat,excl") },
		"flock":     func(a *Agent, dir string) { a.must("open", "l", dir+"/devserver", "rdwr,creat"); a.must("flock", "l") },
	} {
		t.Run(name, func(t *testing.T) {
			m := mountOver(t, "--on-crash", "destroy")
			openDir(t, m.At("out"))
			openFile(t, m.At("out", "f"), "old")
			if s := m.Ctl("release out"); s != "ok" {
				t.Fatal(s)
			}
			a := agent(t)
			a.must("mkdir", m.At("D"))
			lock(a, m.At("D"))
			a.must("rename", m.At("out", "f"), m.At("D", "f"))
			const files = 2000
			if out := a.Get("sh", fmt.Sprintf("cd %s && seq -f %%05g %d | xargs touch", m.At("D"), files)); !strings.HasPrefix(out, "0") {
				t.Fatal(out)
			}
			a.Kill()
			m.killClearing("D", files-100, "--on-crash", "destroy")
			wantTree(t, m.At("D"), []string{"f=old"})
		})
	}
}

// TestR7AttackHalfCleared: it goes on, too, where the directory was there before, and nothing
// of it is lost or moved twice.
func TestR7AttackHalfCleared(t *testing.T) {
	const files = 1500
	for policy, acquire := range map[string]func(m *Mount, a *Agent) (end func()){
		"destroy": func(m *Mount, a *Agent) func() {
			a.must("creat", m.At("D", "devserver"), "wronly,creat,excl")
			return a.Kill
		},
		"quarantine": func(m *Mount, a *Agent) func() {
			a.mustCommand(m, "acquire D client=x ttl=1h")
			a.mustCommand(m, "join D client=x")
			return func() { a.mustCommand(m, "renew D client=x ttl=10ms") }
		},
	} {
		t.Run(policy, func(t *testing.T) {
			m := mountOver(t, "--on-crash", policy)
			openDir(t, m.At("D"))
			openDir(t, m.At("D", "sub"))
			openFile(t, m.At("D", "old"), "1")
			openFile(t, m.At("D", "sub", "old"), "1")
			if s := m.Ctl("release D"); s != "ok" {
				t.Fatal(s)
			}
			a := agent(t)
			end := acquire(m, a)
			if out := a.Get("sh", fmt.Sprintf("cd %s && seq -f %%05g %d | xargs touch && mkdir dir && touch dir/f sub/f", m.At("D"), files)); !strings.HasPrefix(out, "0") {
				t.Fatal(out)
			}
			end()
			m.killClearing("D", files-100, "--on-crash", policy)
			wantTree(t, m.At("D"), []string{"old=1", "sub/", "sub/old=1"})
			aside := m.quarantine()
			if policy == "destroy" && len(aside) > 0 || policy == "quarantine" && len(aside) == 0 {
				t.Errorf("%d in quarantine", len(aside))
			}
			for _, q := range aside {
				if r := run(t, stagefsBin(), "quarantine", "--restore", q.ID, m.Path); r.Status != 0 {
					t.Errorf("restore: %v", r)
				}
			}
			if n := len(readNames(t, m.At("D"))); len(aside) > 0 && n != files+3 {
				t.Errorf("%d entries are back, want %d", n, files+3)
			}
			m.unmount()
			m.endsWithin(patience)
			if _, err := os.Lstat(m.Path + "/.stagefs/made"); !os.IsNotExist(err) {
				t.Errorf("what was noted of it is still there: %v", err)
			}
		})
	}
}

// TestR7AttackSecondThought: what came while its content was to be kept was not made by
// an owner that wants it destroyed later, also if it had said that it is to be kept.
func TestR7AttackSecondThought(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("out"))
	openFile(t, m.Back("out", "f"), "old")
	a := agent(t)
	a.must("mkdir", m.At("D"))
	a.mustCommand(m, "acquire D on-crash=keep")
	a.must("rename", m.At("out", "f"), m.At("D", "f"))
	a.mustCommand(m, "acquire D on-crash=destroy")
	a.Kill()
	m.awaitFree("D")
	wantContent(t, m.Back("D", "f"), "old")
}

// TestR7AttackRestoredUnder: what was made under a lock, was put aside when a child crashed
// that had a lock beneath, and then was put back, does not go with the owner's content.
func TestR7AttackRestoredUnder(t *testing.T) {
	m := mount(t, "--on-crash", "quarantine")
	openDir(t, m.Back("D"))
	openDir(t, m.Back("D", "sub"))
	a := agent(t)
	a.mustCommand(m, "acquire D on-crash=destroy")
	child := a.Child("setsid")
	child.mustCommand(m, "acquire D/sub")
	child.must("put", m.At("D", "sub", "f"), "artifact", "wronly,creat")
	child.Kill()
	eventually(t, "it is put aside", func() bool { return len(m.quarantine()) == 1 })
	eventually(t, "it is put back", func() bool {
		return a.Try("put", m.control("ctl"), "restore D/sub id="+m.quarantine()[0].ID, "wronly") == "ok"
	})
	wantContent(t, m.Back("D", "sub", "f"), "artifact")
	a.Kill()
	m.awaitFree("D")
	wantContent(t, m.Back("D", "sub", "f"), "artifact")
}
