//go:build linux

package procid

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"
)

// A flight finds out which process has a pid, for all who want to know: so one
// thread waits for a process in execve(2), however many ask. What it has found is
// in the cache, where it is known whether it is still the one.
type flight struct {
	done chan struct{} // closed when err is there
	err  error

	turn atomic.Pointer[turn]   // its own, while it asks the kernel
	on   atomic.Pointer[flight] // the parent's, which it waits for
}

// A busyError says whose process has to be known first.
type busyError struct {
	pid   int
	maker bool // it made the process, or one above: what it is, is of some use
}

func (e *busyError) Error() string { return fmt.Sprintf("pid %d is not known yet", e.pid) }
func (e *busyError) Unwrap() error { return ErrBusy }

// A failure is what became of a flight for a parent.
type failure struct {
	pid int
	err error
}

// makerWaits is how many waits, of lateTime each, a maker is worth that is in
// execve(2): who was left behind is known without it, if not as its descendant.
const makerWaits = 5

var (
	// errCircle: numbers of processes went round while they were looked at.
	errCircle = errors.New("a process descends from itself")
	// errStopped: nobody wants to know any more.
	errStopped = errors.New("stopped")
)

// flight returns the one for a pid.
func (r *Resolver) flight(pid int) *flight {
	l := &r.looks
	l.mu.Lock()
	defer l.mu.Unlock()
	if f := l.flights[pid]; f != nil {
		return f
	}
	if l.flights == nil {
		l.flights = make(map[int]*flight)
	}
	f := &flight{done: make(chan struct{})}
	l.flights[pid] = f
	go func() {
		_, f.err = r.learn(uint32(pid), f, nil)
		l.mu.Lock()
		delete(l.flights, pid)
		l.mu.Unlock()
		close(f.done)
	}()
	return f
}

// learn resolves a thread, and waits for its ancestors until stop is closed. It
// keeps no descriptor meanwhile, and ends when the process does.
func (r *Resolver) learn(tid uint32, f *flight, stop <-chan struct{}) (*Process, error) {
	const tries = 8 // each but the first follows the death of a parent in between
	var failed *failure
	for known, waits := 0, 0; known < tries; {
		g, err := r.resolve(tid, impatient, f, failed)
		if err == nil {
			return r.unpin(g), nil
		}
		var busy *busyError
		if !errors.As(err, &busy) {
			return nil, err
		}
		over := false
		failed, over, err = r.wait(f, busy.pid, stop)
		if waits++; busy.maker && (errors.Is(err, ErrBusy) || err == nil && !over && waits >= makerWaits) {
			failed, over, err = &failure{busy.pid, ErrBusy}, true, nil
		}
		if err != nil {
			return nil, err
		}
		if over {
			known++
		}
	}
	return nil, ErrBusy
}

// wait waits a while for the flight of a pid, and tells whether it is over, and if
// that has failed.
func (r *Resolver) wait(f *flight, pid int, stop <-chan struct{}) (failed *failure, over bool, err error) {
	other := r.flight(pid)
	if f != nil {
		r.looks.mu.Lock()
		circle := other.last() == f
		if !circle {
			f.on.Store(other)
			defer f.on.Store(nil)
		}
		r.looks.mu.Unlock()
		if circle {
			return &failure{pid, errCircle}, true, nil
		}
	}
	t := time.NewTimer(lateTime)
	defer t.Stop()
	select {
	case <-other.done:
	case <-t.C: // whoever asks may be dead by now
		return nil, false, nil
	case <-stop:
		return nil, false, errStopped
	}
	switch {
	case errors.Is(other.err, ErrBusy):
		return nil, true, other.err
	case other.err != nil:
		return &failure{pid, other.err}, true, nil
	}
	return nil, true, nil
}

// last is the one at the end of those that wait for each other.
func (f *flight) last() *flight {
	for {
		next := f.on.Load()
		if next == nil {
			return f
		}
		f = next
	}
}

// soon waits for a flight, or is ErrBusy where that may take long.
func (r *Resolver) soon(f *flight) error {
	t := time.NewTicker(lookTime)
	defer t.Stop()
	for began := time.Now(); time.Since(began) < lookPatience; {
		var late <-chan struct{}
		if turn := f.last().turn.Load(); turn != nil {
			late = turn.late
		}
		select {
		case <-f.done:
			return f.err
		case <-late:
			return ErrBusy
		case <-t.C: // it may wait for another one by now
		}
	}
	return ErrBusy
}

// How long a look at a process may take.
type patience int

const (
	impatient patience = iota // as long as that one is in execve(2), but not for its ancestors
	brief                     // a moment, also where it has to be waited for ancestors
)

// An answer is what the kernel said.
type answer[T any] struct {
	v   T
	err error
}

// ask runs a look at a process in its turn, for a flight if one asks. It is ErrBusy
// where that would take too long; what is found later is dropped then.
func ask[T any](r *Resolver, pid int, how patience, f *flight, look func() (T, error), drop func(T)) (v T, err error) {
	if how == brief {
		a, ok := Soon(r, pid, func() (a answer[T]) {
			a.v, a.err = look()
			return a
		}, func(a answer[T]) {
			if a.err == nil {
				drop(a.v)
			}
		})
		if !ok {
			return v, ErrBusy
		}
		return a.v, a.err
	}
	t := newTurn(f == nil)
	if !r.turns.take(t) {
		return v, ErrBusy
	}
	if f != nil {
		f.turn.Store(t)
		defer f.turn.Store(nil)
	}
	r.turns.ask(t, func() { v, err = look() })
	return v, err
}

// Glance returns the process of a thread, or nil where that can't be said at once.
func (r *Resolver) Glance(tid uint32) *Process {
	if p := r.cached(tid); p != nil || tid == 0 {
		return p
	}
	g, err := r.resolve(tid, brief, nil, nil)
	if err != nil {
		return nil
	}
	return r.unpin(g)
}

// ByPid returns the process with that pid, as [Resolver.Lookup] does for the
// id of any of its threads. A thread's id that is no pid is unknown. It is ErrBusy
// for one that is in execve(2) for long, and for a child of such a one that was
// not seen before.
func (r *Resolver) ByPid(pid int) (p *Process, err error) {
	const tries = 4 // each but the first follows the death of a process with that pid
	for range tries {
		if p, err = r.checkPid(pid, r.cached(uint32(pid))); p != nil || err != nil {
			return p, err
		}
		if err = r.soon(r.flight(pid)); err != nil {
			return nil, fmt.Errorf("pid %d: %w", pid, err)
		}
	}
	return nil, fmt.Errorf("%w: pid %d", ErrUnknown, pid)
}
