package fs

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/advisory"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// Deadlocks of those who wait for directories (M2). As Linux does, each process is
// taken to wait for one: that which has what it waits for, or what the first of its
// line waits for. Who that is, is asked anew each time: what was in the way at the
// last try may have ended, and who waited for it not have run yet.
//
// An edge is new when somebody joins a line, and when who has his turn was refused:
// then it is looked whether it closes a circle. The latter is also the edge of all
// who stand behind him. Who waits with flock(2) takes no part: the process that
// opened the file may go on while another one waits for it.

// deadlocked reports whether x waits for itself. One who stands behind x and does so
// is told.
func (fs *FS) deadlocked(x *waiting, cancel <-chan struct{}) bool {
	for closing := (patience{}); ; {
		// close(2) returns before the RELEASE: who waits anew may seem to be in
		// the way still.
		told, again := fs.tellDeadlock(x, closing.more(closeTime))
		if !again {
			return told
		}
		select {
		case <-time.After(closePause):
		case <-cancel:
			return false
		}
	}
}

// tellDeadlock is one search. again: it is to be repeated, as the circle may open by itself.
func (fs *FS) tellDeadlock(x *waiting, patient bool) (told, again bool) {
	w := &fs.waits
	w.searching.Lock()
	defer w.searching.Unlock()
	if x.told() {
		return true, false
	}
	if w.waiters() < 2 {
		return false, false
	}
	victim, passing := fs.circle(x)
	switch {
	case victim == nil:
		return false, false
	case passing && patient:
		return false, true
	case victim != x:
		close(victim.dead)
	}
	return victim == x, false
}

// circle returns who is to hear of the circle that x is part of: nil if there is none.
// passing: it needs what is about to be closed.
func (fs *FS) circle(x *waiting) (victim *waiting, passing bool) {
	front := fs.leader(x)
	if front == nil {
		return nil, false
	}
	var chain []*waiting
	for y := front; ; {
		id, soon, ok := y.blocker()
		if !ok || id == y.proc.ID() {
			return nil, false // the latter is two owners of one process: OFD locks
		}
		passing = passing || soon
		if id == x.proc.ID() && x.hears {
			return x, passing
		}
		next := fs.waits.latest(id)
		if next == nil || slices.Contains(chain, next) {
			return nil, false // or a circle that this line has no part in
		}
		if again, _, ok := y.blocker(); !ok || again != id {
			return nil, false // it may have waited only since it is in nobody's way any more
		}
		chain = append(chain, next)
		if next.dir == x.dir && fs.leader(next) == front {
			return next, passing
		}
		if y = fs.leader(next); y == nil {
			return nil, false
		}
	}
}

// waiters counts the processes that wait.
func (w *waitList) waiters() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.byProc)
}

// hasTurn reports whether x has its turn: it keeps that, unless it stands back.
func (x *waiting) hasTurn() bool { return isClosed(x.turn) }

// told reports whether x has been told of a deadlock.
func (x *waiting) told() bool { return isClosed(x.dead) }

// leader returns x if it has its turn, or is to have it when those before it have tried
// who hold what it waits for as it does: then the first of these. Else it returns the first
// of the line: nil if x has left it.
func (fs *FS) leader(x *waiting) *waiting {
	turn, called, head := fs.waits.place(x)
	switch {
	case head == nil && !turn:
		return nil
	case turn && !called || fs.hasAlready(x):
		return x
	case fs.holds(x.proc, x.dir):
		return cmp.Or(fs.before(x), x)
	}
	return head
}

// place tells whether x has its turn, whether it was called to it, and who is the first
// of its line.
func (w *waitList) place(x *waiting) (turn, called bool, head *waiting) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if l := w.lines[x.dir]; l != nil {
		head = l.all[0]
	}
	return x.hasTurn(), x.called, head
}

// latest returns what a process waits for: of several threads, the last one.
func (w *waitList) latest(id procid.ID) *waiting {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, y := range slices.Backward(w.byProc[id]) {
		if y.hears && !y.told() {
			return y
		}
	}
	return nil
}

// blockerOf returns who is in the way of a request by a process: the owner of a lock
// or of a write handle; or else of a lock on the lock file. soon: a descriptor of what is
// in the way was closed, perhaps the last one.
func (fs *FS) blockerOf(q lockstate.Request, node uint64, want *advisory.Lock) (id procid.ID, soon, ok bool) {
	var held *lockstate.HeldError
	if err := fs.table.Probe(q); errors.As(err, &held) {
		return owner(held), fs.endsSoon(held), held.Lock.Client == ""
	} else if err != nil || want == nil {
		return procid.ID{}, false, false
	}
	node = fs.nodes.settledAs(node)
	l, taken := fs.advisory.Get(node, *want)
	if !taken {
		return procid.ID{}, false, false
	}
	id, ok = fs.table.OwnerBy(keyOf(node, &l))
	return id, fs.wasClosed(l.Handle, node), ok
}

// endsSoon reports whether what refuses may end by itself, as its descriptors were closed,
// or the mappings that outlived them.
func (fs *FS) endsSoon(held *lockstate.HeldError) bool {
	if held.Err == lockstate.ErrOpen {
		return fs.settleLingering(held) || fs.closingSoon(held)
	}
	return fs.isClosing(held.Lock)
}

// owner returns whom a refusal is waited for.
func owner(held *lockstate.HeldError) procid.ID {
	if len(held.Handles) > 0 {
		return held.Handles[0].Owner
	}
	return held.Lock.Owner
}
