//go:build linux

package main

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs"
)

// stopSignals end a daemon (M4).
func stopSignals() []syscall.Signal {
	return []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP}
}

// ignoredStops are those that this program was started to ignore: nohup, and a
// shell that starts something in the background, ask for that.
func ignoredStops() (ignored []syscall.Signal) {
	for _, s := range stopSignals() {
		if signal.Ignored(s) {
			ignored = append(ignored, s)
		}
	}
	return ignored
}

// notifyStop has the stop signals sent to ch, but for the ignored ones.
func notifyStop(ch chan<- os.Signal, ignored []syscall.Signal) {
	for _, s := range stopSignals() {
		if !slices.Contains(ignored, s) {
			signal.Notify(ch, s)
		}
	}
}

// A pause is asked of serve by who is about to replace the program: whether no
// stop signal has come. If none has, serve begins no end until resume is closed.
type pause struct {
	granted chan bool
	resume  chan struct{}
}

// paused runs another program in this process's place, by f, unless this one has
// been told to end.
func (c *command) paused(f func() error) error {
	p := pause{make(chan bool, 1), make(chan struct{})}
	select {
	case c.pauses <- p:
	case <-c.served:
		return errors.Join(fs.ErrReplacing, unix.ESHUTDOWN)
	}
	if !<-p.granted {
		return fmt.Errorf("%w: it is about to end: %w", fs.ErrReplacing, unix.ESHUTDOWN)
	}
	defer close(p.resume)
	return f()
}

// wait carries out a pause for serve, which has or has not been told to end.
//
// A stop signal that comes after it has looked ends the process at once, in this
// program or the next one, until that listens: Go lets no program block it, and one
// that was ignored would be lost. Who asked for the replacement, or the supervisor,
// then unmounts.
func (p *pause) wait(signals chan os.Signal, ignored []syscall.Signal, stopped bool) {
	signal.Stop(signals)
	defer notifyStop(signals, ignored)
	if stopped || len(signals) > 0 {
		p.granted <- false
		return
	}
	p.granted <- true
	<-p.resume
}
