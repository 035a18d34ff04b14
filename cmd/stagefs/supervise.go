//go:build linux

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/stagefs/stagefs/fs"
	"github.com/stagefs/stagefs/lockstate/procid"
)

const (
	// A daemon that serves this long has not failed to start.
	startTime = 500 * time.Millisecond
	// maxFailures is how many starts may fail in a row where there is no dead mount to
	// mend: none has served, or an ordinary user's directory lies open by now, and
	// nobody could tell any more whether somebody has unmounted it. One that is killed
	// is started again without end: everybody waits for the mount.
	maxFailures = 8
	// A failed start is tried again after failurePause, then after twice
	// that, and so on, but at the latest after longestPause.
	failurePause = 50 * time.Millisecond
	longestPause = 2 * time.Second
)

// supervise runs this same command line as a daemon, and again whenever that
// one is killed, crashes, or leaves a dead mount in another way (S1). The next
// one takes the dead mount's place. If it can't, others try for as long as that is
// there: what stands in the way may pass, and everybody waits for the mount. It returns
// how the last one ended: by a signal to this process, by an unmount, or because it
// could not start and none had served.
//
// If this process is killed, the daemon serves on. starter, if any, is told when
// the first mount answers, whichever daemon's that is, and hears that none will by
// the end of this process.
func (c *command) supervise(o fs.Options, starter *os.File) error {
	s := &supervisor{command: c, o: o, starter: starter, signals: make(chan os.Signal, 4), first: true, said: make(map[string]bool)}
	notifyUnignored(s.signals, stopSignals()...) // to the end, as in serve
	keepServing()
	keepThreads()
	if err := c.leaveStart(); err != nil {
		return err
	}
	if shelf, err := procid.NewShelf(); err == nil { // without it, each daemon knows what was recorded
		s.shelf = shelf.Files()
	}
	for {
		d := s.runDaemon()
		if over, err := s.isOver(d); over {
			if d.reason != "" && !s.said[d.reason] {
				c.complain("%s", d.reason)
			}
			return err
		}
		if err := s.failed(d); err != nil {
			return err
		}
		if told(s.signals, pauseAfter(s.failures)) {
			return s.stoppedEnd(d.err, true)
		}
	}
}

// A supervisor starts daemons, one after the other.
type supervisor struct {
	*command
	o       fs.Options
	starter *os.File // is told when the mount answers; nil: nobody is, any more
	shelf   []*os.File
	signals chan os.Signal

	stopped   bool            // a signal has come
	first     bool            // no daemon has served or crashed
	served    bool            // one has served
	successor bool            // the next is one of a daemon that has mounted, and must find a dead mount
	failures  int             // in a row
	said      map[string]bool // why daemons have ended since one served well
}

// An endedDaemon is what its supervisor knows of a daemon.
type endedDaemon struct {
	err    error  // how it ended, or why there was none; nil: with status 0
	last   byte   // what it told last
	reason string // why it could not start
	lasted time.Duration
	limit  int64 // of its control group's memory, if something was killed for want of that; 0: nothing
}

func (d *endedDaemon) served() bool { return d.last == toldServes }

// runDaemon starts a daemon and waits for its end.
func (s *supervisor) runDaemon() *endedDaemon {
	started := time.Now()
	kills, _ := fs.MemoryKills()
	d := &endedDaemon{last: toldNothing}
	cmd, heard, err := s.startDaemon()
	if err == nil {
		err = s.awaitDaemon(cmd)
		var answered bool
		if d.last, d.reason, answered = heard(); answered {
			s.starter = nil
		}
	}
	d.err, d.lasted = err, time.Since(started)
	if n, limit := fs.MemoryKills(); n > kills {
		d.limit = limit
	}
	s.served = s.served || d.served()
	switch {
	case d.last == toldMounted, d.served():
		s.successor = true
	case d.last == toldBack, os.Geteuid() != 0:
		// An ordinary user's daemon clears the dead mount before it mounts;
		// if it dies in between, the next one finds none.
		s.successor = false
	}
	return d
}

// isOver reports whether no other daemon is to follow one, and returns what the
// supervisor ends with then.
func (s *supervisor) isOver(d *endedDaemon) (over bool, err error) {
	if unmountedEarly(d.err) {
		if s.first {
			return true, &exitError{exitHeld, ""}
		}
		return true, nil
	}
	// What cannot start the first time is for whoever started it; later,
	// everybody waits for the mount.
	s.first = s.first && !d.served()
	switch {
	case s.stopped, byStop(d.err):
		return true, s.stoppedEnd(d.err, !s.first)
	case crashed(d.err):
		s.first = false
	case s.first, (d.err == nil || d.served()) && !leftDead(s.o):
		return true, supervisedEnd(d.err)
	case s.served && s.successor && !leftDead(s.o):
		return true, nil // somebody has unmounted it since
	}
	return false, nil
}

// failed says why another daemon is to be started, once for each reason. It returns an
// error if there were too many.
func (s *supervisor) failed(d *endedDaemon) error {
	if d.served() && d.lasted > startTime {
		s.failures = 0
		clear(s.said)
	}
	how := d.how()
	s.failures++
	lasting := s.served && leftDead(s.o)
	if s.failures > maxFailures && !crashed(d.err) && !lasting {
		s.complain("the daemon of %s ended %d times in a row; the last time: %s", quote(target(s.o)), s.failures, how)
		if d.err == nil {
			return &exitError{exitSoftware, ""}
		}
		return supervisedEnd(d.err)
	}
	switch {
	case s.said[how]:
	case crashed(d.err), d.served(), !lasting:
		s.complain("the daemon ended: %s; starting another one", how)
	default:
		s.complain("no daemon can take the place of the dead one of %s: %s; the supervisor tries again every %v; end it with: stagefs umount %s",
			quote(target(s.o)), how, longestPause, shellWord(target(s.o)))
	}
	s.said[how] = true
	return nil
}

// how tells in words how a daemon ended.
func (d *endedDaemon) how() string {
	switch {
	case d.reason != "":
		return d.reason
	case d.err == nil:
		return "exit status 0, and left a dead mount"
	case d.limit > 0 && bySignal(d.err, syscall.SIGKILL):
		return fmt.Sprintf("%v, for want of memory: its control group may have %d MiB", d.err, d.limit>>20)
	}
	return d.err.Error()
}

// leaveStart leaves the directory that the command line was typed in: the daemon covers
// it, perhaps, and nobody is to get beneath by /proc/PID/cwd (M5). The paths that
// daemons are started with are absolute ones from then on.
func (c *command) leaveStart() error {
	args, err := normalize(c.app(), c.args)
	if err != nil {
		return err
	}
	rest := slices.Index(args, "--")
	for i, arg := range args {
		option, path := "", arg
		if i < rest {
			name, value, _ := strings.Cut(arg, "=")
			option, path = name+"=", value
		}
		absolute := placeOf
		switch {
		case option == "--log=":
			absolute = fs.Abs // which may be no directory, nor have a name
		case i <= rest && option != "--state-dir=":
			continue
		}
		if path, err = absolute(path); err != nil {
			return err
		}
		args[i] = option + path
	}
	c.args = args
	return os.Chdir("/")
}

// pauseAfter is how long to wait after that many failures in a row. The first one is
// followed at once: everybody waits for the mount.
func pauseAfter(failures int) time.Duration {
	if failures <= 1 {
		return 0
	}
	return min(failurePause<<min(failures-2, 16), longestPause)
}

// awaitDaemon passes signals on to a daemon until it has ended, and returns how.
func (s *supervisor) awaitDaemon(daemon *exec.Cmd) error {
	ended := make(chan error, 1)
	go func() { ended <- daemon.Wait() }()
	look, lets := time.NewTicker(dyingTime), true
	defer look.Stop()
	var became os.FileInfo
	for {
		select {
		case <-look.C:
			became = s.follow(daemon.Process, became)
			if pid := daemon.Process.Pid; lets && dying(pid) {
				if err := letDie(pid, mountAt(target(s.o))); err != nil {
					s.complain("%v", err)
					lets = false
				}
			}
		case sig := <-s.signals:
			s.stopped = true
			daemon.Process.Signal(sig)
		case err := <-ended:
			return err
		}
	}
}

// told reports whether a signal comes within a time, or has come.
func told(signals <-chan os.Signal, within time.Duration) bool {
	timer := time.NewTimer(within)
	defer timer.Stop()
	select {
	case <-signals:
		return true
	case <-timer.C:
		return len(signals) > 0
	}
}

// leftDead reports whether a daemon that has ended left a dead mount, or may have: for want
// of descriptors or memory that can't be said, and it would stay for good.
func leftDead(o fs.Options) bool {
	dead, err := fs.FindDead(target(o))
	return err == nil && dead || procid.IsShort(err)
}

// stoppedEnd is the end by a signal (M4), of a supervisor whose last daemon has
// ended as err says. That one may not have been there to unmount, or have heard
// the signal before it could: ours tells that a dead mount is of such a daemon.
func (s *supervisor) stoppedEnd(err error, ours bool) error {
	switch {
	case ours && leftDead(s.o):
	case ours && byStop(err):
		return nil // somebody else was faster
	default:
		return supervisedEnd(err)
	}
	gone := fs.Unmount(target(s.o), true)
	if errors.Is(gone, fs.ErrNoMount) && !leftDead(s.o) {
		gone = nil // somebody else was faster here, too
	}
	if gone != nil {
		return exitf(exitOS, "the daemon was killed, and its mount cannot be removed: %v; clear it with: stagefs umount %s", gone, shellWord(target(s.o)))
	}
	s.complain("%s was unmounted: its daemon had been killed", quote(target(s.o)))
	if crashed(err) {
		return nil
	}
	return supervisedEnd(err)
}
