//go:build linux

package procid_test

import (
	"os"
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
		same := 0
		for range 200 {
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
			after("it began anew")
			time.Sleep(3 * time.Millisecond)
			after("nobody has looked whether a processor was switched on and off")
		}
	})
}

// Of processors that nobody follows nothing is known, until they are followed.
func TestMomentsProcessor(t *testing.T) {
	following(t, newResolver(t, false))
	r := following(t, newResolver(t, false))
	for range 10 {
		before := r.Moment()
		r.Renumber()
		time.Sleep(2 * time.Millisecond)
		if now := r.Moment(); now != 0 && !r.Follows() {
			t.Fatalf("Moment() = %d with processors that are not followed", now)
		}
		for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
			if now := r.Moment(); now > before {
				break
			} else if now != 0 || time.Now().After(end) {
				t.Fatalf("Moment() = %d long after %d", now, before)
			}
		}
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
