package fs

import (
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/stagefs/stagefs/fs/transport"
	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/advisory"
)

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

// obstacles are what stood in the way of a request's tries so far, and was waited for.
type obstacles struct {
	reaps int
	room  bool // was waited for

	settle, passing    time.Time // until when that is waited for; zero: not yet
	closing, unlocking patience
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
	var busy *atWorkError
	switch fs := r.fs; {
	case errors.Is(err, errUnseen):
		return after(r.see())
	case err == errOutdated:
		return tryAgain
	case errors.As(err, &busy):
		busy.await(false)
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
		if !fs.reapLock(held.Lock) {
			return after(r.rest(thawTime) && !transport.Killed(r.header.Pid))
		}
		o.reaps++
		return tryAgain
	case held.Err == lockstate.ErrHeld && o.reaps < maxReaps && fs.endIfClosed(held.Lock):
		o.reaps++
		return tryAgain
	case r.patient && held.Err == lockstate.ErrHeld && fs.isClosing(held.Lock) && o.unlocking.more(releaseTime):
		return after(r.rest(closePause))
	case held.Err == lockstate.ErrOpen && fs.settleLingering(held):
		return tryAgain
	case held.Err == lockstate.ErrOpen && fs.closingSoon(held) && o.closing.more(closeTime):
		return after(r.rest(closePause))
	case held.Settling && time.Since(held.Lock.Since) < settleAge && r.waitable != nil && r.waitable(held) && more(&o.settle, settleTime):
		return after(fs.awaitSettled(r, held.Lock.Token, time.Until(o.settle)))
	}
	return ends
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
		if h != nil && !h.candidate.Load() && !h.wasFlushed() && fs.procs.Alive(s.Owner) {
			return false
		}
	}
	return true
}

// isClosing reports whether all that keeps a lock are descriptions of which a descriptor was
// closed just now: the kernel sends their RELEASE when close(2) has returned (R2).
func (fs *FS) isClosing(l lockstate.Lock) bool {
	return len(l.Keys) > 0 && len(l.Files) == 0 && !l.LostKey && !l.Command && !slices.ContainsFunc(l.Keys, func(k any) bool {
		key := k.(fdKey)
		id, ok := fs.descriptionOf(key)
		h := fs.handles.get(id, key.node)
		return !ok || h != nil && h.flushedSince() > closeTime
	})
}

// descriptionOf returns by which description a lock was set: it may be an OFD lock.
func (fs *FS) descriptionOf(key fdKey) (id uint64, ok bool) {
	if key.flock {
		return key.id, true
	}
	locks := fs.advisory.Locks(key.node)
	i := slices.IndexFunc(locks, func(l advisory.Lock) bool { return keyOf(key.node, &l) == key })
	if i < 0 {
		return 0, false
	}
	return locks[i].Handle, true
}

// wasClosed reports whether a descriptor of a description was closed, perhaps the last one.
func (fs *FS) wasClosed(id, node uint64) bool {
	h := fs.handles.get(id, node)
	return h == nil || h.wasFlushed()
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

// more starts a deadline at its first use and reports whether it lies ahead.
func more(deadline *time.Time, d time.Duration) bool {
	if deadline.IsZero() {
		*deadline = time.Now().Add(d)
		return true
	}
	return time.Now().Before(*deadline)
}

// A patience bounds a wait for what a RELEASE ends, by the time and by how often it was
// looked: on a busy machine whoever sends or handles that one gets no processor for long.
type patience struct {
	until time.Time
	looks int
}

const fewestLooks = 40

func (p *patience) more(d time.Duration) bool {
	p.looks++
	return more(&p.until, d) || p.looks <= fewestLooks
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
