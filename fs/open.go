package fs

import (
	"errors"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// writes reports whether open flags let a file be changed.
func writes(flags uint32) bool {
	return flags&unix.O_ACCMODE != unix.O_RDONLY || flags&unix.O_TRUNC != 0
}

// backingFlags returns the flags that the backing file is opened with. The
// kernel has computed offsets (O_APPEND) and aligned nothing (O_DIRECT); and
// the daemon never waits in an open.
func backingFlags(flags uint32) int {
	return int(flags)&^(unix.O_CREAT|unix.O_EXCL|unix.O_APPEND|unix.O_DIRECT|unix.O_NOCTTY|unix.O_NOFOLLOW) | unix.O_NONBLOCK
}

// openForWrite admits a write handle. The caller closes it if the backing
// refuses.
func (r *request) openForWrite(c lockstate.Change, name string) (*lockstate.Handle, error) {
	p, err := r.must()
	if err != nil {
		return nil, err
	}
	c.Process, c.Force = p, r.forced
	return r.fs.table.OpenHandle(c, name)
}

// abandon closes a handle that the kernel was not told of.
func (fs *FS) abandon(h *handle) {
	if h.id != 0 {
		fs.handles.remove(h.id)
		fs.end(h)
		return
	}
	if h.node != nil && h.lock != nil {
		h.node.removeWriter(h.lock)
	}
	h.lock.Close()
	h.lock = nil
}

// opened hands a handle to the kernel. fd is a descriptor as for begin, which it
// takes over, or -1. From here on an acquisition finds the handle.
func (fs *FS) opened(n *node, h *handle, fd int, st *unix.Statx_t, out *fuse.OpenOut) error {
	if h.lock != nil {
		h.node = n
		n.addWriter(h.lock)
		n.followHandles() // it may have been renamed since the gate
	}
	if err := fs.begin(n, h, fd, st, out); err != nil {
		return err
	}
	out.Fh = fs.handles.add(h)
	return nil
}

// errOutdated: what was opened as a lock file is none any more, and somebody has
// opened it since as the ordinary file which it is now.
var errOutdated = errors.New("the lock file has lost its name")

// Open is open(2) of a file that is there.
func (fs *FS) Open(cancel <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	if c := fs.control.node(in.NodeId); c != nil {
		return c.openFile(in, out)
	}
	n := fs.nodes.get(in.NodeId)
	if n == nil {
		return fuse.Status(unix.ESTALE)
	}
	if c := n.candidate(); c.private() {
		if status, ok := c.open(in, out); ok {
			return status
		}
		n = fs.nodes.get(in.NodeId)
	}
	if n.vanished() || fs.openedStale(n, in) {
		return fs.stale.gone(true, &in.InHeader)
	}
	if fs.accounting(in) {
		return fuse.EINVAL
	}
	if in.Flags&unix.O_ACCMODE != unix.O_RDONLY {
		fs.awaitRoom()
	}
	r := &request{fs: fs, cancel: cancel, header: &in.InHeader, op: "open", node: n}
	o := opening{r: r, in: in, n: n, out: out}
	status := fs.attempt(r, false, o.try)
	if status == fuse.EBUSY && o.spares {
		o.final, r.quiet = true, false
		status = fs.attempt(r, false, o.try)
	}
	if status == fuse.Status(unix.ESTALE) {
		status = fs.stale.gone(true, &in.InHeader) // by whatever
	}
	return status
}

// An opening is one Open.
type opening struct {
	r   *request
	in  *fuse.OpenIn
	n   *node
	out *fuse.OpenOut
	by  link // under which name the lock file was found

	spares bool // a refusal that nothing clears away means that nothing is truncated,
	final  bool // and there is such a one
}

func (o *opening) try() error {
	fs, in, n := o.r.fs, o.in, o.n
	h := &handle{uid: fs.openerOf(&in.InHeader, in.Flags), tid: in.Pid, flags: in.Flags}
	if in.NodeId != n.id {
		h.as = in.NodeId
	}
	o.r.admitted.handle = h
	op, err := o.admit(h)
	defer op.End()
	if err != nil {
		return err
	}
	var st unix.Statx_t
	err = fs.statNode(n, &st)
	if err == nil {
		err = fs.flagsAllow(n, &st, h.flags)
	}
	if err == nil {
		err = fs.opened(n, h, -1, &st, o.out)
	}
	if err == nil && h.flags&unix.O_TRUNC != 0 && in.Mode&fuse.OPEN_KILL_SUIDGID != 0 {
		err = fs.killPrivileges(n, &in.InHeader, &st)
	}
	if errors.Is(err, errMayMap) && h.opener != nil && len(n.lockNames()) == 0 {
		err = errOutdated
	}
	if err != nil {
		fs.abandon(h)
	} else if h.writesPast(h.mode) && h.mapsWritable() {
		// A mapping changes times and blocks without a word. The
		// kernel still has what it was told before there could be one.
		fs.notifyAttr(n)
	}
	if err == nil && h.flags&unix.O_TRUNC != 0 {
		fs.changedBeside(in.NodeId, n)
	}
	return err
}

// admit decides about a handle. The caller ends what it returns, once the file is
// truncated.
func (o *opening) admit(h *handle) (op *lockstate.Op, err error) {
	fs, r, n := o.r.fs, o.r, o.n
	if _, lockFile := fs.lockFileOf(n); lockFile {
		if h.opener, err = r.opener(); err != nil {
			return op, err
		}
		if o.by.parent == nil {
			o.by = fs.lockLooks.by(o.in.Pid, n)
		}
		h.by = o.by
		if h.flags&unix.O_TRUNC != 0 {
			if op, err = fs.mayChange(r, n); refused(err) && o.isFinal(err) {
				h.flags &^= unix.O_TRUNC // A10: succeeds and changes nothing
				err = nil
			}
		}
		return op, err
	}
	if !writes(h.flags) {
		return op, nil
	}
	c, err := r.covering(n)
	if err != nil {
		return op, err
	}
	_, name := n.covering()
	for {
		h.lock, err = r.openForWrite(c, name)
		if refused(err) && (o.by.parent != nil && !n.has(o.by) || fs.lockLooks.lost(o.in.Pid, n)) && fs.stale.found(true, true, &o.in.InHeader, "") {
			err = unix.ESTALE // the kernel looks the name up again (A10)
		}
		if refused(err) && !h.mapsWritable() && fs.ownsOnly(r, n) && o.isFinal(err) {
			// As with a lock file, each write is decided about when it comes (A9).
			h.opener, err = r.must()
			h.flags &^= unix.O_TRUNC
			return nil, err
		}
		if err != nil || h.flags&unix.O_TRUNC == 0 {
			return nil, err
		}
		// The handle keeps nobody out who comes after a lease: the truncation is
		// a change of its own then (W3).
		if op, err = h.lock.Begin(); err == nil || r.forced {
			return op, nil
		}
		// The lease has ended since: it is as if the caller came now.
		h.lock.Close()
		h.lock = nil
	}
}

// isFinal reports whether a refusal of what is opened all the same is the last word. The lock
// of a dead owner is cleared away before, as it is for every request (R4).
func (o *opening) isFinal(err error) bool {
	if !o.final {
		o.r.quiet, o.spares = true, true
	}
	return o.final && !o.r.unsure(err)
}

// mayChange lets the caller change n, or says why not. The caller ends the
// operation.
func (fs *FS) mayChange(r *request, n *node) (*lockstate.Op, error) {
	c, err := r.covering(n)
	if err != nil {
		return nil, err
	}
	c.Quiet, c.Force = true, fs.opts.Observe
	return r.admit(c)
}
