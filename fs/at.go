package fs

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

const statxMask = unix.STATX_BASIC_STATS | unix.STATX_BTIME

// statAt returns the attributes of name below dir, or of dir itself if name is
// empty. It never follows a symlink (M3).
func statAt(dir int, name string, st *unix.Statx_t) error {
	return ignoringEINTR(func() error {
		return unix.Statx(dir, name, unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW|unix.AT_STATX_SYNC_AS_STAT, statxMask, st)
	})
}

// openAt opens one name below dir, never through a symlink (M3).
func openAt(dir int, name string, flags int, mode uint32) (int, error) {
	var fd int
	err := ignoringEINTR(func() (err error) {
		fd, err = unix.Openat(dir, name, flags|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NOCTTY, mode)
		return err
	})
	if err != nil {
		return -1, err
	}
	return fd, nil
}

// openBeneath opens the directory that names lead to from dir, one at a time, or dir itself
// again if there are none.
func openBeneath(dir int, names []string, flags int) (int, error) {
	if len(names) == 0 {
		return openAt(dir, ".", flags|unix.O_DIRECTORY, 0)
	}
	fd := dir
	for _, name := range names {
		next, err := openAt(fd, name, flags|unix.O_DIRECTORY, 0)
		if fd != dir {
			unix.Close(fd)
		}
		if err != nil {
			return -1, err
		}
		fd = next
	}
	return fd, nil
}

// dup returns another descriptor of what is open as fd.
func dup(fd int) (int, error) { return unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3) }

// isDirectory reports whether these are the attributes of a directory.
func isDirectory(st *unix.Statx_t) bool { return uint32(st.Mode)&unix.S_IFMT == unix.S_IFDIR }

// devName is the device that a file is on, as [MountEntry.Dev] has it.
func devName(st *unix.Statx_t) string { return fmt.Sprintf("%d:%d", st.Dev_major, st.Dev_minor) }

// fsType returns f_type of statfs(2) for the file system of a descriptor, 0 if it can't
// be had.
func fsType(fd int) int64 {
	var st unix.Statfs_t
	if ignoringEINTR(func() error { return unix.Fstatfs(fd, &st) }) != nil {
		return 0
	}
	return int64(st.Type)
}

// ignoringEINTR repeats a system call that a signal to the daemon interrupted.
// The Go runtime sends itself such signals.
func ignoringEINTR(f func() error) error {
	for {
		if err := f(); err != unix.EINTR {
			return err
		}
	}
}

// A place is where the backing has a file: a name below a directory
// descriptor, or a descriptor of the file itself and no name.
type place struct {
	fd   int
	name string
	ref  *dirFD // keeps fd open
}

func (p place) done() {
	if p.ref != nil {
		p.ref.release()
	}
}

func (p place) stat(st *unix.Statx_t) error { return statAt(p.fd, p.name, st) }

// withFD calls f with a descriptor of the file itself, which permits nothing but to name
// it.
func (p place) withFD(f func(fd int) error) error {
	if p.name == "" {
		return f(p.fd)
	}
	fd, err := openAt(p.fd, p.name, unix.O_PATH, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return f(fd)
}

// open opens the file. Flags that would create it are the caller's business.
func (b *backing) open(p place, flags int) (int, error) {
	if p.name != "" {
		return openAt(p.fd, p.name, flags, 0)
	}
	// A descriptor is opened again through /proc; the link there leads to
	// the file itself and nowhere else.
	var fd int
	err := ignoringEINTR(func() (err error) {
		fd, err = unix.Openat(b.proc, procName(p.fd), flags&^unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return -1, err
	}
	return fd, nil
}

// A backing is the real content of the static directory, reached only through
// descriptors (M3).
type backing struct {
	root int // opened before mounting
	proc int // /proc/self/fd
	dirs dirCache

	awaiting sync.RWMutex // by who waits in awaitInode, and knows no other end

	opensByIno bool // see there

	oldXattrs atomic.Bool // there is no getxattrat(2), which came with Linux 6.13
	oldChmod  atomic.Bool // there is no fchmodat2(2), which came with Linux 6.6
}

// writable returns EROFS if a file is on a mount, or a file system, that is read-only.
func writable(fd int) error {
	if err := unix.Faccessat2(fd, "", unix.W_OK, unix.AT_EACCESS|unix.AT_EMPTY_PATH); err == unix.EROFS {
		return err
	}
	return nil
}

// awaitThaw returns when the backing takes changes, or refuses them: while it is
// frozen (ioctl FIFREEZE), the kernel keeps all waiting.
func (b *backing) awaitThaw() {
	b.awaitInode(b.root)
}

// awaitInode has the kernel lock an inode that is open, and let go of it.
func (b *backing) awaitInode(fd int) {
	b.awaiting.RLock()
	defer b.awaiting.RUnlock()
	// No filesystem has an attribute without a namespace.
	unix.Fsetxattr(fd, "stagefs", nil, 0)
}

// procName is what a descriptor is called below backing.proc.
func procName(fd int) string { return strconv.Itoa(fd) }

// procPath is a path to what is open, for calls that take no descriptor.
func procPath(fd int) string { return "/proc/self/fd/" + procName(fd) }

// pathOfFD is where the kernel sees what is open, if anything leads there.
func pathOfFD(fd int) (string, error) { return os.Readlink(procPath(fd)) }

// dir returns an open descriptor of a directory. The caller holds FS.ns, so
// that no name on the way changes.
func (b *backing) dir(n *node) (*dirFD, error) {
	if !n.isDir() {
		return nil, unix.ENOTDIR
	}
	if d := b.dirs.get(n); d != nil {
		return d, nil
	}
	p, err := b.place(n)
	if err != nil {
		return nil, err
	}
	defer p.done()
	if p.name == "" {
		fd, err := dup(p.fd)
		if err != nil {
			return nil, err
		}
		return b.dirs.put(n, fd), nil
	}
	fd, err := openAt(p.fd, p.name, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	var st unix.Statx_t
	if err := statAt(fd, "", &st); err != nil || n.tab.identityOf(&st) != n.key() {
		unix.Close(fd)
		return nil, errors.Join(err, unix.ESTALE)
	}
	return b.dirs.put(n, fd), nil
}

// place returns where n is. The caller holds FS.ns and calls done.
func (b *backing) place(n *node) (place, error) { return b.placeAt(n.location()) }

func (b *backing) placeAt(parent *node, name string, fd int) (place, error) {
	switch {
	case fd >= 0:
		return place{fd: fd}, nil
	case parent == nil:
		return place{}, unix.ESTALE
	}
	d, err := b.dir(parent)
	if err != nil {
		return place{}, err
	}
	return place{fd: d.fd, name: name, ref: d}, nil
}

// openPath opens a directory of the backing by its path, one name at a time. The caller
// holds FS.ns, or what is renamed may seem missing.
func (fs *FS) openPath(path string) (int, error) {
	return openBeneath(fs.back.root, split(path), unix.O_RDONLY)
}

// openUnread is openPath for who reads a directory that nobody has asked for: where the
// kernel lets the daemon, that does not change the access time.
func (fs *FS) openUnread(path string) (int, error) {
	fd, err := openBeneath(fs.back.root, split(path), unix.O_RDONLY|unix.O_NOATIME)
	if err == unix.EPERM { // one of these is another user's
		return fs.openPath(path)
	}
	return fd, err
}

// statIn returns the attributes of name in a directory of the backing, or those of the
// directory itself if name is empty. The same goes for it as for openPath.
func (fs *FS) statIn(dir, name string, st *unix.Statx_t) error {
	fd, err := fs.openPath(dir)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return statAt(fd, name, st)
}
