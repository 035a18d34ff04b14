//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// envHandover tells a program that it goes on in place of the daemon that this
// process was before; its value is a handover in JSON.
const envHandover = "STAGEFS_HANDOVER"

// A handover is what a daemon leaves to the program that replaces it.
type handover struct {
	State int    // descriptor of what fs.Continue reads
	Log   int    // and of the log; 0: standard error
	Debug bool   // log every decision
	Cwd   string // where the command line was typed

	Mountpoint string

	Ignored []syscall.Signal // stop signals that do not stop it

	Shelf *procid.Shelf `json:",omitempty"` // its supervisor's
}

// replaceMount has the daemon of a mount replaced by this program.
func (c *command) replaceMount(given string) error {
	path, _, err := findExact(given)
	if err == nil {
		err = notStopped(path)
	}
	if err != nil {
		return err
	}
	pid, err := servedBy(path)
	if err != nil {
		return err
	}
	ctl, err := openCtl(path)
	if err != nil {
		return err
	}
	defer ctl.Close()
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		pidfd = -1 // of another PID namespace
	}
	defer unix.Close(pidfd)
	defer endLate()()
	// Interrupted, Go would ask again, and hear that it is being replaced already.
	err = undisturbed(func() error {
		_, err := ctl.WriteString("replace\n")
		return err
	})
	if err != nil {
		if isDead(err) && pidfd >= 0 {
			if err := endedMidway(path, pid, pidfd); err != nil {
				return err
			}
		}
		return replaceError(path, ctl, err)
	}
	version, err := readControl(path, "version")
	if err != nil {
		return err
	}
	line, _, _ := strings.Cut(string(version), "\n")
	c.say("%s is served by %s now", quote(path), line)
	return nil
}

// endLate has the stop signals end this process only some time after they come: who
// stops a daemon and all that has to do with it needs this one still. over ends that.
func endLate() (over func()) {
	signals := make(chan os.Signal, 1)
	notifyUnignored(signals, stopSignals()...)
	done := make(chan struct{})
	go func() {
		select {
		case sig := <-signals:
			select {
			case <-time.After(lateTime):
			case <-done:
			}
			dieBy(sig.(syscall.Signal))
		case <-done:
		}
	}()
	return func() {
		signal.Stop(signals)
		close(done)
	}
}

// lateTime is more than most replacements take.
const lateTime = 3 * time.Second

// endedMidway unmounts what a daemon has left that a stop signal has ended in the
// middle of its replacement (M4). It returns nil if that is not so: it goes on in
// another way, or another one takes the place of what it left.
func endedMidway(path string, pid, pidfd int) error {
	for end := time.Now().Add(endTime); !ended(pidfd, 10*time.Millisecond); {
		if dead, err := fs.FindDead(path); err == nil && !dead || time.Now().After(end) {
			return nil // mounted anew
		}
	}
	sig := syscall.Signal(procid.EndOf(pid, pidfd).Signal)
	if !slices.Contains(stopSignals(), sig) {
		return nil
	}
	if dead, err := fs.FindDead(path); err != nil || dead {
		if err := fs.Unmount(path, true); err != nil && !errors.Is(err, fs.ErrNoMount) {
			return exitf(exitOS, "the daemon was told to end (%v) meanwhile, and its mount cannot be removed: %v; clear it with: stagefs umount %s", sig, err, shellWord(path))
		}
	}
	return exitf(exitUnavailable, "the daemon was told to end (%v) meanwhile; %s is unmounted", sig, quote(path))
}

// replaceError says why the daemon goes on.
func replaceError(path string, ctl io.ReaderAt, err error) error {
	text, status := readAnswer(ctl).Message, exitHeld
	if isDead(err) {
		return exitf(exitUnavailable, "%s: the daemon ended, or its new program could not go on and mounted anew; its log says more", quote(path))
	}
	switch {
	case text == "":
		text = err.Error()
	case strings.Contains(text, "no such command"):
		text = "its daemon is too old to be replaced; unmount and mount again"
		status = exitUnavailable
	}
	switch {
	case errors.Is(err, unix.EPERM):
		status = exitNoPerm
	case errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EOPNOTSUPP):
		status = exitUnavailable
	}
	var errno syscall.Errno
	if errors.As(err, &errno) {
		text = strings.TrimSuffix(text, ": "+errno.Error()) // which the rest says better
	}
	return exitf(status, "%s: %s; the daemon serves on", quote(path), harmless(text))
}

// replaceBy returns what runs another program in this process, and returns only if
// that fails.
func (c *command) replaceBy(h handover) func(program, state *os.File) error {
	return func(program, state *os.File) error {
		c.logTo.flush()
		return c.paused(func() error { return h.exec(program, state, c.logFile) })
	}
}

func (h handover) exec(program, state, log *os.File) error {
	h.State = int(state.Fd())
	inherited := []int{h.State}
	if log != nil {
		h.Log = int(log.Fd())
		inherited = append(inherited, h.Log)
	}
	if h.Shelf != nil {
		inherited = append(inherited, h.Shelf.Put, h.Shelf.Take)
	}
	text, err := json.Marshal(h)
	if err != nil {
		return err
	}
	for _, fd := range inherited {
		if err := leaveOpen(fd); err != nil {
			return err
		}
		defer unix.CloseOnExec(fd)
	}
	err = syscall.Exec(fmt.Sprintf("/proc/self/fd/%d", program.Fd()), os.Args, append(os.Environ(), envHandover+"="+string(text)))
	return fmt.Errorf("exec: %w", err)
}

// leaveOpen has the next program inherit a descriptor.
func leaveOpen(fd int) error {
	_, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, 0)
	return err
}

// takenOver returns what the daemon before has left to this program, if there
// was one.
func takenOver() (h handover, ok bool) {
	text := os.Getenv(envHandover)
	os.Unsetenv(envHandover)
	if text == "" || json.Unmarshal([]byte(text), &h) != nil || h.State <= 2 {
		return h, false
	}
	unix.CloseOnExec(h.State)
	if h.Log != 0 {
		unix.CloseOnExec(h.Log)
	}
	if h.Shelf != nil {
		unix.CloseOnExec(h.Shelf.Put)
		unix.CloseOnExec(h.Shelf.Take)
	}
	return h, true
}

// takeOver serves on in place of the daemon that this process was before. If
// that cannot be done, it mounts anew, as after a crash (S1).
func (c *command) takeOver(ctx context.Context, h handover) error {
	nameProcess()
	o := fs.Options{Mountpoint: h.Mountpoint, Version: versionText(), Replace: c.replaceBy(h), Shelf: h.Shelf}
	if h.Log != 0 {
		c.logFile = os.NewFile(uintptr(h.Log), "log")
		o.Log = c.newLog(c.logFile, logLevel(h.Debug))
		c.log = o.Log
	} else {
		o.Log = c.newLog(c.err, logLevel(h.Debug))
	}
	c.mount = func(o fs.Options) (server, error) {
		s, err := fs.Continue(os.NewFile(uintptr(h.State), "state"), o)
		if err != nil {
			return nil, c.startAnew(h, o.Log, err)
		}
		return s, nil
	}
	return c.serve(ctx, o, func(s server) error {
		for _, w := range s.Warnings() {
			c.complain("warning: %s", w)
		}
		return nil
	})
}

// nameProcess gives this process the program's name: it has that of the descriptor, or of
// the link, that it was run from.
func nameProcess() { os.WriteFile("/proc/self/comm", []byte("stagefs"), 0) }

// startAnew runs this program with its command line, without what it was to go
// on from: that ends the old mount, and a new one takes its place. If it was told to
// end, the mount is removed instead (M4).
func (c *command) startAnew(h handover, log *slog.Logger, why error) error {
	log.Error("cannot go on where the daemon before was; mounting anew", "err", why)
	err := c.paused(func() error {
		if err := unix.CloseRange(3, 1<<31-1, unix.CLOSE_RANGE_CLOEXEC); err != nil {
			return os.NewSyscallError("close_range", err)
		}
		if err := os.Chdir(h.Cwd); err != nil {
			log.Error("cannot go back to where the command line was typed", "err", err)
		}
		left := "0"
		if h.Shelf != nil {
			for _, fd := range []int{h.Shelf.Put, h.Shelf.Take} {
				if err := leaveOpen(fd); err != nil {
					return err
				}
				left += "," + strconv.Itoa(fd)
			}
		}
		return fmt.Errorf("exec: %w", syscall.Exec("/proc/self/exe", os.Args, append(os.Environ(), envSupervised+"="+left+againMark)))
	})
	if errors.Is(err, fs.ErrReplacing) {
		err = fs.Unmount(h.Mountpoint, true)
	}
	return errors.Join(why, err)
}

func logLevel(debug bool) slog.Level {
	if debug {
		return slog.LevelDebug
	}
	return slog.LevelInfo
}
