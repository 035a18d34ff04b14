package lockstate

import (
	"slices"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// Probe tells what [Table.Acquire] would answer now, and changes nothing.
func (t *Table) Probe(q Request) error {
	if q.Process == nil || q.Process.ID() == (procid.ID{}) {
		return ErrNobody
	}
	q.asked = new(asking)
	for {
		err := t.probe(q)
		if err == nil || !t.resolveRequest(&q, err) {
			return q.asked.mark(err)
		}
	}
}

func (t *Table) probe(q Request) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	q.adoptLocked()
	switch {
	case t.frozen:
		return ErrFrozen
	case q.Dir.gone:
		return ErrGone
	case q.Dir == t.root:
		return ErrRoot
	}
	return t.admitGrantLocked(q, nil)
}

// HeldOn returns the lock on d itself that is p's to give back: the one in
// force, or its own of the shared ones; or the one with the given token, if that is not
// 0, also with a child's in front of it (C2). If there is none it reports false, with
// the lock in force; unsure is why that can't be said.
func (t *Table) HeldOn(p *procid.Process, d *Dir, token uint64) (l Lock, ok bool, unsure error) {
	ok, unsure = t.ask(p, func(a *asking) bool {
		top := d.top()
		if top == nil {
			l = Lock{}
			return false
		}
		for _, r := range slices.Backward(d.rows) {
			meant := r.token == token || token == 0 && (r == top || r.kind == Shared)
			if meant && !r.pending && t.hasLocked(r, p, a) {
				l = r.lock()
				return true
			}
		}
		l = top.lock()
		return false
	})
	return l, ok, unsure
}

// HoldsBy reports whether p holds the lock with the given token; unsure is why that can't
// be said.
func (t *Table) HoldsBy(p *procid.Process, token uint64) (l Lock, holds bool, unsure error) {
	holds, unsure = t.ask(p, func(a *asking) bool {
		l = Lock{}
		r := t.tokens[token]
		if r == nil {
			return false
		}
		l = r.lock()
		return t.hasLocked(r, p, a)
	})
	return l, holds, unsure
}

// HasLost reports whether a lock on d is kept by a descriptor of a mount that
// has died.
func (t *Table) HasLost(d *Dir) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.ContainsFunc(d.rows, func(r *row) bool { return r.lostKey })
}
