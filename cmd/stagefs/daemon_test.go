//go:build linux

package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// background runs `stagefs mount -d` with a fake mount to its end.
func background(t *testing.T, mode string, args ...string) (status int, errs string) {
	t.Helper()
	cmd := exec.Command(os.Args[0], append([]string{"mount", "-d"}, args...)...)
	cmd.Env = append(os.Environ(), envFake+"="+mode)
	var out bytes.Buffer
	cmd.Stderr = &out
	// If the daemon kept this pipe, Run would wait for the daemon's end.
	cmd.WaitDelay = 10 * time.Second
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	} else if err == exec.ErrWaitDelay {
		t.Error("the daemon keeps standard error open")
	}
	return cmd.ProcessState.ExitCode(), out.String()
}

// daemonPid returns whom `stagefs mount -d` says that it has started.
func daemonPid(t *testing.T, says string) int {
	t.Helper()
	m := regexp.MustCompile(`\(pid (\d+)\)`).FindStringSubmatch(says)
	if m == nil {
		t.Fatalf("mount -d does not name its pid: %q", says)
	}
	pid, _ := strconv.Atoi(m[1])
	return pid
}

func TestDaemon(t *testing.T) {
	dir := t.TempDir()
	log := filepath.Join(t.TempDir(), "log")
	status, errs := background(t, "ok", dir, "--log", log)
	if status != 0 || !strings.Contains(errs, "warning: a warning") {
		t.Fatalf("mount -d = %d, says %q", status, errs)
	}
	pid := daemonPid(t, errs)
	defer syscall.Kill(pid, syscall.SIGKILL)

	proc := fmt.Sprintf("/proc/%d/", pid)
	for fd, want := range []string{os.DevNull, log, log} {
		if got, err := os.Readlink(proc + "fd/" + strconv.Itoa(fd)); err != nil || got != want {
			t.Errorf("the daemon's descriptor %d = %q, %v, want %s", fd, got, err, want)
		}
	}
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
		// It is closed right after the byte that has made the starter return.
		if got, _ := os.Readlink(proc + "fd/3"); !strings.HasPrefix(got, "pipe:") {
			break
		} else if time.Now().After(end) {
			t.Error("the daemon keeps the pipe to its starter")
			break
		}
	}
	sid, _, _ := syscall.Syscall(syscall.SYS_GETSID, uintptr(pid), 0, 0)
	if int(sid) != pid {
		t.Errorf("the daemon is in session %d, want one of its own, %d", sid, pid)
	}
	syscall.Kill(pid, syscall.SIGTERM)
	for range 500 {
		if data, _ := os.ReadFile(log); strings.Contains(string(data), "unmounting") {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Error("the daemon's end is not in the log")
}

func TestDaemonFails(t *testing.T) {
	dir := t.TempDir()
	for _, tt := range []struct {
		mode   string
		args   []string
		status int
		says   string
	}{
		{"error", []string{dir}, 66, "read-write"},
		{"ok", []string{dir, "--unlocked=x"}, 64, "want allow or deny"},
		{"ok", []string{dir, "--log", filepath.Join(t.TempDir(), "no", "dir")}, 73, "log file"},
		{"crash", []string{dir}, 70, "ended before the mount answered"},
		{"killed", []string{dir}, 70, "signal: killed"},
	} {
		status, errs := background(t, tt.mode, tt.args...)
		if status != tt.status || !strings.Contains(errs, tt.says) || strings.Count(errs, tt.says) != 1 {
			t.Errorf("mount -d %q with %s = %d, says %q, want %d and %q once", tt.args, tt.mode, status, errs, tt.status, tt.says)
		}
	}
}

// What is sent to the starter reaches the daemon, which then unmounts.
func TestDaemonInterrupted(t *testing.T) {
	dir := t.TempDir()
	p := start(t, "slow", "mount", "-d", dir)
	p.signalWhileMounting(t, syscall.SIGINT, dir)
	status := p.status()
	if got := p.err.String(); !strings.Contains(got, "unmounting") || strings.Contains(got, "serving") || status != exitSoftware {
		t.Errorf("status %d, says %q", status, got)
	}
}
