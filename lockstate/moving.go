package lockstate

// A Move is a rename that was about to be carried out when a lock was recorded.
// Which of its two places has the directory tells whether it was.
type Move struct {
	ID   FileID `json:"id"`             // of the directory that the rename names
	Rest Bytes  `json:"rest,omitempty"` // the path of the locked directory in it; "": it is the same
	To   Bytes  `json:"to,omitempty"`   // its path afterwards, relative to the root; "": it is replaced, and no more
}

// From is the path of the directory that the rename names, for a lock that was
// recorded with the given path.
func (m *Move) From(path string) string {
	if m.Rest == "" {
		return path
	}
	return path[:max(0, len(path)-len(m.Rest)-1)]
}

// After is the path of the locked directory when the rename has been carried
// out.
func (m *Move) After() string {
	if m.Rest == "" {
		return string(m.To)
	}
	return string(m.To + "/" + m.Rest)
}

// Moving tells that d, which is the directory id, is about to be called name in
// parent, or to be replaced if parent is nil. Locks at and below it are found
// again by the next daemon whether that is carried out or not. [Table.Move],
// [Table.Exchange], [Table.Remove] or [Table.Stays] ends it.
func (t *Table) Moving(d *Dir, id FileID, parent *Dir, name string) {
	t.mu.Lock()
	if d.rowsBelow == 0 {
		t.mu.Unlock()
		return
	}
	defer t.unlockFlush()
	to := name
	if parent != nil && parent.parent != nil {
		to = parent.path() + "/" + name
	}
	from := len(d.path())
	d.walkRows(func(r *row) bool {
		r.move = &Move{ID: id, To: Bytes(to)}
		if r.dir != d {
			r.move.Rest = Bytes(r.dir.path()[from+1:])
		}
		t.noteLocked(r)
		return true
	})
}

// Stays tells that what was announced with Moving was not carried out.
func (t *Table) Stays(d *Dir) {
	t.mu.Lock()
	if d.rowsBelow == 0 {
		t.mu.Unlock()
		return
	}
	defer t.unlockFlush()
	t.movedLocked(d)
}

// movedLocked writes down where the locks at and below d are now.
func (t *Table) movedLocked(d *Dir) {
	d.walkRows(func(r *row) bool {
		r.move = nil
		t.noteLocked(r)
		return true
	})
}
