package fs

import (
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// createPrivateLockFile serves open(O_CREAT) of a lock file that is not there,
// in a directory that somebody else holds: the caller gets one of its own, so
// that it can try to lock it, or wait (A10).
func (fs *FS) createPrivateLockFile(r *request, in *fuse.CreateIn, out *fuse.CreateOut) fuse.Status {
	if r.process() == nil || !fs.openPrivate(r, in, out, true) {
		return fuse.Status(unix.EEXIST)
	}
	return fuse.OK
}

// settleLockFile gives a private lock file its place in the backing, once its
// opener has got the directory: it becomes the lock file that is there by now,
// if those who have it open could open that one by name, or a new one. The
// caller holds FS.ns and the directory.
func (fs *FS) settleLockFile(by *handle) error {
	c := by.cand
	// Unlike another candidate's, this mutex is never held by who waits for
	// FS.ns.
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.private() {
		return nil // by another of its handles
	}
	d, err := fs.back.dir(c.parent)
	if err != nil {
		return err
	}
	defer d.release()
	for made := (identity{}); ; {
		removals, added := fs.nodes.removalsOf(c.parent), fs.nodes.added.Load()
		fd, st, err := c.openLockFileLocked(d.fd, by.rights, &made)
		if err == unix.EEXIST {
			continue // somebody else has made it
		}
		if err != nil {
			return err
		}
		n := fs.nodes.settle(c.node, &st, c.parent, []string{c.name}, removals, added)
		if n != nil {
			c.settleLocked(n, fd, &st)
			unix.Close(fd)
			fs.cands.drop(c)
			defer fs.notifyDir(c.parent)
			return nil
		}
		unix.Close(fd)
	}
}

// openLockFileLocked returns a descriptor of the lock file that c becomes, and
// makes one where there is none. made is which one it has made already.
func (c *candidate) openLockFileLocked(dir int, by *rights, made *identity) (fd int, st unix.Statx_t, err error) {
	fd, err = openAt(dir, c.name, unix.O_PATH, 0)
	if err == unix.ENOENT {
		if fd, err = c.makeLockFileLocked(dir, by); err != nil {
			return -1, st, err
		}
		if err = statAt(fd, "", &st); err == nil {
			*made = c.fs.identityOf(&st)
		}
	} else if err == nil {
		if err = statAt(fd, "", &st); err == nil && c.fs.identityOf(&st) != *made {
			err = c.mayOpenLocked(dir, fd, &st)
		}
	}
	if err != nil {
		drop(fd)
		return -1, st, err
	}
	return fd, st, nil
}

// makeLockFileLocked makes the lock file, with the rights of who opened c.
func (c *candidate) makeLockFileLocked(dir int, by *rights) (fd int, err error) {
	flags := unix.O_RDONLY | unix.O_NONBLOCK
	if !c.fs.privileged {
		flags = toOpenAgain(0)
	}
	open := func() (err error) {
		fd, err = openAt(dir, c.name, flags|unix.O_CREAT|unix.O_EXCL, c.mode&0o7777)
		return err
	}
	if by.UID == 0 || by.Mapped { // of whom the kernel has found that he may
		err = c.fs.asUser(by.UID, by.GID, open)
	} else {
		err = c.fs.withRights(by, open)
	}
	if err != nil {
		return -1, err
	}
	return fd, nil
}

// mayOpenLocked returns what each that has c open would hear if it opened the
// lock file by name, as in open(2). fd is a descriptor of that, st its attributes.
func (c *candidate) mayOpenLocked(dir, fd int, st *unix.Statx_t) error {
	switch uint32(st.Mode) & unix.S_IFMT {
	case unix.S_IFREG:
	case unix.S_IFLNK:
		return unix.ELOOP
	case unix.S_IFDIR:
		return unix.EISDIR
	default:
		return unix.ENXIO
	}
	for _, h := range c.handles {
		mode := uint32(unix.R_OK)
		switch h.flags & unix.O_ACCMODE {
		case unix.O_WRONLY:
			mode = unix.W_OK
		case unix.O_RDWR:
			mode = unix.R_OK | unix.W_OK
		}
		err := checkFlags(st, h.flags)
		if err == nil && h.flags&unix.O_NOATIME != 0 && (h.rights.UID != 0 || h.rights.Mapped) && h.rights.UID != st.Uid {
			err = unix.EPERM
		}
		if err == nil {
			err = c.fs.withRights(h.rights, func() error {
				if err := unix.Faccessat2(dir, "", unix.X_OK, unix.AT_EACCESS|unix.AT_EMPTY_PATH); err != nil {
					return err
				}
				return unix.Faccessat2(fd, "", mode, unix.AT_EACCESS|unix.AT_EMPTY_PATH)
			})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// setPrivateLockFile refuses changes of a private lock file, which is not the
// caller's to change. A truncation succeeds and changes nothing (A10). What
// prepares for the lock changes the mode that the lock file will have if it is
// made for this one.
func (fs *FS) setPrivateLockFile(cancel <-chan struct{}, in *fuse.SetAttrIn, c *candidate, out *fuse.AttrOut) fuse.Status {
	size, truncates := in.GetSize()
	if truncates {
		truncates = size == 0 && in.Valid&(fuse.FATTR_MODE|fuse.FATTR_UID|fuse.FATTR_GID|fuse.FATTR_ATIME|fuse.FATTR_MTIME) == 0
	}
	if !truncates && !preparesLock(in) {
		r := &request{fs: fs, cancel: cancel, header: &in.InHeader, op: setAttrName(in), parent: c.parent, name: c.name}
		return fs.deny(r, lockstate.ErrHeld, nil)
	}
	if mode, ok := in.GetMode(); ok {
		c.mu.Lock()
		c.mode = c.mode&unix.S_IFMT | mode&0o7777
		c.mu.Unlock()
	}
	return c.attr(out)
}
