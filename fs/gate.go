package fs

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs/transport"
	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// The gate is the one choke point that each mutating operation passes (W1).
// An operation is tried by FS.attempt: the try asks the table through its
// request's admit, acquire or openForWrite, and carries its change out on the
// backing before it gives back what they returned.

// A request is one try-and-retry of a mutating operation.
type request struct {
	fs     *FS
	cancel <-chan struct{}
	header *fuse.InHeader
	op     string
	parent *node  // for the log: the directory,
	name   string // and the name in it; or
	node   *node  // the node itself, or
	at     string // a path relative to the root

	// errno replaces EBUSY as the answer to a refusal (A8).
	errno fuse.Status
	// forced requests are carried out although they were refused: the mount
	// only observes.
	forced bool
	// quiet refusals are not noted: the request waits.
	quiet bool
	// endless requests may wait without end, which any signal ends.
	endless bool
	// patient requests wait for a moment for a lock whose descriptor was closed just now: of
	// others, the kernel may keep the directory locked meanwhile, for its holder, too.
	patient bool
	// waitable says that a refusal by a lock that may yet be narrowed is
	// worth a short wait (A12).
	waitable func(*lockstate.HeldError) bool

	// owner is who is to own what is acquired; nil: as the mount does (H3).
	owner *lockstate.ScopeKind

	proc    *procid.Process
	unknown error           // why proc is not known yet, see notYet
	asked   bool            // proc was looked up, without any lock
	trying  bool            // a try is under way: its locks are held
	unseen  bool            // it needs to know what is only found out without them
	scoped  *scopeAnswer    // of proc, likewise
	alone   *scopeError     // why proc owns by itself what the mount's scope was to own
	sure    bool            // what a refusal depends on was waited for
	lock    *lockstate.Lock // what was acquired
	awaits  atWork          // what was waited for

	// What a try keeps until it is over.
	aliases  bool     // FS.aliasMu, shared
	changing [2]*node // their locks, see changeLocks; nil: none
	found    []*lockstate.Dir
	admitted admissions
}

// admissions are what a try was let in for. It ends them itself, unless it panics:
// else whoever comes next would wait for them without end.
type admissions struct {
	ops    []*lockstate.Op
	grants []*lockstate.Grant
	handle *handle // what it opens

	few [2]*lockstate.Op // spares ops an allocation
}

func (a *admissions) began(op *lockstate.Op) {
	if a.ops == nil {
		a.ops = a.few[:0]
	}
	a.ops = append(a.ops, op)
}

// giveBack ends what a try that has panicked was let in for, in whatever state that
// has left it. First goes what others wait for.
func (a *admissions) giveBack(fs *FS) {
	h := a.handle
	if h != nil {
		defer fs.abandon(h)
		h.lock.Close()
	}
	endAll(a.ops)
	for _, g := range a.grants {
		g.Abort()
	}
}

// release gives back what a try kept.
func (r *request) release() {
	if r.aliases {
		r.fs.aliasMu.RUnlock()
	}
	for _, n := range r.changing {
		if n != nil {
			r.fs.nodes.changing.give(n)
		}
	}
	for _, d := range r.found {
		r.fs.table.Forget(d)
	}
	r.aliases, r.changing, r.found, r.trying = false, [2]*node{}, nil, false
	r.admitted = admissions{}
}

// adrift reports whether the request is about what the daemon has put aside.
func (r *request) adrift() bool {
	return r.parent != nil && r.parent.adrift() || r.node != nil && r.node.adrift()
}

// attempt runs try until it is neither refused by a lock whose owner is dead
// nor by what a short wait may clear away. Names in the backing stand still
// during a try; exclusive excludes all other tries.
func (fs *FS) attempt(r *request, exclusive bool, try func() error) fuse.Status {
	var o obstacles
	for {
		err := fs.locked(exclusive, func() error { return r.tryOnce(try) })
		r.tellAlone()
		if err == nil {
			fs.leftovers.changed()
			fs.findMapped(r.lock)
			return fuse.OK
		}
		var held *lockstate.HeldError
		var means outcome
		if errors.As(err, &held) {
			means = o.clearHeld(r, held)
		} else {
			means = o.clear(r, err)
		}
		switch {
		case means == tryAgain:
			continue
		case means == interrupted:
			return fuse.EINTR
		case held == nil && !refused(err) && !(fs.opts.Observe && noLock(err)):
			return statusOf(err)
		case held != nil && held.Err == lockstate.ErrUnlocked && r.adrift():
			return fuse.Status(unix.ESTALE) // the kernel asks what has the name now: that may be locked
		case fs.opts.Observe:
		case r.unknown != nil && !refused(r.unknown):
			return statusOf(r.unknown) // it may be the holder's
		case held != nil && procid.IsShort(held.Unsure):
			return statusOf(held.Unsure) // likewise
		}
		if errors.Is(err, errMayMap) {
			err = fs.namePassing(r.node, err)
		}
		if status := fs.deny(r, err, held); !fs.opts.Observe || r.forced {
			return status
		}
		r.forced = true
	}
}

// tryOnce carries out a try. One that panics leaves nothing behind that others wait for.
func (r *request) tryOnce(try func() error) error {
	r.trying = true
	defer r.release()
	panics := true
	defer func() {
		if panics {
			r.admitted.giveBack(r.fs)
		}
	}()
	err := try()
	panics = false
	return err
}

// locked is try with FS.ns held, alone or not.
func (fs *FS) locked(exclusive bool, try func() error) error {
	if exclusive {
		fs.lockNames()
		defer fs.ns.Unlock()
	} else {
		fs.ns.RLock()
		defer fs.ns.RUnlock()
	}
	return try()
}

// lockNames takes FS.ns alone for a change in the backing. Where that is frozen it is
// waited for before, with nobody behind.
func (fs *FS) lockNames() {
	fs.back.awaitThaw()
	fs.ns.Lock()
}

const (
	// discardTime is how long the end of a dead owner's lock waits for others that keep
	// FS.ns: no other one ends meanwhile (R4).
	discardTime = 500 * time.Millisecond
	// Within stuckTime after that was in vain, it waits for stuckWait: a process may have
	// many locks.
	stuckTime = 5 * time.Second
	stuckWait = 5 * time.Millisecond
)

// errNotEnded: who changes a name would have to wait for somebody else's call.
var errNotEnded = fmt.Errorf("the file system below has not answered a call: %w", unix.EBUSY)

// lockNamesBriefly is lockNames for who holds FS.reapMu: it fails where the backing leaves
// somebody else's call unanswered.
func (fs *FS) lockNamesBriefly() error {
	now := time.Now()
	fs.thaws.Store(&now)
	fs.back.awaitThaw()
	fs.thaws.Store(nil)
	d, stuck := discardTime, fs.stuck.Load()
	if stuck != nil && time.Since(*stuck) < stuckTime {
		d = stuckWait
	}
	if fs.ns.LockWithin(d) {
		fs.stuck.CompareAndSwap(stuck, nil)
		return nil
	}
	if d == discardTime {
		now := time.Now()
		fs.stuck.Store(&now)
	}
	return errNotEnded
}

// admit asks the table for a change. The caller ends the operation.
func (r *request) admit(c lockstate.Change) (*lockstate.Op, error) {
	c.Process, c.Who, c.Force = r.proc, r.process, c.Force || r.forced
	if r.unseen {
		return nil, errUnseen
	}
	op, err := r.fs.table.Begin(c)
	if r.unseen {
		op.End()
		return nil, errUnseen
	}
	if err == nil {
		r.admitted.began(op)
	}
	return op, err
}

// admitAttrs is admit for a change of a node's attributes: those of a directory are no
// content (R5).
func (r *request) admitAttrs(n *node) (*lockstate.Op, error) {
	c, err := r.covering(n)
	if err != nil {
		return nil, err
	}
	c.Quiet = n.isDir()
	return r.admit(c)
}

// acquire asks the table for a lock.
func (r *request) acquire(q lockstate.Request) (*lockstate.Grant, error) {
	q.Process = r.process()
	switch {
	case r.unseen:
		return nil, errUnseen
	case q.Process == nil:
		return nil, cmp.Or(r.unknown, lockstate.ErrNobody)
	case q.Client == "" && r.scope() != lockstate.ProcessScope:
		if r.scoped == nil {
			r.unseen = true
			return nil, errUnseen
		}
		if r.scoped.err != nil && r.owner != nil {
			return nil, r.scoped.err
		}
		if r.scoped.err != nil && !errors.As(r.scoped.err, &r.alone) {
			return nil, r.scoped.err
		}
		q.Scope = r.scoped.scope // or the process alone: it did not ask for more
	}
	if !r.endless {
		// Over io_uring the kernel does not tell of a signal that came before the request was here.
		q.Waits = func() bool { return !transport.Killed(r.header.Pid) }
	}
	g, err := r.fs.table.Acquire(r.cancel, q)
	if err == lockstate.ErrCancelled && r.goesOn() {
		over, stop := r.untilKilled()
		g, err = r.fs.table.Acquire(over, q)
		stop()
	}
	if err != nil {
		return nil, err
	}
	r.admitted.grants = append(r.admitted.grants, g)
	if !g.Covered() && q.Client == "" {
		if err := r.fs.watchNew(q.Process, r.fs.watchLine); err != nil {
			g.Abort()
			return nil, err
		}
	}
	return g, nil
}

// tellAlone tells once that the mount's owner scope can't be had by everybody. The log
// may have to be waited for: no lock is held.
func (r *request) tellAlone() {
	if r.alone == nil {
		return
	}
	r.fs.ownedAlone.Do(func() {
		r.fs.log.Warn("locks are their process's alone, as with --owner=process", "owner", r.scope(), "pid", r.proc.ID().Pid, "err", r.alone)
	})
}

// scope returns who is to own what is acquired (H3).
func (r *request) scope() lockstate.ScopeKind {
	if r.owner != nil {
		return *r.owner
	}
	k, _ := scopeNamed(r.fs.opts.Owner)
	return k
}

// deny counts and shows a refusal and returns the answer to it (W6).
func (fs *FS) deny(r *request, err error, held *lockstate.HeldError) fuse.Status {
	status := statusOf(err)
	if r.errno != 0 && status == fuse.EBUSY {
		status = r.errno
	}
	if !r.quiet {
		fs.denials.add(fs, r, status, err, held)
	}
	return status
}
