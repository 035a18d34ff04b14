package lockstate

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// A LockState is a lock with what an observer wants to see beside it.
type LockState struct {
	Lock
	Blockers []HandleState // write handles beneath of processes that do not hold it
}

// Locks returns all locks, sorted by path, then token.
func (t *Table) Locks() []LockState {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := make([]LockState, 0, len(t.tokens))
	for _, r := range t.tokens {
		if r.pending {
			continue
		}
		s := LockState{Lock: r.lock()}
		seen := make(map[*Handle]bool)
		r.dir.walkHandles(func(h *Handle) bool {
			if !seen[h] && !r.holds(h.proc) {
				seen[h] = true
				s.Blockers = append(s.Blockers, h.stateLocked())
			}
			return len(s.Blockers) < 64
		})
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b LockState) int {
		return cmp.Or(strings.Compare(a.Path, b.Path), cmp.Compare(a.Token, b.Token))
	})
	return all
}

// Lock returns the lock with the given token.
func (t *Table) Lock(token uint64) (Lock, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r := t.tokens[token]; r != nil {
		return r.lock(), true
	}
	return Lock{}, false
}

// On returns the locks on d itself; the last one is in force.
func (t *Table) On(d *Dir) []Lock {
	if t.rows.Load() == 0 {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []Lock
	for _, r := range d.rows {
		if !r.pending {
			all = append(all, r.lock())
		}
	}
	return all
}

// IsLockFile reports whether the file called name is the lock file of a lock on d: one that
// keeps it, or of which a locked descriptor does.
func (t *Table) IsLockFile(d *Dir, name string) bool {
	if t.rows.Load() == 0 {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.ContainsFunc(d.rows, func(r *row) bool {
		return !r.pending && (r.fileAt(name) >= 0 || (len(r.keys) > 0 || r.lostKey) && r.file == name)
	})
}

// LeftOpen returns the write handles that were opened under a lock which has
// ended (R8), unless the opener holds the place by another one now (A13).
func (t *Table) LeftOpen() []HandleState {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []HandleState
	seen := make(map[*Handle]bool)
	t.root.walkHandles(func(h *Handle) bool {
		if h.under == 0 || t.tokens[h.under] != nil || seen[h] {
			return true
		}
		seen[h] = true
		if r := h.dirs[0].governing(); r != nil && r.holds(h.proc) {
			return true
		}
		all = append(all, h.stateLocked())
		return len(all) < 1024
	})
	slices.SortFunc(all, func(a, b HandleState) int { return strings.Compare(a.Path, b.Path) })
	return all
}

// Foreign returns the locks in force that p does not hold: where another name
// of a file with several links would have to be looked for (W3).
func (t *Table) Foreign(p *procid.Process) []Lock {
	if t.rows.Load() == 0 {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []Lock
	for _, r := range t.tokens {
		if r.inForce() && !r.holds(p) {
			all = append(all, r.lock())
		}
	}
	return all
}

// Stats returns the counters.
func (t *Table) Stats() Stats {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.stats
	s.Acquired, s.Ended, s.Cleared = maps.Clone(s.Acquired), maps.Clone(s.Ended), maps.Clone(s.Cleared)
	return s
}
