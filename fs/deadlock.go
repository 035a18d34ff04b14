package fs

import (
	"errors"
	"slices"

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
func (fs *FS) deadlocked(x *waiting) bool {
	w := &fs.waits
	w.searching.Lock()
	defer w.searching.Unlock()
	if x.told() {
		return true
	}
	if w.waiters() < 2 {
		return false
	}
	front := fs.leader(x)
	if front == nil {
		return false
	}
	var chain []*waiting
	for y := front; ; {
		id, ok := y.blocker()
		if !ok || id == y.proc.ID() {
			return false // the latter is two owners of one process: OFD locks
		}
		if id == x.proc.ID() && x.hears {
			return true
		}
		next := w.latest(id)
		if next == nil || slices.Contains(chain, next) {
			return false // or a circle that this line has no part in
		}
		if again, ok := y.blocker(); !ok || again != id {
			return false // it may have waited only since it is in nobody's way any more
		}
		chain = append(chain, next)
		if next.dir == x.dir && fs.leader(next) == front {
			close(next.dead)
			return false
		}
		if y = fs.leader(next); y == nil {
			return false
		}
	}
}

// waiters counts the processes that wait.
func (w *waitList) waiters() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.byProc)
}

// hasTurn reports whether x has its turn: it keeps that.
func (x *waiting) hasTurn() bool { return isClosed(x.turn) }

// told reports whether x has been told of a deadlock.
func (x *waiting) told() bool { return isClosed(x.dead) }

// leader returns x if it has its turn, and else the first of its line: nil if x has
// left it.
func (fs *FS) leader(x *waiting) *waiting {
	turn, called, head := fs.waits.place(x)
	if turn && (!called || fs.hasAlready(x) || fs.holds(x.proc, x.dir)) {
		return x
	}
	return head
}

// place tells whether x has its turn, whether it was called to it, and who is the first
// of its line.
func (w *waitList) place(x *waiting) (turn, called bool, head *waiting) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if line := w.lines[x.dir]; len(line) > 0 {
		head = line[0]
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
// or of a write handle; or else of a lock on the lock file.
func (fs *FS) blockerOf(q lockstate.Request, node uint64, want *advisory.Lock) (procid.ID, bool) {
	var held *lockstate.HeldError
	if err := fs.table.Probe(q); errors.As(err, &held) {
		return owner(held), held.Lock.Client == ""
	} else if err != nil || want == nil {
		return procid.ID{}, false
	}
	node = fs.nodes.settledAs(node)
	l, taken := fs.advisory.Get(node, *want)
	if !taken {
		return procid.ID{}, false
	}
	return fs.table.OwnerBy(keyOf(node, &l))
}

// owner returns whom a refusal is waited for.
func owner(held *lockstate.HeldError) procid.ID {
	if len(held.Handles) > 0 {
		return held.Handles[0].Owner
	}
	return held.Lock.Owner
}
