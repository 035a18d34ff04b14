package fs

import (
	"runtime"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// An xattrAt reaches extended attributes of the backing: by a name below a
// directory descriptor where the kernel can (Linux 6.13), else through /proc.
type xattrAt struct {
	old atomic.Bool // the kernel cannot
}

// xattrArgs is struct xattr_args of linux/xattr.h.
type xattrArgs struct {
	value uint64
	size  uint32
	flags uint32
}

// From asm-generic/unistd.h; x/sys has no calls for them.
const (
	sysSetxattrat    = 463
	sysGetxattrat    = 464
	sysListxattrat   = 465
	sysRemovexattrat = 466
)

// getxattr is getxattr(2) for the file at p.
func (b *backing) getxattr(p place, attr string, dest []byte) (size int, err error) {
	if p.name != "" && !b.xattrs.old.Load() {
		size, err = getxattrat(p.fd, p.name, attr, dest)
		if err != unix.ENOSYS {
			return size, err
		}
		b.xattrs.old.Store(true)
	}
	err = p.withPath(func(path string) (err error) {
		size, err = unix.Getxattr(path, attr, dest)
		return err
	})
	return size, err
}

// listxattr is listxattr(2) for the file at p.
func (b *backing) listxattr(p place, dest []byte) (size int, err error) {
	if p.name != "" && !b.xattrs.old.Load() {
		size, err = listxattrat(p.fd, p.name, dest)
		if err != unix.ENOSYS {
			return size, err
		}
		b.xattrs.old.Store(true)
	}
	err = p.withPath(func(path string) (err error) {
		size, err = unix.Listxattr(path, dest)
		return err
	})
	return size, err
}

// listXattrs returns all that listxattr shows of the file at p.
func (b *backing) listXattrs(p place) ([]byte, error) {
	for {
		size, err := b.listxattr(p, nil)
		if err != nil || size == 0 {
			return nil, err
		}
		list := make([]byte, size)
		if size, err = b.listxattr(p, list); err != unix.ERANGE { // or it has just grown
			return list[:max(size, 0)], err
		}
	}
}

// setxattr is setxattr(2) for the file at p.
func (b *backing) setxattr(p place, attr string, data []byte, flags int) error {
	if p.name != "" && !b.xattrs.old.Load() {
		if err := setxattrat(p.fd, p.name, attr, data, flags); err != unix.ENOSYS {
			return err
		}
		b.xattrs.old.Store(true)
	}
	return p.withPath(func(path string) error { return unix.Setxattr(path, attr, data, flags) })
}

// removexattr is removexattr(2) for the file at p.
func (b *backing) removexattr(p place, attr string) error {
	if p.name != "" && !b.xattrs.old.Load() {
		if err := removexattrat(p.fd, p.name, attr); err != unix.ENOSYS {
			return err
		}
		b.xattrs.old.Store(true)
	}
	return p.withPath(func(path string) error { return unix.Removexattr(path, attr) })
}

// withPath calls f with a path by which system calls that know no descriptor
// reach the file.
func (p place) withPath(f func(path string) error) error {
	fd := p.fd
	if p.name != "" {
		var err error
		if fd, err = openAt(p.fd, p.name, unix.O_PATH, 0); err != nil {
			return err
		}
		defer unix.Close(fd)
	}
	return f(procPath(fd))
}

func getxattrat(dir int, name, attr string, dest []byte) (int, error) {
	return xattrCall(sysGetxattrat, dir, name, attr, dest, 0)
}

func setxattrat(dir int, name, attr string, data []byte, flags int) error {
	_, err := xattrCall(sysSetxattrat, dir, name, attr, data, uint32(flags))
	return err
}

func xattrCall(call uintptr, dir int, name, attr string, value []byte, flags uint32) (int, error) {
	n, err := unix.BytePtrFromString(name)
	if err != nil {
		return 0, err
	}
	a, err := unix.BytePtrFromString(attr)
	if err != nil {
		return 0, err
	}
	// The kernel reads the address from memory, where the garbage collector
	// does not see it: value stays reachable until after the call.
	args := xattrArgs{size: uint32(len(value)), flags: flags}
	var pin runtime.Pinner
	if len(value) > 0 {
		pin.Pin(&value[0])
		args.value = uint64(uintptr(unsafe.Pointer(&value[0])))
	}
	defer pin.Unpin()
	size, _, errno := unix.Syscall6(call, uintptr(dir), uintptr(unsafe.Pointer(n)), unix.AT_SYMLINK_NOFOLLOW,
		uintptr(unsafe.Pointer(a)), uintptr(unsafe.Pointer(&args)), unsafe.Sizeof(args))
	if errno != 0 {
		return 0, errno
	}
	return int(size), nil
}

func listxattrat(dir int, name string, dest []byte) (int, error) {
	n, err := unix.BytePtrFromString(name)
	if err != nil {
		return 0, err
	}
	var to unsafe.Pointer
	if len(dest) > 0 {
		to = unsafe.Pointer(&dest[0])
	}
	size, _, errno := unix.Syscall6(sysListxattrat, uintptr(dir), uintptr(unsafe.Pointer(n)), unix.AT_SYMLINK_NOFOLLOW,
		uintptr(to), uintptr(len(dest)), 0)
	if errno != 0 {
		return 0, errno
	}
	return int(size), nil
}

func removexattrat(dir int, name, attr string) error {
	n, err := unix.BytePtrFromString(name)
	if err != nil {
		return err
	}
	a, err := unix.BytePtrFromString(attr)
	if err != nil {
		return err
	}
	_, _, errno := unix.Syscall6(sysRemovexattrat, uintptr(dir), uintptr(unsafe.Pointer(n)), unix.AT_SYMLINK_NOFOLLOW,
		uintptr(unsafe.Pointer(a)), 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}
