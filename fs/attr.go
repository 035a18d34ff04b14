package fs

import (
	"errors"
	"slices"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// fillAttr translates attributes of the backing.
func fillAttr(a *fuse.Attr, st *unix.Statx_t) {
	a.Ino = st.Ino
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

// fillEntry tells the kernel of n under a name. An uncached name looks
// different to different callers (A9, A11), so the kernel asks each time.
func (fs *FS) fillEntry(h *fuse.InHeader, out *fuse.EntryOut, n *node, st *unix.Statx_t, uncached bool) {
	out.NodeId, out.Generation = n.id, n.generation()
	fillAttr(&out.Attr, st)
	if !uncached {
		out.SetEntryTimeout(validFor)
	}
	out.SetAttrTimeout(fs.disguise(h, n, &out.Attr))
}

// validForTick is the least that the kernel takes for a time: until its clock has
// ticked, at most twice. To check the modes in the same system call it asks once more for
// attributes that it is not to keep at all.
const validForTick = time.Nanosecond

// freshTime is how old a file may be that was modified "just now".
const freshTime = 100 * time.Millisecond

// disguise shows the lock file of a live lock as modified just now to all but
// its holders, so that no tool breaks it by age (A11). It returns how long the kernel may
// keep the attributes: those of a lock file for a tick, if they are what all are to see.
func (fs *FS) disguise(h *fuse.InHeader, n *node, a *fuse.Attr) time.Duration {
	valid := n.attrsValidFor(a.Size)
	if n.isDir() && n.dir != nil && fs.table.Len() == 0 || fs.opts.Observe {
		return valid
	}
	names := n.lockNames()
	if len(names) == 0 {
		return valid
	}
	now := time.Now()
	for _, l := range names {
		if fs.isLive(l) && !fs.table.Holds(fs.glance(h), l.parent.dir) {
			a.Mtime, a.Mtimensec = uint64(now.Unix()), uint32(now.Nanosecond())
			a.Ctime, a.Ctimensec = a.Mtime, a.Mtimensec
			return 0
		}
	}
	if age := now.Sub(time.Unix(int64(a.Mtime), int64(a.Mtimensec))); age < 0 || age > freshTime {
		return 0
	}
	return min(valid, validForTick)
}

// keeps reports whether the entry is the lock file of a lock.
func (fs *FS) keeps(l link) bool {
	if fs.table.Len() == 0 {
		return false
	}
	for _, lock := range fs.table.On(l.parent.dir) {
		for _, f := range lock.Files {
			if f == l.name {
				return true
			}
		}
	}
	return false
}

// isLive reports whether the entry is the lock file of a lock: one that keeps it, or
// of which a locked descriptor does (A4).
func (fs *FS) isLive(l link) bool {
	if fs.table.Len() == 0 {
		return false
	}
	return slices.ContainsFunc(fs.table.On(l.parent.dir), func(lock lockstate.Lock) bool {
		return slices.Contains(lock.Files, l.name) || (len(lock.Keys) > 0 || lock.LostKey) && lock.File == l.name
	})
}

// Lookup finds a name in a directory.
func (fs *FS) Lookup(cancel <-chan struct{}, h *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	switch name {
	case ".":
		return fs.lookupSelf(h, out)
	case "..":
		return fs.lookupParent(h, out)
	}
	parent := fs.nodes.get(h.NodeId)
	if c, ok := fs.control.lookup(h, parent, name); ok {
		if c == nil {
			return fuse.ENOENT
		}
		c.fillEntry(out)
		return fuse.OK
	}
	if parent == nil {
		return fuse.Status(unix.ESTALE)
	}
	uncached := fs.isLockName(parent, name)
	if uncached {
		fs.reapOn(parent.dir)
		if fs.table.Len() > 0 {
			fs.glance(h) // for disguise
		}
	} else {
		uncached = fs.mayBeCandidate(name)
	}
	if uncached {
		if c := fs.cands.get(fs, h, parent, name); c != nil {
			return c.entry(fs, out)
		}
	}
	if !fs.ns.TryRLock() {
		if !uncached && fs.lacks(parent, name) {
			out.SetEntryTimeout(validFor)
			return fuse.OK
		}
		fs.ns.RLock()
	}
	defer fs.ns.RUnlock()
	d, err := fs.back.dir(parent)
	if err != nil {
		return statusOf(err)
	}
	defer d.release()
	var st unix.Statx_t
	n, err := fs.nodes.lookAt(d.fd, parent, name, &st)
	if err != nil {
		if err == unix.ENOENT && !uncached {
			out.SetEntryTimeout(validFor) // node 0: the name is known not to be there
			return fuse.OK
		}
		return statusOf(err)
	}
	if !n.isDir() {
		if uncached && fs.isLockName(parent, name) {
			fs.lockLooks.note(h.Pid, n, link{parent, name}, st.Nlink > 1)
		}
		fs.listers.asked(h.Pid, parent, name)
	}
	fs.fillEntry(h, out, n, &st, uncached)
	return fuse.OK
}

// lacks reports whether an open directory has nothing called so, as one may know
// while somebody else renames something: that is a single step.
func (fs *FS) lacks(parent *node, name string) bool {
	which := fs.renames.Load()
	if which%2 == 0 {
		return false
	}
	d := fs.back.dirs.get(parent)
	if d == nil {
		return false
	}
	defer d.release()
	var st unix.Statx_t
	return statAt(d.fd, name, &st) == unix.ENOENT && fs.renames.Load() == which
}

// Forget takes note that the kernel has dropped a node.
func (fs *FS) Forget(id, lookups uint64) { fs.nodes.forget(id, lookups) }

// awaitsForget reports whether much room in the backing is given back as soon as
// the kernel has forgotten something.
func (fs *FS) awaitsForget() bool { return fs.nodes.big.Load() > 0 }

// stat returns the attributes of n, through the handle fh if it is valid.
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
	return fs.statNode(n, st)
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
		c.fillAttr(&out.Attr)
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
		return fuse.Status(unix.ESTALE)
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
		return statusOf(err)
	}
	fillAttr(&out.Attr, &st)
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
		r.fs.nodes.changingOf(n).RLock()
		r.changing = n
	}
	return r.coveringNow(n)
}

// coveringAlone is covering for an operation that gives n another name.
func (r *request) coveringAlone(n *node) (lockstate.Change, error) {
	r.fs.nodes.changingOf(n).Lock()
	r.exclusive = n
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

// StatFs is statfs(2).
func (fs *FS) StatFs(cancel <-chan struct{}, h *fuse.InHeader, out *fuse.StatfsOut) fuse.Status {
	fs.awaitRemoved()
	fs.ns.RLock()
	defer fs.ns.RUnlock()
	fd := fs.back.root
	if n := fs.nodes.get(h.NodeId); n != nil {
		// A file system mounted in the backing answers for itself.
		if p, err := fs.back.place(n); err == nil {
			defer p.done()
			fd = p.fd
		}
	}
	var st unix.Statfs_t
	if err := ignoringEINTR(func() error { return unix.Fstatfs(fd, &st) }); err != nil {
		return statusOf(err)
	}
	out.Blocks, out.Bfree, out.Bavail = st.Blocks, st.Bfree, st.Bavail
	out.Files, out.Ffree = st.Files, st.Ffree
	out.Bsize, out.Frsize, out.NameLen = uint32(st.Bsize), uint32(st.Frsize), uint32(st.Namelen)
	return fuse.OK
}

// awaitRemoved is [nodeTable.awaitRemoved].
func (fs *FS) awaitRemoved() bool {
	return fs.nodes.awaitRemoved(func() int32 {
		open := make(map[*node]struct{})
		for _, h := range fs.handles.all() {
			open[h.node] = struct{}{}
		}
		return fs.nodes.countAwaited(open)
	})
}

// roomShort is what bytes are little to have left, if it is also little of all: a
// sixteenth.
const roomShort = 1 << 30

// awaitRoom waits for what removed files held where room is short: data that passes the
// daemon by cannot wait later.
func (fs *FS) awaitRoom() {
	var st unix.Statfs_t
	if fs.nodes.awaited.Load() == 0 && fs.nodes.closing.Load() == 0 || unix.Fstatfs(fs.back.root, &st) != nil {
		return
	}
	if st.Bavail < shortRoom(&st) {
		fs.awaitRemoved()
	}
}

// shortRoom is roomShort in blocks.
func shortRoom(st *unix.Statfs_t) uint64 { return min(st.Blocks/16, roomShort/uint64(st.Bsize)) }

// hasRoomNow reports whether what failed for want of room may succeed now.
func (fs *FS) hasRoomNow(err error) bool {
	return (errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT)) && fs.awaitRemoved()
}

// Statx is statx(2) where the kernel asks for a birth time.
func (fs *FS) Statx(cancel <-chan struct{}, in *fuse.StatxIn, out *fuse.StatxOut) fuse.Status {
	n := fs.nodes.get(in.NodeId)
	if c := fs.control.node(in.NodeId); c != nil || n != nil && n.candidate().private() {
		// ENOSYS would end statx(2) for the whole mount.
		var a fuse.AttrOut
		if c != nil {
			c.fillAttr(&a.Attr)
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
	fillAttr(&a, &st)
	if valid := fs.disguise(&in.InHeader, n, &a); in.NodeId == n.id {
		out.SetTimeout(valid)
	}
	x := &out.Statx
	x.Mask, x.Blksize, x.Attributes, x.AttributesMask = st.Mask, st.Blksize, st.Attributes, st.Attributes_mask
	x.Nlink, x.Uid, x.Gid, x.Mode = st.Nlink, st.Uid, st.Gid, st.Mode
	x.Ino, x.Size, x.Blocks = st.Ino, st.Size, st.Blocks
	x.Atime.FromStatxTimestamp(&st.Atime)
	x.Btime.FromStatxTimestamp(&st.Btime)
	x.Ctime.Sec, x.Ctime.Nsec = a.Ctime, a.Ctimensec
	x.Mtime.Sec, x.Mtime.Nsec = a.Mtime, a.Mtimensec
	x.RdevMajor, x.RdevMinor, x.DevMajor, x.DevMinor = st.Rdev_major, st.Rdev_minor, st.Dev_major, st.Dev_minor
	return fuse.OK
}

// statxOf translates the attributes of a file that is not in the backing.
func statxOf(x *fuse.Statx, a *fuse.Attr) {
	x.Mask = unix.STATX_BASIC_STATS
	x.Blksize, x.Nlink, x.Uid, x.Gid, x.Mode = a.Blksize, a.Nlink, a.Uid, a.Gid, uint16(a.Mode)
	x.Ino, x.Size, x.Blocks = a.Ino, a.Size, a.Blocks
	x.Atime.Sec, x.Atime.Nsec = a.Atime, a.Atimensec
	x.Mtime.Sec, x.Mtime.Nsec = a.Mtime, a.Mtimensec
	x.Ctime.Sec, x.Ctime.Nsec = a.Ctime, a.Ctimensec
}
