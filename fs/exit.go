package fs

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// watch makes sure that the death of a process is noticed (R4).
func (fs *FS) watch(p *procid.Process) error {
	fs.watchMu.Lock()
	defer fs.watchMu.Unlock()
	return fs.watchLocked(p)
}

func (fs *FS) watchLocked(p *procid.Process) error {
	if fs.watched[p.ID()] != nil {
		return nil
	}
	if err := fs.procs.Watch(p.ID(), fs.exited); err != nil {
		return err
	}
	fs.watched[p.ID()] = p
	return nil
}

// watchNew watches who has just got something. It leaves the next daemon, which has to
// watch them all, the descriptors that it needs to start with: EMFILE.
func (fs *FS) watchNew(p *procid.Process, watch func(*procid.Process) error) error {
	fs.watchMu.Lock()
	full := len(fs.watched) >= fs.maxWatched && fs.watched[p.ID()] == nil
	fs.watchMu.Unlock()
	if full {
		return fmt.Errorf("watch %v: %w", p.ID(), unix.EMFILE)
	}
	return watch(p)
}

// watchLimit is how many processes may be watched before nobody new gets a lock.
func watchLimit() int {
	most := maxDescriptors()
	return int(most - max(most/8, min(most/2, startFDs)))
}

// startFDs is more than a daemon needs until it serves.
const startFDs = 64

// watchLine watches a process that is about to own a lock, and those that the
// lock may pass to: so that it is known later whether they lived (R5).
func (fs *FS) watchLine(p *procid.Process) error {
	fs.watchMu.Lock()
	defer fs.watchMu.Unlock()
	if err := fs.watchLocked(p); err != nil {
		return err
	}
	for i, a := range p.Lineage() {
		if a.Reaper {
			break
		}
		if fs.watched[a.ID] != nil {
			continue
		}
		heir := fs.procs.Process(a.ID)
		if heir == nil { // not to be looked at with locks held
			heir = procid.Recorded(a.ID, p.UID(), p.Lineage()[i+1:])
		}
		if fs.watchLocked(heir) != nil {
			break // out of reach
		}
	}
	return nil
}

// heir returns a process that a lock may pass to, or nil if its own death has
// been carried out.
func (fs *FS) heir(id procid.ID) *procid.Process {
	fs.watchMu.Lock()
	p := fs.watched[id]
	fs.watchMu.Unlock()
	if p != nil {
		return p
	}
	if p = fs.alive(id); p != nil {
		if err := fs.watch(p); err != nil && !errors.Is(err, os.ErrClosed) {
			return nil // its own death would not be noticed
		}
	}
	return p
}

// unwatch stops watching a process that owns nothing any more.
func (fs *FS) unwatch(id procid.ID) {
	fs.watchMu.Lock()
	defer fs.watchMu.Unlock()
	if fs.watched[id] != nil && !fs.table.Concerns(id) && !fs.cands.has(id) {
		fs.procs.Unwatch(id)
		delete(fs.watched, id)
	}
}

// exited is told of the death of a watched process.
func (fs *FS) exited(id procid.ID, how procid.Exit) {
	fs.reapMu.Lock()
	defer fs.reapMu.Unlock()
	fs.carryOut(id, how)
	// From here on no lock passes to it; still under reapMu.
	fs.watchMu.Lock()
	delete(fs.watched, id)
	fs.watchMu.Unlock()
}

// reap carries out the death of a process that stands in somebody's way,
// without waiting for the news of it. It reports false where that has to wait until the
// backing thaws: who only looks does not (C5), and who wants a lock can be killed (A8).
func (fs *FS) reap(id procid.ID) bool {
	return fs.reapUnlessFrozen(func() {
		if fs.table.Owns(id) || fs.cands.has(id) {
			fs.carryOut(id, fs.procs.ExitOf(id))
		}
	})
}

// thawTime is how long the end of a lock waits for the backing before that passes for frozen.
const thawTime = 200 * time.Millisecond

func (fs *FS) reapUnlessFrozen(reap func()) bool {
	frozen := func() bool {
		since := fs.thaws.Load()
		return since != nil && time.Since(*since) > thawTime
	}
	if frozen() {
		return false
	}
	done := make(chan struct{})
	fs.clearings.Go(func() {
		defer close(done)
		fs.reapMu.Lock()
		defer fs.reapMu.Unlock()
		reap()
	})
	for {
		select {
		case <-done:
			return true
		case <-time.After(thawTime):
			if frozen() {
				return false
			}
		}
	}
}

// reapOn reaps the dead owners of locks on d.
func (fs *FS) reapOn(d *lockstate.Dir) {
	for _, l := range fs.table.On(d) {
		fs.reapIfDead(l)
	}
}

// reapDead ends those of some locks whose owner is dead, or has closed what kept them,
// as far as nobody has told the daemon so far. It reports whether there were any.
func (fs *FS) reapDead(locks []lockstate.LockState) bool {
	found := false
	for _, l := range locks {
		switch {
		case !fs.lives(l.Lock):
			if !fs.reapLock(l.Lock) {
				continue
			}
		case !fs.endIfClosed(l.Lock):
			continue
		}
		found = true
	}
	return found
}

// carryOut does what R4 and R5 say. The lock files go before the locks, so
// that nobody finds a lock file without its lock.
func (fs *FS) carryOut(id procid.ID, how procid.Exit) {
	if fs.reaping[id] {
		return
	}
	if fs.reaping == nil {
		fs.reaping = make(map[procid.ID]bool)
	}
	fs.reaping[id] = true
	defer delete(fs.reaping, id)
	for _, o := range fs.table.Before(id) {
		if !fs.procs.Alive(o) {
			fs.carryOut(o, fs.procs.ExitOf(o))
		}
	}
	if !crashed(how) && fs.noteContent(id) != nil {
		fs.carryOutLater(id, how)
		return
	}
	dead, heirs := fs.table.Exit(id, how, fs.heir)
	for _, h := range heirs {
		fs.narrowOwned(h)
	}
	log := newBurst(fs.log)
	defer log.done()
	members := make(map[lockstate.Scope]member)
	var later []uint64
	for _, l := range dead {
		if l.Scope.Kind != lockstate.ProcessScope {
			m, known := members[l.Scope]
			if !known {
				m.proc, m.busy = fs.member(l.Scope)
				members[l.Scope] = m
			}
			if m.proc != nil && fs.represent(l, m.proc) {
				continue
			}
			if m.proc == nil && m.busy {
				later = append(later, l.Token)
				continue
			}
		}
		fs.endDead(l, id, how, log)
	}
	if len(later) > 0 {
		fs.representLater(id, how, later)
		return // its candidates are of the locks that go on
	}
	fs.cands.reap(fs, id)
}

// endDead ends one lock of a dead process, unless what it left is being cleared away.
func (fs *FS) endDead(l lockstate.Lock, id procid.ID, how procid.Exit, log *burst) {
	policy := lockstate.Keep
	if l.Crashed || crashed(how) {
		policy = fs.table.Policy(l)
	}
	if l.Sealed || fs.isToClear(l.Token) || policy != lockstate.Keep && !fs.awaitClosed(l) || !fs.endKeysOf(l, id) {
		return
	}
	if !fs.clearUp(l, policy, lockstate.Ending{Reason: lockstate.Exited, Why: crashText(how)}, log) {
		fs.table.End(l.Token, lockstate.Exited)
		fs.logReleased(l, lockstate.Exited)
	}
}

// clearUp removes the lock files of a lock whose owner is no more, and does with the
// content what its policy says. It reports whether that ends the lock.
func (fs *FS) clearUp(l lockstate.Lock, policy string, how lockstate.Ending, log *burst) bool {
	fs.reapWithin(l, fs.carryOutOf)
	if _, err := fs.cleanUp(l, true); err != nil {
		log.tell(slog.LevelWarn, "cannot clean up after a lock", "dir", l.Path, "reason", how.Reason, "err", err)
	}
	return fs.clear(l, policy, how, clearing{log: log})
}

// alive returns the process with an identity, or nil if it is dead. One that
// can't be looked at lives.
func (fs *FS) alive(id procid.ID) *procid.Process {
	p, err := fs.procs.ByPid(id.Pid)
	if errors.Is(err, procid.ErrBusy) || errors.Is(err, os.ErrClosed) {
		return procid.Recorded(id, 0, nil)
	}
	switch {
	case !fs.procs.Alive(id):
		return nil
	case err != nil || p.ID() != id:
		return procid.Recorded(id, 0, nil)
	}
	return p
}
