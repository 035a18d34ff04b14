//go:build linux

package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// traceHung has a debugger attach to a process, which never waits for it as one that
// hangs: so the dead threads of that process stay, and its end is told to nobody. It
// lets go when it is ended.
func traceHung(t *testing.T, pid int) *Agent {
	t.Helper()
	need(t, "root", "fuse")
	debugger := agent(t) // after its victim: so it is ended before that one is waited for
	debugger.must("seize", itoa(pid))
	return debugger
}

// seizeThreads is traceHung for an agent, which has a thread for it from then on.
func seizeThreads(pid string) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		threads, err := os.ReadDir("/proc/" + pid + "/task")
		for _, thread := range threads {
			if e := unix.PtraceSeize(atoi(thread.Name())); e != nil && e != unix.ESRCH && e != unix.EPERM {
				err = e
			}
		}
		done <- err
		select {}
	}()
	return <-done
}

// threadStates are those of a process's threads, without a gap: "ZZ".
func threadStates(pid int) string {
	stats, _ := filepath.Glob("/proc/" + itoa(pid) + "/task/*/stat")
	states := ""
	for _, stat := range stats {
		if f := statFields(stat); len(f) > 0 {
			states += f[0]
		}
	}
	return states
}

// isHusk reports whether a process is dead, and no pidfd says so.
func isHusk(pid int) bool {
	states := threadStates(pid)
	return states != "" && strings.Trim(states, "Z") == "" && running(pid)
}

// killSeized kills a process that is seized.
func killSeized(t *testing.T, pid int) {
	t.Helper()
	mustDo(t, syscall.Kill(pid, syscall.SIGKILL))
	eventually(t, "only zombies are left", func() bool { return isHusk(pid) })
	time.Sleep(10 * time.Millisecond) // R4
}

// awaitNone waits until a name is gone from the backing, and nobody asks the mount for
// anything meanwhile.
func awaitNone(t *testing.T, path string) {
	t.Helper()
	began := time.Now()
	eventually(t, path+" is gone", func() bool { return !exists(path) })
	t.Logf("%s was gone after %v", filepath.Base(path), time.Since(began).Round(time.Millisecond))
}

// inProcessModes runs a test with all that the kernel tells of processes, and with
// what an old one does: it tells how each thread ends.
func inProcessModes(t *testing.T, f func(t *testing.T, m *Mount)) {
	for name, opts := range map[string][]string{"native": nil, "compat": {"--compat"}} {
		t.Run(name, func(t *testing.T) { f(t, mount(t, opts...)) })
	}
}

// TestR4Traced: an owner dies while it is traced by who does not wait for it. Its lock
// ends, by itself, and at once where somebody wants it.
func TestR4Traced(t *testing.T) {
	inProcessModes(t, func(t *testing.T, m *Mount) {
		for name, take := range map[string][][]string{
			"closed": {{"creat", "devserver", "wronly,creat,excl"}},
			"open":   {{"open", "x", "devserver", "wronly,creat,excl"}},
			"flock":  {{"open", "x", "devserver", "wronly,creat"}, {"flock", "x"}},
			"mkdir":  {{"mkdir", "devserver"}},
		} {
			t.Run(name, func(t *testing.T) {
				m := m.on(t)
				acquire := func(dir string) *Agent {
					openDir(t, m.Back(dir))
					a := agent(t)
					a.must("chdir", m.At(dir))
					for _, step := range take {
						a.must(step...)
					}
					m.wantOwner(dir, a.Pid)
					traceHung(t, a.Pid)
					return a
				}
				// A rival finds out.
				owner, rival := acquire(name+"-rival"), agent(t)
				rival.want("EEXIST", "mkdir", m.At(name+"-rival", "devserver"))
				killSeized(t, owner.Pid)
				if name == "flock" {
					rival.must("put", m.At(name+"-rival", "f"), "x", "creat")
				} else {
					rival.must("creat", m.At(name+"-rival", "devserver"), "wronly,creat,excl")
				}
				// The listing does.
				owner = acquire(name + "-list")
				killSeized(t, owner.Pid)
				m.wantFree(name + "-list")
				// And so does nobody.
				owner = acquire(name + "-alone")
				waiter := agent(t)
				woken := waiter.Start("ctl", m.control("ctl"), "acquire "+name+"-alone wait=20s")
				m.awaitWaiters(name+"-alone", 1)
				began := time.Now()
				killSeized(t, owner.Pid)
				if got := woken(); got != "ok" {
					t.Errorf("who waits = %s, want ok", got)
				}
				t.Logf("who waited had it after %v", time.Since(began).Round(time.Millisecond))
				m.wantOwner(name+"-alone", waiter.Pid)
				if name != "flock" { // whose file stays (R2)
					owner = acquire(name + "-none")
					killSeized(t, owner.Pid)
					awaitNone(t, m.Back(name+"-none", "devserver"))
				}
			})
		}
	})
}

// TestR4TracedLine: who joins a line finds out for all in it that the owner has died.
func TestR4TracedLine(t *testing.T) {
	m := mount(t)
	for i, end := 0, time.Now().Add(patience); time.Now().Before(end); i++ { // with the machine busy, not at once
		dir := "D" + itoa(i)
		openDir(t, m.Back(dir))
		owner, first, next := agent(t), agent(t), agent(t)
		traceHung(t, owner.Pid)
		acquire := []string{"ctl", m.control("ctl"), "acquire " + dir + " wait=20s"}
		began := time.Now()
		owner.must("creat", m.At(dir, "devserver"), "wronly,creat,excl")
		got := first.Start(acquire...)
		m.awaitWaiters(dir, 1)
		killSeized(t, owner.Pid)
		next.Start(acquire...)
		if s := got(); s != "ok" {
			t.Fatalf("who waits = %s, want ok", s)
		}
		took := time.Since(began)
		next.Kill()
		if took < 250*time.Millisecond { // when owners are looked at first
			return
		}
		t.Logf("who waited had it after %v", took.Round(time.Millisecond))
	}
	t.Error("who joins the line makes no difference")
}

// TestR5Traced: a lock passes on from who exits while it is traced, and ends when the
// heir dies likewise.
func TestR5Traced(t *testing.T) {
	inProcessModes(t, func(t *testing.T, m *Mount) {
		heir := agent(t)
		owner := heir.Child()
		owner.must("mkdir", m.At("D"))
		m.wantOwner("D", owner.Pid)
		traceHung(t, owner.Pid)
		owner.send([]string{"exit", "0"})
		eventually(t, "the owner is dead", func() bool { return isHusk(owner.Pid) })
		eventually(t, "the heir has the lock", func() bool { return m.Locks()["D"].Pid == heir.Pid })
		heir.must("put", m.At("D/f"), "x", "creat")
		traceHung(t, heir.Pid)
		killSeized(t, heir.Pid)
		stranger(t).want("EACCES|ok", "put", m.At("D/f"), "y", "")
		m.awaitFree("D")
	})
}

// TestH3Traced: the last one of a scope dies while it is traced.
func TestH3Traced(t *testing.T) {
	for _, s := range scopeCases() {
		t.Run(s.name, func(t *testing.T) {
			inProcessModes(t, func(t *testing.T, m *Mount) {
				openDir(t, m.Back("D"))
				taker := s.leader(t)
				taker.mustCommand(m, "acquire D owner=%s", s.name)
				child, other := taker.Child(), agent(t)
				for _, a := range []*Agent{taker, child} {
					other.want("EBUSY", "put", m.At("D/f"), "x", "creat")
					if row := m.Locks()["D"]; row.Scope != s.name || row.Pid != a.Pid {
						t.Errorf("the row: %+v, want scope %s and pid %d", row, s.name, a.Pid)
					}
					traceHung(t, a.Pid)
					killSeized(t, a.Pid)
				}
				other.must("put", m.At("D/f"), "x", "creat")
				m.wantFree("D")
			})
		})
	}
}

// TestS1Traced: an owner dies while it is traced, and no daemon is there; or one that
// is being replaced.
func TestS1Traced(t *testing.T) {
	for _, opts := range [][]string{nil, {"--compat"}} {
		t.Run(strings.Join(opts, " "), func(t *testing.T) {
			m := mountOver(t, opts...)
			take := func(dir string) *Agent {
				openDir(t, m.Back(dir))
				a := agent(t)
				a.must("creat", m.At(dir, "devserver"), "wronly,creat,excl")
				return a
			}
			owner := take("D")
			traceHung(t, owner.Pid)
			m.kill()
			killSeized(t, owner.Pid)
			m.start(opts)
			m.awaitReady()
			if row := m.Locks()["D"]; row.Pid == owner.Pid {
				t.Errorf("the row: %+v", row)
			}
			if _, err := os.Lstat(m.At("D/devserver")); !os.IsNotExist(err) {
				t.Errorf("the lock file: %v", err)
			}
			owner = take("E")
			traceHung(t, owner.Pid)
			killSeized(t, owner.Pid)
			m.replace()
			awaitNone(t, m.At("E/devserver"))
		})
	}
}

// TestH1Traced: who is traced, and whose first thread is a zombie, holds as long as
// another thread lives.
func TestH1Traced(t *testing.T) {
	need(t, "root", "fuse", "/usr/bin/python3")
	prog := filepath.Join(tempDir(t), "threads.py")
	mustDo(t, os.WriteFile(prog, []byte(threads), 0o644))
	inProcessModes(t, func(t *testing.T, m *Mount) {
		openDir(t, m.Back("D"))
		rival := agent(t)
		cmd := exec.Command("/usr/bin/python3", prog, m.At("D"), "leader")
		in, err := cmd.StdinPipe()
		mustDo(t, err)
		start, out := linesOf(t, cmd)
		owner := start()
		if got, _ := out.ReadString('\n'); got != "locked\n" {
			t.Fatalf("it says %q", got)
		}
		eventually(t, "the first thread is a zombie", func() bool { return strings.HasPrefix(threadStates(owner.Pid()), "Z") })
		traceHung(t, owner.Pid())
		for began := time.Now(); time.Since(began) < time.Second; {
			rival.want("EEXIST", "creat", m.At("D/devserver"), "wronly,creat,excl")
			m.wantOwner("D", owner.Pid())
		}
		in.Write([]byte("\n"))
		if got, _ := out.ReadString('\n'); got != "written\n" {
			t.Fatalf("it says %q", got)
		}
		killSeized(t, owner.Pid())
		awaitNone(t, m.Back("D/devserver"))
		rival.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	})
}
