//go:build linux

package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// killAfter kills the daemon as soon as one of its threads has carried out a
// system call, before it can do anything else. The function that is returned
// waits for that.
func (m *Mount) killAfter(call int) (wait func()) {
	m.t.Helper()
	tracer := agent(m.t)
	if s := tracer.Try("killafter", itoa(m.daemon()), itoa(call)); s != "ok" {
		if os.Getenv("STAGEFS_REQUIRE") == "1" {
			m.t.Fatalf("ptrace(2): %s", s)
		}
		m.t.Skipf("ptrace(2): %s", s)
	}
	return func() {
		m.t.Helper()
		tracer.must("killed")
		<-m.gone
	}
}

// killAfter is the part of the process that traces: one that has no children.
func (h *hands) killAfter(pid int, call uint64) error {
	attached := make(chan error)
	h.killed = make(chan error, 1)
	go func() {
		runtime.LockOSThread() // ptrace(2) knows the tracer by its thread
		err := seize(pid)
		attached <- err
		if err == nil {
			h.killed <- follow(pid, call)
		}
	}()
	return <-attached
}

// seize attaches to all threads of a process.
func seize(pid int) error {
	known := make(map[string]bool)
	for more := true; more; {
		more = false
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
		if err != nil || len(tasks) == 0 {
			return syscall.ESRCH
		}
		for _, task := range tasks {
			if known[task] {
				continue
			}
			known[task], more = true, true
			const options = unix.PTRACE_O_TRACESYSGOOD | unix.PTRACE_O_TRACECLONE
			tid := atoi(filepath.Base(task))
			if _, _, errno := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_SEIZE, uintptr(tid), 0, options, 0, 0); errno != 0 && errno != unix.EPERM {
				return errno
			}
			if err := unix.PtraceInterrupt(tid); err != nil {
				return err
			}
		}
	}
	return nil
}

// syscallInfo is what PTRACE_GET_SYSCALL_INFO tells, as far as it matters.
type syscallInfo struct {
	op   uint8
	_    [23]byte
	nr   uint64 // at the exit: the result
	more [8]uint64
}

// follow lets the threads run until one has carried out the call.
func follow(pid int, call uint64) error {
	last, done := make(map[int]uint64), false
	for {
		var ws unix.WaitStatus
		tid, err := unix.Wait4(-1, &ws, unix.WALL, nil)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.ECHILD && done:
			return nil // its parent can reap it now
		case err != nil:
			return fmt.Errorf("the daemon ended before: %w", err)
		case !ws.Stopped():
			continue
		}
		signal := 0
		switch {
		case ws.StopSignal() == unix.SIGTRAP|0x80:
			var info syscallInfo
			_, _, errno := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_GET_SYSCALL_INFO, uintptr(tid), unsafe.Sizeof(info), uintptr(unsafe.Pointer(&info)), 0, 0)
			switch {
			case errno != 0:
				return errno
			case info.op == unix.PTRACE_SYSCALL_INFO_ENTRY:
				last[tid] = info.nr
			case info.op == unix.PTRACE_SYSCALL_INFO_EXIT && last[tid] == call && info.nr == 0:
				done = true
				if err := unix.Kill(pid, unix.SIGKILL); err != nil {
					return err
				}
			}
		case uint32(ws)>>16 == 0:
			signal = int(ws.StopSignal())
		}
		if err := unix.PtraceSyscall(tid, signal); err != nil && err != unix.ESRCH {
			return err
		}
	}
}

// TestS1Exchanged: a daemon that is killed when it has exchanged two
// directories, or replaced one, and has not written that down yet, leaves the
// locks on the right ones.
func TestS1Exchanged(t *testing.T) {
	for _, c := range []struct {
		name, flag string
		locked     []string // what is locked beforehand
		from, to   string
		want       map[string]string // where which lock is afterwards
	}{
		{name: "one", flag: "exchange", locked: []string{"A"}, from: "A", to: "B", want: map[string]string{"B": "A"}},
		{name: "the other", flag: "exchange", locked: []string{"B"}, from: "A", to: "B", want: map[string]string{"A": "B"}},
		{name: "both", flag: "exchange", locked: []string{"A", "B"}, from: "A", to: "B", want: map[string]string{"B": "A", "A": "B"}},
		{name: "beneath", flag: "exchange", locked: []string{"A/sub"}, from: "A", to: "B", want: map[string]string{"B/sub": "A/sub"}},
		{name: "beneath both", flag: "exchange", locked: []string{"A/sub", "B/sub"}, from: "A", to: "B", want: map[string]string{"B/sub": "A/sub", "A/sub": "B/sub"}},
		{name: "away", locked: []string{"A"}, from: "A", to: "C", want: map[string]string{"C": "A"}},
		{name: "onto", locked: []string{"A", "E"}, from: "A", to: "E", want: map[string]string{"E": "A"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := mountOver(t)
			a := agent(t)
			for _, dir := range []string{"A", "A/sub", "B", "B/sub", "E"} {
				openDir(t, m.At(dir))
				m.Ctl("release " + dir)
			}
			for _, dir := range c.locked {
				a.mustCommand(m, "acquire %s", dir)
			}
			before := m.Locks()
			killed := m.killAfter(unix.SYS_RENAMEAT2)
			a.want("ENOTCONN|ECONNABORTED|ECANCELED", "rename", m.At(c.from), m.At(c.to), c.flag)
			killed()
			m.start(nil)
			m.awaitReady()
			after := m.Locks()
			for at, was := range c.want {
				if after[at].Token != before[was].Token {
					t.Errorf("%s has the lock %d, want %d, which was on %s", at, after[at].Token, before[was].Token, was)
				}
			}
			if len(after) != len(c.want) {
				t.Errorf("locks %+v, want %d", after, len(c.want))
			}
		})
	}
}

// TestR7LinkedMidway: what came in by link(2) was not made under the lock, also
// where the daemon is killed when it has made the link, and the file's other name
// goes.
func TestR7LinkedMidway(t *testing.T) {
	m := mountOver(t, "--on-crash", "destroy")
	openDir(t, m.At("out"))
	openFile(t, m.At("out", "old"), "old")
	m.Ctl("release out")
	a := agent(t)
	a.must("mkdir", m.At("D"))
	a.must("put", m.At("D", "made"), "1", "wronly,creat")
	killed := m.killAfter(unix.SYS_LINKAT)
	a.want("ENOTCONN|ECONNABORTED|ECANCELED", "link", m.At("out", "old"), m.At("D", "old"))
	killed()
	m.start([]string{"--on-crash", "destroy"})
	m.awaitReady()
	stranger(t).must("unlink", m.At("out", "old"))
	a.Kill()
	m.awaitFree("D")
	wantTree(t, m.At("D"), []string{"old=old"})
}
