//go:build linux

package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs"
)

// A realMount is a static directory that the program serves, over itself.
type realMount struct {
	t     *testing.T
	dir   string
	state string
	pid   int
}

// stagefs runs the program to its end.
func (m *realMount) stagefs(args ...string) (status int, out, errs string) {
	m.t.Helper()
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), envFake+"=real")
	var o, e strings.Builder
	cmd.Stdout, cmd.Stderr = &o, &e
	cmd.WaitDelay = 20 * time.Second
	if err := cmd.Run(); err != nil && !errors.As(err, new(*exec.ExitError)) {
		m.t.Errorf("stagefs %q: %v", args, err)
	}
	return cmd.ProcessState.ExitCode(), o.String(), e.String()
}

// want runs the program and compares its status and all that it prints.
func (m *realMount) want(status int, text string, args ...string) {
	m.t.Helper()
	got, out, errs := m.stagefs(args...)
	if got != status || !strings.Contains(out+errs, text) {
		m.t.Errorf("stagefs %q = %d, prints %q, says %q; want %d with %q", args, got, out, errs, status, text)
	}
}

func newRealMount(t *testing.T) *realMount {
	t.Helper()
	if os.Geteuid() != 0 {
		skip(t, "not root")
	}
	if f, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0); err != nil {
		skip(t, err.Error())
	} else {
		f.Close()
	}
	base, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	m := &realMount{t: t, dir: filepath.Join(base, "static"), state: filepath.Join(base, "state")}
	if err := os.Mkdir(m.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	m.mount()
	t.Cleanup(func() {
		unix.Unmount(m.dir, unix.MNT_DETACH)
		m.awaitEnd()
	})
	return m
}

func skip(t *testing.T, why string) {
	t.Helper()
	if os.Getenv("STAGEFS_REQUIRE") == "1" {
		t.Fatal(why)
	}
	t.Skip(why)
}

func (m *realMount) mount() {
	m.t.Helper()
	status, out, errs := m.stagefs("mount", "-d", m.dir, "--state-dir", m.state, "--grace=300ms")
	if status != 0 || out != "" {
		m.t.Fatalf("mount -d = %d, prints %q, says %q", status, out, errs)
	}
	m.pid = daemonPid(m.t, errs)
}

// awaitEnd waits for the daemon's end, and makes one if none comes.
func (m *realMount) awaitEnd() {
	m.t.Helper()
	for range 500 {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", m.pid))
		if err != nil || strings.Contains(string(stat), ") Z ") {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	m.t.Errorf("the daemon, process %d, does not end", m.pid)
	syscall.Kill(m.pid, syscall.SIGKILL)
}

// A shell is a process that does what it is told, one line at a time.
type shell struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func (m *realMount) shell() *shell {
	m.t.Helper()
	s := &shell{t: m.t, cmd: exec.Command("/bin/sh")}
	s.cmd.Env = append(os.Environ(), envFake+"=real", "STAGEFS="+must(os.Executable())(m.t))
	s.cmd.Dir = "/"
	var err error
	if s.in, err = s.cmd.StdinPipe(); err != nil {
		m.t.Fatal(err)
	}
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		m.t.Fatal(err)
	}
	s.out = bufio.NewReader(out)
	if err := s.cmd.Start(); err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(s.end)
	return s
}

func (s *shell) end() {
	s.in.Close()
	s.cmd.Process.Kill()
	s.cmd.Wait()
}

// do runs one line and returns its status.
func (s *shell) do(line string) string {
	s.t.Helper()
	fmt.Fprintf(s.in, "%s\necho $?\n", line)
	answer, err := s.out.ReadString('\n')
	if err != nil {
		s.t.Fatalf("%s: %v", line, err)
	}
	return strings.TrimSpace(answer)
}

func must[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func TestRealMount(t *testing.T) {
	m := newRealMount(t)
	board := filepath.Join(m.dir, "board")
	holder, rival := m.shell(), m.shell()

	m.want(75, fmt.Sprintf("by process %d", m.pid), "mount", m.dir, "--state-dir", m.state)
	m.want(0, "board: free", "why", board)
	m.want(66, "no lock", "release", board)

	if got := holder.do("mkdir " + board); got != "0" {
		t.Fatalf("mkdir = %s", got)
	}
	if got := rival.do("touch " + board + "/x 2>/dev/null"); got == "0" {
		t.Error("a rival's touch succeeds")
	}
	owner := fmt.Sprintf("held by process %d", holder.cmd.Process.Pid)
	m.want(0, owner, "why", board)
	m.want(0, owner, "why", filepath.Join(board, "not", "there"))
	m.want(0, "board/x by process", "why", board)
	m.want(0, "board", "locks", board)
	m.want(0, fmt.Sprintf(`"pid":%d`, holder.cmd.Process.Pid), "locks", "--json", m.dir)
	m.want(77, "somebody else", "release", board)

	// Holders may release, and their descendants are holders (H2).
	if got := rival.do(`"$STAGEFS" release ` + board + " 2>/dev/null"); got != "77" {
		t.Errorf("a rival's release = %s, want 77", got)
	}
	if got := holder.do(`"$STAGEFS" release ` + board); got != "0" {
		t.Errorf("the holder's release = %s", got)
	}
	m.want(0, "board: free", "why", board)

	if got := holder.do(": > " + board + "/devserver"); got != "0" {
		t.Fatalf("making the lock file = %s", got)
	}
	m.want(0, "lock file: devserver", "why", board)
	m.want(0, "", "break", board, "--why", "a test of break")
	m.want(0, "board: free", "why", board)
	m.want(0, "", "umount", m.dir)
	m.awaitEnd()
	m.want(69, "no stagefs mount", "locks", m.dir)
	m.mount() // the directory is free for the next daemon
}

// Names that could fool a terminal or a line of text go through unharmed.
func TestRealNames(t *testing.T) {
	m := newRealMount(t)
	holder := m.shell()
	for _, name := range []string{"a b", "a\nrelease c", "esc\x1b[2J", "latin\xe9", `quo"te`, `back\slash`, "-d", strings.Repeat("x", 255)} {
		dir := filepath.Join(m.dir, name)
		if got := holder.do("mkdir -- '" + dir + "'"); got != "0" {
			t.Errorf("mkdir %q = %s", dir, got)
			continue
		}
		for _, args := range [][]string{{"why", dir}, {"locks", dir}} {
			_, out, errs := m.stagefs(args...)
			if strings.Contains(out+errs, "\x1b") || strings.Contains(out+errs, "\xe9") || !strings.Contains(out, strconv.Itoa(holder.cmd.Process.Pid)) {
				t.Errorf("%s %q prints %q, says %q", args[0], dir, out, errs)
			}
		}
		m.want(0, "", "break", "--why", "next", dir)
	}
}

func TestRealBusy(t *testing.T) {
	m := newRealMount(t)
	inside := m.shell()
	inside.do("cd " + m.dir)
	m.want(75, fmt.Sprintf("process %d (sh): its working directory is %s", inside.cmd.Process.Pid, m.dir), "umount", m.dir)

	// The daemon detaches, goes on until the last user is gone, and ends (M4).
	syscall.Kill(m.pid, syscall.SIGTERM)
	for range 500 {
		if e := fs.TopMount(must(fs.ReadMounts())(t), m.dir); e == nil {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	if got := inside.do("ls -a . >/dev/null"); got != "0" {
		t.Errorf("ls in the detached mount = %s", got)
	}
	inside.do("cd /")
	m.awaitEnd()

	m.mount()
	inside.do("cd " + m.dir)
	m.want(0, "", "umount", "--lazy", m.dir)
	inside.do("cd /")
	m.awaitEnd()
}

func TestRealDead(t *testing.T) {
	m := newRealMount(t)
	syscall.Kill(m.pid, syscall.SIGKILL)
	m.awaitEnd()
	m.want(69, "stagefs umount", "locks", m.dir)
	m.want(69, "stagefs umount", "why", filepath.Join(m.dir, "x"))
	m.want(0, "is dead", "doctor", m.dir)
	m.mount() // takes the dead one's place
	syscall.Kill(m.pid, syscall.SIGKILL)
	m.awaitEnd()
	m.want(0, "", "umount", m.dir)
	m.mount()
}
