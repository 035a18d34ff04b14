//go:build linux

package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// A Dir is a directory on a stagefs mount, for questions about its lock that
// another program, or an earlier one, may have taken.
type Dir struct {
	sys *system
	place
}

// Find looks for the mount that a directory is on. The directory itself may be
// missing. The error is [ErrNotStagefs] if there is none, and ENOTCONN if its
// daemon is dead.
func Find(dir string) (*Dir, error) {
	s := linux()
	p, err := s.find(dir)
	if err != nil {
		return nil, err
	}
	return &Dir{s, p}, nil
}

// Path is the directory as an absolute path without symlinks.
func (d *Dir) Path() string { return d.path }

// A Status is what the daemon says of a lock that one holds.
type Status struct {
	Dir      string // of the lock, relative to the mount: it may lie above
	Token    uint64
	Client   string        // of a lease
	TTL      time.Duration // of a lease
	Deadline time.Duration // how long the lease lasts from now without renewal
	Kind     string        // implicit, explicit, shared or lease
	Heirless bool          // of Acquire: it ends with this process, whose parent inherits no lock (R5)
}

// Acquire takes the lock on a directory that exists, and leaves it to others to
// keep: nothing is done in the background, and a lease is not renewed. The lock
// of a process that ends now, having changed nothing, passes to its parent (R5). It
// fails as the function [Acquire] does.
func (d *Dir) Acquire(ctx context.Context, opts Options) (Status, error) {
	if err := opts.check(); err != nil {
		return Status{}, err
	}
	c, err := d.sys.open(ctx, d.root)
	if err != nil {
		return Status{}, err
	}
	defer c.close()
	r, err := take(ctx, d.place, c, opts, false)
	if errors.Is(err, ErrNoLock) {
		// Who was told to make it would lock the one above it.
		err = cmp.Or(d.sys.noLockName(d.place), err)
	}
	if err != nil {
		return Status{}, err
	}
	return r.status(), nil
}

// Check tells whether this process, or a client if an ID is given, holds the
// directory. If not, the error is [ErrNoLock], [ErrNotHolder] or, with the
// holder, [ErrFailedToLock].
func (d *Dir) Check(ctx context.Context, clientID string) (Status, error) {
	r, err := d.send(ctx, "check", asClient(clientID))
	return r.status(), err
}

// Renew makes the lease of a client last a TTL from now; 0 is the TTL that it
// has. If it has none any more, the error is [ErrNoLock].
func (d *Dir) Renew(ctx context.Context, clientID string, ttl time.Duration) (Status, error) {
	if clientID == "" {
		return Status{}, ErrEmptyClientID
	}
	options := asClient(clientID)
	if ttl != 0 {
		options += " ttl=" + ttl.String()
	}
	r, err := d.send(ctx, "renew", options)
	return r.status(), err
}

// A Release says how a lock is given up.
type Release struct {
	Client  string // whose lease; "": this process's lock
	Token   uint64 // of the lock; 0: whichever it has
	Destroy bool   // remove the directory
	Failed  bool   // treat the content as after a crash (R7)
}

// Release ends a lock. If there is none like it, the error is [ErrNoLock], and if it
// is somebody else's, [ErrNotHolder].
func (d *Dir) Release(ctx context.Context, how Release) error {
	options := asClient(how.Client)
	if how.Token != 0 {
		options += " token=" + strconv.FormatUint(how.Token, 10)
	}
	switch {
	case how.Destroy:
		options += " destroy"
	case how.Failed:
		options += " failed"
	}
	_, err := d.send(ctx, "release", options)
	return err
}

// Wait waits until this process could acquire the directory, or the deadline of ctx
// has passed: then the error is [ErrFailedToLock]. Somebody else may be faster.
func (d *Dir) Wait(ctx context.Context) error {
	_, err := d.ask(ctx, func(late context.Context, c conn) (*reply, error) {
		return inLine(late, c, func() string { return "wait " + word(d.rel) + " wait=" + waitFor(ctx) }, nil)
	})
	if errors.Is(err, ErrNoLock) {
		return &os.PathError{Op: "wait", Path: d.path, Err: unix.ENOENT} // a reserved name
	}
	return err
}

func asClient(id string) string {
	if id == "" {
		return ""
	}
	return " client=" + word(id)
}

func (d *Dir) send(ctx context.Context, verb, options string) (*reply, error) {
	return d.ask(ctx, func(late context.Context, c conn) (*reply, error) {
		return c.command(late, verb+" "+word(d.rel)+options, nil)
	})
}

func (d *Dir) ask(ctx context.Context, send func(late context.Context, c conn) (*reply, error)) (*reply, error) {
	c, err := d.sys.open(ctx, d.root)
	if err != nil {
		return &reply{}, err
	}
	defer c.close()
	late, done := lenient(ctx)
	defer done()
	r, err := send(late, c)
	if err == nil {
		return r, nil
	}
	if cancelled(ctx) {
		return r, fmt.Errorf("%s: %w", d.path, context.Cause(ctx))
	}
	return r, r.refusalAt(d.place, err)
}

func (r *reply) status() Status {
	return Status{Dir: bytesOf(r.Dir, r.DirBytes), Token: r.Token, Client: r.Client, TTL: time.Duration(r.TTL), Deadline: time.Duration(r.Deadline), Kind: r.Kind, Heirless: r.Heirless}
}
