//go:build linux

package procid_test

import (
	"os"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// telling has the resolver tell moments, and returns how often it is asked for one until
// it does.
func telling(t *testing.T, r *procid.Resolver) int {
	t.Helper()
	following(t, r)
	asks := r.AskedTo()
	if asks == 0 {
		t.Skip("there are too many processors")
	}
	return asks
}

// H1: no two moments are the same with a thread made between them, and some are: then
// nobody is asked whether a thread's number is another's by now.
func TestMoments(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		if r.Moment() != 0 {
			t.Error("Moment() != 0 where nobody tells which threads are made")
		}
		asks := telling(t, r)
		last := uint64(0)
		after := func(what string) {
			t.Helper()
			now := r.Moment()
			if now != 0 && now <= last {
				t.Fatalf("Moment() = %d after %d, although %s", now, last, what)
			}
			last = max(last, now)
		}
		sure := func() { // with some system calls, as nobody has asked for a while
			for range 2 * asks {
				r.Moment()
			}
		}
		same := 0
		for range 200 {
			sure()
			if last = max(last, r.Moment()); last != 0 && r.Moment() == last {
				same++
			}
			h := start(t, "exit 0")
			after("a process was made")
			h.kill()
			h.Wait()
			last = max(last, r.Moment())
		}
		if same == 0 {
			t.Error("no two moments were the same")
		}
		for range 20 {
			r.Begin()
			sure()
			after("it began anew")
			time.Sleep(3 * time.Millisecond)
			sure()
			after("nobody has looked whether a processor was switched on and off")
		}
	})
}

// Of processors that nobody follows, or that were switched off and on, nothing is known
// until all are followed.
func TestMomentsProcessor(t *testing.T) {
	for _, what := range []struct {
		name string
		do   func(r *procid.Resolver, i int)
	}{
		{"another", func(r *procid.Resolver, _ int) { r.Renumber() }},
		{"off and on", func(r *procid.Resolver, i int) {
			r.SwitchOff(i)
			time.Sleep(3 * time.Millisecond) // it takes longer than that
		}},
	} {
		t.Run(what.name, func(t *testing.T) {
			r := newResolver(t, false)
			telling(t, r)
			for i := range 10 {
				before := uint64(0)
				for before == 0 {
					before = r.Moment()
				}
				what.do(r, i)
				for end := time.Now().Add(10 * time.Second); ; {
					now := r.Moment()
					if now != 0 && !r.Follows() {
						t.Fatalf("Moment() = %d with processors that are not followed", now)
					}
					if now > before {
						break
					}
					if now != 0 || time.Now().After(end) {
						t.Fatalf("Moment() = %d long after %d", now, before)
					}
				}
			}
		})
	}
}

// What is asked now and then waits for no processor: to look at a thread takes less.
func TestMomentsPause(t *testing.T) {
	r := newResolver(t, false)
	asks := telling(t, r)
	for range 20 {
		time.Sleep(3 * time.Millisecond)
		for i := range asks - 1 {
			if now := r.Moment(); now != 0 {
				t.Fatalf("Moment() = %d when it was asked for %d times after a pause, want 0", now, i+1)
			}
		}
	}
}

// H1: whatever makes a thread, and on whichever processor, the moment is another one.
func TestMomentsMade(t *testing.T) {
	r := newResolver(t, false)
	asks := telling(t, r)
	for _, tt := range []struct {
		name string
		do   func() error
	}{
		{"process", func() error { return forked(0) }},
		{"namespace", func() error { return forked(unix.CLONE_NEWPID) }},
		{"thread of the kernel", sqThread},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if err := tt.do(); err != nil {
				t.Skip(err)
			}
			told := false
			defer asked(r, 1)() // else it can't be said after a while
			eachProcessor(t, func() {
				for range 6 {
					before := uint64(0)
					for i := 0; before == 0 && i < 100*asks; i++ {
						before = r.Moment()
					}
					if err := tt.do(); err != nil {
						t.Fatal(err)
					}
					now := r.Moment()
					if told = told || before != 0 && now > before; now != 0 && now <= before {
						t.Fatalf("Moment() = %d after %d", now, before)
					}
				}
			})
			if !told {
				t.Skip("the machine is too slow")
			}
		})
	}
}

// eachProcessor runs f on one after the other.
func eachProcessor(t *testing.T, f func()) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var all unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		t.Fatal(err)
	}
	defer unix.SchedSetaffinity(0, &all)
	for cpu, left := 0, all.Count(); left > 0; cpu++ {
		if !all.IsSet(cpu) {
			continue
		}
		left--
		var one unix.CPUSet
		one.Set(cpu)
		if err := unix.SchedSetaffinity(0, &one); err != nil {
			t.Skip(err)
		}
		f()
	}
}

// forked makes a process that ends at once.
func forked(flags uintptr) error {
	pid, err := syscall.ForkExec("/bin/true", []string{"true"}, &syscall.ProcAttr{Sys: &syscall.SysProcAttr{Cloneflags: flags}})
	if err == nil {
		_, err = syscall.Wait4(pid, nil, 0, nil)
	}
	return err
}

// sqThread has the kernel make a thread that looks for requests of a ring.
func sqThread() error {
	const flags, sqPoll = 2, 1 << 1 // the field of struct io_uring_params, and IORING_SETUP_SQPOLL
	var params [30]uint32
	params[flags] = sqPoll
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&params)), 0)
	if errno != 0 {
		return errno
	}
	return unix.Close(int(fd))
}

// A buffer that is half full may be full before it is looked at again: then it does not
// grow, whatever happens.
func TestGrowth(t *testing.T) {
	r := procid.NewTestRing(128)
	b := record(7, 1, 1)
	var last uint64
	for i := range 1000 {
		r.Add(b)
		size, ok := r.Growth()
		if ok && size <= last {
			t.Fatalf("Growth() = %d with %d records, after %d", size, i+1, last)
		}
		last = size
		if pending := i%80 + 1; ok != (pending <= 64) {
			t.Fatalf("Growth() is %v with %d of 128 records", ok, pending)
		} else if pending == 80 {
			r.Read(1)
		}
	}
}

// H1: who gets the number of a thread is not taken for the thread's process, however the
// thread has lost it, and also while nobody needs to be asked whether it has.
func TestReusedThreadTold(t *testing.T) {
	for _, how := range []string{"execthread", "threads 3"} {
		t.Run(how, func(t *testing.T) {
			r := newResolver(t, false)
			asks := telling(t, r)
			defer asked(r, 1)() // else each is looked at after a while
			for range 2 {
				h := start(t, how)
				tids := h.numbers(t)
				tid := tids[slices.IndexFunc(tids, func(tid int) bool { return tid != h.pid() })]
				old := lookup(t, r, tid)
				for range 2 * asks {
					lookup(t, r, tid)
				}
				if how == "execthread" {
					h.stdin.Write([]byte{'\n'})
					h.numbers(t)
				} else {
					h.kill()
					h.Wait()
				}
				other := startWithPid(t, tid)
				if p := lookup(t, r, tid); p == old || p.ID().Pid != other.pid() {
					t.Fatalf("Lookup(%d) = %v, want pid %d", tid, p.ID(), other.pid())
				}
				if how == "execthread" && lookup(t, r, h.pid()).ID() != old.ID() {
					t.Fatal("the process is another one after execve(2) by its thread")
				}
			}
		})
	}
}

// After Close nobody looks at a buffer that is gone, also if others were just begun with.
func TestMomentsClose(t *testing.T) {
	for range 20 {
		r, err := procid.NewResolver(procid.Options{})
		if err != nil {
			t.Fatal(err)
		}
		asks := 0
		if r.FollowBirths() == nil {
			asks = r.AskedTo()
		}
		stop := asked(r, 3)
		if asks > 0 {
			r.Renumber()
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		if now := r.Moment(); now != 0 {
			t.Errorf("Moment() = %d after Close", now)
		}
		stop()
	}
}

// asked has so many ask without a pause, until stop is called.
func asked(r *procid.Resolver, many int) (stop func()) {
	var asking sync.WaitGroup
	done := make(chan struct{})
	for range many {
		asking.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
					r.Lookup(uint32(os.Getpid()), nil)
					r.Moment()
				}
			}
		})
	}
	return func() { close(done); asking.Wait() }
}

// H1: however many ask at a time, a number that was just given out again is not taken
// for its former process.
func TestReusedUnderWay(t *testing.T) {
	r := following(t, newResolver(t, false))
	defer asked(r, 3)()
	h := start(t, "exit 0")
	h.numbers(t)
	for range 6 {
		old := lookup(t, r, h.pid())
		lookup(t, r, h.pid())
		h.kill()
		h.Wait()
		h = startWithPid(t, h.pid())
		if p := lookup(t, r, h.pid()); p == old || p.ID() == old.ID() {
			t.Fatalf("Lookup(%d) = %v, the process that is gone", h.pid(), p.ID())
		}
	}
}
