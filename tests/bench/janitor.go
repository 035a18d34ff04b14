//go:build linux

package main

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// startJanitor starts the process that clears up as soon as the pipe ends,
// which it does also when the benchmark is killed.
func startJanitor(root string) (stop func() error, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self)
	cmd.Env = []string{envJanitor + "=" + root}
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Stderr = os.Stderr
	pipe, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	return func() error { pipe.Close(); return cmd.Wait() }, cmd.Start()
}

func janitorMain(root string) int {
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	io.Copy(io.Discard, os.Stdin)
	for range 100 {
		mounts, pids := mountsBelow(root), markedPids(root)
		if len(mounts)+len(pids) == 0 {
			unix.Unmount(root, unix.MNT_DETACH) // an image, if it is one
			if err := os.RemoveAll(root); err != nil {
				return failJob(err)
			}
			return 0
		}
		for _, m := range mounts {
			unix.Unmount(m, unix.MNT_DETACH)
		}
		for _, pid := range pids {
			unix.Kill(pid, unix.SIGKILL)
		}
		time.Sleep(50 * time.Millisecond)
	}
	return failJob(fmt.Errorf("left over below %s: mounts %q, processes %v", root, mountsBelow(root), markedPids(root)))
}

// mountsBelow has the mount points below a directory, deepest first.
func mountsBelow(root string) []string {
	info, _ := os.ReadFile("/proc/self/mountinfo")
	var found []string
	for line := range strings.Lines(string(info)) {
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], root+"/") {
			found = append([]string{f[4]}, found...)
		}
	}
	return found
}

// markedPids finds the processes of a run.
func markedPids(root string) []int {
	mark := "\x00" + envRoot + "=" + root + "\x00"
	entries, _ := os.ReadDir("/proc")
	var pids []int
	for _, e := range entries {
		var pid int
		if n, _ := fmt.Sscanf(e.Name(), "%d", &pid); n != 1 {
			continue
		}
		env, _ := os.ReadFile("/proc/" + e.Name() + "/environ")
		if strings.Contains("\x00"+string(env), mark) && pid != os.Getpid() {
			pids = append(pids, pid)
		}
	}
	return pids
}
