package lockstate

import (
	"maps"
	"slices"
)

// admitGrantLocked carries out C3. own is the row that the request has already,
// if any: that one and those in front of it do not count.
func (t *Table) admitGrantLocked(q Request, own *row) error {
	d, p := q.Dir, q.Process
	// A client that finds another one's lease is refused, whatever the process that
	// asks for it holds beside: it may work for both (L1).
	for _, r := range d.rows {
		if q.Client != "" && r != own && r.lease != nil && r.key() != q.key() && (r.kind != Shared || q.Kind != Shared) {
			return t.heldLocked(r)
		}
	}
	gov, err := t.heldAboveLocked(&q, own)
	if err != nil {
		return err
	}
	// (c): each lock beneath belongs to the caller or a descendant.
	d.walkRows(func(r *row) bool {
		if r.dir == d || r.key() == q.key() || r.owner.ID() == p.ID() || r.owner.Descends(p.ID()) {
			return true
		}
		err = t.heldLocked(r)
		return false
	})
	if err != nil {
		return err
	}
	// (d): write handles beneath are the caller's, a descendant's, or those
	// of holders who delegate.
	blocking := make(map[*Handle]HandleState)
	d.walkHandles(func(h *Handle) bool {
		if h.proc.ID() == p.ID() || h.proc.Descends(p.ID()) {
			return true
		}
		if gov != nil && gov.holds(h.proc) || own != nil && own.holds(h.proc) {
			return true
		}
		if _, ok := q.asked.friends[h.proc.ID()]; ok {
			return true
		}
		blocking[h] = h.stateLocked()
		return len(blocking) < 16
	})
	if len(blocking) > 0 {
		return &HeldError{Err: ErrOpen, Handles: slices.Collect(maps.Values(blocking))}
	}
	return nil
}

// heldAboveLocked checks (a) and (b): the lock on the directory and every one above
// it is held by the caller. It returns the nearest of them whose holders delegate, own
// aside: see granted.
func (t *Table) heldAboveLocked(q *Request, own *row) (gov *row, err error) {
	d := q.Dir
	for e := d; e != nil; e = e.parent {
		rows := e.rows
		if i := slices.Index(rows, own); i >= 0 {
			rows = rows[:i]
		}
		var sharers []*row
		if e == d {
			if q.Kind != Shared && isShared(rows) {
				if other := d.otherSharer(q); other != nil {
					return nil, t.heldLocked(other)
				}
			}
			rows, sharers = splitShared(rows)
		}
		if len(rows) == 0 {
			continue
		}
		if err := t.heldHereLocked(rows, sharers, q); err != nil {
			return nil, err
		}
		if gov == nil && !q.letIn(rows[len(rows)-1], sharers) { // else it is none of the caller's
			gov = granted(rows)
		}
	}
	return gov, nil
}

// letIn reports whether the owner of r lets others share it, and q asks for that. One of
// the sharers that is about to be acquired may come to nothing, and lets nobody in yet.
func (q *Request) letIn(r *row, sharers []*row) bool {
	return q.Kind == Shared && slices.ContainsFunc(sharers, func(s *row) bool { return !s.pending && s.key() == r.key() })
}

// heldHereLocked is heldAboveLocked for one directory: rows are its own, from which the
// last one and, as long as that is pending, the one behind it have to be the caller's, or
// shared by their owners.
func (t *Table) heldHereLocked(rows, sharers []*row, q *Request) error {
	top := true
	for _, r := range slices.Backward(rows) {
		if !top && r.kind == Shared {
			continue // as for granted
		}
		top = false
		switch own := r.ownedBy(q); {
		case own && r.pending && r.dir == q.Dir:
			return nil // the request is decided when that is: see twinError
		case !own && !q.letIn(r, sharers) && !t.holdsLocked(r, q.Process, q.asked):
			return t.heldLocked(r)
		case !r.pending:
			return nil
		}
	}
	return nil
}

// granted returns the last of a directory's rows that somebody may write under, or nil. One
// that is about to be acquired may come to nothing: who holds by it lets nobody keep
// anything (C3d), and does not hold what somebody else has until then.
func granted(rows []*row) *row {
	for _, r := range slices.Backward(rows) {
		if !r.pending && r.kind != Shared {
			return r
		}
	}
	return nil
}

// splitShared parts the shared rows in front of a directory's others from these. A
// holder may share what he holds by one of them: it counts still (C3a).
func splitShared(rows []*row) (behind, sharers []*row) {
	i := len(rows)
	for i > 0 && rows[i-1].kind == Shared {
		i--
	}
	return rows[:i], rows[i:]
}

// isShared reports whether one of a directory's rows is a shared one in front of all that
// are in force. One that its owner is about to have instead may come to nothing.
func isShared(rows []*row) bool {
	for _, r := range slices.Backward(rows) {
		if r.kind == Shared || !r.pending {
			return r.kind == Shared
		}
	}
	return false
}

// retakes reports whether a request is for what r is already: by the same
// owner, or by a holder of a lease with a lock file or descriptor, which are
// the lease's then.
func (r *row) retakes(q *Request) bool {
	return r.key() == q.key() || r.lease != nil && q.Client == "" && !q.Command && r.kind == Explicit && r.has(q.Process)
}

// ownedBy reports whether a request comes from the client whose lease r is.
func (r *row) ownedBy(q *Request) bool {
	return r.lease != nil && r.lease.client == q.Client && (q.UID == 0 || q.UID == r.lease.uid) && !r.sealed && !r.expired() && r.kind != Shared
}

// otherSharer returns a shared lock on d that is not the requester's own. If
// there is none, it may turn its own into an exclusive one.
func (d *Dir) otherSharer(q *Request) *row {
	for _, r := range d.rows {
		if r.kind == Shared && r.key() != q.key() {
			return r
		}
	}
	return nil
}
