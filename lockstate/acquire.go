package lockstate

import (
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// A Request asks for a lock on a directory.
type Request struct {
	Process  *procid.Process // who will own it
	Dir      *Dir
	Inode    Inode // of the directory, if it is there and known
	Kind     Kind
	Protocol string   // mkdir, create, link …
	File     string   // the lock file that keeps it, if any
	Key      any      // the descriptor lock that keeps it instead (A4, A5), comparable
	Opened   []FileID // and what clients see of the file that it is on

	// Scope owns the lock together with Process (H3); the zero Scope: nobody
	// else. Client is whose lease it is instead, UID the user it is for, and
	// TTL its time to live, DefaultTTL if 0 (§8).
	Scope  Scope
	Client string
	UID    uint32
	TTL    time.Duration

	asked *asking

	// Revocable: handles opened under the lock can be revoked (L3).
	Revocable bool
	Command   bool   // a command keeps it instead (A7)
	Why       string // what it is for, for the listing
	OnCrash   string // see Lock
	New       bool   // see Lock
}

// A Grant is an acquisition that was admitted. Its lock is in force against
// all others already; the caller carries the acquisition out on the backing
// and then commits or aborts.
type Grant struct {
	t        *Table
	row      *row // nil: covered by a lock that the process holds (A2)
	made     bool // row is this grant's own, not one that was held before
	file     string
	key      any
	opened   []FileID
	protocol string
	command  bool
	why      string
	onCrash  string
	saw      struct{ dir, file Inode } // see Saw
	ttl      time.Duration
	process  *procid.Process // who takes it again
	request  Request         // of one that was made
	op       *Op
	pending  map[*Op]struct{}
	drained  chan struct{}
}

// Acquire admits a request or refuses it with a [*HeldError] (C3). An implicit
// request beneath a lock that the process holds is granted without a lock of
// its own (A2). Acquire waits for operations in flight beneath the directory;
// closing cancel ends that with ErrCancelled.
func (t *Table) Acquire(cancel <-chan struct{}, q Request) (*Grant, error) {
	if q.Process == nil || q.Process.ID() == (procid.ID{}) {
		return nil, ErrNobody
	}
	// The heirs are read now, while the process waits for us (R5).
	var heirs []procid.Ancestor
	if q.Client == "" && q.Scope.Kind == ProcessScope {
		heirs = q.Process.Lineage()
	}
	q.asked = new(asking)
	for {
		g, err, again := t.acquire(q, heirs)
		if err != nil && t.resolveRequest(&q, err) {
			continue
		}
		if again {
			if err := t.refill(); err != nil {
				return nil, err
			}
			continue
		}
		var twin *twinError
		if errors.As(err, &twin) {
			select {
			case <-twin.settled:
				continue
			case <-cancel:
				return nil, ErrCancelled
			}
		}
		if err != nil {
			return nil, q.asked.mark(err)
		}
		if err := g.awaitDrained(cancel); err != nil {
			return nil, err
		}
		t.flushStaged()
		if g.made {
			// Before its lock file is: a daemon that dies in between must not
			// leave one without a lock (R4). Commit has nothing left to write
			// then.
			t.flush()
		}
		return g, nil
	}
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
	select {
	case <-g.drained:
		err = g.Confirm()
	case <-cancel:
		err = ErrCancelled
	}
	stands = err == nil
	return err
}

// A twinError says that what this request depends on is about to be acquired: it is
// to be decided when that is. It may be the client's own lease, or a lock that would
// cover the request.
type twinError struct{ settled <-chan struct{} }

func (*twinError) Error() string { return "it is being acquired already" }

// resolveRequest finds out who asks, and who is in the way, as far as a refusal
// depends on it, and reports whether it is to be decided again.
func (t *Table) resolveRequest(q *Request, err error) bool {
	again := t.resolve(q.Process, q.asked)
	var held *HeldError
	if errors.As(err, &held) && held.Err == ErrOpen {
		again = t.resolveOpeners(q, held) || again
	}
	return again
}

func (t *Table) acquire(q Request, heirs []procid.Ancestor) (g *Grant, err error, again bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	q.adoptLocked()
	d, p := q.Dir, q.Process
	switch {
	case d.gone:
		return nil, ErrGone, false
	case d == t.root:
		return nil, ErrRoot, false
	case t.token >= t.reserved && !t.frozen:
		return nil, nil, true
	}
	if r := d.governing(); r != nil && q.Kind == Implicit && t.holdsLocked(r, p, q.asked) {
		if r.pending {
			// It may come to nothing, and would have covered nothing then.
			if r.decided == nil {
				r.decided = make(chan struct{})
			}
			return nil, &twinError{r.decided}, false
		}
		// A2: covered already. The operation counts like any other.
		t.stagedLocked(p, d)
		return &Grant{t: t, op: t.startLocked([]*Dir{d}, nil)}, nil, false
	}
	if r := t.keys[q.Key]; q.Key != nil && r != nil && r.kind == q.Kind && r.dir == d && !r.pending {
		// The description has the lock already, whoever asks again.
		return &Grant{t: t, row: r, file: q.File, key: q.Key, opened: q.Opened, protocol: q.Protocol}, nil, false
	}
	if t.frozen {
		return nil, ErrFrozen, false // M4; what was covered already is
	}
	if err := t.admitGrantLocked(q, nil); err != nil {
		t.stats.Refused++
		return nil, err, false
	}
	instead := uint64(0)
	for _, r := range d.rows {
		if r.pending && r.lease != nil && r.key() == q.key() {
			return nil, &twinError{r.lease.settled}, false
		}
		if r.kind == q.Kind && r.kind != Implicit && r.retakes(&q) && !r.pending && !r.expired() && (r.kind == Shared || r.lease != nil || r == d.top()) {
			if r.doomed {
				instead = r.token
				continue
			}
			// The owner takes its lock a second time, by another lock file
			// or descriptor.
			return &Grant{
				t: t, row: r, file: q.File, key: q.Key, opened: q.Opened, protocol: q.Protocol,
				command: q.Command, why: q.Why, onCrash: q.OnCrash, ttl: q.TTL, process: p,
			}, nil, false
		}
	}
	r := t.newRowLocked(&q, heirs)
	r.instead = instead
	t.insertLocked(r)
	t.noteLocked(r)
	g = &Grant{t: t, row: r, made: true, file: q.File, request: q}
	g.drainLocked()
	return g, nil, false
}

// newRowLocked makes the row of an acquisition that is admitted. It is pending.
func (t *Table) newRowLocked(q *Request, heirs []procid.Ancestor) *row {
	t.token++
	r := &row{
		dir: q.Dir, kind: q.Kind, protocol: q.Protocol, file: q.File, owner: q.Process, heirs: heirs,
		token: t.token, since: t.now(), pending: true,
		revocable: q.Revocable,
		command:   q.Command, why: q.Why, onCrash: q.OnCrash, isNew: q.New, scope: q.Scope,
	}
	if q.Client != "" {
		r.revocable = true // L3
		r.lease = &lease{client: q.Client, uid: q.UID, ttl: q.TTL, at: -1, clock: t.clock, settled: make(chan struct{})}
		if r.lease.ttl == 0 {
			r.lease.ttl = DefaultTTL
		}
		r.join(q.Process.ID())
	}
	switch {
	case q.Key != nil:
		r.keys = map[any]struct{}{q.Key: {}}
		r.opened = q.Opened
	case q.File != "":
		r.files = []lockFile{{name: q.File}}
	}
	if r.inode = q.Inode; r.inode == (Inode{}) && len(q.Dir.rows) > 0 {
		r.inode = q.Dir.rows[0].inode
	}
	return r
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

// admitGrantLocked carries out C3. own is the row that the request has already,
// if any: that one and those in front of it do not count.
func (t *Table) admitGrantLocked(q Request, own *row) error {
	d, p := q.Dir, q.Process
	// A client that finds another one's lease is refused, whoever asks for it:
	// a process may work for both (L1).
	for _, r := range d.rows {
		if q.Client != "" && r != own && r.lease != nil && r.key() != q.key() && (r.kind != Shared || q.Kind != Shared) {
			return t.heldLocked(r)
		}
	}
	gov, err := t.heldAboveLocked(&q, own)
	if err != nil {
		return err
	}
	// (c): each lock beneath belongs to the caller or a descendant.
	d.walkRows(func(r *row) bool {
		if r.dir == d || r.key() == q.key() || r.owner.ID() == p.ID() || r.owner.Descends(p.ID()) {
			return true
		}
		err = t.heldLocked(r)
		return false
	})
	if err != nil {
		return err
	}
	// (d): write handles beneath are the caller's, a descendant's, or those
	// of holders who delegate.
	blocking := make(map[*Handle]HandleState)
	d.walkHandles(func(h *Handle) bool {
		if h.proc.ID() == p.ID() || h.proc.Descends(p.ID()) {
			return true
		}
		if gov != nil && gov.holds(h.proc) || own != nil && own.holds(h.proc) {
			return true
		}
		if _, ok := q.asked.friends[h.proc.ID()]; ok {
			return true
		}
		blocking[h] = h.stateLocked()
		return len(blocking) < 16
	})
	if len(blocking) > 0 {
		return &HeldError{Err: ErrOpen, Handles: slices.Collect(maps.Values(blocking))}
	}
	return nil
}

// heldAboveLocked checks (a) and (b): the lock on the directory and every one above
// it is held by the caller. It returns the nearest of them, own aside.
func (t *Table) heldAboveLocked(q *Request, own *row) (gov *row, err error) {
	d, p := q.Dir, q.Process
	for e := d; e != nil; e = e.parent {
		rows := e.rows
		if i := slices.Index(rows, own); i >= 0 {
			rows = rows[:i]
		}
		var sharers []*row
		if e == d {
			rows, sharers = splitShared(rows)
		}
		if len(sharers) > 0 && q.Kind != Shared {
			if other := t.otherSharer(d, q); other != nil {
				return nil, t.heldLocked(other)
			}
		}
		if len(rows) == 0 {
			continue
		}
		r := rows[len(rows)-1]
		if q.Kind == Shared && slices.ContainsFunc(sharers, func(s *row) bool { return s.key() == r.key() }) {
			continue // its owner lets others share
		}
		if !t.holdsLocked(r, p, q.asked) && !r.ownedBy(q) {
			return nil, t.heldLocked(r)
		}
		if e == d && q.Client != "" && r.lease != nil && r.lease.client != q.Client {
			return nil, t.heldLocked(r) // it is the client who asks, whatever its process holds beside (L1)
		}
		if gov == nil {
			gov = r
		}
	}
	return gov, nil
}

// splitShared parts the shared rows in front of a directory's others from these. A
// holder may share what he holds by one of them: it counts still (C3a).
func splitShared(rows []*row) (behind, sharers []*row) {
	i := len(rows)
	for i > 0 && rows[i-1].kind == Shared {
		i--
	}
	return rows[:i], rows[i:]
}

// retakes reports whether a request is for what r is already: by the same
// owner, or by a holder of a lease with a lock file or descriptor, which are
// the lease's then.
func (r *row) retakes(q *Request) bool {
	return r.key() == q.key() || r.lease != nil && q.Client == "" && !q.Command && r.kind == Explicit && r.has(q.Process)
}

// ownedBy reports whether a request comes from the client whose lease r is.
func (r *row) ownedBy(q *Request) bool {
	return r.lease != nil && r.lease.client == q.Client && (q.UID == 0 || q.UID == r.lease.uid) && !r.sealed && !r.expired() && r.kind != Shared
}

// otherSharer returns a shared lock on d that is not the requester's own. If
// there is none, it may turn its own into an exclusive one.
func (t *Table) otherSharer(d *Dir, q *Request) *row {
	for _, r := range d.rows {
		if r.kind == Shared && r.key() != q.key() {
			return r
		}
	}
	return nil
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

// SetKey names another descriptor lock than the request did: the caller has learnt
// meanwhile which file the descriptor is of. It is called before Commit.
func (g *Grant) SetKey(key any) {
	g.t.mu.Lock()
	defer g.t.mu.Unlock()
	if g.made {
		g.row.keys = map[any]struct{}{key: {}}
	}
	g.key = key
}

// Covered reports that the process held the directory already by a lock
// further up (A2).
func (g *Grant) Covered() bool { return g.row == nil }

// Saw tells, before Commit, what the backing calls the directory and the lock
// file that were made; either may be unknown.
func (g *Grant) Saw(dir, file Inode) { g.saw.dir, g.saw.file = dir, file }

// sawLocked takes note of that. It reports whether there was another file before.
func (g *Grant) sawLocked() (anew bool) {
	if r := g.row; g.saw.dir != (Inode{}) && r.inode != g.saw.dir {
		r.inode = g.saw.dir
		g.t.noteLocked(r)
	}
	return g.saw.file != (Inode{}) && g.t.fileIsLocked(g.row.dir, g.file, g.saw.file)
}

// FileIs tells what the backing calls the lock file with a name in d, which was
// another one before, perhaps. The zero Inode: it is not known.
func (t *Table) FileIs(d *Dir, name string, is Inode) {
	t.mu.Lock()
	anew := t.fileIsLocked(d, name, is)
	t.mu.Unlock()
	if anew {
		t.flush()
	}
}

// fileIsLocked takes note of that. A file that is made anew keeps all the locks
// that the one of its name kept.
func (t *Table) fileIsLocked(d *Dir, name string, is Inode) (anew bool) {
	for _, r := range d.rows {
		i := r.fileAt(name)
		if i < 0 || r.files[i].inode == is {
			continue
		}
		anew = anew || r.files[i].inode != Inode{}
		r.files[i].inode = is
		t.noteLocked(r)
	}
	return anew
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
	if t.tokens[r.token] != r || r.doomed && !g.made {
		return r.lock(), false
	}
	if !g.made {
		t.keepLocked(r, g)
		g.sawLocked()
		if r.lease != nil {
			r.join(g.process.ID())
			durable = t.renewLocked(r, g.ttl)
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
		close(r.lease.settled)
	}
	t.stats.Acquired[r.protocol]++
	t.tellLocked(EventAcquired, r, Ending{Why: r.why})
	for k := range r.keys {
		t.rekeyLocked(r, k)
	}
	for _, old := range slices.Clone(r.dir.rows) {
		// The lock file that its owner made by opening it only waited for
		// the lock on the descriptor, a shared one too (A6).
		if i := old.fileAt(r.file); r.kind == Shared && i >= 0 && old.protocol == "open" && r.replaces(old) {
			flush = true
			if old.files = slices.Delete(old.files, i, i+1); !old.kept() {
				t.endLocked(old, Ending{Reason: Replaced})
				continue
			}
		}
		// An explicit lock replaces the owner's implicit one (A13), and its
		// shared one, which it was converted from. A shared lock replaces the
		// one that came with making the directory for it.
		if old == r || !r.replaces(old) {
			continue
		}
		if r.kind == Explicit && old.kind != Explicit || r.kind == Shared && r.isNew && old.kind == Implicit {
			flush = true
			t.supersedeLocked(r, old)
		}
	}
	return r.lock(), true
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

// keepLocked notes one more reason for which r is kept. The lock file that its
// owner made by opening it only waited for the lock on the descriptor (A6).
func (t *Table) keepLocked(r *row, g *Grant) {
	switch {
	case g.command:
		r.command = true
		if g.why != "" {
			r.why = g.why
		}
		if g.onCrash != "" {
			t.setOnCrashLocked(r, g.onCrash)
		}
	case g.key != nil:
		if r.lostKey {
			r.lostKey, r.opened = false, nil
		}
		t.rekeyLocked(r, g.key)
		for _, id := range g.opened {
			if !slices.Contains(r.opened, id) {
				r.opened = append(slices.Clip(r.opened), id)
			}
		}
		if i := r.fileAt(g.file); i >= 0 && r.protocol == "open" {
			r.files = slices.Delete(r.files, i, i+1)
			r.protocol = g.protocol
		}
	case g.file != "" && r.fileAt(g.file) < 0:
		r.files = append(r.files, lockFile{name: g.file})
	}
}

// rekeyLocked makes k keep r, and no other row: a lock that was converted.
func (t *Table) rekeyLocked(r *row, k any) {
	if old := t.keys[k]; old != nil && old != r {
		t.dropKeyLocked(old, k)
	}
	if r.keys == nil {
		r.keys = make(map[any]struct{})
	}
	r.keys[k] = struct{}{}
	t.keys[k] = r
}

// dropKeyLocked ends r if nothing else keeps it.
func (t *Table) dropKeyLocked(r *row, k any) bool {
	delete(r.keys, k)
	delete(t.keys, k)
	if r.kept() {
		t.noteLocked(r)
		return false
	}
	t.endLocked(r, Ending{Reason: Unlocked})
	return true
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
