//go:build linux

package tests

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestFaultStateDir: a daemon is replaced although its state directory cannot be
// reached by its path any more, or not be trusted: all goes on, is kept in the
// same directory, and a daemon that finds it there has it.
func TestFaultStateDir(t *testing.T) {
	for _, test := range []struct {
		name      string
		do, undo  func(t *testing.T, m *Mount)
		tell, may bool // a warning
	}{
		{
			name: "writable",
			do:   func(t *testing.T, m *Mount) { mustDo(t, os.Chmod(m.State, 0o770)) },
			undo: func(t *testing.T, m *Mount) { mustDo(t, os.Chmod(m.State, 0o700)) },
			tell: true,
		},
		{
			name: "covered",
			do: func(t *testing.T, m *Mount) {
				mustDo(t, unix.Mount("tmpfs", m.State, "tmpfs", 0, "mode=700"))
				t.Cleanup(func() { unix.Unmount(m.State, unix.MNT_DETACH) })
			},
			undo: func(t *testing.T, m *Mount) { mustDo(t, unix.Unmount(m.State, unix.MNT_DETACH)) },
		},
		{
			name: "renamed",
			do:   func(t *testing.T, m *Mount) { mustDo(t, os.Rename(m.State, m.State+".other")) },
			undo: func(t *testing.T, m *Mount) { m.State += ".other" },
		},
		{
			name: "removed",
			do:   func(t *testing.T, m *Mount) { mustDo(t, os.RemoveAll(m.State)) },
			undo: func(*testing.T, *Mount) {},
			may:  true,
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			m := mountOver(t)
			a, b := agent(t), agent(t)
			a.must("mkdir", m.At("D"))
			a.must("open", "f", m.At("D", "file"), "rdwr,creat")
			b.must("mkdir", m.At("E"))
			before := m.Locks()
			test.do(t, m)
			for range 2 {
				m.replace()
			}
			if got := m.Locks(); len(got) != 2 || got["D"].Token != before["D"].Token || got["E"].Token != before["E"].Token {
				t.Fatalf("locks %v, want %v", got, before)
			}
			a.must("write", "f", "x")
			stranger(t).want("EBUSY", "creat", m.At("D", "y"), "wronly,creat")
			b.must("rmdir", m.At("E"))
			b.must("mkdir", m.At("F"))
			token := m.Locks()["F"].Token
			if last := before["E"].Token; token <= last {
				t.Errorf("token %d after %d", token, last)
			}
			told := func() bool { return strings.Contains(m.Log(), "warning: ") }
			if test.may {
				// it is made anew in a moment
			} else if test.tell {
				eventually(t, "a warning", told)
			} else if told() {
				t.Errorf("a warning:\n%s", shorten(m.Log()))
			}
			eventually(t, "it is kept", m.stateWritable)
			m.restart(func() { test.undo(t, m) })
			if got := m.Locks(); len(got) != 2 || got["D"].Token != before["D"].Token || got["F"].Token != token {
				t.Errorf("locks after a restart %v, want D and F", got)
			}
		})
	}
}

// TestFaultStateRemoved: files of the state that somebody removes, changes or moves away,
// and the state directory itself, are made anew, and all locks outlive the daemon.
func TestFaultStateRemoved(t *testing.T) {
	each := func(pattern string, do func(name string) error) func(t *testing.T, m *Mount) {
		return func(t *testing.T, m *Mount) {
			t.Helper()
			names, err := filepath.Glob(filepath.Join(m.State, pattern))
			if err != nil || len(names) == 0 {
				t.Fatalf("no files %s: %v", pattern, err)
			}
			for _, name := range names {
				mustDo(t, do(name))
			}
		}
	}
	move := func(name string) error { return os.Rename(name, filepath.Join(t.TempDir(), "file")) }
	for name, damage := range map[string]func(t *testing.T, m *Mount){
		"all":              each("*", os.Remove),
		"lock":             each("*.lock", os.Remove),
		"tokens":           each("*.tokens", os.Remove),
		"snapshot":         each("*.locks.*", os.Remove),
		"snapshot cut off": each("*.locks.*", func(name string) error { return os.Truncate(name, 3) }),
		"journal":          each("*.journal.*", os.Remove),
		"journal cut off":  each("*.journal.*", func(name string) error { return os.Truncate(name, 0) }),
		"journal moved":    each("*.journal.*", move),
		"journal appended": each("*.journal.*", func(name string) error { return appendTo(name, "x\n") }),
		"directory":        func(t *testing.T, m *Mount) { mustDo(t, os.RemoveAll(m.State)) },
	} {
		t.Run(name, func(t *testing.T) {
			m := mountOver(t)
			a := agent(t)
			a.must("mkdir", m.At("D"))
			damage(t, m)
			if name == "all" || name == "directory" {
				eventually(t, "a word of it", func() bool { return strings.Contains(m.Log(), "files of the state were removed") })
			}
			eventually(t, "new files", func() bool {
				for _, pattern := range []string{"*.lock", "*.place", "*.tokens", "*.locks.*[0-9]", "*.journal.*"} {
					if names, _ := filepath.Glob(filepath.Join(m.State, pattern)); len(names) == 0 {
						return false
					}
				}
				return m.stateWritable()
			})
			if strings.Contains(name, " ") { // the files were there all the time
				time.Sleep(2 * time.Second)
			}
			a.must("mkdir", m.At("E"))
			before := m.Locks()
			m.restart(nil)
			m.wantStateOf(before)
			a.must("mkdir", m.At("F"))
			if token, last := m.Locks()["F"].Token, before["E"].Token; token <= last {
				t.Errorf("token %d after %d", token, last)
			}
		})
		t.Run(name+" just before its end", func(t *testing.T) {
			m := mountOver(t)
			a := agent(t)
			a.must("mkdir", m.At("D"))
			a.must("mkdir", m.At("E"))
			before := m.Locks()
			damage(t, m)
			mustDo(t, m.cmd.Process.Signal(unix.SIGTERM))
			<-m.gone
			m.start(nil)
			m.awaitReady()
			m.wantStateOf(before)
			a.must("mkdir", m.At("F"))
			if token, last := m.Locks()["F"].Token, before["E"].Token; token <= last {
				t.Errorf("token %d after %d", token, last)
			}
		})
	}
	t.Run("directory before the first lock", func(t *testing.T) {
		m := mountOver(t)
		mustDo(t, os.RemoveAll(m.State))
		a := agent(t)
		a.must("mkdir", m.At("D"))
		last := m.Locks()["D"].Token
		m.restart(nil)
		a.must("mkdir", m.At("E"))
		if token := m.Locks()["E"].Token; token <= last {
			t.Errorf("token %d after %d", token, last)
		}
	})
	for how, clear := range map[string]bool{"an older state over it": false, "an older state in its place": true} {
		t.Run(how, func(t *testing.T) {
			m := mountOver(t)
			backup := filepath.Join(t.TempDir(), "backup")
			mustDo(t, exec.Command("cp", "-a", m.State, backup).Run())
			a := agent(t)
			a.must("mkdir", m.At("D"))
			a.must("mkdir", m.At("E"))
			before := m.Locks()
			a.must("rmdir", m.At("E"))
			if clear {
				mustDo(t, os.RemoveAll(m.State))
			}
			mustDo(t, exec.Command("cp", "-aT", "--remove-destination", backup, m.State).Run())
			time.Sleep(2 * time.Second)
			m.restart(nil)
			a.must("mkdir", m.At("E"))
			got := m.Locks()
			if got["D"].Token != before["D"].Token {
				t.Errorf("locks after a restart %v, want D as in %v", got, before)
			}
			if token, last := got["E"].Token, before["E"].Token; token <= last {
				t.Errorf("token %d after %d", token, last)
			}
		})
	}
	t.Run("another in its place", func(t *testing.T) {
		m := mountOver(t)
		a := agent(t)
		a.must("mkdir", m.At("D"))
		mustDo(t, os.RemoveAll(m.State))
		mustDo(t, os.Mkdir(m.State, 0o700))
		mustDo(t, os.Chmod(m.State, 0o777))
		eventually(t, "the metric", func() bool { return !m.stateWritable() })
		m.wantLog("the state directory was removed")
		a.must("mkdir", m.At("E"))
		before := m.Locks()
		mustDo(t, os.Chmod(m.State, 0o700))
		eventually(t, "the metric", m.stateWritable)
		m.restart(nil)
		m.wantStateOf(before)
	})
}

func appendTo(name, text string) error {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// wantStateOf checks that D and E are locked as before.
func (m *Mount) wantStateOf(before map[string]lockRow) {
	m.t.Helper()
	if got := m.Locks(); len(got) != 2 || got["D"].Token != before["D"].Token || got["E"].Token != before["E"].Token {
		m.t.Errorf("locks after a restart %v, want %v", got, before)
	}
}

// TestFaultStateMissing: files that are missing when the daemon starts are told of.
func TestFaultStateMissing(t *testing.T) {
	for _, pattern := range []string{"*.locks.*", "*.journal.*", "*.*.*[0-9]"} {
		t.Run(pattern, func(t *testing.T) {
			m := mountOver(t)
			a := agent(t)
			a.must("mkdir", m.At("D"))
			m.restart(func() { // has a generation begun that has D in its snapshot
				names, _ := filepath.Glob(filepath.Join(m.State, "*.journal.*"))
				mustDo(t, appendTo(names[0], "x"))
			})
			eventually(t, "a snapshot", func() bool {
				names, _ := filepath.Glob(filepath.Join(m.State, "*.locks.2"))
				return len(names) == 1
			})
			last := m.Locks()["D"].Token
			m.restart(func() {
				names, _ := filepath.Glob(filepath.Join(m.State, pattern))
				if len(names) == 0 {
					t.Fatal("no file")
				}
				for _, name := range names {
					mustDo(t, os.Remove(name))
				}
			})
			m.wantLog("is missing; so may be locks")
			a.must("mkdir", m.At("E"))
			if token := m.Locks()["E"].Token; token <= last {
				t.Errorf("token %d after %d", token, last)
			}
		})
	}
	t.Run("after an unmount", func(t *testing.T) {
		m := mountOver(t)
		a := agent(t)
		a.must("mkdir", m.At("D"))
		last := m.Locks()["D"].Token
		a.must("rmdir", m.At("D"))
		m.stop()
		for _, pattern := range []string{"*.lock", "*.tokens*"} {
			names, _ := filepath.Glob(filepath.Join(m.State, pattern))
			for _, name := range names {
				mustDo(t, os.Remove(name))
			}
		}
		m.start(nil)
		m.awaitReady()
		m.wantLog(".tokens is missing; tokens go on above")
		a.must("mkdir", m.At("D"))
		if token := m.Locks()["D"].Token; token <= last {
			t.Errorf("token %d after %d", token, last)
		}
	})
}

// lockState makes the state directory immutable until mend is called.
func (m *Mount) lockState() (mend func()) {
	if out, err := exec.Command("chattr", "+i", m.State).CombinedOutput(); err != nil {
		m.t.Skipf("no directory can be made immutable here: %s", out)
	}
	mend = func() { _ = exec.Command("chattr", "-i", m.State).Run() }
	m.t.Cleanup(mend)
	return mend
}

// TestFaultStateTokensObserved: who would get no lock is not kept from working where it is
// only observed.
func TestFaultStateTokensObserved(t *testing.T) {
	m := mountOver(t, "--enforce=observe")
	m.lockState()
	a := agent(t)
	a.must("mkdir", m.At("D"))
	a.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	a.must("unlink", m.At("D/devserver"))
	a.must("open", "1", m.At("D/devserver"), "rdwr,creat")
	a.must("flock", "1", "ex", "nb")
	a.must("creat", m.At("D/f"), "wronly,creat")
	m.wantStatus(0, "", "run", m.At("D"), "true")
	if n := len(m.Listing().Locks); n != 0 {
		t.Errorf("%d locks are there", n)
	}
	if !slices.ContainsFunc(m.Denials(), func(d denial) bool { return d.Errno == "ENOLCK" && d.Path == "D" }) {
		t.Errorf("no refusal with ENOLCK is shown, but %v", m.Denials())
	}
}

// TestFaultStateTokens: where no more tokens can be reserved, nobody gets a lock, and the
// log says why.
func TestFaultStateTokens(t *testing.T) {
	m := mountOver(t)
	names, err := filepath.Glob(filepath.Join(m.State, "*.tokens*"))
	mustDo(t, err)
	mend := m.lockState()
	a := agent(t)
	if got := a.Try("mkdir", m.At("D")); got != "ENOLCK" {
		t.Errorf("mkdir = %s, want ENOLCK; %q", got, names)
	}
	m.wantLog("no lock can be had until the state can be written again", "operation not permitted")
	a.want("ok", "stat", m.Path)
	if m.stateWritable() {
		t.Error("the state counts as writable though no lock can be had")
	}
	mend()
	a.must("mkdir", m.At("D"))
	m.wantOwner("D", a.Pid)
	if !m.stateWritable() {
		t.Error("the state does not count as writable though locks can be had")
	}
}
