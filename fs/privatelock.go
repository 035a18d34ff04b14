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
// or a new one. The caller holds FS.ns and the directory.
func (fs *FS) settleLockFile(r *request, c *candidate) error {
	d, err := fs.back.dir(c.parent)
	if err != nil {
		return err
	}
	defer d.release()
	fd, err := openAt(d.fd, c.name, unix.O_RDWR|unix.O_NONBLOCK, 0)
	if err == unix.ENOENT {
		err = fs.asCaller(r.header, func() (err error) {
			fd, err = openAt(d.fd, c.name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL, c.modeNow()&0o7777)
			return err
		})
	}
	if err != nil {
		return err
	}
	var st unix.Statx_t
	if err := statAt(fd, "", &st); err != nil {
		unix.Close(fd)
		return err
	}
	path, err := openAt(d.fd, c.name, unix.O_PATH, 0)
	if err != nil {
		unix.Close(fd)
		return err
	}
	fs.nodes.settle(c.node, &st, []link{{c.parent, c.name}}, path)
	defer fs.notifyDir(c.parent)
	// Unlike another candidate's, this mutex is never held by who waits for
	// FS.ns.
	c.mu.Lock()
	c.fd = fd
	c.won.Store(true)
	c.mu.Unlock()
	fs.cands.drop(c)
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

func (c *candidate) modeNow() uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mode
}
