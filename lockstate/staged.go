package lockstate

import (
	"slices"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// A lock file may be a directory (A3), and goes with its owner (R4). But others may
// work in it: a child that has locked it (C2), or stages there.

// keptBy reports whether d is, or is in, a directory that is the lock file of a lock on
// top. What is made there tells whose the lock is, as what is written to a lock file
// does, and is no content (R5), unless it is much: see [Table.Change]. What enters from
// elsewhere is, see [Change.From].
func (top *Dir) keptBy(d *Dir) bool {
	for ; d != nil && d != top; d = d.parent {
		if d.parent == top {
			return slices.ContainsFunc(top.rows, func(r *row) bool { return r.fileAt(d.name) >= 0 })
		}
	}
	return false
}

// Change marks a lock as one that something was changed under, and those behind it and
// above.
func (t *Table) Change(token uint64) {
	t.mu.Lock()
	defer t.unlockFlush()
	if r := t.tokens[token]; r != nil {
		t.touchAboveLocked(r.dir, func(*row) bool { return true })
	}
}

// maxStagers bounds the memory of a row.
const maxStagers = 1 << 14

// stagedLocked notes that p changes something in d, for the locks that a directory
// at or above d keeps as their lock file.
func (t *Table) stagedLocked(p *procid.Process, d *Dir) {
	for ; d != nil && d.parent != nil; d = d.parent {
		for _, r := range d.parent.rows {
			if p != nil && r.fileAt(d.name) >= 0 && r.staged(p) {
				t.noteLocked(r)
				t.staged.Add(1)
			}
		}
	}
}

// staged notes p, and those of its ancestors that descend from the owner: a program
// has ended when what it made is looked at, but not the shell that ran it.
func (r *row) staged(p *procid.Process) (news bool) {
	owner := r.owner.ID()
	if _, known := r.stagers[p.ID()]; known || p.ID() == owner {
		return false
	}
	chain := p.Ancestors()
	below := slices.Index(chain, owner)
	ids := []procid.ID{p.ID()}
	for i, a := range chain {
		// Who was left behind has one above the owner for a parent.
		if i < below && !r.owner.Descends(a) || below < 0 && r.member(a) {
			ids = append(ids, a)
		}
	}
	if r.stagers == nil {
		r.stagers = make(map[procid.ID]struct{})
	}
	for _, id := range ids {
		if _, known := r.stagers[id]; !known && len(r.stagers) < maxStagers {
			r.stagers[id] = struct{}{}
			news = true
		}
	}
	return news
}

// flushStaged makes what stagedLocked, touchAboveLocked and strangeLocked have noted outlive the
// daemon. It returns when that does, whoever writes it down: what is noted already nobody notes
// again.
func (t *Table) flushStaged() {
	want := t.staged.Load()
	if t.kept.Load() >= want {
		return
	}
	t.flush()
	for have := t.kept.Load(); have < want && !t.kept.CompareAndSwap(have, want); have = t.kept.Load() {
	}
}

// Stagers returns the processes other than its owner that have changed something in
// a directory which is the lock file of a lock.
func (t *Table) Stagers(token uint64) (all []procid.ID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.tokens[token]
	if r == nil {
		return nil
	}
	for id := range r.stagers {
		if id != r.owner.ID() {
			all = append(all, id)
		}
	}
	return all
}

// Below returns the locks at or beneath d, and the write handles there.
func (t *Table) Below(d *Dir) (locks []Lock, open []HandleState) {
	t.mu.Lock()
	defer t.mu.Unlock()
	d.walkRows(func(r *row) bool { locks = append(locks, r.lock()); return true })
	d.walkHandles(func(h *Handle) bool { open = append(open, h.stateLocked()); return true })
	return locks, open
}
