//go:build linux

package procid

import (
	"errors"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// ErrBusy says that a process cannot be looked at now: it is in execve(2), which
// waits for something. It lives.
var ErrBusy = errors.New("it is in execve(2)")

// IsShort reports whether an error is for want of descriptors or memory. It says more
// about this daemon than about what it looked at: the next one may do better.
func IsShort(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM)
}

const (
	// lookTime is how long a look at a process may wait in the kernel. An execve(2)
	// that waits for nobody is over in a fraction of it.
	lookTime = 50 * time.Millisecond
	// lookPatience bounds a look that does not wait in the kernel, but for its
	// thread's turn on a machine with too much to do.
	lookPatience = 5 * time.Second
	// maxStuck bounds the looks that the kernel keeps, each of which keeps a
	// thread.
	maxStuck = 1024
)

// looks are those that others know of.
type looks struct {
	mu      sync.Mutex
	at      map[int]*looked // by pid
	flights map[int]*flight // by pid
}

// A looked is a process, or a thread, that is being looked at by one at a time, so
// that it has one thread wait for it.
type looked struct {
	turn chan struct{} // has room for who looks at it

	// Guarded by looks.mu.
	users int       // who looks at it, or is about to
	stuck bool      // the look was not over in time, and is not yet
	since time.Time // when that was seen
}

// Within returns what look finds out about a process, which waits as long as that
// one is in execve(2) or has its memory locked, or false if it takes longer than d.
// Then look goes on by itself.
func Within[T any](d time.Duration, look func() T) (v T, ok bool) {
	answer := make(chan T, 1)
	go func() { answer <- look() }()
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case v = <-answer:
		return v, true
	case <-t.C:
	}
	select {
	case v = <-answer: // it was there, but the machine stood still
		return v, true
	default:
		return v, false
	}
}

// Soon returns what look reads of that very process, although the kernel shows it only
// while that one is not in execve(2), or does not change what it has mapped, or false
// if it was not read in time. Then look goes on by itself, and drop, if there is one,
// is given the result. Until that is over nobody else waits for the process; one at a
// time looks at it.
//
// look asks the kernel, and does nothing else that may wait: no lock is taken there.
func Soon[T any](r *Resolver, pid int, look func() T, drop func(T)) (v T, ok bool) {
	at := r.looks.enter(pid)
	if at == nil {
		return v, false
	}
	defer r.looks.leave(pid, at)
	t := newTurn(false)
	if !r.turns.take(t) {
		return v, false
	}
	answer, gone := make(chan T), make(chan struct{})
	go func() {
		var v T
		r.turns.ask(t, func() { v = look() })
		select {
		case answer <- v:
		case <-gone:
			if drop != nil {
				drop(v)
			}
			r.looks.setStuck(pid, at, false)
		}
	}()
	select {
	case v = <-answer:
		return v, true
	case <-t.late:
		r.looks.setStuck(pid, at, true)
		close(gone)
		return v, false
	}
}

// enter waits until nobody looks at a process, or returns nil if that takes long.
// The caller leaves.
func (l *looks) enter(pid int) *looked {
	l.mu.Lock()
	x := l.at[pid]
	if x == nil {
		if l.at == nil {
			l.at = make(map[int]*looked)
		}
		x = &looked{turn: make(chan struct{}, 1)}
		l.at[pid] = x
	}
	if x.stuck {
		l.mu.Unlock()
		return nil
	}
	x.users++
	l.mu.Unlock()
	x.turn <- struct{}{}
	l.mu.Lock()
	stuck := x.stuck // by now
	l.mu.Unlock()
	if stuck {
		l.leave(pid, x)
		return nil
	}
	return x
}

func (l *looks) leave(pid int, x *looked) {
	l.mu.Lock()
	x.users--
	l.dropLocked(pid, x)
	l.mu.Unlock()
	<-x.turn
}

func (l *looks) setStuck(pid int, x *looked, stuck bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	x.stuck, x.since = stuck, time.Now()
	l.dropLocked(pid, x)
}

func (l *looks) dropLocked(pid int, x *looked) {
	if x.users == 0 && !x.stuck {
		delete(l.at, pid)
	}
}

// StuckFor returns for how long it has been known that a look at a process (see Soon)
// takes long; 0: there is none.
func (r *Resolver) StuckFor(pid int) time.Duration {
	l := &r.looks
	l.mu.Lock()
	defer l.mu.Unlock()
	if x := l.at[pid]; x != nil && x.stuck {
		return max(time.Since(x.since), 1)
	}
	return 0
}
