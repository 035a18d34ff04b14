package fs

import (
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// fillAttr translates attributes of the backing.
func (fs *FS) fillAttr(a *fuse.Attr, st *unix.Statx_t) {
	a.Ino = fs.nodes.shownIno(identityOf(st))
	a.Size = st.Size
	a.Blocks = st.Blocks
	a.Atime, a.Atimensec = uint64(st.Atime.Sec), st.Atime.Nsec
	a.Mtime, a.Mtimensec = uint64(st.Mtime.Sec), st.Mtime.Nsec
	a.Ctime, a.Ctimensec = uint64(st.Ctime.Sec), st.Ctime.Nsec
	a.Mode = uint32(st.Mode)
	a.Nlink = st.Nlink
	a.Uid, a.Gid = st.Uid, st.Gid
	a.Rdev = uint32(unix.Mkdev(st.Rdev_major, st.Rdev_minor))
	a.Blksize = st.Blksize
}

// stat returns the attributes of n, through h if that is a handle with a descriptor.
func (fs *FS) stat(n *node, h *handle, st *unix.Statx_t) error {
	if fd := h.openFD(); fd >= 0 {
		return statAt(fd, "", st)
	}
	if n.isDir() {
		// The descriptor is of the directory wherever that is, and the kernel asks
		// for its attributes after each change in it.
		if d := fs.back.dirs.get(n); d != nil {
			defer d.release()
			return statAt(d.fd, "", st)
		}
	}
	fs.ns.RLock()
	defer fs.ns.RUnlock()
	err := fs.statNode(n, st)
	if err == unix.ESTALE && n.isFile() {
		return n.statAside(st)
	}
	return err
}

// statNode is stat for callers that hold fs.ns.
func (fs *FS) statNode(n *node, st *unix.Statx_t) error {
	if n.isDir() {
		if d := fs.back.dirs.get(n); d != nil {
			defer d.release()
			return statAt(d.fd, "", st)
		}
	}
	return fs.at(n, func(p place) error {
		if err := p.stat(st); err != nil {
			return err
		}
		if id := fs.identityOf(st); id != n.key() && n != fs.root {
			return unix.ESTALE
		}
		return nil
	})
}

// GetAttr is stat(2).
func (fs *FS) GetAttr(cancel <-chan struct{}, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	if c := fs.control.node(in.NodeId); c != nil {
		fs.control.getAttr(c, in.NodeId, &out.Attr)
		return fuse.OK
	}
	n := fs.nodes.get(in.NodeId)
	if n == nil {
		return fuse.Status(unix.ESTALE)
	}
	if n.candidate().private() {
		return n.candidate().attr(out)
	}
	if n.vanished() && !fs.handles.any(func(h *handle) bool { return h.node == n }) {
		return fs.stale.goneAttr(&in.InHeader)
	}
	var h *handle
	if in.Flags()&fuse.FUSE_GETATTR_FH != 0 {
		h = fs.handles.get(in.Fh(), in.NodeId)
	}
	var st unix.Statx_t
	if err := fs.stat(n, h, &st); err != nil {
		if fs.nodes.get(in.NodeId) != n {
			return fs.GetAttr(cancel, in, out) // it was private a moment ago
		}
		if h == nil && !n.isDir() && err == unix.ESTALE {
			return fs.stale.goneAttr(&in.InHeader)
		}
		return statusOf(err)
	}
	fs.fillAttr(&out.Attr, &st)
	if valid := fs.disguise(&in.InHeader, n, &out.Attr); in.NodeId == n.id {
		out.SetTimeout(valid)
	}
	return fuse.OK
}

// onlyLockNames reports whether n is known under names of lock files and candidates
// only: it is not content (R5).
func (fs *FS) onlyLockNames(n *node) bool {
	return n.everyName(func(parent *node, name string) bool {
		return fs.isLockName(parent, name) || fs.isCandidate(parent, name)
	})
}

// covering returns the change that touches n, with all directories whose locks
// cover it. Until the try is over, a file gets no other names.
func (r *request) covering(n *node) (lockstate.Change, error) {
	if !n.isDir() {
		r.fs.nodes.changing.take(n, false)
		r.changing[0] = n
	}
	return r.coveringNow(n)
}

// coveringAlone is covering for an operation that gives n another name.
func (r *request) coveringAlone(n *node) (lockstate.Change, error) {
	r.fs.nodes.changing.take(n, true)
	r.changing[0] = n
	return r.coveringNow(n)
}

func (r *request) coveringNow(n *node) (lockstate.Change, error) {
	if n.candidate() != nil && r.fs.nodes.get(n.id) != n {
		return lockstate.Change{}, unix.ESTALE // it was private a moment ago, and stands for another one now
	}
	found, err := r.fs.findAliases(r, n)
	dirs, _ := n.covering()
	return lockstate.Change{Dirs: append(dirs, found...)}, err
}

// Readlink is readlink(2).
func (fs *FS) Readlink(cancel <-chan struct{}, h *fuse.InHeader) ([]byte, fuse.Status) {
	n := fs.nodes.get(h.NodeId)
	if n == nil {
		return nil, fuse.Status(unix.ESTALE)
	}
	fs.ns.RLock()
	defer fs.ns.RUnlock()
	buf, size := make([]byte, unix.PathMax), 0
	err := fs.look(n, func(p place) (err error) {
		size, err = unix.Readlinkat(p.fd, p.name, buf)
		return err
	})
	if err != nil {
		return nil, statusOf(err)
	}
	return buf[:size], fuse.OK
}

// Statx is statx(2) where the kernel asks for a birth time.
func (fs *FS) Statx(cancel <-chan struct{}, in *fuse.StatxIn, out *fuse.StatxOut) fuse.Status {
	n := fs.nodes.get(in.NodeId)
	if c := fs.control.node(in.NodeId); c != nil || n != nil && n.candidate().private() {
		// ENOSYS would end statx(2) for the whole mount.
		var a fuse.AttrOut
		if c != nil {
			fs.control.getAttr(c, in.NodeId, &a.Attr)
		} else {
			n.candidate().attr(&a)
		}
		statxOf(&out.Statx, &a.Attr)
		return fuse.OK
	}
	if n == nil {
		return fuse.Status(unix.ESTALE)
	}
	var st unix.Statx_t
	if err := fs.stat(n, nil, &st); err != nil {
		return statusOf(err)
	}
	var a fuse.Attr
	fs.fillAttr(&a, &st)
	if valid := fs.disguise(&in.InHeader, n, &a); in.NodeId == n.id {
		out.SetTimeout(valid)
	}
	x := &out.Statx
	statxOf(x, &a)
	x.Mask, x.Attributes, x.AttributesMask = st.Mask, st.Attributes, st.Attributes_mask
	x.Btime.FromStatxTimestamp(&st.Btime)
	x.RdevMajor, x.RdevMinor, x.DevMajor, x.DevMinor = st.Rdev_major, st.Rdev_minor, st.Dev_major, st.Dev_minor
	return fuse.OK
}

// statxOf translates what statx(2) tells as well as stat(2).
func statxOf(x *fuse.Statx, a *fuse.Attr) {
	x.Mask = unix.STATX_BASIC_STATS
	x.Blksize, x.Nlink, x.Uid, x.Gid, x.Mode = a.Blksize, a.Nlink, a.Uid, a.Gid, uint16(a.Mode)
	x.Ino, x.Size, x.Blocks = a.Ino, a.Size, a.Blocks
	x.Atime.Sec, x.Atime.Nsec = a.Atime, a.Atimensec
	x.Mtime.Sec, x.Mtime.Nsec = a.Mtime, a.Mtimensec
	x.Ctime.Sec, x.Ctime.Nsec = a.Ctime, a.Ctimensec
}
