//go:build linux

package procid

import (
	"cmp"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// maxThreads is the default of Options.Threads.
const maxThreads = 1024

// A group is a process whose pidfd is held.
type group struct {
	proc *Process
	fd   int // pidfd of the thread group
	line atomic.Pointer[lineNote]

	// Guarded by Resolver.mu.
	threads int    // entries of Resolver.threads that point here
	pins    int    // other users of fd
	serial  uint64 // in Resolver.watched; 0: not watched
	watches []func(ID, Exit)
	told    told
	before  *group        // who had the pid before it, not long ago: see told.go
	husk    bool          // see husks; for good
	look    time.Duration // while it is watched: when it is looked whether it is one, by monotonic
	pause   time.Duration // and how long after that again

	asked  atomic.Int64 // the look after which somebody has asked again
	looked atomic.Int64 // when somebody asked last whether it is a husk, by monotonic, and it was none
}

// A thread is a thread id that was resolved, with what proves that the id has
// not been given to another thread since.
type thread struct {
	group *group
	fd    int           // thread pidfd, or the thread's comm file; -1: it is the leader
	file  bool          // fd is the comm file
	used  atomic.Uint64 // Resolver.clock at the last use
	seen  atomic.Uint64 // the moment of numbers in which it was current; 0: none
}

// current reports whether the id still means that thread. A thread that was not
// reaped keeps its id from being used again.
func (t *thread) current() bool {
	switch {
	case t.fd < 0:
		return !readable(t.group.fd)
	case t.file:
		// A file of /proc belongs to the thread it was opened for, not to the
		// number: it fails with ESRCH once that one is gone.
		var b [1]byte
		for {
			n, err := unix.Pread(t.fd, b[:], 0)
			if err != unix.EINTR {
				return n == 1
			}
		}
	default:
		return !readable(t.fd)
	}
}

// cached returns the process of a thread whose entry is current, or nil.
func (r *Resolver) cached(tid uint32) *Process { return r.entry(tid, (*thread).current) }

// entry returns the process of a thread whose entry is still true, or nil.
func (r *Resolver) entry(tid uint32, isTrue func(*thread) bool) *Process {
	r.mu.RLock()
	defer r.mu.RUnlock()
	t := r.threads[tid]
	if t == nil || !isTrue(t) {
		return nil
	}
	t.used.Store(r.clock.Add(1))
	return t.group.proc
}

// Process returns the process with an identity if it is in the cache, dead or alive, as
// what was carried over is, or nil.
func (r *Resolver) Process(id ID) *Process {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if g := r.groups[id]; g != nil {
		return g.proc
	}
	return nil
}

// insertLocked puts a resolved thread into the cache, in place of a former
// thread with the id.
func (r *Resolver) insertLocked(tid uint32, t *thread) {
	if old := r.threads[tid]; old != nil {
		r.dropLocked(tid, old)
	} else if len(r.threads) >= r.limit {
		r.sweepLocked()
	}
	t.used.Store(r.clock.Add(1))
	t.group.threads++
	r.threads[tid] = t
}

// sweepLocked makes room: the dead go first, since a living process that is
// seen again after it was dropped may have lost ancestors (H2). Making room for
// many at once keeps the price of looking at all of them small.
func (r *Resolver) sweepLocked() {
	type entry struct {
		tid  uint32
		used uint64
	}
	var living []entry
	for tid, t := range r.threads {
		if t.current() {
			living = append(living, entry{tid, t.used.Load()})
		} else {
			r.dropLocked(tid, t)
		}
	}
	excess := len(living) - r.limit*7/8
	if excess <= 0 {
		return
	}
	slices.SortFunc(living, func(a, b entry) int { return cmp.Compare(a.used, b.used) })
	for _, e := range living[:excess] {
		r.dropLocked(e.tid, r.threads[e.tid])
	}
}

// dropLocked takes a thread out of the cache.
func (r *Resolver) dropLocked(tid uint32, t *thread) {
	delete(r.threads, tid)
	if t.fd >= 0 {
		unix.Close(t.fd)
	}
	t.group.threads--
	r.freeLocked(t.group)
}

// freeLocked closes a group that nothing refers to any more (I2).
func (r *Resolver) freeLocked(g *group) {
	if g.threads > 0 || g.pins > 0 || g.serial != 0 || g.fd < 0 {
		return
	}
	if r.pids[g.proc.id.Pid] == g {
		delete(r.pids, g.proc.id.Pid)
		if isBrief(g.proc.id) && readable(g.fd) { // else it may be seen again
			r.brief.add(g.proc.id)
		}
	}
	unix.Close(g.fd)
	g.fd = -1
	if r.groups[g.proc.id] == g {
		delete(r.groups, g.proc.id)
	}
}

// briefs are the last IDs of pids whose processes were dead, and out of the cache, within
// briefTicks of their beginning: maybe in the same tick, and the pid has come round.
type briefs struct{ ids, older map[int]ID }

const (
	briefTicks = 100
	maxBriefs  = 1024 // of each half
)

// isBrief reports whether a process began that shortly ago.
func isBrief(id ID) bool { return ticks(boottime()) <= id.Start+briefTicks }

func (b *briefs) add(id ID) {
	if b.ids == nil || len(b.ids) >= maxBriefs {
		b.ids, b.older = make(map[int]ID), b.ids
	}
	b.ids[id.Pid] = id
}

// of returns the last one of a pid, or the zero ID.
func (b *briefs) of(pid int) ID {
	if id, ok := b.ids[pid]; ok {
		return id
	}
	return b.older[pid]
}

// unpin gives back a pin and returns the process for convenience.
func (r *Resolver) unpin(g *group) *Process {
	r.mu.Lock()
	defer r.mu.Unlock()
	g.pins--
	r.freeLocked(g)
	return g.proc
}
