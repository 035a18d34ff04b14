package fs

import (
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Extended attributes of the backing are reached by a name below a directory descriptor
// where the kernel can (Linux 6.13), else through /proc.

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

// xattr calls at, or where the kernel cannot, or p has no name, by with a path.
func (b *backing) xattr(p place, at func() (int, error), by func(path string) (int, error)) (size int, err error) {
	if p.name != "" && !b.oldXattrs.Load() {
		if size, err = at(); err != unix.ENOSYS {
			return size, err
		}
		b.oldXattrs.Store(true)
	}
	err = p.withFD(func(fd int) (err error) {
		size, err = by(procPath(fd))
		return err
	})
	return size, err
}

// getxattr is getxattr(2) for the file at p.
func (b *backing) getxattr(p place, attr string, dest []byte) (size int, err error) {
	return b.xattr(p,
		func() (int, error) { return xattrCall(sysGetxattrat, p, attr, dest, 0) },
		func(path string) (int, error) { return unix.Getxattr(path, attr, dest) })
}

// listxattr is listxattr(2) for the file at p.
func (b *backing) listxattr(p place, dest []byte) (size int, err error) {
	return b.xattr(p,
		func() (int, error) { return listxattrat(p, dest) },
		func(path string) (int, error) { return unix.Listxattr(path, dest) })
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
	_, err := b.xattr(p,
		func() (int, error) { return xattrCall(sysSetxattrat, p, attr, data, uint32(flags)) },
		func(path string) (int, error) { return 0, unix.Setxattr(path, attr, data, flags) })
	return err
}

// removexattr is removexattr(2) for the file at p.
func (b *backing) removexattr(p place, attr string) error {
	_, err := b.xattr(p,
		func() (int, error) { return xattrCall(sysRemovexattrat, p, attr, nil, 0) }, // which looks at no value
		func(path string) (int, error) { return 0, unix.Removexattr(path, attr) })
	return err
}

func xattrCall(call uintptr, p place, attr string, value []byte, flags uint32) (int, error) {
	n, err := unix.BytePtrFromString(p.name)
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
	size, _, errno := unix.Syscall6(call, uintptr(p.fd), uintptr(unsafe.Pointer(n)), unix.AT_SYMLINK_NOFOLLOW,
		uintptr(unsafe.Pointer(a)), uintptr(unsafe.Pointer(&args)), unsafe.Sizeof(args))
	if errno != 0 {
		return 0, errno
	}
	return int(size), nil
}

func listxattrat(p place, dest []byte) (int, error) {
	n, err := unix.BytePtrFromString(p.name)
	if err != nil {
		return 0, err
	}
	var to unsafe.Pointer
	if len(dest) > 0 {
		to = unsafe.Pointer(&dest[0])
	}
	size, _, errno := unix.Syscall6(sysListxattrat, uintptr(p.fd), uintptr(unsafe.Pointer(n)), unix.AT_SYMLINK_NOFOLLOW,
		uintptr(to), uintptr(len(dest)), 0)
	if errno != 0 {
		return 0, errno
	}
	return int(size), nil
}
