//go:build linux

package tests

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

var lineFlag = flag.Int("line", 1500, "requests that wait at a time in TestFaultLine; half as many files as the daemon may have open are the most")

// TestFaultLine: however many requests wait for one directory, they take no
// thread of the daemon, everybody else is served meanwhile, the daemon can be
// replaced, and all have their turn, one at a time. Afterwards the daemon is
// as it was.
func TestFaultLine(t *testing.T) {
	need(t, "root", "fuse")
	n := *lineFlag
	for _, transport := range transports[:2] {
		for _, by := range []string{"flock", "fcntl"} {
			t.Run(transport+" "+by, func(t *testing.T) {
				m, crowd, got, release := mountLine(t, transport, by, n)
				threads, busy, full := threadsOf(t, m.cmd.Process.Pid), m.openFiles(), m.resident()
				if threads > 200 {
					t.Errorf("the daemon has %d threads", threads)
				}
				other := agent(t)
				work := func() (took []time.Duration) {
					dir := m.At("other" + itoa(int(monotonic())))
					other.must("mkdir", dir)
					for i := range 100 {
						began := time.Now()
						other.must("put", dir+"/"+itoa(i), "x", "wronly,creat")
						took = append(took, time.Since(began))
					}
					slices.Sort(took)
					return took
				}
				beside := work()
				stranger(t).want("EBUSY", "put", m.At("D/x"), "", "creat")
				began := time.Now()
				m.replace()
				replaced := time.Since(began)
				m.awaitLine(n)
				work()
				began = time.Now()
				release()
				turns := work()
				if out, want := got(), fmt.Sprintf("%d had it, 1 at once", n); out != want {
					t.Errorf("the line: %s, want %s", out, want)
				}
				took := time.Since(began)
				crowd.Kill()
				m.awaitFree("D")
				eventually(t, "nobody waits", func() bool { return len(m.Listing().Waiters) == 0 })
				t.Logf("%d wait: %d threads, %d descriptors, %d MiB; create beside them: median %v, worst %v; replaced in %v; all had it %v after that: create median %v, worst %v; then %d threads, %d descriptors, %d MiB",
					n, threads, busy, full>>20, beside[50], beside[99], replaced, took, turns[50], turns[99], threadsOf(t, m.cmd.Process.Pid), m.openFiles(), m.resident()>>20)
				if now := threadsOf(t, m.cmd.Process.Pid); now > 200 {
					t.Errorf("the daemon has %d threads after all", now)
				}
			})
		}
	}
}

// TestFaultLineEnds: requests that wait, however many, keep nobody from ending:
// not those who made them, nor the mount.
func TestFaultLineEnds(t *testing.T) {
	need(t, "root", "fuse")
	n := *lineFlag
	for _, transport := range transports[:2] {
		t.Run(transport+" killed", func(t *testing.T) {
			m, crowd, _, release := mountLine(t, transport, "flock", n)
			began := time.Now()
			crowd.Kill()
			m.awaitLine(0)
			t.Logf("%d that were killed are gone after %v", n, time.Since(began))
			release()
			m.awaitFree("D")
			agent(t).must("creat", m.At("D", "devserver.lock"), "wronly,creat,excl")
		})
		t.Run(transport+" terminated", func(t *testing.T) {
			m, _, got, _ := mountLine(t, transport, "flock", n)
			began := time.Now()
			mustDo(t, m.cmd.Process.Signal(unix.SIGTERM))
			if out := got(); strings.Contains(out, "had it, 1") {
				t.Errorf("the line: %s, want that nobody gets it", out)
			}
			t.Logf("%d are refused after %v", n, time.Since(began))
			time.Sleep(time.Until(began.Add(1100 * time.Millisecond))) // sooner, it is one with the first
			mustDo(t, m.cmd.Process.Signal(unix.SIGTERM))              // the holder has it open
			select {
			case <-m.gone:
			case <-time.After(patience):
				t.Error("the daemon does not end")
			}
		})
	}
}

// TestFaultLineMkdir: of very many who make one directory at once, one does.
func TestFaultLineMkdir(t *testing.T) {
	need(t, "root", "fuse")
	n := *lineFlag
	for _, transport := range transports[:2] {
		t.Run(transport, func(t *testing.T) {
			m := mountBy(t, transport)
			crowd := agent(t)
			if out, want := crowd.Get("line", "mkdir", m.At("D"), itoa(n)), fmt.Sprintf("1 had it, 1 at once; %d: EEXIST", n-1); out != want {
				t.Errorf("the crowd: %s, want %s", out, want)
			}
			m.wantOwner("D", crowd.Pid)
		})
	}
}

// TestFaultLineHeldBack: stagers that are held back (A12), each of whom keeps the
// others waiting in the kernel, are all refused in the end, soon.
func TestFaultLineHeldBack(t *testing.T) {
	need(t, "root", "fuse")
	const n = 300
	for _, transport := range transports[:2] {
		t.Run(transport, func(t *testing.T) {
			m := mountBy(t, transport)
			owner, crowd := agent(t), agent(t)
			owner.must("mkdir", m.At("a"))
			owner.must("mkdir", m.At("a/b"))
			began := time.Now()
			if out, want := crowd.Get("line", "mkdirs", m.At("a/new"), itoa(n)), fmt.Sprintf("0 had it, 0 at once; %d: EBUSY", n); out != want {
				t.Errorf("the crowd: %s, want %s", out, want)
			}
			t.Logf("%d are refused after %v", n, time.Since(began))
		})
	}
}

// TestFaultLineFile: thousands who wait for a lock on an ordinary file end as soon as
// they are killed, or each has its turn; whether they have a descriptor each or one.
func TestFaultLineFile(t *testing.T) {
	need(t, "root", "fuse")
	n := *lineFlag
	for _, how := range []string{"flock", "flock killed", "flockone", "fcntl killed"} {
		t.Run(how, func(t *testing.T) {
			by, end, _ := strings.Cut(how, " ")
			m := mount(t)
			file := m.At("file")
			mustDo(t, os.WriteFile(m.Back("file"), nil, 0o666))
			crowd, holder, next := agent(t), agent(t), agent(t)
			holder.must("open", "l", file, "rdwr")
			next.must("open", "l", file, "rdwr")
			take := []string{"flock", "l"}
			if by == "fcntl" {
				take = []string{"setlk", "l", "wr"}
			}
			holder.must(take...)
			before := m.idleGoroutines()
			got := crowd.StartGet("line", by, file, itoa(n))
			m.awaitWaits(before, n)
			began := time.Now()
			if end == "killed" {
				crowd.Kill()
				eventually(t, "nobody waits", func() bool { return m.metric("goroutines") < before+50 })
				next.want("EAGAIN|EACCES", take...)
				holder.must("close", "l")
			} else {
				holder.must("close", "l")
				out, want := got(), itoa(n)+" had it"
				if by != "flockone" {
					want += ", 1 at once"
				}
				if !strings.HasPrefix(out, want) || strings.Contains(out, ";") {
					t.Errorf("the line: %s, want %s", out, want)
				}
			}
			t.Logf("%d are done after %v", n, time.Since(began).Round(time.Millisecond))
			next.must(take...)
		})
	}
}

// TestFaultLineOfUser: a user who has as many waits for locks as a user may have is
// refused one more (ENOLCK); another user waits, and has his turn after them.
func TestFaultLineOfUser(t *testing.T) {
	need(t, "root", "fuse")
	const most = 16384
	for _, transport := range transports[:2] {
		t.Run(transport, func(t *testing.T) {
			m := mountBy(t, transport)
			openDir(t, m.Back("D"))
			file := m.At("D/devserver")
			mustDo(t, os.WriteFile(m.Back("D/devserver"), nil, 0o666))
			mustDo(t, os.Chmod(m.Back("D/devserver"), 0o666))
			crowd, again, other, holder := stranger(t), stranger(t), agentAs(t, 1000), agent(t)
			for _, a := range []*Agent{again, other, holder} {
				a.must("open", "l", file, "rdwr")
			}
			holder.must("flock", "l")
			began := time.Now()
			before := m.idleGoroutines()
			got := crowd.StartGet("line", "flockone", file, itoa(most))
			m.awaitWaits(before, most) // a look at the whole line delays it
			m.awaitLine(most)
			again.want("ENOLCK", "flockw", "l")
			mine := other.Start("flockw", "l")
			m.awaitLine(most + 1)
			waiting := time.Since(began)
			began = time.Now()
			holder.must("close", "l")
			// What has the lock is their descriptor.
			if out, want := got(), itoa(most)+" had it"; !strings.HasPrefix(out, want) || strings.Contains(out, ";") {
				t.Errorf("the line: %s, want %s", out, want)
			}
			all := time.Since(began)
			crowd.Kill()
			if got := mine(); got != "ok" {
				t.Errorf("the other user's wait = %s", got)
			}
			m.wantOwner("D", other.Pid)
			again.want("EAGAIN", "flock", "l")
			t.Logf("%d wait after %v; all of them had it %v after its release, the other user after %v", most, waiting.Round(time.Millisecond), all.Round(time.Millisecond), time.Since(began).Round(time.Millisecond))
		})
	}
}

// mountLine makes a mount in which n requests wait for a directory. got waits for
// their end.
func mountLine(t *testing.T, transport, by string, n int) (m *Mount, crowd *Agent, got func() string, release func()) {
	m = mountBy(t, transport)
	openDir(t, m.Back("D"))
	mustDo(t, os.WriteFile(m.Back("D/devserver"), nil, 0o666))
	holder := agent(t)
	holder.must("open", "l", m.At("D/devserver"), "rdwr")
	if by == "flock" {
		holder.must("flock", "l")
	} else {
		holder.must("setlk", "l", "wr")
	}
	crowd = agent(t)
	got = crowd.StartGet("line", by, m.At("D/devserver"), itoa(n))
	m.awaitLine(n)
	return m, crowd, got, func() { holder.must("close", "l") }
}

// awaitLine waits until so many wait.
func (m *Mount) awaitLine(n int) {
	m.t.Helper()
	for end := time.Now().Add(patience + time.Duration(n)*10*time.Millisecond); len(m.Listing().Waiters) != n; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			m.t.Fatalf("%d of %d wait", len(m.Listing().Waiters), n)
		}
	}
}

// idleGoroutines returns how many goroutines the daemon has when all that was asked of
// it is answered: some are about to end then.
func (m *Mount) idleGoroutines() int {
	m.t.Helper()
	least := m.metric("goroutines")
	for range 10 {
		time.Sleep(10 * time.Millisecond)
		least = min(least, m.metric("goroutines"))
	}
	return least
}

// awaitWaits waits until requests that wait, for whatever, have about so many
// goroutines more than there were before.
func (m *Mount) awaitWaits(before, n int) {
	m.t.Helper()
	const ended = 16 // of those before
	for end := time.Now().Add(patience + time.Duration(n)*10*time.Millisecond); m.metric("goroutines") < before+n-ended; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			m.t.Fatalf("about %d of %d wait", m.metric("goroutines")-before, n)
		}
	}
}

// line has threads take one lock, or make one directory, or one each, and tells how many did,
// how many of them at once at the most, and what the others heard. With flockone
// they have one descriptor.
func line(by, path string, n int) (string, error) {
	debug.SetMaxThreads(1 << 16)
	var all sync.WaitGroup
	var had, inside, most atomic.Int64
	var mu sync.Mutex
	heard := make(map[string]int)
	one := -1
	if by == "flockone" {
		var err error
		if one, err = unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
			return "", err
		}
		defer unix.Close(one)
	}
	lock := func(i int) error {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread() // to end a thread takes Go longer the more there are
		if by == "mkdir" || by == "mkdirs" {
			dir := path
			if by == "mkdirs" {
				dir += itoa(i)
			}
			err := unix.Mkdir(dir, 0o777)
			if err == nil {
				had.Add(1)
				most.Store(1)
			}
			return err
		}
		fd, err := one, error(nil)
		if by != "flockone" {
			if fd, err = unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
				return err
			}
			defer unix.Close(fd)
		}
		for err = unix.EINTR; err == unix.EINTR; { // Go's scheduler sends signals
			if by != "fcntl" {
				err = unix.Flock(fd, unix.LOCK_EX)
			} else {
				const ofdSetlkw = 38
				err = unix.FcntlFlock(uintptr(fd), ofdSetlkw, &unix.Flock_t{Type: unix.F_WRLCK})
			}
		}
		if err == nil {
			had.Add(1)
			if now := inside.Add(1); now > most.Load() {
				most.Store(now)
			}
			inside.Add(-1)
		}
		return err
	}
	for i := range n {
		all.Go(func() {
			err := lock(i)
			var errno unix.Errno
			if errors.As(err, &errno) {
				mu.Lock()
				heard[errnoName(errno)]++
				mu.Unlock()
			}
		})
	}
	all.Wait()
	out := fmt.Sprintf("%d had it, %d at once", had.Load(), most.Load())
	for name, count := range heard {
		out += fmt.Sprintf("; %d: %s", count, name)
	}
	return out, nil
}
