package lockstate

import (
	"errors"
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
	// From are the directories that it is in, or was: a note of whose a lock is stays
	// one within a lock directory (R5).
	Into         *Dir
	From         []*Dir
	Files        []*Handle
	EnteringTree *Dir

	// Quiet changes do not count as content: making the directory itself,
	// its lock file, or directories in it (R5).
	Quiet bool
	// Loud is one of Dirs, or nil. A Quiet change counts all the same for the locks that
	// cover Loud and none of the others: what is a lock file elsewhere comes from or goes
	// to there.
	Loud *Dir
	// Force admits the change whatever the locks say: for who only observes.
	Force bool
	// Free allows the change where nobody holds a lock, although writing
	// needs one (W4): the steps of an acquisition.
	Free bool
	// Named is one of Trees, nil for none: a lock on it covers its name, and
	// so allows its holder the change where nobody holds a lock (C1, W4).
	Named *Dir

	asked asking
}

// An Op is an operation in flight. An acquisition that covers it waits for it.
type Op struct {
	t     *Table
	dirs  []*Dir
	trees []*Dir
	at    int // index in Table.inflight, protected by Table.mu

	handle *Handle // that it goes through, if it may be revoked; nil: it was admitted by itself

	few [2]*Dir // spares dirs an allocation
}

// errWho is the answer to a change that must name its process, or what that
// one carries.
var errWho = errors.New("who asks?")

// Begin admits a change or refuses it with a [*HeldError]. The caller ends the
// operation with [Op.End] when it has reached the backing.
func (t *Table) Begin(c Change) (*Op, error) {
	for {
		op, err := t.begin(&c)
		t.tell()
		if err != errWho {
			t.flushStaged()
			return op, c.asked.mark(err)
		}
		t.learn(&c)
	}
}

// learn finds out who asks, and what that one carries. It makes system calls,
// and so wants to be called without t.mu.
func (t *Table) learn(c *Change) {
	if c.Process == nil && c.Who != nil {
		c.Process, c.Who = c.Who(), nil
		return
	}
	t.resolve(c.Process, &c.asked)
}

func (t *Table) begin(c *Change) (*Op, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.admitLocked(c); err != nil {
		return nil, err
	}
	return t.startLocked(c.Dirs, c.Trees), nil
}

// startLocked notes an operation in flight. It keeps neither slice.
func (t *Table) startLocked(dirs, trees []*Dir) *Op {
	op := &Op{t: t, at: len(t.inflight)}
	op.dirs = append(op.few[:0], dirs...)
	op.trees = slices.Clone(trees)
	t.inflight = append(t.inflight, op)
	if t.narrowing > 0 {
		for _, d := range dirs {
			if r := d.governing(); r != nil {
				r.disturbed = true
			}
		}
	}
	return op
}

// admitLocked decides about c and takes note of it if it is admitted.
func (t *Table) admitLocked(c *Change) error {
	var err error
	if !c.Force || c.Process != nil || c.Who != nil { // else it is nobody's
		if err = t.judgeLocked(c); err != nil && len(c.asked.open) > 0 {
			err = errWho
		}
	}
	if c.Force && err != nil && err != errWho {
		t.strangeLocked(c)
		err = nil
	}
	switch {
	case err == errWho:
	case err != nil:
		t.stats.Refused++
	default:
		t.touchLocked(c)
		if t.rows.Load() > 0 {
			for _, d := range c.Dirs {
				t.stagedLocked(c.Process, d)
			}
		}
	}
	return err
}

// touchLocked marks the locks that c changes something under.
func (t *Table) touchLocked(c *Change) {
	if c.Quiet {
		t.touchAboveLocked(c.Loud, func(r *row) bool {
			return !slices.ContainsFunc(c.Dirs, func(d *Dir) bool { return d != c.Loud && d.within(r.dir) })
		})
		return
	}
	for _, d := range c.Dirs {
		t.touchAboveLocked(d, func(r *row) bool {
			return !r.dir.keptBy(d) || slices.ContainsFunc(c.From, func(from *Dir) bool { return !r.dir.keptBy(from) })
		})
	}
}

// touchAboveLocked marks those of the locks that cover d that only tells.
func (t *Table) touchAboveLocked(d *Dir, only func(*row) bool) {
	for r := range d.above() {
		if !r.changed && only(r) {
			r.touch()
			t.noteLocked(r)
			t.staged.Add(1) // before it is changed: the next daemon must not hand it over (R5)
		}
	}
}

// strangeLocked marks the locks under which somebody changes something who does not
// hold them: what is there is not all their owners' (R7).
func (t *Table) strangeLocked(c *Change) {
	for _, d := range c.Dirs {
		for r := range d.above() {
			if !r.content.unknown {
				r.mixLocked()
				t.noteLocked(r)
				t.staged.Add(1)
			}
		}
	}
}

// judgeLocked decides about c.
func (t *Table) judgeLocked(c *Change) error {
	for _, d := range c.Dirs {
		free := true
		for r := range d.inForce() {
			if err := t.judgeRowLocked(c, r); err != nil {
				return err
			}
			free = false
		}
		if free && t.deny && !c.Free && !c.Named.locked() {
			return &HeldError{Err: ErrUnlocked}
		}
	}
	for _, d := range c.Trees {
		var err error
		d.walkRows(func(r *row) bool {
			if r.inForce() {
				err = t.judgeRowLocked(c, r)
			}
			return err == nil
		})
		if err != nil {
			return err
		}
	}
	return t.judgeEntryLocked(c)
}

func (t *Table) judgeRowLocked(c *Change, r *row) error {
	switch {
	case c.Process == nil && c.Who != nil:
		return errWho
	case !t.holdsLocked(r, c.Process, &c.asked):
		return t.heldLocked(r)
	}
	return nil
}

// judgeEntryLocked refuses what enters a locked directory while a process that
// does not hold that directory can write to it.
func (t *Table) judgeEntryLocked(c *Change) error {
	if c.Into == nil || c.Into.governing() == nil {
		return nil
	}
	var err error
	harmless := func(h *Handle) bool {
		for r := range c.Into.inForce() {
			if !r.holds(h.proc) {
				err = &HeldError{Err: ErrOpen, Handles: []HandleState{h.stateLocked()}}
			}
		}
		return err == nil
	}
	for _, h := range c.Files {
		if !h.revoked.Load() && !harmless(h) {
			return err
		}
	}
	if c.EnteringTree != nil && !c.EnteringTree.walkHandles(harmless) {
		return err
	}
	// Of what was revoked, only what is in flight still.
	for _, op := range t.inflight {
		enters := op.handle != nil && (slices.Contains(c.Files, op.handle) || c.EnteringTree != nil && op.within(c.EnteringTree))
		if enters && !harmless(op.handle) {
			return err
		}
	}
	return nil
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
	if o.at >= len(t.inflight) || t.inflight[o.at] != o {
		return
	}
	cut(&t.inflight, o.at).at = o.at
	if o.handle != nil && o.handle.revoked.Load() {
		t.ringLocked() // it was in the way until now
	}
	for _, g := range t.draining {
		g.opEndedLocked(o)
	}
}

// inside reports whether all that o changes is at or below d.
func (o *Op) inside(d *Dir) bool {
	outside := func(e *Dir) bool { return !e.within(d) }
	return !slices.ContainsFunc(o.dirs, outside) && !slices.ContainsFunc(o.trees, outside)
}

// within reports whether o changes something at or below d.
func (o *Op) within(d *Dir) bool {
	return slices.ContainsFunc(o.dirs, func(e *Dir) bool { return e.within(d) })
}

// touches reports whether o changes something at or below d, or the name of d
// or of a directory above it (C1).
func (o *Op) touches(d *Dir) bool {
	return o.within(d) || slices.ContainsFunc(o.trees, func(e *Dir) bool { return e.within(d) || d.within(e) })
}
