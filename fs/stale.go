package fs

import (
	"sync"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// When unlink(2) is answered, the kernel goes by the name still until the thread that
// called it has run again. In a directory that somebody has acquired meanwhile, who
// opens the file by that name would write to what is gone already, and hear of no error
// (W3). So whoever finds a file without a name hears ESTALE, once: the kernel asks for
// the name again then, and waits for that thread before it makes the file anew. Who has
// got there without a name, as by /proc/self/fd, comes back and is served.

// maxStale bounds how many threads are remembered.
const maxStale = 1 << 12

// staleFinds are the files without a name that threads have found, by thread.
type staleFinds struct {
	mu    sync.Mutex
	byTid map[uint32]identity // not by node id, which the next file may have
}

// found reports whether a thread is to look again how it got to n.
func (t *staleFinds) found(n *node, tid uint32) bool {
	if tid == 0 || !n.isUnlinked() {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	is := n.key()
	if t.byTid[tid] == is {
		delete(t.byTid, tid)
		return false
	}
	if t.byTid == nil || len(t.byTid) >= maxStale {
		t.byTid = make(map[uint32]identity)
	}
	t.byTid[tid] = is
	return true
}

// foundStale is found for what changes a file that nobody has open: who has it open may
// change it by the descriptor, where the kernel looks no name up again.
func (fs *FS) foundStale(n *node, h *fuse.InHeader) bool {
	return fs.nodes.files.get(n) == nil && fs.stale.found(n, h.Pid)
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
