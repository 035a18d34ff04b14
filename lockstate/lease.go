package lockstate

import (
	"container/heap"
	"maps"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// DefaultTTL is the time to live of a lease whose client names none (L1).
const DefaultTTL = 16 * time.Second

// A lease is what a row has whose owner is a client instead of processes (L1).
// All fields are protected by Table.mu.
type lease struct {
	client   string
	uid      uint32
	ttl      time.Duration
	deadline time.Duration // on Table.clock,
	until    time.Time     // and what the wall clock showed it to be when it was set
	at       int           // index in Table.leases; -1: not there
	clock    func() time.Duration
	joined   map[procid.ID]struct{} // holders that said so
}

// boottime returns the time since boot, sleep included: no step of the wall
// clock changes it (L4).
func boottime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic("clock_gettime(CLOCK_BOOTTIME): " + err.Error()) // there since Linux 2.6.39
	}
	return time.Duration(ts.Nano())
}

// expired reports whether r is a lease past its deadline: it holds for nobody
// any more, however late its end is carried out.
func (r *row) expired() bool {
	return r.lease != nil && !r.pending && r.lease.clock() >= r.lease.deadline
}

// renewLocked gives a lease its whole time again; ttl 0 leaves that as it is.
// It reports whether it has another time now, which the caller makes outlive a
// power cut: what is lost of a mere renewal is a second.
func (t *Table) renewLocked(r *row, ttl time.Duration) (other bool) {
	if ttl != 0 && ttl != r.lease.ttl {
		r.lease.ttl, other = ttl, true
	}
	r.lease.deadline, r.lease.until = t.clock()+r.lease.ttl, t.now().Add(r.lease.ttl)
	if r.lease.at >= 0 {
		heap.Fix(&t.leases, r.lease.at)
	} else {
		heap.Push(&t.leases, r)
	}
	t.noteLocked(r)
	return other
}

func (t *Table) unleaseLocked(r *row) {
	if r.lease != nil && r.lease.at >= 0 {
		heap.Remove(&t.leases, r.lease.at)
	}
}

// clientRowLocked returns the row of a client on d: one that is about to end only if
// the client has not taken its lease again since.
func clientRowLocked(d *Dir, client string) (found *row) {
	for _, r := range d.rows {
		if r.lease == nil || r.lease.client != client || r.pending {
			continue
		}
		if !r.doomed() {
			return r
		}
		found = r
	}
	return found
}

// ofClientLocked returns a client's lease on d for a process of a user: ErrNoLock if
// it has none or no longer, ErrNotYours if it is another user's.
func (t *Table) ofClientLocked(d *Dir, client string, uid uint32) (*row, error) {
	r := clientRowLocked(d, client)
	switch {
	case r == nil || r.sealed || r.expired():
		return nil, ErrNoLock
	case uid != 0 && uid != r.lease.uid:
		return nil, ErrNotYours
	}
	return r, nil
}

// OfClient returns a client's lease on d, for a process of the given user.
func (t *Table) OfClient(d *Dir, client string, uid uint32) (Lock, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r, err := t.ofClientLocked(d, client, uid)
	if err != nil {
		return Lock{}, err
	}
	return r.lock(), nil
}

// Renew gives a client's lease its time again, and another one if ttl is not 0
// (L1). It fails when the deadline has passed, even if nobody took notice yet.
func (t *Table) Renew(d *Dir, client string, uid uint32, ttl time.Duration) (Lock, error) {
	other := false
	t.mu.Lock()
	defer func() { // the client may rely on it
		t.unlockFlush()
		if other {
			t.sync()
		}
	}()
	r, err := t.ofClientLocked(d, client, uid)
	if err != nil {
		return Lock{}, err
	}
	other = t.renewLocked(r, ttl)
	return r.lock(), nil
}

// Touch renews the lease in force on d if p holds it (L2).
func (t *Table) Touch(d *Dir, p *procid.Process) {
	if t.leased.Load() == 0 {
		return
	}
	t.mu.Lock()
	defer t.unlockFlush()
	for _, r := range d.rows {
		if r.lease != nil && !r.pending && r.has(p) {
			t.renewLocked(r, 0)
		}
	}
}

// maxJoined bounds how many processes join a lease.
const maxJoined = 1 << 14

// Join makes p a holder of a client's lease (L2). lives tells who of those that
// joined before still lives: where there are too many, the dead are forgotten.
func (t *Table) Join(p *procid.Process, d *Dir, client string, uid uint32, lives func(procid.ID) bool) (Lock, error) {
	for {
		t.mu.Lock()
		r, err := t.ofClientLocked(d, client, uid)
		if err != nil {
			t.mu.Unlock()
			return Lock{}, err
		}
		var crowd []procid.ID
		if len(r.lease.joined) >= maxJoined {
			crowd = slices.Collect(maps.Keys(r.lease.joined))
		} else {
			r.join(p.ID())
			t.noteLocked(r)
		}
		l := r.lock()
		t.unlockFlush()
		if crowd == nil {
			return l, nil
		}
		gone := 0
		for _, id := range crowd {
			if !lives(id) { // system calls: without t.mu
				t.mu.Lock()
				delete(r.lease.joined, id)
				t.mu.Unlock()
				gone++
			}
		}
		if gone == 0 {
			return Lock{}, ErrCrowd
		}
	}
}

func (r *row) join(id procid.ID) {
	if r.lease.joined == nil {
		r.lease.joined = make(map[procid.ID]struct{})
	}
	r.lease.joined[id] = struct{}{}
}

// Expired returns the leases past their deadline. They hold for nobody; the
// caller cleans up after them and calls [Table.EndAs].
func (t *Table) Expired() []Lock {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []Lock
	now := t.clock()
	// The heap's order: no row comes before one with an earlier deadline on
	// the way up.
	var walk func(i int)
	walk = func(i int) {
		if i >= len(t.leases) || t.leases[i].lease.deadline > now {
			return
		}
		all = append(all, t.leases[i].lock())
		walk(2*i + 1)
		walk(2*i + 2)
	}
	walk(0)
	return all
}

// NextDeadline returns when the next lease ends, on the clock of the table.
func (t *Table) NextDeadline() (time.Duration, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.leases) == 0 {
		return 0, false
	}
	return t.leases[0].lease.deadline, true
}

// Leased reports whether there are leases. It costs next to nothing.
func (t *Table) Leased() bool { return t.leased.Load() > 0 }

// Clock tells the time that deadlines are in.
func (t *Table) Clock() time.Duration { return t.clock() }

// Represent makes p stand for the scope that owns a lock, when the process that
// did so is dead (H3). A lock whose descriptor that one's exit has closed ends (R2),
// and is returned.
func (t *Table) Represent(token uint64, p *procid.Process) (ended *Lock, ok bool) {
	t.mu.Lock()
	defer t.unlockFlush()
	r := t.tokens[token]
	switch {
	case r == nil || r.scope.Kind == ProcessScope:
		return nil, false
	case r.leaving:
		l := r.lock()
		t.endLocked(r, Ending{Reason: Unlocked})
		return &l, true
	}
	t.representLocked(r, p)
	return nil, true
}

func (t *Table) representLocked(r *row, p *procid.Process) {
	t.disownLocked(r)
	r.remember(r.owner.ID()) // its descendants stay holders
	r.owner = p
	r.crashed = false // a holder was giving it back when the last daemon died
	r.dying = false
	t.ownLocked(r)
}

// leaseHeap orders leases by their deadline.
type leaseHeap []*row

func (h leaseHeap) Len() int           { return len(h) }
func (h leaseHeap) Less(i, j int) bool { return h[i].lease.deadline < h[j].lease.deadline }

func (h leaseHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].lease.at, h[j].lease.at = i, j
}

func (h *leaseHeap) Push(x any) {
	r := x.(*row)
	r.lease.at = len(*h)
	*h = append(*h, r)
}

func (h *leaseHeap) Pop() any {
	old := *h
	r := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	r.lease.at = -1
	return r
}
