//go:build linux

package client

import (
	"context"
	"errors"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// keep renews a lease, and loses it at its deadline.
func (l *Lock) keep(ctx context.Context) {
	renewed := make(chan error, 1)
	busy := false
	last := l.sys.now() // when a renewal was begun
	for {
		now := l.sys.now()
		l.mu.Lock()
		left, every := l.deadline-now, l.every
		if every == 0 {
			every = (l.deadline - l.renewed) / 16 // of the TTL that it has now
		}
		renews := every > 0 && !l.unwanted
		l.mu.Unlock()
		if left <= 0 {
			l.lose(&reply{Reason: "expired"})
			return
		}
		if renews && !busy {
			if last+every <= now {
				busy = true
				// A daemon that hangs must not keep the deadline from being noticed.
				l.tasks.Go(func() { renewed <- l.Renew(ctx) })
				last = now
			}
			left = min(left, last+every-now)
		}
		timer := time.NewTimer(left)
		select {
		case <-timer.C:
		case err := <-renewed:
			busy = false
			if errors.Is(err, ErrNoLock) {
				// The watch knows why, and is about to say so.
				l.grace(ctx)
			}
		case <-l.lost:
		case <-ctx.Done():
		}
		timer.Stop()
		select {
		case <-l.lost:
			return
		case <-ctx.Done():
			return
		default:
		}
	}
}

// grace waits a moment for the reason why a lock is gone.
func (l *Lock) grace(ctx context.Context) {
	l.pause(ctx, 100*time.Millisecond)
	if ctx.Err() == nil {
		l.lose(&reply{})
	}
}

const (
	// retryWatch is how long after the daemon's death it is looked for again.
	retryWatch = time.Second
	// lateWatch spares a lock that is released soon the thread that waits for
	// its end. The daemon watches it from the beginning.
	lateWatch = 20 * time.Millisecond
)

// watch waits until the daemon says that the lock has ended. While there is no
// daemon a lock is not lost: the next one may know it (S1). A lease ends at its
// deadline all the same. c follows the lock already, unless err says why not.
func (l *Lock) watch(ctx context.Context, c conn, err error) {
	if err == nil {
		l.pause(ctx, lateWatch)
	}
	for ctx.Err() == nil {
		var r *reply
		if err == nil {
			r, err = c.await(ctx)
			c.close()
		}
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			l.lose(r)
			return
		case errors.Is(err, unix.ENOENT):
			l.lose(&reply{})
			return
		}
		l.pause(ctx, retryWatch)
		select {
		case <-l.lost: // at its deadline: nothing is left to be looked for
			return
		default:
		}
		if c, err = l.sys.open(ctx, l.root); err == nil {
			if err = l.follow(ctx, c); err != nil {
				c.close()
			}
		}
	}
	if err == nil {
		c.close()
	}
}

// pause waits, but no longer than there is a lock to watch.
func (l *Lock) pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-l.lost:
	case <-ctx.Done():
	}
}

// follow begins to watch the lock.
func (l *Lock) follow(ctx context.Context, c conn) error {
	l.lineMu.Lock()
	defer l.lineMu.Unlock()
	return l.locateLocked(func() error {
		return c.follow(ctx, "watch "+word(l.rel)+" token="+strconv.FormatUint(l.token, 10))
	})
}
