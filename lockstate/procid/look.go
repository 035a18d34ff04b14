//go:build linux

package procid

import (
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// ErrBusy says that a process cannot be looked at now: it is in execve(2), which
// waits for something. It lives.
var ErrBusy = errors.New("it is in execve(2)")

const (
	// lookTime is how long a look at a process may wait. An execve(2) that
	// waits for nobody is over in a fraction of it.
	lookTime = 50 * time.Millisecond
	// lookPatience bounds a look that does not wait in the kernel, but for its
	// turn on a machine with too much to do.
	lookPatience = 5 * time.Second
	// maxStuck bounds the looks that are not over, each of which keeps a
	// thread.
	maxStuck = 1024
)

// looks are those that were not over in time.
type looks struct {
	mu      sync.Mutex
	stuck   map[int]<-chan struct{} // by pid; closed when the look is over
	flights map[int]*flight         // by pid
	finding atomic.Int64            // threads that look for flights
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
func Soon[T any](r *Resolver, pid int, look func() T, drop func(T)) (v T, ok bool) {
	if r.looks.busy(pid) {
		return v, false
	}
	answer, late, over := make(chan T), make(chan struct{}), make(chan struct{})
	var tid atomic.Int32
	go func() {
		defer close(over)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		tid.Store(int32(unix.Gettid()))
		v := look()
		select {
		case answer <- v:
		case <-late:
			if drop != nil {
				drop(v)
			}
		}
	}()
	t := time.NewTicker(lookTime)
	defer t.Stop()
	for began, waits := time.Now(), false; ; {
		select {
		case v = <-answer:
			return v, true
		case <-t.C:
		}
		waited := waits
		if waits = inKernel(int(tid.Load())); waits && waited || time.Since(began) > lookPatience {
			r.looks.add(pid, over)
			close(late)
			return v, false
		}
	}
}

// inKernel reports whether a thread of this process waits where only a kill ends
// it, as who looks at a process in execve(2) does.
func inKernel(tid int) bool {
	st, err := readStatus(tid)
	return err == nil && st.state == 'D'
}

func (l *looks) busy(pid int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	over, ok := l.stuck[pid]
	if !ok {
		if len(l.stuck) >= maxStuck {
			l.sweep()
		}
		return len(l.stuck) >= maxStuck
	}
	select {
	case <-over:
		delete(l.stuck, pid)
		return false
	default:
		return true
	}
}

// sweep forgets the looks that are over.
func (l *looks) sweep() {
	for pid, over := range l.stuck {
		select {
		case <-over:
			delete(l.stuck, pid)
		default:
		}
	}
}

func (l *looks) add(pid int, over <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stuck == nil {
		l.stuck = make(map[int]<-chan struct{})
	}
	l.stuck[pid] = over
}
