package fs

import (
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// A handle is an open file: of the backing, or a private one.
type handle struct {
	id    uint64
	fd    ownFD // unless it uses those of its file
	node  *node
	flags uint32            // it was opened with
	mode  ioMode            // of a file
	tid   uint32            // the thread that opened it; 0: not known
	lock  *lockstate.Handle // for one that may write
	uid   uint32            // of who opened it

	heard uint64 // see unwritten; protected by its file's mutex

	cuts bool // the kernel may still be in its open(2) with O_TRUNC; protected by its file's mutex

	// fresh handles made the kernel drop the pages that it had of the file.
	fresh bool

	// flushed is when a descriptor of it was closed last, in ns since the epoch: a
	// RELEASE may be on its way. 0: none was, or it was used since.
	flushed atomic.Int64
	// dying is the owner of the lock which a flock or OFD lock through h keeps, if that
	// one was in exit(2) when the last of these was.
	dying atomic.Pointer[procid.ID]
	// released is when the kernel gave up the last descriptor, in ns; 0:
	// not yet.
	released atomic.Int64
	// candidate is set for a file that a link(2) protocol will link (A9).
	candidate atomic.Bool

	// opener is who opened a lock file. Such a handle may be opened by
	// anyone, in any mode, to be locked (A10); what is written through it
	// passes the gate each time.
	opener *procid.Process
	by     link // the name of the lock file that it was opened by, as far as it is known

	cand   *candidate // of a private file
	rights *rights    // of who opened a private lock file
	// as is what the kernel calls the file, if h was opened while that was
	// private, or by the number of such a one (see nodeTable.settled).
	as uint64
}

// wasFlushed reports whether a RELEASE of h may be on its way.
func (h *handle) wasFlushed() bool { return h.flushed.Load() != 0 }

// flushedSince is for how long that may be so: very long if it was not flushed.
func (h *handle) flushedSince() time.Duration { return time.Since(time.Unix(0, h.flushed.Load())) }

// An ownFD is a descriptor; that of a new one is -1. The kernel releases a handle
// only when all other requests for it are answered, but that order is the
// kernel's: it takes an atomic for the race detector to see it.
type ownFD struct{ plusOne atomic.Int32 }

func (f *ownFD) get() int   { return int(f.plusOne.Load()) - 1 }
func (f *ownFD) set(fd int) { f.plusOne.Store(int32(fd) + 1) }

// openedBy returns who opened h, or nil if it was not noted: a file that is only
// read, and was no lock file then.
func (h *handle) openedBy() *procid.Process {
	if h.opener == nil && h.lock != nil {
		return h.lock.Owner()
	}
	return h.opener
}

// beside reports whether the kernel calls the file otherwise than its node.
func (h *handle) beside() bool { return h.as != 0 && h.as != h.node.id }

// mapsWritable reports whether a shared mapping through h may change the file.
func (h *handle) mapsWritable() bool { return h.flags&unix.O_ACCMODE == unix.O_RDWR }

// isFile reports whether h is an open file of the backing.
func (h *handle) isFile() bool { return h != nil && h.cand == nil }

// handleTable holds the open handles.
type handleTable struct {
	next   atomic.Uint64
	shards [tableShards]shard[uint64, *handle] // by number

	mu     sync.RWMutex
	locked map[*lockstate.Handle]*handle // those that may write, lingering ones too
}

func (t *handleTable) init() {
	for i := range t.shards {
		t.shards[i].of = make(map[uint64]*handle)
	}
	t.locked = make(map[*lockstate.Handle]*handle)
	t.next.Store(firstHandle)
}

// firstHandle keeps 0 free, which go-fuse and the kernel use for none.
const firstHandle = 1 << 10

func (t *handleTable) shard(id uint64) *shard[uint64, *handle] { return &t.shards[id%tableShards] }

// get returns the handle with a number, if it is one of the given node: a
// number that the kernel has from elsewhere, as from a control file, finds
// nothing.
func (t *handleTable) get(id, node uint64) *handle {
	s := t.shard(id)
	s.mu.RLock()
	defer s.mu.RUnlock()
	if h := s.of[id]; h != nil && (h.node.id == node || h.as == node && node != 0) {
		return h
	}
	return nil
}

func (t *handleTable) byLock(l *lockstate.Handle) *handle {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.locked[l]
}

// number returns one for what is opened, that none has had before.
func (t *handleTable) number() uint64 { return t.next.Add(1) - 1 }

func (t *handleTable) add(h *handle) uint64 {
	h.id = t.number()
	t.takeUp(h)
	return h.id
}

// takeUp adds a handle that has its number, or 0 if it was released before.
func (t *handleTable) takeUp(h *handle) {
	if h.lock != nil {
		t.addWriter(h)
	}
	if h.id == 0 {
		return
	}
	s := t.shard(h.id)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.of[h.id] = h
}

// replace puts h in the place of one that is open, and reports false if that is
// not any more.
func (t *handleTable) replace(old, h *handle) bool {
	s := t.shard(old.id)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.of[old.id] != old {
		return false
	}
	h.id = old.id
	s.of[h.id] = h
	return true
}

// remove takes out a handle that was released. It stays known by its lock.
func (t *handleTable) remove(id uint64) *handle {
	s := t.shard(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.of[id]
	delete(s.of, id)
	return h
}

// addWriter adds a handle by its lock, one that was released before among them.
func (t *handleTable) addWriter(h *handle) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.locked[h.lock] = h
}

// over takes note that nothing is written through h any more.
func (t *handleTable) over(h *handle) {
	if h.lock == nil {
		return
	}
	h.node.removeWriter(h.lock)
	t.mu.Lock()
	delete(t.locked, h.lock)
	t.mu.Unlock()
	h.lock.Close()
}

// any reports whether f does of an open handle. f must not ask for anything of the
// table.
func (t *handleTable) any(f func(*handle) bool) bool {
	for i := range t.shards {
		if anyOf(&t.shards[i], f) {
			return true
		}
	}
	return false
}

func anyOf(s *shard[uint64, *handle], f func(*handle) bool) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for _, h := range s.of {
		if f(h) {
			return true
		}
	}
	return false
}

func (t *handleTable) len() int {
	n := 0
	for i := range t.shards {
		s := &t.shards[i]
		s.mu.RLock()
		n += len(s.of)
		s.mu.RUnlock()
	}
	return n
}

// all returns the open handles.
func (t *handleTable) all() []*handle {
	var all []*handle
	t.any(func(h *handle) bool {
		all = append(all, h)
		return false
	})
	return all
}

// writers returns the handles that may write.
func (t *handleTable) writers() []*handle {
	t.mu.RLock()
	defer t.mu.RUnlock()
	all := make([]*handle, 0, len(t.locked))
	for _, h := range t.locked {
		all = append(all, h)
	}
	return all
}
