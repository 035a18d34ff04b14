package lockstate

import (
	"errors"
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
	// TTL its time to live, DefaultTTL if 0 (L1).
	Scope  Scope
	Client string
	UID    uint32
	TTL    time.Duration

	asked *asking

	Command bool   // a command keeps it instead (A7)
	Why     string // what it is for, for the listing
	OnCrash string // see Lock
	New     bool   // the directory was made for this lock

	// Waits is asked whether to wait for what is under way; nil: it is waited for.
	Waits func() bool
}

// await waits until done, as long as the request is not cancelled.
func (q *Request) await(done, cancel <-chan struct{}) error {
	if q.Waits == nil || q.Waits() {
		select {
		case <-done:
			return nil
		case <-cancel:
		}
	}
	return ErrCancelled
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
	var unknown error
	if q.Client == "" && q.Scope.Kind == ProcessScope {
		heirs, unknown = q.Process.LineageNow()
	}
	q.asked = new(asking)
	for {
		g, err := t.acquire(q, heirs, unknown)
		if err == errRefill {
			if err := t.refill(); err != nil {
				return nil, err
			}
			continue
		}
		if more, full := err.(roomError); full {
			if err := t.makeRoom(int(more)); err != nil {
				return nil, err
			}
			continue
		}
		if err != nil && t.resolveRequest(&q, err) {
			continue
		}
		var twin *twinError
		if errors.As(err, &twin) {
			if err := q.await(twin.decided, cancel); err != nil {
				return nil, err
			}
			continue
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

// errRefill is the answer where no token is left to give out.
var errRefill = errors.New("no token is reserved")

// A roomError is the answer where so many bytes more would be more than locks may take.
type roomError int

func (roomError) Error() string { return "no room is known" }

// A twinError says that what this request depends on is about to be acquired: it is
// to be decided when that is. It may be the client's own lease, or a lock that would
// cover the request.
type twinError struct{ decided <-chan struct{} }

func (*twinError) Error() string { return "it is being acquired already" }

// twinLocked refuses what depends on r, which is pending.
func (r *row) twinLocked() *twinError {
	if r.decided == nil {
		r.decided = make(chan struct{})
	}
	return &twinError{r.decided}
}

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

func (t *Table) acquire(q Request, heirs []procid.Ancestor, unknown error) (*Grant, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	q.adoptLocked()
	d, p := q.Dir, q.Process
	switch {
	case d.gone:
		return nil, ErrGone
	case d == t.root:
		return nil, ErrRoot
	case t.token >= t.reserved && !t.frozen:
		return nil, errRefill
	}
	if r := d.governing(); r != nil && q.Kind == Implicit && t.holdsLocked(r, p, q.asked) {
		if r.pending {
			// It may come to nothing, and would have covered nothing then.
			return nil, r.twinLocked()
		}
		// A2: covered already. The operation counts like any other.
		t.stagedLocked(p, d)
		return &Grant{t: t, op: t.startLocked([]*Dir{d}, nil)}, nil
	}
	if r := t.keys[q.Key]; q.Key != nil && r != nil && r.kind == q.Kind && r.dir == d && !r.pending {
		// The description has the lock already, whoever asks again.
		return &Grant{t: t, row: r, request: q}, nil
	}
	if t.frozen {
		return nil, ErrFrozen // M4; what was covered already is
	}
	if err := t.admitGrantLocked(q, nil); err != nil {
		t.stats.Refused++
		return nil, err
	}
	instead := uint64(0)
	for _, r := range d.rows {
		if r.pending && r.lease != nil && r.key() == q.key() {
			return nil, r.twinLocked()
		}
		if r.key() == q.key() && r.kind == q.Kind && r.expired() {
			return nil, t.heldLocked(r) // I9: it is to be ended before; one that is not shared keeps everybody out until then
		}
		if r.lease != nil && r.key() == q.key() && r.kind == Explicit && q.Kind == Shared && !r.doomed() {
			return nil, ErrAlone // I9
		}
		if r.kind == q.Kind && r.kind != Implicit && r.retakes(&q) && !r.pending && !r.expired() && (r.kind == Shared || r.lease != nil || r == d.top()) {
			if r.doomed() {
				if r.key() == q.key() { // a lease is not replaced by what a process has
					instead = r.token
				}
				continue
			}
			// The owner takes its lock a second time, by another lock file
			// or descriptor.
			if more := q.growthLocked(r); more > 0 && t.taken+more > t.most {
				return nil, roomError(more)
			}
			return &Grant{t: t, row: r, request: q}, nil
		}
	}
	if unknown != nil && q.Key == nil { // what a descriptor keeps ends before its owner does
		return nil, unknown
	}
	if size := q.sizeLocked(); t.taken+size > t.most {
		return nil, roomError(size)
	}
	r := t.newRowLocked(&q, heirs)
	r.instead = instead
	t.insertLocked(r)
	t.touchOpenLocked(r)
	t.noteLocked(r)
	g := &Grant{t: t, row: r, made: true, request: q}
	g.drainLocked()
	return g, nil
}

// lockFile is the one that the request makes.
func (q *Request) lockFile() lockFile { return lockFile{name: q.File, opened: q.Protocol == byOpen} }

// byOpen is the protocol of who makes a lock file by a plain open (A6).
const byOpen = "open"

// newRowLocked makes the row of an acquisition that is admitted. It is pending.
func (t *Table) newRowLocked(q *Request, heirs []procid.Ancestor) *row {
	t.token++
	r := &row{
		dir: q.Dir, kind: q.Kind, protocol: q.Protocol, file: q.File, owner: q.Process, heirs: heirs,
		token: t.token, since: t.now(), pending: true,
		command: q.Command, why: q.Why, onCrash: q.OnCrash, isNew: q.New, scope: q.Scope,
		content: content{fresh: q.Kind == Implicit},
	}
	if q.Client != "" {
		r.lease = &lease{client: q.Client, uid: q.UID, ttl: q.TTL, at: -1, clock: t.clock}
		if r.lease.ttl == 0 {
			r.lease.ttl = DefaultTTL
		}
		r.join(q.Process.ID())
	}
	switch {
	case q.Key != nil:
		r.setKey(q.Key, q.Opened)
	case q.File != "":
		r.files = []lockFile{q.lockFile()}
	}
	if r.inode = q.Inode; r.inode == (Inode{}) && len(q.Dir.rows) > 0 {
		r.inode = q.Dir.rows[0].inode
	}
	return r
}
