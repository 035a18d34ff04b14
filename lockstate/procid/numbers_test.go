//go:build linux

package procid_test

import (
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// H1: no two moments are the same with a thread made between them, and some are: then
// nobody is asked whether a thread's number is another's by now.
func TestMoments(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		if r.Moment() != 0 {
			t.Error("Moment() != 0 where nobody tells which threads are made")
		}
		following(t, r)
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
			for range 2 * runtime.NumCPU() {
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
			r := following(t, newResolver(t, false))
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

// H1: however many ask at a time, a number that was just given out again is not taken
// for its former process.
func TestReusedUnderWay(t *testing.T) {
	r := following(t, newResolver(t, false))
	var asking sync.WaitGroup
	stop := make(chan struct{})
	for range 3 {
		asking.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					r.Lookup(uint32(os.Getpid()), nil)
				}
			}
		})
	}
	defer asking.Wait()
	defer close(stop)
	h := start(t, "exit 0")
	h.numbers(t)
	for range 25 {
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
