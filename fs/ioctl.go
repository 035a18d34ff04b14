package fs

import (
	"cmp"
	"encoding/binary"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// Two ioctls tell a file's flags, two change them: chattr(1) and project
// numbers. All others are refused as unknown: the daemon would carry them out
// as root.
var (
	readIoctls = map[uint32]bool{
		unix.FS_IOC_GETFLAGS: true,
		fsIocGetVersion:      true,
		fsIocFSGetXattr:      true,
	}
	// flagIoctls are those that change flags, with the size of what they take.
	flagIoctls = map[uint32]int{
		unix.FS_IOC_SETFLAGS: 4, // whatever the header says
		fsIocFSSetXattr:      28,
	}
)

// From linux/fs.h.
const (
	fsIocGetVersion = 0x80087601
	fsIocFSGetXattr = 0x801c581f
	fsIocFSSetXattr = 0x401c5820
)

// Ioctl is ioctl(2).
func (fs *FS) Ioctl(cancel <-chan struct{}, in *fuse.IoctlIn, inbuf []byte, out *fuse.IoctlOut, outbuf []byte) fuse.Status {
	if size, ok := flagIoctls[in.Cmd]; ok {
		// The kernel checks the caller's rights, and then makes a request of
		// its own. One that carries an address comes from the caller as it is.
		if in.Arg != 0 || len(inbuf) != size {
			return fuse.Status(unix.ENOTTY)
		}
		return fs.setFlags(cancel, in, inbuf)
	}
	if n := fs.nodes.get(in.NodeId); n != nil && n.isDir() && readIoctls[in.Cmd] && len(outbuf) > 0 {
		return statusOf(fs.withDir(in.Fh, n, func(fd int) error { return ioctlOn(fd, in.Cmd, outbuf) }))
	}
	h := fs.handles.get(in.Fh, in.NodeId)
	if h == nil || !readIoctls[in.Cmd] || len(outbuf) == 0 {
		return fuse.Status(unix.ENOTTY)
	}
	fd, temporary, err := fs.readFD(h)
	if err != nil {
		return fuse.Status(unix.ENOTTY)
	}
	if temporary {
		defer unix.Close(fd)
	}
	return statusOf(ioctlOn(fd, in.Cmd, outbuf))
}

// setFlags is chattr(1).
func (fs *FS) setFlags(cancel <-chan struct{}, in *fuse.IoctlIn, flags []byte) fuse.Status {
	n := fs.nodes.get(in.NodeId)
	if n == nil || n.candidate().private() {
		return fuse.Status(unix.ENOTTY)
	}
	r := &request{fs: fs, cancel: cancel, header: &in.InHeader, op: "chattr", node: n}
	status := fs.attempt(r, false, func() error {
		op, err := r.admitAttrs(n)
		if err != nil {
			return err
		}
		defer op.End()
		fd, err := fs.openNode(n, unix.O_RDONLY|unix.O_NONBLOCK)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if !fs.opts.NoLocking && in.Cmd == unix.FS_IOC_SETFLAGS && startsFolding(fd, binary.NativeEndian.Uint32(flags)) {
			return unix.EOPNOTSUPP // as where the file system has no such directories
		}
		return fs.asKeeper(&in.InHeader, fd, func() error { return ioctlOn(fd, in.Cmd, flags) })
	})
	fs.notifyAttr(n) // the ctime: ext4 sets it before it refuses a flag
	return status
}

// ioctlOn carries out an ioctl on buf.
func ioctlOn(fd int, cmd uint32, buf []byte) error {
	// The kernel may write as much as the largest of them, whatever size the
	// caller's command named.
	var big [64]byte
	if len(buf) > len(big) {
		return unix.ENOTTY
	}
	copy(big[:], buf)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(cmd), uintptr(unsafe.Pointer(&big[0])))
	if errno != 0 {
		return errno
	}
	copy(buf, big[:])
	return nil
}

// checkFlags refuses to open a file for more than its flags allow, as may_open
// does in the kernel: for a file that passes nobody else does.
func checkFlags(st *unix.Statx_t, flags uint32) error {
	switch {
	case !writes(flags):
	case st.Attributes&unix.STATX_ATTR_IMMUTABLE != 0,
		appendOnly(st) && (flags&unix.O_TRUNC != 0 || flags&unix.O_APPEND == 0):
		return unix.EPERM
	}
	return nil
}

// flagsAllow is checkFlags for a file that may be on a file system that is read-only, of which
// the kernel speaks first. On some of these, as erofs, every file passes for immutable.
func (fs *FS) flagsAllow(n *node, st *unix.Statx_t, flags uint32) error {
	err := checkFlags(st, flags)
	if err == nil {
		return nil
	}
	fd, failed := fs.openNode(n, unix.O_PATH)
	if failed != nil {
		return err
	}
	defer unix.Close(fd)
	return cmp.Or(writable(fd), err)
}

// appendOnly reports whether a file may only grow.
func appendOnly(st *unix.Statx_t) bool { return st.Attributes&unix.STATX_ATTR_APPEND != 0 }
