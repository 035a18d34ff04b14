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

// addOwner is rangesOf that makes what is not there.
func (f *file) addOwner(owner uint64) *ranges {
	g := f.rangesOf(owner)
	if g == nil {
		g = &ranges{owner: owner}
		f.owners = append(f.owners, g)
	}
	return g
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

// run returns the bounds in held, i to j-1, of what Linux has as one lock with
// the one at k: neighbours of the same type, which differ in the handle at most.
func (g *ranges) run(k int) (i, j int) {
	one := func(k int) bool {
		return g.held[k-1].Write == g.held[k].Write && g.held[k-1].End+1 == g.held[k].Start
	}
	for i = k; i > 0 && one(i); i-- {
	}
	for j = k + 1; j < len(g.held) && one(j); j++ {
	}
	return i, j
}

// runOf is run for a held record lock.
func (f *file) runOf(r *request) []*request {
	g := f.rangesOf(r.Owner)
	k := sort.Search(len(g.held), func(k int) bool { return g.held[k].Start >= r.Start })
	i, j := g.run(k)
	return g.held[i:j]
}

// head returns the lock beneath which those wait for whom r, which is held, is an
// obstacle: the first of its run.
func (f *file) head(r *request) *request {
	if r.Flock {
		return r
	}
	return f.runOf(r)[0]
}

// joined returns r as Linux knows it: with its run if it is held.
func (f *file) joined(r *request) Lock {
	l := r.Lock
	if l.Flock || r.done != nil {
		return l
	}
	run := f.runOf(r)
	l.Start, l.End = run[0].Start, run[len(run)-1].End
	return l
}

// rewriteLocked puts r in the place of all that its owner has from start to
// end; nothing if r is nil. It wakes whom Linux wakes.
func (t *Table) rewriteLocked(f *file, g *ranges, start, end uint64, r *request) {
	// What overlaps the range, or touches it and might be joined.
	i := sort.Search(len(g.held), func(i int) bool { return g.held[i].End+1 >= start })
	j := i + sort.Search(len(g.held)-i, func(k int) bool { return g.held[i+k].Start > end+1 })

	var waiting []*request // on what grows
	grown := false
	for k := i; k < j; {
		first, next := g.run(k)
		head := g.held[first]
		switch {
		case r != nil && head.Write == r.Write && !grown:
			// As in Linux: the older lock grows, whoever waits for it sleeps on.
			grown = true
			t.wakeLocked(r)
			waiting, head.beneath = head.beneath, nil
		case r != nil && head.Write == r.Write, head.Start <= end && g.held[next-1].End >= start:
			t.wakeLocked(head)
		}
		k = next
	}

	var buf [4]*request
	left := buf[:0] // and r, and right, in the end
	var right []*request
	joined := false
	for _, p := range g.held[i:j] {
		if r != nil && p.Write == r.Write && p.Handle == r.Handle {
			if !joined {
				r.Pid = p.Pid // as in Linux: the older lock grows
				joined = true
			}
			r.Start, r.End = min(r.Start, p.Start), max(r.End, p.End)
			continue
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
	t.held += len(left) - (j - i)
	g.held = slices.Replace(g.held, i, j, left...)
	if len(g.held) == 0 {
		f.owners = slices.DeleteFunc(f.owners, func(o *ranges) bool { return o == g })
	}
	if len(waiting) > 0 {
		head := f.head(r)
		for _, w := range waiting {
			w.blocker = head
		}
		head.beneath = waiting
	}
}

// dropRangesLocked ends all record locks that were last set through handle.
func (t *Table) dropRangesLocked(f *file, handle uint64) {
	for _, g := range slices.Clone(f.owners) {
		for _, r := range slices.Clone(g.held) {
			if r.Handle == handle {
				t.rewriteLocked(f, g, r.Start, r.End, nil)
			}
		}
	}
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
