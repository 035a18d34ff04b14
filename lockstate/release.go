package lockstate

import (
	"cmp"
	"slices"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// ReleaseFile tells that the lock file called name in d is gone: a lock that
// only it kept ends (R1). The caller has made sure that a holder did it.
func (t *Table) ReleaseFile(d *Dir, name string) (Lock, bool) {
	t.mu.Lock()
	defer t.unlockFlush()
	for _, r := range slices.Backward(d.rows) {
		i := r.fileAt(name)
		if i < 0 {
			continue
		}
		if r.files = slices.Delete(r.files, i, i+1); r.kept() {
			t.noteLocked(r)
			return Lock{}, false
		}
		l := r.lock()
		t.endLocked(r, Ending{Reason: Unlinked})
		return l, true
	}
	return Lock{}, false
}

// HasKey reports whether a descriptor lock keeps a lock.
func (t *Table) HasKey(key any) bool {
	if t.rows.Load() == 0 {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.keys[key] != nil
}

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
	l := r.lock()
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

// Doom tells that the lock with a token is about to end, and that the descriptor
// locks which keep it are going to be taken away: they don't end it any more. Who takes
// the directory again from here on has another lock, unless [Table.Remains] says that
// this one does not end.
func (t *Table) Doom(token uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.tokens[token]
	if r == nil {
		return
	}
	r.doomed = true
	if len(r.keys) == 0 {
		return
	}
	for k := range r.keys {
		if t.keys[k] == r { // see endLocked
			delete(t.keys, k)
		}
	}
	clear(r.keys)
	r.leaving = !r.kept()
}

// Remains takes back that a lock is about to end. Its owner has one lock then, also if
// it has taken another one instead meanwhile.
func (t *Table) Remains(token uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.tokens[token]
	if r == nil {
		return
	}
	r.doomed = false
	for _, twin := range r.dir.rows {
		if twin.instead == token && !twin.pending {
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
func (t *Table) End(token uint64, why Reason) (Lock, error) {
	return t.EndAs(token, Ending{Reason: why})
}

// EndAs is [Table.End] that tells those who follow the lock more.
func (t *Table) EndAs(token uint64, how Ending) (Lock, error) {
	t.mu.Lock()
	defer t.unlockFlush()
	r := t.tokens[token]
	if r == nil {
		return Lock{}, ErrNoLock
	}
	l := r.lock()
	t.endLocked(r, how)
	return l, nil
}

// EndLost ends a lock whose descriptor was one of a daemon that died, and is
// closed. It leaves one alone that its owner has taken anew meanwhile.
func (t *Table) EndLost(token uint64) {
	t.mu.Lock()
	defer t.unlockFlush()
	if r := t.tokens[token]; r != nil && r.lostKey {
		t.endLocked(r, Ending{Reason: Unlocked})
	}
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

// Chain returns the implicit lock above d that d's own lock may stand in for
// (A12): the nearest one above, if p owns it. names lead from the locked
// directory down to d, which is the last of them.
func (t *Table) Chain(p *procid.Process, d *Dir) (l Lock, names []string, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for e := d; e.parent != nil; e = e.parent {
		names = append(names, e.name)
		r := e.parent.top()
		if r == nil {
			continue
		}
		if r.kind != Implicit || r.owner.ID() != p.ID() && (r.scope.Kind == ProcessScope || !r.has(p)) || len(e.parent.rows) != 1 {
			return Lock{}, nil, false
		}
		slices.Reverse(names)
		return r.lock(), names, true
	}
	return Lock{}, nil, false
}

// Narrow ends the lock with the token above, in whose place stands the one with the
// given token on a directory beneath, if only reports that nothing else is there to
// be locked (A12). An operation that is under way meanwhile under the first one was
// admitted by it, and keeps it in force.
func (t *Table) Narrow(above, token uint64, only func() bool) (narrowed bool) {
	if !t.beginNarrow(above, token) {
		return false
	}
	ok := only() // system calls: without t.mu
	t.mu.Lock()
	defer t.unlockFlush()
	t.narrowing--
	old, r := t.tokens[above], t.tokens[token]
	if old == nil {
		return false
	}
	old.narrowing = false
	if !ok || r == nil || old.disturbed || len(old.dir.rows) != 1 {
		return false
	}
	if old.content.fresh && !old.changed {
		// The directory was made under the other one.
		r.content = content{fresh: true}
		t.noteLocked(r)
	}
	t.endLocked(old, Ending{Reason: Narrowed})
	return true
}

func (t *Table) beginNarrow(above, token uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	old, r := t.tokens[above], t.tokens[token]
	if old == nil || r == nil || old.narrowing {
		return false
	}
	for _, op := range t.inflight {
		if op.touches(old.dir) && !op.inside(r.dir) {
			return false
		}
	}
	old.narrowing, old.disturbed = true, false
	t.narrowing++
	return true
}

// Watch returns channels that are closed when the lock with the given token
// has ended, and when something beneath was changed under it. Both are closed
// already for a lock that is no more.
func (t *Table) Watch(token uint64) (ended, changed <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.tokens[token]
	if r == nil {
		c := make(chan struct{})
		close(c)
		return c, c
	}
	if r.settled == nil {
		c := make(chan struct{})
		close(c)
		return r.ended, c
	}
	return r.ended, r.settled
}

// Owns reports whether the process owns a lock.
func (t *Table) Owns(id procid.ID) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.owners[id]) > 0
}

// Owned returns the locks of a process.
func (t *Table) Owned(id procid.ID) []Lock {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []Lock
	for _, r := range t.owners[id] {
		if !r.pending {
			all = append(all, r.lock())
		}
	}
	return all
}

// Before returns the owners whose locks the given process is next in line for.
// If one of them is dead, its death is to be carried out before that of the
// process: it came first, in whatever order the two became known (R5).
func (t *Table) Before(id procid.ID) []procid.ID {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []procid.ID
	for _, r := range t.heirs[id] {
		if o := r.owner.ID(); !slices.Contains(all, o) {
			all = append(all, o)
		}
	}
	return all
}

// Exit carries out what becomes of the locks of a process that has died (R4,
// R5). A lock under which nothing was changed passes to the parent if the
// owner succeeded and resolve finds that the parent lived then; heirs are those
// parents.
// The other locks are returned as dead: they stay in force until the caller
// has cleaned up after them and calls [Table.End].
func (t *Table) Exit(id procid.ID, how procid.Exit, resolve func(procid.ID) *procid.Process) (dead []Lock, heirs []procid.ID) {
	t.mu.Lock()
	var passing []*row
	for _, r := range t.owners[id] {
		if r.inheritable(how) {
			passing = append(passing, r)
		}
	}
	t.mu.Unlock()

	parents := make(map[procid.ID]*procid.Process)
	for _, r := range passing {
		h := r.heirs[0].ID
		if _, ok := parents[h]; !ok {
			parents[h] = resolve(h) // system calls: without t.mu
		}
	}

	t.mu.Lock()
	defer t.unlockFlush()
	for _, r := range slices.Clone(t.owners[id]) {
		if t.tokens[r.token] != r || r.owner.ID() != id {
			continue // it has ended with one before it
		}
		if r.inheritable(how) {
			if p := parents[r.heirs[0].ID]; p != nil {
				t.disownLocked(r)
				r.owner, r.heirs = p, r.heirs[1:]
				t.ownLocked(r)
				t.noteLocked(r)
				t.stats.HandedOver++
				t.tellLocked(EventHandedOver, r, Ending{By: id.Pid})
				t.replaceImplicitLocked(r)
				if !slices.Contains(heirs, p.ID()) {
					heirs = append(heirs, p.ID())
				}
				continue
			}
		}
		dead = append(dead, r.lock())
	}
	if len(heirs) > 0 {
		t.ringLocked() // their descendants may have waited for that
	}
	slices.SortFunc(dead, func(a, b Lock) int { return cmp.Compare(a.Token, b.Token) })
	return dead, heirs
}

// inheritable reports whether r may pass to its owner's parent (R5). Where the
// kernel tells nothing of exits, each passes for a success: the parent is there
// to be seen as the owner, whereas a lock that ended could not be missed. Where
// it does, one that was not heard of is none: what is the parent's by mistake
// is all its children's.
func (r *row) inheritable(how procid.Exit) bool {
	if how.Missed || how.Known && !how.Success() {
		return false
	}
	return !r.pending && !r.leaving && !r.changed && len(r.heirs) > 0 && !r.heirs[0].Reaper
}
