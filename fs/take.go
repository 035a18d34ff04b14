package fs

import (
	"cmp"
	"errors"
	"path"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// acquire takes a directory by command (A7). Who has to wait stands in the same
// line as those who wait with a lock file (A8).
func (c *command) acquire() fuse.Status {
	r := c.request("acquire")
	if r.proc == nil {
		return c.fail(cmp.Or(r.unknown, lockstate.ErrNobody))
	}
	d := c.fs.table.At(split(c.dir)...)
	defer c.fs.table.Forget(d)
	q := lockstate.Request{
		Dir: d, Kind: lockstate.Explicit, Protocol: "command", Command: true,
		Why: c.why, OnCrash: c.onCrash, New: c.isNew,
		Client: c.client, UID: c.uid, TTL: c.ttl,
	}
	if c.shared {
		q.Kind = lockstate.Shared
	}
	status := c.inLine(r, d, func() error {
		_, finish, err := c.fs.admitLock(r, q, nil)
		if err == nil && !finish(true) {
			err = lockstate.ErrEnded
		}
		return err
	})
	if status != fuse.OK {
		return status
	}
	if r.lock == nil { // the mount only observes
		return c.off()
	}
	if c.client != "" {
		c.fs.expiry.set()
	}
	c.answer.Heirless = r.lock.Heirless
	return c.tell(*r.lock)
}

// await waits until a directory could be acquired, and leaves it alone.
func (c *command) await() fuse.Status {
	r := c.request("wait")
	r.quiet = true // to ask is no try
	if r.proc == nil {
		return c.fail(cmp.Or(r.unknown, lockstate.ErrNobody))
	}
	// A directory that is not there yet is waited for where it would be made.
	there := c.dir
	_ = c.fs.locked(false, func() error {
		for c.mayCreate() == unix.ENOENT && c.dir != "." {
			c.dir = path.Dir(c.dir)
		}
		return nil
	})
	d := c.fs.table.At(split(c.dir)...)
	defer c.fs.table.Forget(d)
	if c.dir != there {
		ch := lockstate.Change{Process: r.proc, Dirs: []*lockstate.Dir{d}, Quiet: true, Free: true}
		return c.inLine(r, d, func() error {
			op, err := r.admit(ch)
			op.End()
			return err
		})
	}
	q := lockstate.Request{Process: r.proc, Dir: d, Kind: lockstate.Explicit}
	return c.inLine(r, d, func() error { return c.fs.table.Probe(q) })
}

func (c *command) request(op string) *request {
	p, unknown := c.process()
	return &request{
		fs: c.fs, cancel: c.cancel, header: c.header, op: op, at: c.dir,
		proc: p, unknown: unknown, errno: fuse.EBUSY, owner: c.scope(),
	}
}

// scope returns who is to own what is acquired, or nil if the command does not
// say.
func (c *command) scope() *lockstate.ScopeKind {
	if k, ok := scopeNamed(c.owner); ok {
		return &k
	}
	return nil
}

// A turn is a command's in the line for a directory.
type turn struct {
	c    *command
	r    *request
	d    *lockstate.Dir
	take func() error
	held *lockstate.HeldError // what was in the way at the last try
}

// try reports whether that was the last try.
func (t *turn) try() (status fuse.Status, done bool) {
	t.r.anew()
	var failure error
	status = t.c.fs.attempt(t.r, false, func() error {
		t.held = nil
		failure = t.c.placeOf(t.d)
		if failure == nil {
			failure = t.take()
		}
		errors.As(failure, &t.held)
		return failure
	})
	if status != fuse.OK && t.held == nil && failure != nil && failure != errUnseen {
		t.c.answer.Message = failure.Error()
	}
	return status, status == fuse.OK || t.held == nil
}

// blocker tells who is in the way.
func (t *turn) blocker() (id procid.ID, soon, ok bool) {
	q := lockstate.Request{Process: t.r.proc, Dir: t.d, Kind: lockstate.Explicit, Client: t.c.client, UID: t.c.uid}
	if t.c.shared {
		q.Kind = lockstate.Shared
	}
	return t.c.fs.blockerOf(q, 0, nil)
}

// over tells what was in the way at last.
func (t *turn) over(status fuse.Status) fuse.Status {
	if t.held != nil && status != fuse.OK {
		t.c.held(t.held)
	}
	return status
}

// inLine tries at once, or when the command's turn has come and then until the
// command's time is over.
func (c *command) inLine(r *request, d *lockstate.Dir, take func() error) fuse.Status {
	fs := c.fs
	t := &turn{c: c, r: r, d: d, take: take}
	ahead, client := fs.holds(r.proc, d), false
	if c.client != "" {
		_, err := fs.table.OfClient(d, c.client, c.uid)
		client = err == nil
		ahead = ahead || client
	}
	if c.wait == 0 {
		outrun := !ahead && fs.waits.waited(d)
		if outrun && c.verb != "wait" {
			return c.outrun(r, d)
		}
		status, _ := t.try()
		if outrun && status == fuse.OK {
			return c.outrun(r, d)
		}
		return t.over(status)
	}
	// What makes no sense to wait for is said at once.
	err := fs.locked(false, func() error { return c.placeOf(d) })
	if err != nil {
		return c.fail(err)
	}
	r.quiet, r.endless = true, true
	if ahead || !fs.waits.waited(d) {
		if status, done := t.try(); done {
			return t.over(status)
		}
	}
	leave, err := fs.control.parked.enter(c.uid, 1)
	if err != nil {
		return c.fail(err)
	}
	defer leave()
	return t.over(t.await(ahead, client))
}

// await waits for the turn; ahead: the caller, or the client, has the directory already,
// and those in line wait for it.
func (t *turn) await(ahead, client bool) fuse.Status {
	c, fs := t.c, t.c.fs
	x := &waiting{
		dir: t.d, proc: t.r.proc, since: time.Now(), write: !c.shared, turn: make(chan struct{}), dead: make(chan struct{}),
		hears: true, blocker: t.blocker,
	}
	if l, ok := fs.table.Governing(t.d); ahead && (client || ok && l.Kind != lockstate.Shared) {
		close(x.turn)
	} else { // in line, too, for when who shares it does so no longer
		fs.enqueue(x, "command", ahead)
		defer fs.leaveLine(x)
	}
	var over <-chan time.Time
	if c.wait != forever {
		timer := time.NewTimer(c.wait)
		defer timer.Stop()
		over = timer.C
	}
	status := fs.await(x, c.cancel, over, t.try)
	if status == fuse.Status(unix.ETIMEDOUT) {
		if t.held == nil { // its turn never came
			if l, ok := fs.table.Governing(t.d); ok {
				t.held = &lockstate.HeldError{Err: lockstate.ErrHeld, Lock: l}
			}
		}
		t.r.errno = status
		fs.denials.add(fs, t.r, status, errTimedOut, t.held)
	}
	return status
}

var (
	errTimedOut = errors.New("was not free in time")
	errOutrun   = errors.New("others wait for it already")
)

// outrun refuses a try where others stand in line.
func (c *command) outrun(r *request, d *lockstate.Dir) fuse.Status {
	held := &lockstate.HeldError{Err: lockstate.ErrHeld}
	if l, ok := c.fs.table.Governing(d); ok {
		held.Lock = l
		c.held(held)
	} else {
		c.answer.Message = errOutrun.Error()
	}
	if !r.quiet {
		c.fs.denials.add(c.fs, r, fuse.EBUSY, errOutrun, held)
	}
	return fuse.EBUSY
}

// placeOf makes sure that the command's directory is there, is still the one
// that it was when the command began, and is the caller's to make entries in.
// The caller holds FS.ns.
func (c *command) placeOf(d *lockstate.Dir) error {
	if len(split(c.dir)) > 0 && c.fs.table.Path(d) != c.dir {
		return lockstate.ErrGone
	}
	if c.permitted {
		return nil
	}
	err := c.mayCreate()
	c.permitted = err == nil
	return err
}
