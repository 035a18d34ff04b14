package fs

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// release ends the lock on a directory for a holder of it (R6). The lock files
// that keep it are removed.
func (c *command) release() fuse.Status {
	d, ok := c.fs.table.Find(split(c.dir)...)
	if ok {
		defer c.fs.table.Forget(d)
		c.fs.reapOn(d)
	}
	observed := c.fs.opts.Observe && c.token == 0 // the acquisition may have been refused
	if !ok && observed {
		return c.off()
	}
	if !ok {
		return c.fail(lockstate.ErrNoLock)
	}
	p, unknown := c.process()
	l, holds, unsure, err := c.ofClient(p, d)
	switch {
	case observed && (err != nil || l.Token == 0 || !holds):
		return c.off()
	case err != nil:
		return c.fail(err)
	case l.Token == 0, c.token != 0 && c.token != l.Token:
		return c.fail(lockstate.ErrNoLock)
	case !holds:
		return c.notHeld(p, cmp.Or(unknown, unsure), l)
	}
	c.tell(l)
	how := lockstate.Ending{Reason: lockstate.Given}
	if p != nil {
		how.By = p.ID().Pid
	}
	policy := lockstate.Keep
	switch {
	case c.destroy && l.Kind == lockstate.Shared:
		c.answer.Message = "a shared lock is none to remove the directory by"
		return fuse.EPERM
	case c.destroy:
		if status := c.othersIn(l); status != fuse.OK {
			return status
		}
		err := c.fs.locked(false, func() error { return c.mayRemove(l.Path) })
		if errors.Is(err, unix.EACCES) {
			c.answer.Message = "not all of it is yours to remove"
			return fuse.EACCES
		}
		if err != nil {
			return c.fail(err)
		}
		policy = lockstate.Destroy
	case c.failed:
		how.Reason, policy = lockstate.Failed, c.fs.table.Policy(l)
	}
	status := c.giveBack(l, how, policy)
	if status == fuse.OK {
		if unlogged, ok := c.fs.given.pass(time.Now()); ok {
			c.fs.log.Info("lock released", append([]any{"dir", l.Path, "pid", l.Owner.Pid, "client", l.Client, "token", l.Token, "by", how.By, "reason", how.Reason}, unlogged...)...)
		}
	}
	return status
}

// othersIn refuses to remove a directory with what somebody else holds in it, or
// of it (C2).
func (c *command) othersIn(l lockstate.Lock) fuse.Status {
	for range maxReaps {
		other, ok := c.fs.table.Other(l.Token)
		if !ok {
			return fuse.OK
		}
		if !other.Sealed && c.fs.reapIfDead(other) {
			continue
		}
		c.held(&lockstate.HeldError{Err: lockstate.ErrHeld, Lock: other})
		c.answer.Message += "; nothing was removed or released"
		return fuse.EBUSY
	}
	return fuse.EBUSY
}

// by is the pid of who gives the command; of his thread, if he is gone.
func (c *command) by() int {
	if p, _ := c.process(); p != nil {
		return p.ID().Pid
	}
	return int(c.header.Pid)
}

// breakDir ends all locks on a directory for an admin (R6), or removes its
// orphaned lock files (S3).
func (c *command) breakDir() fuse.Status {
	fs, dir := c.fs, c.dir
	if !c.admin() {
		return c.notAdmin()
	}
	how := lockstate.Ending{Reason: lockstate.Broken, By: c.by(), Why: c.why}
	found := false
	orphans := fs.orphans.in(fs, dir) // but what these locks leave behind
	if d, ok := fs.table.Find(split(dir)...); ok {
		defer fs.table.Forget(d)
		for _, l := range fs.table.On(d) {
			found = true
			fs.log.Warn("lock broken", "dir", l.Path, "pid", l.Owner.Pid, "token", l.Token, "by", c.by(), "uid", c.uid, "why", c.why)
			status := c.endLock(l, how)
			_, there := fs.table.Lock(l.Token)
			endedByItself := status == statusOf(lockstate.ErrNoLock) && !there
			if status != fuse.OK && !endedByItself {
				return status
			}
		}
	}
	for _, o := range orphans {
		found = true
		taken := false
		err := fs.discard(&discarding{name: o, place: func() (string, bool) {
			taken = len(fs.locksOn(dir)) > 0 // meanwhile, perhaps by that very file: it is not ours (W3)
			return dir, !taken
		}})
		switch {
		case err != nil:
			return c.fail(fmt.Errorf("lock file %s: %w", o, err))
		case !taken:
			fs.log.Warn("orphaned lock file removed", "dir", dir, "file", o, "by", c.by(), "uid", c.uid, "why", c.why)
		}
	}
	if !found {
		return c.fail(lockstate.ErrNoLock)
	}
	return fuse.OK
}

// endLock ends a lock and removes its lock files. What it covered stays.
func (c *command) endLock(l lockstate.Lock, how lockstate.Ending) fuse.Status {
	fs := c.fs
	if err := fs.dropKeepers(l); err != nil {
		return c.fail(err)
	}
	return fs.endNow(l, how)
}

// endNow is endLock once dropKeepers is done.
func (fs *FS) endNow(l lockstate.Lock, how lockstate.Ending) fuse.Status {
	if err := fs.table.EndAs(l.Token, how); err != nil {
		return statusOf(err)
	}
	fs.logReleased(l, how.Reason)
	fs.unwatch(l.Owner)
	return fuse.OK
}

// dropKeepers takes away what keeps a lock that is about to end: locks of descriptors and
// lock files. If others work in its lock directory, that is an orphan then.
func (fs *FS) dropKeepers(l lockstate.Lock) error {
	fs.endKeys(l)
	fs.reapWithin(l, func(in lockstate.Lock) { fs.reapLock(in) })
	gone, err := fs.cleanUp(l, false)
	switch {
	case errors.Is(err, errLockDirUsed):
		fs.log.Warn("something is left of a lock", "dir", l.Path, "token", l.Token, "err", err)
		return nil
	case err != nil:
		fs.table.Remains(l.Token, gone...)
	}
	return err
}

// giveBack is endLock by a holder, who says what is to become of the content:
// of all that is in the directory, or of what was made under the lock (R7).
func (c *command) giveBack(l lockstate.Lock, how lockstate.Ending, policy string) fuse.Status {
	fs := c.fs
	if policy == lockstate.Keep {
		return c.endLock(l, how)
	}
	if err := fs.dropKeepers(l); err != nil {
		return c.fail(err)
	}
	if fs.clear(l, policy, how, clearing{patient: true, all: c.destroy}) {
		fs.unwatch(l.Owner)
		return fuse.OK
	}
	status := fs.endNow(l, how)
	if status == fuse.OK {
		c.answer.Message = "released, but the content is kept; the daemon's log says why"
	}
	return status
}
