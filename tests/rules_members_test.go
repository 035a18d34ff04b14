//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// A process whose first thread has ended: it does what it reads.
const firstEnds = `
import ctypes, os, sys, threading
libc = ctypes.CDLL(None)
def work():
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            with open(line.strip(), "w"):
                print("ok", flush=True)
        except OSError as e:
            print(e.strerror, flush=True)
    os._exit(0)
threading.Thread(target=work).start()
libc.syscall({'x86_64': 60}.get(os.uname().machine, 93), 0) # exit(2) of this thread alone
`

// startFirstEnds starts one, in a cgroup if one is named. put has it write a file.
func startFirstEnds(t *testing.T, cgroup string, env ...string) (pid int, put func(path string) string, end func()) {
	t.Helper()
	need(t, "/usr/bin/python3")
	prog := filepath.Join(tempDir(t), "first.py")
	mustDo(t, os.WriteFile(prog, []byte(firstEnds), 0o644))
	cmd := exec.Command("/usr/bin/python3", prog)
	cmd.Env = append(os.Environ(), env...)
	in, err := cmd.StdinPipe()
	mustDo(t, err)
	start, out := linesOf(t, cmd)
	p := start()
	hear := func() string { line, _ := out.ReadString('\n'); return strings.TrimSpace(line) }
	if cgroup != "" {
		enter(t, p.Pid(), cgroup)
	}
	if got := hear(); got != "ready" {
		t.Fatalf("it says %q, want ready", got)
	}
	eventually(t, "the first thread is a zombie", func() bool {
		stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Pid()))
		return strings.Contains(string(stat), ") Z ")
	})
	put = func(path string) string {
		fmt.Fprintln(in, path)
		return hear()
	}
	return p.Pid(), put, func() { in.Close(); p.Wait() }
}

// TestH3FirstThread: who is in a cgroup is so also when its first thread has ended,
// which a hierarchy of version 1 shows in its root: it holds, and the lock lasts as
// long as it lives.
func TestH3FirstThread(t *testing.T) {
	for _, root := range []string{"/sys/fs/cgroup/unified", "/sys/fs/cgroup/pids", "/sys/fs/cgroup"} {
		if _, err := os.Stat(filepath.Join(root, "cgroup.procs")); err != nil {
			continue
		}
		t.Run(filepath.Base(root), func(t *testing.T) {
			m := mount(t)
			openDir(t, m.Back("D"))
			taker, other := agent(t), agent(t)
			dir := cgroupIn(t, root)
			enter(t, taker.Pid, dir)
			taker.mustCommand(m, "acquire D owner=cgroup")
			token := m.Locks()["D"].Token
			pid, put, end := startFirstEnds(t, dir)
			if got := put(m.At("D/x")); got != "ok" {
				t.Errorf("a member whose first thread has ended: %s, want ok", got)
			}
			taker.Kill()
			eventually(t, "the other member stands for the cgroup", func() bool { return m.Locks()["D"].Pid == pid })
			other.want("EBUSY", "creat", m.At("D/y"), "wronly,creat")
			if row := m.Locks()["D"]; row.Token != token || !strings.Contains(row.Cmd, "python3") {
				t.Errorf("the row: %+v, want token %d and the command", row, token)
			}
			end()
			m.awaitFree("D")
		})
	}
}

// TestL2FirstThread: a process that carries a client's ID holds, although its first
// thread, of which the kernel shows no environment then, has ended.
func TestL2FirstThread(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	agent(t).mustCommand(m, "acquire D client=c ttl=60s")
	_, put, end := startFirstEnds(t, "", "STAGEFS_CLIENT=c")
	if got := put(m.At("D/x")); got != "ok" {
		t.Errorf("who carries the ID: %s, want ok", got)
	}
	end()
	_, put, end = startFirstEnds(t, "", "STAGEFS_CLIENT=other")
	if got := put(m.At("D/x")); got != "Device or resource busy" {
		t.Errorf("who carries another one: %s, want it refused", got)
	}
	end()
}

// A session in which each process makes the next one, and ends. The first makes a
// directory, and stages.
const relay = `
import os, sys, time
os.setsid()
os.mkdir(sys.argv[1])
open(sys.argv[1] + "/x", "w").close()
end = time.monotonic() + 2
while time.monotonic() < end:
    if os.fork():
        os._exit(0)
try:
    open(sys.argv[1] + "/y", "w").close()
    print("ok", flush=True)
except OSError as e:
    print(e.strerror, flush=True)
sys.stdin.readline()
`

// TestH3Relay: a scope is not empty while each of its processes makes the next one
// within less than a millisecond, so that none is there for long enough to be looked at.
func TestH3Relay(t *testing.T) {
	need(t, "root", "fuse", "/usr/bin/python3")
	m := mount(t, "--owner=session")
	prog := filepath.Join(tempDir(t), "relay.py")
	mustDo(t, os.WriteFile(prog, []byte(relay), 0o644))
	cmd := exec.Command("/usr/bin/python3", prog, m.At("D"))
	r, w, err := os.Pipe() // which the end of the first process does not close
	mustDo(t, err)
	defer r.Close()
	defer w.Close()
	cmd.Stdin = r
	start, out := linesOf(t, cmd)
	start()
	eventually(t, "it is made", func() bool { return m.Locks()["D"].Token != 0 })
	token, other := m.Locks()["D"].Token, agent(t)
	for range 20 {
		other.want("EBUSY", "creat", m.At("D/other"), "wronly,creat")
	}
	if line, _ := out.ReadString('\n'); line != "ok\n" {
		t.Errorf("the last one says %q, want ok", line)
	}
	if got := m.Locks()["D"].Token; got != token {
		t.Errorf("the lock has token %d, want %d: it has ended meanwhile", got, token)
	}
	other.want("EBUSY", "creat", m.At("D/other"), "wronly,creat")
	w.Close()
	m.awaitFree("D")
}
