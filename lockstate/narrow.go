package lockstate

import (
	"slices"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// Chain returns the implicit lock above d that d's own lock may stand in for
// (A12): the nearest one above, if p owns it. names lead from the locked
// directory down to d, which is the last of them.
func (t *Table) Chain(p *procid.Process, d *Dir) (l Lock, names []string, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for e := d; e.parent != nil; e = e.parent {
		names = append(names, e.name)
		r := e.parent.top()
		if r == nil {
			continue
		}
		if r.kind != Implicit || r.owner.ID() != p.ID() && (r.scope.Kind == ProcessScope || !r.has(p)) || len(e.parent.rows) != 1 {
			return Lock{}, nil, false
		}
		slices.Reverse(names)
		return r.lock(), names, true
	}
	return Lock{}, nil, false
}

// Narrow ends the lock with the token above, in whose place stands the one with the
// given token on a directory beneath, if only reports that nothing else is there to
// be locked (A12). An operation that is under way meanwhile under the first one was
// admitted by it, and keeps it in force.
func (t *Table) Narrow(above, token uint64, only func() bool) {
	if !t.beginNarrow(above, token) {
		return
	}
	ok := only() // system calls: without t.mu
	t.mu.Lock()
	defer t.unlockFlush()
	t.narrowing--
	old, r := t.tokens[above], t.tokens[token]
	if old == nil {
		return
	}
	old.narrowing = false
	if !ok || r == nil || old.disturbed || len(old.dir.rows) != 1 {
		return
	}
	if old.content.fresh && !old.content.unknown && !old.changed {
		// The directory was made under the other one, but for what has come into it.
		r.content = old.content
		t.noteLocked(r)
	}
	t.endLocked(old, Ending{Reason: Narrowed})
}

func (t *Table) beginNarrow(above, token uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	old, r := t.tokens[above], t.tokens[token]
	if old == nil || r == nil || old.narrowing {
		return false
	}
	for _, op := range t.inflight {
		if op.touches(old.dir) && !op.inside(r.dir) {
			return false
		}
	}
	old.narrowing, old.disturbed = true, false
	t.narrowing++
	return true
}
