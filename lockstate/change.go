package lockstate

import (
	"slices"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// A Change says what an operation is about to alter.
type Change struct {
	Process *procid.Process // who asks; nil is nobody (H4)
	// Who finds out who asks, where Process is nil: only a change in a
	// locked directory pays for it.
	Who func() *procid.Process

	// Dirs are the directories that the change is in: those whose entries
	// change, and those that hold a name of the file that changes.
	Dirs []*Dir
	// Trees are directories that are removed or renamed: every lock at or
	// below them must be held by the process (C1).
	Trees []*Dir

	// Into is the directory that something enters by rename or link. If it
	// is locked, nobody but its holders may have a write handle on what
	// enters (W3): on Files, or beneath EnteringTree.
	Into         *Dir
	Files        []*Handle
	EnteringTree *Dir

	// Quiet changes do not count as content: making the directory itself,
	// its lock file, or directories in it (R5).
	Quiet bool
	// Free allows the change where nobody holds a lock, although writing
	// needs one (W4): the steps of an acquisition.
	Free bool
}

// An Op is an operation in flight. An acquisition that covers it waits for it.
type Op struct {
	t     *Table
	dirs  []*Dir
	trees []*Dir
	seq   uint64
	at    int // index in Table.inflight, protected by Table.mu
}

// Begin admits a change or refuses it with a [*HeldError]. The caller ends the
// operation with [Op.End] when it has reached the backing.
func (t *Table) Begin(c Change) (*Op, error) {
	var op *Op
	var err error
	t.decideWho(&c, func(lineage bool) bool {
		var unknown bool
		if err, unknown = t.admitLocked(&c, lineage); unknown {
			return false
		}
		if err != nil {
			t.stats.Refused++
			return true
		}
		t.touchLocked(&c)
		t.seq++
		op = &Op{t: t, dirs: slices.Clone(c.Dirs), trees: slices.Clone(c.Trees), seq: t.seq, at: len(t.inflight)}
		t.inflight = append(t.inflight, op)
		return true
	})
	return op, err
}

// touchLocked marks the locks that c changes something under.
func (t *Table) touchLocked(c *Change) {
	if c.Quiet {
		return
	}
	for _, d := range c.Dirs {
		for ; d != nil; d = d.parent {
			for _, r := range d.rows {
				r.touch()
			}
		}
	}
}

// admitLocked decides about c.
func (t *Table) admitLocked(c *Change, lineage bool) (err error, unknown bool) {
	p := c.Process
	for _, d := range c.Dirs {
		r := d.governing()
		if r == nil {
			if t.deny && !c.Free {
				return &HeldError{Err: ErrUnlocked}, false
			}
			continue
		}
		if p == nil && c.Who != nil {
			return nil, true
		}
		ok, unknown := r.holds(p, lineage)
		if unknown {
			return nil, true
		}
		if !ok {
			return t.heldLocked(r), false
		}
	}
	for _, d := range c.Trees {
		d.walkRows(func(r *row) bool {
			// Of the rows on one directory the last is in force.
			if r != r.dir.top() {
				return true
			}
			ok, u := r.holds(p, lineage)
			if u || p == nil && c.Who != nil {
				ok, unknown = false, true
			} else if !ok {
				err = t.heldLocked(r)
			}
			return ok
		})
		if err != nil || unknown {
			return err, unknown
		}
	}
	return t.admitEntryLocked(c)
}

// admitEntryLocked refuses what enters a locked directory while a process that
// does not hold that directory can write to it.
func (t *Table) admitEntryLocked(c *Change) (err error, unknown bool) {
	if c.Into == nil {
		return nil, false
	}
	r := c.Into.governing()
	if r == nil {
		return nil, false
	}
	foreign := func(h *Handle) bool {
		ok, _ := r.holds(h.proc, true)
		if !ok {
			err = &HeldError{Err: ErrOpen, Handles: []HandleState{h.stateLocked()}}
		}
		return ok
	}
	for _, h := range c.Files {
		if !foreign(h) {
			return err, false
		}
	}
	if c.EnteringTree != nil {
		c.EnteringTree.walkHandles(foreign)
	}
	return err, false
}

// heldLocked builds the refusal that r causes.
func (t *Table) heldLocked(r *row) *HeldError {
	return &HeldError{Err: ErrHeld, Lock: r.lock(), Settling: r.kind == Implicit && !r.changed}
}

// End tells that the operation is over. A second call does nothing.
func (o *Op) End() {
	if o == nil {
		return
	}
	t := o.t
	t.mu.Lock()
	defer t.mu.Unlock()
	last := len(t.inflight) - 1
	if o.at > last || t.inflight[o.at] != o {
		return
	}
	t.inflight[o.at] = t.inflight[last]
	t.inflight[o.at].at = o.at
	t.inflight[last] = nil
	t.inflight = t.inflight[:last]
	for _, g := range t.draining {
		g.opEndedLocked(o)
	}
}

// touches reports whether o changes something at or below d, or the name of d
// or of a directory above it (C1).
func (o *Op) touches(d *Dir) bool {
	for _, e := range o.dirs {
		if e.within(d) {
			return true
		}
	}
	for _, e := range o.trees {
		if e.within(d) || d.within(e) {
			return true
		}
	}
	return false
}
