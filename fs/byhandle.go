package fs

import (
	"encoding/binary"
	"strings"
	"sync"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// A file handle (name_to_handle_at(2), NFS) is the kernel's number of a file with its
// generation. What the kernel has forgotten, or a mount before knew, it asks for by
// looking up "." in the number. So the number is the backing's, where that can be, and
// the generation is its birth: another file that gets the number has another one. The
// backing keeps no index of names: unless it has the file's in its cache, all directories
// are searched, and so the node is one like any other, which locks cover.

const (
	// firstSerial is the first number that is given out in turn: to a file that is not
	// on the backing's own file system, has no birth, or whose number is taken.
	firstSerial = 1 << 61
	maxIno      = firstSerial - firstNode
)

// numberLocked returns the number of a file that has none yet.
func (t *nodeTable) numberLocked(key identity) uint64 {
	if key.dev == t.dev && key.birth != 0 && key.ino < maxIno && t.byID.get(firstNode+key.ino) == nil {
		return firstNode + key.ino
	}
	return t.serialLocked()
}

func (t *nodeTable) serialLocked() uint64 {
	t.next++
	return t.next - 1
}

// inoOf returns which file of the backing has a number, if that says so.
func inoOf(id uint64) (ino uint64, ok bool) {
	return id - firstNode, id >= firstNode && id < firstSerial
}

// generation tells n from others that had, or will have, its number.
func (n *node) generation() uint64 {
	if _, ok := inoOf(n.id); !ok {
		return 0 // such a number is never used twice
	}
	return (uint64(n.birth) * 0x9e3779b97f4a7c15) >> 33
}

// lookupSelf answers what "." is in a number that the kernel has from a file handle.
func (fs *FS) lookupSelf(h *fuse.InHeader, out *fuse.EntryOut) fuse.Status {
	const tries = 3 // somebody may rename it, or what it is in
	for range tries {
		err := fs.entryOf(h, out)
		if err != unix.EAGAIN {
			return statusOf(err)
		}
	}
	return fuse.Status(unix.ESTALE)
}

// entryOf fails with EAGAIN if the file was not where it was found.
func (fs *FS) entryOf(h *fuse.InHeader, out *fuse.EntryOut) error {
	if fs.copiedUp.follows(h.Pid) {
		return unix.ESTALE
	}
	n := fs.nodes.toldOf(h.NodeId, func(n *node) *node { return n })
	if n == nil {
		ino, ok := inoOf(h.NodeId)
		if !ok {
			return unix.ESTALE
		}
		path, err := fs.pathOf(ino)
		if err != nil {
			return err
		}
		fs.ns.RLock()
		_ = fs.nodeAt(path, func(found *node) {
			if found.id == h.NodeId {
				fs.nodes.again(found)
				n = found
			}
		})
		fs.ns.RUnlock()
		if n == nil {
			return unix.EAGAIN
		}
	}
	return fs.fillTold(h, out, n)
}

// lookupParent answers what ".." is in a directory, which the kernel has from a file
// handle.
func (fs *FS) lookupParent(h *fuse.InHeader, out *fuse.EntryOut) fuse.Status {
	n := fs.nodes.toldOf(h.NodeId, func(n *node) *node {
		if !n.isDir() {
			return nil
		}
		return n.parent
	})
	if n == nil {
		return fuse.Status(unix.ESTALE)
	}
	return statusOf(fs.fillTold(h, out, n))
}

// toldOf counts that the kernel is told of what f returns for the node with a number, nil
// for none.
func (t *nodeTable) toldOf(id uint64, f func(*node) *node) *node {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.byID.get(id)
	if n == nil || t.settled[id] != nil {
		return nil
	}
	if n = f(n); n != nil {
		n.toldLocked()
	}
	return n
}

// fillTold is fillEntry of a node that the kernel is counted to know already.
func (fs *FS) fillTold(h *fuse.InHeader, out *fuse.EntryOut, n *node) error {
	var st unix.Statx_t
	fs.ns.RLock()
	err := fs.statNode(n, &st)
	if err == nil {
		fs.fillEntry(h, out, n, &st, true)
	}
	fs.ns.RUnlock()
	if err != nil {
		fs.nodes.forget(n.id, 1)
	}
	return err
}

// pathOf returns a path of the file of the backing with an inode number.
func (fs *FS) pathOf(ino uint64) (string, error) {
	path, err := fs.cachedPath(ino)
	if path != "" || err != nil {
		return path, err
	}
	path, err = fs.findInode(".", ino, func(id identity) bool { return id.ino == ino && id.dev == fs.root.dev })
	if path == "" && err == nil {
		err = unix.ESTALE
	}
	return path, err
}

// cachedPath is pathOf by what the backing has in its cache: mostly all that is open, and
// all directories. It returns "" where that does not tell.
func (fs *FS) cachedPath(ino uint64) (string, error) {
	if !fs.back.opensByIno {
		return "", nil
	}
	fd, err := openByIno(fs.back.root, ino)
	switch {
	case err == unix.ESTALE || err == unix.ENOENT:
		return "", unix.ESTALE
	case err != nil:
		return "", nil
	}
	defer unix.Close(fd)
	root, err := pathOfFD(fs.back.root)
	if err != nil {
		return "", nil
	}
	path, err := pathOfFD(fd)
	if err != nil {
		return "", nil
	}
	path, ok := strings.CutPrefix(path, strings.TrimSuffix(root, "/")+"/")
	if !ok || within(path, ControlDir) {
		return "", nil
	}
	return path, nil
}

// openByIno opens a file of ext4, which knows it by the inode number and, if that is not
// 0, the generation. Only who may read everything may.
func openByIno(root int, ino uint64) (int, error) {
	const inoAndGeneration = 1 // FILEID_INO32_GEN
	if ino>>32 != 0 {
		return -1, unix.EINVAL
	}
	handle := binary.NativeEndian.AppendUint32(nil, uint32(ino))
	handle = binary.NativeEndian.AppendUint32(handle, 0)
	return unix.OpenByHandleAt(root, unix.NewFileHandle(inoAndGeneration, handle), unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC)
}

// opensByIno reports whether openByIno works in the file system of root.
func opensByIno(root int) bool {
	var st, found unix.Statx_t
	if fsType(root) != unix.EXT4_SUPER_MAGIC || statAt(root, "", &st) != nil {
		return false
	}
	fd, err := openByIno(root, st.Ino)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	return statAt(fd, "", &found) == nil && found.Ino == st.Ino
}

// copiedUp is which threads have just read where a file was copied up from: for an overlay
// that has its layers in the mount, and looks for that next, by its handle. What the
// kernel finds so has no name, which FUSE takes for a name that is gone: at the second
// look overlayfs answers ESTALE for the copy, and goes on to. A handle that leads nowhere
// it can do without.
type copiedUp struct {
	mu sync.Mutex
	// Most need not look, as the kernel has the file: such threads leave with the older ones.
	tids, older map[uint32]bool
}

// read takes note that an attribute of n was read. Of a file that has its last name in an
// overlay's index the overlay asks whether it is still wanted, and would remove it.
func (c *copiedUp) read(tid uint32, n *node, attr string) {
	if attr != "trusted.overlay.origin" && attr != "user.overlay.origin" || n.isDir() || tid == 0 {
		return
	}
	const indexed = "00fb" // what names in an index begin with
	if n.everyName(func(_ *node, name string) bool { return strings.HasPrefix(name, indexed) }) {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.tids == nil || len(c.tids) == 1024 {
		c.tids, c.older = make(map[uint32]bool), c.tids
	}
	c.tids[tid] = true
}

// follows reports whether a thread has, once.
func (c *copiedUp) follows(tid uint32) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	has := c.tids[tid] || c.older[tid]
	delete(c.tids, tid)
	delete(c.older, tid)
	return has
}
