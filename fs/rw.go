package fs

import (
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// Read is read(2).
func (fs *FS) Read(cancel <-chan struct{}, in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	if fs.control.node(in.NodeId) != nil {
		return fs.control.read(cancel, in)
	}
	h := fs.handles.get(in.Fh, in.NodeId)
	if h == nil {
		return nil, fuse.EBADF
	}
	if h.cand != nil {
		if res, ok := h.cand.read(in, buf); ok {
			return res, fuse.OK
		}
		return fs.Read(cancel, in, buf) // it is another handle by now
	}
	if misaligned(in.Flags, in.Offset, uint64(in.Size)) && !fs.takesAny(h) && !fs.isEnd(h, in.Offset) {
		return nil, fuse.EINVAL
	}
	if h.fresh {
		// The pages from before are gone: the kernel drops them in open(2).
		h.node.plain.setPassed(false)
	}
	h.node.plain.setPaged(true) // with O_DIRECT by a private mapping
	fd, temporary, err := fs.readFD(h)
	if err != nil {
		return nil, statusOf(err)
	}
	if !temporary {
		return fuse.ReadResultFd(uintptr(fd), int64(in.Offset), int(in.Size)), fuse.OK
	}
	defer unix.Close(fd)
	n, err := unix.Pread(fd, buf[:min(len(buf), int(in.Size))], int64(in.Offset))
	return fuse.ReadResultData(buf[:max(n, 0)]), statusOf(err)
}

// Write is write(2), or the kernel writing back a mapping.
func (fs *FS) Write(cancel <-chan struct{}, in *fuse.WriteIn, data []byte) (n uint32, status fuse.Status) {
	if fs.control.node(in.NodeId) != nil {
		return fs.control.write(cancel, in, data)
	}
	h := fs.handles.get(in.Fh, in.NodeId)
	if h == nil {
		return 0, fuse.EBADF
	}
	if h.cand != nil {
		done := false
		status = fs.changing(cancel, &in.InHeader, h, "write", uint64(len(data)), func() error {
			n, status, done = h.cand.write(in, data)
			return errorOf(status)
		})
		if done || h.cand.private() {
			return n, status
		}
		return fs.Write(cancel, in, data) // it is another handle by now
	}
	// The last page of a mapping ends where the file does.
	if in.WriteFlags&fuse.WRITE_CACHE == 0 && misaligned(in.Flags, in.Offset, uint64(len(data))) && !fs.takesAny(h) {
		return 0, fuse.EINVAL
	}
	if h.lock == nil && h.opener == nil {
		return 0, fuse.EBADF
	}
	if h.mode == ioCached {
		h.node.plain.setPaged(true)
	}
	status = statusOf(fs.writeFD(h, &in.InHeader, "write", func(fd int) error {
		return errorOf(fs.changing(cancel, &in.InHeader, h, "write", uint64(len(data)), func() error {
			if in.WriteFlags&fuse.WRITE_KILL_SUIDGID != 0 {
				if err := fs.killFD(h.node, fd, &in.InHeader); err != nil {
					return err
				}
			}
			n, status = fs.writeUncut(h, fd, in, data)
			return errorOf(status)
		}))
	}))
	if h.flags&unix.O_APPEND != 0 { // where that is, only the backing knows
		fs.wroteDirectly(h, 0, 0)
	} else {
		fs.wroteDirectly(h, int64(in.Offset), int64(len(data)))
	}
	return n, status
}

// changing makes one change through a handle, that may take so many bytes. That on a
// lock file passes the gate first.
func (fs *FS) changing(cancel <-chan struct{}, header *fuse.InHeader, h *handle, op string, size uint64, do func() error) fuse.Status {
	change := func() error { return fs.spending(h.uid, size, do) }
	if h.opener == nil {
		h.lock.Written()
		err := change()
		if fs.hasRoomNow(err) {
			err = change()
		}
		return statusOf(err)
	}
	r := &request{fs: fs, cancel: cancel, header: header, op: op, node: h.node}
	return fs.attempt(r, false, func() error {
		if h.cand.private() {
			return lockstate.ErrHeld
		}
		c, err := r.covering(h.node)
		if err != nil {
			return err
		}
		c.Quiet = fs.onlyLockNames(h.node)
		op, err := r.admit(c)
		if err != nil {
			return err
		}
		defer op.End()
		if err := change(); err != nil {
			return err
		}
		fs.touched(r, h.node)
		return nil
	})
}

// wroteDirectly has the kernel drop the pages that it may have read before what
// was written past its page cache: so many bytes from off on; 0: all that follow.
func (fs *FS) wroteDirectly(h *handle, off, length int64) {
	if h.mode != ioDirect {
		return
	}
	h.node.plain.setPassed(true)
	if h.beside() {
		fs.notifyAttr(h.node)
	}
	f := h.node.lockFile()
	cached := f.cached > 0
	h.node.unlockFile(f)
	if cached {
		fs.kernel.DropPages(h.node.id, off, length)
	}
}

// writeAt writes data where the kernel says, or at the end, which it does not know
// of a file that it calls by two numbers.
func writeAt(fd int, in *fuse.WriteIn, data []byte, atEnd bool) (uint32, fuse.Status) {
	done := 0
	for done < len(data) {
		var n int
		var err error
		if atEnd {
			n, err = unix.Pwritev2(fd, [][]byte{data[done:]}, 0, unix.RWF_APPEND)
		} else {
			n, err = unix.Pwrite(fd, data[done:], int64(in.Offset)+int64(done))
		}
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			if done > 0 {
				break
			}
			return 0, statusOf(err)
		}
		done += n
	}
	return uint32(done), fuse.OK
}

// Fsync is fsync(2) and fdatasync(2).
func (fs *FS) Fsync(cancel <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	h := fs.handles.get(in.Fh, in.NodeId)
	if h == nil || h.cand != nil {
		return fuse.OK
	}
	defer fs.notifyAttr(h.node) // it may have other blocks now
	return statusOf(fs.sync(h, func(fd int) error {
		return syncFD(fd, in.FsyncFlags)
	}))
}

// Lseek is lseek(2) with SEEK_DATA or SEEK_HOLE. Where a mapping may have changed pages of the
// kernel's, of which the backing knows nothing yet, they are written first: what cp(1) takes
// for a hole it does not read.
func (fs *FS) Lseek(cancel <-chan struct{}, in *fuse.LseekIn, out *fuse.LseekOut) fuse.Status {
	if fs.control.node(in.NodeId) != nil {
		return fs.control.lseek(in, out)
	}
	h := fs.handles.get(in.Fh, in.NodeId)
	if h != nil && h.cand != nil {
		if status, ok := h.cand.lseek(in, out); ok {
			return status
		}
		h = fs.handles.get(in.Fh, in.NodeId)
	}
	if h == nil {
		return fuse.EBADF
	}
	f := h.node.lockFile()
	paged := f.paging > 0
	h.node.unlockFile(f)
	if paged && !fs.kernel.FlushPages(h.node.id) {
		return fs.seekInData(h, in, out)
	}
	return statusOf(fs.withFD(h, func(fd int) error {
		off, err := unix.Seek(fd, int64(in.Offset), int(in.Whence))
		out.Offset = uint64(off)
		return err
	}))
}

// seekInData is Lseek for a file of which it is not known where it has holes.
func (fs *FS) seekInData(h *handle, in *fuse.LseekIn, out *fuse.LseekOut) fuse.Status {
	return statusOf(fs.withFD(h, func(fd int) error {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return err
		}
		return errorOf(seekWhole(uint64(st.Size), in, out))
	}))
}

// seekWhole is lseek(2) in a file of so many bytes without a hole.
func seekWhole(size uint64, in *fuse.LseekIn, out *fuse.LseekOut) fuse.Status {
	if in.Offset >= size {
		return fuse.Status(unix.ENXIO)
	}
	out.Offset = in.Offset
	if in.Whence == unix.SEEK_HOLE {
		out.Offset = size
	}
	return fuse.OK
}

// Fallocate is fallocate(2).
func (fs *FS) Fallocate(cancel <-chan struct{}, in *fuse.FallocateIn) fuse.Status {
	h := fs.handles.get(in.Fh, in.NodeId)
	if !h.isFile() || h.lock == nil && h.opener == nil {
		return fuse.EBADF
	}
	defer fs.wroteDirectly(h, 0, 0)
	status := statusOf(fs.writeFD(h, &in.InHeader, "fallocate", func(fd int) error {
		return errorOf(fs.changing(cancel, &in.InHeader, h, "fallocate", in.Length, func() error {
			return ignoringEINTR(func() error {
				return unix.Fallocate(fd, in.Mode, int64(in.Offset), int64(in.Length))
			})
		}))
	}))
	if status != fuse.OK {
		fs.notifyAttr(h.node) // ext4 keeps what there was room for
	}
	return status
}

// CopyFileRange is copy_file_range(2) between two files of the mount. The kernel drops all
// pages in which something was copied to, also what somebody stores in a mapping of them
// meanwhile: where there may be one, it is to copy through its pages itself.
func (fs *FS) CopyFileRange(cancel <-chan struct{}, in *fuse.CopyFileRangeIn) (uint32, fuse.Status) {
	src, dst := fs.handles.get(in.FhIn, in.NodeId), fs.handles.get(in.FhOut, in.NodeIdOut)
	if !src.isFile() || !dst.isFile() || dst.lock == nil && dst.opener == nil {
		return 0, fuse.Status(unix.EOPNOTSUPP) // the kernel reads and writes itself
	}
	f := dst.node.lockFile()
	paged := f.paging > 0
	dst.node.unlockFile(f)
	if paged {
		return 0, fuse.Status(unix.EOPNOTSUPP)
	}
	defer fs.wroteDirectly(dst, 0, 0)
	n := 0
	// Both are opened before the gate, beneath which FS.ns is held already.
	status := statusOf(fs.withFD(src, func(sfd int) error {
		return fs.writeFD(dst, &in.InHeader, "copy_file_range", func(dfd int) error {
			return errorOf(fs.changing(cancel, &in.InHeader, dst, "copy_file_range", min(in.Len, 1<<30), func() (err error) {
				from, to := int64(in.OffIn), int64(in.OffOut)
				n, err = unix.CopyFileRange(sfd, &from, dfd, &to, int(min(in.Len, 1<<30)), 0)
				return err
			}))
		})
	}))
	if n > 0 && src.mode != ioPassing {
		fs.notifyAttr(src.node) // the kernel does not count it as a read
	}
	return uint32(max(n, 0)), status
}

// misaligned reports whether a read or write breaks the rules of O_DIRECT,
// open(2): the daemon's own descriptors are without it, and where it is passed
// through, the backing sees to that. The flags are those of the request: fcntl(2)
// may have changed them since.
func misaligned(flags uint32, offset, size uint64) bool {
	const sector = 512
	return flags&unix.O_DIRECT != 0 && (offset|size)%sector != 0
}

// takesAny reports whether the file's file system has no such rules: what is not aligned
// goes through its page cache there.
func (fs *FS) takesAny(h *handle) bool {
	var kind int64
	err := fs.withFD(h, func(fd int) error { kind = fsType(fd); return nil })
	return err == nil && (kind == unix.BTRFS_SUPER_MAGIC || kind == unix.TMPFS_MAGIC)
}

// isEnd reports whether there is nothing to be read from an offset on: then it may be
// any.
func (fs *FS) isEnd(h *handle, offset uint64) bool {
	var st unix.Stat_t
	err := fs.withFD(h, func(fd int) error { return unix.Fstat(fd, &st) })
	return err == nil && offset >= uint64(st.Size)
}
