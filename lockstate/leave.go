package lockstate

import (
	"cmp"
	"slices"

	"github.com/stagefs/stagefs/lockstate/procid"
)

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

// Concerns reports whether the process owns a lock or is in line for one.
func (t *Table) Concerns(id procid.ID) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.owners[id]) > 0 || len(t.lines.of[id]) > 0
}

// Before returns the owners whose locks the given process is in line for, and who is in
// line before it, those of one lock in their order. If one of them is dead, its death is
// to be carried out before that of the process: it came first, in whatever order they
// became known (R5).
func (t *Table) Before(id procid.ID) []procid.ID {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []procid.ID
	seen := make(map[procid.ID]bool)
	add := func(before procid.ID) {
		if !seen[before] {
			seen[before] = true
			all = append(all, before)
		}
	}
	for l := range t.lines.of[id] {
		add(l.owner)
		for _, h := range l.heirs {
			if h.ID == id {
				break
			}
			add(h.ID)
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
	var passed []*row
	for _, r := range slices.Clone(t.owners[id]) {
		if t.touchOpenLocked(r) { // what was closing when it was acquired, and is open still
			t.noteLocked(r)
		}
		if r.inheritable(how) {
			if p := parents[r.heirs[0].ID]; p != nil {
				t.disownLocked(r)
				r.owner, r.heirs, r.dying = p, r.heirs[1:], false
				t.ownLocked(r)
				t.touchOpenLocked(r)
				t.noteLocked(r)
				t.stats.HandedOver++
				t.tellLocked(EventHandedOver, r, Ending{By: id.Pid})
				if !slices.Contains(heirs, p.ID()) {
					heirs = append(heirs, p.ID())
				}
				passed = append(passed, r)
				continue
			}
		}
		r.dying = true
		dead = append(dead, r.lock())
	}
	for _, r := range passed { // when all have been
		t.replaceImplicitLocked(r)
	}
	if len(heirs) > 0 {
		t.shifts.Add(1)
		t.ringLocked() // their descendants may have waited for that
	}
	slices.SortFunc(dead, func(a, b Lock) int { return cmp.Compare(a.Token, b.Token) })
	return dead, heirs
}

// bereft reports whether another one of r's scope may stand for it, whose owner is dead (H3).
func (r *row) bereft() bool { return r.dying && r.scope.Kind != ProcessScope }

// WatchedBy tells that a process watches a lock: its owner does so who gives it back
// itself. If that one exits without having done so, as where it could not, the lock ends
// and does not surprise the parent (R5).
func (t *Table) WatchedBy(token uint64, id procid.ID) {
	t.mu.Lock()
	defer t.unlockFlush() // the next daemon is not to hand it over either
	r := t.tokens[token]
	if r == nil || r.lease != nil || r.owner.ID() != id || len(r.heirs) == 0 || r.heirs[0].Reaper {
		return
	}
	t.disownLocked(r)
	r.heirs = slices.Clone(r.heirs) // it is the owner's, too
	r.heirs[0].Reaper = true
	t.ownLocked(r)
	t.noteLocked(r)
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
