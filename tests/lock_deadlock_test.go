//go:build linux

package tests

import (
	"fmt"
	"os"
	"testing"
)

// Deadlocks of those who wait for lock files with fcntl(2), and so for directories.

// A deadlockStage is some who hold and wait for directories by their lock files.
type deadlockStage struct {
	*Mount
	got map[*Agent]func() string
}

func newDeadlockStage(t *testing.T, m *Mount, name string, dirs int) (s *deadlockStage, at func(i int) string) {
	t.Helper()
	s = &deadlockStage{m.on(t), make(map[*Agent]func() string)}
	at = func(i int) string { return fmt.Sprintf("%s%d", name, i) }
	for i := range dirs {
		s.lockFile(at(i))
	}
	return s, at
}

// hold has a locker lock a directory.
func (s *deadlockStage) hold(a *Agent, dir string) {
	s.t.Helper()
	a.must("open", dir, s.At(dir, "devserver"), "rdwr")
	a.must("setlk", dir, "wr")
}

// wait has it wait for one, as the last of some.
func (s *deadlockStage) wait(a *Agent, dir string, count int) {
	s.t.Helper()
	a.must("open", dir, s.At(dir, "devserver"), "rdwr")
	s.got[a] = a.Start("setlkw", dir, "wr")
	s.awaitWaiters(dir, count)
}

// wantDeadlock fails the test if the wait for a directory isn't a deadlock. The lock
// is given up that somebody else waits for.
func (s *deadlockStage) wantDeadlock(a *Agent, dir, has string) {
	s.t.Helper()
	a.must("open", dir, s.At(dir, "devserver"), "rdwr")
	a.want("EDEADLK", "setlkw", dir, "wr")
	a.must("setlk", has, "un")
}

// wantTurn fails the test if a wait does not end with the lock, which is given up.
func (s *deadlockStage) wantTurn(a *Agent, dir string) {
	s.t.Helper()
	if status := s.got[a](); status != "ok" {
		s.t.Errorf("the wait for %s = %s, want ok", dir, status)
	}
	a.must("setlk", dir, "un")
}

// TestM2LockFileDeadlock: who would close a circle hears so, and the others have what
// they wait for, one after the other.
func TestM2LockFileDeadlock(t *testing.T) {
	m := mount(t)
	t.Run("of two", func(t *testing.T) {
		s, at := newDeadlockStage(t, m, "two", 2)
		a, b := locker(t), locker(t)
		s.hold(a, at(0))
		s.hold(b, at(1))
		s.wait(b, at(0), 1)
		s.wantDeadlock(a, at(1), at(0))
		s.wantTurn(b, at(0))
	})
	t.Run("of who stands behind another in line", func(t *testing.T) {
		s, at := newDeadlockStage(t, m, "behind", 2)
		a, b, last := locker(t), locker(t), locker(t)
		s.hold(a, at(0))
		s.hold(last, at(1))
		s.wait(b, at(0), 1)
		s.wait(last, at(0), 2)
		s.wantDeadlock(a, at(1), at(0))
		s.wantTurn(b, at(0))
		s.wantTurn(last, at(0))
	})
	t.Run("closed by who comes to stand behind another", func(t *testing.T) {
		s, at := newDeadlockStage(t, m, "comes", 2)
		a, b, last := locker(t), locker(t), locker(t)
		s.hold(a, at(0))
		s.hold(last, at(1))
		s.wait(a, at(1), 1)
		s.wait(b, at(0), 1)
		s.wantDeadlock(last, at(0), at(1))
		s.wantTurn(a, at(1))
		a.must("setlk", at(0), "un")
		s.wantTurn(b, at(0))
	})
	t.Run("of who waits for a lock file that his parent has locked", func(t *testing.T) {
		s, at := newDeadlockStage(t, m, "child", 2)
		a := locker(t)
		child := forked(a)
		s.hold(a, at(0))
		s.hold(child, at(1))
		s.wait(child, at(0), 1)
		s.wantDeadlock(a, at(1), at(0))
		s.wantTurn(child, at(0))
	})
	t.Run("of who waits for a lock file that his parent has locked, behind another", func(t *testing.T) {
		s, at := newDeadlockStage(t, m, "called", 2)
		a, b := locker(t), locker(t)
		child := forked(a)
		s.hold(a, at(0))
		s.hold(child, at(1))
		s.wait(b, at(0), 1)
		s.wait(child, at(0), 2)
		s.wantDeadlock(a, at(1), at(0))
		s.wantTurn(b, at(0))
		s.wantTurn(child, at(0))
	})
	t.Run("of who has a file open that another waits for, and has closed one descriptor of it", func(t *testing.T) {
		s, at := newDeadlockStage(t, m, "open", 1)
		a, b := locker(t), locker(t)
		a.must("open", "file", s.At(at(0), "file"), "wronly,creat")
		a.must("dup", "file", "closed")
		s.wait(b, at(0), 1)
		a.must("close", "closed")
		a.must("open", at(0), s.At(at(0), "devserver"), "rdwr")
		a.want("EDEADLK", "setlkw", at(0), "wr")
		a.must("close", "file")
		s.wantTurn(b, at(0))
	})
	t.Run("closed by a lock that passes on", func(t *testing.T) {
		s, at := newDeadlockStage(t, m, "passes", 1)
		a, b, last := locker(t), locker(t), locker(t)
		maker := forked(a)
		maker.must("mkdir", s.At("passed"))
		s.hold(last, at(0))
		for i, x := range []*Agent{b, last} {
			x.must("open", "p", s.At("passed/devserver"), "rdwr,creat")
			s.got[x] = x.Start("setlkw", "p", "wr")
			s.awaitWaiters("passed", i+1)
		}
		s.wait(a, at(0), 1)
		maker.Exit(0)
		// Who of the two hears of it, depends on who is tried first.
		type answer struct {
			who    *Agent
			status string
		}
		answers := make(chan answer, 2)
		for _, x := range []*Agent{a, last} {
			go func() {
				got := answer{x, "no answer"}
				defer func() { answers <- got }()
				got.status = s.got[x]()
			}()
		}
		first := <-answers
		if first.status != "EDEADLK" {
			t.Errorf("the first wait that ends = %s, want EDEADLK", first.status)
		}
		t.Logf("the one with the lock that passed on heard: %v", first.who == a)
		if first.who == a {
			a.Kill() // the lock that was passed to it ends
			s.wantTurn(b, "p")
		} else {
			last.must("setlk", at(0), "un")
		}
		if second := <-answers; second.status != "ok" {
			t.Errorf("the other wait = %s, want ok", second.status)
		}
	})
}

// TestM2LockFileNoDeadlock: nobody hears of a deadlock that there is none of.
func TestM2LockFileNoDeadlock(t *testing.T) {
	m := mount(t)
	t.Run("of who has given up what another waits for", func(t *testing.T) {
		a, b := locker(t), locker(t)
		for i := range 100 {
			s, at := newDeadlockStage(t, m, fmt.Sprint("given", i, "-"), 2)
			s.hold(a, at(0))
			s.hold(b, at(1))
			s.wait(b, at(0), 1)
			a.must("open", at(1), s.At(at(1), "devserver"), "rdwr")
			a.must("setlk", at(0), "un")
			got := a.Start("setlkw", at(1), "wr")
			s.wantTurn(b, at(0))
			b.must("setlk", at(1), "un")
			if status := got(); status != "ok" {
				t.Fatalf("round %d: the wait for %s = %s, want ok", i, at(1), status)
			}
			a.must("setlk", at(1), "un")
		}
	})
	t.Run("of one process through two descriptions", func(t *testing.T) {
		s, at := newDeadlockStage(t, m, "itself", 1)
		a, b := locker(t), locker(t)
		for _, name := range []string{"x", "y"} {
			a.must("open", name, s.At(at(0), "devserver"), "rdwr")
		}
		a.must("ofdsetlk", "x", "wr")
		s.wait(b, at(0), 1)
		a.Start("ofdsetlkw", "y", "wr") // for ever
		s.awaitWaiters(at(0), 2)
		awaitAsleep(t, a)
		a.Kill()
		s.wantTurn(b, at(0))
	})
	t.Run("of whose child waits", func(t *testing.T) {
		s, at := newDeadlockStage(t, m, "waits", 2)
		script, b := locker(t), locker(t)
		s.hold(b, at(0))
		s.hold(script, at(1))
		script.must("open", "x", s.At(at(0), "devserver"), "rdwr")
		child := forked(script)
		got := child.Start("flock", "x", "ex")
		s.awaitWaiters(at(0), 1)
		s.wait(b, at(1), 1)
		awaitAsleep(t, b)
		script.must("setlk", at(1), "un")
		s.wantTurn(b, at(1))
		b.must("setlk", at(0), "un")
		if status := got(); status != "ok" {
			t.Errorf("the child's wait = %s, want ok", status)
		}
	})
}

// countLocked locks a file, adds one to the number in another one, and closes both, again
// and again.
const countLocked = `
import fcntl, os, struct, sys
call, lock, path = sys.argv[1:4]
print("ready", flush=True)
sys.stdin.readline()
for i in range(40):
    fd = os.open(lock, os.O_RDWR)
    fcntl.fcntl(fd, {"setlkw": 7, "ofdsetlkw": 38}[call], struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
    with open(path, "r+") as f:
        n = int(f.read())
        f.seek(0)
        f.write(str(n + 1))
    os.close(fd)
print("over", flush=True)
`

// TestM2LockAgainNoDeadlock: who locks a lock file again at once hears of no deadlock
// because of what it has closed before (M2): close(2) does not wait for the kernel to tell
// of that, and meanwhile somebody else, for whom it is in the way, stands first in line.
func TestM2LockAgainNoDeadlock(t *testing.T) {
	need(t, "python3")
	m := mount(t)
	for _, call := range []string{"setlkw", "ofdsetlkw"} {
		t.Run(call, func(t *testing.T) {
			m := m.on(t)
			file := m.lockFile(call)
			count := m.At(call, "count")
			mustDo(t, os.WriteFile(m.Back(call, "count"), []byte("0"), 0o666))
			all := make([]*program, 12)
			for i := range all {
				all[i] = startLines(t, nil, "python3", "-c", countLocked, call, file, count)
				all[i].hear("ready")
			}
			for _, p := range all {
				p.tell("go")
			}
			for _, p := range all {
				p.hear("over")
			}
			if n, err := os.ReadFile(count); string(n) != "480" || err != nil {
				t.Errorf("the count = %q, %v, want 480", n, err)
			}
		})
	}
}
