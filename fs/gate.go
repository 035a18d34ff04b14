package fs

import (
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs/transport"
	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// The gate is the one choke point that each mutating operation passes (W1).
// An operation is tried by FS.attempt: the try asks the table through
// FS.admit, FS.acquire or FS.openForWrite, and carries its change out on the
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
	// waitable says that a refusal by a lock that may yet be narrowed is
	// worth a short wait (A12).
	waitable func(*lockstate.HeldError) bool

	// owner is who is to own what is acquired; nil: as the mount does (H3).
	owner *lockstate.ScopeKind

	proc   *procid.Process
	asked  bool           // proc was looked up, without any lock
	trying bool           // a try is under way: its locks are held
	unseen bool           // it needs to know what is only found out without them
	scoped *scopeAnswer   // of proc, likewise
	alone  *scopeError    // why proc owns by itself what the mount's scope was to own
	sure   bool           // what a refusal depends on was waited for
	lock   lockstate.Lock // what was acquired

	// What a try keeps until it is over.
	aliases   bool  // FS.aliasMu, shared
	changing  *node // its mutex, shared,
	exclusive *node // or alone
	found     []*lockstate.Dir
	admitted  admissions
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
	for _, op := range a.ops {
		op.End()
	}
	for _, g := range a.grants {
		g.Abort()
	}
}

// release gives back what a try kept.
func (r *request) release() {
	if r.aliases {
		r.fs.aliasMu.RUnlock()
	}
	if r.changing != nil {
		r.fs.nodes.changingOf(r.changing).RUnlock()
	}
	if r.exclusive != nil {
		r.fs.nodes.changingOf(r.exclusive).Unlock()
	}
	for _, d := range r.found {
		r.fs.table.Forget(d)
	}
	r.aliases, r.changing, r.exclusive, r.found, r.trying = false, nil, nil, nil, false
	r.admitted = admissions{}
}

// adrift reports whether the request is about what the daemon has put aside.
func (r *request) adrift() bool {
	return r.parent != nil && r.parent.adrift() || r.node != nil && r.node.adrift()
}

const (
	// maxReaps bounds how many dead owners one request looks past.
	maxReaps = 1000
	// settleTime bounds how long a stager is held back (A12).
	settleTime = time.Second
	// settleAge is for how long a lock holds stagers back at all. Each of them
	// keeps the directory to itself meanwhile, and a crowd would take turns.
	settleAge = 5 * time.Second
	// closeTime bounds the wait for a RELEASE that the kernel sends after
	// close(2) or exit has returned already.
	closeTime = 100 * time.Millisecond
	// closePause is how often it is looked whether it has come.
	closePause = 500 * time.Microsecond
	// passTime bounds it where the way to a lock file's data is to become free: that
	// keeps nobody else waiting, and who opens one to lock it is never refused (A10).
	passTime = time.Second
)

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
		case held == nil && !refused(err):
			return statusOf(err)
		case held != nil && held.Err == lockstate.ErrUnlocked && r.adrift():
			return fuse.Status(unix.ESTALE) // the kernel asks what has the name now: that may be locked
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

// obstacles are what stood in the way of a request's tries so far, and was waited for.
type obstacles struct {
	reaps                    int
	settle, closing, passing time.Time // until when that is waited for; zero: not yet
	room                     bool      // was waited for
}

// An outcome says what an obstacle means for a request.
type outcome int

const (
	ends        outcome = iota // it stays in the way
	tryAgain                   // it may be gone
	interrupted                // that was waited for, and the caller has a signal
)

// after is the outcome of a wait, which was not interrupted if it is done.
func after(done bool) outcome {
	if !done {
		return interrupted
	}
	return tryAgain
}

// clear is for what is no lock.
func (o *obstacles) clear(r *request, err error) outcome {
	switch fs := r.fs; {
	case errors.Is(err, errUnseen):
		return after(r.see())
	case err == errOutdated:
		return tryAgain
	case errors.Is(err, errMayMap) && fs.passesNoLonger(r.node) && more(&o.passing, passTime):
		return after(r.rest(closePause))
	case !o.room && fs.hasRoomNow(err):
		o.room = true
		return tryAgain
	}
	return ends
}

// clearHeld is for what a lock or an open handle refuses.
func (o *obstacles) clearHeld(r *request, held *lockstate.HeldError) outcome {
	switch fs := r.fs; {
	case r.unsure(held):
		return after(r.seeClaims(held))
	case held.Err == lockstate.ErrHeld && o.reaps < maxReaps && !held.Lock.Sealed && !fs.lives(held.Lock):
		// R4: a dead owner stands in nobody's way, even if the
		// news of its death has not been handled yet. The lock may
		// pass to a parent that is dead as well, and so on.
		fs.reapLock(held.Lock)
		o.reaps++
		return tryAgain
	case held.Err == lockstate.ErrHeld && held.Lock.LostKey && o.reaps < maxReaps && !fs.stillOpen(held.Lock):
		fs.table.EndLost(held.Lock.Token) // R2
		fs.lostKeys.forget(held.Lock.Token)
		o.reaps++
		return tryAgain
	case held.Err == lockstate.ErrOpen && fs.settleLingering(held):
		return tryAgain
	case held.Err == lockstate.ErrOpen && fs.closingSoon(held) && more(&o.closing, closeTime):
		return after(r.rest(closePause))
	case held.Settling && time.Since(held.Lock.Since) < settleAge && r.waitable != nil && r.waitable(held) && more(&o.settle, settleTime):
		return after(fs.awaitSettled(r, held.Lock.Token, time.Until(o.settle)))
	}
	return ends
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

// more starts a deadline at its first use and reports whether it lies ahead.
func more(deadline *time.Time, d time.Duration) bool {
	if deadline.IsZero() {
		*deadline = time.Now().Add(d)
		return true
	}
	return time.Now().Before(*deadline)
}

// sleep reports false when the request was interrupted.
func sleep(cancel <-chan struct{}, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-cancel:
		return false
	}
}

// goesOn reports whether a request that was cancelled is to wait all the same: a
// signal ends no call of a local file system, unless it kills.
func (r *request) goesOn() bool {
	return !r.endless && !r.fs.kernel.Stopping() && !transport.Killed(r.header.Pid)
}

// rest is sleep that only ends early if the request is not to go on.
func (r *request) rest(d time.Duration) bool {
	if sleep(r.cancel, d) {
		return true
	}
	if !r.goesOn() {
		return false
	}
	time.Sleep(d)
	return true
}

// awaitSettled waits until the lock ends, until something beneath it is
// changed (then it will not be narrowed), or until d is over.
func (fs *FS) awaitSettled(r *request, token uint64, d time.Duration) bool {
	ended, changed := fs.table.Watch(token)
	t, kill := time.NewTimer(d), time.NewTicker(killTime)
	defer t.Stop()
	defer kill.Stop()
	for cancel := r.cancel; ; {
		select {
		case <-ended:
			return true
		case <-changed:
			return true
		case <-t.C:
			return true
		case <-cancel:
			cancel = nil
		case <-kill.C:
		}
		if !r.goesOn() {
			return false
		}
	}
}

// untilKilled returns what is closed when the request is not to go on. Of a request
// the kernel tells one signal, so that it takes a look to hear of one that kills
// after one that does not. The caller calls stop.
func (r *request) untilKilled() (over <-chan struct{}, stop func()) {
	cancel, done := make(chan struct{}), make(chan struct{})
	var looking sync.WaitGroup
	looking.Go(func() {
		kill := time.NewTicker(killTime)
		defer kill.Stop()
		for r.goesOn() {
			select {
			case <-kill.C:
			case <-done:
				return
			}
		}
		close(cancel)
	})
	return cancel, func() { close(done); looking.Wait() }
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
		return nil, lockstate.ErrNobody
	case q.Client == "" && r.scope() != lockstate.ProcessScope:
		if r.scoped == nil {
			r.unseen = true
			return nil, errUnseen
		}
		if r.scoped.err != nil && r.owner != nil {
			return nil, r.scoped.err
		}
		errors.As(r.scoped.err, &r.alone)
		q.Scope = r.scoped.scope // or the process alone: it did not ask for more
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
		if err := r.fs.watchLine(q.Process); err != nil {
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
		r.fs.log.Warn("locks are their process's alone, as with --owner=process", "owner", r.scope(), "pid", r.proc.ID().Pid, "why", r.alone)
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

// closingSoon reports whether all handles in the way are about to be closed:
// their opener is dead, or has closed a descriptor of them already, or they are
// of candidates, which are closed before they are linked.
func (fs *FS) closingSoon(held *lockstate.HeldError) bool {
	for _, s := range held.Handles {
		h := fs.handles.byLock(s.Handle)
		if h != nil && h.lingering() {
			if !h.releasedJustNow() {
				return false
			}
			continue
		}
		if h != nil && !h.candidate.Load() && !h.flushed.Load() && fs.procs.Alive(s.Owner) {
			return false
		}
	}
	return true
}

// passing returns a handle of n that passes the daemon, or nil: if there is one, such
// a one of which no descriptor was closed yet.
func (fs *FS) passing(n *node) (found *handle) {
	fs.handles.any(func(h *handle) bool {
		if h.node != n || !h.mode.passes() {
			return false
		}
		found = h
		return !h.flushed.Load()
	})
	return found
}

// passesNoLonger reports whether all handles of n that pass the daemon have been
// closed once: they are about to be released.
func (fs *FS) passesNoLonger(n *node) bool {
	h := fs.passing(n)
	return h == nil || h.flushed.Load()
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
	if p := h.openedBy(); p != nil {
		return fmt.Errorf("%w: pid %d opened it for %s", err, p.ID().Pid, what)
	}
	if p := fs.procs.Glance(h.tid); p != nil {
		return fmt.Errorf("%w: pid %d opened it for %s", err, p.ID().Pid, what)
	}
	return fmt.Errorf("%w: thread %d opened it for %s", err, h.tid, what)
}

// frozen is the answer to changes of the control directory's own names.
const frozen = fuse.Status(syscall.EPERM)
