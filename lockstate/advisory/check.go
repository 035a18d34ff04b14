package advisory

import (
	"fmt"
	"slices"
)

// Check verifies the invariants (see the package comment). It is slow.
func (t *Table) Check() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.woken) > 0 {
		return fmt.Errorf("I7: %d woken", len(t.woken))
	}
	held, records := 0, 0
	for key, f := range t.files {
		if len(f.flocks)+len(f.owners)+len(f.waiters) == 0 {
			return fmt.Errorf("I6: file %d is empty", key)
		}
		var locks []*request
		f.each(func(r *request) { locks = append(locks, r) })
		held += len(locks)
		if err := f.checkRanges(); err != nil {
			return fmt.Errorf("file %d: %w", key, err)
		}
		if err := checkConflicts(locks); err != nil {
			return fmt.Errorf("file %d: %w", key, err)
		}
		if !slices.IsSortedFunc(f.waiters, bySeq) {
			return fmt.Errorf("I5: file %d: out of order", key)
		}
		for _, r := range f.waiters {
			if !r.Flock {
				records++
			}
			if err := t.checkWaiter(f, r, locks); err != nil {
				return fmt.Errorf("file %d: waiter %+v: %w", key, r.Lock, err)
			}
		}
	}
	if held != t.held {
		return fmt.Errorf("I6: %d locks, counted %d", held, t.held)
	}
	indexed := 0
	for _, waits := range t.byOwner {
		indexed += len(waits)
	}
	if indexed != records {
		return fmt.Errorf("I5: %d waiters indexed by owner, want %d", indexed, records)
	}
	return nil
}

func (f *file) checkRanges() error {
	seen := make(map[uint64]bool)
	for _, g := range f.owners {
		if seen[g.owner] || len(g.held) == 0 {
			return fmt.Errorf("I1: owner %d twice, or with nothing", g.owner)
		}
		seen[g.owner] = true
		for i, r := range g.held {
			if r.Flock || r.Owner != g.owner || r.Start > r.End || r.End > MaxEnd {
				return fmt.Errorf("I1: owner %d has %+v", g.owner, r.Lock)
			}
			if i == 0 {
				continue
			}
			p := g.held[i-1]
			if p.End >= r.Start {
				return fmt.Errorf("I1: %+v and %+v overlap", p.Lock, r.Lock)
			}
			if p.End+1 == r.Start && p.Write == r.Write && p.Handle == r.Handle {
				return fmt.Errorf("I1: %+v and %+v are not joined", p.Lock, r.Lock)
			}
		}
	}
	return nil
}

func checkConflicts(locks []*request) error {
	for i, r := range locks {
		if r.blocker != nil || r.done != nil {
			return fmt.Errorf("I2: %+v is held and waits", r.Lock)
		}
		for _, o := range locks[:i] {
			if r.conflicts(&o.Lock) {
				return fmt.Errorf("I2: %+v and %+v are both held", o.Lock, r.Lock)
			}
			if r.Flock && o.Flock && r.Handle == o.Handle {
				return fmt.Errorf("I2: handle %d has two flock locks", r.Handle)
			}
		}
	}
	return nil
}

func (t *Table) checkWaiter(f *file, r *request, locks []*request) error {
	b := r.blocker
	if b == nil || r.file != f || r.done == nil || !slices.Contains(b.beneath, r) {
		return fmt.Errorf("I3: waits for nobody")
	}
	top := r.top()
	if !slices.Contains(locks, top) || f.head(top) != top {
		return fmt.Errorf("I3: at the top is %+v, which isn't held, or not the first of its run", top.Lock)
	}
	for a := b; a != nil; a = a.blocker {
		if l := f.joined(a); !l.conflicts(&r.Lock) {
			return fmt.Errorf("I3: doesn't conflict with %+v above it", l)
		}
	}
	if f.obstacle(&r.Lock) == nil {
		return fmt.Errorf("I4: nothing is in the way")
	}
	if !r.Flock && !slices.Contains(t.byOwner[r.Owner], r) {
		return fmt.Errorf("I5: not indexed")
	}
	return nil
}
