package fs

import (
	"errors"
	"slices"
	"strconv"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs/transport"
	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/advisory"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// Advisory locks. On an ordinary file they are what they are anywhere (M2). On
// a lock file they are locks on its directory too (A4, A5), which come together
// with the lock on the file or not at all.

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
	if n.candidate().private() {
		return link{n.candidate().parent, n.candidate().name}, n.candidate().lockFile
	}
	if names := n.lockNames(); len(names) > 0 {
		return names[0], true
	}
	return link{}, false
}

// lockPlaceOf returns the place of the lock file that h was opened by: the file may
// be one in other directories too. unclear: it can't be said which is meant.
func (fs *FS) lockPlaceOf(h *handle) (at link, lockFile, unclear bool) {
	if h.node.candidate().private() {
		at, lockFile = fs.lockFileOf(h.node)
		return at, lockFile, false
	}
	names := h.node.lockNames()
	if len(names) == 0 {
		return link{}, false, false
	}
	if slices.Contains(names, h.by) {
		return h.by, true, false
	}
	elsewhere := func(l link) bool { return l.parent != names[0].parent }
	return names[0], true, slices.ContainsFunc(names, elsewhere)
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
		return fs.noLocks(in)
	}
	out.Lk = fuse.FileLock{Typ: unix.F_UNLCK}
	get := fs.advisory.Get
	if in.Lk.Typ == unix.F_UNLCK {
		get = fs.advisory.GetOwn // F_OFD_GETLK of what is one's own
	}
	var closing patience
	asks := &request{fs: fs, cancel: cancel, header: &in.InHeader}
	c, ok := get(n.id, lockOf(in))
	for next := tryAgain; ok && in.Lk.Typ != unix.F_UNLCK && next == tryAgain; {
		switch next = asks.awaitRelease(n.id, &c, &closing); next {
		case tryAgain:
			c, ok = get(n.id, lockOf(in))
		case interrupted:
			return fuse.EINTR
		}
	}
	if ok {
		out.Lk = fuse.FileLock{Typ: unix.F_RDLCK, Start: c.Start, End: c.End, Pid: c.Pid}
		if c.Write {
			out.Lk.Typ = unix.F_WRLCK
		}
		return fuse.OK
	}
	// Somebody may hold the directory by another protocol, or share it.
	h, at, ok, _ := fs.lockedBy(in)
	if h == nil || !ok {
		return fuse.OK
	}
	d := &dirLock{fs: fs, cancel: cancel, in: in, h: h, at: at, want: lockOf(in)}
	r, ok := d.request()
	if !ok {
		return fuse.EINTR
	}
	q := d.asks()
	q.Process = r.proc
	var held *lockstate.HeldError
	if errors.As(fs.table.Probe(q), &held) && held.Lock.Token != 0 {
		out.Lk = fuse.FileLock{Typ: unix.F_WRLCK, End: advisory.MaxEnd, Pid: uint32(held.Lock.Owner.Pid)}
		if held.Lock.Kind == lockstate.Shared {
			out.Lk.Typ = unix.F_RDLCK
		}
	}
	return fuse.OK
}

// noLocks is the answer for a node that is no file of the backing.
func (fs *FS) noLocks(in *fuse.LkIn) fuse.Status {
	if fs.control.node(in.NodeId) != nil {
		return fuse.Status(unix.EOPNOTSUPP)
	}
	return fuse.EBADF
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
	h, at, lockFile, unclear := fs.lockedBy(in)
	if h == nil {
		return fs.noLocks(in)
	}
	h.flushed.Store(0) // it is in use
	want, node := lockOf(in), h.node.id
	switch {
	case in.Lk.Typ == unix.F_UNLCK:
		fs.unlock(node, want)
		if lockFile && !unclear && !want.Flock {
			(&dirLock{fs: fs, cancel: cancel, in: in, h: h, at: at}).keepLess(keyOf(node, &want))
		}
		return fuse.OK
	case !lockFile:
		return fs.lockPlain(cancel, in, node, want, wait)
	case unclear:
		return fuse.Status(unix.ENOLCK)
	}
	d := &dirLock{fs: fs, cancel: cancel, in: in, h: h, at: at, want: want}
	var status fuse.Status
	if wait {
		status = d.wait()
	} else {
		status = d.try()
	}
	if status == fuse.ENOENT && fs.table.IsGone(at.parent.dir) {
		// The directory was removed: a file without a name is as any other.
		return fs.lockPlain(cancel, in, d.h.node.id, want, wait)
	}
	if status != fuse.OK && want.Flock {
		d.dropOld() // flock(2): a conversion that is refused has lost the old lock
	}
	return status
}

var _ transport.Locker = (*FS)(nil)

// TryLockw is SetLkw of a lock that is free, as nearly all are.
func (fs *FS) TryLockw(in *fuse.LkIn) bool {
	h, at, lockFile, unclear := fs.lockedBy(in)
	if h == nil || unclear || fs.opts.Observe || in.Lk.Typ == unix.F_UNLCK {
		return false
	}
	want, node := lockOf(in), h.node.id
	if fs.converts(node, want) {
		return false
	}
	h.flushed.Store(0) // it is in use
	if lockFile {
		return (&dirLock{fs: fs, cancel: over, in: in, h: h, at: at, want: want}).atOnce()
	}
	return fs.advisory.Try(node, want) == nil
}

// lockPlain sets a lock on a file that has no lock file's name. It may have had
// one, and the lock that this one takes the place of may keep a directory.
func (fs *FS) lockPlain(cancel <-chan struct{}, in *fuse.LkIn, node uint64, want advisory.Lock, wait bool) (status fuse.Status) {
	if wait && fs.converts(node, want) {
		fs.unlock(node, want) // flock(2): the old lock goes first
	}
	if wait {
		status = statusOf(fs.advisory.Wait(node, want, cancel))
	} else {
		r := &request{fs: fs, cancel: cancel, header: &in.InHeader}
		status = r.tryClosing(node, func() error { return fs.advisory.Try(node, want) })
	}
	if status != fuse.OK && want.Flock {
		fs.unlock(node, want) // likewise
	}
	return status
}

// converts reports whether a description has a flock lock of the other kind.
func (fs *FS) converts(node uint64, want advisory.Lock) bool {
	return want.Flock && slices.ContainsFunc(fs.advisory.Locks(node), func(l advisory.Lock) bool {
		return keyOf(node, &l) == keyOf(node, &want) && l.Write != want.Write
	})
}

// releaseTime bounds how long a try waits for the RELEASE of a description that
// was closed already: the kernel sends it when close(2) has returned.
const releaseTime = 20 * time.Millisecond

// tryClosing repeats a try while all that is in its way is such a description.
func (r *request) tryClosing(node uint64, try func() error) fuse.Status {
	var closing patience
	for {
		err := try()
		var c *advisory.ConflictError
		if !errors.As(err, &c) {
			return statusOf(err)
		}
		switch r.awaitRelease(node, &c.Lock, &closing) {
		case ends:
			return statusOf(err)
		case interrupted:
			return fuse.EINTR
		}
	}
}

// awaitRelease waits a moment if a lock is such a description's.
func (r *request) awaitRelease(node uint64, l *advisory.Lock, closing *patience) outcome {
	if !r.fs.wasClosed(l.Handle, node) || !closing.more(releaseTime) {
		return ends
	}
	return after(r.rest(100 * time.Microsecond))
}

// lockOwner returns who will own the directory: for flock(2) and OFD locks the process that
// opened the description, so that a script holds what flock(1) locks for it
// (A4). opened: it is that one, and not the caller.
func (fs *FS) lockOwner(in *fuse.LkIn, h *handle, want advisory.Lock) (p *procid.Process, opened, ok bool) {
	opener := h.openedBy()
	if want.Flock && opener != nil && fs.procs.Alive(opener.ID()) {
		return opener, true, true
	}
	p, _, ok = fs.process(&in.InHeader)
	if !want.Flock && p != nil && opener != nil && p.ID() != opener.ID() && fs.procs.Alive(opener.ID()) && callsOFD(in.Pid) {
		return opener, true, ok
	}
	return p, false, ok
}

// callsOFD reports whether a thread that asks for a record lock wants an OFD lock. The kernel
// does not say; but until it is answered, the thread waits in fcntl(2).
func callsOFD(tid uint32) bool {
	call := procid.CallOf(int(tid), callTime)
	if len(call) < 3 {
		return false
	}
	command, err := strconv.ParseInt(call[2], 0, 64)
	return err == nil && (command == unix.F_OFD_SETLK || command == unix.F_OFD_SETLKW)
}

// callTime bounds how long the thread of a request may run until it waits for the answer.
const callTime = 100 * time.Millisecond

// unlock gives up a lock, and what only it kept (R2). By what name the file was
// locked is of no account: it may have another one by now, or none.
func (fs *FS) unlock(node uint64, l advisory.Lock) {
	fs.lockMu.Lock()
	defer fs.lockMu.Unlock()
	fs.unlockLocked(node, l)
}

func (fs *FS) unlockLocked(node uint64, l advisory.Lock) {
	fs.advisory.Unlock(node, l)
	fs.settleLocked(node, []fdKey{keyOf(node, &l)}, nil)
}

// settleLocked ends the locks on directories that descriptor locks kept which
// are no more (R2). dying is for those that ended because of close(2): it tells
// whether that was part of the owner's exit(2).
func (fs *FS) settleLocked(node uint64, keys []fdKey, dying func(procid.ID) bool) {
	keys = slices.DeleteFunc(keys, func(k fdKey) bool { return !fs.table.HasKey(k) })
	if len(keys) > 0 {
		left := fs.advisory.Locks(node)
		for _, k := range keys {
			if slices.ContainsFunc(left, func(l advisory.Lock) bool { return keyOf(node, &l) == k }) {
				continue
			}
			if dying != nil && fs.table.LeaveToExit(k, dying) {
				continue
			}
			if l, ok := fs.table.ReleaseKey(k); ok {
				fs.logReleased(l, lockstate.Unlocked)
			}
		}
	}
	if fs.waits.any() && (fs.isLockFile(node) || fs.waits.on(fs.nodes, node)) {
		fs.table.Ring()
	}
}

// isLockFile reports whether a node has the place of a lock file.
func (fs *FS) isLockFile(node uint64) bool {
	n := fs.nodes.get(node)
	if n == nil {
		return false
	}
	_, is := fs.lockFileOf(n)
	return is
}

// endKeys takes the descriptor locks away that keep a lock which ends for another
// reason, so that nobody hears of a lock that there is no more (R4). How it ends is the
// caller's to say. Who has the descriptor, too, may lock it again at once.
func (fs *FS) endKeys(l lockstate.Lock) {
	fs.lockMu.Lock()
	defer fs.lockMu.Unlock()
	fs.unlockKeysLocked(fs.table.Doom(l.Token))
}

// endKeysOf is endKeys for a lock of a process whose death is being carried out. It reports
// false where that lock has ended by itself, or is another one's by now.
func (fs *FS) endKeysOf(l lockstate.Lock, id procid.ID) bool {
	fs.lockMu.Lock()
	defer fs.lockMu.Unlock()
	keys, ok := fs.table.DoomOf(l.Token, id)
	fs.unlockKeysLocked(keys)
	return ok
}

func (fs *FS) unlockKeysLocked(keys []any) {
	for _, k := range keys {
		key := k.(fdKey)
		lock := advisory.Lock{Owner: key.id, End: advisory.MaxEnd}
		if key.flock {
			lock = advisory.Lock{Handle: key.id, Flock: true}
		}
		fs.unlockLocked(key.node, lock)
	}
}
