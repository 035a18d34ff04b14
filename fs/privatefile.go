package fs

import (
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// The file operations of a private candidate.

// closed takes note that a handle is gone.
func (c *candidate) closed() {
	c.mu.Lock()
	c.opens--
	last := c.opens == 0
	c.closeLocked()
	c.mu.Unlock()
	if last && c.lockFile {
		c.fs.cands.drop(c) // nobody waits with it any more
	}
}

func (c *candidate) closeLocked() {
	if c.opens > 0 || c.fd < 0 {
		return
	}
	unix.Close(c.fd)
	c.node.removeWriter(c.lock)
	c.lock.Close()
	c.fd, c.lock = -1, nil
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

func (c *candidate) setAttr(in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	if size, ok := in.GetSize(); ok {
		if size > candidateSize {
			return fuse.Status(unix.EFBIG)
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
	return fuse.OK
}

func (c *candidate) resizeLocked(size int) {
	if size <= len(c.data) {
		c.data = c.data[:size]
		return
	}
	c.data = append(c.data, make([]byte, size-len(c.data))...)
}

func (c *candidate) open(fs *FS, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.won.Load() {
		return fuse.Status(unix.ESTALE) // the kernel asks again
	}
	if in.Flags&unix.O_TRUNC != 0 {
		c.data = nil
	}
	c.opens++
	h := &handle{fd: -1, node: c.node, cand: c}
	if c.lockFile {
		h.opener = c.owner
	}
	out.Fh = fs.handles.add(h)
	out.OpenFlags = fuse.FOPEN_DIRECT_IO
	return fuse.OK
}

func (c *candidate) read(in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fd >= 0 {
		n, err := unix.Pread(c.fd, buf, int64(in.Offset))
		return fuse.ReadResultData(buf[:max(n, 0)]), statusOf(err)
	}
	if in.Offset >= uint64(len(c.data)) {
		return fuse.ReadResultData(nil), fuse.OK
	}
	return fuse.ReadResultData(buf[:copy(buf, c.data[in.Offset:])]), fuse.OK
}

func (c *candidate) write(in *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fd >= 0 {
		n, err := unix.Pwrite(c.fd, data, int64(in.Offset))
		return uint32(max(n, 0)), statusOf(err)
	}
	end := in.Offset + uint64(len(data))
	if end < in.Offset || end > candidateSize {
		return 0, fuse.Status(unix.EFBIG)
	}
	if int(end) > len(c.data) {
		c.resizeLocked(int(end))
	}
	copy(c.data[in.Offset:], data)
	c.mtime = time.Now()
	return uint32(len(data)), fuse.OK
}

func (c *candidate) lseek(in *fuse.LseekIn, out *fuse.LseekOut) fuse.Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fd >= 0 {
		off, err := unix.Seek(c.fd, int64(in.Offset), int(in.Whence))
		out.Offset = uint64(off)
		return statusOf(err)
	}
	size := uint64(len(c.data))
	if in.Offset >= size {
		return fuse.Status(unix.ENXIO)
	}
	out.Offset = in.Offset
	if in.Whence == unix.SEEK_HOLE {
		out.Offset = size
	}
	return fuse.OK
}
