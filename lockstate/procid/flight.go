//go:build linux

package procid

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// A flight finds out which process has a pid, for all who want to know: so one
// thread waits for a process in execve(2), however many ask.
type flight struct {
	done chan struct{} // closed when the rest is there
	proc *Process
	err  error

	tid   atomic.Int32           // of the thread that looks; 0: none does
	on    atomic.Pointer[flight] // the parent's, which it waits for
	stuck atomic.Bool            // the thread was seen to wait
}

// errCircle: numbers of processes went round while they were looked at.
var errCircle = errors.New("a process descends from itself")

// flight returns the one for a pid, or nil if there are too many.
func (r *Resolver) flight(pid int) *flight {
	l := &r.looks
	l.mu.Lock()
	defer l.mu.Unlock()
	f := l.flights[pid]
	if f != nil || len(l.flights) >= maxStuck {
		return f
	}
	if l.flights == nil {
		l.flights = make(map[int]*flight)
	}
	f = &flight{done: make(chan struct{})}
	l.flights[pid] = f
	go func() {
		f.proc, f.err = r.settled(r.resolve(uint32(pid), patient, f))
		l.mu.Lock()
		delete(l.flights, pid)
		l.mu.Unlock()
		close(f.done)
	}()
	return f
}

func (r *Resolver) settled(g *group, err error) (*Process, error) {
	if err != nil {
		return nil, err
	}
	return r.unpin(g), nil
}

// find is kernel.find, of which is known which thread does it.
func (f *flight) find(k kernel, tid int) (*sighting, error) {
	if f == nil {
		return k.find(tid)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	f.tid.Store(int32(unix.Gettid()))
	defer f.tid.Store(0)
	return k.find(tid)
}

// wait waits for another flight.
func (r *Resolver) wait(f, other *flight) (*Process, error) {
	if other == nil {
		return nil, ErrBusy
	}
	if f != nil {
		r.looks.mu.Lock()
		circle := other.last() == f
		if !circle {
			f.on.Store(other)
			defer f.on.Store(nil)
		}
		r.looks.mu.Unlock()
		if circle {
			return nil, errCircle
		}
	}
	<-other.done
	return other.proc, other.err
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

// soon is wait, or ErrBusy where that may take long.
func (r *Resolver) soon(f *flight) (*Process, error) {
	if f == nil {
		return nil, ErrBusy
	}
	t := time.NewTicker(lookTime)
	defer t.Stop()
	for began, waits := time.Now(), false; ; {
		if f.last().stuck.Load() {
			return nil, ErrBusy
		}
		select {
		case <-f.done:
			return f.proc, f.err
		case <-t.C:
		}
		end, waited := f.last(), waits
		tid := int(end.tid.Load())
		if waits = tid != 0 && inKernel(tid); waits && waited {
			end.stuck.Store(true)
		} else if time.Since(began) > lookPatience {
			return nil, ErrBusy
		}
	}
}

// How long a look at a process may wait for its ancestors.
type patience int

const (
	impatient patience = iota // not at all
	brief                     // for a moment
	patient                   // until they can be looked at
)

// parentBy returns a process's parent, which is not in the cache. f is the flight
// that asks, if one does.
func (r *Resolver) parentBy(ppid int, how patience, f *flight) (*Process, error) {
	switch how {
	case impatient:
		return nil, ErrBusy
	case brief:
		return r.ByPid(ppid)
	}
	p, err := r.wait(f, r.flight(ppid))
	if err != nil {
		return nil, err
	}
	return r.checkPid(ppid, p)
}

// Glance returns the process of a thread, or nil where that can't be said at once.
func (r *Resolver) Glance(tid uint32) *Process {
	if p := r.cached(tid); p != nil || tid == 0 {
		return p
	}
	p, _ := Soon(r, int(tid), func() *Process {
		p, err := r.settled(r.resolve(tid, brief, nil))
		if err != nil {
			return nil
		}
		return p
	}, nil)
	return p
}

// ByPid returns the process with that pid, as [Resolver.Lookup] does for the
// id of any of its threads. A thread's id that is no pid is unknown. It is ErrBusy
// for one that is in execve(2) for long, and for a child of such a one that was
// not seen before.
func (r *Resolver) ByPid(pid int) (p *Process, err error) {
	if p, err = r.checkPid(pid, r.cached(uint32(pid))); p != nil || err != nil {
		return p, err
	}
	if p, err = r.soon(r.flight(pid)); err != nil {
		return nil, fmt.Errorf("pid %d: %w", pid, err)
	}
	return r.checkPid(pid, p)
}
