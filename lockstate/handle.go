package lockstate

import (
	"slices"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// A Handle is an open file description that may change content (R8, C3d).
type Handle struct {
	t    *Table
	proc *procid.Process // who opened it

	// Protected by Table.mu.
	dirs   []*Dir // where the file has a name
	name   string // its name in dirs[0], for listings
	under  uint64 // token of the lock it was opened under
	closed bool
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
	h := &Handle{t: t, proc: c.Process, name: name}
	if h.proc == nil {
		h.proc = new(procid.Process) // nobody (H4)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.admitLocked(&c); err != nil {
		return nil, err
	}
	for _, d := range c.Dirs {
		h.enterLocked(d)
	}
	if len(c.Dirs) > 0 {
		if r := c.Dirs[0].governing(); r != nil {
			h.under = r.token
		}
	}
	return h, nil
}

// Owner returns the process that opened the handle.
func (h *Handle) Owner() *procid.Process { return h.proc }

// Moved tells that the file has other names now: in dirs, and name in the
// first of them. No dirs: it is unlinked.
func (h *Handle) Moved(name string, dirs ...*Dir) {
	h.t.mu.Lock()
	defer h.t.mu.Unlock()
	if h.closed {
		return
	}
	for _, d := range slices.Clone(h.dirs) {
		h.leaveLocked(d)
		h.t.pruneLocked(d)
	}
	h.name = name
	for _, d := range dirs {
		h.enterLocked(d)
	}
	h.t.ringLocked()
}

// Close forgets the handle.
func (h *Handle) Close() {
	if h == nil {
		return
	}
	h.t.mu.Lock()
	defer h.t.mu.Unlock()
	h.closed = true
	for _, d := range slices.Clone(h.dirs) {
		h.leaveLocked(d)
		h.t.pruneLocked(d)
	}
	h.t.ringLocked()
}

func (h *Handle) enterLocked(d *Dir) {
	if _, ok := d.handles[h]; ok || d.gone {
		return
	}
	if d.handles == nil {
		d.handles = make(map[*Handle]struct{})
	}
	d.handles[h] = struct{}{}
	d.count(0, 1)
	h.dirs = append(h.dirs, d)
}

func (h *Handle) leaveLocked(d *Dir) {
	if _, ok := d.handles[h]; !ok {
		return
	}
	delete(d.handles, h)
	if len(d.handles) == 0 {
		d.handles = nil
	}
	d.count(0, -1)
	h.dirs = slices.DeleteFunc(h.dirs, func(e *Dir) bool { return e == d })
}
