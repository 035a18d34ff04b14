//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// supervisedPid is the daemon that the supervisor has started, whether it serves
// or not; 0: there is none now.
func (m *Mount) supervisedPid() int {
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", m.cmd.Process.Pid))
	for _, task := range tasks {
		b, _ := os.ReadFile(task)
		for _, pid := range strings.Fields(string(b)) {
			if running(atoi(pid)) {
				return atoi(pid)
			}
		}
	}
	return 0
}

// wantEnded expects that the supervisor ends, with a status, and leaves no mount.
func (m *Mount) wantEnded(status int) {
	m.t.Helper()
	eventually(m.t, "the supervisor ends", m.dead)
	if mountedAt(m.Path) {
		m.t.Fatalf("a mount is left; the supervisor: %v", m.cmd.ProcessState)
	}
	if got := m.cmd.ProcessState.ExitCode(); got != status {
		m.t.Errorf("the supervisor's status: %d, want %d", got, status)
	}
}

// TestFaultSuperviseShort: a supervisor that can't look, or a daemon that can't, takes no dead
// mount for one that somebody has unmounted: it would stay for good.
func TestFaultSuperviseShort(t *testing.T) {
	killed := func(m *Mount) {
		mustDo(m.t, syscall.Kill(m.supervisedPid(), syscall.SIGKILL))
	}
	served := func(m *Mount, a *Agent, token uint64) {
		m.t.Helper()
		m.awaitReady()
		if l := m.Locks()["D"]; l.Token != token || l.Pid != a.Pid {
			m.t.Errorf("D: %+v, want token %d of pid %d", l, token, a.Pid)
		}
	}
	t.Run("supervisor", func(t *testing.T) {
		m := mountOver(t, "--supervise")
		a := agent(t)
		a.must("mkdir", m.At("D"))
		token := m.Locks()["D"].Token
		old := m.limitFiles(t, 3) // what is open stays so
		killed(m)
		eventually(t, "it can't start another daemon", func() bool { return m.dead() || strings.Contains(m.Log(), "starting the daemon: ") })
		if m.dead() {
			t.Fatalf("the supervisor ended: %v", m.cmd.ProcessState)
		}
		m.limitFiles(t, int(old.Cur))
		served(m, a, token)
	})
	t.Run("daemon", func(t *testing.T) {
		needInject(t)
		dir := staticDir(t)
		m := newMount(t, dir, dir)
		var armed atomic.Bool
		short := m.inject(&fault{call: unix.SYS_OPENAT, errno: unix.EMFILE, times: 1, is: func(a asked) bool {
			return armed.Load() && strings.HasPrefix(a.path(1), "/proc/self/fdinfo/")
		}})
		m.serve("--supervise")
		a := agent(t)
		a.must("mkdir", m.At("D"))
		token := m.Locks()["D"].Token
		armed.Store(true)
		killed(m)
		served(m, a, token)
		if short.did()[0] != 1 {
			t.Error("nothing failed")
		}
	})
}

// TestFaultTerminatedPause: SIGTERM to a supervisor that waits before it starts
// another daemon leaves no dead mount (M4), and no lock is lost by it.
func TestFaultTerminatedPause(t *testing.T) {
	m := mountOver(t, "--supervise")
	a := agent(t)
	a.must("mkdir", m.At("D"))
	token := m.Locks()["D"].Token
	for range 3 {
		for range 7 {
			pid := 0
			eventuallySpin(t, "a daemon", func() bool { pid = m.supervisedPid(); return pid != 0 })
			mustDo(t, syscall.Kill(pid, syscall.SIGKILL))
			eventuallySpin(t, "its end", func() bool { return m.supervisedPid() != pid })
		}
		time.Sleep(20 * time.Millisecond) // of 800
		if m.supervisedPid() != 0 {
			t.Fatal("there is no pause")
		}
		mustDo(t, m.cmd.Process.Signal(syscall.SIGTERM))
		m.wantEnded(0)
		m.start([]string{"--supervise"})
		m.awaitReady()
		if row := m.Locks()["D"]; row.Token != token || row.Pid != a.Pid {
			t.Fatalf("D: %+v, want token %d of pid %d", row, token, a.Pid)
		}
	}
}

// TestFaultTerminatedRestart: neither does SIGTERM at any moment of the start of a
// daemon in a dead one's place: also one that it hears before it can listen.
func TestFaultTerminatedRestart(t *testing.T) {
	m := mountOver(t, "--supervise")
	a := agent(t)
	a.must("mkdir", m.At("D"))
	token := m.Locks()["D"].Token
	for i := range 30 {
		old := m.daemon()
		mustDo(t, syscall.Kill(old, syscall.SIGKILL))
		eventuallySpin(t, "another daemon", func() bool { pid := m.supervisedPid(); return pid != 0 && pid != old })
		time.Sleep(time.Duration(i) * 300 * time.Microsecond)
		mustDo(t, m.cmd.Process.Signal(syscall.SIGTERM))
		m.wantEnded(0)
		m.start([]string{"--supervise"})
		m.awaitReady()
		if row := m.Locks()["D"]; row.Token != token || row.Pid != a.Pid {
			t.Fatalf("D: %+v, want token %d of pid %d", row, token, a.Pid)
		}
	}
}

// TestFaultSuperviseExits: a daemon that has served and ends in whatever way with
// its mount in place has another one in its place at once; one whose mount is
// gone has not.
func TestFaultSuperviseExits(t *testing.T) {
	need(t, "root", "fuse")
	bad := buildBad(t)
	for _, status := range []string{"0", "2", "66", "70", "74"} {
		t.Run(status, func(t *testing.T) {
			mustDo(t, os.WriteFile(filepath.Join(filepath.Dir(bad), "exit"), []byte(status), 0o644))
			m := mountOver(t, "--supervise")
			a := agent(t)
			a.must("mkdir", m.At("D"))
			token := m.Locks()["D"].Token
			for range 2 {
				old := m.daemon()
				run(t, bad, m.control("ctl"), stagefsBin())
				m.awaitNext(old)
				if row := m.Locks()["D"]; row.Token != token || row.Pid != a.Pid {
					t.Fatalf("D: %+v, want token %d of pid %d", row, token, a.Pid)
				}
			}
			if r := run(t, stagefsBin(), "umount", m.Path); r.Status != 0 {
				t.Fatal(r)
			}
			m.wantEnded(0)
		})
	}
}

// TestFaultSuperviseObstacle: whatever keeps another daemon from taking a dead one's
// place for a while, the supervisor tries on, says why once and what it does, and the
// mount is back when the obstacle is gone. Who unmounts meanwhile ends it, as does
// SIGTERM.
func TestFaultSuperviseObstacle(t *testing.T) {
	type obstacle struct {
		name, says string
		put        func(t *testing.T, m *Mount) (lift func())
	}
	for _, o := range []obstacle{
		{"read-only", "read-only", func(t *testing.T, m *Mount) func() {
			remount := func(flags uintptr) { mustDo(t, unix.Mount("", m.Dir, "", unix.MS_REMOUNT|flags, "")) }
			remount(unix.MS_RDONLY)
			return func() { remount(0) }
		}},
		{"locked", "is served already", func(t *testing.T, m *Mount) func() {
			dir, err := os.Open(m.Dir)
			mustDo(t, err)
			mustDo(t, unix.Flock(int(dir.Fd()), unix.LOCK_EX))
			return func() { dir.Close() }
		}},
		{"mode", "can be written by others", func(t *testing.T, m *Mount) func() {
			mustDo(t, os.Chmod(m.State, 0o777))
			return func() { mustDo(t, os.Chmod(m.State, 0o700)) }
		}},
	} {
		t.Run(o.name, func(t *testing.T) {
			t.Parallel() // they wait
			need(t, "root", "fuse")
			dir := volume(t)
			obstruct := func() (m *Mount, a *Agent, lift func()) {
				m = mountDir(t, dir, dir+".mnt", "--supervise")
				a = agent(t)
				a.must("mkdir", m.At("D"))
				time.Sleep(600 * time.Millisecond) // it has served well
				halt(t, m.cmd.Process.Pid)
				pid := m.daemon()
				mustDo(t, syscall.Kill(pid, syscall.SIGKILL))
				eventually(t, "the mount is dead", func() bool { return unix.Statfs(m.Path, &unix.Statfs_t{}) == unix.ENOTCONN })
				eventually(t, "nobody has the directory", func() bool {
					d, err := os.Open(m.Dir)
					mustDo(t, err)
					defer d.Close()
					return unix.Flock(int(d.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil
				})
				lift = o.put(t, m)
				mustDo(t, m.cmd.Process.Signal(syscall.SIGCONT))
				m.wantLog(o.says, "tries again every 2s", "end it with: stagefs umount "+m.Path)
				return m, a, lift
			}

			m, a, lift := obstruct()
			for end := time.Now().Add(7 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) { // ten tries
				if m.dead() {
					t.Fatalf("the supervisor ended: %v\n%s", m.cmd.ProcessState, m.Log())
				}
			}
			lift()
			eventually(t, "the mount is back", func() bool { return m.daemon() != 0 })
			if row := m.Locks()["D"]; row.Pid != a.Pid {
				t.Errorf("D: %+v, want a lock of pid %d", row, a.Pid)
			}
			if n := strings.Count(m.Log(), o.says); n != 1 {
				t.Errorf("%q was said %d times, want once:\n%s", o.says, n, m.Log())
			}
			if r := run(t, stagefsBin(), "umount", m.Path); r.Status != 0 {
				t.Fatal(r)
			}
			m.wantEnded(0)
			a.must("rmdir", filepath.Join(dir, "D"))

			m, a, lift = obstruct()
			if r := run(t, stagefsBin(), "umount", m.Path); r.Status != 0 {
				t.Fatal(r)
			}
			m.wantEnded(0)
			lift()
			a.must("rmdir", filepath.Join(dir, "D"))

			m, _, lift = obstruct()
			mustDo(t, m.cmd.Process.Signal(syscall.SIGTERM))
			eventually(t, "the supervisor ends", m.dead)
			if mountedAt(m.Path) {
				t.Error("a mount is left")
			}
			lift()
		})
	}
}

// TestFaultSuperviseState: where the state directory is gone when a daemon is killed, or
// another one is mounted there, the next daemon does not go on without the locks, unless
// somebody starts it himself.
func TestFaultSuperviseState(t *testing.T) {
	dirs := []string{staticDir(t), staticDir(t)}
	covered := mountDir(t, dirs[0], dirs[0], "--supervise")
	moved := mountDir(t, dirs[1], dirs[1], "--supervise")
	a := agent(t)
	for _, m := range []*Mount{covered, moved} {
		a.must("mkdir", m.At("D"))
		pid := m.daemon()
		if m == covered {
			mustDo(t, unix.Mount("none", m.State, "tmpfs", 0, "mode=700"))
			t.Cleanup(func() { unix.Unmount(m.State, unix.MNT_DETACH) })
		} else {
			mustDo(t, os.Rename(m.State, m.State+".away"))
		}
		mustDo(t, syscall.Kill(pid, syscall.SIGKILL))
	}
	for _, m := range []*Mount{covered, moved} {
		m.wantLog(m.State+": there is no state of the daemon that was here before; put it back", "tries again every 2s")
		if m == covered {
			mustDo(t, unix.Unmount(m.State, 0))
		} else {
			mustDo(t, os.Rename(m.State+".away", m.State))
		}
	}
	for _, m := range []*Mount{covered, moved} {
		eventually(t, "the mount is back", func() bool { return m.daemon() != 0 })
		if row := m.Locks()["D"]; row.Pid != a.Pid {
			t.Errorf("D: %+v, want a lock of pid %d", row, a.Pid)
		}
	}

	pid := moved.daemon()
	mustDo(t, os.Rename(moved.State, moved.State+".away"))
	mustDo(t, syscall.Kill(pid, syscall.SIGKILL))
	eventually(t, "it is mounted by hand", func() bool { // between two tries of the supervisor's
		r := run(t, stagefsBin(), "mount", "-d", "--state-dir", moved.State, moved.Dir)
		return r.Status == 0 && strings.Contains(r.Err, "the locks that it gave out are lost")
	})
	eventually(t, "the supervisor ends", moved.dead)
	moved.wantFree("D")
	if r := run(t, stagefsBin(), "umount", moved.Path); r.Status != 0 {
		t.Error(r)
	}
}

// TestFaultSuperviseNoProcess: where another daemon cannot be started at once, it
// is a little later.
func TestFaultSuperviseNoProcess(t *testing.T) {
	needInject(t)
	dir := staticDir(t)
	m := newMount(t, dir, dir)
	var served atomic.Bool
	failing := m.inject(&fault{
		call: unix.SYS_CLONE, errno: unix.EAGAIN, times: 3,
		is: func(a asked) bool { return served.Load() && a.args[0]&unix.CLONE_VFORK != 0 },
	})
	m.serve("--supervise")
	served.Store(true)
	old := m.daemon()
	mustDo(t, syscall.Kill(old, syscall.SIGKILL))
	m.awaitNext(old)
	if n := failing.did()[0]; n != 3 {
		t.Errorf("%d starts have failed, want 3", n)
	}
}

// TestFaultSuperviseNoThread: a supervisor that gets no thread any more, as where others
// have made all the processes that a container may have, starts one daemon after the
// other all the same.
func TestFaultSuperviseNoThread(t *testing.T) {
	needInject(t)
	m := newMount(t, staticDir(t), filepath.Join(tempDir(t), "mnt"))
	var supervisor atomic.Int64
	m.inject(&fault{
		call: unix.SYS_CLONE, errno: unix.EAGAIN, times: 1 << 30,
		is: func(a asked) bool {
			pid := supervisor.Load()
			if a.args[0]&unix.CLONE_THREAD == 0 || pid == 0 {
				return false
			}
			_, err := os.Stat(fmt.Sprintf("/proc/%d/task/%d", pid, a.pid))
			return err == nil
		},
	})
	m.serve("--supervise")
	supervisor.Store(int64(m.cmd.Process.Pid))
	a := agent(t)
	a.must("mkdir", m.At("D"))
	for range 6 {
		old := m.daemon()
		mustDo(t, syscall.Kill(old, syscall.SIGKILL))
		m.awaitSupervised(old)
	}
	m.wantOwner("D", a.Pid)
}

// TestFaultSuperviseTransport: a daemon that has taken a dead one's place and cannot
// serve it leaves nothing there; another one mounts anew.
func TestFaultSuperviseTransport(t *testing.T) {
	needInject(t)
	needTransport(t, "uring")
	dir := staticDir(t)
	m := newMount(t, dir, dir)
	var served atomic.Bool
	failing := m.inject(&fault{
		call: unix.SYS_IO_URING_SETUP, errno: unix.ENOMEM, times: 1,
		is: func(asked) bool { return served.Load() },
	})
	m.serve("--supervise", "--transport=uring")
	served.Store(true)
	old := m.daemon()
	mustDo(t, syscall.Kill(old, syscall.SIGKILL))
	m.awaitSupervised(old)
	if n := failing.did()[0]; n != 1 {
		t.Errorf("%d rings have failed, want 1", n)
	}
}

// TestFaultSuperviseStart: who starts a mount in the background waits for the next
// daemon if the first one is killed before it answers, and can end them meanwhile.
func TestFaultSuperviseStart(t *testing.T) {
	needInject(t)
	for _, stop := range []syscall.Signal{0, syscall.SIGINT, syscall.SIGTERM} {
		t.Run(stop.String(), func(t *testing.T) {
			dir := staticDir(t)
			m := newMount(t, dir, dir)
			mounting, goOn := make(chan int, 1), make(chan struct{})
			m.inject(&fault{call: unix.SYS_MOUNT, until: func(a asked) <-chan struct{} {
				mounting <- a.pid
				return goOn
			}})
			cmd := exec.Command(m.cmdBin, "mount", "-d", "--supervise", "--state-dir", m.State, m.Dir)
			mark := "STAGEFS_FAULT=" + dir
			cmd.Env = append(os.Environ(), mark)
			cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
			log, err := os.Create(m.log)
			mustDo(t, err)
			defer log.Close()
			cmd.Stderr = log
			p := startCmd(t, cmd)
			t.Cleanup(func() {
				for _, pid := range pidsWithEnv(mark) {
					t.Errorf("process %d is left", pid)
					syscall.Kill(pid, syscall.SIGKILL)
				}
				unix.Unmount(m.Path, unix.MNT_DETACH)
			})
			next := func() (pid int) {
				select {
				case pid = <-mounting:
				case <-p.done:
					t.Fatalf("ended: %v", p.Wait())
				case <-time.After(patience):
					t.Fatal("no daemon mounts")
				}
				return pid
			}
			mustDo(t, syscall.Kill(next(), syscall.SIGKILL))
			next()
			if stop != 0 {
				mustDo(t, p.cmd.Process.Signal(stop))
				eventually(t, "the daemon hears of it", func() bool { return strings.Contains(m.Log(), ": unmounting ") })
			}
			close(goOn)
			r := p.Wait()
			if stop != 0 {
				if r.Status == 0 || mountedAt(m.Path) {
					t.Errorf("%v, mounted: %v\n%s", r, mountedAt(m.Path), m.Log())
				}
			} else if r.Status != 0 || m.daemon() == 0 {
				t.Errorf("%v, daemon %d\n%s", r, m.daemon(), m.Log())
			} else if r := run(t, stagefsBin(), "umount", m.Path); r.Status != 0 {
				t.Error(r)
			}
			eventually(t, "no process is left", func() bool { return len(pidsWithEnv(mark)) == 0 })
		})
	}
}

// TestFaultEndsSlowly: the place of a daemon whose mount still says that it is
// about to end is taken when it has, however long that takes.
func TestFaultEndsSlowly(t *testing.T) {
	needInject(t)
	m := mountOver(t)
	a := agent(t)
	a.must("mkdir", m.At("D"))
	m.inject(&fault{call: unix.SYS_STATFS, is: func(a asked) bool { return a.path(0) == m.Path }, errno: unix.ECANCELED, times: 1500})
	m.restart(nil)
	m.wantOwner("D", a.Pid)
}

// TestFaultSuperviseCloses: a daemon that was killed, and waits for another file system
// as it closes what it had open, keeps nobody waiting who uses its mount.
func TestFaultSuperviseCloses(t *testing.T) {
	e := newElsewhere(t, "--transport", "threads")
	dir := staticDir(t)
	m := newMount(t, dir, dir)
	m.log = e.m.At("f") // its standard error
	m.serve("--supervise", "--transport", "threads")
	abort := m.aborter()
	pid := m.daemon()
	a := agent(t)
	waiting := e.m.waiting()
	before := waiting()
	defer e.answer()
	halt(t, e.m.cmd.Process.Pid)
	mustDo(t, syscall.Kill(pid, syscall.SIGKILL))
	eventually(t, "the daemon waits for the other file system", func() bool { return waiting() != before })
	done := make(chan string, 1)
	try := a.Start("mkdir", m.At("D"))
	go func() { done <- try() }()
	select {
	case got := <-done:
		if !oneOf(got, "ENOTCONN|ECONNABORTED|ECANCELED") {
			t.Errorf("mkdir: %s", got)
		}
	case <-time.After(patience / 3):
		t.Error("who uses the mount waits for the killed daemon's end")
		abort()
		<-done
	}
	e.answer()
	eventually(t, "the next daemon serves", func() bool { now := m.daemon(); return now != 0 && now != pid })
}

// TestFaultSuperviseHandOver: a lock passes on from who succeeded while no daemon could
// write that down (R5), also before the first one is there that can serve again. It ends
// with who failed, and with who did so further up.
func TestFaultSuperviseHandOver(t *testing.T) {
	if r := run(t, stagefsBin(), "doctor"); !strings.Contains(r.Out, "parents and exit statuses") || strings.Contains(os.Getenv("STAGEFS_MOUNT_OPTS"), "--compat") {
		t.Skip("it is not known how a process has ended that was reaped: Linux 6.15")
	}
	m := mountOver(t, "--supervise")
	for _, c := range []struct {
		name          string
		parent, child int // statuses; -1: lives, -2: is killed
		passes        bool
		how           []string
	}{
		{"succeeded", -1, 0, true, []string{"once", "twice", "replaced", "mounted anew"}},
		{"both succeeded", 0, 0, true, []string{"once", "twice"}},
		{"failed", -1, 1, false, []string{"once"}},
		{"killed", -1, -2, false, []string{"once"}},
		{"parent failed", 1, 0, false, []string{"once"}},
	} {
		for _, how := range c.how {
			t.Run(c.name+" "+how, func(t *testing.T) {
				m := m.on(t)
				a := agent(t)
				b := a.Child()
				by := b.Child()
				dir := c.name + how
				if how == "mounted anew" { // since the next program could not go on
					run(t, buildBad(t), m.control("ctl"), stagefsBin())
					eventually(t, "the mount answers", func() bool { return m.daemon() != 0 })
				}
				by.must("mkdir", m.At(dir))
				token := m.Locks()[dir].Token
				if how == "replaced" {
					m.replace()
				}
				old := m.daemon()
				halt(t, old)
				end := func(a *Agent, status int) {
					switch status {
					case -1:
					case -2:
						a.Kill()
					default:
						a.Exit(status)
					}
				}
				end(by, c.child)
				end(b, c.parent)
				if how == "twice" {
					mustDo(t, os.Chmod(m.State, 0o777)) // the next one can't start
				}
				mustDo(t, syscall.Kill(old, syscall.SIGKILL))
				if how == "twice" {
					m.wantLog("can be written by others")
					mustDo(t, os.Chmod(m.State, 0o700))
				}
				m.awaitSupervised(old)
				owner := b.Pid
				if c.parent >= 0 {
					owner = a.Pid
				}
				if !c.passes {
					m.awaitFree(dir)
				} else if row := m.Locks()[dir]; row.Pid != owner || row.Token != token {
					t.Errorf("%+v, want token %d of pid %d", row, token, owner)
				}
			})
		}
	}
}

// TestFaultSuperviseBriefly: what a daemon is for less than half a second, and could not go on
// as, is not started after a crash.
func TestFaultSuperviseBriefly(t *testing.T) {
	m := mountOver(t, "--supervise")
	a := agent(t)
	a.must("mkdir", m.At("D"))
	bad := buildBad(t)
	openFile(t, filepath.Join(filepath.Dir(bad), "slow"), "")
	for range 3 { // a supervisor looks at any moment
		run(t, bad, m.control("ctl"), stagefsBin())
		eventually(t, "the mount answers", func() bool { return m.daemon() != 0 })
		old := m.daemon()
		mustDo(t, syscall.Kill(old, syscall.SIGKILL))
		m.awaitSupervised(old)
	}
	m.wantOwner("D", a.Pid)
}

// manyPl has as many processes make a directory, each of which another one removes.
const manyPl = `
sub child {
	my $pid = fork;
	exit(shift->($ARGV[0]) ? 0 : 1) if !$pid;
	exit 1 if waitpid($pid, 0) != $pid || $?;
}
for (1 .. $ARGV[1]) {
	child(sub { mkdir $_[0] });
	child(sub { rmdir $_[0] });
}
exit 3;
`

// TestFaultSuperviseMany: of many hundred processes that have had locks, those are known
// to the next daemon that had one at the end.
func TestFaultSuperviseMany(t *testing.T) {
	need(t, "perl")
	m := mountOver(t, "--supervise")
	old := m.daemon()
	if r := run(t, "perl", "-e", manyPl, m.At("D"), "700"); r.Status != 3 {
		t.Fatal(r)
	}
	a := agent(t)
	b := a.Child()
	b.must("mkdir", m.At("E"))
	halt(t, old)
	b.Exit(0)
	mustDo(t, syscall.Kill(old, syscall.SIGKILL))
	m.awaitSupervised(old)
	m.wantOwner("E", a.Pid)
}
