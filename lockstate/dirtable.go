package lockstate

// A Dir is a directory of the tree. It is known by its place, not by its name:
// a rename carries it along with all its locks (R3). The caller that got it
// from [Table.Dir] owns a reference and gives it back with [Table.Forget].
//
// All fields are protected by Table.mu.
type Dir struct {
	parent   *Dir
	name     string
	children map[string]*Dir
	refs     int
	gone     bool

	rows    []*row // the last one is in force (A13)
	handles []*Handle

	// What is at or below this directory, and the children that have any:
	// a walk visits no others, however many there are.
	rowsBelow    int
	handlesBelow int
	busy         []*Dir
	busyAt       int // in the parent's busy, from 1; 0: it is not there
}

// Root returns the root of the tree. It needs no reference.
func (t *Table) Root() *Dir { return t.root }

// Dir returns the directory called name in parent, with a new reference.
func (t *Table) Dir(parent *Dir, name string) *Dir {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.dirLocked(parent, name)
}

func (t *Table) dirLocked(parent *Dir, name string) *Dir {
	if parent.gone {
		// A look-up that lost a race with the removal: nothing can be
		// locked there (I4).
		return &Dir{name: name, refs: 1, gone: true}
	}
	d := parent.children[name]
	if d == nil {
		d = new(Dir)
		d.placeLocked(parent, name)
	}
	d.refs++
	return d
}

// placeLocked makes d the child called name of parent, which has none.
func (d *Dir) placeLocked(parent *Dir, name string) {
	d.parent, d.name = parent, name
	if parent.children == nil {
		parent.children = make(map[string]*Dir)
	}
	parent.children[name] = d
}

// Find returns the directory at the given names below the root, if the table
// knows it, with a new reference.
func (t *Table) Find(names ...string) (*Dir, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	d := t.root
	for _, n := range names {
		if d = d.children[n]; d == nil {
			return nil, false
		}
	}
	d.refs++
	return d, true
}

// At returns the directory at the given names below the root with a new
// reference, whether the table knew it or not.
func (t *Table) At(names ...string) *Dir {
	t.mu.Lock()
	defer t.mu.Unlock()
	d := t.root
	d.refs++
	for _, n := range names {
		next := t.dirLocked(d, n)
		d.refs--
		d = next
	}
	return d
}

// Again returns d with a new reference.
func (t *Table) Again(d *Dir) *Dir {
	t.mu.Lock()
	defer t.mu.Unlock()
	d.refs++
	return d
}

// Forget gives a reference back.
func (t *Table) Forget(d *Dir) {
	t.mu.Lock()
	defer t.mu.Unlock()
	d.refs--
	t.pruneLocked(d)
}

// pruneLocked drops directories that nothing needs any more.
func (t *Table) pruneLocked(d *Dir) {
	for d != nil && d.parent != nil && d.refs == 0 && len(d.rows) == 0 && len(d.handles) == 0 && len(d.children) == 0 {
		p := d.parent
		delete(p.children, d.name)
		if len(p.children) == 0 {
			p.children = nil
		}
		d.parent = nil
		d.gone = true
		d = p
	}
}

// HandlesBelow reports whether there are write handles at or below d.
func (t *Table) HandlesBelow(d *Dir) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return d.handlesBelow > 0
}

// Path returns the path of d relative to the root; "." is the root. That of one that was
// removed leads nowhere.
func (t *Table) Path(d *Dir) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return d.path()
}

// IsGone reports whether d was removed.
func (t *Table) IsGone(d *Dir) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return d.gone
}

// Level returns how many levels d is below the root, which is at level 0.
func (t *Table) Level(d *Dir) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := 0
	for ; d.parent != nil; d = d.parent {
		n++
	}
	return n
}

// Move tells the table that d is called name in parent now. What was there has
// been removed with [Table.Remove] before. Nothing may be in flight beneath d,
// and no acquisition: the caller excludes both while it renames.
func (t *Table) Move(d, parent *Dir, name string) {
	t.mu.Lock()
	defer t.unlockFlush()
	old := d.parent
	t.detachLocked(d)
	t.attachLocked(d, parent, name)
	t.movedLocked(d)
	t.pruneLocked(old)
	t.shifts.Add(1)
	t.ringLocked() // it may have taken along what somebody waits for, or have left it
}

// Exchange tells the table that a and b have changed places.
func (t *Table) Exchange(a, b *Dir) {
	t.mu.Lock()
	defer t.unlockFlush()
	ap, an, bp, bn := a.parent, a.name, b.parent, b.name
	t.detachLocked(a)
	t.detachLocked(b)
	t.attachLocked(a, bp, bn)
	t.attachLocked(b, ap, an)
	t.movedLocked(a)
	t.movedLocked(b)
	t.shifts.Add(1)
	t.ringLocked()
}

func (t *Table) detachLocked(d *Dir) {
	if d.parent == nil {
		return
	}
	d.markIdle()
	d.parent.count(-d.rowsBelow, -d.handlesBelow)
	delete(d.parent.children, d.name)
	d.parent = nil
}

func (t *Table) attachLocked(d, parent *Dir, name string) {
	if old := parent.children[name]; old != nil {
		t.removeLocked(old)
	}
	d.placeLocked(parent, name)
	d.markBusy()
	parent.count(d.rowsBelow, d.handlesBelow)
}

// Remove tells the table that d is no more: its locks end (R3). References to d
// stay valid, for a directory without name.
func (t *Table) Remove(d *Dir) {
	t.mu.Lock()
	defer t.unlockFlush()
	defer t.ringLocked() // who waits for it waits in vain, also where the lock is above
	t.removeLocked(d)
}

func (t *Table) removeLocked(d *Dir) {
	if d == t.root || d.gone {
		return
	}
	for _, c := range d.children {
		t.removeLocked(c)
	}
	for r := d.top(); r != nil; r = d.top() {
		t.endLocked(r, Ending{Reason: Removed})
	}
	for len(d.handles) > 0 {
		d.handles[0].leaveLocked(d)
	}
	p := d.parent
	t.detachLocked(d)
	d.gone = true
	t.pruneLocked(p)
}
