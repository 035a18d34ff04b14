package fs

import (
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// createTries bounds how often Create begins again.
const createTries = 1000

// Create is open(2) of a file that is not there.
func (fs *FS) Create(cancel <-chan struct{}, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	fs.awaitRoom()
	for tries := 1; ; tries++ {
		status, gone := fs.createOnce(cancel, in, name, out)
		if !gone || tries == createTries {
			return status
		}
		*out = fuse.CreateOut{}
	}
}

// createOnce is Create. gone says that what was in the way of the file, as one that
// somebody else had made, is there no more: it is to be made after all.
func (fs *FS) createOnce(cancel <-chan struct{}, in *fuse.CreateIn, name string, out *fuse.CreateOut) (status fuse.Status, gone bool) {
	r := &request{fs: fs, cancel: cancel, header: &in.InHeader, op: "create", name: name}
	if status := fs.findParent(r); status != fuse.OK {
		return status, false
	}
	if fs.createCandidate(r, in, out) {
		return fuse.OK, false
	}
	lockFile := fs.isLockName(r.parent, name)
	if fs.namedStale(r.header, lockFile, name, r.parent) {
		return fuse.Status(unix.ESTALE), false
	}
	m := &making{r: r, protocol: "create"}
	if in.Flags&unix.O_EXCL == 0 {
		m.protocol = "open" // A6
		r.quiet = lockFile  // a waiter is not refused (A10)
	}
	candidate := !lockFile && fs.mayBeCandidate(name) && !fs.opts.Observe && r.process() != nil && fs.isCandidateName(name, r.process())
	r.quiet = r.quiet || candidate // or it is refused to nobody
	exists := false
	status = fs.attempt(r, false, func() error {
		err := fs.create(m, in, out)
		exists = err == unix.EEXIST && in.Flags&unix.O_EXCL == 0
		return err
	})
	if candidate && status == fuse.EBUSY { // somebody has acquired the directory meanwhile (A9)
		if fs.createCandidate(r, in, out) {
			return fuse.OK, false
		}
		return status, fs.table.MayHold(r.process(), r.parent.dir) // it is free again
	}
	if status == fuse.Status(unix.EEXIST) && !exists && m.protocol == "open" && r.errno == status {
		return fs.createPrivateLockFile(r, in, out), false
	}
	if exists {
		// It is in the backing and the kernel did not know: so it has not asked who may
		// open it, and whether it is a file at all. It does so when it looks again.
		if in.Pid == 0 || fs.stale.found(true, false, r.header, name, r.parent) {
			return fuse.Status(unix.ESTALE), false
		}
		return fs.createExisting(r, in, out)
	}
	if status == fuse.OK {
		fs.fillEntry(&in.InHeader, &out.EntryOut, m.node, &m.st, lockFile || fs.mayBeCandidate(name))
	}
	return status, false
}

// newFileHandle is the handle of a file that is about to be made.
func (fs *FS) newFileHandle(in *fuse.CreateIn) *handle {
	return &handle{uid: fs.openerOf(&in.InHeader, in.Flags), tid: in.Pid, flags: in.Flags &^ (unix.O_CREAT | unix.O_EXCL | unix.O_TRUNC | unix.O_TMPFILE)}
}

func (fs *FS) create(m *making, in *fuse.CreateIn, out *fuse.CreateOut) error {
	h := fs.newFileHandle(in)
	r, fd, record := m.r, -1, uint64(0)
	r.admitted.handle = h
	lockFile := fs.isLockName(r.parent, r.name)
	candidate := false
	if !lockFile && fs.mayBeCandidate(r.name) {
		p, err := r.must()
		if err != nil {
			return err
		}
		candidate = fs.isCandidateName(r.name, p)
	}
	m.quiet = candidate
	m.before = func() (err error) {
		switch {
		case lockFile:
			h.opener, err = r.opener()
			h.by = link{r.parent, r.name}
		case writes(in.Flags):
			h.lock, err = r.openForWrite(lockstate.Change{
				Dirs: m.covered(fs), Quiet: candidate,
			}, r.name)
		}
		if candidate && err == nil {
			record = fs.announceCandidate(r)
		}
		return err
	}
	m.do = func(dir int) error {
		return fs.asMaker(r.header, r.parent, dir, in.Mode, in.Umask, func(mode uint32) (err error) {
			// Read-only, whatever the caller asked for: a descriptor that
			// may write comes with the mode of the handle.
			flags := unix.O_RDONLY | unix.O_NONBLOCK
			if !fs.privileged && writes(h.flags) {
				flags = toOpenAgain(h.flags)
			}
			fd, err = openAt(dir, r.name, flags|unix.O_CREAT|unix.O_EXCL, mode)
			return err
		})
	}
	m.seen = func(dir int) error {
		if record != 0 {
			fs.noteCandidate(r, h, fs.identityOf(&m.st), record)
			record = 0
		}
		taken := fd
		fd = -1
		return fs.opened(m.node, h, taken, &m.st, &out.OpenOut)
	}
	err := fs.make(m)
	if err != nil {
		fs.cands.unrecord(record)
		drop(fd)
		fs.abandon(h)
	}
	return err
}

// mayOpen returns an error if the caller could not open n, as far as the backing can say:
// the kernel does not know that it is there.
func (fs *FS) mayOpen(h *fuse.InHeader, n *node, flags uint32) error {
	switch {
	case n == nil || !n.isFile():
		return unix.ESTALE
	case n.candidate().private():
		return nil
	}
	may := uint32(unix.R_OK)
	switch flags & unix.O_ACCMODE {
	case unix.O_WRONLY:
		may = unix.W_OK
	case unix.O_RDWR:
		may |= unix.W_OK
	}
	if flags&unix.O_TRUNC != 0 {
		may |= unix.W_OK
	}
	return fs.withRightsOf(h, func() error {
		fs.ns.RLock()
		defer fs.ns.RUnlock()
		return fs.at(n, func(p place) error {
			return unix.Faccessat2(p.fd, p.name, may, unix.AT_EACCESS|unix.AT_SYMLINK_NOFOLLOW|unix.AT_EMPTY_PATH)
		})
	})
}

// createExisting opens a file that Create met in the backing, unless it is gone.
func (fs *FS) createExisting(r *request, in *fuse.CreateIn, out *fuse.CreateOut) (status fuse.Status, gone bool) {
	status = fs.Lookup(r.cancel, r.header, r.name, &out.EntryOut)
	if status == fuse.OK && out.EntryOut.NodeId == 0 {
		status = fuse.ENOENT
	}
	if status != fuse.OK {
		return status, status == fuse.ENOENT
	}
	open := &fuse.OpenIn{InHeader: *r.header, Flags: in.Flags}
	open.NodeId = out.EntryOut.NodeId
	if fs.idmap {
		open.Uid, open.Gid = procid.NoID, procid.NoID // as in other requests to open
	}
	n := fs.nodes.get(open.NodeId)
	if status = statusOf(fs.mayOpen(r.header, n, in.Flags)); status == fuse.OK {
		status = fs.Open(r.cancel, open, &out.OpenOut)
		n = fs.nodes.get(open.NodeId)
	}
	if status != fuse.OK {
		gone = status == fuse.ENOENT || status == fuse.Status(unix.ESTALE) && (n == nil || n.vanished() || n.isUnlinked())
		fs.nodes.forget(open.NodeId, 1)
		if gone {
			fs.stale.takeBack(r.header)
		}
	} else if n != nil && n.mayBeMapped() {
		out.SetAttrTimeout(0) // they were read before the open
	}
	return status, gone
}

// Tmpfile is open(2) with O_TMPFILE.
func (fs *FS) Tmpfile(cancel <-chan struct{}, in *fuse.CreateIn, out *fuse.CreateOut) fuse.Status {
	parent := fs.nodes.get(in.NodeId)
	if parent == nil {
		return fs.notFound(in.NodeId)
	}
	if fs.namedStale(&in.InHeader, false, "", parent) {
		return fuse.Status(unix.ESTALE)
	}
	r := &request{fs: fs, cancel: cancel, header: &in.InHeader, op: "tmpfile", node: parent}
	var st unix.Statx_t
	h := fs.newFileHandle(in)
	return fs.attempt(r, false, func() (err error) {
		d, err := fs.back.dir(parent)
		if err != nil {
			return err
		}
		defer d.release()
		r.admitted.handle = h
		if h.lock, err = r.openForWrite(lockstate.Change{Dirs: []*lockstate.Dir{parent.dir}}, ""); err != nil {
			return err
		}
		// It has no name: it is beneath nothing until it is linked.
		h.lock.Moved("")
		fd, keep, err := fs.makeTmpfile(in, parent, d.fd, &st)
		if err != nil {
			fs.abandon(h)
			return err
		}
		n := fs.nodes.anonymous(&st, keep, nil)
		if err := fs.opened(n, h, fd, &st, &out.OpenOut); err != nil {
			fs.abandon(h)
			fs.nodes.forget(n.id, 1)
			return err
		}
		fs.fillEntry(&in.InHeader, &out.EntryOut, n, &st, false)
		return nil
	})
}

// makeTmpfile makes a file without a name and returns a descriptor of it, which
// only reads unless an ordinary user mounted, and one that stands for it.
func (fs *FS) makeTmpfile(in *fuse.CreateIn, parent *node, dir int, st *unix.Statx_t) (fd, keep int, err error) {
	made := -1
	flags := unix.O_RDWR
	if !fs.privileged {
		flags = toOpenAgain(in.Flags)
	}
	flags |= unix.O_TMPFILE | int(in.Flags)&unix.O_EXCL
	err = fs.asMaker(&in.InHeader, parent, dir, in.Mode, in.Umask, func(mode uint32) (err error) {
		made, err = openAt(dir, ".", flags, mode)
		return err
	})
	if err != nil {
		return -1, -1, err
	}
	defer func() { drop(made) }()
	if err := statAt(made, "", st); err != nil {
		return -1, -1, err
	}
	if keep, err = unix.Openat(fs.back.proc, procName(made), unix.O_PATH|unix.O_CLOEXEC, 0); err != nil {
		return -1, -1, err
	}
	if !fs.privileged {
		fd, made = made, -1
		return fd, keep, nil
	}
	if fd, err = fs.back.open(place{fd: made}, unix.O_RDONLY|unix.O_NONBLOCK); err != nil {
		unix.Close(keep)
		return -1, -1, err
	}
	return fd, keep, nil
}
