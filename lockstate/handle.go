package lockstate

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// A Handle is an open file description that may change content (R8, C3d).
type Handle struct {
	t    *Table
	proc *procid.Process // who opened it

	revocable bool // set once
	revoked   atomic.Bool
	closing   atomic.Int64 // when a descriptor of it was closed last, on Table.awake, at least 1; 0: none was. See Closing

	// Protected by Table.mu.
	dirs   []*Dir   // where the file has a name,
	at     []int    // and in which place of their handles this one is
	name   string   // its name in dirs[0], for listings
	under  uint64   // token of the lock it was opened under
	leases []uint64 // those of all that it can be revoked by
	closed bool

	fewDirs [1]*Dir // spare dirs and at an allocation
	fewAt   [1]int
}

// A HandleState describes a write handle.
type HandleState struct {
	Handle *Handle
	Owner  procid.ID // the process that opened it
	Path   string    // relative to the root
}

func (h *Handle) stateLocked() HandleState {
	s := HandleState{Handle: h, Owner: h.proc.ID(), Path: "(unlinked)"}
	if len(h.dirs) > 0 {
		s.Path = h.name
		if p := h.dirs[0].path(); p != "." {
			s.Path = p + "/" + h.name
		}
	}
	return s
}

// OpenHandle admits a change as [Table.Begin] does, and notes in the same step
// that p can go on changing the file until [Handle.Close]. name is the file's
// name in the first of c.Dirs.
func (t *Table) OpenHandle(c Change, name string) (*Handle, error) {
	if c.Process == nil && c.Who != nil {
		c.Process, c.Who = c.Who(), nil
	}
	for {
		h, err := t.openHandle(&c, name)
		t.tell()
		if err != errWho {
			t.flushStaged()
			return h, c.asked.mark(err)
		}
		t.learn(&c)
	}
}

func (t *Table) openHandle(c *Change, name string) (*Handle, error) {
	h := &Handle{t: t, proc: c.Process, name: name}
	if h.proc == nil {
		h.proc = new(procid.Process) // nobody (H4)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.admitLocked(c); err != nil {
		return nil, err
	}
	for i, d := range c.Dirs {
		h.enterLocked(d)
		if r := d.governing(); r != nil && i == 0 {
			h.under = r.token
		}
		for r := range d.inForce() {
			if r.lease != nil { // one name is enough: it is the file that changes
				h.revocable = true
				t.revokeByLocked(h, r.token)
			}
		}
	}
	return h, nil
}

func (t *Table) revokeByLocked(h *Handle, token uint64) {
	if t.revocable[token] == nil {
		t.revocable[token] = make(map[*Handle]struct{})
	}
	if _, ok := t.revocable[token][h]; !ok {
		t.revocable[token][h] = struct{}{}
		h.leases = append(h.leases, token)
	}
}

// Revocable reports whether the handle was opened under a lease, which may be
// taken from its holder (L3): each change through it passes [Handle.Begin].
func (h *Handle) Revocable() bool { return h != nil && h.revocable }

// Revoked reports whether nothing may be changed through the handle any more.
// It is one atomic load.
func (h *Handle) Revoked() bool { return h != nil && h.revoked.Load() }

// Begin admits one change through the handle. An acquisition waits for it, as
// for any operation in flight, until the caller ends it. It fails with
// ErrRevoked once the handle was revoked, and is free for one that never will
// be.
func (h *Handle) Begin() (*Op, error) {
	switch {
	case h == nil || !h.revocable:
		return nil, nil
	case h.revoked.Load():
		return nil, ErrRevoked
	}
	h.t.mu.Lock()
	defer h.t.mu.Unlock()
	if h.revoked.Load() {
		return nil, ErrRevoked
	}
	for _, token := range h.leases {
		if r := h.t.tokens[token]; r != nil && r.expired() {
			return nil, ErrRevoked // also before the end of a lease is carried out
		}
	}
	op := h.t.startLocked(h.dirs, nil)
	op.handle = h
	return op, nil
}

// Spent reports whether nothing is changed through the handle any more: it was
// revoked, and what was in flight then is over.
func (h *Handle) Spent() bool {
	if !h.Revoked() {
		return false
	}
	h.t.mu.Lock()
	defer h.t.mu.Unlock()
	return !slices.ContainsFunc(h.t.inflight, func(o *Op) bool { return o.handle == h })
}

// revokeUnderLocked ends the right to change anything through the handles that were
// opened under r. They stand in nobody's way from then on.
func (t *Table) revokeUnderLocked(r *row) {
	for h := range t.revocable[r.token] {
		h.revoked.Store(true)
		h.leaveAllLocked()
	}
}

// Owner returns the process that opened the handle.
func (h *Handle) Owner() *procid.Process { return h.proc }

// Moved tells that the file has other names now: in dirs, and name in the
// first of them. No dirs: it is unlinked.
func (h *Handle) Moved(name string, dirs ...*Dir) {
	h.t.mu.Lock()
	defer h.t.mu.Unlock()
	if h.revocable {
		h.followLocked(dirs)
	}
	if h.closed || h.revoked.Load() || name == h.name && slices.Equal(dirs, h.dirs) {
		return // what is gone has no handles
	}
	h.leaveAllLocked()
	h.name = name
	for _, d := range dirs {
		h.enterLocked(d)
	}
	h.t.ringLocked()
}

// followLocked has what is in flight through h count where the file has got a name,
// too, also for an acquisition there that waits for who gave it that (W3).
func (h *Handle) followLocked(dirs []*Dir) {
	for _, op := range h.t.inflight {
		if op.handle != h {
			continue
		}
		for _, d := range dirs {
			if !slices.Contains(op.dirs, d) {
				op.dirs = append(op.dirs, d)
			}
		}
		for _, g := range h.t.draining {
			if len(g.pending) > 0 && op.touches(g.row.dir) {
				g.pending[op] = struct{}{}
			}
		}
	}
}

// Close forgets the handle.
func (h *Handle) Close() {
	if h == nil {
		return
	}
	h.t.mu.Lock()
	defer h.t.mu.Unlock()
	h.closed = true
	h.leaveAllLocked()
	for _, token := range h.leases {
		if delete(h.t.revocable[token], h); len(h.t.revocable[token]) == 0 {
			delete(h.t.revocable, token)
		}
	}
	h.t.ringLocked()
}

// Closing says that a descriptor of the file was closed, perhaps the last one: then
// Close follows, but a moment later, when whoever closed it may have taken a lock
// already (R5). If one was closed before, that was not the last, and something may have
// been written since.
func (h *Handle) Closing() {
	if h.closing.Swap(max(int64(h.t.awake()), 1)) != 0 {
		h.touch()
	}
}

// closingTime is how long Close follows at the most, mostly. After that, the descriptor that
// was closed was not the last.
const closingTime = time.Second

// isClosing reports whether Close may be about to follow.
func (h *Handle) isClosing() bool {
	last := h.closing.Load()
	return last != 0 && h.t.awake()-time.Duration(last) < closingTime
}

// Written says that something is changed through the handle, or can be by a mapping. The
// locks that its opener has got know of that, but where the handle was [Handle.Closing].
func (h *Handle) Written() {
	if h != nil && h.closing.Load() != 0 {
		h.touch()
	}
}

// touch marks the locks that something is changed under through the handle.
func (h *Handle) touch() {
	if h.t.Len() == 0 {
		return
	}
	touched := false
	h.t.mu.Lock()
	for _, d := range h.dirs {
		h.t.touchAboveLocked(d, func(r *row) bool {
			holds := r.holds(h.proc) && !r.dir.keptBy(d)
			touched = touched || holds
			return holds
		})
	}
	h.t.mu.Unlock()
	if touched {
		h.t.flush()
	}
}

// touchOpenLocked marks r as one that something is changed under if a holder of it
// has a write handle beneath already: what is written through that, nobody tells (R5). It
// reports whether that is news, which is to be noted.
func (t *Table) touchOpenLocked(r *row) bool {
	quiet := func(h *Handle) bool {
		return h.isClosing() || !r.holds(h.proc) || !slices.ContainsFunc(h.dirs, func(d *Dir) bool { return !r.dir.keptBy(d) })
	}
	if r.changed || r.dir.walkHandles(quiet) {
		return false
	}
	r.touch()
	return true
}

func (h *Handle) leaveAllLocked() {
	for len(h.dirs) > 0 {
		d := h.dirs[len(h.dirs)-1]
		h.leaveLocked(d)
		h.t.pruneLocked(d)
	}
}

func (h *Handle) enterLocked(d *Dir) {
	if d.gone || slices.Contains(h.dirs, d) {
		return
	}
	if h.dirs == nil {
		h.dirs, h.at = h.fewDirs[:0], h.fewAt[:0]
	}
	h.dirs, h.at = append(h.dirs, d), append(h.at, len(d.handles))
	d.handles = append(d.handles, h)
	d.count(0, 1)
}

func (h *Handle) leaveLocked(d *Dir) {
	i := slices.Index(h.dirs, d)
	if i < 0 {
		return
	}
	moved := cut(&d.handles, h.at[i])
	moved.at[slices.Index(moved.dirs, d)] = h.at[i]
	h.dirs, h.at = slices.Delete(h.dirs, i, i+1), slices.Delete(h.at, i, i+1)
	d.count(0, -1)
}
