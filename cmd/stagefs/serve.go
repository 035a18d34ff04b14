//go:build linux

package main

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/stagefs/stagefs/fs"
)

// serve mounts, calls ready, and serves until the mount is gone. The first
// SIGTERM, SIGINT or SIGHUP unmounts; a second one, later than secondTime,
// detaches the mount and ends at once (M4), with the status that a shell shows
// for it.
func (c *command) serve(ctx context.Context, o fs.Options, ready func(server) error) error {
	signals := c.signals
	if signals == nil {
		signals = make(chan os.Signal, 4)
		notifyStop(signals, c.ignored)
	}
	defer signal.Stop(signals)
	c.pauses, c.served = make(chan pause), make(chan struct{})
	defer close(c.served)
	keepServing()

	var (
		s        server
		mounted  = make(chan error, 1)
		stopping = make(chan error, 1) // what Shutdown returned
		gone     = make(chan error, 1)
		stopped  bool
		first    time.Time // when the first signal came
	)
	stop := func() {
		go func() { stopping <- s.Shutdown(context.WithoutCancel(ctx)) }()
	}
	go func() {
		var err error
		s, err = c.mount(o)
		mounted <- err
	}()

	done := ctx.Done()
	for {
		select {
		case err := <-mounted:
			if err != nil {
				return err
			}
			go func() { gone <- s.Wait() }()
			if !stopped {
				if err := ready(s); err != nil {
					c.say("%v", err)
					stopped = true
				}
			}
			mounted = nil
			if stopped {
				stop()
			}

		case <-done: // who runs this command in its own process wants it to end
			done = nil
			if !stopped && mounted == nil {
				stop()
			}
			stopped = true

		case sig := <-signals:
			if again := time.Since(first); stopped && (again < secondTime || mounted != nil && again < mountTime) {
				// To end now could leave a dead mount. And the same signal
				// may come from several: a service manager, a supervisor,
				// timeout(1) to its child and to their group.
				continue
			}
			if !stopped {
				first = time.Now()
			}
			if stopped {
				c.complain("%v again: ending at once", sig)
				if s != nil && mounted == nil {
					if err := s.Detach(); err != nil {
						c.complain("%v; what is left of the mount is cleared by: stagefs umount %s", err, quote(target(o)))
					}
				}
				return &exitError{exitSignal + int(sig.(syscall.Signal)), ""}
			}
			c.say("%v: unmounting %s", sig, quote(target(o)))
			stopped = true
			if mounted == nil {
				stop()
			}

		case p := <-c.pauses:
			p.wait(signals, c.ignored, stopped)

		case err := <-stopping:
			switch {
			case errors.Is(err, fs.ErrDetached):
				c.complain("%s is still in use: detached, new paths lead past it; serving until the last user is gone (a second signal ends at once)", quote(target(o)))
			case err != nil:
				c.complain("unmounting %s: %v; it is served on (a second signal ends at once)", quote(target(o)), err)
			}

		case err := <-gone:
			if err == nil && !stopped {
				c.say("%s was unmounted", quote(target(o)))
			}
			return err
		}
	}
}

const (
	// secondTime is how soon a second signal is one with the first.
	secondTime = time.Second
	// mountTime is the same while it is being mounted.
	mountTime = 2 * time.Second
)

// keepServing takes their default effect from signals that would leave everyone
// who uses the mount hanging: a stop by the terminal, and the death by a reader
// of standard error that is gone.
func keepServing() {
	signal.Ignore(syscall.SIGTSTP, syscall.SIGTTIN, syscall.SIGTTOU, syscall.SIGPIPE)
}

// target is where o mounts.
func target(o fs.Options) string {
	if o.Mountpoint != "" {
		return o.Mountpoint
	}
	return o.Dir
}
