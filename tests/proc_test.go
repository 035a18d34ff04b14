//go:build linux

package tests

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// patience is how long anything may take before a test calls it hung. It is
// generous on purpose: the tests judge what happens, not how fast.
const patience = 30 * time.Second

// need skips the test unless the machine has all that is named: "root",
// "fuse", or the path of a program. With STAGEFS_REQUIRE=1 it fails the test.
func need(t *testing.T, what ...string) {
	t.Helper()
	for _, w := range what {
		var missing string
		switch w {
		case "root":
			if os.Geteuid() != 0 {
				missing = "root's rights"
			}
		case "fuse":
			if f, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0); err != nil {
				missing = err.Error()
			} else {
				f.Close()
			}
		default:
			if _, err := exec.LookPath(w); err != nil && !errors.Is(err, os.ErrPermission) { // a module is not executable
				missing = w
			}
		}
		switch {
		case missing == "":
		case os.Getenv("STAGEFS_REQUIRE") == "1":
			t.Fatalf("missing on this machine: %s", missing)
		default:
			t.Skipf("missing on this machine: %s", missing)
		}
	}
}

func mustDo(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// writeProgram makes a file that can be executed at once: what another test forks meanwhile
// would have it open for writing until it executes, and the kernel say ETXTBSY.
func writeProgram(t *testing.T, path string, content []byte) {
	t.Helper()
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	mustDo(t, os.WriteFile(path, content, 0o755))
}

// eventually polls until ok is true, and fails the test if it never is. It looks the
// less often the longer that takes.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for began := time.Now(); time.Since(began) < patience; time.Sleep(min(max(time.Since(began)/8, 5*time.Millisecond), 25*time.Millisecond)) {
		if ok() {
			return
		}
	}
	t.Fatalf("never happened: %s", what)
}

// A Result is what a program left.
type Result struct {
	Status int // exit status; 128 + the signal that ended it
	Out    string
	Err    string
}

func (r Result) String() string {
	return fmt.Sprintf("status %d, stdout %q, stderr %q", r.Status, r.Out, r.Err)
}

// run runs a program to its end.
func run(t *testing.T, name string, args ...string) Result {
	t.Helper()
	return runCmd(t, exec.Command(name, args...))
}

// sh runs a script of sh in dir.
func sh(t *testing.T, dir, script string, args ...string) Result {
	t.Helper()
	cmd := exec.Command("/bin/sh", append([]string{"-c", script, "sh"}, args...)...)
	cmd.Dir = dir
	return runCmd(t, cmd)
}

func runCmd(t *testing.T, cmd *exec.Cmd) Result {
	t.Helper()
	return startCmd(t, cmd).Wait()
}

// A Proc is a program that runs beside the test.
type Proc struct {
	t        *testing.T
	cmd      *exec.Cmd
	out, err bytes.Buffer
	done     chan struct{}
	group    group
}

// startCmd starts cmd, and kills it at the end of the test if it still runs.
func startCmd(t *testing.T, cmd *exec.Cmd) *Proc {
	t.Helper()
	p := &Proc{t: t, cmd: cmd, done: make(chan struct{})}
	if cmd.Dir == "" {
		cmd.Dir = "/"
	}
	if cmd.Stdout == nil {
		cmd.Stdout = &p.out
	}
	if cmd.Stderr == nil {
		cmd.Stderr = &p.err
	}
	// What a killed program leaves running must not keep Wait waiting.
	cmd.WaitDelay = 2 * time.Second
	mustDo(t, cmd.Start())
	if attr := cmd.SysProcAttr; attr != nil && (attr.Setpgid || attr.Setsid) {
		p.group = groupOf(t, cmd)
	}
	go func() { cmd.Wait(); close(p.done) }()
	t.Cleanup(p.Kill)
	return p
}

func (p *Proc) Pid() int { return p.cmd.Process.Pid }

func (p *Proc) signalGroup(sig syscall.Signal) error { return p.group.signal(sig) }

// Kill ends it with SIGKILL and waits until it is gone.
func (p *Proc) Kill() {
	p.cmd.Process.Kill()
	<-p.done
}

// Wait waits for its end; one that never ends fails the test.
func (p *Proc) Wait() Result {
	p.t.Helper()
	return p.WaitFor(2 * patience)
}

// WaitFor is Wait for what has much to do.
func (p *Proc) WaitFor(limit time.Duration) Result {
	p.t.Helper()
	select {
	case <-p.done:
	case <-time.After(limit):
		p.Kill()
		p.t.Errorf("%v: did not end", p.cmd.Args)
	}
	status := p.cmd.ProcessState.ExitCode()
	if ws := p.cmd.ProcessState.Sys().(syscall.WaitStatus); ws.Signaled() {
		status = 128 + int(ws.Signal())
	}
	return Result{Status: status, Out: p.out.String(), Err: p.err.String()}
}

// killGroup kills a program and all that it started in its process group.
func killGroup(t *testing.T, p started) {
	t.Helper()
	mustDo(t, p.signalGroup(syscall.SIGKILL))
	p.Wait()
}

// A group is a process group, if the process is one's leader. By number it could be
// another's by now: a daemon, for one, leads its own.
type group struct{ pid, pidfd int }

// groupOf is that of a program that was started, and not waited for.
func groupOf(t *testing.T, cmd *exec.Cmd) group {
	t.Helper()
	fd, err := unix.PidfdOpen(cmd.Process.Pid, 0)
	mustDo(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	return group{cmd.Process.Pid, fd}
}

// signal sends a signal to all that are left of it.
func (g group) signal(sig syscall.Signal) error {
	const processGroup = 1 << 2 // PIDFD_SIGNAL_PROCESS_GROUP
	err := unix.PidfdSendSignal(g.pidfd, sig, nil, processGroup)
	if err == unix.EINVAL { // before Linux 6.9
		return syscall.Kill(-g.pid, sig)
	}
	return err
}

// running tells whether the process is there, and no zombie, by what tells its
// parent and stagefs so: /proc shows the last thread as dead a moment earlier.
func running(pid int) bool {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	return alive(fd)
}

// alive is running for a pidfd.
func alive(fd int) bool { return aliveAfter(fd, 0) }

// aliveAfter tells whether it still is after that time, or as soon as it is not.
func aliveAfter(fd int, wait time.Duration) bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(wait.Milliseconds()))
	return n == 0 || err != nil
}

// awaitEnd waits until a process is gone. If it stays, its threads tell what they
// wait for.
func awaitEnd(t *testing.T, what string, pid int) {
	t.Helper()
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return // it is gone
	}
	defer unix.Close(fd)
	awaitEndOf(t, what, pid, fd)
}

func awaitEndOf(t *testing.T, what string, pid, pidfd int) {
	t.Helper()
	for end := time.Now().Add(patience); aliveAfter(pidfd, time.Second); {
		if time.Now().After(end) {
			t.Fatalf("never happened: %s, process %d:\n%s", what, pid, whereabouts(pid))
		}
	}
}

// whereabouts tells where the threads of a process are, and what stops them.
func whereabouts(pid int) string {
	var out strings.Builder
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	for _, task := range tasks {
		status, _ := os.ReadFile(task + "/status")
		for line := range strings.Lines(string(status)) {
			switch key, _, _ := strings.Cut(line, ":"); key {
			case "Name", "State", "PPid", "TracerPid", "SigPnd", "ShdPnd", "SigBlk":
				out.WriteString(strings.Join(strings.Fields(line), " ") + ", ")
			}
		}
		stack, _ := os.ReadFile(task + "/stack")
		out.WriteString("stack:\n" + string(stack))
	}
	return out.String()
}

// statFields are those of a stat file of proc(5) from the state on; nil if
// there is no such process.
func statFields(file string) []string {
	stat, err := os.ReadFile(file)
	if err != nil {
		return nil
	}
	return strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
}

func atoi(s string) int {
	n, _ := strconv.Atoi(s)
	return n
}

func itoa(n int) string { return strconv.Itoa(n) }
