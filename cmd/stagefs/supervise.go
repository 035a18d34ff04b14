//go:build linux

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// envSupervised tells a process that it is the daemon which `stagefs mount
// --supervise` started.
const envSupervised = "STAGEFS_SUPERVISED"

// A supervision is what a daemon knows of its supervisor: the value of
// envSupervised are descriptors, and againMark if that is so.
type supervision struct {
	on    bool
	again bool          // it takes the place of one that has mounted
	told  *os.File      // takes news, a byte each; nil: nobody asks
	shelf *procid.Shelf // what the daemon before may have left; nil: there is none
}

// What a daemon tells its supervisor: the last of it counts when it has ended.
const (
	toldNothing = 0
	toldMounted = 'm' // its mount is there
	toldBack    = 'b' // it is about to take it back
	toldServes  = 's' // it answers
	toldFailed  = "f" // why it can't start: the text follows, to the end
)

// maxReason bounds that text: a pipe may have room for a page alone, and nobody reads
// before the daemon has ended.
const maxReason = 3000

// supervised returns that, to nobody but its first caller.
func supervised() (s supervision) {
	value := os.Getenv(envSupervised)
	os.Unsetenv(envSupervised)
	list, again := strings.CutSuffix(value, againMark)
	var fds []int
	for text := range strings.SplitSeq(list, ",") {
		if n, err := strconv.Atoi(text); err == nil {
			if n > 2 {
				unix.CloseOnExec(n)
			}
			fds = append(fds, n)
		}
	}
	if len(fds) > 0 && fds[0] > 2 { // 0: nobody asks
		s.told = os.NewFile(uintptr(fds[0]), "supervisor's pipe")
	}
	if len(fds) == 3 {
		s.shelf = &procid.Shelf{Put: fds[1], Take: fds[2]}
	}
	s.on, s.again = value != "", again
	if s.on {
		nameProcess()
	}
	return s
}

// againMark says in envSupervised that a daemon takes the place of one that has mounted.
const againMark = " again"

func (s *supervision) tell(news byte) {
	if s.told != nil {
		_, _ = s.told.Write([]byte{news}) // a supervisor that is gone needs none
	}
}

// failed leaves it to the supervisor to say why the daemon can't start: it knows what
// it has said already. It returns what is left to be said.
func (s *supervision) failed(err error) error {
	if err == nil || s.told == nil {
		return err
	}
	status, text := explain(err)
	if text != "" {
		_, failed := s.told.WriteString(toldFailed + text[:min(len(text), maxReason)])
		if failed != nil {
			return err
		}
	}
	return &exitError{status, ""}
}

// mounted tells the supervisor that the mount is there, as soon as it is: who
// unmounts it wants no other one, also if the daemon is killed before it serves.
func (s *supervision) mounted(there bool) {
	if there {
		s.tell(toldMounted)
	} else {
		s.tell(toldBack)
	}
}

// serves tells the supervisor that the mount answers.
func (s *supervision) serves() {
	s.tell(toldServes)
	if s.told != nil {
		s.told.Close()
		s.told = nil
	}
}

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
	signals := make(chan os.Signal, 4)
	notifyUnignored(signals, stopSignals()...) // to the end, as in serve
	keepServing()
	keepThreads()
	if err := c.leaveStart(); err != nil {
		return err
	}
	var shelf []*os.File
	if s, err := procid.NewShelf(); err == nil { // without it, each daemon knows what was recorded
		shelf = s.Files()
	}

	stopped, failures := false, 0
	first := true                 // none has served or crashed
	served := false               // one has
	successor := false            // of one that has mounted, so that it must find a dead mount
	said := make(map[string]bool) // why daemons have ended since one served well
	for {
		started := time.Now()
		kills, _ := fs.MemoryKills()
		cmd, heard, err := c.startSupervised(starter, shelf, successor)
		if err != nil && first {
			return err
		}
		last, reason := byte(toldNothing), ""
		if err == nil {
			err = c.awaitDaemon(o, cmd, signals, &stopped)
			var answered bool
			if last, reason, answered = heard(); answered {
				starter = nil
			}
		}
		end := func(err error) error {
			if reason != "" && !said[reason] {
				c.complain("%s", reason)
			}
			return err
		}
		hasServed := last == toldServes
		served = served || hasServed
		switch {
		case last == toldMounted, hasServed:
			successor = true
		case last == toldBack, os.Geteuid() != 0:
			// An ordinary user's daemon clears the dead mount before it mounts;
			// if it dies in between, the next one finds none.
			successor = false
		}
		if unmountedEarly(err) {
			if first {
				return end(&exitError{exitHeld, ""})
			}
			return end(nil)
		}
		// What cannot start the first time is for whoever started it; later,
		// everybody waits for the mount.
		first = first && !hasServed
		switch {
		case stopped, byStop(err):
			return end(c.stoppedEnd(o, err, !first))
		case crashed(err):
			first = false
		case first, (err == nil || hasServed) && !leftDead(o):
			return end(supervisedEnd(err))
		case served && successor && !leftDead(o):
			return end(nil) // somebody has unmounted it since
		}
		if hasServed && time.Since(started) > startTime {
			failures = 0
			clear(said)
		}
		how := "exit status 0, and left a dead mount"
		switch {
		case reason != "":
			how = reason
		case err != nil:
			how = err.Error()
			if n, limit := fs.MemoryKills(); n > kills && bySignal(err, syscall.SIGKILL) {
				how += fmt.Sprintf(", for want of memory: its control group may have %d MiB", limit>>20)
			}
		}
		failures++
		lasting := served && leftDead(o)
		if failures > maxFailures && !crashed(err) && !lasting {
			c.complain("the daemon of %s ended %d times in a row; the last time: %s", quote(target(o)), failures, how)
			if err == nil {
				return &exitError{exitSoftware, ""}
			}
			return supervisedEnd(err)
		}
		switch {
		case said[how]:
		case crashed(err), hasServed, !lasting:
			c.complain("the daemon ended: %s; starting another one", how)
		default:
			c.complain("no daemon can take the place of the dead one of %s: %s; the supervisor tries again every %v; end it with: stagefs umount %s",
				quote(target(o)), how, longestPause, shellWord(target(o)))
		}
		said[how] = true
		if told(signals, pauseAfter(failures)) {
			return c.stoppedEnd(o, err, true)
		}
	}
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

// awaitDaemon passes signals on to a daemon until it has ended, and returns how. It
// sets stopped at a signal.
func (c *command) awaitDaemon(o fs.Options, daemon *exec.Cmd, signals <-chan os.Signal, stopped *bool) error {
	ended := make(chan error, 1)
	go func() { ended <- daemon.Wait() }()
	look, lets := time.NewTicker(dyingTime), true
	defer look.Stop()
	var became os.FileInfo
	for {
		select {
		case <-look.C:
			became = c.follow(daemon.Process, became)
			if pid := daemon.Process.Pid; lets && dying(pid) {
				if err := letDie(pid, mountAt(target(o))); err != nil {
					c.complain("%v", err)
					lets = false
				}
			}
		case sig := <-signals:
			*stopped = true
			daemon.Process.Signal(sig)
		case err := <-ended:
			return err
		}
	}
}

// follow has the daemon's program started after a crash, should it have become another
// one by an upgrade, and be that at the next look, too: the state may be of a newer version
// by then. What crashes within dyingTime is followed by the program before it. seen is what
// the last look at this daemon has returned; nil: nothing new.
func (c *command) follow(daemon *os.Process, seen os.FileInfo) os.FileInfo {
	exe, err := os.OpenFile(fmt.Sprintf("/proc/%d/exe", daemon.Pid), unix.O_PATH, 0)
	if err != nil {
		return nil
	}
	defer exe.Close()
	now, err := exe.Stat()
	if err != nil || daemon.Signal(syscall.Signal(0)) != nil { // its number may be another process's
		return nil
	}
	before, err := os.Stat(c.programPath())
	if err != nil || os.SameFile(before, now) {
		return nil
	}
	if seen == nil || !os.SameFile(seen, now) {
		return now
	}
	if fd, err := unix.FcntlInt(exe.Fd(), unix.F_DUPFD_CLOEXEC, programFD); err == nil {
		c.program.Close()
		c.program = os.NewFile(uintptr(fd), "the daemon's program")
	}
	return now
}

// programFD is above the descriptors that a daemon is started with, which would take the
// place of the program's there.
const programFD = 64

// programPath leads to what a supervisor starts.
func (c *command) programPath() string {
	if c.program == nil {
		return "/proc/self/exe"
	}
	return fmt.Sprintf("/proc/self/fd/%d", c.program.Fd())
}

// mountAt returns the stagefs mount at a path, nil if there is none.
func mountAt(path string) *fs.MountEntry {
	mounts, _ := fs.ReadMounts()
	at, err := fs.AbsoluteOf(path)
	if m := fs.TopMount(mounts, at); err == nil && m != nil && m.IsStagefs() {
		return m
	}
	return nil
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
func (c *command) stoppedEnd(o fs.Options, err error, ours bool) error {
	switch {
	case ours && leftDead(o):
	case ours && byStop(err):
		return nil // somebody else was faster
	default:
		return supervisedEnd(err)
	}
	gone := fs.Unmount(target(o), true)
	if errors.Is(gone, fs.ErrNoMount) && !leftDead(o) {
		gone = nil // somebody else was faster here, too
	}
	if gone != nil {
		return exitf(exitOS, "the daemon was killed, and its mount cannot be removed: %v; clear it with: stagefs umount %s", gone, shellWord(target(o)))
	}
	c.complain("%s was unmounted: its daemon had been killed", quote(target(o)))
	if crashed(err) {
		return nil
	}
	return supervisedEnd(err)
}

// startSupervised starts the daemon in a process group of its own, deaf to the
// terminal: this process passes signals on. heard returns, once it has ended, what
// it has told last, why it could not start, and whether the starter was told that it
// answers.
func (c *command) startSupervised(starter *os.File, shelf []*os.File, successor bool) (cmd *exec.Cmd, heard func() (last byte, reason string, answered bool), err error) {
	cmd = exec.Command(c.programPath(), c.args...)
	cmd.Args[0] = "stagefs"
	cmd.Env = os.Environ()
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var ready *os.File
	if starter != nil {
		r, w, err := os.Pipe()
		if err != nil {
			return nil, nil, startError(err)
		}
		defer w.Close()
		ready = r
		cmd.ExtraFiles = []*os.File{w}
		cmd.Env = append(cmd.Env, envReady+"=3")
	}
	r, w, err := os.Pipe()
	if err != nil {
		ready.Close()
		return nil, nil, startError(err)
	}
	defer w.Close()
	cmd.ExtraFiles = append(cmd.ExtraFiles, w)
	value := strconv.Itoa(2 + len(cmd.ExtraFiles))
	for _, f := range shelf {
		cmd.ExtraFiles = append(cmd.ExtraFiles, f)
		value += "," + strconv.Itoa(2+len(cmd.ExtraFiles))
	}
	if successor {
		value += againMark
	}
	cmd.Env = append(cmd.Env, envSupervised+"="+value)
	if err := cmd.Start(); err != nil {
		ready.Close()
		r.Close()
		return nil, nil, startError(err)
	}
	passed := make(chan bool, 1)
	go func() { passed <- starter != nil && c.passOn(cmd, ready, starter) }()
	return cmd, func() (last byte, reason string, answered bool) {
		defer r.Close()
		all := make([]byte, 64+maxReason)
		n, _ := r.Read(all)
		news, reason, _ := strings.Cut(string(all[:n]), toldFailed)
		if news != "" {
			last = news[len(news)-1]
		}
		return last, reason, <-passed
	}, nil
}

// passOn tells the starter that the daemon's mount answers. It reports false if the
// daemon ended before it did: the starter waits for the next one then.
func (c *command) passOn(daemon *exec.Cmd, ready, starter *os.File) bool {
	defer ready.Close()
	if n, _ := ready.Read(make([]byte, 1)); n != 1 {
		return false
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err == nil {
		err = c.daemonReady(starter, null)
	}
	if err != nil {
		daemon.Process.Signal(syscall.SIGTERM) // nobody waits for it
	}
	return true
}

func startError(err error) error { return exitf(exitOS, "starting the daemon: %v", err) }

// statusPanic is what the Go runtime exits with when a program crashes.
const statusPanic = 2

// crashed reports whether a daemon ended in a way that it did not choose.
func crashed(err error) bool {
	var exit *exec.ExitError
	return errors.As(err, &exit) && (exit.ExitCode() < 0 || exit.ExitCode() == statusPanic)
}

// byStop reports whether a stop signal ended a daemon that could not listen to it
// just then.
func byStop(err error) bool { return bySignal(err, stopSignals()...) }

// bySignal reports whether one of these signals ended a daemon.
func bySignal(err error, signals ...syscall.Signal) bool {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return false
	}
	ws, ok := exit.Sys().(syscall.WaitStatus)
	return ok && ws.Signaled() && slices.Contains(signals, ws.Signal())
}

// statusUnmounted is what a supervised daemon exits with that was unmounted
// before it served: whoever did that wants no other one.
const statusUnmounted = 3

func unmountedEarly(err error) bool {
	var exit *exec.ExitError
	return errors.As(err, &exit) && exit.ExitCode() == statusUnmounted
}

// supervisedEnd passes on how the daemon ended. Why was said.
func supervisedEnd(err error) error {
	var exit *exec.ExitError
	var own *exitError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &own): // it could not be started
		return err
	case !errors.As(err, &exit):
		return exitf(exitOS, "waiting for the daemon: %v", err)
	case exit.ExitCode() < 0:
		return &exitError{exitSignal + int(exit.Sys().(syscall.WaitStatus).Signal()), ""}
	}
	return &exitError{exit.ExitCode(), ""}
}
