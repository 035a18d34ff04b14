//go:build linux

package client

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// DefaultTTL is how long a lease lasts if it is not renewed.
const DefaultTTL = 16 * time.Second

// maxClient is how many bytes the daemon lets a client's ID have.
const maxClient = 256

// A Crash says what becomes of the content if the owner dies before it releases
// the lock (R7).
type Crash string

// What may become of it. The mount has a default.
const (
	Keep       Crash = "keep"
	Destroy    Crash = "destroy"    // what was made under the lock is removed
	Quarantine Crash = "quarantine" // and this moves it aside
)

// An Owner says which processes a lock belongs to beside descendants (H3).
type Owner string

// The owners. The mount has a default.
const (
	Process Owner = "process"
	Group   Owner = "group"   // the process group of this process
	Session Owner = "session" // its session
	Cgroup  Owner = "cgroup"  // its control group
)

// Options say how a directory is locked. The zero value takes an exclusive lock
// for this process, now or not at all.
type Options struct {
	// Client makes the lock a lease of the client with this ID: 1 to 256
	// bytes. The same ID may acquire again, and has the same lock then.
	Client string
	// TTL is how long the lease lasts without renewal; 0: DefaultTTL, or what
	// it has already.
	TTL time.Duration
	// RenewEvery is how often it is renewed; 0: 16 times a TTL; below 0: only
	// by Lock.Renew.
	RenewEvery time.Duration

	Wait    bool   // stand in line until ctx is done, or no daemon is there for 3 s
	Shared  bool   // nobody writes while it lasts; others may share
	OnCrash Crash  // "": the mount's
	Owner   Owner  // "": the mount's; not with Client
	Why     string // shown to others

	// MakeParents makes the directory and its parents where they are
	// missing. MustBeNew makes the directory, and fails with fs.ErrExist if
	// it is there.
	MakeParents, MustBeNew bool
}

// Acquire takes the lock on a directory, which must exist unless the options have it
// made. It fails with an error that is [ErrFailedToLock] if somebody else has it, or,
// with Options.Wait, still has it when ctx is done. One try is made even if the
// deadline of ctx has passed. ctx has no part in how long the lock lasts.
//
// If the daemon is killed just after it has given the lock, before it could say so, and ctx
// is done before the next one answers, or that one is not waited for, Acquire fails, but this
// process has the lock at the next daemon: until it ends, or acquires it again and releases it.
func Acquire(ctx context.Context, dir string, opts Options) (*Lock, error) {
	return linux().acquire(ctx, dir, opts)
}

func (s *system) acquire(ctx context.Context, dir string, opts Options) (*Lock, error) {
	if err := opts.check(); err != nil {
		return nil, err
	}
	// Past the deadline, the daemon is asked still: it knows who has the directory.
	if cancelled(ctx) {
		return nil, fmt.Errorf("%w: %w", ErrFailedToLock, context.Cause(ctx))
	}
	began := s.now()
	for {
		l, err := s.acquireOnce(ctx, dir, opts)
		// Who waits, and finds no daemon, waits for the next one, too. What was to be new
		// may be there by then.
		if !opts.Wait || opts.MustBeNew || !errors.Is(err, unix.ENOTCONN) || s.now()-began >= nextDaemon || ctx.Err() != nil {
			return l, err
		}
		pause(ctx, nextLook)
	}
}

func (s *system) acquireOnce(ctx context.Context, dir string, opts Options) (*Lock, error) {
	p, err := s.reach(ctx, dir)
	if err != nil {
		return nil, err
	}
	c, err := s.open(ctx, p.root)
	if err != nil {
		return nil, err
	}
	l, err := s.acquireAt(ctx, p, c, opts)
	if err != nil {
		c.close()
		return nil, err
	}
	return l, nil
}

func (o *Options) check() error {
	switch {
	case len(o.Client) > maxClient:
		return fmt.Errorf("the client ID has %d bytes, %d are the most: %w", len(o.Client), maxClient, unix.EINVAL)
	case o.Client == "" && o.TTL != 0:
		return fmt.Errorf("a TTL is for a lease: %w", ErrEmptyClientID)
	case o.Client != "" && o.Owner != "":
		return fmt.Errorf("a lease belongs to its client, not to a %s: %w", o.Owner, unix.EINVAL)
	case o.TTL < 0:
		return fmt.Errorf("the TTL %v is below zero: %w", o.TTL, unix.EINVAL)
	}
	return nil
}

// maxTries is how often a directory may be gone when it is asked for, and there
// when that is looked at.
const maxTries = 100

// acquireAt makes the directory if it has to, and locks it.
func (s *system) acquireAt(ctx context.Context, p place, c conn, opts Options) (*Lock, error) {
	var made []string // what failed is not to leave
	for tries := 0; ; tries++ {
		more, err := s.make(ctx, p, c, opts)
		made = append(made, more...)
		if err == nil {
			var l *Lock
			if l, err = s.lock(ctx, p, c, opts, len(made) > 0); err == nil {
				return l, nil
			}
			// Who had it before may have removed it, and the next one made
			// it again.
			if errors.Is(err, ErrNoLock) && opts.MakeParents && ctx.Err() == nil && (missing(p.path) || tries < maxTries) {
				continue
			}
			if errors.Is(err, ErrNoLock) {
				err = &os.PathError{Op: "lock", Path: p.path, Err: unix.ENOENT}
			}
		}
		for i := len(made) - 1; i >= 0; i-- {
			unix.Rmdir(made[i]) // fails if somebody uses it
		}
		return nil, err
	}
}

func (s *system) lock(ctx context.Context, p place, c conn, opts Options, made bool) (*Lock, error) {
	sent := s.now()
	r, err := take(ctx, p, c, opts, made)
	if err != nil {
		return nil, err
	}
	l := newLock(s, p, c, opts, r, sent)
	if err := l.begin(ctx); err != nil {
		if l.line != c {
			l.line.close()
		}
		return nil, err
	}
	l.start(ctx)
	if err := l.overdue(); err != nil {
		l.end(ctx, "") // what was started
		return nil, err
	}
	return l, nil
}

// begin renews a lease that was long in coming: it stood in line, and may have most of
// its time or nothing left. It fails if that is over.
func (l *Lock) begin(ctx context.Context) error {
	if l.client == "" || l.token == 0 || l.sys.now()-l.renewed < l.ttl/16 {
		return nil
	}
	late, done := lenient(ctx)
	defer done()
	err := l.Renew(late)
	switch {
	case err == nil:
		return nil
	case cancelled(ctx):
		return fmt.Errorf("%w: %w", ErrFailedToLock, context.Cause(ctx))
	case errors.Is(err, ErrNoLock), l.Err() == nil && l.sys.now() >= l.deadline:
		l.lose(&reply{Reason: "expired"})
	}
	return l.Err()
}

// take sends the command of an acquisition.
func take(ctx context.Context, p place, c conn, opts Options, made bool) (*reply, error) {
	undo := func(r *reply) string { return "release " + word(p.rel) + " token=" + strconv.FormatUint(r.Token, 10) }
	if opts.Client != "" {
		undo = nil // another of the same client may have it; else it ends by itself
	}
	late, done := lenient(ctx)
	defer done()
	line := func() string { return opts.line(ctx, p.rel, made) }
	r, err := opts.send(late, c, line, undo)
	if err == nil {
		return r, nil
	}
	if cancelled(ctx) {
		return nil, fmt.Errorf("%w: %w", ErrFailedToLock, context.Cause(ctx))
	}
	return nil, r.refusalAt(p, err)
}

// send is inLine for who waits; others hear at once that no daemon is there.
func (o *Options) send(ctx context.Context, c conn, line func() string, undo func(*reply) string) (*reply, error) {
	if o.Wait {
		return inLine(ctx, c, line, undo)
	}
	return c.command(ctx, line(), undo)
}

// cancelled tells whether ctx has ended otherwise than by its deadline.
func cancelled(ctx context.Context) bool {
	err := ctx.Err()
	return err != nil && !errors.Is(err, context.DeadlineExceeded)
}

// line is the command of an acquisition.
func (o *Options) line(ctx context.Context, rel string, made bool) string {
	var b strings.Builder
	b.WriteString("acquire " + word(rel))
	if o.Client != "" {
		b.WriteString(" client=" + word(o.Client))
	}
	if o.TTL != 0 { // the daemon's default is ours, but for a lease that has one already
		b.WriteString(" ttl=" + o.TTL.String())
	}
	if o.Owner != "" {
		b.WriteString(" owner=" + word(string(o.Owner)))
	}
	if o.Shared {
		b.WriteString(" shared")
	}
	if o.OnCrash != "" {
		b.WriteString(" on-crash=" + word(string(o.OnCrash)))
	}
	if o.Why != "" {
		b.WriteString(" why=" + strconv.Quote(o.Why))
	}
	if o.Wait {
		b.WriteString(" wait=" + waitFor(ctx))
	}
	if made {
		b.WriteString(" new")
	}
	return b.String()
}

func (o *Options) ttl() time.Duration {
	if o.TTL == 0 {
		return DefaultTTL
	}
	return o.TTL
}

// waitFor lets the daemon end the wait, which can tell then who has the
// directory.
func waitFor(ctx context.Context) string {
	end, ok := ctx.Deadline()
	if !ok {
		return "forever"
	}
	return max(time.Until(end), 0).String()
}
