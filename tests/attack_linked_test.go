//go:build linux

package tests

import (
	"fmt"
	"os"
	"testing"
)

// linkedLock makes the lock files of D and E one file, as "cp -al" does, and looks
// them up in that order, or the other way round.
func linkedLock(t *testing.T, m *Mount, first, second string) {
	t.Helper()
	openDir(t, m.Back("D"))
	openFile(t, m.Back("D/devserver"), "")
	mustDo(t, os.Link(m.Back("D/devserver"), m.Back("E/devserver")))
	for _, dir := range []string{first, second} {
		_, err := os.Stat(m.At(dir, "devserver"))
		mustDo(t, err)
	}
}

// TestAttackLinkedLockFile attacks A4 and W3: the lock file of one directory is that
// of another one, too. Each name locks its own directory.
func TestAttackLinkedLockFile(t *testing.T) {
	for protocol, order := range map[string][2]string{"flock": {"D", "E"}, "setlk": {"E", "D"}} {
		t.Run(protocol, func(t *testing.T) {
			asItIs(t, func(t *testing.T, m *Mount, then func()) {
				linkedLock(t, m, order[0], order[1])
				holder, other, stranger := agent(t), agent(t), agent(t)
				for a, dir := range map[*Agent]string{holder: "E", other: "D"} {
					a.must("open", "h", m.At(dir, "devserver"), "rdwr")
				}
				then()
				lock := func(a *Agent) string {
					if protocol == "setlk" {
						return a.Try("setlk", "h", "wr")
					}
					return a.Try("flock", "h")
				}
				if got := lock(holder); got != "ok" {
					t.Fatalf("%s in E = %s", protocol, got)
				}
				m.wantOwner("E", holder.Pid)
				m.wantFree("D")
				if got := stranger.Try("creat", m.At("E/x"), "wronly,creat"); got != "EBUSY" {
					t.Errorf("a stranger makes a file in E: %s, want EBUSY", got)
				}
				if got := stranger.Try("creat", m.At("D/x"), "wronly,creat"); got != "ok" {
					t.Errorf("a stranger makes a file in D, which is free: %s", got)
				}
				if got := lock(other); got != "EAGAIN" {
					t.Errorf("%s of the same file in D = %s, want EAGAIN", protocol, got)
				}
				holder.must("close", "h")
				eventually(t, "E is free", func() bool { _, held := m.Locks()["E"]; return !held })
				if got := lock(other); got != "ok" {
					t.Fatalf("%s in D afterwards = %s", protocol, got)
				}
				m.wantOwner("D", other.Pid)
				m.wantFree("E")
			})
		})
	}
}

// TestAttackLinkedLockFileTwice attacks W3: a lock that was had ends by no other one
// on the same file, and none is given where it can't be said on what directory.
func TestAttackLinkedLockFileTwice(t *testing.T) {
	asItIs(t, func(t *testing.T, m *Mount, then func()) {
		linkedLock(t, m, "D", "E")
		holder, stranger := agent(t), agent(t)
		holder.must("open", "e", m.At("E/devserver"), "rdwr")
		holder.must("open", "d", m.At("D/devserver"), "rdwr")
		holder.must("open", "again", fmt.Sprintf("/proc/self/fd/%s", holder.Get("fd", "e")), "rdwr")
		then()
		if got := holder.Try("flock", "again"); got != "ENOLCK" {
			t.Errorf("flock of what was opened by no name = %s, want ENOLCK", got)
		}
		holder.must("setlk", "e", "wr")
		if got := holder.Try("setlk", "d", "wr"); got != "ENOLCK" {
			t.Errorf("a second record lock on the file, for D = %s, want ENOLCK", got)
		}
		m.wantOwner("E", holder.Pid)
		if got := stranger.Try("creat", m.At("E/x"), "wronly,creat"); got != "EBUSY" {
			t.Errorf("a stranger makes a file in E: %s, want EBUSY", got)
		}
		holder.must("setlk", "e", "un")
		m.wantFree("E")
		holder.must("setlk", "d", "wr")
		m.wantOwner("D", holder.Pid)
	})
}

// TestAttackLinkedLockFileSeen attacks A4 and W3: a lock file with several names locks
// the directory that it was opened in, whatever name was looked up before, and however
// it came by the other.
func TestAttackLinkedLockFileSeen(t *testing.T) {
	asItIs(t, func(t *testing.T, m *Mount, then func()) {
		openDir(t, m.Back("D"))
		openFile(t, m.Back("D/devserver"), "")
		mustDo(t, os.Link(m.Back("D/devserver"), m.Back("E/devserver")))
		owner, holder := agent(t), agent(t)
		holder.must("stat", m.At("D/devserver"))
		holder.must("stat", m.At("E/devserver"))
		owner.must("unlink", m.At("E/devserver"))
		holder.must("open", "h", m.At("D/devserver"), "rdwr") // known by one name
		owner.must("link", m.At("D/devserver"), m.At("E/devserver"))
		m.wantOwner("E", owner.Pid)
		owner.must("unlink", m.At("E/devserver"))
		mustDo(t, os.Link(m.Back("D/devserver"), m.Back("E/devserver")))
		_, err := os.Stat(m.At("E/devserver"))
		mustDo(t, err)
		then()
		holder.must("flock", "h")
		m.wantOwner("D", holder.Pid)
		m.wantFree("E")
	})
}

// TestAttackRenamedLockFile is the same for a name that the kernel need not look up.
func TestAttackRenamedLockFile(t *testing.T) {
	asItIs(t, func(t *testing.T, m *Mount, then func()) {
		openDir(t, m.Back("D"))
		openFile(t, m.Back("D/x"), "")
		mustDo(t, os.Link(m.Back("D/x"), m.Back("E/devserver")))
		for _, file := range []string{"D/x", "E/devserver"} {
			_, err := os.Stat(m.At(file))
			mustDo(t, err)
		}
		holder := agent(t)
		holder.must("rename", m.At("D/x"), m.At("D/devserver"))
		holder.must("stat", m.At("E/devserver"))
		holder.must("open", "h", m.At("D/devserver"), "rdwr")
		then()
		holder.must("flock", "h")
		m.wantOwner("D", holder.Pid)
		m.wantFree("E")
	})
}
