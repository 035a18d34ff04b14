package fs

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// ErrNoPassthrough says why the kernel cannot go to the backing itself.
var ErrNoPassthrough = errors.New("data goes through the daemon")

// CheckPassthrough reports why the file system of dir does not do for
// passthrough, which needs to know whether a file may be written to (W3).
func CheckPassthrough(dir string) error {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return withProbe(fd, func(int) error { return nil })
}

// withProbe tries leases on a file without a name below dir, and calls do with
// a read-only descriptor of it.
func withProbe(dir int, do func(fd int) error) error {
	if inMemory(dir) {
		return fmt.Errorf("%w: a program could go on writing to files in memory (tmpfs) after it has unmapped them", ErrNoPassthrough)
	}
	if !mayItself(unix.CAP_LEASE) { // see capabilities(7): containers are mostly without
		return fmt.Errorf("%w: without CAP_LEASE nobody tells whether other users' files are open for writing", ErrNoPassthrough)
	}
	w, err := unix.Openat(dir, ".", unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("%w: no file without a name can be made: %w", ErrNoPassthrough, err)
	}
	fd, err := unix.Open(procPath(w), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		unix.Close(w)
		return fmt.Errorf("%w: %w", ErrNoPassthrough, err)
	}
	defer unix.Close(fd)
	refused := readLease(fd)
	unix.Close(w)
	if refused != unix.EAGAIN {
		return fmt.Errorf("%w: no lease tells whether a file is open for writing: %v", ErrNoPassthrough, refused)
	}
	if err := readLease(fd); err != nil {
		return fmt.Errorf("%w: leases do not work: %w", ErrNoPassthrough, err)
	}
	return do(fd)
}

// inMemory reports whether files are the memory that mappings of them are made of. Who
// registers that with io_uring keeps it when it is mapped no more, of which no lease
// tells; where files are written back, the kernel refuses that (Linux 6.5).
func inMemory(dir int) bool {
	kind := fsType(dir)
	return kind == unix.TMPFS_MAGIC || kind == unix.RAMFS_MAGIC
}

// readLease takes a read lease on fd and gives it back. It fails with EAGAIN if
// anybody has the file open for writing, or mapped so.
func readLease(fd int) error {
	err := ignoringEINTR(func() error {
		_, err := unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_RDLCK)
		return err
	})
	if err == nil {
		unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_UNLCK)
	}
	return err
}

// tryPassthrough turns passthrough on if the kernel and the backing can do it.
func (fs *FS) tryPassthrough() error {
	err := withProbe(fs.back.root, func(fd int) error {
		id, errno := fs.kernel.RegisterBackingFd(&fuse.BackingMap{Fd: int32(fd)})
		if errno != 0 {
			return fmt.Errorf("%w: %s", ErrNoPassthrough, whyNot(errno))
		}
		fs.kernel.UnregisterBackingFd(id)
		return nil
	})
	if err != nil {
		return err
	}
	fs.pass.dev = fs.root.dev
	fs.pass.on.Store(true)
	return nil
}

func whyNot(errno syscall.Errno) string {
	switch errno {
	case unix.EPERM:
		return "the kernel has no FUSE passthrough (Linux 6.9, CONFIG_FUSE_PASSTHROUGH), or no CAP_SYS_ADMIN"
	case unix.ENOTTY, unix.EINVAL:
		return "the kernel has no FUSE passthrough (Linux 6.9)"
	case unix.ELOOP:
		return "the directory is on a stacked file system"
	}
	return errno.Error()
}

// passing returns a handle of n that passes the daemon, or nil: if there is one, such
// a one of which no descriptor was closed yet.
func (fs *FS) passing(n *node) (found *handle) {
	fs.handles.any(func(h *handle) bool {
		if h.node != n || !h.mode.passes() {
			return false
		}
		found = h
		return !h.wasFlushed()
	})
	return found
}

// passesNoLonger reports whether all handles of n that pass the daemon have been
// closed once: they are about to be released.
func (fs *FS) passesNoLonger(n *node) bool {
	h := fs.passing(n)
	return h == nil || h.wasFlushed()
}

// namePassing adds to errMayMap who has n open in that way (W6): for one that only
// reads, no more than who called open(2) was noted.
func (fs *FS) namePassing(n *node, err error) error {
	h := fs.passing(n)
	if h == nil {
		return err
	}
	what := "reading"
	if writes(h.flags) {
		what = "writing"
	}
	p := h.openedBy()
	if p == nil {
		p = fs.procs.Glance(h.tid)
	}
	if p == nil {
		return fmt.Errorf("%w: thread %d opened it for %s", err, h.tid, what)
	}
	return fmt.Errorf("%w: pid %d opened it for %s", err, p.ID().Pid, what)
}
