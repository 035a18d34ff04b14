//go:build linux

package procid

import (
	"errors"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// births tell who made whom, also of those whose maker was gone when they were first
// seen (H2).
//
// They are taken in in the order of time. So the last birth of a number is, at any
// point, that of the process which has the number, until the next one of the same
// number: who made a child is known for certain, without any look at it. A process
// that is seen while it lives is the last birth of its number. Where one event may be
// missing, all of that ends, and begins anew with what is in the cache.
type births struct {
	mu sync.Mutex

	// All of these are guarded by mu.
	rings  *rings         // nil: nobody tells
	failed error          // why
	tried  bool           // whether rings are, or were
	again  time.Time      // when to try it again; zero: never
	epoch  int            // how often it began
	since  uint64         // when it did, CLOCK_BOOTTIME ns: earlier events are of no account
	latest map[int]*birth // by pid
	left   map[int]leaf   // what was known before, by pid
	full   int            // so many in latest are a reason to look who is dead
	batch  []taskEvent
}

// A birth is a process, from the moment in which it was made.
type birth struct {
	pid     int
	maker   *birth   // nil: not known, or of no account because proc is
	at      uint64   // CLOCK_BOOTTIME ns; 0: before births.since
	threads int      // that live; 0: it is dead, or nobody can say more of it; -1: it is not known how many
	proc    *Process // who it is, once that was seen
	between bool     // see leaf
}

// A leaf is a process of which only the nearest one is known that was seen of those from
// whom it descends. It counts for a process that was there at that time.
type leaf struct {
	at      uint64
	maker   *Process
	between bool // it has others below that, which may live
}

// fewBirths are not worth a look who is dead.
const fewBirths = 1024

// ticks returns the moment in the unit of ID.Start.
func ticks(at uint64) uint64 { return at / (1e9 / 100) } // USER_HZ

// fits reports whether a process that started then may be x. Any later process
// with its number may not.
func (b *births) fits(x *birth, start uint64) bool {
	if x.at == 0 {
		return start <= ticks(b.since)
	}
	return start <= ticks(x.at)
}

// note takes in what has happened.
func (b *births) note(ev taskEvent) {
	if ev.at <= b.since || ev.pid <= 0 || ev.pid > maxPid { // or it is of another pid namespace
		return
	}
	x := b.latest[ev.pid]
	switch {
	case ev.exit:
		if x != nil && x.threads > 0 {
			x.threads--
		}
	case ev.pid != ev.tid: // another thread
		if x != nil && x.threads > 0 {
			x.threads++
		}
	default:
		b.latest[ev.pid] = &birth{pid: ev.pid, at: ev.at, threads: 1, maker: b.known(ev.maker)}
	}
}

// known returns who has a pid now.
func (b *births) known(pid int) *birth {
	if pid <= 0 || pid > maxPid {
		return nil
	}
	x := b.latest[pid]
	if x == nil {
		x = &birth{pid: pid, threads: -1}
		b.latest[pid] = x
	}
	return x
}

// above returns the nearest of those from whom x descends who was seen, or else one
// that may live, and has to be seen first. Both are nil where nothing is known. between:
// nobody knows any more who else was in between.
func (b *births) above(x *birth) (seen *Process, between bool, unseen *birth) {
	for m := x.maker; m != nil; m = m.maker {
		switch {
		case m.proc != nil:
			return m.proc, m.between, nil
		case b.mayLive(m):
			return nil, false, m
		}
	}
	return nil, false, nil
}

func (b *births) mayLive(x *birth) bool { return x.threads != 0 && b.latest[x.pid] == x }

// is notes who x is.
func (x *birth) is(p *Process) {
	x.proc, x.maker = p, nil // whom it descends from is in p
}

// leave keeps of what is known what can be used without any order of events.
func (b *births) leave() {
	for pid, x := range b.latest {
		if x.at == 0 {
			continue // as it was before
		}
		delete(b.left, pid)
		if x.proc != nil || x.threads == 0 {
			continue
		}
		between := false
		for m := x.maker; m != nil; m = m.maker {
			if between = between || m.between; m.proc != nil {
				b.left[pid] = leaf{x.at, m.proc, between}
				break
			}
			between = between || b.mayLive(m)
		}
	}
}

// sweep forgets the dead, but for those from whom the living descend.
func (b *births) sweep() {
	if len(b.latest) < b.full {
		return
	}
	gone := func(pid int) bool { return unix.Kill(pid, 0) == unix.ESRCH }
	for pid, x := range b.latest {
		for x.maker != nil && x.maker.proc == nil && x.maker.threads == 0 {
			x.maker = x.maker.maker
		}
		if x.threads == 0 || x.threads < 0 && gone(pid) {
			delete(b.latest, pid)
		}
	}
	for pid := range b.left {
		if x := b.latest[pid]; x != nil && x.at != 0 || gone(pid) {
			delete(b.left, pid)
		}
	}
	b.full = 2*len(b.latest) + fewBirths
}

// birthOf returns the birth of a process, which lives after that as well, or nil.
func (r *Resolver) birthOf(s *sighting) (x *birth, epoch int) {
	b := &r.births
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.rings == nil && !b.again.IsZero() && time.Now().After(b.again) { // for want of descriptors
		b.again = time.Now().Add(lateTime)
		r.openBirthsLocked()
	}
	if b.rings == nil {
		return nil, 0
	}
	r.hearBirthsLocked()
	if b.rings == nil || readable(s.group) {
		return nil, 0 // its number may be another's by now
	}
	x = b.latest[s.id.Pid]
	switch {
	case x == nil && s.id.Start >= ticks(b.since) && !b.rings.whole():
		r.doubtBirthsLocked()
		return nil, 0
	case x == nil && s.id.Start > ticks(b.since):
		return nil, 0 // it was forgotten: it is about to end
	case x == nil:
		x = b.known(s.id.Pid)
	case !b.fits(x, s.id.Start) || x.proc != nil && x.proc.id != s.id:
		r.doubtBirthsLocked()
		return nil, 0
	}
	if l, ok := b.left[s.id.Pid]; ok && x.at == 0 && x.proc == nil && x.maker == nil && s.id.Start <= ticks(l.at) {
		x.maker = &birth{proc: l.maker, between: l.between}
	}
	return x, b.epoch
}

// named notes who x is, if it is still the one.
func (r *Resolver) named(x *birth, epoch int, p *Process) {
	if x == nil {
		return
	}
	b := &r.births
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.epoch == epoch && b.latest[x.pid] == x && x.proc == nil {
		x.is(p)
	}
}

// seeBirth notes that p, if not nil, was seen to have the number of x after that was
// asked. If it is another one, x is dead.
func (r *Resolver) seeBirth(x *birth, p *Process) {
	b := &r.births
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.rings == nil {
		return
	}
	r.hearBirthsLocked()
	// It lives after all events were heard: no other one can have the number.
	if p != nil && b.latest[x.pid] == x && b.fits(x, p.id.Start) && r.cached(uint32(x.pid)) == p {
		x.is(p)
		return
	}
	x.threads = 0
}

// made returns chain, which its parents tell, with those added from whom a process
// descends although its parents do not: it was left behind. What has adopted it without
// being one of those is left out, and all above: the init of a pid namespace that it
// has entered. It looks at a maker that lives and was not seen before, and does without
// where that takes too long.
func (r *Resolver) made(s *sighting, chain []ID, how patience, failed *failure) (all []ID, x *birth, epoch int, err error) {
	x, epoch = r.birthOf(s)
	if x == nil || len(chain) == 0 {
		return chain, x, epoch, nil
	}
	b := &r.births
	for {
		b.mu.Lock()
		same, seen, between, unseen := b.epoch == epoch, x.proc, false, (*birth)(nil)
		if seen == nil {
			seen, between, unseen = b.above(x)
		}
		made := x.maker != nil
		b.mu.Unlock()
		switch {
		case !same || seen != nil && seen.id == chain[0]:
			return chain, x, epoch, nil // mostly: its parent has made it
		case between && slices.Contains(chain, seen.id):
			return chain, x, epoch, nil // its parents are who else was there
		case seen == nil && unseen == nil:
			if made { // by one of whom more might be known
				r.birthsWhole(epoch)
			}
			return chain, x, epoch, nil
		case seen != nil:
			return r.leftBehind(s, chain, seen, epoch), x, epoch, nil
		}
		p, err := r.ancestor(unseen.pid, true, how, failed)
		switch {
		case errors.As(err, new(*busyError)) || IsShort(err):
			return nil, nil, 0, err
		case errors.Is(err, ErrBusy):
			return chain, x, epoch, nil
		}
		r.seeBirth(unseen, p)
	}
}

// wasAdopted reports whether another one than its parent has made x, and is dead: who
// adopts others is an init or a subreaper.
func (r *Resolver) wasAdopted(x *birth, epoch int, parent ID) bool {
	if x == nil {
		return false
	}
	b := &r.births
	b.mu.Lock()
	m := x.maker
	adopted := b.epoch == epoch && m != nil && m.pid != 0 && m.pid != parent.Pid && !b.mayLive(m)
	b.mu.Unlock()
	return adopted && r.birthsWhole(epoch)
}

// leftBehind is made for who descends from seen, by a way of which the rest is dead.
func (r *Resolver) leftBehind(s *sighting, chain []ID, seen *Process, epoch int) []ID {
	makers := seen.chain
	if seen.id != s.id { // else it was seen before, and forgotten
		makers = append([]ID{seen.id}, makers...)
	}
	switch {
	case !r.birthsWhole(epoch):
		return chain
	case len(seen.chain) > 0 && !slices.Contains(makers, chain[0]): // else not much is known of seen itself
		return makers
	}
	more := slices.DeleteFunc(slices.Clone(makers), func(id ID) bool { return slices.Contains(chain, id) })
	return r.prune(append(chain, more...))
}
