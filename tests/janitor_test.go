//go:build linux

package tests

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func startJanitor(root string) (io.Closer, error) {
	cmd := exec.Command(agentBin())
	cmd.Env = []string{envJanitor + "=" + root}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // what ends the test's group leaves it
	cmd.Stderr = os.Stderr
	pipe, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	return pipe, cmd.Start()
}

// janitorMain clears up as soon as the test process is dead, or dying: one that
// hangs in a request of a hung daemon can't die before its mount does.
func janitorMain(root string) int {
	signal.Ignore(unix.SIGPIPE) // whoever heard what it says may be gone, too
	gone := make(chan struct{})
	go func() { io.Copy(io.Discard, os.Stdin); close(gone) }()
	for dying := false; !dying; {
		select {
		case <-gone:
			dying = true
		case <-time.After(time.Second):
			dying = killed(os.Getppid())
		}
	}
	connections := openConnections()
	tellHung(root, connections)
	for mnt, dev := range mountsBelow(root) {
		if minor, ok := fuseMinor(dev); ok {
			connections.abort(minor)
		}
		unix.Unmount(mnt, unix.MNT_DETACH)
	}
	// Where that was not possible a daemon's end does it. Its command line is
	// shown whatever waits for it; who is in execve(2) shows no environment.
	for _, pid := range pidsWithCommand(root + "/stagefs") {
		unix.Kill(pid, unix.SIGKILL)
	}
	for _, pid := range markedPids(root) {
		unix.Kill(pid, unix.SIGKILL)
	}
	if len(mountsBelow(root)) == 0 {
		os.RemoveAll(root)
	}
	return 0
}

// tellHung prints what the daemons do whose clients still wait for an answer.
func tellHung(root string, connections connections) {
	waited := func(dev string) bool {
		minor, ok := fuseMinor(dev)
		return ok && connections.waiting(minor) > 0
	}
	hung := map[string]string{}
	for mnt, dev := range mountsBelow(root) {
		if waited(dev) {
			hung[mnt] = dev
		}
	}
	if len(hung) == 0 {
		return
	}
	time.Sleep(time.Second) // what is answered by then does not hang
	for mnt, dev := range hung {
		if !waited(dev) {
			continue
		}
		fmt.Fprintf(os.Stderr, "tests: somebody waits for the daemon of %s\n", mnt)
		for _, pid := range pidsWithCommand(root + "/stagefs") {
			args, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
			if !strings.Contains(string(args)+"\x00", "\x00"+mnt+"\x00") {
				continue
			}
			unix.Kill(pid, unix.SIGQUIT) // the Go runtime prints all goroutines
			unix.Kill(pid, unix.SIGCONT)
			time.Sleep(time.Second)
			_, state, _ := strings.Cut(string(args), "\x00--state-dir\x00")
			state, _, _ = strings.Cut(state, "\x00")
			log, _ := os.ReadFile(strings.TrimSuffix(state, "state") + "log")
			fmt.Fprintf(os.Stderr, "%s\n", log[max(0, len(log)-64<<10):])
		}
	}
}

// connections is the kernel's directory of FUSE's connections; -1: there is none.
type connections int

// openConnections opens it, wherever it is mounted. Only root may.
func openConnections() connections {
	ctx, err := unix.Fsopen("fusectl", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1
	}
	defer unix.Close(ctx)
	if unix.FsconfigCreate(ctx) != nil {
		return -1
	}
	dir, err := unix.Fsmount(ctx, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return -1
	}
	return connections(dir)
}

// of is the directory of one connection.
func (c connections) of(minor string) string { return fmt.Sprintf("/proc/self/fd/%d/%s", c, minor) }

// abort ends a connection, whoever waits in it.
func (c connections) abort(minor string) {
	os.WriteFile(c.of(minor)+"/abort", []byte("1"), 0)
}

// waiting is how many requests have no answer yet.
func (c connections) waiting(minor string) int {
	b, _ := os.ReadFile(c.of(minor) + "/waiting")
	return atoi(strings.TrimSpace(string(b)))
}

// fuseMinor is the number of the connection of a mount; a test's own disk has none.
func fuseMinor(dev string) (string, bool) { return strings.CutPrefix(dev, "0:") }

// killed tells whether a process is dying: SIGKILL waits for it, or for its first
// thread, as it does after an exit, or a panic; or that one is dead, which may be long
// before the others are.
func killed(pid int) bool {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(status)) {
		name, value, _ := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		switch name {
		case "State":
			if strings.HasPrefix(value, "Z") {
				return true
			}
		case "SigPnd", "ShdPnd":
			if pending, _ := strconv.ParseUint(value, 16, 64); pending&(1<<(unix.SIGKILL-1)) != 0 {
				return true
			}
		}
	}
	return false
}
