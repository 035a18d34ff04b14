package fs

import (
	"sync"
	"sync/atomic"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// capsAttr is the extended attribute that has the capabilities of a program.
const capsAttr = "security.capability"

// copyUps is which threads have just given a file a mode or capabilities of which
// truncate(2) and chown(2) would take something away. What an overlay copies to its upper
// layer gets its capabilities, its size, its mode and its owner one after the other, and
// keeps all of them; but FUSE has the same requests for both. Before truncate(2) and
// chown(2) the kernel asks for the capabilities of the file; before an overlay's requests
// it does not.
type copyUps struct {
	some atomic.Bool // there may be one: spares the kernel's questions the mutex
	mu   sync.Mutex
	// Most are chmod(2), and nothing follows: such threads leave with the older ones.
	nodes, older map[uint32]uint64 // node by thread
}

// given takes note that a thread has given n something to keep.
func (c *copyUps) given(tid uint32, n *node) {
	if tid == 0 || n.isDir() {
		return // 0 is anybody
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.nodes == nil || len(c.nodes) == 1024 {
		c.nodes, c.older = make(map[uint32]uint64), c.nodes
	}
	delete(c.older, tid)
	c.nodes[tid] = n.id
	c.some.Store(true)
}

// ended takes note that the kernel has asked a thread's file for capabilities, or that
// the file has got its owner, which is the last.
func (c *copyUps) ended(tid uint32) {
	if !c.some.Load() {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.nodes, tid)
	delete(c.older, tid)
	c.some.Store(len(c.nodes)+len(c.older) > 0)
}

// under reports whether a thread has given n something, and no more.
func (c *copyUps) under(tid uint32, n *node) bool {
	if !c.some.Load() {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	id, ok := c.nodes[tid]
	if !ok {
		id, ok = c.older[tid]
	}
	return ok && id == n.id
}

// modeToKeep reports whether in has set a mode of which chown(2) would take something
// away, or that of a file that may have capabilities.
func (fs *FS) modeToKeep(n *node, in *fuse.SetAttrIn) bool {
	return in.Valid&fuse.FATTR_MODE != 0 && (in.Mode&(unix.S_ISUID|unix.S_ISGID) != 0 || !fs.isPlain(n.plain.load()))
}

// copiesUp reports whether in is a change by which an overlay copies n up, and of those that
// take something away by truncate(2) and chown(2).
func (fs *FS) copiesUp(n *node, in *fuse.SetAttrIn) bool {
	const owner = fuse.FATTR_UID | fuse.FATTR_GID
	if in.Valid&(fuse.FATTR_SIZE|owner) == 0 || in.Valid&fuse.FATTR_MODE != 0 || !fs.copyUps.under(in.Pid, n) {
		return false
	}
	if in.Valid&owner != 0 {
		fs.copyUps.ended(in.Pid)
	}
	return true
}

// keeping makes a change to n, which is at p, that takes no suid and sgid bits and no
// capabilities away.
func (fs *FS) keeping(n *node, p place, change func() error) error {
	var before, after unix.Statx_t
	if err := p.stat(&before); err != nil {
		return err
	}
	caps := make([]byte, 64)
	size, _ := fs.back.getxattr(p, capsAttr, caps)
	if err := change(); err != nil {
		return err
	}
	if err := p.stat(&after); err != nil {
		return err
	}
	if after.Mode != before.Mode {
		if err := fs.back.chmod(p, uint32(before.Mode)&0o7777); err != nil {
			return err
		}
	}
	if size <= 0 {
		return nil
	}
	if left, err := fs.back.getxattr(p, capsAttr, nil); err == nil && left > 0 {
		return nil
	}
	defer n.plain.changed()
	return fs.back.setxattr(p, capsAttr, caps[:size], 0)
}
