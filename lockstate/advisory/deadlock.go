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

func (t *Table) indexLocked(r *request) {
	if !r.Flock {
		t.byOwner[r.Owner] = append(t.byOwner[r.Owner], r)
	}
}

func (t *Table) unindexLocked(r *request) {
	if r.Flock {
		return
	}
	rest := without(t.byOwner[r.Owner], r)
	if len(rest) == 0 {
		delete(t.byOwner, r.Owner)
	} else {
		t.byOwner[r.Owner] = rest
	}
}
