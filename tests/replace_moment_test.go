//go:build linux

package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestM4ReplaceSignalMoment: TestM4ReplaceSignalAnytime for moments that a signal rarely
// meets. The daemon stops there until it is about to end by the signal, or has ended. If it
// is a thread that is to end it, that one stops before it does, so that others could go on
// to the next program without it.
func TestM4ReplaceSignalMoment(t *testing.T) {
	needInject(t)
	for _, opts := range [][]string{nil, {"--supervise"}} {
		for _, moment := range moments {
			t.Run("opts"+strings.Join(opts, "")+"/"+moment.name, func(t *testing.T) {
				var now atomic.Pointer[meeting]
				m := newMeeting(t, &now, opts)
				a := agent(t)
				a.must("mkdir", m.At("D"))
				token := m.Locks()["D"].Token
				for _, sig := range stops {
					r := &meeting{
						moment: moment, sig: sig, pid: m.daemon(),
						stopped: make(chan struct{}), goesOn: make(chan struct{}), taken: make(chan struct{}), ends: make(chan struct{}),
					}
					now.Store(r)
					m.meet(r, opts)
					now.Store(nil)
					m.start(opts)
					m.awaitReady()
					if row := m.Locks()["D"]; row.Token != token || row.Pid != a.Pid {
						t.Fatalf("%v: D: %+v, want token %d of pid %d", sig, row, token, a.Pid)
					}
				}
			})
		}
	}
}

// TestM4ReplaceSignalNotRun: a daemon that could not be replaced hears a stop signal as
// before.
func TestM4ReplaceSignalNotRun(t *testing.T) {
	need(t, "root", "fuse")
	bad := buildBad(t)
	mustDo(t, os.WriteFile(filepath.Join(filepath.Dir(bad), "vanish"), nil, 0o644))
	for _, opts := range [][]string{nil, {"--supervise"}} {
		t.Run("opts"+strings.Join(opts, ""), func(t *testing.T) {
			m := mountOver(t, opts...)
			for _, sig := range stops {
				before := len(m.Log())
				mustDo(t, os.Chmod(bad, 0o755))
				if r := run(t, bad, m.control("ctl"), stagefsBin()); !strings.Contains(r.Out, "permission denied") {
					t.Errorf("replace: %v", r)
				}
				mustDo(t, m.cmd.Process.Signal(sig))
				m.wantEnded(0)
				if log := m.Log()[before:]; !strings.Contains(log, "unmounting") {
					t.Errorf("%v was not heard:\n%s", sig, shorten(log))
				}
				m.start(opts)
				m.awaitReady()
			}
		})
	}
}

// newMeeting mounts with daemons whose calls come before the meeting that there is now.
func newMeeting(t *testing.T, now *atomic.Pointer[meeting], opts []string) *Mount {
	t.Helper()
	dir := staticDir(t)
	m := newMount(t, dir, dir)
	var faults []*fault
	for _, call := range []int{unix.SYS_MEMFD_CREATE, unix.SYS_RT_SIGACTION, unix.SYS_EXECVE, unix.SYS_FCNTL, unix.SYS_TGKILL} {
		faults = append(faults, &fault{call: call, until: func(a asked) <-chan struct{} {
			if r := now.Load(); r != nil {
				return r.at(call, a)
			}
			return nil
		}})
	}
	m.inject(faults...)
	m.serve(opts...)
	return m
}

// A moment is a system call that a daemon makes while it is replaced.
type moment struct {
	name string
	call int
	is   func(a asked, sig syscall.Signal) bool // nil: any
	next bool                                   // that the next program makes
	// hears is whether the daemon hears the signal, and unmounts.
	hears bool
}

var moments = []moment{
	{name: "before it is written what the next program is to know", call: unix.SYS_MEMFD_CREATE, hears: true},
	{name: "when nobody listens any more", call: unix.SYS_RT_SIGACTION, is: setsAction},
	{name: "before the exec", call: unix.SYS_EXECVE, is: func(a asked, _ syscall.Signal) bool { return execsProgram(a) }},
	{name: "after the exec", call: unix.SYS_RT_SIGACTION, is: setsAction, next: true},
	{name: "before the next program listens", call: unix.SYS_FCNTL, next: true},
}

func setsAction(a asked, sig syscall.Signal) bool {
	return syscall.Signal(a.args[0]) == sig && a.args[1] != 0
}

func execsProgram(a asked) bool { return strings.HasPrefix(a.path(0), "/proc/self/fd/") }

// A meeting is a daemon at a moment, and a signal.
type meeting struct {
	moment
	sig syscall.Signal
	pid int

	stopped chan struct{} // closed when it has come to that moment
	goesOn  chan struct{} // closed when it may go on
	taken   chan struct{} // closed when a thread has the signal, and is about to end the process
	ends    chan struct{} // closed when it may

	mu     sync.Mutex
	execed bool // or about to be
}

// at is called when a thread makes a system call, and returns how long it waits.
func (r *meeting) at(call int, a asked) <-chan struct{} {
	if _, err := os.Stat(filepath.Join("/proc", itoa(r.pid), "task", itoa(a.pid))); err != nil {
		return nil // of a child
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if call == unix.SYS_TGKILL && syscall.Signal(a.args[2]) == r.sig {
		shut(r.taken)
		return r.ends
	}
	next := r.execed
	if call == unix.SYS_EXECVE && execsProgram(a) {
		r.execed = true
	}
	if call != r.call || !isShut(r.stopped) && next != r.next || r.is != nil && !r.is(a, r.sig) {
		return nil
	}
	shut(r.stopped)
	return r.goesOn
}

// over lets all go on.
func (r *meeting) over() {
	shut(r.goesOn)
	shut(r.ends)
}

func shut(c chan struct{}) {
	if !isShut(c) {
		close(c)
	}
}

func isShut(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// meet sends the signal at the moment, and expects that it ends the daemon.
func (m *Mount) meet(r *meeting, opts []string) {
	t := m.t
	t.Helper()
	defer r.over()
	before := len(m.Log())
	p := startCmd(t, exec.Command(stagefsBin(), "mount", "--replace", m.Path))
	select {
	case <-r.stopped:
	case <-p.done:
		t.Fatalf("%v: the replacement was over before the moment came: %v", r.sig, p.Wait())
	case <-time.After(patience):
		t.Fatalf("%v: the moment did not come", r.sig)
	}
	mustDo(t, m.cmd.Process.Signal(r.sig))
	eventually(t, "the daemon has the signal", func() bool {
		return !running(r.pid) || isShut(r.taken) || r.hears && strings.Contains(m.Log()[before:], "unmounting")
	})
	program := programOf(r.pid)
	shut(r.goesOn)
	if isShut(r.taken) {
		for end := time.Now().Add(takerTime); time.Now().Before(end); time.Sleep(time.Millisecond) {
			if now := programOf(r.pid); now != program && now != "" {
				t.Fatalf("%v: the next program began while a thread had the signal", r.sig)
			}
		}
	}
	shut(r.ends)
	eventually(t, "the daemon ends", m.dead)
	replaced := p.Wait() // whose command unmounts what the signal ended at once
	if replaced.Status == 0 || mountedAt(m.Path) {
		t.Errorf("%v: %v; mounted: %v", r.sig, replaced, mountedAt(m.Path))
	}
	state := m.cmd.ProcessState
	if byIt := !r.hears && opts == nil; byIt && state.Sys().(syscall.WaitStatus).Signal() != r.sig || !byIt && state.ExitCode() != 0 {
		t.Errorf("%v: %v\n%s", r.sig, state, shorten(m.Log()[before:]))
	}
}

// takerTime is longer than a daemon that goes on needs to become another program.
const takerTime = 300 * time.Millisecond
