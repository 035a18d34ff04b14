package fs

import (
	"errors"
	"slices"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/advisory"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// Advisory locks. On an ordinary file they are what they are anywhere (M2). On
// a lock file they are locks on its directory too (A4, A5): first the file's
// lock is taken, where first come is first served (A8), then the directory.

// A fdKey names the descriptor lock that keeps a directory locked (R2): a flock
// lock of an open file description, or the record locks of an owner.
type fdKey struct {
	node  uint64
	flock bool
	id    uint64 // handle or owner
}

func keyOf(node uint64, l *advisory.Lock) fdKey {
	if l.Flock {
		return fdKey{node, true, l.Handle}
	}
	return fdKey{node, false, l.Owner}
}

// lockFileOf returns the place of n as a lock file.
func (fs *FS) lockFileOf(n *node) (link, bool) {
	if n.cand.private() {
		return link{n.cand.parent, n.cand.name}, n.cand.lockFile
	}
	for _, l := range n.names() {
		if fs.isLockName(l.parent, l.name) {
			return l, true
		}
	}
	return link{}, false
}

func lockOf(in *fuse.LkIn) advisory.Lock {
	return advisory.Lock{
		Owner: in.Owner, Handle: in.Fh, Pid: in.Lk.Pid, Start: in.Lk.Start, End: in.Lk.End,
		Write: in.Lk.Typ == unix.F_WRLCK, Flock: in.LkFlags&fuse.LK_FLOCK != 0,
	}
}

// GetLk is F_GETLK.
func (fs *FS) GetLk(cancel <-chan struct{}, in *fuse.LkIn, out *fuse.LkOut) fuse.Status {
	n := fs.nodes.get(in.NodeId)
	if n == nil {
		return fuse.EBADF
	}
	out.Lk = fuse.FileLock{Typ: unix.F_UNLCK}
	get := fs.advisory.Get
	if in.Lk.Typ == unix.F_UNLCK {
		get = fs.advisory.GetOwn // F_OFD_GETLK of what is one's own
	}
	if c, ok := get(n.id, lockOf(in)); ok {
		out.Lk = fuse.FileLock{Typ: unix.F_RDLCK, Start: c.Start, End: c.End, Pid: c.Pid}
		if c.Write {
			out.Lk.Typ = unix.F_WRLCK
		}
		return fuse.OK
	}
	// Somebody may hold the directory by another protocol.
	if at, ok := fs.lockFileOf(n); ok {
		l, held := fs.table.Governing(at.parent.dir)
		if held && l.Kind != lockstate.Shared && !fs.table.Holds(fs.process(&in.InHeader), at.parent.dir) {
			out.Lk = fuse.FileLock{Typ: unix.F_WRLCK, End: advisory.MaxEnd, Pid: uint32(l.Owner.Pid)}
		}
	}
	return fuse.OK
}

// SetLk is F_SETLK, and flock(2) with LOCK_NB.
func (fs *FS) SetLk(cancel <-chan struct{}, in *fuse.LkIn) fuse.Status {
	return fs.setLock(cancel, in, false)
}

// SetLkw is F_SETLKW, and flock(2). It keeps no thread.
func (fs *FS) SetLkw(cancel <-chan struct{}, in *fuse.LkIn) fuse.Status {
	return fs.setLock(cancel, in, true)
}

func (fs *FS) setLock(cancel <-chan struct{}, in *fuse.LkIn, wait bool) fuse.Status {
	h := fs.handles.get(in.Fh, in.NodeId)
	if h == nil {
		return fuse.EBADF
	}
	h.flushed.Store(false) // it is in use
	want := lockOf(in)
	at, lockFile := fs.lockFileOf(h.node)
	if in.Lk.Typ == unix.F_UNLCK {
		fs.advisory.Unlock(h.node.id, want)
		fs.settleKeys(h.node.id, []fdKey{keyOf(h.node.id, &want)})
		return fuse.OK
	}
	want.Fair = lockFile
	if !lockFile {
		return fs.takeFile(cancel, h.node.id, want, wait)
	}
	w := &waiting{dir: at.parent.dir, proc: fs.process(&in.InHeader), since: time.Now()}
	if wait {
		fs.waits.add(w)
		defer fs.waits.remove(w)
	}
	before := fs.own(h.node.id, want)
	if status := fs.takeFile(cancel, h.node.id, want, wait); status != fuse.OK {
		fs.settleKeys(h.node.id, []fdKey{keyOf(h.node.id, &want)}) // flock(2): a refused conversion has lost the old lock
		return status
	}
	status := fs.takeDir(cancel, in, h, at, want, wait)
	if status != fuse.OK {
		fs.advisory.Unlock(h.node.id, want)
		for _, old := range before {
			fs.advisory.Try(h.node.id, old)
		}
		fs.settleKeys(h.node.id, []fdKey{keyOf(h.node.id, &want)})
	}
	return status
}

// own returns the locks that a request's owner has on a file.
func (fs *FS) own(node uint64, want advisory.Lock) []advisory.Lock {
	return slices.DeleteFunc(fs.advisory.Locks(node), func(l advisory.Lock) bool {
		return keyOf(node, &l) != keyOf(node, &want)
	})
}

// takeFile takes the lock on the file.
func (fs *FS) takeFile(cancel <-chan struct{}, node uint64, want advisory.Lock, wait bool) fuse.Status {
	var err error
	if wait {
		err = fs.advisory.Wait(node, want, cancel)
	} else {
		err = fs.tryFile(cancel, node, want)
	}
	switch {
	case err == nil:
		return fuse.OK
	case errors.Is(err, advisory.ErrConflict):
		return fuse.EAGAIN
	case errors.Is(err, advisory.ErrDeadlock):
		return fuse.Status(syscall.EDEADLK)
	case errors.Is(err, advisory.ErrCancelled):
		return fuse.EINTR
	case errors.Is(err, advisory.ErrRange):
		return fuse.EINVAL
	}
	return fuse.Status(syscall.ENOLCK)
}

// releaseTime bounds how long a try waits for the RELEASE of a description that
// was closed already: the kernel sends it when close(2) has returned.
const releaseTime = 20 * time.Millisecond

func (fs *FS) tryFile(cancel <-chan struct{}, node uint64, want advisory.Lock) error {
	var closing time.Time
	for {
		err := fs.advisory.Try(node, want)
		var c *advisory.ConflictError
		if !errors.As(err, &c) || c.Waiting {
			return err
		}
		h := fs.handles.get(c.Lock.Handle, node)
		if h != nil && !h.flushed.Load() || !more(&closing, releaseTime) {
			return err
		}
		if !sleep(cancel, 100*time.Microsecond) {
			return advisory.ErrCancelled
		}
	}
}

// takeDir takes the directory of a lock file whose lock the caller has.
func (fs *FS) takeDir(cancel <-chan struct{}, in *fuse.LkIn, h *handle, at link, want advisory.Lock, wait bool) fuse.Status {
	r := &request{fs: fs, cancel: cancel, header: &in.InHeader, op: "lock", parent: at.parent, name: at.name, errno: fuse.EAGAIN, quiet: wait}
	r.proc = fs.lockOwner(in, h, want)
	if r.proc == nil {
		return fuse.Status(syscall.ENOLCK) // H4: and nobody would ever be woken
	}
	q := lockstate.Request{
		Dir: at.parent.dir, Kind: lockstate.Shared, Protocol: "fcntl", File: at.name, Key: keyOf(h.node.id, &want),
	}
	if want.Write {
		q.Kind = lockstate.Explicit
	}
	if want.Flock {
		q.Protocol = "flock"
	}
	for {
		bell := fs.table.Bell()
		refused := false
		status := fs.attempt(r, false, func() error {
			err := fs.takeDirOnce(r, h, q)
			refused = err != nil
			return err
		})
		if status != fuse.EAGAIN || !refused || !wait || fs.table.Frozen() {
			return status
		}
		select {
		case <-bell:
		case <-cancel:
			return fuse.EINTR
		}
	}
}

// lockOwner returns who will own the directory: for flock(2) the process that
// opened the description, so that a script holds what flock(1) locks for it
// (A4).
func (fs *FS) lockOwner(in *fuse.LkIn, h *handle, want advisory.Lock) *procid.Process {
	if want.Flock && h.opener != nil && fs.procs.Alive(h.opener.ID()) {
		return h.opener
	}
	return fs.process(&in.InHeader)
}

func (fs *FS) takeDirOnce(r *request, h *handle, q lockstate.Request) error {
	finish, err := fs.admitLock(r, q)
	if err != nil {
		return err
	}
	if h.cand.private() {
		err = fs.settleLockFile(r, h.cand)
	}
	if ok := finish(err == nil); !ok && err == nil {
		err = lockstate.ErrFrozen
	}
	return err
}

// settleKeys ends the locks on directories that descriptor locks kept which are
// no more (R2).
func (fs *FS) settleKeys(node uint64, keys []fdKey) {
	if fs.table.Len() == 0 {
		return
	}
	left := fs.advisory.Locks(node)
	for _, k := range keys {
		if slices.ContainsFunc(left, func(l advisory.Lock) bool { return keyOf(node, &l) == k }) {
			continue
		}
		if l, ok := fs.table.ReleaseKey(k); ok {
			fs.log.Debug("released", "dir", l.Path, "why", lockstate.Unlocked, "pid", l.Owner.Pid, "token", l.Token)
		}
	}
}

// closedCopy drops the record locks of whoever closed a descriptor.
func (fs *FS) closedCopy(in *fuse.FlushIn) {
	fs.advisory.Flush(in.NodeId, in.LockOwner)
	fs.settleKeys(in.NodeId, []fdKey{{in.NodeId, false, in.LockOwner}})
}

// closedLast drops what was locked through a description that is gone.
func (fs *FS) closedLast(in *fuse.ReleaseIn) {
	var keys []fdKey
	for _, l := range fs.advisory.Locks(in.NodeId) {
		if l.Handle == in.Fh {
			keys = append(keys, keyOf(in.NodeId, &l))
		}
	}
	fs.advisory.Release(in.NodeId, in.Fh)
	fs.settleKeys(in.NodeId, keys)
}
