package lockstate

import (
	"cmp"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// Options configure a [Table]. The zero value works.
type Options struct {
	// LastToken is the last token that was ever given out.
	LastToken uint64
	// Reserve makes sure that tokens up to the given one are never given
	// out again, by any table, before it returns. nil: tokens live as long
	// as the table.
	Reserve func(upTo uint64) error
	// Room tells how much memory the locks may take, in bytes, or why not as much as is
	// wanted. It is asked when they take more than it said last, but not about locks that
	// are restored. nil: any amount.
	Room func(want int) (most int, err error)
	// DenyUnlocked refuses changes where nobody holds a lock (W4).
	DenyUnlocked bool
	// Store keeps the locks for the next daemon. nil: they live as long as
	// the table.
	Store Store
	// World names where process ids mean what they mean now.
	World string
	// Claims tells whether a process holds a lock by what it carries (H3, L2).
	// unsure is why that can't be said now. It may make system calls. nil:
	// none does.
	Claims func(*procid.Process, Claim) (holds bool, unsure error)
	// Notify is told of each event. It is called with the table's mutex held,
	// and so in order; it must not block, nor call the table. nil: nobody.
	Notify func(Event)
	// Clock is what deadlines are counted on (L4). nil: the time since boot, sleep included.
	Clock func() time.Duration
	// Gone tells that a process is surely dead, without waiting for anything.
	// nil: nobody knows.
	Gone func(procid.ID) bool
	// OnCrash is what becomes of the content of crashed owners whose lock
	// does not say (R7). "": Keep.
	OnCrash string
	// Now tells the time for Lock.Since. nil: time.Now.
	Now func() time.Time
}

// A Table is the lock state of one mount. Its methods may be called
// concurrently.
type Table struct {
	now     func() time.Time
	reserve func(uint64) error
	room    func(want int) (most int, err error)
	deny    bool
	store   Store       // nil: none
	lineage lineageText // protected by mu
	text    []byte      // likewise: room for a record
	world   string
	claims  func(*procid.Process, Claim) (holds bool, unsure error)
	clock   func() time.Duration
	awake   func() time.Duration // a clock that stands still while the machine sleeps, and costs no system call
	notify  func(Event)

	refillMu sync.Mutex // serializes reserve

	mu     sync.Mutex
	root   *Dir
	owners map[procid.ID][]*row // in no order: each row knows where it is
	lines  lines                // who is in line for them
	leases leaseHeap            // by deadline
	tokens map[uint64]*row
	keys   map[any]*row
	// revocable are the open handles by the token of the lease that they were
	// opened under (L3).
	revocable map[uint64]map[*Handle]struct{}
	bell      chan struct{} // closed when something ends that somebody may wait for
	token     uint64        // the last one given out
	reserved  uint64        // the last one that may be given out
	taken     int           // by rows, in bytes
	most      int           // that they may take, as far as it is known
	inflight  []*Op
	draining  []*Grant
	narrowing int // rows that are about to be narrowed
	frozen    bool
	stats     Stats

	crowded    *row   // has records of members that may be dead, or nil
	nextMember uint64 // number of the next record of one
	gone       func(procid.ID) bool
	news       atomic.Bool   // something was noted that was not flushed
	shifts     atomic.Uint64 // see Shifts

	onCrash   string
	crashers  atomic.Int64  // rows that say what becomes of their content
	staged    atomic.Uint64 // how often something was noted that flushStaged is to keep,
	kept      atomic.Uint64 // and how much of that it has
	rows      atomic.Int64  // len(tokens), readable without mu
	leased    atomic.Int64  // how many of them are leases
	listeners atomic.Int32
}

// Stats count what happened since the table was made.
type Stats struct {
	Acquired   map[string]uint64 // by protocol
	Ended      map[Reason]uint64
	Cleared    map[string]uint64 // contents of crashed owners, by what became of them (R7)
	HandedOver uint64
	Refused    uint64
}

// reserveBlock is how many tokens are reserved at a time.
const reserveBlock = 4096

// New returns an empty table.
func New(o Options) *Table {
	var stored map[uint64][]byte
	if o.Store != nil {
		stored = o.Store.Load()
	}
	t := &Table{
		now: o.Now, reserve: o.Reserve, room: o.Room, deny: o.DenyUnlocked, store: o.Store, world: o.World,
		root:      &Dir{},
		owners:    make(map[procid.ID][]*row),
		lines:     newLines(),
		tokens:    make(map[uint64]*row, len(stored)),
		keys:      make(map[any]*row),
		revocable: make(map[uint64]map[*Handle]struct{}),
		token:     o.LastToken, reserved: o.LastToken,
		claims: o.Claims, clock: o.Clock, notify: o.Notify, gone: o.Gone, onCrash: cmp.Or(o.OnCrash, Keep), nextMember: MemberBase,
		stats: Stats{Acquired: make(map[string]uint64), Ended: make(map[Reason]uint64), Cleared: make(map[string]uint64)},
	}
	for number := range stored {
		if number < MemberEnd {
			t.nextMember = max(t.nextMember, number+1)
		}
	}
	if t.awake = t.clock; t.clock == nil {
		began := time.Now()
		t.clock, t.awake = boottime, func() time.Duration { return time.Since(began) }
	}
	if t.now == nil {
		t.now = time.Now
	}
	if t.reserve == nil {
		t.reserve = func(uint64) error { return nil }
	}
	if t.room == nil {
		t.room = func(int) (int, error) { return math.MaxInt, nil }
	}
	return t
}

// Freeze ends all granting: from now on Acquire fails with ErrFrozen for what the
// caller does not have already (M4).
func (t *Table) Freeze() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.frozen = true
	t.ringLocked()
}

// Frozen reports whether the table grants nothing any more.
func (t *Table) Frozen() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.frozen
}

// Len returns how many locks there are.
func (t *Table) Len() int { return int(t.rows.Load()) }

// Governing returns the lock that governs d, if d is not free.
func (t *Table) Governing(d *Dir) (Lock, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r := d.governing(); r != nil {
		return r.lock(), true
	}
	return Lock{}, false
}

// Holds reports whether p may write under the lock that governs d. It reports
// true for a free directory.
func (t *Table) Holds(p *procid.Process, d *Dir) bool {
	holds, _ := t.holds(p, d, false)
	return holds
}

// HoldsAll is Holds, also of the locks behind that one as long as it is about to be
// acquired: it may come to nothing.
func (t *Table) HoldsAll(p *procid.Process, d *Dir) bool {
	holds, _ := t.holds(p, d, true)
	return holds
}

// MayHold is Holds, but reports true also where it can't be said yet.
func (t *Table) MayHold(p *procid.Process, d *Dir) bool {
	holds, unsure := t.holds(p, d, false)
	return holds || unsure != nil
}

func (t *Table) holds(p *procid.Process, d *Dir, all bool) (holds bool, unsure error) {
	if t.rows.Load() == 0 {
		return true, nil
	}
	return t.ask(p, func(a *asking) bool {
		for r := range d.inForce() {
			if holds := t.holdsLocked(r, p, a); !holds || !all {
				return holds
			}
		}
		return true
	})
}

// HoldsOrShares reports whether p holds the lock that governs d, or the one on d behind those
// who share it, or is one of these itself (A5); unsure is why that can't be said now.
func (t *Table) HoldsOrShares(p *procid.Process, d *Dir) (has bool, unsure error) {
	if t.rows.Load() == 0 {
		return false, nil
	}
	return t.ask(p, func(a *asking) bool { return t.holdsOrSharesLocked(p, d, a) })
}

// Has is HoldsOrShares as far as it can be said without system calls.
func (t *Table) Has(p *procid.Process, d *Dir) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.holdsOrSharesLocked(p, d, nil)
}

func (t *Table) holdsOrSharesLocked(p *procid.Process, d *Dir, a *asking) bool {
	if r := d.governing(); r != nil && t.holdsLocked(r, p, a) {
		return true
	}
	if r := granted(d.rows); r != nil && t.holdsLocked(r, p, a) {
		return true
	}
	return slices.ContainsFunc(d.rows, func(r *row) bool {
		return r.kind == Shared && !r.pending && t.hasLocked(r, p, a)
	})
}

// Shares reports whether p itself owns a shared lock on d: nobody else gets d alone
// until that ends.
func (t *Table) Shares(p *procid.Process, d *Dir) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.ContainsFunc(d.rows, func(r *row) bool {
		return r.kind == Shared && !r.pending && r.lease == nil && r.owner.ID() == p.ID()
	})
}

// refill reserves more tokens.
func (t *Table) refill() error {
	t.refillMu.Lock()
	defer t.refillMu.Unlock()
	t.mu.Lock()
	want := t.token + reserveBlock
	enough := t.reserved > t.token+reserveBlock/2
	used := t.token >= MemberBase-reserveBlock
	t.mu.Unlock()
	switch {
	case used:
		return ErrTokens
	case enough:
		return nil
	}
	if err := t.reserve(want); err != nil {
		return err
	}
	t.mu.Lock()
	t.reserved = max(t.reserved, want)
	t.mu.Unlock()
	return nil
}

// A lock takes so much memory, in bytes, while all locks are listed by a daemon that has just
// taken them over: that takes most. Each directory of its path takes some, as does each lock
// file, and each byte of a text, which may be six in JSON.
const (
	rowBytes     = 4 << 10
	dirBytes     = 512
	fileBytes    = 128
	textBytes    = 16
	escapedBytes = 6 * textBytes
)

// sizeLocked returns how much memory r takes, in bytes.
func (r *row) sizeLocked() int {
	size := sizeOf(r.dir, r.why)
	if r.lease != nil {
		size += sizeOfText(r.lease.client)
	}
	for _, f := range r.files {
		size += fileBytes + sizeOfText(f.name)
	}
	return size
}

// sizeLocked returns how much the row of an acquisition will take.
func (q *Request) sizeLocked() int {
	return sizeOf(q.Dir, q.Why) + sizeOfText(q.Client) + q.sizeOfFile()
}

// growthLocked returns how much more r takes when it is kept for one more reason.
func (q *Request) growthLocked(r *row) (more int) {
	if q.Command && q.Why != "" {
		more = max(sizeOfText(q.Why)-sizeOfText(r.why), 0)
	}
	if r.fileAt(q.File) < 0 {
		more += q.sizeOfFile()
	}
	return more
}

func (q *Request) sizeOfFile() int {
	if q.File == "" || q.Key != nil {
		return 0
	}
	return fileBytes + sizeOfText(q.File)
}

// sizeOf returns how much a lock on d takes that has no lock file.
func sizeOf(d *Dir, why string) int {
	size := rowBytes + sizeOfText(why)
	for ; d.parent != nil; d = d.parent {
		size += dirBytes + sizeOfText(d.name)
	}
	return size
}

func sizeOfText(s string) (size int) {
	for _, c := range []byte(s) {
		if c < ' ' || c >= 0x7f || strings.IndexByte(`"\\<>&`, c) >= 0 {
			size += escapedBytes
		} else {
			size += textBytes
		}
	}
	return size
}

// resizeLocked takes note of how much r takes by now.
func (t *Table) resizeLocked(r *row) {
	if t.tokens[r.token] == r {
		t.taken -= r.size
		r.size = r.sizeLocked()
		t.taken += r.size
	}
}

// makeRoom asks for room for so many bytes more.
func (t *Table) makeRoom(bytes int) error {
	t.mu.Lock()
	want := t.taken + bytes
	t.mu.Unlock()
	most, err := t.room(want)
	if err != nil {
		return err
	}
	t.mu.Lock()
	t.most = most
	t.mu.Unlock()
	return nil
}

// insertLocked puts r in force on its directory.
func (t *Table) insertLocked(r *row) {
	r.size = r.sizeLocked()
	t.taken += r.size
	r.ended = make(chan struct{})
	r.settled = make(chan struct{})
	r.dir.rows = append(r.dir.rows, r)
	r.dir.count(1, 0)
	t.tokens[r.token] = r
	t.ownLocked(r)
	t.rows.Add(1)
	if r.onCrash != "" {
		t.crashers.Add(1)
	}
	if r.lease != nil {
		t.leased.Add(1)
	}
}

func (t *Table) ownLocked(r *row) {
	if r.lease != nil {
		return // no process's end is its end
	}
	id := r.owner.ID()
	r.ownedAt = len(t.owners[id])
	t.owners[id] = append(t.owners[id], r)
	r.line = t.lines.join(id, r.heirs)
}

func (t *Table) disownLocked(r *row) {
	if r.lease != nil {
		return
	}
	id := r.owner.ID()
	owned := t.owners[id]
	cut(&owned, r.ownedAt).ownedAt = r.ownedAt
	if t.owners[id] = owned; len(owned) == 0 {
		delete(t.owners, id)
	}
	t.lines.leave(r.line)
	r.line = nil
}

// cut takes what is at a place out of a list, which is in no order, and returns what has
// the place now: itself, if it was the last.
func cut[T any](list *[]*T, at int) (moved *T) {
	all := *list
	last := len(all) - 1
	moved = all[last]
	all[at] = moved
	all[last] = nil
	*list = all[:last]
	return moved
}

// endLocked takes r out of the table.
func (t *Table) endLocked(r *row, how Ending) {
	d := r.dir
	d.rows = slices.DeleteFunc(d.rows, func(o *row) bool { return o == r })
	d.count(-1, 0)
	delete(t.tokens, r.token)
	if t.store != nil {
		t.store.Delete(r.token)
		t.forgetMembersLocked(r)
	}
	t.disownLocked(r)
	t.unleaseLocked(r)
	t.rows.Add(-1)
	t.taken -= r.size
	if r.onCrash != "" {
		t.crashers.Add(-1)
	}
	if r.lease != nil {
		t.leased.Add(-1)
	}
	r.decideLocked()
	t.stats.Ended[how.Reason]++
	r.settle()
	t.unkeyLocked(r)
	if how.Reason == Broken || how.Reason == Expired {
		t.revokeUnderLocked(r) // L3
	}
	r.ending = how
	t.tellEndLocked(r, how)
	close(r.ended)
	if d.governing() != nil {
		t.shifts.Add(1)
	}
	t.ringLocked()
	t.pruneLocked(d)
}

// Bell returns a channel that is closed when a lock or a write handle ends or goes
// elsewhere. Whoever waits for one takes it before he tries.
func (t *Table) Bell() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.bell == nil {
		t.bell = make(chan struct{})
	}
	return t.bell
}

// Shifts counts what gave a lock holders that may have waited for it since before: it
// passed to the owner's parent, one in front of it ended, or a directory was moved. The
// channel of Bell is closed after it was counted.
func (t *Table) Shifts() uint64 { return t.shifts.Load() }

// Ring closes the channel of Bell: something outside the table ended.
func (t *Table) Ring() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ringLocked()
}

func (t *Table) ringLocked() {
	if t.bell != nil {
		close(t.bell)
		t.bell = nil
	}
}
