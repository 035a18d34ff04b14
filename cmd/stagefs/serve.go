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
		notifyStop(signals, c.ignored) // to the end: one that comes late changes no status
	}
	c.pauses, c.served = make(chan pause), make(chan struct{})
	defer close(c.served)
	keepServing()

	m := &serving{command: c, o: o, mounting: true, stopping: make(chan error, 1), gone: make(chan struct{})}
	defer close(m.gone)
	mounted := make(chan error, 1)
	go func() {
		var err error
		m.server, err = c.mount(o)
		mounted <- err
	}()
	gone := make(chan error, 1)
	done := ctx.Done()
	for {
		select {
		case err := <-mounted:
			if err != nil {
				return err
			}
			m.mounting = false
			go func() { gone <- m.server.Wait() }()
			m.up(ctx, ready)

		case <-done: // who runs this command in its own process wants it to end
			done = nil
			m.stop(ctx)

		case sig := <-signals:
			if err := m.signalled(ctx, sig); err != nil {
				return err
			}

		case p := <-c.pauses:
			p.wait(signals, c.ignored, m.stopped)

		case err := <-m.stopping:
			m.couldNot(err)

		case err := <-gone:
			if err == nil && !m.stopped {
				c.say("%s was unmounted", quote(target(o)))
			}
			return err
		}
	}
}

// A serving is a mount from when it is begun until it is gone.
type serving struct {
	*command
	o        fs.Options
	server   server
	mounting bool // server is not there yet
	stopped  bool
	first    time.Time      // when the first signal was carried out
	stopping chan error     // what Shutdown returned
	entry    *fs.MountEntry // as it was before Shutdown, if it was seen
	gone     chan struct{}  // closed at the end
}

// up calls ready once it is mounted, unless it is to end already.
func (m *serving) up(ctx context.Context, ready func(server) error) {
	if !m.stopped {
		err := ready(m.server)
		if err == nil {
			return
		}
		m.say("%v", err)
	}
	m.stopped = true
	m.shutDown(ctx)
}

// stop has it end, as soon as it is mounted.
func (m *serving) stop(ctx context.Context) {
	if !m.stopped && !m.mounting {
		m.shutDown(ctx)
	}
	m.stopped = true
}

func (m *serving) shutDown(ctx context.Context) {
	mounts, _ := fs.ReadMounts()
	if at := fs.TopMount(mounts, m.server.Mountpoint()); at != nil && at.IsStagefs() {
		m.entry = at
	}
	go func() { m.stopping <- m.server.Shutdown(context.WithoutCancel(ctx)) }()
	if m.entry != nil && m.o.Grace > 0 {
		go m.tellUsers(*m.entry)
	}
}

// tellUsers says who is inside while they can be found still: when it is detached,
// no path leads to them any more.
func (m *serving) tellUsers(entry fs.MountEntry) {
	select {
	case <-m.gone:
		return
	case <-time.After(min(tellTime, m.o.Grace/2)):
	}
	if users := mountUsers(&entry); len(users) > 0 {
		m.say("%s is in use%s", quote(entry.Path), whoIsInside(&entry, users))
	}
}

// signalled is called for each signal that stops. It returns the end of the program
// if that is at once.
func (m *serving) signalled(ctx context.Context, sig os.Signal) error {
	if !m.stopped {
		m.stop(ctx) // before something is said, which nobody may take off
		m.say("%v: unmounting %s", sig, quote(target(m.o)))
		m.first = time.Now() // what has come meanwhile came at once
		return nil
	}
	if again := time.Since(m.first); again < secondTime || m.mounting && again < mountTime {
		// To end now could leave a dead mount. And the same signal may come
		// from several: a service manager, a supervisor, timeout(1) to its
		// child and to their group.
		return nil
	}
	m.complain("%v again: ending at once", sig)
	if !m.mounting {
		if err := m.server.Detach(); err != nil {
			m.complain("%v; what is left of the mount is cleared by: stagefs umount %s", err, shellWord(target(m.o)))
		}
	}
	return &exitError{exitSignal + int(sig.(syscall.Signal)), ""}
}

// couldNot tells why it is not unmounted, if it is not.
func (m *serving) couldNot(err error) {
	switch {
	case errors.Is(err, fs.ErrDetached):
		m.complain("%s is still in use%s: detached, new paths lead past it; serving until the last user is gone (a second signal ends at once)", quote(target(m.o)), m.alsoAt())
	case err != nil:
		m.complain("unmounting %s: %v; it is served on (a second signal ends at once)", quote(target(m.o)), err)
	}
}

// alsoAt tells where else the mount is shown.
func (m *serving) alsoAt() string {
	if m.entry != nil {
		if at := shownAt(m.entry); at != "" {
			return ", mounted at " + quote(at) + ", too"
		}
	}
	return ""
}

const (
	// tellTime is how long who is inside may need to leave before it is named.
	tellTime = time.Second
	// secondTime is how soon a second signal is one with the first: less than it takes
	// somebody to press Ctrl-C twice.
	secondTime = 200 * time.Millisecond
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
