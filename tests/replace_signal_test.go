//go:build linux

package tests

import (
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestM4ReplaceSignal: a daemon that has been told to end is not replaced any
// more: it unmounts, and ends.
func TestM4ReplaceSignal(t *testing.T) {
	dir := staticDir(t)
	for range 20 {
		m := newMount(t, dir, dir)
		m.start(nil)
		m.awaitReady()
		a := agent(t)
		a.must("chdir", m.Path) // it takes a moment to end, and serves meanwhile
		mustDo(t, m.cmd.Process.Signal(syscall.SIGTERM))
		p := startCmd(t, exec.Command(stagefsBin(), "mount", "--replace", m.Path))
		a.must("chdir", "/")
		eventually(t, "the daemon ends", m.dead)
		if status := m.cmd.ProcessState.ExitCode(); status != 0 {
			t.Errorf("the daemon's status is %d:\n%s", status, shorten(m.Log()))
		}
		if r := p.Wait(); r.Status == 0 {
			t.Errorf("replaced after SIGTERM: %v", r)
		}
		if mountedAt(m.Path) {
			t.Fatal("still mounted")
		}
	}
}

// TestS1ReplaceInterrupted: signals that do not end `mount --replace` have it ask no
// second time: the daemon is replaced, once, and it says so.
func TestS1ReplaceInterrupted(t *testing.T) {
	m := mountOver(t)
	const times = 8
	for range times {
		p := startCmd(t, exec.Command(stagefsBin(), "mount", "--replace", m.Path))
		for !p.over() {
			signalThreads(p.Pid(), syscall.SIGWINCH)
			time.Sleep(200 * time.Microsecond)
		}
		if r := p.Wait(); r.Status != 0 || !strings.Contains(r.Err, "is served by") {
			t.Errorf("replaced under signals: %v", r)
		}
	}
	if n := strings.Count(m.Log(), "goes on"); n != times {
		t.Errorf("replaced %d times, want %d", n, times)
	}
}

// TestM4ReplaceSignalAnytime: a stop signal at any moment of a replacement, that of
// execve(2) and of the next program's start among them, unmounts and ends the
// daemon, by the one program or the other; supervised or not. No lock is lost by it.
func TestM4ReplaceSignalAnytime(t *testing.T) {
	for _, opts := range [][]string{nil, {"--supervise"}} {
		t.Run("opts"+strings.Join(opts, ""), func(t *testing.T) {
			m := mountOver(t, opts...)
			a := agent(t)
			a.must("mkdir", m.At("D"))
			token := m.Locks()["D"].Token
			// How long it takes, and when the next program begins in it.
			pid := m.daemon()
			began := time.Now()
			p := startCmd(t, exec.Command(stagefsBin(), "mount", "--replace", m.Path))
			awaitExec(t, pid, p)
			execs := time.Since(began)
			p.Wait()
			whole := time.Since(began)
			atOnce := 0
			step := max(whole/signalSteps, 50*time.Microsecond)
			for i := range 3 * signalSteps / 2 {
				pid := m.daemon()
				p := startCmd(t, exec.Command(stagefsBin(), "mount", "--replace", m.Path))
				began := time.Now()
				after := time.Duration(i) * step
				if i >= signalSteps { // most of them at the beginning of the next program
					awaitExec(t, pid, p)
					began, after = time.Now(), time.Duration(i-signalSteps)*100*time.Microsecond
				}
				for time.Since(began) < after {
				}
				sig := stops[i%len(stops)]
				mustDo(t, m.cmd.Process.Signal(sig))
				ended := false
				for end := time.Now().Add(patience); !ended && time.Now().Before(end); time.Sleep(time.Millisecond) {
					ended = m.dead()
				}
				p.Wait() // whose command unmounts what the signal ended at once
				state := m.cmd.ProcessState
				byIt := state != nil && opts == nil && state.Sys().(syscall.WaitStatus).Signal() == sig
				if byIt {
					atOnce++
				}
				if !ended || mountedAt(m.Path) || state.ExitCode() != 0 && !byIt {
					t.Fatalf("%v, %v after the start of a replacement that takes %v, with execve(2) at %v: ended %v, mounted %v, %v\n%s",
						sig, after, whole, execs, ended, mountedAt(m.Path), state, shorten(m.Log()))
				}
				m.start(opts)
				m.awaitReady()
				if row := m.Locks()["D"]; row.Token != token || row.Pid != a.Pid {
					t.Fatalf("%v after %v: D: %+v, want token %d of pid %d", sig, after, row, token, a.Pid)
				}
			}
			t.Logf("%d of %d were ended at once", atOnce, 3*signalSteps/2)
		})
	}
}

// stops are the signals that end a daemon.
var stops = []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP}

// signalSteps is at how many moments of a replacement a signal is sent.
const signalSteps = 18

// awaitExec waits until a process runs another program, or p has ended.
func awaitExec(t *testing.T, pid int, p *Proc) {
	t.Helper()
	for before := programOf(pid); programOf(pid) == before; {
		select {
		case <-p.done:
			return
		default:
		}
	}
}

// programOf tells the programs apart that a process runs one after the other.
func programOf(pid int) string {
	auxv, _ := os.ReadFile("/proc/" + itoa(pid) + "/auxv") // has other addresses in each
	return string(auxv)
}
