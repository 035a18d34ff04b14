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
// What is made on a processor that was switched on has no buffer. So the list of the
// processors is read again and again, and where that was not done for a while, in which one
// may have been switched off and on, nothing is said before it is known that all buffers
// are still written to.
type numbers struct {
	rings *rings      // guarded by Resolver.mu; nil: nothing tells
	other atomic.Bool // the processors are others than those that have a buffer

	began time.Time
	grown atomic.Uint64 // what is added to the growth of rings, so that no moment comes again
	read  atomic.Int64  // when the list of the processors was read, and was the same: ns since began
	asked atomic.Int64  // how often the moment was asked for since that was not done for a while
	sure  atomic.Uint64 // what grown was when all buffers were written to
}

const (
	// listTime is for how long nobody reads the list of the processors again. One that
	// is switched on is listed before it may run anything, and for its number to be
	// another's a process has to end meanwhile, and all other numbers to be in use.
	listTime = time.Millisecond
	// listGap is less than a processor needs to be switched off and on again.
	listGap = 2 * time.Millisecond
	// wholeWorth is how many looks at a thread take as long, for each processor, as to
	// find out whether all buffers are written to, for which each has to be asked. So
	// what comes in a few at a time, with pauses, never waits for that.
	wholeWorth = 16
	// numbersMost is with how many processors it takes less to look at their buffers,
	// to which others write, than at a thread.
	numbersMost = 16
)

// momentLocked returns a number that is the same for two moments only if no thread was
// made between them; 0: that can't be said.
func (r *Resolver) momentLocked() uint64 {
	n := &r.numbers
	if n.rings == nil || len(n.rings.all) > numbersMost || n.other.Load() {
		return 0
	}
	now, last := time.Since(n.began), time.Duration(n.read.Load())
	if now-last > listTime {
		if now-last > listGap {
			n.grown.Add(1)
			n.asked.Store(0)
		}
		if !n.rings.sameCPUs() {
			return r.unfollowed()
		}
		n.read.Store(int64(now))
	}
	grown := n.grown.Load()
	if n.sure.Load() != grown {
		if n.asked.Add(1) != int64(wholeWorth*len(n.rings.all)) {
			return 0
		}
		if !n.rings.whole() {
			return r.unfollowed()
		}
		n.sure.Store(grown)
	}
	size, ok := n.rings.growth()
	if !ok {
		return 0
	}
	return grown + size
}

// unfollowed is the moment where the processors are others.
func (r *Resolver) unfollowed() uint64 {
	if !r.closed && !r.numbers.other.Swap(true) {
		r.wg.Go(r.followOthers)
	}
	return 0
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
	n.asked.Store(0)
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
func (r *Resolver) caller(tid uint32) *Process { return r.entry(tid, r.seenLocked) }

// seenLocked reports whether the number of a thread that lives is still its.
func (r *Resolver) seenLocked(t *thread) bool {
	// Before it is looked at: who gets the number after that is made after that.
	now := r.momentLocked()
	if now != 0 && t.seen.Load() == now {
		return true
	}
	if !t.current() {
		return false
	}
	t.seen.Store(now)
	return true
}
