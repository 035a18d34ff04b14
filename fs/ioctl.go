package fs

import (
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// ioctlRead carries out an ioctl that fills buf.
func ioctlRead(fd int, cmd uint32, buf []byte) fuse.Status {
	// The kernel may write as much as the largest of them, whatever size the
	// caller's command named.
	var big [64]byte
	if len(buf) > len(big) {
		return fuse.Status(unix.ENOTTY)
	}
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(cmd), uintptr(unsafe.Pointer(&big[0])))
	if errno != 0 {
		return fuse.Status(errno)
	}
	copy(buf, big[:])
	return fuse.OK
}
