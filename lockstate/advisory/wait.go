package advisory

import (
	"cmp"
	"slices"
)

// A Waiter is a request made by [Table.Start].
type Waiter struct {
	table *Table
	req   *request
	done  chan error
}

// Start is Wait that returns at once.
func (t *Table) Start(key Key, want Lock) *Waiter {
	w := &Waiter{table: t, done: make(chan error, 1)}
	want, err := want.normal()
	if err != nil {
		w.done <- err
		return w
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.paused {
		w.done <- ErrCancelled
		return w
	}
	f := t.fileLocked(key)
	t.seq++
	r := &request{Lock: want, file: f, seq: t.seq}
	blocker, err := t.takeLocked(r)
	if blocker != nil {
		err = t.blockLocked(r, blocker)
	}
	if blocker == nil || err != nil {
		w.done <- err
	} else {
		w.req = r
		r.done = w.done
		f.waiters = append(f.waiters, r)
	}
	t.settleLocked(f)
	return w
}

// Done returns a channel that gets one value when the wait is over: nil if the
// lock was granted, else what Wait returns.
func (w *Waiter) Done() <-chan error { return w.done }

// Cancel ends the wait with ErrCancelled, unless it is over.
func (w *Waiter) Cancel() {
	if w.req == nil {
		return
	}
	t := w.table
	t.mu.Lock()
	defer t.mu.Unlock()
	if w.req.done == nil {
		return
	}
	f := w.req.file
	t.abandonLocked(w.req, ErrCancelled)
	t.settleLocked(f)
}

// takeLocked takes r if nothing is in its way, and else returns what is. What
// a flock conversion drops is dropped either way.
func (t *Table) takeLocked(r *request) (blocker *request, err error) {
	f := r.file
	if r.Flock {
		if own := f.own(&r.Lock); own != nil {
			if own.Write == r.Write {
				t.wakeLocked(r)
				return nil, nil
			}
			t.dropFlocksLocked(f, func(o *request) bool { return o == own })
		}
	}
	if b := f.obstacle(&r.Lock); b != nil {
		return b, nil
	}
	if t.held >= t.limit && r.done == nil {
		return nil, ErrLimit
	}
	if r.Flock {
		f.flocks = append(f.flocks, r)
		t.held++
		return nil, nil
	}
	t.rewriteLocked(f, f.addOwner(r.Owner), r.Start, r.End, r)
	return nil, nil
}

// blockLocked puts r beneath the held lock b, or beneath the one among those who
// wait there already with which it conflicts. It fails with ErrDeadlock.
func (t *Table) blockLocked(r, b *request) error {
	t.wakeLocked(r) // b need not be in the way of those beneath r
	if !r.Flock && t.deadlockLocked(r, b) {
		return ErrDeadlock
	}
	b = r.file.head(b)
next:
	for _, w := range b.beneath {
		if w.conflicts(&r.Lock) {
			b = w
			goto next
		}
	}
	r.blocker = b
	b.beneath = append(b.beneath, r)
	t.indexLocked(r)
	return nil
}

// wakeLocked detaches who waits for r, to be tried again by settleLocked.
func (t *Table) wakeLocked(r *request) {
	for _, w := range r.beneath {
		w.blocker = nil
		t.unindexLocked(w)
		i, _ := slices.BinarySearchFunc(t.woken, w, bySeq)
		t.woken = slices.Insert(t.woken, i, w)
	}
	r.beneath = nil
}

// settleLocked tries those who were woken, in order of arrival, and forgets f
// if nothing is left of it.
func (t *Table) settleLocked(f *file) {
	for len(t.woken) > 0 && !t.paused {
		r := t.woken[0]
		t.woken = t.woken[1:]
		blocker, err := t.takeLocked(r)
		if blocker != nil {
			err = t.blockLocked(r, blocker)
		}
		switch {
		case err != nil:
			t.abandonLocked(r, err)
		case blocker == nil:
			t.finishLocked(r, nil)
		}
	}
	if !t.paused {
		t.woken = nil
	}
	if len(f.flocks)+len(f.owners)+len(f.waiters) == 0 {
		delete(t.files, f.key)
	}
}

// abandonLocked ends the wait of r with an error.
func (t *Table) abandonLocked(r *request, err error) {
	if b := r.blocker; b != nil {
		b.beneath = without(b.beneath, r)
		r.blocker = nil
		t.unindexLocked(r)
		if r.crowded() {
			r.moveUp(b)
		}
	} else if i, ok := slices.BinarySearchFunc(t.woken, r, bySeq); ok {
		t.woken = slices.Delete(t.woken, i, i+1)
	}
	t.wakeLocked(r)
	t.finishLocked(r, err)
}

// crowd is how many wait behind one who gives up if they are not all to be tried
// again, as Linux does: each would put the rest of the line together anew.
const crowd = 64

func (r *request) crowded() bool {
	n := 0
	return !r.below(func(*request) bool { n++; return n <= crowd })
}

// moveUp puts those beneath r, which goes away, beneath b, where r was, with all
// that is beneath them, if the lock at the top is in the way of each, as it was
// before.
func (r *request) moveUp(b *request) {
	top := r.file.joined(b.top())
	obstructed := func(w *request) bool { return top.conflicts(&w.Lock) }
	r.beneath = slices.DeleteFunc(r.beneath, func(w *request) bool {
		if !obstructed(w) || !w.below(obstructed) {
			return false
		}
		w.blocker = b
		b.beneath = append(b.beneath, w)
		return true
	})
}

// below reports whether ok holds for all who wait beneath r, directly or not. It
// stops at the first for whom it doesn't.
func (r *request) below(ok func(*request) bool) bool {
	for line := slices.Clone(r.beneath); len(line) > 0; {
		w := line[len(line)-1]
		if !ok(w) {
			return false
		}
		line = append(line[:len(line)-1], w.beneath...)
	}
	return true
}

func (t *Table) finishLocked(r *request, err error) {
	f := r.file
	if len(f.waiters) > 0 && f.waiters[0] == r {
		f.waiters = without(f.waiters, r)
	} else if i, ok := slices.BinarySearchFunc(f.waiters, r, bySeq); ok {
		f.waiters = slices.Delete(f.waiters, i, i+1)
	}
	r.done <- err // has room for one
	r.done = nil
}

func bySeq(a, b *request) int { return cmp.Compare(a.seq, b.seq) }

// without takes r out of a list, at no cost where the first of many leaves.
func without(list []*request, r *request) []*request {
	switch i := slices.Index(list, r); i {
	case -1:
		return list
	case 0:
		list[0] = nil
		return list[1:]
	default:
		return slices.Delete(list, i, i+1)
	}
}
