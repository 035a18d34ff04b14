//go:build linux

package procid_test

import (
	"errors"
	"os"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/procid"
)

func TestSelf(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		p := lookup(t, r, os.Getpid())
		if p.ID() != procid.Self() {
			t.Errorf("Lookup(own pid).ID() = %v, want Self() = %v", p.ID(), procid.Self())
		}
		if got, want := p.UID(), uint32(os.Geteuid()); got != want {
			t.Errorf("UID() = %d, want %d", got, want)
		}
		if got, want := p.ID().String(), strconv.Itoa(os.Getpid())+"@"+strconv.FormatUint(p.ID().Start, 10); got != want {
			t.Errorf("String() = %q, want %q", got, want)
		}
		if !r.Alive(p.ID()) {
			t.Errorf("Alive(%v) = false of this process", p.ID())
		}
	})
}

// H1: the owner is all of its threads.
func TestThreadsAreOneProcess(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		h := start(t, "threads 5")
		tids := h.numbers(t)
		for range 2 { // resolved, then cached
			for _, tid := range tids {
				p := lookup(t, r, tid)
				if p.ID().Pid != h.pid() {
					t.Errorf("Lookup(%d) = %v, want pid %d", tid, p.ID(), h.pid())
				}
				if q := lookup(t, r, h.pid()); p != q {
					t.Errorf("Lookup(%d) = %p, Lookup(%d) = %p: want one process", tid, p, h.pid(), q)
				}
			}
		}
		if p, err := r.ByPid(h.pid()); err != nil || p != lookup(t, r, tids[0]) {
			t.Errorf("ByPid(%d) = %v, %v, want the same process", h.pid(), p, err)
		}
		if p, err := r.ByPid(tids[0]); tids[0] != h.pid() && !errors.Is(err, procid.ErrUnknown) {
			t.Errorf("ByPid(thread id) = %v, %v, want ErrUnknown", p, err)
		}
		h.kill()
		zombie(t, h.pid())
		for _, tid := range append(tids, h.pid()) {
			if p, err := r.Lookup(uint32(tid), nil); !errors.Is(err, procid.ErrUnknown) {
				t.Errorf("Lookup(%d) of a dead process = %v, %v, want ErrUnknown", tid, p, err)
			}
		}
	})
}

// H4: what can't be resolved is nobody.
func TestUnknown(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		gone := start(t, "exit 0")
		gone.numbers(t)
		gone.kill()
		gone.Wait()
		for _, tid := range []uint32{0, uint32(gone.pid()), 1 << 22, 1 << 31, 1<<32 - 1} {
			if p, err := r.Lookup(tid, nil); !errors.Is(err, procid.ErrUnknown) {
				t.Errorf("Lookup(%d) = %v, %v, want ErrUnknown", tid, p, err)
			}
			if p, err := r.ByPid(int(int32(tid))); !errors.Is(err, procid.ErrUnknown) {
				t.Errorf("ByPid(%d) = %v, %v, want ErrUnknown", int32(tid), p, err)
			}
		}
		for _, id := range []procid.ID{{}, {Pid: -1}, {Pid: gone.pid(), Start: 1}, {Pid: os.Getpid(), Start: procid.Self().Start + 1}} {
			if r.Alive(id) {
				t.Errorf("Alive(%v) = true", id)
			}
			if got := r.ExitOf(id); got.Known || got.Success() {
				t.Errorf("ExitOf(%v) = %v, want unknown", id, got)
			}
			if got := r.Cmdline(id); got != "" {
				t.Errorf("Cmdline(%v) = %q, want none", id, got)
			}
		}
		if err := r.Watch(procid.ID{}, func(procid.ID, procid.Exit) {}); !errors.Is(err, procid.ErrUnknown) {
			t.Errorf("Watch(zero ID) = %v, want ErrUnknown", err)
		}
	})
}

func TestZombieIsDead(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		seen, unseen := start(t, "exit 3"), start(t, "exit 3")
		unseenID := identify(t, unseen)
		seen.numbers(t)
		seenID := lookup(t, r, seen.pid()).ID()
		for _, h := range []*process{seen, unseen} {
			h.stdin.Close()
			zombie(t, h.pid())
		}
		for _, id := range []procid.ID{seenID, unseenID} {
			if r.Alive(id) {
				t.Errorf("Alive(%v) = true of a zombie", id)
			}
			if got, want := r.ExitOf(id), (procid.Exit{Known: true, Code: 3}); got != want {
				t.Errorf("ExitOf(%v) = %v, want %v", id, got, want)
			}
			if p, err := r.Lookup(uint32(id.Pid), nil); !errors.Is(err, procid.ErrUnknown) {
				t.Errorf("Lookup(%d) = %v, %v, want ErrUnknown", id.Pid, p, err)
			}
		}
	})
}

// identify returns a helper's ID without the resolver under test.
func identify(t *testing.T, h *process) procid.ID {
	t.Helper()
	h.numbers(t)
	return lookup(t, newResolver(t, false), h.pid()).ID()
}

func TestDeadLeaderLives(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		h := start(t, "deadleader 7")
		h.numbers(t)
		p := lookup(t, r, h.pid())
		ended := watch(t, r, p.ID())
		if !r.Alive(p.ID()) || !newResolver(t, false).Alive(p.ID()) {
			t.Errorf("Alive(%v) = false though a thread lives", p.ID())
		}
		if q := lookup(t, r, h.pid()); q != p {
			t.Errorf("Lookup(%d) = %p, want %p", h.pid(), q, p)
		}
		select {
		case e := <-ended:
			t.Fatalf("watch called with %v though a thread lives", e)
		default:
		}
		h.stdin.Close()
		zombie(t, h.pid())
		// The status of the process, not the one of its first thread.
		if got, want := <-ended, (ending{p.ID(), procid.Exit{Known: true, Code: 7}}); got != want {
			t.Errorf("watch called with %v, want %v", got, want)
		}
	})
}

// A thread that execs takes over the pid of its process, and its own id is free
// for others from then on.
func TestExecByThread(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		h := start(t, "execthread")
		tid := h.numbers(t)[0]
		p := lookup(t, r, tid)
		ended := watch(t, r, p.ID())
		h.stdin.Write([]byte{'\n'})
		if got := h.numbers(t)[0]; got != p.ID().Pid {
			t.Fatalf("pid %d after exec, want %d", got, p.ID().Pid)
		}
		if q, err := r.Lookup(uint32(tid), nil); !errors.Is(err, procid.ErrUnknown) {
			t.Errorf("Lookup(%d) of the former thread = %v, %v, want ErrUnknown", tid, q, err)
		}
		if q := lookup(t, r, h.pid()); q != p {
			t.Errorf("Lookup(%d) = %v, want the process it was, %v", h.pid(), q.ID(), p.ID())
		}
		select {
		case e := <-ended:
			t.Fatalf("watch called with %v at exec", e)
		default:
		}
		h.kill()
		if got, want := (<-ended).id, p.ID(); got != want {
			t.Errorf("watch called for %v, want %v", got, want)
		}
	})
}

// H1: a thread id that is used again is never taken for its former thread.
func TestReusedThreadID(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		for _, kind := range []string{"leader", "thread"} {
			t.Run(kind, func(t *testing.T) {
				first := start(t, "threads 3")
				tids := first.numbers(t)
				tid := first.pid()
				if kind == "thread" {
					tid = tids[slices.IndexFunc(tids, func(tid int) bool { return tid != first.pid() })]
				}
				old := lookup(t, r, tid)
				first.kill()
				first.Wait()

				afterTick(t, old.ID().Start)
				second := startWithPid(t, tid)
				p := lookup(t, r, tid)
				if p == old || p.ID() == old.ID() {
					t.Errorf("Lookup(%d) = %v, the process that is gone", tid, p.ID())
				}
				if p.ID().Pid != second.pid() {
					t.Errorf("Lookup(%d) = %v, want pid %d", tid, p.ID(), second.pid())
				}
				if r.Alive(old.ID()) {
					t.Errorf("Alive(%v) = true", old.ID())
				}
				if p.Descends(old.ID()) {
					t.Errorf("%v descends from %v", p.ID(), old.ID())
				}
				if got := r.Cmdline(old.ID()); got != "" {
					t.Errorf("Cmdline(%v) = %q, want none", old.ID(), got)
				}
			})
		}
	})
}

// Within a tick of the clock the ID does not tell a process from a former one
// with its pid, but the descriptor in the cache does. Only someone who sets the
// next pid, as here, can have a pid go round that fast.
func TestReusedWithinTick(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		for range 20 {
			first := start(t, "exit 1")
			first.numbers(t)
			old := lookup(t, r, first.pid())
			ended := watch(t, r, old.ID())
			first.kill()
			first.Wait()
			second := startWithPid(t, first.pid())
			p := lookup(t, r, second.pid())
			if p == old {
				t.Fatalf("Lookup(%d) = %v, the process that is gone", second.pid(), p.ID())
			}
			<-ended
			if p.ID() == old.ID() {
				return
			}
			second.kill()
			second.Wait()
		}
		t.Skip("no two processes started in one tick")
	})
}

// afterTick waits until processes get a later start time than that.
func afterTick(t *testing.T, start uint64) {
	t.Helper()
	const tick = 10 * time.Millisecond // USER_HZ is 100, see proc(5)
	for {
		var now unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
			t.Fatal(err)
		}
		if uint64(now.Nano()/int64(tick)) > start {
			return
		}
		time.Sleep(time.Millisecond)
	}
}

// H1: processes with one pid that began in the same tick are told apart, whatever the cache
// has forgotten of them since. One that lives stays the same.
func TestSameTick(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		pidfd := func(pid int) int {
			fd, err := unix.PidfdOpen(pid, 0)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { unix.Close(fd) })
			return fd
		}
		h := start(t, "exit 0")
		h.numbers(t)
		lives, dead := pidfd(os.Getpid()), pidfd(h.pid())
		h.kill()
		h.Wait()

		const number, other = 7, 8
		begun := procid.Now()
		see := func(pid, fd int) procid.ID {
			id, err := r.See(number, procid.ID{Pid: pid, Start: begun}, fd)
			if err != nil {
				t.Fatal(err)
			}
			return id
		}
		seen := make(map[procid.ID]bool)
		for i := range 4 {
			id := see(number, dead)
			if seen[id] {
				t.Errorf("the %d. process has the ID of one before", i+1)
			}
			seen[id] = true
			if i%2 == 1 {
				see(other, lives) // one of its threads has the number
			}
		}
		id := see(number, lives)
		if seen[id] {
			t.Error("a process that lives has the ID of one before")
		}
		if see(other, lives); see(number, lives) != id {
			t.Error("it has another ID when it is seen again")
		}
	})
}

// startWithPid starts a helper that gets this very pid: the kernel gives them
// out in order, and lets root say where to go on.
func startWithPid(t *testing.T, pid int) *process {
	t.Helper()
	const lastPid = "/proc/sys/kernel/ns_last_pid"
	for range 200 {
		if err := os.WriteFile(lastPid, []byte(strconv.Itoa(pid-1)), 0); err != nil {
			t.Skipf("cannot choose a pid: %v", err)
		}
		h := start(t, "exit 0")
		h.numbers(t)
		if h.pid() == pid {
			return h
		}
		h.kill() // somebody else was faster
		h.Wait()
	}
	t.Skipf("pid %d was not given out again", pid)
	return nil
}

// The cache is bounded, and so are its descriptors.
func TestCacheIsBounded(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		const threads, bound = 1500, 1024
		h := start(t, "threads "+strconv.Itoa(threads))
		tids := h.numbers(t)
		watched := watch(t, r, procid.Self()) // stands for a lock's owner
		self := lookup(t, r, os.Getpid())
		before := descriptors(t)
		for _, tid := range tids {
			lookup(t, r, tid)
		}
		if got := descriptors(t) - before; got > bound+8 || got < bound/2 {
			t.Errorf("%d descriptors for %d threads, want about %d", got, threads, bound)
		}
		for _, tid := range tids {
			if p := lookup(t, r, tid); p.ID().Pid != h.pid() {
				t.Fatalf("Lookup(%d) = %v, want pid %d", tid, p.ID(), h.pid())
			}
		}
		if p := lookup(t, r, os.Getpid()); p != self {
			t.Errorf("a watched process was forgotten")
		}
		if len(watched) > 0 {
			t.Errorf("watch of a living process was called")
		}
	})
}

// The dead make room before the living, so that those keep what was recorded of
// their descent.
func TestDeadLeaveCacheFirst(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		living := start(t, "exit 0")
		living.numbers(t)
		oldest := lookup(t, r, living.pid())
		for range 2 {
			h := start(t, "threads 900")
			for _, tid := range h.numbers(t) {
				lookup(t, r, tid)
			}
			h.kill()
			h.Wait()
		}
		if p := lookup(t, r, living.pid()); p != oldest {
			t.Errorf("Lookup(%d) = %p, want %p: a living process made room for dead ones", living.pid(), p, oldest)
		}
	})
}

func TestClose(t *testing.T) {
	t.Run("native", func(t *testing.T) { testClose(t, false) })
	t.Run("compat", func(t *testing.T) { testClose(t, true) })
}

func testClose(t *testing.T, compat bool) {
	h := start(t, "exit 0")
	h.numbers(t)
	before := descriptors(t)
	r, err := procid.NewResolver(procid.Options{Compat: compat})
	if err != nil {
		t.Fatal(err)
	}
	id := lookup(t, r, h.pid()).ID()
	ended := watch(t, r, id)
	if err := r.Close(); err != nil {
		t.Errorf("Close() = %v", err)
	}
	if err := r.Close(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("second Close() = %v, want os.ErrClosed", err)
	}
	if p, err := r.Lookup(uint32(h.pid()), nil); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Lookup after Close = %v, %v, want os.ErrClosed", p, err)
	}
	if err := r.Watch(id, func(procid.ID, procid.Exit) {}); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Watch after Close = %v, want os.ErrClosed", err)
	}
	if got := r.KnowsExits(); compat && got {
		t.Errorf("KnowsExits() after Close = true")
	}
	after := descriptors(t)
	h.kill()
	h.Wait()
	if len(ended) > 0 {
		t.Errorf("watch called after Close")
	}
	if after > before {
		t.Errorf("%d descriptors left open", after-before)
	}
}

// Many callers at once, as in a mount under load.
func TestConcurrentUse(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		h := start(t, "threads 30")
		tids := h.numbers(t)
		done := make(chan struct{})
		for i := range 4 {
			go func() {
				defer func() { done <- struct{}{} }()
				for j := range 400 {
					tid := tids[(i*7+j)%len(tids)]
					p, err := r.Lookup(uint32(tid), nil)
					if err != nil || p.ID().Pid != h.pid() {
						t.Errorf("Lookup(%d) = %v, %v", tid, p, err)
						return
					}
					if !r.Alive(p.ID()) || !p.Descends(procid.Self()) {
						t.Errorf("%v is not alive or not our child", p.ID())
						return
					}
					if j%16 == 0 {
						r.KnowsExits()
						r.Watch(p.ID(), func(procid.ID, procid.Exit) {})
						r.Unwatch(p.ID())
					}
				}
			}()
		}
		for range 4 {
			<-done
		}
	})
}

func TestCmdline(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		h := start(t, "tree 1")
		pids := h.numbers(t) // the child was started with the parent's pid as argument
		child := lookup(t, r, pids[1])
		if got, want := r.Cmdline(child.ID()), "/proc/self/exe "+strconv.Itoa(pids[0]); got != want {
			t.Errorf("Cmdline() = %q, want %q", got, want)
		}
	})
}

// An io_uring worker, like any thread, may do the request: nothing may depend
// on the first thread. This process's own threads stand for it.
func TestOwnThread(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		if got := lookup(t, r, unix.Gettid()).ID(); got != procid.Self() {
			t.Errorf("Lookup(own thread) = %v, want %v", got, procid.Self())
		}
	})
}
