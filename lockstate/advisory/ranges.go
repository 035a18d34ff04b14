package advisory

import (
	"slices"
	"sort"
)

// A ranges is the record locks of one owner on one file (I1). Table.mu guards
// it.
type ranges struct {
	owner uint64
	held  []*request // by start
}

// rangesOf returns the owner's locks, nil if there are none.
func (f *file) rangesOf(owner uint64) *ranges {
	for _, g := range f.owners {
		if g.owner == owner {
			return g
		}
	}
	return nil
}

// first returns the first lock on l's range; of either type, or exclusive.
func (g *ranges) first(l *Lock, either bool) *request {
	i := sort.Search(len(g.held), func(i int) bool { return g.held[i].End >= l.Start })
	for ; i < len(g.held) && g.held[i].Start <= l.End; i++ {
		if r := g.held[i]; either || r.Write {
			return r
		}
	}
	return nil
}

// joined returns r with its neighbours of the same type: they differ in the
// handle at most, of which Linux knows nothing.
func (f *file) joined(r *request) Lock {
	l := r.Lock
	if l.Flock {
		return l
	}
	g := f.rangesOf(l.Owner)
	at := slices.Index(g.held, r)
	for i := at - 1; i >= 0 && g.held[i].Write == l.Write && g.held[i].End+1 == l.Start; i-- {
		l.Start = g.held[i].Start
	}
	for i := at + 1; i < len(g.held) && g.held[i].Write == l.Write && g.held[i].Start == l.End+1; i++ {
		l.End = g.held[i].End
	}
	return l
}

// rewriteLocked puts r in the place of all that its owner has from start to
// end; nothing if r is nil. It wakes the waiters for what was changed.
func (t *Table) rewriteLocked(f *file, g *ranges, start, end uint64, r *request) {
	// What overlaps the range, or touches it and might be joined.
	i := sort.Search(len(g.held), func(i int) bool { return g.held[i].End+1 >= start })
	j := i + sort.Search(len(g.held)-i, func(k int) bool { return g.held[i+k].Start > end+1 })

	var buf [4]*request
	left := buf[:0] // and r, and right, in the end
	var right []*request
	var waiting []*request // for what remains locked as it was
	joined := false
	for _, p := range g.held[i:j] {
		same := r != nil && p.Write == r.Write
		if !same && p.Start <= end && p.End >= start {
			t.wakeLocked(p)
		}
		if same && p.Handle == r.Handle {
			if !joined {
				r.Pid = p.Pid // as in Linux: the older lock grows
				t.wakeLocked(r)
				joined = true
			}
			r.Start, r.End = min(r.Start, p.Start), max(r.End, p.End)
			waiting = append(waiting, p.beneath...)
			continue
		}
		if same {
			waiting = append(waiting, p.beneath...)
			p.beneath = nil
		}
		if p.End > end {
			q := p
			if p.Start < start {
				q = &request{Lock: p.Lock, file: f}
			}
			q.Start = max(q.Start, end+1)
			right = append(right, q)
		}
		if p.Start < start {
			p.End = min(p.End, start-1)
			left = append(left, p)
		}
	}
	if r != nil {
		left = append(left, r)
	}
	left = append(left, right...)
	for _, w := range waiting {
		k := slices.IndexFunc(left, func(p *request) bool { return p.conflicts(&w.Lock) })
		w.blocker = left[k]
		left[k].beneath = append(left[k].beneath, w)
	}
	t.held += len(left) - (j - i)
	g.held = slices.Replace(g.held, i, j, left...)
	if len(g.held) == 0 {
		f.owners = slices.DeleteFunc(f.owners, func(o *ranges) bool { return o == g })
	}
}

// dropRangesLocked ends all record locks that were last set through handle.
func (t *Table) dropRangesLocked(f *file, handle uint64) {
	f.owners = slices.DeleteFunc(f.owners, func(g *ranges) bool {
		g.held = slices.DeleteFunc(g.held, func(r *request) bool {
			if r.Handle != handle {
				return false
			}
			t.wakeLocked(r)
			t.held--
			return true
		})
		return len(g.held) == 0
	})
}

// dropFlocksLocked ends the flock locks that match.
func (t *Table) dropFlocksLocked(f *file, match func(*request) bool) {
	f.flocks = slices.DeleteFunc(f.flocks, func(r *request) bool {
		if !match(r) {
			return false
		}
		t.wakeLocked(r)
		t.held--
		return true
	})
}
