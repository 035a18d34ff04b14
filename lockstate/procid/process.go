//go:build linux

package procid

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"
)

// A Process is one thread group as it was when it was first seen. It is
// immutable, holds no descriptor, and stays valid when the process is gone.
type Process struct {
	id    ID
	uid   uint32
	chain []ID      // ancestors, nearest first; never changed after construction
	from  *Resolver // where it was seen; nil: a fake
	// adopted: its parent has not made it, and is none of them perhaps.
	adopted bool

	lineageMu  sync.Mutex
	lineage    []Ancestor // protected by lineageMu; nil: not known yet
	fakeReaper bool       // what a fake's children see

	inner atomic.Int64 // one more than InnerPid; 0: not known yet
}

// ID returns the process's identity.
func (p *Process) ID() ID { return p.id }

// UID returns the effective user id that the process had when it was first
// seen. It is for listings: rights are checked by the kernel (M2).
func (p *Process) UID() uint32 { return p.uid }

// InnerPid returns the pid by which p calls itself: that in the innermost pid
// namespace it is in. It is read at the first call, which has to come while p lives,
// and 0 if it is not known.
func (p *Process) InnerPid() int {
	if n := p.inner.Load(); n > 0 {
		return int(n - 1)
	}
	st, err := readStatus(p.id.Pid)
	if IsShort(err) { // the next look may find it
		return 0
	}
	pid := max(st.nsPid, 0)
	p.inner.Store(int64(pid) + 1)
	return pid
}

// Descends reports whether id is a strict ancestor of p (H2). It costs no
// system call.
func (p *Process) Descends(id ID) bool {
	if id == (ID{}) {
		return false
	}
	return slices.Contains(p.chain, id)
}

// Ancestors returns the ancestors of p as recorded when it was first seen,
// nearest first. It costs no system call. The caller must not change the slice.
func (p *Process) Ancestors() []ID { return p.chain }

// Lineage returns the ancestors of p, nearest first, up to pid 1, or to the
// last one that the daemon's pid namespace shows. Who they are was recorded
// when p was first seen; which of them are reapers is read at the first call,
// which should come while p lives.
// The caller must not change the slice.
func (p *Process) Lineage() []Ancestor {
	all, _ := p.LineageNow()
	return all
}

// LineageNow is Lineage, with why it can't be said now which ancestors are reapers, if that
// is so: those pass for some then who can't be looked at.
func (p *Process) LineageNow() (all []Ancestor, err error) {
	p.lineageMu.Lock()
	defer p.lineageMu.Unlock()
	if p.lineage != nil {
		return p.lineage, nil
	}
	all = make([]Ancestor, len(p.chain))
	for i, id := range p.chain {
		all[i].ID = id
	}
	unmarked := all
	if parent := p.parent(); parent != nil {
		// Most tools have a parent that has had other children: what is above
		// it need not be read again.
		var above []Ancestor
		above, err = parent.LineageNow()
		copy(all[1:], above)
		unmarked = all[:1]
	}
	err = cmp.Or(markReapers(unmarked, p.id), err)
	if p.adopted {
		all[0].Reaper = true // its parent is an init or a subreaper, and inherits nothing
	}
	if err == nil {
		p.lineage = all
	}
	return all, err
}

// parent returns the parent that p was seen with, while it is in the cache and
// has the same ancestors.
func (p *Process) parent() *Process {
	if len(p.chain) == 0 || p.from == nil {
		return nil
	}
	parent := p.from.Process(p.chain[0])
	if parent == nil || !slices.Equal(parent.chain, p.chain[1:]) {
		return nil
	}
	return parent
}

// Fake returns a process that exists only in a test: a child of parent, or one
// without ancestors where parent is nil.
func Fake(id ID, parent *Process) *Process {
	p := &Process{id: id}
	if parent != nil {
		p.lineage = append([]Ancestor{{ID: parent.id, Reaper: parent.fakeReaper}}, parent.Lineage()...)
		p.chain = append([]ID{parent.id}, parent.chain...)
	}
	return p
}

// FakeReaper is [Fake] for a process that its children's Lineage reports as a
// reaper.
func FakeReaper(id ID, parent *Process) *Process {
	p := Fake(id, parent)
	p.fakeReaper = true
	return p
}

// Recorded returns a process that an earlier daemon has seen and written down.
// Whether it still lives is for [Resolver.Alive] to say.
func Recorded(id ID, uid uint32, lineage []Ancestor) *Process {
	p := &Process{id: id, uid: uid, lineage: lineage}
	for _, a := range lineage {
		p.chain = append(p.chain, a.ID)
	}
	if p.lineage == nil {
		p.lineage = []Ancestor{}
	}
	return p
}
