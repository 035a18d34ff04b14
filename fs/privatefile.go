package fs

import (
	"slices"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// The file operations of a private candidate.

// closed takes note that a handle is gone.
func (c *candidate) closed(h *handle) {
	c.mu.Lock()
	c.handles = slices.DeleteFunc(c.handles, func(o *handle) bool { return o == h })
	last := len(c.handles) == 0
	c.mu.Unlock()
	if last && c.lockFile {
		c.fs.cands.drop(c) // nobody waits with it any more
	}
}

// addLocked makes a handle for the caller of an open.
func (c *candidate) addLocked(header *fuse.InHeader, flags uint32) (*handle, error) {
	h := &handle{node: c.node, cand: c, uid: c.fs.openerOf(header, flags), flags: flags &^ (unix.O_CREAT | unix.O_EXCL | unix.O_TRUNC)}
	if c.lockFile {
		x, err := c.fs.rightsOf(header)
		if err != nil {
			return nil, err
		}
		if header.Uid == procid.NoID && len(c.handles) > 0 {
			x = *c.handles[0].rights // who made it came by the same mount
		}
		h.opener, h.rights = c.owner, &x
	}
	c.handles = append(c.handles, h)
	c.fs.handles.add(h)
	return h, nil
}

// settleLocked hands the file that c has become to those that have it open: n,
// whose attributes are st. fd is a descriptor of it. What they write passes the
// gate each time, as with any lock file (A10). The caller holds FS.ns.
func (c *candidate) settleLocked(n *node, fd int, st *unix.Statx_t) {
	fs := c.fs
	f := n.lockFile()
	defer n.unlockFile(f)
	for _, old := range c.handles {
		h := &handle{node: n, as: c.node.id, uid: old.uid, flags: old.flags, mode: ioDirect, opener: c.owner}
		if c.lockFile {
			h.by = link{c.parent, c.name}
		}
		h.flushed.Store(old.flushed.Load())
		h.dying.Store(old.dying.Load())
		if err := fs.openOwnLocked(n, f, h, fd, st); err != nil {
			fs.log.Debug("opened for each operation", "file", c.name, "err", err)
		}
		if !fs.handles.replace(old, h) {
			fs.closeOwnLocked(f, h)
			continue
		}
		f.count(h, h.mode, 1)
	}
	n.plain.setPassed(true)
	c.handles, c.data = nil, nil
	c.won.Store(true)
}

// privateIno is the inode number that a private file shows.
func privateIno(node uint64) uint64 { return 1<<62 | node }

func (c *candidate) fillLocked(a *fuse.Attr) {
	a.Ino = privateIno(c.node.id)
	a.Mode, a.Nlink, a.Uid, a.Gid = c.mode, 1, c.uid, c.gid
	a.Size, a.Blocks, a.Blksize = uint64(len(c.data)), uint64(len(c.data)+511)/512, 4096
	a.SetTimes(&c.atime, &c.mtime, &c.mtime)
}

func (c *candidate) entry(fs *FS, out *fuse.EntryOut) fuse.Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	fs.nodes.again(c.node)
	out.NodeId = c.node.id
	c.fillLocked(&out.Attr)
	return fuse.OK
}

func (c *candidate) attr(out *fuse.AttrOut) fuse.Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fillLocked(&out.Attr)
	return fuse.OK
}

// setAttr, and those below that return ok, do nothing and return false if c is no
// longer private.
func (c *candidate) setAttr(in *fuse.SetAttrIn, out *fuse.AttrOut) (status fuse.Status, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.won.Load() {
		return 0, false
	}
	if size, ok := in.GetSize(); ok {
		if size > candidateSize {
			return fuse.Status(unix.EFBIG), true
		}
		c.resizeLocked(int(size))
	}
	if mode, ok := in.GetMode(); ok {
		c.mode = c.mode&unix.S_IFMT | mode
	}
	if uid, ok := in.GetUID(); ok {
		c.uid = uid
	}
	if gid, ok := in.GetGID(); ok {
		c.gid = gid
	}
	if t, ok := in.GetATime(); ok {
		c.atime = t
	}
	if t, ok := in.GetMTime(); ok {
		c.mtime = t
	}
	c.fillLocked(&out.Attr)
	return fuse.OK, true
}

func (c *candidate) resizeLocked(size int) {
	if size <= len(c.data) {
		c.data = c.data[:size]
		return
	}
	c.data = append(c.data, make([]byte, size-len(c.data))...)
}

func (c *candidate) open(in *fuse.OpenIn, out *fuse.OpenOut) (status fuse.Status, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.won.Load() {
		return 0, false
	}
	h, err := c.addLocked(&in.InHeader, in.Flags)
	if err != nil {
		return statusOf(err), true
	}
	if in.Flags&unix.O_TRUNC != 0 {
		c.data = nil
	}
	out.Fh = h.id
	out.OpenFlags = fuse.FOPEN_DIRECT_IO
	return fuse.OK, true
}

func (c *candidate) read(in *fuse.ReadIn, buf []byte) (res fuse.ReadResult, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.won.Load():
		return nil, false
	case in.Offset >= uint64(len(c.data)):
		return fuse.ReadResultData(nil), true
	}
	return fuse.ReadResultData(buf[:copy(buf, c.data[in.Offset:])]), true
}

func (c *candidate) write(in *fuse.WriteIn, data []byte) (n uint32, status fuse.Status, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.won.Load() {
		return 0, 0, false
	}
	end := in.Offset + uint64(len(data))
	if end < in.Offset || end > candidateSize {
		return 0, fuse.Status(unix.EFBIG), true
	}
	if c.fs.mayBeLog(c.name) {
		return 0, fuse.EBUSY, true
	}
	if int(end) > len(c.data) {
		c.resizeLocked(int(end))
	}
	copy(c.data[in.Offset:], data)
	c.mtime = time.Now()
	return uint32(len(data)), fuse.OK, true
}

func (c *candidate) lseek(in *fuse.LseekIn, out *fuse.LseekOut) (status fuse.Status, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.won.Load() {
		return 0, false
	}
	return seekWhole(uint64(len(c.data)), in, out), true
}
