//go:build linux

package tests

import (
	"os/exec"
	"syscall"
	"testing"
)

// agentAt starts an agent with a number that is free, as the leader of a session or
// not.
func agentAt(t *testing.T, pid int, leads bool) *Agent {
	t.Helper()
	need(t, "root", "python3")
	a := awaitAgent(t, func(sock string) {
		cmd := agentCmd(sock)
		python, err := exec.LookPath("python3")
		mustDo(t, err)
		cmd.Path, cmd.Args = python, []string{"python3", "-c", `
import ctypes, errno, os, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
set_tid = ctypes.c_int(int(sys.argv[1]))
args = struct.pack("=11Q", 0, 0, 0, 0, 17, 0, 0, 0, ctypes.addressof(set_tid), 1, 0)
for i in range(1000):
    pid = libc.syscall(435, args, len(args)) # clone3(2)
    if pid >= 0 or ctypes.get_errno() != errno.EEXIST:
        break
    time.sleep(.01) # a zombie has it, or a session
if pid < 0:
    sys.exit(os.strerror(ctypes.get_errno()))
if pid == 0:
    if sys.argv[2] == "leads":
        os.setsid()
    os.execv(sys.argv[3], sys.argv[3:])
os.waitpid(pid, 0)
`, itoa(pid), map[bool]string{true: "leads", false: "follows"}[leads], agentBin()}
		startCmd(t, cmd)
	})
	if a.Pid != pid {
		t.Fatalf("pid %d, want %d", a.Pid, pid)
	}
	return a
}

// TestH3AttackNumber: while no daemon runs, the number of a session whose leader was
// dead already comes to another process, which begins a session, too.
func TestH3AttackNumber(t *testing.T) {
	m := mountOver(t, "--owner=session")
	mustDo(t, syscall.Mkdir(m.At("board"), 0o777))
	m.Ctl("release board")
	leader := agentOfSession(t)
	taker := leader.Child()
	leader.Kill()
	taker.must("creat", m.At("board/devserver"), "wronly,creat,excl")
	if l := m.Locks()["board"]; l.Scope != "session" {
		t.Fatalf("the lock: %+v", l)
	}
	var other *Agent
	m.restart(func() {
		taker.Kill()
		other = agentAt(t, leader.Pid, true)
	})
	m.awaitFree("board")
	other.want("ok", "mkdir", m.At("board/x"))
	stranger(t).want("EBUSY", "creat", m.At("board/x/f"), "wronly,creat")
}
