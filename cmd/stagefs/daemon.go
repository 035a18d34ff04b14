//go:build linux

package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

// envReady tells a process that it is the daemon which `stagefs mount -d`
// started, and which descriptor its starter waits at for one byte.
const envReady = "STAGEFS_READY_FD"

// startDaemon runs this same command line again in a session of its own, and
// returns when that one's mount answers. Until then the daemon shares standard
// error, so that it tells its warnings and errors itself.
func (c *command) startDaemon() error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	self, err := os.Executable()
	if err != nil {
		self = "/proc/self/exe"
	}
	cmd := exec.Command(self, c.args...)
	cmd.Args[0] = "stagefs"
	cmd.Env = append(unnotified(), envReady+"=3")
	if c.quiet {
		cmd.Env = append(cmd.Env, envQuiet+"=1")
	}
	cmd.ExtraFiles = []*os.File{w}
	cmd.Stderr = c.err
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}

	// In its session the daemon does not hear what the terminal sends, and is told by this
	// program. It inherits what that was started to ignore, which is so heard only later.
	signals := make(chan os.Signal, 4)
	notifyUnignored(signals, stopSignals()...) // to the end, as in serve
	err = cmd.Start()
	w.Close()
	if err != nil {
		return startError(err)
	}
	// The daemon looks for processes that are inside of what it will cover
	// (M5). This one is about to end, and is no find.
	_ = os.Chdir("/")

	notifyStop(signals, nil)
	answer := make(chan bool, 1)
	go func() {
		n, _ := r.Read(make([]byte, 1))
		answer <- n == 1
	}()
	ended := make(chan error, 1)
	for {
		select {
		case sig := <-signals:
			cmd.Process.Signal(sig)
		case ready := <-answer:
			if ready {
				return cmd.Process.Release()
			}
			go func() { ended <- cmd.Wait() }() // it may take time to end, and is to hear signals meanwhile
		case err := <-ended:
			return daemonEnd(err)
		}
	}
}

// daemonEnd passes on the status of a daemon that ended before it was ready.
func daemonEnd(err error) error {
	var exit *exec.ExitError
	switch {
	case err == nil:
		return exitf(exitSoftware, "the daemon ended before the mount answered")
	case !errors.As(err, &exit):
		return exitf(exitOS, "waiting for the daemon: %v", err)
	case exit.ExitCode() < 0:
		return exitf(exitSoftware, "the daemon ended before the mount answered: %v", exit)
	}
	return &exitError{exit.ExitCode(), ""} // it has said why
}

// readyPipe is the descriptor at which a starter waits, nil if there is none.
// Programs that this process runs learn nothing of it.
func readyPipe() *os.File {
	if os.Getenv(envReady) != "3" {
		return nil
	}
	os.Unsetenv(envReady)
	unix.CloseOnExec(3)
	return os.NewFile(3, "ready pipe")
}

// daemonReady lets go of the terminal, for null, and tells the starter that the mount
// answers. An error means that nobody waits for it any more.
func (c *command) daemonReady(starter, null *os.File) error {
	defer null.Close()
	log := cmp.Or(c.logFile, null)
	for fd, file := range []*os.File{null, log, log} {
		if err := unix.Dup3(int(file.Fd()), fd, 0); err != nil {
			return fmt.Errorf("leaving the terminal: %w", err)
		}
	}
	defer starter.Close()
	if _, err := starter.Write([]byte{0}); err != nil {
		return fmt.Errorf("whoever started this daemon is gone: %w", err)
	}
	return nil
}
