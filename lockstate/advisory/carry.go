package advisory

import (
	"maps"
	"slices"
)

// Carry returns all held locks of all files, in an order in which TakeUp makes
// the same of them. Who waits is not among them: it asks again.
func (t *Table) Carry() map[Key][]Lock {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := make(map[Key][]Lock, len(t.files))
	for key, f := range t.files {
		var held []Lock
		f.each(func(r *request) { held = append(held, r.Lock) })
		if len(held) > 0 {
			all[key] = held
		}
	}
	return all
}

// TakeUp puts locks into an empty table that another one had.
func (t *Table) TakeUp(all map[Key][]Lock) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, key := range slices.Sorted(maps.Keys(all)) {
		f := t.fileLocked(key)
		for _, l := range all[key] {
			r := &request{Lock: l, file: f}
			t.held++
			if l.Flock {
				f.flocks = append(f.flocks, r)
				continue
			}
			g := f.addOwner(l.Owner)
			g.held = append(g.held, r)
		}
	}
}

// Waits returns how many requests have had to wait so far.
func (t *Table) Waits() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.seq
}

// Pause has nobody who waits get a lock until Resume: all waits are about to be
// cancelled, and to be begun again in the same order. What one of them leaves
// behind is not for the next one.
func (t *Table) Pause() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.paused = true
}

// Resume ends a Pause.
func (t *Table) Resume() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.paused = false
	if len(t.woken) > 0 {
		t.settleLocked(t.woken[0].file)
	}
}
