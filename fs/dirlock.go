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

// A dirLock is a request for a lock on a lock file, and so on its directory.
// Both are taken in one step. Nobody keeps the one while it waits for the
// other: the directory's holder may want it.
type dirLock struct {
	fs     *FS
	cancel <-chan struct{}
	in     *fuse.LkIn
	h      *handle
	at     link
	want   advisory.Lock
	waits  bool
	has    bool // want is set already: the directory's lock is to become what it asks for
	opened bool // the owner is to be who opened the file, as it was asked last
}

// try takes the lock if it is free and nobody stands in line for it but those who wait
// for the caller.
func (d *dirLock) try() fuse.Status {
	r, ok := d.request()
	switch {
	case !ok:
		return fuse.EINTR
	case r.proc == nil:
		return fuse.Status(syscall.ENOLCK) // H4
	}
	if d.fs.waits.waited(d.at.parent.dir) && !d.keeps() && !d.holds(r.proc) {
		return fuse.EAGAIN
	}
	r.patient = true
	return r.tryClosing(d.h.node.id, func() error {
		status, _, conflict := d.take(r)
		if conflict == nil && status != fuse.OK {
			return syscall.Errno(status)
		}
		return conflict
	})
}

// atOnce takes the lock if it is free and nobody stands in line for it, and reports
// whether it did.
func (d *dirLock) atOnce() bool {
	r, ok := d.request()
	if !ok || r.proc == nil || d.fs.waits.waited(d.at.parent.dir) {
		return false
	}
	q := d.asks()
	if q.Process = r.proc; d.fs.table.Probe(q) != nil {
		return false
	}
	r.quiet, r.endless, d.waits = true, true, true
	status, _, _ := d.take(r)
	return status == fuse.OK
}

// wait takes the lock when its turn has come.
func (d *dirLock) wait() fuse.Status {
	r, ok := d.request()
	switch {
	case !ok:
		return fuse.EINTR
	case r.proc == nil:
		return fuse.Status(syscall.ENOLCK) // H4: and nobody would ever be woken
	}
	r.quiet, r.endless, d.waits = true, true, true
	fs, node, want := d.fs, d.h.node.id, d.want
	x := &waiting{
		dir: d.at.parent.dir, node: node, name: d.at.name, proc: r.proc, since: time.Now(),
		write: want.Write, turn: make(chan struct{}), dead: make(chan struct{}),
		keeps: func() bool { return fs.keptBy(d.at, fs.nodes.settledAs(node), want) },
		hears: !want.Flock && !d.opened, blocker: d.blocker(r),
	}
	if fs.converts(node, want) {
		d.dropOld() // flock(2): a conversion is not atomic; two would wait for each other
	}
	keeps := d.keeps()
	ahead := keeps || d.holds(r.proc)
	if keeps || ahead && !want.Write {
		// It asks again for what it has, or shares what it shares already: no
		// business of those in line.
		if status, held, conflict := d.take(r); held == nil && conflict == nil {
			return status
		}
	}
	fs.enqueue(x, lockProtocol(want.Flock), ahead)
	defer fs.leaveLine(x)
	return fs.await(x, d.cancel, nil, func() (fuse.Status, bool) {
		r.anew()
		status, held, conflict := d.take(r)
		x.got = status == fuse.OK
		return status, conflict == nil && held == nil
	})
}

// asks is what the lock asks of the directory.
func (d *dirLock) asks() lockstate.Request {
	q := lockstate.Request{
		Dir: d.at.parent.dir, Inode: d.at.parent.key().inode(), Kind: lockstate.Shared, Protocol: lockProtocol(d.want.Flock), File: d.at.name,
	}
	if d.exclusive() {
		q.Kind = lockstate.Explicit
	}
	return q
}

// exclusive reports whether the lock is one for writing, or its owner has one on another
// part of the file that it keeps: what it asks for is no more than that one (A4).
func (d *dirLock) exclusive() bool {
	node, want := d.h.node.id, &d.want
	return want.Write || !want.Flock && slices.ContainsFunc(d.fs.advisory.Locks(node), func(l advisory.Lock) bool {
		return l.Write && keyOf(node, &l) == keyOf(node, want) && (l.Start < want.Start || l.End > want.End)
	})
}

// keepLess makes the directory's lock a shared one, if what its owner has left of its
// record locks asks for no more (A5). Where that can't be, it stays as it was.
func (d *dirLock) keepLess(key fdKey) {
	left := slices.DeleteFunc(d.fs.advisory.Locks(key.node), func(l advisory.Lock) bool { return keyOf(key.node, &l) != key })
	if len(left) == 0 || slices.ContainsFunc(left, func(l advisory.Lock) bool { return l.Write }) {
		return
	}
	d.want, d.has = left[0], true
	r, ok := d.request()
	if !ok || r.proc == nil {
		return
	}
	if owner, ok := d.fs.table.OwnerBy(key); !ok || owner != r.proc.ID() {
		return // an open file description that several have: the lock is not the caller's
	}
	r.quiet = true
	d.take(r)
}

// blocker returns what tells who is in the way.
func (d *dirLock) blocker(r *request) func() (id procid.ID, soon, ok bool) {
	q, node, want := d.asks(), d.h.node.id, d.want
	q.Process = r.proc
	return func() (procid.ID, bool, bool) { return d.fs.blockerOf(q, node, &want) }
}

// dropOld gives up what the description had.
func (d *dirLock) dropOld() {
	d.fs.unlock(d.h.node.id, d.want)
}

// holds reports whether p holds or shares the directory already, by whatever protocol.
func (d *dirLock) holds(p *procid.Process) bool { return d.fs.holds(p, d.at.parent.dir) }

// keeps reports whether the directory is locked by this very descriptor already: by its
// description, or by the record locks of its owner.
func (d *dirLock) keeps() bool { return d.fs.keptBy(d.at, d.h.node.id, d.want) }

func (fs *FS) keptBy(at link, node uint64, want advisory.Lock) bool {
	return fs.table.KeptBy(keyOf(node, &want)) == at.parent.dir
}

// request is the caller's, or of who opened the file; ok is false if it was
// interrupted.
func (d *dirLock) request() (r *request, ok bool) {
	p, opened, ok := d.fs.lockOwner(d.in, d.h, d.want)
	d.opened = opened
	return &request{
		fs: d.fs, cancel: d.cancel, header: &d.in.InHeader, op: "lock", parent: d.at.parent, name: d.at.name,
		errno: fuse.EAGAIN, proc: p,
	}, ok
}

func lockProtocol(flock bool) string {
	if flock {
		return "flock"
	}
	return "fcntl"
}

// take takes the directory and the file, or neither. held is what was in the
// way on the directory, conflict what was on the file.
func (d *dirLock) take(r *request) (status fuse.Status, held *lockstate.HeldError, conflict error) {
	for {
		d.reown(r)
		var lost bool
		status, lost, held, conflict = d.takeOnce(r)
		if lost {
			continue
		}
		if status == fuse.OK && d.reown(r) {
			d.fs.unlock(d.h.node.id, d.want) // the dead one's end would take it from who waited
			continue
		}
		if status == fuse.OK && d.endsWithOther(r) {
			continue
		}
		return status, held, conflict
	}
}

// endsWithOther carries out the death of another process that has locked the description
// and has died since, and reports whether it had that lock still: then what was asked for
// would end with that one's.
func (d *dirLock) endsWithOther(r *request) bool {
	key := keyOf(d.h.node.id, &d.want)
	owner, ok := d.fs.table.OwnerBy(key)
	if !ok || owner == r.proc.ID() || d.fs.procs.Alive(owner) {
		return false
	}
	if !d.fs.reap(owner) {
		return false
	}
	now, ok := d.fs.table.OwnerBy(key) // its scope's, perhaps (H3)
	return !ok || now != owner
}

// reown names another owner if the process that opened the file has died since: who has
// the description still locks for itself then (A4).
func (d *dirLock) reown(r *request) (another bool) {
	if d.fs.procs.Alive(r.proc.ID()) {
		return false
	}
	p, _, ok := d.fs.lockOwner(d.in, d.h, d.want)
	if !ok || p == nil || p.ID() == r.proc.ID() {
		return false
	}
	r.proc = p
	return true
}

// keepsOther reports whether the lock of a descriptor keeps another directory where
// the file is a lock file as well. The record locks of a process on a file are one,
// by whichever of its names, and can keep one directory.
func (fs *FS) keepsOther(n *node, q lockstate.Request) bool {
	kept := fs.table.KeptBy(q.Key)
	return kept != nil && kept != q.Dir && slices.ContainsFunc(n.lockNames(), func(l link) bool { return l.parent.dir == kept })
}

// taken reports whether the file alone is in the way. To begin, and then to give up,
// would wake all who wait, and so who waits.
func (d *dirLock) taken(p *procid.Process, q lockstate.Request) bool {
	_, taken := d.fs.advisory.Get(d.h.node.id, d.want)
	q.Process = p
	return taken && d.fs.table.Probe(q) == nil
}

// takeOnce tells in lost that its owner had the directory already by a lock which
// ended at that very moment: that of a description whose RELEASE came late.
func (d *dirLock) takeOnce(r *request) (status fuse.Status, lost bool, held *lockstate.HeldError, conflict error) {
	fs := d.fs
	q := d.asks()
	status = fs.attempt(r, false, func() error {
		conflict, held = nil, nil
		q.Key, q.Opened = keyOf(d.h.node.id, &d.want), fs.seenAs(d.h)
		if fs.keepsOther(d.h.node, q) {
			return unix.ENOLCK
		}
		if d.waits && d.taken(r.proc, q) {
			conflict = advisory.ErrConflict
			return conflict
		}
		g, finish, err := fs.admitLock(r, q, nil)
		if err != nil {
			errors.As(err, &held)
			return err
		}
		if d.h.cand != nil {
			if err = fs.settleLockFile(d.h); err == nil {
				d.h = fs.handles.get(d.in.Fh, d.in.NodeId) // open as long as the request lasts
				if g != nil {
					g.SetKey(keyOf(d.h.node.id, &d.want))
				}
			}
		}
		node := d.h.node.id
		fs.lockMu.Lock()
		defer fs.lockMu.Unlock()
		if err == nil && d.exclusive() != (q.Kind == lockstate.Explicit) {
			lost, err = true, unix.EAGAIN // a lock on another part has come or gone since
		}
		switch {
		case err != nil:
		case !d.has:
			if err = fs.advisory.Try(node, d.want); errors.Is(err, advisory.ErrConflict) {
				conflict = err
			}
		case !slices.Contains(fs.advisory.Locks(node), d.want):
			err = unix.EAGAIN // it has changed since
		}
		if ok := finish(err == nil); !ok && err == nil {
			fs.advisory.Unlock(node, d.want)
			lost = !d.has
			err = unix.EAGAIN // for attempt, not for the caller
		}
		if err == nil {
			fs.settleLocked(node, nil, nil) // it may be less than it was
		}
		return err
	})
	return status, lost, held, conflict
}
