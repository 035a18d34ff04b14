package lockstate

import (
	"slices"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// ReleaseFile tells that the lock file called name in d is gone: a lock that
// only it kept ends (R1). The caller has made sure that a holder did it.
func (t *Table) ReleaseFile(d *Dir, name string) (Lock, bool) {
	t.mu.Lock()
	defer t.unlockFlush()
	r := d.byFile(name)
	if r == nil {
		return Lock{}, false
	}
	i := r.fileAt(name)
	r.files = slices.Delete(r.files, i, i+1)
	l := r.lock()
	if !t.endUnkeptLocked(r, Unlinked) {
		return Lock{}, false
	}
	return l, true
}

// byFile returns the row on d that the lock file called name keeps, or nil. Of two that had
// one of that name it is the later one's: that of the other is gone.
func (d *Dir) byFile(name string) *row {
	for _, r := range slices.Backward(d.rows) {
		if r.fileAt(name) >= 0 {
			return r
		}
	}
	return nil
}

// KeptByFile reports whether the lock file called name keeps the lock with a token, and in
// which directory: if somebody else is ending that lock, too, it may be another one's by now.
// Nobody is about to make one of that name meanwhile.
func (t *Table) KeptByFile(token uint64, name string) (path string, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.tokens[token]
	if r == nil || r.dir.byFile(name) != r {
		return "", false
	}
	return r.dir.path(), true
}

// HasKey reports whether a descriptor lock keeps a lock.
func (t *Table) HasKey(key any) bool { return t.KeptBy(key) != nil }

// KeptBy returns the directory that a descriptor lock keeps locked, or nil.
func (t *Table) KeptBy(key any) *Dir {
	if t.rows.Load() == 0 {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if r := t.keys[key]; r != nil {
		return r.dir
	}
	return nil
}

// OwnerBy returns the owner of the lock that a descriptor lock keeps.
func (t *Table) OwnerBy(key any) (owner procid.ID, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r := t.keys[key]; r != nil && r.lease == nil {
		return r.owner.ID(), true
	}
	return procid.ID{}, false
}

// ReleaseKey tells that a descriptor lock is gone: a lock that only it kept ends
// (R2).
func (t *Table) ReleaseKey(key any) (Lock, bool) {
	if t.rows.Load() == 0 {
		return Lock{}, false
	}
	t.mu.Lock()
	defer t.unlockFlush()
	r := t.keys[key]
	if r == nil {
		return Lock{}, false
	}
	var l Lock
	if len(r.keys) == 1 { // else it is kept by another one
		l = r.lock()
	}
	return l, t.dropKeyLocked(r, key)
}

// LeaveToExit is [Table.ReleaseKey] for a descriptor that was closed, perhaps by the
// death of the lock's owner: then the lock stays in force until [Table.Exit] tells how
// the owner ended, and so what becomes of the content (R7). It reports false, and has
// done nothing, where that is of no account or dying says that the owner lives.
func (t *Table) LeaveToExit(key any, dying func(procid.ID) bool) bool {
	if !t.Tracks() {
		return false
	}
	t.mu.Lock()
	id, ok := t.onlyKeptLocked(key)
	t.mu.Unlock()
	if !ok || !dying(id) { // system calls: without t.mu
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if now, ok := t.onlyKeptLocked(key); !ok || now != id {
		return false
	}
	r := t.keys[key]
	delete(r.keys, key)
	delete(t.keys, key)
	r.leaving = true // its record stays as it is: of a lock by a descriptor
	return true
}

// Doom tells that the lock with a token is about to end. It returns the descriptor
// locks which keep it, and don't end it any more: the caller takes them away before
// anybody gets one of them again. Who takes the directory again from here on has another
// lock, unless [Table.Remains] says that this one does not end.
func (t *Table) Doom(token uint64) (keys []any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r := t.tokens[token]; r != nil {
		keys = t.doomLocked(r)
	}
	return keys
}

// DoomOf is [Table.Doom] for a lock of a process whose death is being carried out. It
// reports false, and has done nothing, where the lock has ended since [Table.Exit]: what
// kept it may keep another one by now. So it does where another process has come into the
// lock's scope since, and has taken it again: it is that one's now (H3).
func (t *Table) DoomOf(token uint64, id procid.ID) (keys []any, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.tokens[token]
	if r == nil || r.owner.ID() != id {
		return nil, false
	}
	return t.doomLocked(r), true
}

// doomed reports whether r is about to end: then who takes it again has another one.
func (r *row) doomed() bool { return r.enders > 0 }

func (t *Table) doomLocked(r *row) (keys []any) {
	r.enders++
	if len(r.keys) == 0 {
		return nil
	}
	keys = t.unkeyLocked(r)
	clear(r.keys)
	if r.leaving = !r.kept(); !r.leaving {
		r.opened = nil
	}
	return keys
}

// Remains takes back one call of [Table.Doom]: that one does not end the lock. If nobody
// else does, its owner has one lock then, also if it has taken another one instead meanwhile.
// The lock files called gone keep it no more: they were removed before that failed.
func (t *Table) Remains(token uint64, gone ...string) {
	t.mu.Lock()
	defer t.unlockFlush()
	r := t.tokens[token]
	if r == nil || !r.doomed() {
		return
	}
	if len(gone) > 0 {
		r.files = slices.DeleteFunc(r.files, func(f lockFile) bool { return slices.Contains(gone, f.name) })
		if t.endUnkeptLocked(r, Unlinked) {
			return
		}
	}
	if r.enders--; r.doomed() {
		return
	}
	r.remains = true
	for _, twin := range slices.Backward(r.dir.rows) {
		if twin.isInsteadOf(r) && !twin.pending { // else by its Commit
			t.mergeTwinLocked(twin)
			t.noteLocked(twin)
			break
		}
	}
}

// onlyKeptLocked returns the owner of the lock that a descriptor lock keeps. It
// reports false if something else does so, too, or if nothing depends on how that
// owner ends.
func (t *Table) onlyKeptLocked(key any) (owner procid.ID, ok bool) {
	r := t.keys[key]
	if r == nil || r.pending || r.lease != nil || !t.tracksLocked(r) ||
		r.command || r.lostKey || len(r.files) > 0 || len(r.keys) > 1 {
		return procid.ID{}, false
	}
	return r.owner.ID(), true
}

// End ends the lock with the given token (R6).
func (t *Table) End(token uint64, why Reason) error {
	return t.EndAs(token, Ending{Reason: why})
}

// EndAs is [Table.End] that tells those who follow the lock more.
func (t *Table) EndAs(token uint64, how Ending) error {
	t.mu.Lock()
	defer t.unlockFlush()
	r := t.tokens[token]
	if r == nil {
		return ErrNoLock
	}
	t.endLocked(r, how)
	return nil
}

// EndLost ends a lock whose descriptor was one of a daemon that died, and is
// closed, unless something else keeps it. It leaves one alone that its owner has
// taken anew meanwhile.
func (t *Table) EndLost(token uint64) {
	t.mu.Lock()
	defer t.unlockFlush()
	r := t.tokens[token]
	if r == nil || !r.lostKey {
		return
	}
	r.lostKey, r.lost = false, nil
	t.endUnkeptLocked(r, Unlocked)
}

// Follow returns a channel that is closed when the lock with the given token
// has ended, and what then tells how. It reports false for a lock that is no
// more.
func (t *Table) Follow(token uint64) (ended <-chan struct{}, how func() Ending, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.tokens[token]
	if r == nil || r.pending {
		return nil, nil, false
	}
	return r.ended, func() Ending { return r.ending }, true
}

// over is a channel that is closed.
var over = func() <-chan struct{} { c := make(chan struct{}); close(c); return c }()

// Watch returns channels that are closed when the lock with the given token
// has ended, and when something beneath was changed under it. Both are closed
// already for a lock that is no more.
func (t *Table) Watch(token uint64) (ended, changed <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch r := t.tokens[token]; {
	case r == nil:
		return over, over
	case r.settled == nil:
		return r.ended, over
	default:
		return r.ended, r.settled
	}
}
