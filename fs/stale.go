package fs

import (
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// When unlink(2) is answered, the kernel goes by the name still until the thread that
// called it has run again. In a directory that somebody has acquired meanwhile, who
// opens the file by that name would write to what is gone already, and hear of no error
// (W3). So whoever finds a file without a name hears ESTALE: the kernel asks for the name
// again then, once, and waits for that thread before it makes the file anew. Who has got
// there without a name, as by /proc/self/fd, comes back and is served, and so is who is
// overtaken by another removal: it is not asked a third time.

const (
	// maxStale bounds how many threads are remembered.
	maxStale = 1 << 12
	// againTime is within which a thread that was told so comes back.
	againTime = time.Second
)

// staleFinds are the threads that are to look again.
type staleFinds struct {
	some  atomic.Bool // there are any
	mu    sync.Mutex
	byTid map[uint32]time.Time // since when
	swept time.Time            // when those were forgotten that did not come
}

// found reports whether a thread is to look again, since it may have got somewhere by a
// name that is gone.
func (t *staleFinds) found(stale bool, tid uint32) bool {
	if !stale || tid == 0 {
		t.arrived(tid)
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if at, ok := t.byTid[tid]; ok && time.Since(at) < againTime {
		delete(t.byTid, tid)
		return false
	}
	if t.byTid == nil || len(t.byTid) >= maxStale {
		t.byTid = make(map[uint32]time.Time)
	}
	t.byTid[tid] = time.Now()
	t.some.Store(true)
	return true
}

// arrived takes note that a thread has looked again, and found what has a name.
func (t *staleFinds) arrived(tid uint32) {
	if !t.some.Load() {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.byTid, tid)
	if now := time.Now(); now.Sub(t.swept) > againTime {
		t.swept = now
		maps.DeleteFunc(t.byTid, func(_ uint32, at time.Time) bool { return now.Sub(at) > againTime })
	}
	t.some.Store(len(t.byTid) > 0)
}

// openedStale is found for an open of a file.
func (fs *FS) openedStale(n *node, h *fuse.InHeader) bool {
	stale := n.isUnlinked()
	if !stale && fs.underWay.some.Load() {
		_, lockFile := fs.lockFileOf(n)
		stale = fs.underWay.mislead(fs, n, h.Pid, lockFile)
	}
	return fs.stale.found(stale, h.Pid)
}

// changedStale is found for what changes a file that nobody has open: who has it open may
// change it by the descriptor, where the kernel looks no name up again. Whether anybody
// has something else open is not known.
func (fs *FS) changedStale(n *node, h *fuse.InHeader) bool {
	stale := n.isUnlinked() || n.kind == unix.S_IFREG>>12 && fs.underWay.mislead(fs, n, h.Pid, false)
	if stale && n.isOpen() {
		return false
	}
	return fs.stale.found(stale, h.Pid)
}

// namedStale is found for what makes, removes or renames something in a directory, which
// may be an acquisition, and for what else it names.
func (fs *FS) namedStale(h *fuse.InHeader, dir *node, others ...*node) bool {
	if !fs.underWay.some.Load() {
		return false
	}
	stale := fs.underWay.mislead(fs, dir, h.Pid, true)
	for _, n := range others {
		stale = stale || fs.underWay.mislead(fs, n, h.Pid, true)
	}
	return stale && fs.stale.found(true, h.Pid)
}

// isUnlinked reports whether n is a regular file whose last name the kernel has had
// removed: who has anything else open, the daemon does not know.
func (n *node) isUnlinked() bool {
	m := n.more.Load()
	if m == nil || !m.unlinked.Load() || n.kind != unix.S_IFREG>>12 {
		return false
	}
	_, _, fd := n.location()
	return fd >= 0
}
