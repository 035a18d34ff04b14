//go:build linux

package tests

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestA7RunSignals: a signal to `run` alone reaches the command, whose status is
// passed on.
func TestA7RunSignals(t *testing.T) {
	m := mount(t)
	for _, sig := range []syscall.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGALRM} {
		t.Run(unix.SignalName(sig), func(t *testing.T) {
			m := m.on(t)
			script := fmt.Sprintf(`sleep 1000 & trap 'kill $!; echo heard; exit 9' %d; echo ready; wait`, sig)
			cmd := exec.Command(stagefsBin(), "run", m.At("D"), "sh", "-c", script)
			cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
			start, out := outputOf(t, cmd)
			p := start()
			says(t, out, "ready\n")
			mustDo(t, syscall.Kill(p.Pid(), sig))
			says(t, out, "heard\n")
			if r := p.Wait(); r.Status != 9 {
				t.Errorf("run: %v, want the command's status 9", r)
			}
			m.wantFree("D")
		})
	}
}

// TestA7Quit: SIGQUIT ends a command that waits as it does others, without a word.
func TestA7Quit(t *testing.T) {
	m := mount(t)
	agent(t).must("mkdir", m.At("D"))
	for _, args := range []string{"run D true", "acquire D", "acquire --client c D", "wait D"} {
		t.Run(args, func(t *testing.T) {
			m := m.on(t)
			words := strings.Fields(strings.ReplaceAll(args, "D", m.At("D")))
			cmd := exec.Command(stagefsBin(), words...)
			cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
			p := startCmd(t, cmd)
			m.awaitWaiters("D", 1)
			mustDo(t, syscall.Kill(p.Pid(), syscall.SIGQUIT))
			r := p.Wait()
			if status := p.cmd.ProcessState.Sys().(syscall.WaitStatus); !status.Signaled() || status.Signal() != syscall.SIGQUIT || strings.Contains(r.Err, "goroutine") {
				t.Errorf("%v, want SIGQUIT and no stacks", r)
			}
		})
	}
}

// TestA7RunStopped: to stop and continue `run` alone does nothing to the
// command, and the lock of a stopped process lasts.
func TestA7RunStopped(t *testing.T) {
	m := mount(t)
	a, p := m.runAgent(m.At("D"))
	mustDo(t, syscall.Kill(p.Pid(), syscall.SIGSTOP))
	eventually(t, "run is stopped", func() bool { return stateOf(p.Pid()) == "T" })
	a.must("put", m.At("D/x"), "", "creat")
	agent(t).want("EBUSY", "put", m.At("D/y"), "", "creat")
	mustDo(t, syscall.Kill(p.Pid(), syscall.SIGCONT))
	a.Exit(5)
	if r := p.Wait(); r.Status != 5 {
		t.Errorf("run: %v, want 5", r)
	}
}

func stateOf(pid int) string {
	if f := statFields(fmt.Sprintf("/proc/%d/stat", pid)); f != nil {
		return f[0]
	}
	return ""
}

// TestA7RunKilled: kill -9 of `run` takes the command along and frees the
// directory; what it leaves running holds nothing.
func TestA7RunKilled(t *testing.T) {
	m := mount(t)
	a, p := m.runAgent(m.At("D"))
	left := a.Child("setsid")
	left.must("put", m.At("D/x"), "", "creat")
	p.Kill()
	awaitEnd(t, "the command dies with run", a.Pid)
	m.awaitFree("D")
	b := agent(t)
	b.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	left.want("EBUSY", "put", m.At("D/y"), "", "creat")
}

// TestA7RunChildKilled: kill -9 of the command ends `run` in the same way.
func TestA7RunChildKilled(t *testing.T) {
	m := mount(t)
	a, p := m.runAgent(m.At("D"))
	a.Kill()
	p.Wait()
	if ws := p.cmd.ProcessState.Sys().(syscall.WaitStatus); !ws.Signaled() || ws.Signal() != syscall.SIGKILL {
		t.Errorf("run ended with %#x, want SIGKILL", ws)
	}
	m.wantFree("D")
}

// TestR6RunLost: who loses the lock under `run` to an admin is ended, and the
// status is 76.
func TestR6RunLost(t *testing.T) {
	m := mount(t)
	t.Run("SIGTERM", func(t *testing.T) {
		m := m.on(t)
		a, p := m.runAgent(m.At("D"))
		left := a.Child()
		m.wantStatus(0, "", "break", "--why", "it hangs", m.At("D"))
		r := p.Wait()
		if r.Status != 76 || !strings.Contains(r.Err, "it hangs") {
			t.Errorf("run: %v, want 76 with the reason", r)
		}
		for _, pid := range []int{a.Pid, left.Pid} {
			awaitEnd(t, "the command and its children end", pid)
		}
	})
	t.Run("SIGKILL", func(t *testing.T) {
		m := m.on(t)
		cmd := exec.Command(stagefsBin(), "run", "--kill-after=2s", m.At("D"), "sh", "-c", `trap 'echo no' TERM; echo $$; while :; do sleep 0.01; done`)
		start, out := outputOf(t, cmd)
		p := start()
		says(t, out, "\n")
		m.wantStatus(0, "", "break", "--why", "it hangs", m.At("D"))
		if r := p.Wait(); r.Status != 76 {
			t.Errorf("run: %v, want 76", r)
		}
		says(t, out, "no\n")
	})
	t.Run("stopped", func(t *testing.T) {
		m := m.on(t)
		a, p := m.runAgent(m.At("D"))
		mustDo(t, syscall.Kill(a.Pid, syscall.SIGSTOP))
		m.wantStatus(0, "", "break", "--why", "it hangs", m.At("D"))
		if r := p.Wait(); r.Status != 76 {
			t.Errorf("run: %v, want 76", r)
		}
	})
	// What the command does itself is no loss.
	for name, script := range map[string]string{
		"released": `"$0" release "$STAGEFS_LOCK" && exit 3`,
		"removed":  `rmdir "$STAGEFS_LOCK" && exit 3`,
	} {
		t.Run(name, func(t *testing.T) {
			m := m.on(t)
			if r := m.stagefs("run", m.At(name), "sh", "-c", script, stagefsBin()); r.Status != 3 || r.Err != "" {
				t.Errorf("run: %v, want the command's 3", r)
			}
			if r := m.stagefs("run", m.At(name), "sh", "-c", script+"; sleep 0.1; exit 4", stagefsBin()); r.Status != 3 || r.Err != "" {
				t.Errorf("run: %v, want the command's 3", r)
			}
		})
	}
}

// A terminal is a pseudo terminal with a session in it.
type terminal struct {
	t      *testing.T
	master *os.File
	mu     sync.Mutex
	shown  bytes.Buffer // and not yet taken off
	all    bytes.Buffer
	proc   *Proc
}

// onTerminal starts a program as the leader of a session that has a terminal.
func onTerminal(t *testing.T, cmd *exec.Cmd) *terminal {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	mustDo(t, err)
	t.Cleanup(func() { master.Close() })
	raw, err := master.SyscallConn()
	mustDo(t, err)
	var name string
	mustDo(t, raw.Control(func(fd uintptr) {
		if err = unix.IoctlSetPointerInt(int(fd), unix.TIOCSPTLCK, 0); err == nil {
			var n int
			n, err = unix.IoctlGetInt(int(fd), unix.TIOCGPTN)
			name = fmt.Sprintf("/dev/pts/%d", n)
		}
	}))
	mustDo(t, err)
	slave, err := os.OpenFile(name, os.O_RDWR|syscall.O_NOCTTY, 0)
	mustDo(t, err)
	defer slave.Close()
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	tty := &terminal{t: t, master: master}
	tty.proc = startCmd(t, cmd)
	t.Cleanup(func() {
		for _, pid := range childrenOf(tty.proc.Pid()) {
			syscall.Kill(-pid, syscall.SIGKILL) // a job has its group
		}
		if t.Failed() {
			tty.mu.Lock()
			defer tty.mu.Unlock()
			t.Logf("the terminal showed %q", tty.all.String())
		}
	})
	go func() {
		buf := make([]byte, 4096)
		for {
			n, err := master.Read(buf)
			tty.mu.Lock()
			tty.shown.Write(buf[:n])
			tty.all.Write(buf[:n])
			tty.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return tty
}

func (tty *terminal) typed(keys string) {
	tty.t.Helper()
	_, err := tty.master.WriteString(keys)
	mustDo(tty.t, err)
}

// shows waits until the terminal has shown something new, and takes it off.
func (tty *terminal) shows(want string) {
	tty.t.Helper()
	eventually(tty.t, fmt.Sprintf("the terminal shows %q", want), func() bool {
		tty.mu.Lock()
		defer tty.mu.Unlock()
		_, rest, ok := strings.Cut(tty.shown.String(), want)
		if ok {
			tty.shown.Reset()
			tty.shown.WriteString(rest)
		}
		return ok
	})
}

// stopped tells whether all in the session but its leader are.
func (tty *terminal) stopped() bool {
	all := 0
	for _, pid := range childrenOf(tty.proc.Pid()) {
		if stateOf(pid) != "T" {
			return false
		}
		all++
	}
	return all > 0
}

func childrenOf(pid int) (kids []int) {
	data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	for _, word := range strings.Fields(string(data)) {
		kids = append(kids, atoi(word))
	}
	return kids
}

// TestA7RunTerminal: what is typed at the terminal reaches the command, once.
func TestA7RunTerminal(t *testing.T) {
	m := mount(t)
	t.Run("input", func(t *testing.T) {
		tty := onTerminal(t, exec.Command(stagefsBin(), "run", m.At("D"), "sh", "-c", `test -t 0 && read x && echo "got $x"`))
		tty.typed("a line\n")
		tty.shows("got a line")
		if r := tty.proc.Wait(); r.Status != 0 {
			t.Error(r)
		}
	})
	t.Run("ctrl-c", func(t *testing.T) {
		need(t, debianPython)
		// A shell loses a signal that comes while it obeys another.
		script := `import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGQUIT])
print("ready", flush=True)
n = 0
while signal.sigwait([signal.SIGINT, signal.SIGQUIT]) == signal.SIGINT:
    n += 1
    print(f"int {n}.", flush=True)
print(f"all {n}.", flush=True)
`
		tty := onTerminal(t, exec.Command(stagefsBin(), "run", m.At("D"), debianPython, "-c", script))
		tty.shows("ready")
		for i := range 20 {
			tty.typed("\x03")
			tty.shows(fmt.Sprintf("int %d.", i+1))
		}
		tty.typed("\x1c")
		tty.shows("all 20.")
		tty.proc.Wait()
	})
	t.Run("ctrl-c kills", func(t *testing.T) {
		tty := onTerminal(t, exec.Command(stagefsBin(), "run", m.At("D"), "sh", "-c", "echo ready; exec cat"))
		tty.shows("ready")
		tty.typed("\x03")
		tty.proc.Wait()
		if ws := tty.proc.cmd.ProcessState.Sys().(syscall.WaitStatus); !ws.Signaled() || ws.Signal() != syscall.SIGINT {
			t.Errorf("run ended with %#x, want SIGINT", ws)
		}
		m.on(t).wantFree("D")
	})
	t.Run("ctrl-c to a group of its own", func(t *testing.T) {
		for key, sig := range map[string]syscall.Signal{"\x03": syscall.SIGINT, "\x1c": syscall.SIGQUIT} {
			// It makes itself a group, that it can end, which the terminal does not know.
			tty := onTerminal(t, exec.Command(stagefsBin(), "run", m.At("D"), "timeout", "20", "sh", "-c", "echo ready; exec sleep 20"))
			tty.shows("ready")
			tty.typed(key)
			tty.proc.Wait()
			if ws := tty.proc.cmd.ProcessState.Sys().(syscall.WaitStatus); !ws.Signaled() || ws.Signal() != sig {
				t.Errorf("run ended with %#x, want %v", ws, sig)
			}
			m.on(t).wantFree("D")
		}
	})
	t.Run("job control", func(t *testing.T) {
		need(t, "bash")
		tty := onTerminal(t, exec.Command("bash", "--norc", "-i"))
		tty.typed("set -o pipefail; PS1='prompt '; alias r=" + stagefsBin() + "\n")
		tty.shows("prompt ")
		tty.typed("r run " + m.At("D") + ` sh -c 'echo re""ady; read x; echo "got $x"; exit 6' | cat` + "\n")
		tty.shows("ready")
		tty.typed("\x1a")
		tty.shows("Stopped")
		agent(t).want("EBUSY", "put", m.At("D/x"), "", "creat")
		tty.typed("fg\n")
		tty.shows("| cat")
		tty.typed("a line\n")
		tty.shows("got a line")
		tty.typed("echo status $?.\n")
		tty.shows("status 6.")
		tty.typed("r run " + m.At("D") + " cat &\n")
		eventually(t, "what reads in the background is stopped", tty.stopped)
		eventually(t, "the shell has seen it", func() bool {
			tty.typed("\n") // it says so before it asks for more
			tty.shows("prompt ")
			tty.mu.Lock()
			defer tty.mu.Unlock()
			return strings.Contains(tty.all.String(), "Stopped                 "+stagefsBin()+" run "+m.At("D")+" cat")
		})
		tty.typed("fg\n")
		eventually(t, "it runs in the foreground", func() bool { return !tty.stopped() })
		tty.typed("\x03")
		eventually(t, "it ends", func() bool { return len(childrenOf(tty.proc.Pid())) == 0 })
		tty.typed("echo status $?.\n")
		tty.shows("status 130.")
		tty.typed("exit\n")
		tty.proc.Wait()
		m.on(t).wantFree("D")
	})
	t.Run("suspend", func(t *testing.T) {
		need(t, "bash", "perl")
		tty := onTerminal(t, exec.Command("bash", "--norc", "-i"))
		tty.typed("PS1='prompt '; alias r=" + stagefsBin() + "\n")
		tty.shows("prompt ")
		// A shell has a group of its own, and the terminal.
		tty.typed("r run " + m.At("D") + " bash --norc -i\n")
		tty.typed(`echo in""ner` + "\n")
		tty.shows("inner")
		tty.typed("suspend\n")
		tty.shows("Stopped")
		agent(t).want("EBUSY", "put", m.At("D/x"), "", "creat")
		tty.typed("fg\n")
		tty.typed(`echo ba""ck` + "\n")
		tty.shows("back")
		tty.typed("exit 5\n")
		tty.typed("echo status $?.\n")
		tty.shows("status 5.")
		// One that makes itself a group has no terminal until it gets that.
		tty.typed("r run " + m.At("D") + ` perl -e 'setpgrp; print "got ", scalar <STDIN>'` + "\n")
		tty.shows("Stopped")
		tty.typed("fg\n")
		tty.typed("a line\n")
		tty.shows("got a line")
		tty.typed("exit\n")
		tty.proc.Wait()
		m.on(t).wantFree("D")
	})
}

// TestRunStopped: run says which daemon is stopped if that keeps it from releasing the
// lock of a command that has ended. The lock is released when that goes on; or, after a
// signal, ends with run, whose status is the command's all the same.
func TestRunStopped(t *testing.T) {
	for _, tt := range []struct {
		sig    syscall.Signal
		status int
		made   bool // something in the directory, or it could be handed over
	}{{0, 0, true}, {0, 3, true}, {syscall.SIGTERM, 0, true}, {syscall.SIGINT, 3, true}, {syscall.SIGTERM, 0, false}} {
		t.Run(fmt.Sprint(tt), func(t *testing.T) {
			t.Parallel()
			m := mount(t)
			fifo := tempDir(t) + "/go"
			mustDo(t, unix.Mkfifo(fifo, 0o600))
			out := tempDir(t) + "/out"
			touches, runs := m.At("D/made"), m.Back("D/made")
			if !tt.made {
				touches = tempDir(t) + "/made"
				runs = touches
			}
			cmd := exec.Command(stagefsBin(), "run", "--on-crash=destroy", m.At("D"), "sh", "-c",
				`touch "$2"; cat "$0"; exit "$1"`, fifo, itoa(tt.status), touches)
			file, err := os.Create(out)
			mustDo(t, err)
			defer file.Close()
			cmd.Stderr = file
			p := startCmd(t, cmd)
			eventually(t, "the command runs", func() bool { return exists(runs) })
			time.Sleep(50 * time.Millisecond) // it watches
			daemon := m.cmd.Process.Pid
			halt(t, daemon)
			mustDo(t, os.WriteFile(fifo, nil, 0))
			says := func(text string) {
				t.Helper()
				eventually(t, "run says: "+text, func() bool { b, _ := os.ReadFile(out); return strings.Contains(string(b), text) })
			}
			says("process " + itoa(daemon) + ", does not answer: it is stopped; continue it with: kill -CONT " + itoa(daemon))
			if tt.sig != 0 {
				mustDo(t, p.cmd.Process.Signal(tt.sig))
				says("was not released: it ends with ")
			}
			mustDo(t, syscall.Kill(daemon, syscall.SIGCONT))
			if r := p.Wait(); r.Status != tt.status {
				t.Errorf("run: %v, want status %d", r, tt.status)
			}
			m.wantFree("D")
			eventually(t, "the lock ends", func() bool { return len(m.Listing().Locks) == 0 })
			if _, err := os.Stat(m.Back("D/made")); tt.made && (err == nil) != (tt.status == 0) {
				t.Errorf("after status %d: %v", tt.status, err)
			}
		})
	}
}
