package fs

import (
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// SetAttr is chmod, chown, truncate and utimensat.
func (fs *FS) SetAttr(cancel <-chan struct{}, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	if c := fs.control.node(in.NodeId); c != nil {
		return c.setAttr(in, out)
	}
	n := fs.nodes.get(in.NodeId)
	if n == nil {
		return fuse.Status(unix.ESTALE)
	}
	if n.candidate().private() {
		if n.candidate().lockFile {
			return fs.setPrivateLockFile(cancel, in, n.candidate(), out)
		}
		if status, ok := n.candidate().setAttr(in, out); ok {
			return status
		}
		n = fs.nodes.get(in.NodeId)
	}
	var h *handle
	if fh, ok := in.GetFh(); ok {
		h = fs.handles.get(fh, in.NodeId)
	}
	if h == nil && fs.changedStale(n, &in.InHeader, in.Valid&fuse.FATTR_SIZE != 0) {
		return fs.stale.gone(n.isFile(), &in.InHeader)
	}
	r := &request{fs: fs, cancel: cancel, header: &in.InHeader, op: setAttrName(in), node: n}
	r.quiet = preparesLock(in) && r.waitsWith(n)
	s := setting{r: r, in: in, n: n, h: h, prepares: r.quiet, keeps: fs.copiesUp(n, in)}
	status := fs.attempt(r, false, s.try)
	if status == fuse.Status(unix.ESTALE) && fs.nodes.get(in.NodeId) != n {
		return fs.SetAttr(cancel, in, out) // it was private a moment ago
	}
	switch {
	case status == fuse.Status(unix.ESTALE) && h == nil:
		return fs.stale.gone(n.isFile(), &in.InHeader) // by whatever
	case status == fuse.OK:
		fs.touched(r, n)
		if fs.modeToKeep(n, in) {
			fs.copyUps.given(in.Pid, n)
		}
	case status == fuse.EBUSY && s.refusal != nil && s.prepares:
		// A9, A10: succeeds and changes nothing
		if err := fs.stat(n, h, &s.st); err != nil {
			return statusOf(err)
		}
	default:
		return status
	}
	fs.fillAttr(&out.Attr, &s.st)
	fs.changedBeside(in.NodeId, n)
	if valid := fs.disguise(&in.InHeader, n, &out.Attr); in.NodeId == n.id {
		out.SetTimeout(valid)
	}
	return fuse.OK
}

// A setting is one SetAttr.
type setting struct {
	r  *request
	in *fuse.SetAttrIn
	n  *node
	h  *handle // nil: by name

	st      unix.Statx_t // what came of it
	refusal error        // by the gate, in the last try

	// prepares: it is what programs do to a lock file or a candidate before they lock or
	// link it, and is not to fail for being refused.
	prepares bool
	keeps    bool // an overlay's, which takes no suid and sgid bits and no capabilities away
}

func (s *setting) try() error {
	fs, r, in, n, h := s.r.fs, s.r, s.in, s.n, s.h
	s.refusal = nil
	// The right to truncate an open file was decided when it was opened.
	// So was that to write, which takes privileges away: a request that
	// sets nothing, as the kernel makes it then, looks like chown(2) to
	// nobody new.
	set := in.Valid &^ (fuse.FATTR_FH | fuse.FATTR_LOCKOWNER | fuse.FATTR_KILL_SUIDGID)
	admitted := set == fuse.FATTR_SIZE && h != nil && h.lock != nil
	if admitted {
		op, err := h.lock.Begin() // of all that it changes: what is revoked takes no privileges away (L3)
		if err != nil && !r.forced {
			return err
		}
		defer op.End()
	} else {
		c, err := r.covering(n)
		if err != nil {
			return err
		}
		// Attributes of a directory are part of making it (R5).
		c.Quiet = set == 0 || n.isDir() || fs.onlyLockNames(n)
		op, err := r.admit(c)
		if admitted = err == nil; !admitted {
			ok := false
			if set == 0 {
				op, ok = r.beginOpen(n)
			}
			if !ok {
				s.refusal = err
				s.prepares = s.prepares || preparesLink(in) && fs.ownsOnly(r, n)
				r.quiet = s.prepares
				return err
			}
		}
		defer op.End()
	}
	if err := s.set(); err != nil {
		return err
	}
	if admitted && in.Valid&^(fuse.FATTR_FH|fuse.FATTR_LOCKOWNER) == 0 {
		if err := fs.chownToNone(r, n); err != nil {
			return err
		}
	}
	var err error
	if fd := h.openFD(); fd >= 0 {
		err = statAt(fd, "", &s.st)
	} else {
		err = fs.statNode(n, &s.st)
	}
	if err != nil {
		return err
	}
	return s.killsForOverlay()
}

// killsForOverlay takes the privileges of a file away that somebody without CAP_FSETID has
// truncated by an overlay. The kernel asks for that by the capabilities of whoever mounted
// the overlay.
func (s *setting) killsForOverlay() error {
	fs, in := s.r.fs, s.in
	if in.Valid&fuse.FATTR_SIZE == 0 || s.keeps || s.st.Mode&(unix.S_ISUID|unix.S_ISGID) == 0 || mayKeepPrivileges(&in.InHeader, &s.st) {
		return nil
	}
	return fs.killPrivileges(s.n, &in.InHeader, &s.st)
}

// beginOpen admits a change that comes with a write to n through a handle of the
// caller, and reports false if it has none that may write.
func (r *request) beginOpen(n *node) (op *lockstate.Op, ok bool) {
	p := r.process()
	if p == nil {
		return nil, false
	}
	for _, h := range n.writers() {
		if o := h.Owner().ID(); p.ID() != o && !p.Descends(o) {
			continue
		}
		if op, err := h.Begin(); err == nil { // of one that may be revoked, an acquisition waits for it
			return op, true
		}
	}
	return nil, false
}

// preparesLock reports whether a request is what programs do to a lock file that
// they have opened, before they lock it: fchmod(2), fchown(2). Times are not among
// it: touch(1) is to hear that it has failed (A10).
func preparesLock(in *fuse.SetAttrIn) bool {
	set := in.Valid &^ (fuse.FATTR_FH | fuse.FATTR_LOCKOWNER | fuse.FATTR_KILL_SUIDGID)
	return set != 0 && set&^(fuse.FATTR_MODE|fuse.FATTR_UID|fuse.FATTR_GID) == 0
}

// preparesLink reports whether in is what link(2) protocols do to their candidate (A9).
func preparesLink(in *fuse.SetAttrIn) bool {
	const does = fuse.FATTR_MODE | fuse.FATTR_ATIME | fuse.FATTR_MTIME | fuse.FATTR_ATIME_NOW | fuse.FATTR_MTIME_NOW | fuse.FATTR_CTIME
	return in.Valid&^(does|fuse.FATTR_FH|fuse.FATTR_KILL_SUIDGID) == 0
}

// waitsWith reports whether n is a lock file that the caller has open, so that it
// can be locked. The kernel tells fchmod(2) and fchown(2) from chmod(2) and
// chown(2) to nobody.
func (r *request) waitsWith(n *node) bool {
	if len(n.lockNames()) == 0 {
		return false
	}
	p := r.process()
	return p != nil && r.fs.handles.any(func(h *handle) bool {
		return h.node == n && h.opener != nil && (p.ID() == h.opener.ID() || p.Descends(h.opener.ID()))
	})
}

// chownToNone is chown(path, -1, -1), which changes the ctime and comes as a
// request that sets nothing.
func (fs *FS) chownToNone(r *request, n *node) error {
	p, err := fs.back.place(n)
	if err != nil {
		return err
	}
	defer p.done()
	if fs.capsOff.take(n.id, r.header.Pid) && hasCapabilityHere(r.header, unix.CAP_FSETID) {
		// The file had capabilities, and is about to be written to by who
		// may keep its bits, which chown(2) would take away.
		return nil
	}
	return unix.Fchownat(p.fd, p.name, -1, -1, unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW)
}

func setAttrName(in *fuse.SetAttrIn) string {
	switch {
	case in.Valid&fuse.FATTR_SIZE != 0:
		return "truncate"
	case in.Valid&(fuse.FATTR_UID|fuse.FATTR_GID) != 0:
		return "chown"
	case in.Valid&fuse.FATTR_MODE != 0:
		return "chmod"
	case in.Valid&(fuse.FATTR_ATIME|fuse.FATTR_MTIME) == 0:
		return "chown" // to nobody new
	}
	return "utimes"
}

func (s *setting) set() error {
	fs := s.r.fs
	if !s.keeps {
		return fs.setAttr(s.n, s.h, s.in)
	}
	p, err := fs.placeOr(s.n, s.h)
	if err != nil {
		return err
	}
	defer p.done()
	return fs.keeping(s.n, p, func() error { return fs.setAttrs(s.n, s.h, s.in) })
}

func (fs *FS) setAttr(n *node, h *handle, in *fuse.SetAttrIn) error {
	if in.Valid&fuse.FATTR_SIZE != 0 {
		// What fails takes nothing away.
		if err := fs.setAttrs(n, h, in); err != nil {
			return err
		}
		return fs.setAttrKills(n, in)
	}
	if err := fs.setAttrKills(n, in); err != nil { // a new group has the sgid bit at no moment
		return err
	}
	return fs.setAttrs(n, h, in)
}

// placeOr is where n is, or else what h has open of it.
func (fs *FS) placeOr(n *node, h *handle) (place, error) {
	p, err := fs.back.place(n)
	if err == nil {
		return p, nil
	}
	if fd := h.openFD(); fd >= 0 {
		return place{fd: fd}, nil
	}
	return place{}, err
}

func (fs *FS) setAttrs(n *node, h *handle, in *fuse.SetAttrIn) error {
	p, err := fs.placeOr(n, h)
	if err != nil {
		return err
	}
	defer p.done()
	uid, hasUID := in.GetUID()
	gid, hasGID := in.GetGID()
	if hasUID || hasGID {
		if err := unix.Fchownat(p.fd, p.name, int(int32(uid)), int(int32(gid)), unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return err
		}
	}
	if mode, ok := in.GetMode(); ok {
		if err := fs.back.chmod(p, mode); err != nil {
			return err
		}
	}
	if size, ok := in.GetSize(); ok {
		if err := fs.truncate(n, p, h, int64(size)); err != nil {
			return err
		}
	}
	if in.Valid&(fuse.FATTR_ATIME|fuse.FATTR_MTIME) != 0 {
		ts := []unix.Timespec{
			timespec(in.Valid, fuse.FATTR_ATIME, fuse.FATTR_ATIME_NOW, in.Atime, in.Atimensec),
			timespec(in.Valid, fuse.FATTR_MTIME, fuse.FATTR_MTIME_NOW, in.Mtime, in.Mtimensec),
		}
		return unix.UtimesNanoAt(p.fd, p.name, ts, unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW)
	}
	return nil
}

// chmod is chmod(2) for the file at p, never through a symlink (M3).
func (b *backing) chmod(p place, mode uint32) error {
	if p.name != "" && !b.oldChmod.Load() {
		err := unix.Fchmodat(p.fd, p.name, mode, unix.AT_SYMLINK_NOFOLLOW)
		if err != unix.EOPNOTSUPP {
			return err
		}
		// The kernel cannot, or the file is a symlink and has no mode.
	}
	err := p.withFD(func(fd int) error { return unix.Fchmodat(b.proc, procName(fd), mode, 0) })
	if err == nil && p.name != "" {
		b.oldChmod.Store(true)
	}
	return err
}

func timespec(valid, set, now uint32, sec uint64, nsec uint32) unix.Timespec {
	switch {
	case valid&set == 0:
		return unix.Timespec{Nsec: unix.UTIME_OMIT}
	case valid&now != 0:
		return unix.Timespec{Nsec: unix.UTIME_NOW}
	}
	return unix.Timespec{Sec: int64(sec), Nsec: int64(nsec)}
}
