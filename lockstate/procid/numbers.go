//go:build linux

package procid

import (
	"sync/atomic"
	"time"
)

// numbers tell, mostly without a system call, that no number has come to mean another
// thread since an earlier moment. For that one has to be made, which the kernel writes
// down before it may run (see rings): if the buffers have not grown, none was. (The
// thread that calls execve(2) gets the number of its process's first one: that is the
// same process still.)
//
// What is made on a processor that was switched on has no buffer, and so the list of the
// processors is read now and then.
type numbers struct {
	rings *rings      // guarded by Resolver.mu; nil: nothing tells
	other atomic.Bool // the processors are others than those that have a buffer

	began time.Time
	grown atomic.Uint64 // what is added to the growth of rings, so that no moment comes again
	read  atomic.Int64  // when the list of the processors was read, and was the same: ns since began
}

const (
	// listTime is for how long nobody reads the list of the processors again. One that
	// is switched on is listed before it may run anything, and for its number to be
	// another's a process has to end meanwhile, and all other numbers to be in use.
	listTime = time.Millisecond
	// listGap is what a processor needs at least to be switched on and off again.
	listGap = 2 * time.Millisecond
)

// momentLocked returns a number that is the same for two moments only if no thread was
// made between them; 0: that can't be said.
func (r *Resolver) momentLocked() uint64 {
	n := &r.numbers
	if n.rings == nil || n.other.Load() {
		return 0
	}
	now, last := time.Since(n.began), time.Duration(n.read.Load())
	if now-last > listTime {
		if !n.rings.sameCPUs() {
			if !n.other.Swap(true) {
				go r.followOthers()
			}
			return 0
		}
		if now-last > listGap {
			n.grown.Add(1)
		}
		n.read.Store(int64(now))
	}
	size, ok := n.rings.growth()
	if !ok {
		return 0
	}
	return n.grown.Load() + size
}

// follow has the numbers go by other buffers; nil: by none. The caller closes those of
// before after that.
func (r *Resolver) follow(s *rings) {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := &r.numbers
	if n.rings != nil {
		size, _ := n.rings.growth()
		n.grown.Add(size)
	}
	n.grown.Add(1)
	n.rings = s
	n.other.Store(false)
}

// followOthers begins with the processors that there are now.
func (r *Resolver) followOthers() {
	b := &r.births
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.rings != nil && b.rings == r.numbers.rings && r.numbers.other.Load() {
		r.doubtBirthsLocked()
	}
}

// caller is cached for the thread that has sent a request, and so lives: it is enough
// that its number is not another's.
func (r *Resolver) caller(tid uint32) *Process {
	r.mu.RLock()
	defer r.mu.RUnlock()
	t := r.threads[tid]
	if t == nil {
		return nil
	}
	// Before it is looked at: who gets the number after that is made after that.
	now := r.momentLocked()
	if now == 0 || t.seen.Load() != now {
		if !t.current() {
			return nil
		}
		t.seen.Store(now)
	}
	t.used.Store(r.clock.Add(1))
	return t.group.proc
}
