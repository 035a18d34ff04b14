package advisory

import "sync"

// maxHeld is how many locks may be held at a time; beyond that requests fail
// with ErrLimit (ENOLCK). Splits, and waiters when their turn comes, may exceed
// it.
const maxHeld = 1 << 18

// A Table is the advisory locks of one mount. Its methods may be called
// concurrently.
type Table struct {
	mu    sync.Mutex
	files map[Key]*file
	seq   uint64 // counts requests that had to wait
	held  int    // counts held locks, of all files
	limit int

	// Who waits for record locks, for the search for circles. Requests that
	// were woken and not yet tried again are not in it.
	byOwner map[uint64][]*request

	woken []*request // in order of arrival

	paused bool // see Pause
}

// A file is what is locked and waited for on one file. Table.mu guards it.
type file struct {
	key     Key
	flocks  []*request // in order of acquisition
	owners  []*ranges  // in the order in which each got its first lock
	waiters []*request // in order of arrival
}

// A request is a lock that is held or waited for. Table.mu guards it.
type request struct {
	Lock
	file    *file
	beneath []*request // who waits for this one, directly

	// While it waits:
	seq     uint64     // order of arrival
	blocker *request   // it is in blocker.beneath; nil while woken
	done    chan error // nil if held
}

// New returns an empty table.
func New() *Table {
	return &Table{
		files:   make(map[Key]*file),
		byOwner: make(map[uint64][]*request),
		limit:   maxHeld,
	}
}

// Get returns the first lock that stands in the way of want, with the range
// that F_GETLK reports.
func (t *Table) Get(key Key, want Lock) (conflict Lock, found bool) {
	return t.first(key, want, (*file).obstacle)
}

// GetOwn returns the first lock on want's range that want's owner itself has:
// what F_OFD_GETLK reports for the type F_UNLCK (Linux 6.6).
func (t *Table) GetOwn(key Key, want Lock) (own Lock, found bool) {
	return t.first(key, want, (*file).own)
}

func (t *Table) first(key Key, want Lock, find func(*file, *Lock) *request) (Lock, bool) {
	want, err := want.normal()
	if err != nil {
		return Lock{}, false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	f := t.files[key]
	if f == nil {
		return Lock{}, false
	}
	r := find(f, &want)
	if r == nil {
		return Lock{}, false
	}
	return f.joined(r), true
}

// Try takes want, or fails with ErrConflict, ErrLimit or ErrRange. A refused
// flock conversion has ended the lock that was to be converted.
func (t *Table) Try(key Key, want Lock) error {
	want, err := want.normal()
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	f := t.fileLocked(key)
	r := &request{Lock: want, file: f}
	blocker, err := t.takeLocked(r)
	if blocker != nil {
		err = &ConflictError{Lock: f.joined(blocker)}
	}
	t.settleLocked(f)
	return err
}

// Wait is Try that waits where Try fails with ErrConflict, until cancel is
// readable. It fails with ErrDeadlock or ErrCancelled; when cancelled too late,
// it returns nil and the caller has the lock.
func (t *Table) Wait(key Key, want Lock, cancel <-chan struct{}) error {
	w := t.Start(key, want)
	select {
	case err := <-w.done:
		return err
	case <-cancel:
		w.Cancel()
		return <-w.done
	}
}

// Unlock ends the locks that want's owner has on want's range, or want's
// flock lock. Want's Write doesn't matter.
func (t *Table) Unlock(key Key, want Lock) {
	want, err := want.normal()
	if err != nil {
		return
	}
	t.edit(key, func(f *file) {
		if want.Flock {
			t.dropFlocksLocked(f, func(r *request) bool { return r.Handle == want.Handle })
			return
		}
		if g := f.rangesOf(want.Owner); g != nil {
			t.rewriteLocked(f, g, want.Start, want.End, nil)
		}
	})
}

// Flush ends the record locks that owner has on the file: it closed a
// descriptor (fcntl(2)). OFD locks have another owner, flock locks stay.
func (t *Table) Flush(key Key, owner uint64) {
	t.edit(key, func(f *file) {
		if g := f.rangesOf(owner); g != nil {
			t.rewriteLocked(f, g, 0, MaxEnd, nil)
		}
	})
}

// Release ends what was set through handle and is still there, since its last
// descriptor was closed (R2): flock and OFD locks. Waits through it end with
// ErrCancelled: no system call can be in progress on it.
func (t *Table) Release(key Key, handle uint64) {
	t.edit(key, func(f *file) {
		t.dropFlocksLocked(f, func(r *request) bool { return r.Handle == handle })
		t.dropRangesLocked(f, handle)
		for i := 0; i < len(f.waiters); {
			if r := f.waiters[i]; r.Handle == handle {
				t.abandonLocked(r, ErrCancelled)
			} else {
				i++
			}
		}
	})
}

// edit runs change on the file if it is known, and then grants what can be.
func (t *Table) edit(key Key, change func(*file)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f := t.files[key]
	if f == nil {
		return
	}
	change(f)
	t.settleLocked(f)
}

// Locked reports whether there are locks on the file.
func (t *Table) Locked(key Key) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	f := t.files[key]
	return f != nil && len(f.flocks)+len(f.owners) > 0
}

// Locks returns the locks on the file: flock locks in order of acquisition,
// then record locks by owner and start, in one piece for each handle.
func (t *Table) Locks(key Key) []Lock {
	t.mu.Lock()
	defer t.mu.Unlock()
	f := t.files[key]
	if f == nil {
		return nil
	}
	var all []Lock
	f.each(func(r *request) { all = append(all, r.Lock) })
	return all
}

func (t *Table) fileLocked(key Key) *file {
	f := t.files[key]
	if f == nil {
		f = &file{key: key}
		t.files[key] = f
	}
	return f
}

// each calls visit for all held locks of the file.
func (f *file) each(visit func(*request)) {
	for _, r := range f.flocks {
		visit(r)
	}
	for _, g := range f.owners {
		for _, r := range g.held {
			visit(r)
		}
	}
}

// obstacle returns the first held lock that conflicts with l, as Linux finds
// it: in the order described at file.
func (f *file) obstacle(l *Lock) *request {
	if l.Flock {
		for _, r := range f.flocks {
			if r.conflicts(l) {
				return r
			}
		}
		return nil
	}
	for _, g := range f.owners {
		if g.owner != l.Owner {
			if r := g.first(l, l.Write); r != nil {
				return r
			}
		}
	}
	return nil
}

// own returns the first held lock on l's range of l's owner.
func (f *file) own(l *Lock) *request {
	if l.Flock {
		for _, r := range f.flocks {
			if r.sameOwner(l) {
				return r
			}
		}
		return nil
	}
	if g := f.rangesOf(l.Owner); g != nil {
		return g.first(l, true)
	}
	return nil
}
