//go:build linux

package main

import (
	"fmt"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A dir is a directory whose entries are worked on by raw system calls: without
// the bookkeeping of Go's os package, which would be the same for all subjects,
// but would make the ratios look better than they are.
type dir struct{ fd uintptr }

func openDir(path string) (dir, error) {
	fd, err := unix.Open(path, unix.O_DIRECTORY|unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return dir{}, fmt.Errorf("open %s: %w", path, err)
	}
	return dir{uintptr(fd)}, nil
}

// A cname is a file name that ends in NUL.
type cname []byte

func (n cname) ptr() uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(n))) }

func cstring(s string) cname { return append(cname(s), 0) }

// names are n names with a prefix.
func names(prefix string, n int) []cname {
	out := make([]cname, n)
	for i := range out {
		out[i] = cstring(fmt.Sprintf("%s%06d", prefix, i))
	}
	return out
}

// call does a system call on an entry.
func call(what string, n cname, trap, a1, a2, a3, a4, a5 uintptr) (uintptr, error) {
	r, _, errno := syscall.RawSyscall6(trap, a1, a2, a3, a4, a5, 0)
	if errno != 0 {
		return 0, fmt.Errorf("%s %s: %w", what, n[:len(n)-1], errno)
	}
	return r, nil
}

func (d dir) open(n cname, flags, mode int) (uintptr, error) {
	return call("open", n, unix.SYS_OPENAT, d.fd, n.ptr(), uintptr(flags|unix.O_CLOEXEC), uintptr(mode), 0)
}

func (d dir) create(n cname) error {
	fd, err := d.open(n, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY, 0o644)
	if err == nil {
		err = closeFD(n, fd)
	}
	return err
}

func closeFD(n cname, fd uintptr) error {
	_, err := call("close", n, unix.SYS_CLOSE, fd, 0, 0, 0, 0)
	return err
}

func (d dir) openClose(n cname) error {
	fd, err := d.open(n, unix.O_RDONLY, 0)
	if err == nil {
		err = closeFD(n, fd)
	}
	return err
}

func (d dir) stat(n cname, buf *unix.Statx_t) error {
	_, err := call("statx", n, unix.SYS_STATX, d.fd, n.ptr(), unix.AT_SYMLINK_NOFOLLOW, unix.STATX_BASIC_STATS, uintptr(unsafe.Pointer(buf)))
	return err
}

var here = cstring(".")

func (d dir) statfs(buf *unix.Statfs_t) error {
	_, err := call("fstatfs", here, unix.SYS_FSTATFS, d.fd, uintptr(unsafe.Pointer(buf)), 0, 0, 0)
	return err
}

func (d dir) chmod(n cname, mode uintptr) error {
	_, err := call("chmod", n, unix.SYS_FCHMODAT, d.fd, n.ptr(), mode, 0, 0)
	return err
}

func (d dir) rename(n, to cname) error {
	_, err := call("rename", n, unix.SYS_RENAMEAT2, d.fd, n.ptr(), d.fd, to.ptr(), 0)
	return err
}

func (d dir) link(n, to cname) error {
	_, err := call("link", n, unix.SYS_LINKAT, d.fd, n.ptr(), d.fd, to.ptr(), 0)
	return err
}

func (d dir) unlink(n cname) error {
	_, err := call("unlink", n, unix.SYS_UNLINKAT, d.fd, n.ptr(), 0, 0, 0)
	return err
}

func (d dir) mkdir(n cname) error {
	_, err := call("mkdir", n, unix.SYS_MKDIRAT, d.fd, n.ptr(), 0o755, 0, 0)
	return err
}

func (d dir) rmdir(n cname) error {
	_, err := call("rmdir", n, unix.SYS_UNLINKAT, d.fd, n.ptr(), unix.AT_REMOVEDIR, 0, 0)
	return err
}

// transfer reads or writes all of buf, at an offset.
func transfer(trap uintptr, fd uintptr, buf []byte, at int64) error {
	for len(buf) > 0 {
		n, _, errno := syscall.RawSyscall6(trap, fd, uintptr(unsafe.Pointer(unsafe.SliceData(buf))), uintptr(len(buf)), uintptr(at), 0, 0)
		if errno != 0 {
			return errno
		}
		if n == 0 {
			return fmt.Errorf("the file ends at byte %d", at)
		}
		buf, at = buf[n:], at+int64(n)
	}
	return nil
}
