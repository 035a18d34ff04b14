package lockstate

import (
	"slices"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// A Grant is an acquisition that was admitted. Its lock is in force against
// all others already; the caller carries the acquisition out on the backing
// and then commits or aborts.
type Grant struct {
	t       *Table
	row     *row                      // nil: covered by a lock that the process holds (A2)
	made    bool                      // row is this grant's own, not one that was held before
	request Request                   // of one that is not covered
	saw     struct{ dir, file Inode } // see Saw
	op      *Op
	pending map[*Op]struct{}
	drained chan struct{}
}

// awaitDrained waits for the operations in flight. A grant that comes to nothing is
// given back, also where looking at who is in the way panics.
func (g *Grant) awaitDrained(cancel <-chan struct{}) (err error) {
	if g.drained == nil {
		return nil
	}
	stands := false
	defer func() {
		if !stands {
			g.Abort()
		}
	}()
	if err = g.request.await(g.drained, cancel); err == nil {
		err = g.Confirm()
	}
	stands = err == nil
	return err
}

// drainLocked has g wait for what is under way in its directory.
func (g *Grant) drainLocked() {
	for _, op := range g.t.inflight {
		if op.touches(g.row.dir) {
			if g.pending == nil {
				g.pending = make(map[*Op]struct{})
			}
			g.pending[op] = struct{}{}
		}
	}
	if g.pending != nil {
		g.drained = make(chan struct{})
		g.t.draining = append(g.t.draining, g)
	}
}

// opEndedLocked notes that an operation is over that g may wait for.
func (g *Grant) opEndedLocked(o *Op) {
	if _, ok := g.pending[o]; !ok {
		return
	}
	delete(g.pending, o)
	if len(g.pending) == 0 {
		close(g.drained)
	}
}

func (g *Grant) undrainLocked() {
	g.t.draining = slices.DeleteFunc(g.t.draining, func(e *Grant) bool { return e == g })
}

// confirm checks the request again when what was in flight is over: that may
// have brought in handles and locks by rename or link, or have taken the
// directory elsewhere (W3). From then on the lock itself keeps them out.
func (g *Grant) confirm() error {
	t, q := g.t, g.request
	t.mu.Lock()
	defer t.mu.Unlock()
	if q.Dir.gone {
		return ErrGone
	}
	if t.tokens[g.row.token] != g.row {
		return nil // Commit tells
	}
	err := t.admitGrantLocked(q, g.row)
	if err != nil {
		t.stats.Refused++
	}
	return err
}

// Confirm checks the request again before Commit, for a caller who may have
// learnt meanwhile of names that open files have beneath the directory (W3).
func (g *Grant) Confirm() error {
	if !g.made {
		return nil
	}
	for {
		err := g.confirm()
		if err == nil || !g.t.resolveRequest(&g.request, err) {
			return g.request.asked.mark(err)
		}
	}
}

// SetKey names another descriptor lock than the request did: the caller has learnt
// meanwhile which file the descriptor is of. It is called before Commit.
func (g *Grant) SetKey(key any) {
	g.t.mu.Lock()
	defer g.t.mu.Unlock()
	if g.made {
		g.row.keys = map[any][]FileID{key: g.request.Opened}
	}
	g.request.Key = key
}

// Covered reports that the process held the directory already by a lock
// further up (A2).
func (g *Grant) Covered() bool { return g.row == nil }

// Keeps reports whether p may keep what it has open in the directory (C3d): it holds the
// grant's lock, or the one that governs the directory beside that.
func (g *Grant) Keeps(p *procid.Process) bool {
	if g.row == nil {
		return false
	}
	if l, has, _ := g.t.HoldsBy(p, g.row.token); has && l.Kind != Shared {
		return true
	}
	g.t.mu.Lock()
	defer g.t.mu.Unlock()
	d := g.row.dir
	behind := d.rows
	if i := slices.Index(behind, g.row); i >= 0 {
		behind = behind[:i]
	}
	r := granted(behind)
	if r == nil {
		r = d.parent.granted()
	}
	return r != nil && r.holds(p)
}

// Saw tells, before Commit, what the backing calls the directory and the lock
// file that were made; either may be unknown.
func (g *Grant) Saw(dir, file Inode) { g.saw.dir, g.saw.file = dir, file }

// sawLocked takes note of that. It reports whether there was another file before.
func (g *Grant) sawLocked() (anew bool) {
	if r := g.row; g.saw.dir != (Inode{}) && r.inode != g.saw.dir {
		r.inode = g.saw.dir
		g.t.noteLocked(r)
	}
	return g.saw.file != (Inode{}) && g.t.fileIsLocked(g.row.dir, g.request.File, g.saw.file)
}

// Commit makes the acquisition final and returns the lock. An implicit lock of
// the same owner on the same directory is replaced (A13). The lock's Token is
// 0 when the grant was covered. It reports false if the lock has ended already,
// by an admin for instance: then the caller undoes what it did.
func (g *Grant) Commit() (Lock, bool) {
	g.op.End()
	if g.row == nil {
		return Lock{}, true
	}
	t := g.t
	durable := g.row.lease != nil && g.made
	defer func() {
		if durable {
			t.sync() // a power cut ends all processes, but no lease
		}
	}()
	t.mu.Lock()
	flush := true
	defer func() {
		t.mu.Unlock()
		if flush {
			t.flush()
		}
	}()
	g.undrainLocked()
	r := g.row
	if t.tokens[r.token] != r || !g.made && (r.doomed() || r.sealed || r.expired()) {
		return r.lock(), false // a lease past its deadline is being ended, and is not to be renewed (L1)
	}
	if !g.made {
		t.keepLocked(r, &g.request)
		g.sawLocked()
		if r.bereft() {
			t.representLocked(r, g.request.Process)
		}
		r.standInstead()
		if r.lease != nil && r.retakes(&g.request) { // and not just by a descriptor that has it
			r.join(g.request.Process.ID())
			durable = t.renewLocked(r, g.request.TTL)
		}
		t.noteLocked(r)
		return r.lock(), true
	}
	// That is all that is new, mostly. It matters only after the mount was gone:
	// it can wait for the next flush.
	flush = g.sawLocked()
	r.pending = false
	r.decideLocked()
	if r.lease != nil {
		t.renewLocked(r, 0) // its time begins now
	}
	t.stats.Acquired[r.protocol]++
	t.tellLocked(EventAcquired, r, Ending{Why: r.why})
	for k, files := range r.keys {
		t.rekeyLocked(r, k, files)
	}
	flush = t.replaceOthersLocked(r) || flush
	if stands := r.standInstead(); r.instead != 0 && t.mergeTwinLocked(r) || stands { // see Remains
		t.noteLocked(r)
		flush = true
	}
	if r.kind == Shared {
		t.ringLocked() // its owner lets others share from now on
	}
	return r.lock(), true
}

// replaceOthersLocked ends the locks that r, which is acquired now, takes the place of,
// or their lock files. It reports whether there are any.
func (t *Table) replaceOthersLocked(r *row) (some bool) {
	if r.kind == Shared {
		some = t.unopenLocked(r, r.owner.ID(), r.file)
	}
	for _, old := range slices.Clone(r.dir.rows) {
		// An explicit lock replaces the owner's implicit one (A13), and the
		// shared one that it was converted from. A shared lock replaces the
		// one that came with making the directory for it.
		if old == r || !r.replaces(old) || r.kind == Explicit && old.sharesOn(r) {
			continue
		}
		if r.kind == Explicit && old.kind != Explicit || r.kind == Shared && r.isNew && old.kind == Implicit {
			some = true
			t.supersedeLocked(r, old)
		}
	}
	return some
}

// sharesOn reports whether a shared lock goes on behind one of the same owner: something
// else keeps it than what that one was converted from, also when that has ended (A5).
func (r *row) sharesOn(front *row) bool {
	return r.kind == Shared && (len(r.keys) > 0 || r.lostKey && len(front.keys) == 0 || r.command && !front.command)
}

// replaceImplicitLocked carries out A13 for an explicit lock that a process has
// been handed, where it had the directory implicitly.
func (t *Table) replaceImplicitLocked(r *row) {
	for _, old := range slices.Clone(r.dir.rows) {
		if old != r && r.kind == Explicit && old.kind == Implicit && old.key() == r.key() {
			t.supersedeLocked(r, old)
		}
	}
}

// supersedeLocked ends a lock that r takes the place of (A13).
func (t *Table) supersedeLocked(r, old *row) {
	if old.changed {
		r.touch()
	}
	t.inheritLocked(r, old)
	t.noteLocked(r)
	t.endLocked(old, Ending{Reason: Replaced})
}

// decideLocked tells those who wait for it that r is acquired, or will not be.
func (r *row) decideLocked() {
	if r.decided != nil {
		close(r.decided)
		r.decided = nil
	}
}

// Abort undoes the acquisition. After Commit it does nothing.
func (g *Grant) Abort() {
	g.op.End()
	if !g.made {
		return
	}
	t := g.t
	t.mu.Lock()
	defer t.unlockFlush()
	g.undrainLocked()
	if t.tokens[g.row.token] == g.row && g.row.pending {
		t.endLocked(g.row, Ending{Reason: Abandoned})
	}
}
