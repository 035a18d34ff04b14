//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// awaitCalled waits until a locker has long been in a call other than those by
// which it waits for its commands.
func awaitCalled(t *testing.T, a *Agent) {
	t.Helper()
	in := 0
	eventually(t, "it is in a call", func() bool {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/syscall", a.Pid))
		number, _, _ := strings.Cut(strings.TrimSpace(string(b)), " ")
		if slices.Contains([]string{"", "running", "-1", strconv.Itoa(unix.SYS_RECVFROM), strconv.Itoa(unix.SYS_READ), strconv.Itoa(unix.SYS_FUTEX)}, number) {
			in = 0
			return false
		}
		in++
		return in > 3
	})
}

// TestA12Signal: a stager of several threads that is held back hears nothing of a
// signal that does not kill, as mkdir(2) does not in any directory.
func TestA12Signal(t *testing.T) {
	byTransport(t, func(t *testing.T, opts ...string) {
		m := mount(t, opts...)
		for i, sig := range []syscall.Signal{syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGCHLD} {
			t.Run(sig.String(), func(t *testing.T) {
				m := m.on(t)
				top := "a" + itoa(i)
				owner, w := agent(t), locker(t)
				w.must("threads", "3")
				owner.must("mkdir", m.At(top))
				owner.must("mkdir", m.At(top, "b"))
				got := w.Start("mkdir", m.At(top, "new"))
				awaitCalled(t, w)
				for range 5 {
					mustDo(t, syscall.Kill(w.Pid, sig))
					time.Sleep(10 * time.Millisecond) // for the next one to be another
				}
				owner.must("creat", m.At(top, "b/devserver"), "wronly,creat,excl")
				if status := got(); status != "ok" && status != "EBUSY" { // a second may be over
					t.Errorf("mkdir = %s, want ok", status)
				}
			})
		}
	})
}

// stuck has the daemon stop in the midst of a chmod of a file, which is what an
// acquisition of its directory waits for, until goOn is called.
func stuck(t *testing.T, opts []string) (m *Mount, goOn func()) {
	t.Helper()
	needInject(t)
	m = newMount(t, staticDir(t), tempDir(t)+"/mnt")
	under, goesOn := make(chan struct{}), make(chan struct{})
	seen := sync.OnceFunc(func() { close(under); <-goesOn })
	m.inject(&fault{call: unix.SYS_FCHMODAT2, times: 1, is: func(a asked) bool {
		if a.path(1) == "slow" {
			seen()
		}
		return false
	}})
	m.start(opts)
	t.Cleanup(m.stop)
	goOn = sync.OnceFunc(func() { close(goesOn) })
	m.awaitReady()
	openDir(t, m.Back("D"))
	openFile(t, m.Back("D/slow"), "")
	changes := agent(t)
	t.Cleanup(goOn) // before the agent is to end
	changes.Start("chmod", m.At("D/slow"), "0600")
	select {
	case <-under:
	case <-time.After(patience):
		t.Skip("the kernel has no fchmodat2(2)")
	}
	return m, goOn
}

// TestA8TrySignal: a try for a lock whose descriptor is being closed, of a file or a
// directory, waits for that, also if who tries gets a signal: close(2) has returned
// perhaps, and the kernel tells the daemon late. Here one descriptor was closed already,
// and the other one is meanwhile.
func TestA8TrySignal(t *testing.T) {
	byTransport(t, func(t *testing.T, opts ...string) {
		m := mount(t, opts...)
		mustDo(t, os.Mkdir(m.At("D"), 0o777))
		if s := m.Ctl("release D"); s != "ok" {
			t.Fatal(s)
		}
		for _, file := range []string{"plain", "D/devserver"} {
			holder, w := locker(t), locker(t)
			status := ""
			for range 300 { // a moment is short
				holder.must("open", "a", m.At(file), "rdwr,creat")
				holder.must("flock", "a", "ex")
				holder.must("dup", "a", "b")
				w.must("open", "x", m.At(file), "rdwr,creat")
				holder.must("close", "b")
				got, answer := w.Start("flock", "x", "ex", "nb"), make(chan string, 1)
				go func() { answer <- got() }()
				for len(answer) == 0 && !waitsInFuse(w.Pid) {
				}
				mustDo(t, syscall.Kill(w.Pid, syscall.SIGUSR2))
				time.Sleep(2 * time.Millisecond) // for the signal to be heard of
				holder.must("close", "a")
				status = <-answer
				w.must("close", "x")
				if status == "ok" {
					break
				}
			}
			if status != "ok" {
				t.Errorf("the try on %s = %s, want ok", file, status)
			}
		}
	})
}

// TestW3Signal: nor does who waits for what is under way beneath the directory that
// it is about to get, however long that takes.
func TestW3Signal(t *testing.T) {
	byTransport(t, func(t *testing.T, opts ...string) {
		m, goOn := stuck(t, opts)
		w := locker(t)
		w.must("threads", "3")
		got := w.Start("mkdir", m.At("D/devserver"))
		awaitCalled(t, w)
		for range 15 {
			mustDo(t, syscall.Kill(w.Pid, syscall.SIGUSR1))
			time.Sleep(100 * time.Millisecond)
		}
		goOn()
		if status := got(); status != "ok" {
			t.Errorf("mkdir = %s, want ok", status)
		}
		m.wantOwner("D", w.Pid)
	})
}

// TestW3SignalKilled: a signal that kills ends that wait, though another one came
// before.
func TestW3SignalKilled(t *testing.T) {
	byTransport(t, func(t *testing.T, opts ...string) {
		m, _ := stuck(t, opts)
		for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM} {
			w := locker(t)
			w.must("threads", "3")
			w.Start("mkdir", m.At("D/devserver"))
			awaitCalled(t, w)
			mustDo(t, syscall.Kill(w.Pid, syscall.SIGUSR1))
			time.Sleep(50 * time.Millisecond)
			killed := time.Now()
			mustDo(t, syscall.Kill(w.Pid, sig))
			awaitEnd(t, "it is gone", w.Pid)
			t.Logf("%v: gone after %v", sig, time.Since(killed).Round(time.Millisecond))
		}
		m.wantFree("D")
	})
}

// heldUp returns a process of several threads that has a lock file open which another process
// has locked, by the same kind of call.
func (m *Mount) heldUp(call lockCall) *Agent {
	m.t.Helper()
	holder, w := locker(m.t), locker(m.t)
	w.must("threads", "3")
	holder.must("open", "x", m.lockFile(call.name), "rdwr")
	holder.must(call.tryExclusive("x")...)
	w.must("open", "x", m.At(call.name, "devserver"), "rdwr")
	return w
}

// TestA8WaitSignalThreads: a lock call that waits hears of each signal that has a
// handler, though other threads of its process could take it.
func TestA8WaitSignalThreads(t *testing.T) {
	byTransport(t, func(t *testing.T, opts ...string) {
		m := mount(t, opts...)
		for _, call := range lockCalls() {
			t.Run(call.name, func(t *testing.T) {
				m := m.on(t)
				w := m.heldUp(call)
				for range 3 {
					got := w.Start(call.waitExclusive("x")...)
					m.awaitWaiters(call.name, 1)
					mustDo(t, syscall.Kill(w.Pid, syscall.SIGUSR1))
					if status := got(); status != "EINTR" {
						t.Errorf("the interrupted lock = %s, want EINTR", status)
					}
					m.awaitWaiters(call.name, 0) // or the next round takes it for its own
				}
			})
		}
	})
}

// TestA8WaitSignalEarly: also of one that came before the daemon had the call.
func TestA8WaitSignalEarly(t *testing.T) {
	byTransport(t, func(t *testing.T, opts ...string) {
		m := mount(t, opts...)
		daemon := m.daemon()
		for _, call := range lockCalls()[:2] {
			t.Run(call.name, func(t *testing.T) {
				m := m.on(t)
				w := m.heldUp(call)
				halt(t, daemon)
				got, answer := w.Start(call.waitExclusive("x")...), make(chan string, 1)
				go func() { answer <- got() }()
				eventually(t, "it waits", func() bool { return waitsInFuse(w.Pid) })
				mustDo(t, syscall.Kill(w.Pid, syscall.SIGUSR1))
				mustDo(t, syscall.Kill(daemon, syscall.SIGCONT))
				eventually(t, "the wait ends", func() bool { return len(answer) > 0 })
				if status := <-answer; status != "EINTR" {
					t.Errorf("the interrupted lock = %s, want EINTR", status)
				}
			})
		}
	})
}

// signalThreads sends a signal to each thread of a process: also to one that waits in a
// call, which would seldom be the one that takes a signal to the process.
func signalThreads(pid int, sig syscall.Signal) {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	for _, thread := range threads {
		unix.Tgkill(pid, atoi(filepath.Base(thread)), sig) // it may have ended
	}
}

// TestA8WaitCommandSignal: a command that waits keeps its place in the line at a signal
// that does not end it, with a time limit or without; one that ends it does so at once.
func TestA8WaitCommandSignal(t *testing.T) {
	m := mount(t)
	for _, command := range []string{"run", "acquire --client=C", "wait", "run -w 100", "acquire --client=C -w 100", "wait -w 100"} {
		t.Run(command, func(t *testing.T) {
			m := m.on(t)
			dir := strings.ReplaceAll(command, " ", "")
			holder := agent(t)
			holder.must("mkdir", m.At(dir))
			args := append(strings.Fields(command), m.At(dir))
			if args[0] == "run" {
				args = append(args, "true")
			}
			var line []*Proc
			var want []int
			for i := range 3 {
				p := startCmd(t, exec.Command(stagefsBin(), args...))
				line, want = append(line, p), append(want, p.Pid())
				m.awaitWaiters(dir, i+1)
			}
			for range 5 {
				signalThreads(want[0], syscall.SIGWINCH)
				time.Sleep(20 * time.Millisecond)
				if got := m.awaitWaiters(dir, 3); !slices.Equal(got, want) {
					t.Fatalf("the line after SIGWINCH to the first: %v, want %v", got, want)
				}
			}
			for i, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP} {
				sent := time.Now()
				mustDo(t, syscall.Kill(want[i], sig))
				if r := line[i].Wait(); r.Status != 128+int(sig) {
					t.Errorf("%v: %v", sig, r)
				}
				if took := time.Since(sent); took > time.Second {
					t.Errorf("%v ended it after %v", sig, took)
				}
			}
			m.awaitWaiters(dir, 0)
			m.wantOwner(dir, holder.Pid)
		})
	}
}
