package fs

import (
	"sync/atomic"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// The descriptors of an open file. One for reading is shared by all handles of
// an inode; the kernel sends no RELEASE while a request on a handle is under
// way, so that it stays open for as long as that takes. One for writing is
// kept by handles whose writes come to the daemon, and is otherwise opened for
// the operation.

// openNode opens n in the backing. The caller holds FS.ns.
func (fs *FS) openNode(n *node, flags int) (fd int, err error) {
	err = fs.at(n, func(p place) error {
		fd, err = fs.openPlace(n, p, flags)
		return err
	})
	if err != nil {
		return -1, err
	}
	return fd, nil
}

func (fs *FS) openPlace(n *node, p place, flags int) (int, error) {
	fd, err := fs.back.open(p, flags)
	if err != nil || p.name == "" {
		return fd, err
	}
	var st unix.Statx_t
	if err = statAt(fd, "", &st); err == nil && n.tab.identityOf(&st) != n.key() {
		err = unix.ESTALE
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// readFD returns a descriptor by which h can be read, and whether it is the
// caller's to close.
func (fs *FS) readFD(h *handle) (fd int, temporary bool, err error) {
	if fd = h.fd.get(); fd >= 0 && h.flags&unix.O_ACCMODE != unix.O_WRONLY {
		return fd, false, nil
	}
	if h.cand != nil {
		return -1, false, unix.EBADF
	}
	if h.flags&unix.O_NOATIME != 0 {
		fs.ns.RLock()
		defer fs.ns.RUnlock()
		fd, err = fs.openNode(h.node, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOATIME)
		return fd, true, err
	}
	f := h.node.lockFile()
	fd = f.fd
	h.node.unlockFile(f)
	if fd >= 0 {
		return fd, false, nil
	}
	fs.ns.RLock()
	defer fs.ns.RUnlock()
	f = h.node.lockFile()
	defer h.node.unlockFile(f)
	if f.fd >= 0 {
		return f.fd, false, nil
	}
	if fd, err = fs.openNode(h.node, unix.O_RDONLY|unix.O_NONBLOCK); err != nil {
		return -1, false, err
	}
	if !fs.spare.keep() {
		return fd, true, nil
	}
	f.fd = fd
	return fd, false, nil
}

// withFD calls do with a descriptor of the file of h, by which h can be read if it
// may.
func (fs *FS) withFD(h *handle, do func(fd int) error) error {
	if own := h.fd.get(); own >= 0 {
		return do(own)
	}
	fd, temporary, err := fs.readFD(h)
	if err != nil {
		return err
	}
	if temporary {
		defer unix.Close(fd)
	}
	return do(fd)
}

// writeFD calls do with a descriptor by which h can be written. A handle that
// was revoked has none (L3), unless the mount only observes. by is who is told so, for
// what: nil where the caller notes the refusal.
func (fs *FS) writeFD(h *handle, by *fuse.InHeader, what string, do func(fd int) error) error {
	if own := h.fd.get(); own >= 0 {
		// What is in flight on the handle ends without FS.ns, which an
		// acquisition that waits for it may hold.
		op, err := h.lock.Begin()
		if err != nil && by != nil {
			fs.deny(&request{fs: fs, header: by, op: what, node: h.node}, err, nil)
		}
		if err != nil && !fs.opts.Observe {
			return err
		}
		defer op.End()
		return do(own)
	}
	fd, done, err := fs.openWriting(h.node)
	if err != nil {
		return err
	}
	defer done()
	return do(fd)
}

// openWriting is openWritingAt for who does not hold FS.ns.
func (fs *FS) openWriting(n *node) (fd int, done func(), err error) {
	fs.ns.RLock()
	defer fs.ns.RUnlock()
	return fs.openWritingAt(n, nil)
}

// openWritingAt opens n for writing, for a moment: at p, or wherever it is. Its file's mutex
// is not held until done is called: a change may wait for the backing, and who only looks at
// the file does not wait for that. The caller holds FS.ns.
func (fs *FS) openWritingAt(n *node, p *place) (fd int, done func(), err error) {
	f := n.lockFile()
	defer n.unlockFile(f)
	switch {
	case p != nil:
		fd, err = fs.back.open(*p, unix.O_WRONLY|unix.O_NONBLOCK)
	case f.fd >= 0:
		fd, err = fs.back.open(place{fd: f.fd}, unix.O_WRONLY|unix.O_NONBLOCK)
	default:
		fd, err = fs.openNode(n, unix.O_WRONLY|unix.O_NONBLOCK)
	}
	if err != nil {
		return -1, nil, err
	}
	f.writing++
	return fd, func() {
		unix.Close(fd)
		n.lockFile()
		f.writing--
		n.unlockFile(f)
	}, nil
}

// truncatesBy returns a descriptor of h's own by which its file can be truncated, or -1. One
// that passes gets it here, and keeps it: where the first close(2) after a truncation writes
// the file out (ext4's auto_da_alloc, XFS, btrfs), that is to be one after the new content
// was written, and not that of a descriptor for a moment. The caller holds FS.ns.
func (fs *FS) truncatesBy(h *handle) int {
	if a := h.flags & unix.O_ACCMODE; a != unix.O_WRONLY && a != unix.O_RDWR {
		return -1
	}
	if h.mode != ioPassing {
		return h.fd.get()
	}
	f := h.node.lockFile()
	defer h.node.unlockFile(f)
	// What was heard on the descriptor that it has shared until now, its own would not hear.
	if h.fd.get() < 0 && h.heard == f.unwritten.times {
		_ = fs.openOwnLocked(h.node, f, h, -1, &unix.Statx_t{}) // else by one for a moment
	}
	return h.fd.get()
}

// truncateOpen carries out O_TRUNC for h, which has just begun. The caller holds FS.ns.
func (fs *FS) truncateOpen(h *handle) error {
	use := fs.truncatesBy(h)
	if use < 0 {
		fd, done, err := fs.openWritingAt(h.node, nil)
		if err != nil {
			return err
		}
		defer done()
		use = fd
	}
	f := h.node.tab.files.get(h.node) // there while h is open
	f.cut.Lock()
	defer f.cut.Unlock()
	return ignoringEINTR(func() error { return unix.Ftruncate(use, 0) })
}

// truncate changes the size of n, through h if it may write. p is where n is.
// The caller holds FS.ns.
func (fs *FS) truncate(n *node, p place, h *handle, size int64) error {
	if h != nil && fs.truncatesBy(h) >= 0 {
		f := h.node.lockFile()
		f.replacedLocked()
		h.node.unlockFile(f)
		return fs.writeFD(h, nil, "", func(fd int) error {
			return ignoringEINTR(func() error { return unix.Ftruncate(fd, size) })
		})
	}
	fd, done, err := fs.openWritingAt(n, &p)
	if err != nil {
		return err
	}
	defer done()
	if h != nil {
		return ignoringEINTR(func() error { return unix.Ftruncate(fd, size) })
	}
	// Only ftruncate(2) always changes the times, whatever the file system. That fd
	// is open keeps leases away, for which truncate(2) would wait.
	return ignoringEINTR(func() error { return unix.Truncate(procPath(fd), size) })
}

// openFD returns a descriptor of the file that is open already, or -1.
func (h *handle) openFD() int {
	if h == nil {
		return -1
	}
	if fd := h.fd.get(); fd >= 0 || !h.isFile() {
		return fd
	}
	f := h.node.lockFile()
	defer h.node.unlockFile(f)
	return f.fd
}

// attrsValidFor is how long the kernel may keep the attributes of n, which has so
// many bytes: not at all while the kernel may have a wrong size of it, or a mapping changes
// it of which the kernel tells nobody. In an empty file there is nothing to be changed;
// whatever makes it longer goes through the kernel, which asks again then.
func (n *node) attrsValidFor(size uint64) time.Duration {
	f := n.tab.files.get(n)
	if f != nil && (f.unsized.Load() || size > 0 && f.mapped.Load()) {
		return 0
	}
	return n.tab.validFor
}

// mayBeMapped reports whether n may be mapped writable past the daemon.
func (n *node) mayBeMapped() bool {
	f := n.tab.files.get(n)
	return f != nil && f.mapped.Load()
}

// A budget is how many descriptors may be open for files. The rest is for
// directories and what an operation opens for itself.
type budget struct {
	most int64
	left atomic.Int64
}

func (b *budget) init(most int64) {
	b.most = most
	b.left.Store(most)
}

// take is for a handle that cannot do without a descriptor.
func (b *budget) take() bool {
	if b.left.Add(-1) >= 0 {
		return true
	}
	b.left.Add(1)
	return false
}

// keep is for a descriptor that is only kept so that the file need not be opened
// again. Half of all are left to who cannot do without.
func (b *budget) keep() bool { return b.plenty() && b.take() }

func (b *budget) plenty() bool { return b.left.Load() > b.most/2 }

func (b *budget) give() { b.left.Add(1) }

// fileBudget leaves descriptors to all else: the cached directories, the
// processes that are watched, and operations in flight.
func fileBudget() int64 { return int64(maxDescriptors()) / 2 }
