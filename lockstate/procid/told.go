//go:build linux

package procid

import (
	"fmt"
	"math"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// A told is what the connector said of a process. A process of one thread ends
// with one event. One of several ends with the event of whichever thread was
// last; where the first thread ended before, or was replaced by another one's
// exec, its event says nothing about the end of the process.
type told struct {
	leader bool   // the first thread has ended
	final  bool   // and a thread's event came in when the process was dead
	code   int    // of the last event
	at     uint64 // of the last event, CLOCK_MONOTONIC ns
	dead   uint64 // when it was first found dead, CLOCK_MONOTONIC ns; 0: not yet
	missed bool   // it may have ended unheard
}

const (
	// hearPatience bounds the wait for the connector's word on a dead process.
	// Mostly it is there already; but a machine with too much to do may put the dying
	// thread aside just before it speaks, for more than half a second as measured at a
	// load of 300. A late release (R4) is the lesser evil then: without the word, a
	// script loses what its mkdir has made (R5).
	hearPatience = 5 * time.Second
	// leaderTime is how long before the death of its process the end of the first
	// thread passes for a part of it.
	leaderTime = 500 * time.Millisecond
)

// serialExits stands for the connector in epfd.
const serialExits = math.MaxUint64

// serialBirths stands for the buffers of births in epfd.
const serialBirths = math.MaxUint64 - 1

// KnowsExits reports whether the status of every process that is watched will
// be learnt, also of one that is reaped at once: with Linux 6.15 or later, or
// else where the process events connector can be had. Where it is false, a
// crash (R4) cannot always be told from a success (R5).
func (r *Resolver) KnowsExits() bool {
	return r.kernel.exits || r.listen() == nil
}

// listen subscribes to the ends of processes where there is no other way to
// know the status of one that was reaped. Only the first call does it.
func (r *Resolver) listen() error {
	c := &r.connector
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.tried {
		return c.failed
	}
	c.tried = true
	fd, err := openConnector()
	if err == nil {
		ev := event(serialExits)
		if err = unix.EpollCtl(r.epfd, unix.EPOLL_CTL_ADD, fd, &ev); err == nil {
			c.fd = fd
			r.markMissed()
			return nil
		}
		hangUp(fd)
	}
	c.failed = fmt.Errorf("process events connector: %w", err)
	return c.failed
}

// hears reports whether the connector is open.
func (r *Resolver) hears() bool {
	c := &r.connector
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.fd >= 0
}

// markMissed notes which processes ended too early to be heard of.
func (r *Resolver) markMissed() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, g := range r.pids {
		for ; g != nil; g = g.before {
			g.told.missed = r.seenDeadLocked(g)
		}
	}
}

// hangUp ends a subscription. Older kernels go on making events for nobody when
// they are not told.
func hangUp(fd int) {
	tellConnector(fd, procIgnore, 0)
	unix.Close(fd)
}

// closeConnector comes before the end of epfd.
func (r *Resolver) closeConnector() {
	c := &r.connector
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fd >= 0 {
		hangUp(c.fd)
	}
	c.fd, c.tried, c.failed = -1, true, os.ErrClosed
}

// hear takes in all that the connector has said so far. It reports whether there
// is a connector.
func (r *Resolver) hear() bool {
	c := &r.connector
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fd < 0 {
		return false
	}
	var buf [256]byte
	for {
		b, err := receive(c.fd, buf[:])
		switch {
		case err == unix.EAGAIN:
			return true
		case err == unix.ENOBUFS:
			r.forget()
		case err != nil: // nothing that the man pages know of
			hangUp(c.fd)
			c.fd, c.failed = -1, fmt.Errorf("process events connector: %w", err)
			return false
		case b != nil && what(b) == procEventExit:
			r.note(parseExit(b))
		}
	}
}

// note keeps what an event says if it is about a process in the cache.
func (r *Resolver) note(ev exitEvent) {
	r.mu.Lock()
	defer r.mu.Unlock()
	g := r.toldOfLocked(ev)
	if g == nil {
		return
	}
	t := &g.told
	dead := r.seenDeadLocked(g)
	if dead && ev.at > t.dead+uint64(hearPatience) {
		return // a later process with its pid
	}
	t.code, t.at = ev.code, ev.at
	t.leader = t.leader || ev.pid == ev.tgid
	t.final = t.final || t.leader && dead
	if t.leader && !dead {
		r.suspectLocked(g, 0)
	}
}

// toldOfLocked returns whom an event is about, or nil. Before the kernel gives the pid of a
// process to another one it has told how that ended, which may be heard only when the other
// one is known.
func (r *Resolver) toldOfLocked(ev exitEvent) *group {
	latest := r.pids[ev.tgid]
	if latest == nil {
		return nil
	}
	g := latest
	for old := latest.before; old != nil; old = old.before {
		if t := &old.told; !t.leader && !t.missed && ev.at <= t.dead+uint64(hearPatience) {
			g = old
		}
	}
	return g
}

// mayBeToldLocked returns what had a pid until now, or nil. It forgets who had it long
// before, whether the connector is open or not.
func (r *Resolver) mayBeToldLocked(g *group) *group {
	if g != nil && r.seenDeadLocked(g) && g.before != nil && uint64(monotonic()) > g.before.told.dead+uint64(hearPatience) {
		g.before = nil
	}
	return g
}

// seenDeadLocked reports whether a process is dead, and keeps when that was
// first seen.
func (r *Resolver) seenDeadLocked(g *group) bool {
	if g.told.dead == 0 && g.deadLocked() {
		g.told.dead = uint64(monotonic())
	}
	return g.told.dead != 0
}

// forget is called when events were lost. They may have been those of the dead
// that are not known yet: such a process stays unknown, rather than be waited
// for or taken for another end.
func (r *Resolver) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, g := range r.pids {
		for ; g != nil; g = g.before {
			if r.seenDeadLocked(g) && !g.told.final {
				g.told.leader, g.told.missed = false, true
			}
		}
	}
}

// heard returns the end of a pinned, dead process as the connector told it, if
// it did. It may be worth asking again for patience after the death.
func (r *Resolver) heard(g *group) (e Exit, patience time.Duration) {
	open := r.hear()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.seenDeadLocked(g)
	t := &g.told
	switch {
	case t.final:
		return fromWait(t.code), 0
	case t.leader && t.code != 0 && t.dead < t.at+uint64(leaderTime):
		// What makes threads fail is the death of the whole process, or an exec,
		// mostly one long ago. If only the last thread is late, its word will be
		// the same.
		return fromWait(t.code), exitPatience
	case open && !t.missed && !r.closed: // Close waits for this
		return Exit{}, hearPatience
	default:
		return Exit{}, 0
	}
}

// monotonic is the clock of the connector's events.
func monotonic() time.Duration {
	var now unix.Timespec
	unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) // cannot fail
	return time.Duration(now.Nano())
}
