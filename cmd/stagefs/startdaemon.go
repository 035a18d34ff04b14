//go:build linux

package main

import (
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// startDaemon starts a daemon in a process group of its own, deaf to the
// terminal: this process passes signals on. heard returns, once it has ended, what
// it has told last, why it could not start, and whether the starter was told that it
// answers.
func (s *supervisor) startDaemon() (cmd *exec.Cmd, heard func() (last byte, reason string, answered bool), err error) {
	cmd = exec.Command(s.programPath(), s.args...)
	cmd.Args[0] = "stagefs"
	cmd.Env = os.Environ()
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var ready *os.File
	if s.starter != nil {
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
	for _, f := range s.shelf {
		cmd.ExtraFiles = append(cmd.ExtraFiles, f)
		value += "," + strconv.Itoa(2+len(cmd.ExtraFiles))
	}
	if s.successor {
		value += againMark
	}
	cmd.Env = append(cmd.Env, envSupervised+"="+value)
	if err := cmd.Start(); err != nil {
		ready.Close()
		r.Close()
		return nil, nil, startError(err)
	}
	passed := make(chan bool, 1)
	go func() { passed <- s.starter != nil && s.passOn(cmd, ready) }()
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
func (s *supervisor) passOn(daemon *exec.Cmd, ready *os.File) bool {
	defer ready.Close()
	if n, _ := ready.Read(make([]byte, 1)); n != 1 {
		return false
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err == nil {
		err = s.daemonReady(s.starter, null)
	}
	if err != nil {
		daemon.Process.Signal(syscall.SIGTERM) // nobody waits for it
	}
	return true
}

func startError(err error) error { return exitf(exitOS, "starting the daemon: %v", err) }

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
