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
	stuck   map[int]int     // by pid; how many were not over in time, and are not yet
	flights map[int]*flight // by pid
}

// Within returns what look finds out about a process, which waits as long as that
// one is in execve(2), or false if it takes longer than d. Then look goes on by
// itself.
func Within[T any](d time.Duration, look func() T) (v T, ok bool) {
	answer := make(chan T, 1)
	go func() { answer <- look() }()
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case v = <-answer:
		return v, true
	case <-t.C:
		return v, false
	}
}

// Soon returns what look reads of that very process, although the kernel shows it only
// while that one is not in execve(2), or false if it was not read in time. Then
// look goes on by itself, and drop, if there is one, is given the result. Until
// that is over nobody else waits for the process.
//
// look asks the kernel, and does nothing else that may wait: no lock is taken there.
func Soon[T any](r *Resolver, pid int, look func() T, drop func(T)) (v T, ok bool) {
	t := newTurn(false)
	if r.looks.busy(pid) || !r.turns.take(t) {
		return v, false
	}
	if r.looks.busy(pid) { // by now
		r.turns.give(t)
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
			r.looks.add(pid, -1)
		}
	}()
	select {
	case v = <-answer:
		return v, true
	case <-t.late:
		r.looks.add(pid, 1)
		close(gone)
		return v, false
	}
}

// busy reports whether a look at a process goes on that was not over in time.
func (l *looks) busy(pid int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.stuck[pid] > 0
}

// add counts the looks at a process that were not over in time.
func (l *looks) add(pid, n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stuck == nil {
		l.stuck = make(map[int]int)
	}
	if l.stuck[pid] += n; l.stuck[pid] == 0 {
		delete(l.stuck, pid)
	}
}
