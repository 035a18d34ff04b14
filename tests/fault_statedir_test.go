//go:build linux

package tests

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestFaultStateDir: a daemon is replaced although its state directory cannot be
// reached by its path any more, or not be trusted: all goes on, is kept in the
// same directory, and a daemon that finds it there has it.
func TestFaultStateDir(t *testing.T) {
	for _, test := range []struct {
		name       string
		do, undo   func(t *testing.T, m *Mount)
		lost, tell bool
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
			lost: true, tell: true,
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
			if test.tell {
				eventually(t, "a warning", told)
			} else if told() {
				t.Errorf("a warning:\n%s", shorten(m.Log()))
			}
			if test.lost {
				return
			}
			m.restart(func() { test.undo(t, m) })
			if got := m.Locks(); len(got) != 2 || got["D"].Token != before["D"].Token || got["F"].Token != token {
				t.Errorf("locks after a restart %v, want D and F", got)
			}
		})
	}
}

// TestFaultStateRemoved: files of the state that somebody removes are made anew, and
// all locks outlive the daemon; if the whole directory is gone, the log and the control
// directory say so, and so does the next daemon, whose tokens are higher all the same.
func TestFaultStateRemoved(t *testing.T) {
	for _, pattern := range []string{"*", "*.lock", "*.tokens", "*.locks.*", "*.journal.*"} {
		t.Run(pattern, func(t *testing.T) {
			m := mountOver(t)
			a := agent(t)
			a.must("mkdir", m.At("D"))
			names, err := filepath.Glob(filepath.Join(m.State, pattern))
			if err != nil || len(names) == 0 {
				t.Fatalf("no files %s: %v", pattern, err)
			}
			for _, name := range names {
				mustDo(t, os.Remove(name))
			}
			if pattern == "*" {
				eventually(t, "a word of it", func() bool { return strings.Contains(m.Log(), "files of the state were removed") })
			}
			eventually(t, "new files", func() bool {
				for _, pattern := range []string{"*.lock", "*.tokens", "*.locks.*[0-9]", "*.journal.*"} {
					if names, _ := filepath.Glob(filepath.Join(m.State, pattern)); len(names) == 0 {
						return false
					}
				}
				return m.stateWritable()
			})
			a.must("mkdir", m.At("E"))
			before := m.Locks()
			m.restart(nil)
			if got := m.Locks(); len(got) != 2 || got["D"].Token != before["D"].Token || got["E"].Token != before["E"].Token {
				t.Errorf("locks after a restart %v, want %v", got, before)
			}
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
	t.Run("directory", func(t *testing.T) {
		m := mountOver(t)
		a := agent(t)
		a.must("mkdir", m.At("D"))
		mustDo(t, os.RemoveAll(m.State))
		eventually(t, "the metric", func() bool { return !m.stateWritable() })
		m.wantLog("the state directory was removed")
		a.must("mkdir", m.At("E"))
		last := m.Locks()["E"].Token
		m.restart(nil)
		m.wantLog("the locks that it gave out are lost")
		a.must("mkdir", m.At("F"))
		if token := m.Locks()["F"].Token; token <= last {
			t.Errorf("token %d after %d", token, last)
		}
	})
}
