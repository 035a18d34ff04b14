//go:build linux

package tests

import (
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestR2: unlock, the last close and the owner's end release the directory, and
// the lock file stays.
func TestR2(t *testing.T) {
	m := mount(t)
	for _, call := range lockCalls() {
		for how, end := range map[string]func(a *Agent){
			"unlock":  func(a *Agent) { a.must(call.unlock("x")...) },
			"close":   func(a *Agent) { a.must("close", "x") },
			"exit":    func(a *Agent) { a.Exit(0) },
			"failure": func(a *Agent) { a.Exit(1) },
			"kill":    func(a *Agent) { a.Kill() },
		} {
			t.Run(call.name+"/"+how, func(t *testing.T) {
				m := m.on(t)
				dir := call.name + how
				openDir(t, m.Back(dir))
				a, b := locker(t), locker(t)
				a.must("open", "x", m.At(dir, "devserver"), "rdwr,creat")
				a.must(call.tryExclusive("x")...)
				m.wantOwner(dir, a.Pid)
				end(a)
				m.awaitFree(dir)
				if _, err := os.Stat(m.Back(dir, "devserver")); err != nil {
					t.Errorf("the lock file afterwards: %v, want it there", err)
				}
				b.must("put", m.At(dir, "f"), "b", "creat")
				b.must("open", "x", m.At(dir, "devserver"), "rdwr,creat")
				b.want("ok", call.tryExclusive("x")...)
				m.wantOwner(dir, b.Pid)
			})
		}
	}
}

// TestR2Closed: when close(2) has returned, the lock of what was closed is no more, to
// whoever asks or tries at that moment on another processor.
func TestR2Closed(t *testing.T) {
	for _, transport := range []string{"threads", "uring"} {
		t.Run(transport, func(t *testing.T) {
			needTransport(t, transport)
			m := mount(t, "--transport", transport)
			openFile(t, m.Back("file"), "") // no lock file: of such a one this process would be the holder
			var round, answered atomic.Int32
			const rounds = 2000
			late := map[string]int{}
			var wg sync.WaitGroup
			on := func(cpu int, f func(fd int)) {
				wg.Go(func() {
					runtime.LockOSThread() // and the thread ends with it
					var one unix.CPUSet
					one.Set(cpu)
					unix.SchedSetaffinity(0, &one) // where there is only one, the race is lost
					fd, err := unix.Open(m.At("file"), unix.O_RDWR|unix.O_CLOEXEC, 0)
					if err != nil {
						t.Error(err)
						round.Store(-1)
						return
					}
					defer unix.Close(fd)
					f(fd)
				})
			}
			lock := func(fd, cmd int, kind int16) (int16, error) {
				l := unix.Flock_t{Type: kind}
				err := unix.FcntlFlock(uintptr(fd), cmd, &l)
				return l.Type, err
			}
			on(0, func(int) {
				for i := int32(1); i <= rounds && round.Load() >= 0; i++ {
					fd, err := unix.Open(m.At("file"), unix.O_RDWR|unix.O_CLOEXEC, 0)
					if err == nil {
						_, err = lock(fd, unix.F_OFD_SETLK, unix.F_WRLCK)
						unix.Close(fd)
					}
					if err != nil {
						t.Errorf("round %d: to lock it: %v", i, err)
						round.Store(-1)
						return
					}
					round.Store(i)
					for answered.Load() != i && round.Load() >= 0 {
					}
				}
			})
			on(1, func(fd int) {
				for i := int32(1); i <= rounds; i++ {
					for round.Load() < i {
						if round.Load() < 0 {
							return
						}
					}
					if i%2 == 0 {
						if kind, err := lock(fd, unix.F_OFD_GETLK, unix.F_WRLCK); err != nil || kind != unix.F_UNLCK {
							late["asks"]++
						}
					} else if _, err := lock(fd, unix.F_OFD_SETLK, unix.F_WRLCK); err != nil {
						late["tries"]++
					} else {
						lock(fd, unix.F_OFD_SETLK, unix.F_UNLCK)
					}
					answered.Store(i)
				}
			})
			wg.Wait()
			if len(late) > 0 {
				t.Errorf("of %d rounds, the closed one's lock was there for who %v", rounds, late)
			}
		})
	}
}

// TestR2Copies: what dup(2) and fork(2) make of a lock: flock and OFD locks
// belong to the open file description, fcntl locks to the process.
func TestR2Copies(t *testing.T) {
	m := mount(t)
	for _, call := range lockCalls() {
		ofProcess := call.name == "fcntl"
		t.Run(call.name, func(t *testing.T) {
			m := m.on(t)
			dir := call.name
			file := m.lockFile(dir)
			a, b := locker(t), locker(t)
			want := func(what string, held bool) {
				t.Helper()
				row, is := m.Locks()[dir]
				if is != held || held && row.Pid != a.Pid {
					t.Errorf("after %s: row %+v (there: %v), want one of pid %d: %v", what, row, is, a.Pid, held)
				}
				wants := "ok"
				if held {
					wants = "EAGAIN"
				}
				b.must("open", "t", file, "rdwr")
				if got := b.Try(call.tryExclusive("t")...); got != wants {
					t.Errorf("after %s another's try = %s, want %s", what, got, wants)
				}
				b.must("close", "t")
			}
			take := func() {
				t.Helper()
				a.must("open", "x", file, "rdwr")
				a.must(call.tryExclusive("x")...)
			}
			take()
			a.must("dup", "x", "x2")
			a.must("close", "x2")
			want("the close of a copy", !ofProcess)
			a.must(call.tryExclusive("x")...)
			a.must("open", "y", file, "rdwr")
			a.must("close", "y")
			want("the close of another description", !ofProcess)
			a.must(call.tryExclusive("x")...)

			child := forked(a)
			wants := "ok"
			if ofProcess {
				wants = "EAGAIN"
			}
			child.want(wants, call.tryExclusive("x")...)
			want("the child's try", true)
			child.must("put", m.At(dir, "of-child"), "", "creat")
			child.must("close", "x")
			want("the child's close of its copy", true)
			forked(a).Kill()
			want("the end of a child", true)

			child = forked(a)
			a.must("close", "x")
			if ofProcess {
				want("the owner's close", false)
			} else {
				want("the close of all but the child's copy", true)
				child.must(call.unlock("x")...)
			}
			want("all", false)
			child.Kill()
		})
	}
}

// TestR2Orphan: the lock of a killed owner is gone for each protocol, also where a child
// of it still has the description open (R4).
func TestR2Orphan(t *testing.T) {
	m := mount(t)
	for _, call := range []lockCall{lockCalls()[0], lockCalls()[2]} {
		t.Run(call.name, func(t *testing.T) {
			m := m.on(t)
			dir := call.name
			file := m.lockFile(dir)
			a, b := locker(t), locker(t)
			a.must("open", "x", file, "rdwr")
			a.must(call.tryExclusive("x")...)
			child := forked(a)
			a.Kill()
			time.Sleep(50 * time.Millisecond) // R4 takes 10 ms
			_, held := m.Locks()[dir]
			b.must("open", "x", file, "rdwr")
			try := b.Try(call.tryExclusive("x")...)
			other := b.Try("put", m.At(dir, "devserver.lock"), "1", "creat,excl")
			if held || try != "ok" || other != "ok" {
				t.Errorf("row there: %v, try-lock = %s, O_EXCL = %s; want none, and ok twice", held, try, other)
			}
			child.Kill()
		})
	}
}

// TestR2Exec: a lock survives exec.
func TestR2Exec(t *testing.T) {
	need(t, debianPython)
	m := mount(t)
	for name, lock := range map[string]string{"flock": "fcntl.flock(9, fcntl.LOCK_EX)", "fcntl": "fcntl.lockf(9, fcntl.LOCK_EX)"} {
		t.Run(name, func(t *testing.T) {
			m := m.on(t)
			file := m.lockFile(name)
			p := startCmd(t, command(debianPython, "-c", `
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
os.dup2(fd, 9, inheritable=True)
os.close(fd)
`+lock+`
os.execv("/bin/sleep", ["sleep", "1000"])`, file))
			eventually(t, "it is another program", func() bool {
				comm, _ := os.ReadFile("/proc/" + itoa(p.Pid()) + "/comm")
				return string(comm) == "sleep\n"
			})
			m.wantOwner(name, p.Pid())
			wantKeptOut(t, m, name, locker(t))
			p.Kill()
			m.awaitFree(name)
		})
	}
}

// TestR4FdTime: kill -9 of who has the lock, to the next one's lock.
func TestR4FdTime(t *testing.T) {
	m := mount(t)
	file := m.lockFile("D")
	for _, call := range lockCalls() {
		var took []time.Duration
		for range 15 {
			parent := locker(t)
			a, b := forked(parent), forked(parent)
			for _, x := range []*Agent{a, b} {
				x.must("open", "x", file, "rdwr")
			}
			a.must(call.tryExclusive("x")...)
			got := b.StartGet("turn", "x", call.wait, call.exclusive)
			m.awaitWaiters("D", 1)
			start := monotonic()
			a.Kill()
			at, err := strconv.ParseInt(got(), 10, 64)
			mustDo(t, err)
			took = append(took, time.Duration(at-start))
		}
		wantPrompt(t, call.name+": from kill -9 to the next one's lock", took)
	}
}
