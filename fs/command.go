package fs

import (
	"cmp"
	"errors"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// A command is one line written to the ctl file, while it is carried out.
type command struct {
	ctlLine

	fs     *FS
	cancel <-chan struct{}
	header *fuse.InHeader
	uid    uint32 // of who gives it

	permitted bool // the caller may make entries in dir

	answer lockstate.Answer
	watch  *watch // for a read of the same descriptor
}

func (c *command) run(line string) fuse.Status {
	var err error
	if c.ctlLine, err = parseCtl(line); err != nil {
		c.answer.Message = err.Error()
		return fuse.EINVAL
	}
	c.answer.Dir, c.answer.DirBytes = text(c.dir)
	if c.fs.opts.NoLocking && !oneOf(c.verb, "break", "restore", "discard") && c.dir != "" {
		return c.off()
	}
	if oneOf(c.verb, "acquire", "wait", "restore") && within(c.dir, ControlDir) {
		return c.fail(unix.ENOENT) // what has this name below is the daemon's own (see hidden.go)
	}
	switch c.verb {
	case "acquire":
		return c.acquire()
	case "wait":
		return c.await()
	case "release":
		return c.release()
	case "break":
		return c.breakDir()
	case "renew":
		return c.renew()
	case "join":
		return c.join()
	case "watch":
		return c.follow()
	case "replace":
		return c.replace()
	case "restore":
		return c.restore()
	case "discard":
		return c.discardQuarantined()
	case "check":
		if c.dir == "" {
			return c.checkTables()
		}
		return c.check()
	}
	return fuse.EINVAL
}

// off answers where there are no locks, or where one was refused, which was only noted:
// a program that goes by the locks is not to fail for want of one.
func (c *command) off() fuse.Status {
	c.answer.Kind = "off"
	return fuse.OK
}

// fail answers with an error of the tables.
func (c *command) fail(err error) fuse.Status {
	c.answer.Message = err.Error()
	var held *lockstate.HeldError
	if errors.As(err, &held) {
		c.held(held)
	}
	return statusOf(err)
}

// held tells what stood in the way.
func (c *command) held(held *lockstate.HeldError) {
	c.answer.Message = held.Error()
	if held.Lock.Token != 0 {
		row := c.fs.row(lockstate.LockState{Lock: held.Lock})
		c.answer.Held = &row
	}
	if len(held.Handles) > 0 {
		c.answer.Blockers = c.fs.blockers(held.Handles)
	}
}

// tell answers with a lock.
func (c *command) tell(l lockstate.Lock) fuse.Status {
	row := c.fs.row(lockstate.LockState{Lock: l})
	a := &c.answer
	a.Dir, a.DirBytes, a.Token, a.Kind, a.Protocol, a.Since = row.Dir, row.DirBytes, row.Token, row.Kind, row.Protocol, row.Since
	a.Client, a.TTL, a.Deadline = row.Client, row.TTL, row.Deadline
	c.fs.table.Flush() // it may just have been handed over
	return fuse.OK
}

// admin reports whether the caller may do what is not a holder's to do.
func (c *command) admin() bool { return c.uid == 0 || c.uid == c.fs.uid }

// notAdmin refuses what only an admin may do.
func (c *command) notAdmin() fuse.Status {
	c.answer.Message = "only root and who mounted may do this"
	return fuse.EPERM
}

// process returns the caller, which may be nil, and why.
func (c *command) process() (p *procid.Process, unknown error) {
	p, unknown, _ = c.fs.process(c.header)
	return p, unknown
}

// checkTables verifies the tables' invariants, for an admin: it stops them for
// a moment. EIO says that one does not hold; the log says which.
func (c *command) checkTables() fuse.Status {
	if !c.admin() {
		return c.notAdmin()
	}
	if err := errors.Join(c.fs.table.Check(), c.fs.advisory.Check()); err != nil {
		c.fs.log.Error("the tables are damaged", "err", err)
		c.answer.Message = err.Error()
		return fuse.EIO
	}
	return fuse.OK
}

// ofClient returns the lock on a directory that the command is about, and
// whether the caller may give it back: the client's lease if one is named.
func (c *command) ofClient(p *procid.Process, d *lockstate.Dir) (l lockstate.Lock, holds bool, unsure, err error) {
	if c.client == "" {
		l, holds, unsure = c.fs.table.HeldOn(p, d, c.token)
		return l, holds, notYet(unsure), nil
	}
	l, err = c.fs.table.OfClient(d, c.client, c.uid)
	return l, err == nil, nil, err
}

// renew gives a lease its time again (L1).
func (c *command) renew() fuse.Status {
	d := c.fs.table.At(split(c.dir)...)
	defer c.fs.table.Forget(d)
	l, err := c.fs.table.Renew(d, c.client, c.uid, c.ttl)
	if err != nil {
		return c.fail(err)
	}
	if c.ttl != 0 {
		c.fs.expiry.set() // it may end earlier now
	}
	return c.tell(l)
}

// join makes the caller a holder of a lease (L2).
func (c *command) join() fuse.Status {
	p, unknown := c.process()
	if p == nil {
		return c.fail(cmp.Or(unknown, lockstate.ErrNobody))
	}
	d := c.fs.table.At(split(c.dir)...)
	defer c.fs.table.Forget(d)
	l, err := c.fs.table.Join(p, d, c.client, c.uid, c.fs.procs.Alive)
	if err != nil {
		return c.fail(err)
	}
	return c.tell(l)
}

// check tells by which lock the caller holds a directory.
func (c *command) check() fuse.Status {
	d := c.fs.table.At(split(c.dir)...)
	defer c.fs.table.Forget(d)
	if c.client != "" {
		at := d
		if l, ok := c.fs.table.Governing(d); ok {
			at = l.Dir // C1
		}
		l, err := c.fs.table.OfClient(at, c.client, 0)
		if err == nil && c.token != 0 && c.token != l.Token {
			err = lockstate.ErrNoLock
		}
		if err != nil {
			return c.fail(err)
		}
		return c.tell(l)
	}
	var l lockstate.Lock
	for range maxReaps {
		var ok bool
		if l, ok = c.fs.table.Governing(d); !ok || c.token != 0 && c.token != l.Token {
			return c.fail(lockstate.ErrNoLock)
		}
		if !c.fs.reapIfDead(l) {
			break
		}
	}
	p, unknown := c.process()
	if _, holds, unsure := c.fs.table.HoldsBy(p, l.Token); !holds {
		return c.notHeld(p, cmp.Or(unknown, notYet(unsure)), l)
	}
	return c.tell(l)
}

// notHeld refuses a process that does not hold a lock. Of one of its own another thread
// of it has not been told yet, or has ended it meanwhile.
func (c *command) notHeld(p *procid.Process, unknown error, l lockstate.Lock) fuse.Status {
	switch {
	case unknown != nil:
		return c.fail(unknown)
	case p != nil && l.Owner == p.ID():
		return c.fail(lockstate.ErrNoLock)
	}
	c.held(&lockstate.HeldError{Err: lockstate.ErrHeld, Lock: l})
	return fuse.EPERM
}

// follow makes a read of the same descriptor wait for the end of a lock.
func (c *command) follow() fuse.Status {
	l, ok := c.fs.table.Lock(c.token)
	if !ok || l.Path != c.dir {
		return c.fail(lockstate.ErrNoLock)
	}
	ended, how, ok := c.fs.table.Follow(c.token)
	if !ok {
		return c.fail(lockstate.ErrNoLock)
	}
	if p, _ := c.process(); p != nil {
		c.fs.table.WatchedBy(c.token, p.ID())
	}
	c.tell(l)
	c.watch = &watch{answer: c.answer, ended: ended, how: how}
	return fuse.OK
}
