package advisory

import "slices"

// top returns the lock at the upper end of the line in which r waits.
func (r *request) top() *request {
	for r.blocker != nil {
		r = r.blocker
	}
	return r
}

// deadlockLocked reports whether r's owner would wait for itself if r waited
// for the held lock b. As Linux does, it follows one wait of each owner, the
// latest, to the lock at the end of the line.
func (t *Table) deadlockLocked(r, b *request) bool {
	pids := []uint32{r.Pid}
	for range len(t.byOwner) {
		waits := t.byOwner[b.Owner]
		if len(waits) == 0 {
			return false
		}
		w := waits[len(waits)-1]
		if w.Pid != 0 && slices.Contains(pids, w.Pid) {
			return false // two owners of one process: OFD locks
		}
		pids = append(pids, w.Pid)
		if b = w.top(); b.Owner == r.Owner {
			return true
		}
	}
	return false // a circle, but without r: processes with threads
}

// selfWaitLocked reports whether r, by waiting behind w though its way is
// free, would wait for its own process or owner. Linux wouldn't have let it
// wait, so fairness must not make this deadlock.
func (t *Table) selfWaitLocked(r, w *request) bool {
	same := func(l *request) bool {
		return l.Pid != 0 && l.Pid == r.Pid || !l.Flock && !r.Flock && l.Owner == r.Owner
	}
	seen := map[*request]bool{w: true}
	line := []*request{w}
	for len(line) > 0 {
		w, line = line[0], line[1:]
		self := false
		w.file.each(func(h *request) {
			if self || !h.conflicts(&w.Lock) {
				return
			}
			self = same(h)
			follow := func(waits []*request) {
				for _, n := range waits {
					if !seen[n] {
						seen[n] = true
						line = append(line, n)
					}
				}
			}
			if h.Pid != 0 {
				follow(t.byPid[h.Pid])
			}
			if !h.Flock {
				follow(t.byOwner[h.Owner])
			}
		})
		if self {
			return true
		}
	}
	return false
}

func (t *Table) indexLocked(r *request) {
	if !r.Flock {
		t.byOwner[r.Owner] = append(t.byOwner[r.Owner], r)
	}
	t.byPid[r.Pid] = append(t.byPid[r.Pid], r)
}

func (t *Table) unindexLocked(r *request) {
	if !r.Flock {
		remove(t.byOwner, r.Owner, r)
	}
	remove(t.byPid, r.Pid, r)
}

func remove[K comparable](index map[K][]*request, key K, r *request) {
	rest := without(index[key], r)
	if len(rest) == 0 {
		delete(index, key)
	} else {
		index[key] = rest
	}
}
