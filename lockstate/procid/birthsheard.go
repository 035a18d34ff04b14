//go:build linux

package procid

import "time"

// FollowBirths makes the resolver learn from now on who makes which process. It fails
// where the kernel does not tell that.
func (r *Resolver) FollowBirths() error {
	b := &r.births
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.tried {
		b.tried = true
		b.left = make(map[int]leaf)
		r.openBirthsLocked()
	}
	return b.failed
}

// openBirthsLocked forgets all births, but for those of processes in the cache. These
// are there from before to after that moment: so their numbers are not another's.
//
// The buffers are always new ones: one that was full says so once more when it is not.
func (r *Resolver) openBirthsLocked() {
	b := &r.births
	b.epoch++
	b.latest = make(map[int]*birth)
	had := b.rings != nil
	if had {
		r.follow(nil)
		b.rings.close()
	}
	b.rings, b.failed = openRings(r.epfd)
	if had || IsShort(b.failed) {
		b.again = time.Now().Add(lateTime)
	}
	if b.failed != nil {
		return
	}
	r.follow(b.rings)
	r.mu.RLock()
	defer r.mu.RUnlock()
	b.since = boottime()
	for pid, g := range r.pids {
		if g.fd >= 0 && !readable(g.fd) {
			b.latest[pid] = &birth{pid: pid, threads: -1, proc: g.proc}
		}
	}
	b.full = 2*len(b.latest) + fewBirths
}

// doubtBirthsLocked ends all that is known: an event is missing, nobody knows for how
// long.
func (r *Resolver) doubtBirthsLocked() {
	clear(r.births.left)
	r.openBirthsLocked()
}

// hearBirthsLocked takes in all that has happened.
func (r *Resolver) hearBirthsLocked() {
	b := &r.births
	batch, ok := b.rings.read(b.batch[:0])
	b.batch = batch
	if !ok {
		// Some were lost since the last time. What was known then is still true.
		b.leave()
		r.openBirthsLocked()
		return
	}
	for _, ev := range batch {
		b.note(ev)
	}
	b.sweep()
}

// hearBirths keeps the kernel's buffers from being full. One of them may be shut for
// good: its processor is gone.
func (r *Resolver) hearBirths(shut bool) {
	b := &r.births
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.rings == nil:
	case shut && b.rings.shut(): // and it was none that was closed meanwhile
		r.doubtBirthsLocked()
	default:
		r.hearBirthsLocked()
	}
}

// closeBirths comes before the end of epfd.
func (r *Resolver) closeBirths() {
	b := &r.births
	b.mu.Lock()
	defer b.mu.Unlock()
	b.tried, b.again = true, time.Time{}
	b.epoch++ // who still asks about one finds nothing out any more
	if b.rings != nil {
		r.follow(nil)
		b.rings.close()
		b.rings = nil
	}
}

// birthsWhole reports whether no event can have been lost unheard.
func (r *Resolver) birthsWhole(epoch int) bool {
	b := &r.births
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.rings == nil || b.epoch != epoch {
		return false
	}
	if b.rings.whole() {
		return true
	}
	// A processor came, or went and came back.
	r.doubtBirthsLocked()
	return false
}
