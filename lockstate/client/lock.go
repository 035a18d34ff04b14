//go:build linux

package client

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// A Lock is a lock that this program has. Its methods may be called by any
// goroutine.
type Lock struct {
	sys    *system
	dir    string // as found at acquisition
	root   string
	token  uint64
	client string
	ttl    time.Duration
	every  time.Duration // as Options.RenewEvery
	lost   chan struct{} // closed when it is lost

	stop  context.CancelFunc // ends what runs in the background
	ctx   context.Context
	tasks sync.WaitGroup

	// The line to the daemon, protected by lineMu, which is held over
	// commands.
	lineMu sync.Mutex
	line   conn
	rel    string // the directory as the daemon knows it; changes when it is renamed

	late chan *reply // what the watch says while it is being released

	// endMu is held over a whole Release, before lineMu and mu.
	endMu    sync.Mutex
	over     bool  // it was released, or lost: Release says released from then on
	released error // protected by endMu, as over is

	mu        sync.Mutex
	deadline  time.Duration // of a lease, on system.now
	renewed   time.Duration // when the last renewal that succeeded was sent
	releasing bool
	unwanted  bool  // Release was called: a lease is not renewed any more
	err       error // why it was lost
}

func newLock(s *system, p place, c conn, opts Options, r *reply, sent time.Duration) *Lock {
	l := &Lock{
		sys: s, dir: p.path, root: p.root, rel: p.rel, token: r.Token, client: opts.Client, every: opts.RenewEvery, line: c,
		lost: make(chan struct{}), late: make(chan *reply, 1),
	}
	l.ctx, l.stop = context.WithCancel(context.Background())
	if l.client == "" {
		return l
	}
	l.ttl = opts.ttl()
	if r.TTL > 0 {
		l.ttl = time.Duration(r.TTL) // what the daemon grants
	}
	l.renewed, l.deadline = sent, sent+l.ttl
	return l
}

// start has the lock watched and kept. A daemon that is stopped by now keeps it waiting no
// longer than ctx lasts: it is told to watch when it is back.
func (l *Lock) start(ctx context.Context) {
	if l.token == 0 {
		return // the mount takes no locks: there is nothing to keep or to lose
	}
	// The daemon watches from now on, on a line of its own: a command on it
	// would end the watch.
	late, done := lenient(ctx)
	defer done()
	if l.client != "" {
		l.tasks.Go(func() { l.keep(l.ctx) })
	}
	c, err := l.sys.open(late, l.root)
	if err == nil {
		if err = l.follow(late, c); err != nil {
			c.close()
		}
	}
	l.tasks.Go(func() { l.watch(l.ctx, c, err) })
}

// overdue is why a lease was lost before anybody was given it, if so.
func (l *Lock) overdue() error {
	l.mu.Lock()
	over := l.client != "" && l.token != 0 && l.sys.now() >= l.deadline
	l.mu.Unlock()
	if over {
		l.lose(&reply{Reason: "expired"})
	}
	return l.Err()
}

// Token is the lock's fencing token: more than that of any earlier lock on the
// mount. It is 0 if the mount was told to take no locks, or only to observe.
func (l *Lock) Token() uint64 { return l.token }

// Dir is the absolute path of the directory, without symlinks, at acquisition.
func (l *Lock) Dir() string { return l.dir }

// TTL is how long the lease was granted for, and lasts after a renewal unless another one of
// the client has changed that; 0 for a lock that is none.
func (l *Lock) TTL() time.Duration { return l.ttl }

// Lost is closed when the lock has ended without this Lock's Release: broken by
// an admin, expired, or released by another who holds it.
func (l *Lock) Lost() <-chan struct{} { return l.lost }

// Err is nil until the lock is lost, and then a [*LostError].
func (l *Lock) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// Renew makes a lease last a full TTL from now. Without a reason of one's own
// there is no need to: it is done in the background. If it was lost, the error is a
// [*LostError]; any other leaves it as it is.
func (l *Lock) Renew(ctx context.Context) error {
	if l.client == "" {
		return ErrEmptyClientID
	}
	if l.token == 0 {
		return nil
	}
	sent := l.sys.now()
	r, err := l.command(ctx, "renew", asClient(l.client))
	if err != nil {
		if lost := l.Err(); lost != nil {
			return lost
		}
		return r.refusal(l.dir, "", err)
	}
	if r.Token != l.token {
		// The client has a new lock there, and this one is over.
		l.lose(&reply{Reason: "replaced"})
		return l.Err()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return l.err
	}
	if sent < l.renewed {
		return nil // a later one was faster
	}
	ttl := l.ttl
	if r.TTL > 0 {
		ttl = time.Duration(r.TTL) // another one with the ID may have changed it
	}
	l.renewed, l.deadline = sent, sent+ttl
	return nil
}

// Release ends the lock, and with destroy removes the directory and all that is
// in it. Released for the second time it gives the first answer again; lost, it
// gives a [*LostError].
//
// If the daemon is dead, Release waits up to 3 s for the next one, and fails with
// ENOTCONN if there is none by then. After that, as after a refusal, the lock is
// still there, though a lease is not renewed any more, and Release can be called
// again. If the daemon dies in the midst of a release, the next one may know nothing
// of the lock: then it counts as lost, for an unknown reason.
func (l *Lock) Release(destroy bool) error {
	if destroy {
		return l.end(context.Background(), " destroy")
	}
	return l.end(context.Background(), "")
}

// Fail ends the lock of work that has failed: the content is treated as after a
// crash (R7). Otherwise it is like Release.
func (l *Lock) Fail() error { return l.end(context.Background(), " failed") }

// end is a Release that waits for no other daemon once ctx is done.
func (l *Lock) end(ctx context.Context, how string) error {
	l.endMu.Lock()
	defer l.endMu.Unlock()
	if l.over {
		return l.released
	}
	err := l.endLocked(ctx, how)
	if err == nil || errors.Is(err, ErrLost) {
		l.over, l.released = true, err
		l.stop()
		l.tasks.Wait()
	}
	l.lineMu.Lock()
	defer l.lineMu.Unlock()
	l.line.close() // a Release to come opens another one
	return err
}

// endLocked ends it, or fails and leaves it as it is. The caller holds endMu.
func (l *Lock) endLocked(ctx context.Context, how string) error {
	l.mu.Lock()
	lost := l.err
	l.releasing, l.unwanted = true, true
	l.mu.Unlock()
	if lost != nil || l.token == 0 {
		return lost
	}
	options := " token=" + strconv.FormatUint(l.token, 10) + how
	if l.client != "" {
		options = " client=" + word(l.client) + options
	}
	r, err := l.giveBack(ctx, options)
	if err == nil {
		return nil
	}
	var why *reply // it has ended in another way
	if errors.Is(err, unix.ENOENT) {
		// It had ended before; the watch knows why.
		timer := time.NewTimer(100 * time.Millisecond)
		defer timer.Stop()
		why = &reply{}
		select {
		case why = <-l.late:
		case <-timer.C:
		}
	}
	l.mu.Lock()
	l.releasing = false
	l.mu.Unlock()
	select {
	case late := <-l.late: // a lease can run out meanwhile
		why = late
	default:
	}
	if why != nil {
		l.lose(why)
	}
	if lost := l.Err(); lost != nil {
		return lost
	}
	return r.refusal(l.dir, "", err)
}

// giveBack sends a release, again and again while there is no daemon: the next one
// restores the lock of a process that lives (S1), and it would be stale.
func (l *Lock) giveBack(ctx context.Context, options string) (*reply, error) {
	ctx, cancel := context.WithTimeout(ctx, nextDaemon)
	defer cancel()
	for {
		r, err := l.command(context.Background(), "release", options)
		if !daemonGone(err) || ctx.Err() != nil {
			return r, err
		}
		l.pause(ctx, nextLook)
	}
}

// lose notes that the lock has ended.
func (l *Lock) lose(r *reply) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.err != nil:
	case l.releasing:
		select {
		case l.late <- r:
		default:
		}
	default:
		reason := r.Reason
		if reason == "" {
			reason = "unknown"
		}
		l.err = &LostError{Dir: l.dir, Token: l.token, Reason: reason, By: r.By, Why: r.Why}
		close(l.lost)
		if l.unwanted { // perhaps nobody calls Release again
			l.stop()
		}
	}
}

// command sends a command about the directory.
func (l *Lock) command(ctx context.Context, verb, options string) (*reply, error) {
	l.lineMu.Lock()
	defer l.lineMu.Unlock()
	var r *reply
	another := false // lock of the client's is there
	send := func() error {
		return l.locateLocked(func() (err error) {
			r, err = l.line.command(ctx, verb+" "+word(l.rel)+options, nil)
			if another = err == nil && r.Token != 0 && r.Token != l.token; another {
				return unix.ENOENT
			}
			return err
		})
	}
	err := send()
	if daemonGone(err) || errors.Is(err, unix.EBADF) {
		// The daemon may have been started again since.
		c, dialErr := l.sys.open(ctx, l.root)
		switch {
		case dialErr == nil:
			l.line.close()
			l.line = c
			err = send()
		case errors.Is(err, unix.EBADF): // the line was closed
			err = dialErr
		}
	}
	if another && err == unix.ENOENT {
		err = nil
	}
	return r, err
}

// maxMoves is how often a directory may get another name between a look at the listing
// and what is asked for by the name there.
const maxMoves = 8

// errMoves: it got yet another one.
var errMoves = fmt.Errorf("is renamed all the time: %w", unix.EAGAIN)

// locateLocked asks for the lock by the name of its directory. If there is no such lock,
// that may have been renamed (R3): then by its new one. The caller holds lineMu.
func (l *Lock) locateLocked(ask func() error) error {
	for range maxMoves {
		if err := ask(); err != unix.ENOENT || !l.relocateLocked() {
			return err
		}
	}
	return errMoves
}

// relocateLocked finds the lock's directory in the listing, and reports whether it is
// there: perhaps by the name that it had before, as it was renamed and renamed back. The
// caller holds lineMu.
func (l *Lock) relocateLocked() bool {
	rows, err := l.sys.rows(l.root)
	if err != nil {
		return false
	}
	for _, row := range rows {
		if row.Token != l.token {
			continue
		}
		l.rel = bytesOf(row.Dir, row.DirBytes)
		return true
	}
	return false
}
