//go:build linux

package tests

import (
	"os"
	"path/filepath"
	"testing"
)

// wantStill wants a directory to have the lock that it had before.
func (m *Mount) wantStill(dir string, before lockRow) {
	m.t.Helper()
	if after := m.Locks()[dir]; after.Token != before.Token || after.Token == 0 {
		m.t.Errorf("%s has the lock %d, want %d", dir, after.Token, before.Token)
	}
}

// TestR2Lost: a lock on a descriptor that outlived the daemon ends when its
// owner and his children have closed it. Who else has the lock file open, or
// another file of that name, is of no account.
func TestR2Lost(t *testing.T) {
	m := mountOver(t)
	openDir(t, m.At("D"))
	m.Ctl("release D")
	elsewhere := filepath.Join(tempDir(t), m.Path, "D")
	mustDo(t, os.MkdirAll(elsewhere, 0o777))
	a, waiter, other := agent(t), agent(t), agent(t)
	a.must("open", "lock", m.At("D", "devserver"), "rdwr,creat")
	a.must("flock", "lock")
	waiter.must("open", "lock", m.At("D", "devserver"), "rdonly")
	waiter.want("EAGAIN", "flock", "lock")
	other.must("open", "lock", filepath.Join(elsewhere, "devserver"), "rdwr,creat")
	before := m.Locks()["D"]
	m.restart(nil)
	for range 3 {
		other.want("EEXIST", "creat", m.At("D", "devserver.lock"), "wronly,creat,excl")
	}
	m.wantStill("D", before)
	a.Try("close", "lock")
	other.must("creat", m.At("D", "devserver.lock"), "wronly,creat,excl")
	other.must("unlink", m.At("D", "devserver.lock"))
}

// TestR2LostAnother: nor does it end with the lock that its owner takes on another
// lock file since, and gives up; but when it is taken again, with that one.
func TestR2LostAnother(t *testing.T) {
	m := mountOver(t)
	openDir(t, m.At("D"))
	m.Ctl("release D")
	a, other := agent(t), agent(t)
	other.must("open", "y", m.At("D", "devserver.lock"), "rdwr,creat")
	other.must("flock", "y")
	other.must("close", "y")
	m.awaitFree("D")
	a.must("open", "x", m.At("D", "devserver"), "rdwr,creat")
	a.must("flock", "x")
	before := m.Locks()["D"]
	m.restart(nil)
	a.must("open", "y", m.At("D", "devserver.lock"), "rdwr")
	a.must("flock", "y")
	a.must("flock", "y", "un")
	a.must("close", "y")
	other.want("EBUSY", "put", m.At("D", "f"), "x", "creat")
	m.wantStill("D", before)
	a.must("open", "z", m.At("D", "devserver"), "rdwr")
	a.must("flock", "z")
	a.must("flock", "z", "un")
	m.wantFree("D")
	other.must("put", m.At("D", "f"), "x", "creat")
}

// TestR2LostClosed: it ends when the descriptor from before is closed, though its owner has
// another lock file open, which it has locked meanwhile.
func TestR2LostClosed(t *testing.T) {
	m := mountOver(t)
	openDir(t, m.Back("D"))
	a := agent(t)
	a.must("open", "x", m.At("D", "devserver"), "rdwr,creat")
	a.must("flock", "x")
	m.restart(nil)
	a.must("open", "y", m.At("D", "devserver.lock"), "rdwr,creat")
	a.must("flock", "y")
	a.must("flock", "y", "un")
	a.Try("close", "x") // ENOTCONN: it is closed
	agent(t).must("put", m.At("D", "f"), "x", "creat")
}

// TestR2LostGivenUp: a lock file that is only open, as its lock was given up before the daemon
// died, keeps nothing.
func TestR2LostGivenUp(t *testing.T) {
	for name, meanwhile := range map[string]func(m *Mount){
		"":         func(*Mount) {},
		"upgraded": (*Mount).replace,
	} {
		t.Run(name, func(t *testing.T) {
			m := mountOver(t)
			openDir(t, m.Back("D"))
			a := agent(t)
			a.must("open", "x", m.At("D", "devserver"), "rdwr,creat")
			a.must("flock", "x")
			a.must("open", "y", m.At("D", "devserver.lock"), "rdwr,creat")
			a.must("flock", "y")
			meanwhile(m)
			a.must("flock", "y", "un")
			m.restart(nil)
			agent(t).want("EBUSY", "put", m.At("D", "f"), "x", "creat")
			a.Try("close", "x") // ENOTCONN: it is closed
			agent(t).must("put", m.At("D", "f"), "x", "creat")
		})
	}
}

// TestR2LostBeside: a lock that a lock file or a command keeps, too, does not end with
// the descriptor; and a lock file goes with its owner (R4).
func TestR2LostBeside(t *testing.T) {
	for name, also := range map[string]func(m *Mount, a *Agent){
		"lock file": func(m *Mount, a *Agent) { a.must("creat", m.At("D", "devserver"), "wronly,creat,excl") },
		"command":   func(m *Mount, a *Agent) { a.mustCommand(m, "acquire D") },
	} {
		t.Run(name, func(t *testing.T) {
			m := mountOver(t)
			openDir(t, m.At("D"))
			m.Ctl("release D")
			a, other := agent(t), agent(t)
			a.must("open", "lock", m.At("D", "devserver.lock"), "rdwr,creat")
			a.must("flock", "lock")
			also(m, a)
			before := m.Locks()["D"]
			m.restart(nil)
			a.Try("close", "lock")
			other.want("EBUSY", "put", m.At("D", "f"), "x", "wronly,creat")
			m.wantStill("D", before)
			a.Kill()
			m.awaitFree("D")
			wantTree(t, m.At("D"), []string{"devserver.lock="})
		})
	}
}

// TestR2LostChild: a child that inherited the descriptor keeps the lock; who
// waits for it has it when that one has closed it.
func TestR2LostChild(t *testing.T) {
	m := mountOver(t)
	openDir(t, m.At("D"))
	m.Ctl("release D")
	a, other := agent(t), agent(t)
	pid := filepath.Join(tempDir(t), "pid")
	script := a.Child()
	held := script.Start("sh", "exec 9>"+m.At("D", "devserver")+"; flock 9; sleep 1000 & echo $! >"+pid+".new; mv "+pid+".new "+pid+
		"; exec 9>&-; while [ -d "+filepath.Dir(pid)+" ]; do sleep 0.05; done; kill $!")
	eventually(t, "the script has it", func() bool { return exists(pid) })
	sleeper, err := os.ReadFile(pid)
	mustDo(t, err)
	m.restart(nil)
	other.want("EEXIST", "creat", m.At("D", "devserver.lock"), "wronly,creat,excl")
	waiting := other.StartGet("sh", "flock "+m.At("D", "devserver")+" echo mine")
	eventually(t, "flock waits", func() bool { return len(m.Listing().Waiters) == 1 })
	if r := run(t, "kill", string(sleeper[:len(sleeper)-1])); r.Status != 0 {
		t.Fatal(r)
	}
	if out := waiting(); out != "0 mine\n" {
		t.Errorf("the waiter: %q", out)
	}
	mustDo(t, os.RemoveAll(filepath.Dir(pid)))
	held()
}
