//go:build linux

package tests

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// An elsewhere is another file system whose server does not answer for a while.
// What the kernel shows of a process that closes a file there in execve(2) can
// mostly not be read until then, not even its start time.
type elsewhere struct {
	t *testing.T
	m *Mount
}

func newElsewhere(t *testing.T) *elsewhere {
	t.Helper()
	e := &elsewhere{t, mount(t)}
	openFile(t, e.m.Back("f"), "x")
	return e
}

// stick has the agent become a sleep(1) that does not get out of execve(2)
// before [elsewhere.answer]. env goes to that program.
func (e *elsewhere) stick(a *Agent, env ...string) {
	e.t.Helper()
	pid := e.m.cmd.Process.Pid
	a.must("open", "elsewhere", e.m.At("f"), "rdwr")
	var st unix.Stat_t
	mustDo(e.t, unix.Stat(e.m.Path, &st))
	waiting := func() string {
		b, err := os.ReadFile("/sys/fs/fuse/connections/" + itoa(int(unix.Minor(st.Dev))) + "/waiting")
		mustDo(e.t, err)
		return strings.TrimSpace(string(b))
	}
	mustDo(e.t, syscall.Kill(pid, syscall.SIGSTOP))
	e.t.Cleanup(func() { // before the agent is waited for
		e.answer()
		syscall.Kill(a.Pid, syscall.SIGKILL)
	})
	eventually(e.t, "the other daemon stops", func() bool {
		b, err := os.ReadFile("/proc/" + itoa(pid) + "/status")
		return err == nil && strings.Contains(string(b), "\nState:\tT")
	})
	before := waiting()
	a.send(append([]string{"exec", "sleep 1000"}, env...))
	eventually(e.t, "the process waits in execve(2)", func() bool { return waiting() != before })
}

// answer lets everything go on.
func (e *elsewhere) answer() { syscall.Kill(e.m.cmd.Process.Pid, syscall.SIGCONT) }

// othersGoOn expects that a mount serves who has nothing to do with it.
func othersGoOn(t *testing.T, m *Mount, other *Agent) {
	t.Helper()
	other.must("mkdir", m.At("other"))
	other.must("put", m.At("other/f"), "x", "creat")
	other.must("rename", m.At("other/f"), m.At("other/g"))
	other.must("unlink", m.At("other/g"))
	other.must("rmdir", m.At("other"))
	other.must("read", m.control("locks.json"))
}

// TestFaultExecCommands: what looks through all processes comes to its end.
func TestFaultExecCommands(t *testing.T) {
	e, m := newElsewhere(t), mount(t)
	inside := agent(t)
	inside.must("open", "inside", m.At(), "rdonly")
	stuck := agent(t)
	e.stick(stuck)
	if r := run(t, stagefsBin(), "umount", m.Path); r.Status == 0 || !strings.Contains(r.Err, itoa(inside.Pid)) {
		t.Errorf("umount of what process %d is in: %v", inside.Pid, r)
	}
	if r := run(t, stagefsBin(), "umount", e.m.Path); r.Status == 0 || !strings.Contains(r.Err, itoa(stuck.Pid)) {
		t.Errorf("umount of what process %d is about to leave: %v", stuck.Pid, r)
	}
	othersGoOn(t, mountOver(t), agent(t))
	dir := staticDir(t)
	if r := run(t, stagefsBin(), "mount", "--strict", "--state-dir", filepath.Join(tempDir(t), "state"), dir); r.Status == 0 || !strings.Contains(r.Err, itoa(stuck.Pid)) {
		t.Errorf("mount --strict, which must know what process %d has open: %v", stuck.Pid, r)
	}
	if r := run(t, stagefsBin(), "mount", "--replace", m.Path); r.Status != 0 {
		t.Errorf("mount --replace: %v", r)
	}
	othersGoOn(t, m, agent(t))
}

// TestFaultExecRestart: a daemon that starts while some process hangs in
// execve(2) serves everybody. Whether a descriptor that keeps a lock is in that
// one's hands can't be known then: the lock lasts until it is.
func TestFaultExecRestart(t *testing.T) {
	e, m := newElsewhere(t), mountOver(t)
	openDir(t, m.At("E"))
	m.Ctl("release E")
	keeper, other, stuck := agent(t), agent(t), agent(t)
	keeper.must("open", "lock", m.At("E/devserver"), "rdwr,creat")
	keeper.must("flock", "lock")
	e.stick(stuck)
	m.restart(nil)
	othersGoOn(t, m, other)
	other.want("EEXIST", "creat", m.At("E/devserver.lock"), "wronly,creat,excl")
	keeper.Try("close", "lock")
	other.want("EEXIST", "creat", m.At("E/devserver.lock"), "wronly,creat,excl")
	othersGoOn(t, m, other)
	e.answer()
	eventually(t, "E is free", func() bool { return other.Try("creat", m.At("E/devserver.lock"), "wronly,creat,excl") == "ok" })
}
