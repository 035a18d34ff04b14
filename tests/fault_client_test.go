//go:build linux

package tests

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestFaultKilled: a locker, a waiter or `stagefs run` that is killed at any
// moment of its work leaves no lock, no waiter, no lock file and no candidate,
// and the directory is the next one's.
func TestFaultKilled(t *testing.T) {
	need(t, "root", "fuse", "dotlockfile", "lockfile", "flock")
	m := mount(t)
	next := agent(t)
	for name, script := range map[string]string{
		"dotlockfile":   `dotlockfile -r 0 "$1/devserver.lock"; echo x >"$1/f"; dotlockfile -u "$1/devserver.lock"; exec sleep 100`,
		"procmail":      `lockfile -r0 "$1/devserver.lock"; echo x >"$1/f"; rm -f "$1/devserver.lock"; exec sleep 100`,
		"mkdir":         `mkdir "$1/devserver.lock"; echo 1 >"$1/devserver.lock/pid"; echo x >"$1/f"; mkdir "$1/new"; exec sleep 100`,
		"noclobber":     `set -C; echo $$ >"$1/devserver"; cp /proc/self/stat "$1/f2"; rm "$1/devserver"; exec sleep 100`,
		"flock":         `exec 9>>"$1/devserver"; flock 9; echo x >"$1/f"; exec sleep 100`,
		"flock waits":   `exec flock "$1/held/devserver" true`,
		"run":           `exec "$STAGEFS" run "$1" sh -c 'echo x >"$0/f"; exec sleep 100' "$1"`,
		"run waits":     `exec "$STAGEFS" run -w 100s "$1/held" true`,
		"run makes":     `exec "$STAGEFS" run "$1/a/b/c" sleep 100`,
		"acquire lease": `"$STAGEFS" acquire --client fault --ttl 100ms "$1" >/dev/null && exec sleep 100`,
	} {
		t.Run(name, func(t *testing.T) {
			m := m.on(t)
			dir := strings.ReplaceAll(name, " ", "-")
			openDir(t, m.Back(dir))
			var holder *Agent
			if strings.HasSuffix(name, "waits") {
				openDir(t, m.Back(dir, "held"))
				holder = agent(t)
				holder.must("creat", m.At(dir, "held/devserver"), "wronly,creat,excl")
			}
			mark := "STAGEFS_FAULT=" + name + itoa(os.Getpid())
			for step := range 20 {
				if step == 0 {
					step = -1 // the first one gets to its end
				}
				cmd := exec.Command("/bin/sh", "-c", script, "sh", m.At(dir))
				cmd.Env = append(os.Environ(), mark, "STAGEFS="+stagefsBin())
				cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
				p := startCmd(t, cmd)
				if step < 0 {
					eventually(t, "it gets to its end", func() bool {
						if holder != nil {
							return len(m.Listing().Waiters) == 1
						}
						if name == "acquire lease" { // which is over soon
							comm, _ := os.ReadFile("/proc/" + itoa(p.Pid()) + "/comm")
							return string(comm) == "sleep\n"
						}
						return exists(m.Back(dir, "f")) || exists(m.Back(dir, "f2")) || m.Locks()[dir+"/a/b/c"].Pid != 0
					})
				} else {
					time.Sleep(time.Duration(step) * time.Millisecond) // that is the step
				}
				if strings.HasPrefix(name, "run") {
					p.Kill() // it alone: what it started dies with it
				} else {
					killGroup(t, p)
				}
				eventually(t, "no process is left", func() bool { return len(pidsWithEnv(mark)) == 0 })
				if holder != nil {
					eventually(t, "no waiter is left", func() bool { return len(m.Listing().Waiters) == 0 })
					m.wantOwner(dir+"/held", holder.Pid)
					continue
				}
				eventually(t, "no lock is left", func() bool {
					for _, row := range m.Listing().Locks {
						if within(row.Dir, dir) {
							return false
						}
					}
					return true
				})
				// What an fd locker has made stays (R2). A candidate goes when the news
				// of its creator's death is there.
				if name != "flock" {
					eventually(t, fmt.Sprintf("nothing is left after a kill at step %d", step), func() bool { return len(litterIn(m.Back(dir))) == 0 })
				}
				lock := m.At(dir, "devserver.lock")
				next.must("creat", lock, "wronly,creat,excl")
				m.wantOwner(dir, next.Pid)
				next.must("unlink", lock)
				for _, made := range []string{"new", "a"} {
					next.Try("sh", "rm -rf '"+m.At(dir, made)+"'")
				}
			}
		})
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

var crowdFlag = flag.Int("crowd", 100, "processes of TestFaultCrowd and TestFaultCrowdForked")

// TestFaultCrowd: very many processes want one directory at once. Each gets it,
// one at a time, or hears that somebody has it; when they are gone, the daemon
// has let go of all that it had for them.
func TestFaultCrowd(t *testing.T) {
	need(t, "root", "fuse", "flock")
	m := mount(t)
	openDir(t, m.Back("D"))
	mustDo(t, os.WriteFile(m.Back("D/devserver"), nil, 0o666))
	idle := m.openFiles()
	memory := m.resident()
	goroutines := m.metric("goroutines")
	witness := tempDir(t)
	holder := agent(t)
	holder.must("open", "l", m.At("D/devserver"), "rdwr")
	holder.must("flock", "l")

	began := time.Now()
	n := *crowdFlag
	start := exec.Command("/bin/sh", "-c", `i=0; while [ $i -lt "$1" ]; do
		flock D/devserver sh -c 'mkdir "$0/in" || echo two at once >&2; echo >>D/turns; rmdir "$0/in"' "$2" &
		i=$((i + 1)); done; echo started; wait`, "sh", itoa(n), witness)
	start.Dir = m.Path
	p := startCmd(t, start)
	for end := time.Now().Add(patience + time.Duration(n)*20*time.Millisecond); len(m.Listing().Waiters) < n; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d of %d wait", len(m.Listing().Waiters), n)
		}
	}
	waiting := time.Since(began)
	busy, full := m.openFiles(), m.resident()
	// Everybody else goes on meanwhile.
	other := agent(t)
	for i := range 100 {
		other.must("mkdir", m.At("other"+itoa(i)))
	}
	stranger(t).want("EBUSY", "put", m.At("D/x"), "", "creat")
	began = time.Now()
	holder.must("close", "l")
	select {
	case <-p.done:
	case <-time.After(patience + time.Duration(n)*50*time.Millisecond):
		t.Fatalf("after %v, %d still wait", time.Since(began), len(m.Listing().Waiters))
	}
	if r := p.Wait(); r.Status != 0 || r.Err != "" {
		t.Errorf("the crowd: %.2000v", r)
	}
	turns, err := os.ReadFile(m.Back("D/turns"))
	mustDo(t, err)
	if len(turns) != n {
		t.Errorf("%d turns, want %d", len(turns), n)
	}
	m.awaitFree("D")
	other.Kill()
	// Of processes that it has seen, it keeps a thousand descriptors.
	small := func() bool {
		return m.openFiles() <= idle+1100 && m.metric("goroutines") <= goroutines+24 && len(m.Listing().Waiters) == 0
	}
	for end := time.Now().Add(patience); !small() && time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
	}
	if !small() {
		t.Errorf("the daemon is not as it was: descriptors %d, at first %d; goroutines %d, at first %d; %d waiters",
			m.openFiles(), idle, m.metric("goroutines"), goroutines, len(m.Listing().Waiters))
	}
	t.Logf("%d processes: all waited after %v, all had their turn after %v more; descriptors %d, %d, %d; resident MiB %d, %d, %d",
		n, waiting.Round(time.Millisecond), time.Since(began).Round(time.Millisecond), idle, busy, m.openFiles(), memory>>20, full>>20, m.resident()>>20)

	// And all at once make one name: exactly one may.
	out := sh(t, m.Path, `i=0; while [ $i -lt "$1" ]; do mkdir E 2>/dev/null && echo won & i=$((i + 1)); done; wait; exit 3`, itoa(n)) // which hands nothing over (R5)
	if out.Out != "won\n" {
		t.Errorf("mkdir by %d at once: %.2000v, want one that wins", n, out)
	}
	m.awaitFree("E")
}

// resident is the daemon's memory in bytes.
func (m *Mount) resident() int {
	m.t.Helper()
	return statm(m.t, m.cmd.Process.Pid, 1)
}

// statm returns a field of proc_pid_statm(5), in bytes: 1 is what a process has in memory, 5
// what it has mapped for data.
func statm(t *testing.T, pid, field int) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	mustDo(t, err)
	return atoi(strings.Fields(string(b))[field]) * os.Getpagesize()
}

// TestFaultPidNamespace: a client in a pid namespace of its own is known by its
// process and not by the number it calls itself; what it holds ends with it.
func TestFaultPidNamespace(t *testing.T) {
	need(t, "root", "fuse", "unshare")
	m := mount(t)
	in := awaitAgent(t, func(sock string) {
		cmd := agentCmd(sock)
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS}
		p := startCmd(t, cmd)
		t.Cleanup(p.Kill)
	})
	if in.Pid != 1 {
		t.Fatalf("it calls itself %d, want 1", in.Pid)
	}
	rival := agent(t)
	in.must("mkdir", m.At("D"))
	in.must("put", m.At("D/f"), "content", "creat")
	row := m.Locks()["D"]
	if row.Pid <= 1 || !running(row.Pid) {
		t.Errorf("row %+v, want the process as the daemon sees it", row)
	}
	rival.want("EBUSY", "put", m.At("D/f"), "x", "")
	in.must("put", m.At("D/devserver"), "1", "creat,excl")
	in.must("unlink", m.At("D/devserver"))
	in.must("mkdir", m.At("E"))
	mustDo(t, syscall.Kill(row.Pid, syscall.SIGKILL))
	m.awaitFree("D")
	m.awaitFree("E")
	rival.must("put", m.At("D/f"), "x", "")
}

// TestFaultUserNamespace: who is root in a user namespace of its own is an
// ordinary user to the mount: it holds what it takes, and no more than that
// user may it change, break or chown.
func TestFaultUserNamespace(t *testing.T) {
	need(t, "root", "fuse")
	m := mount(t)
	mustDo(t, os.Mkdir(m.Back("roots"), 0o755))
	mustDo(t, os.WriteFile(m.Back("roots/f"), []byte("root's"), 0o644))
	openDir(t, m.Back("D"))
	openDir(t, m.Back("shared"))
	in := awaitAgent(t, func(sock string) {
		cmd := agentCmd(sock)
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Credential:  &syscall.Credential{Uid: 0, Gid: 0, NoSetGroups: true},
			Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: nobody, Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: nobody, Size: 1}},
		}
		startCmd(t, cmd)
	})
	holder := agent(t)
	holder.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	if uid := in.Get("sh", "id -u"); uid != "0 0\n" {
		t.Fatalf("id -u in the namespace = %q", uid)
	}
	in.want("EBUSY", "put", m.At("D/x"), "", "creat")
	in.want("EPERM", "ctl", m.control("ctl"), "break D as root")
	in.want("EPERM", "ctl", m.control("ctl"), "check")
	in.want("EACCES", "put", m.At("roots/f"), "x", "")
	in.want("EACCES", "put", m.At("roots/g"), "x", "creat")
	in.want("EPERM", "chmod", m.At("roots/f"), "0777")
	in.want("EPERM|EINVAL", "chown", m.At("roots/f"), "0", "0")
	m.wantOwner("D", holder.Pid)
	in.must("mkdir", m.At("E"))
	row := m.Locks()["E"]
	if row.Pid != in.Pid || row.UID != nobody {
		t.Errorf("row %+v, want pid %d of uid %d", row, in.Pid, nobody)
	}
	var st unix.Stat_t
	mustDo(t, unix.Stat(m.Back("E"), &st))
	if st.Uid != nobody {
		t.Errorf("E belongs to %d", st.Uid)
	}
	// Nor does a mount over what it may not write help.
	in.Try("sh", "umount '"+m.Path+"'; mount --bind '"+m.At("shared")+"' '"+m.At("D")+"'")
	holder.must("put", m.At("D/f"), "content", "creat")
	if _, err := os.Stat(m.Back("D/f")); err != nil {
		t.Error(err)
	}
	in.Kill()
	m.awaitFree("E")
}

// TestFaultMountNamespace: in a mount namespace of its own a client may unmount
// or cover what it likes: that changes nothing for the others, and what it holds
// stays held.
func TestFaultMountNamespace(t *testing.T) {
	need(t, "root", "fuse", "unshare")
	m := mountOver(t)
	in := awaitAgent(t, func(sock string) {
		cmd := agentCmd(sock)
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
		startCmd(t, cmd)
	})
	rival := agent(t)
	in.must("mkdir", m.At("D"))
	in.must("put", m.At("D/f"), "content", "creat")
	in.must("open", "h", m.At("D/f"), "rdwr")
	if got := in.Get("sh", "umount -l '"+m.Path+"'"); got != "0 " {
		t.Fatalf("umount in the namespace: %q", got)
	}
	rival.want("EBUSY", "put", m.At("D/f"), "x", "")
	in.must("write", "h", "CONTENT")
	m.wantOwner("D", in.Pid)
	if got := rival.Get("read", m.At("D/f")); got != "CONTENT" {
		t.Errorf("read = %q", got)
	}
	in.Kill()
	m.awaitFree("D")
	rival.must("put", m.At("D/f"), "x", "")
}

// TestFaultContainerBind: a container that was given the directory around sees the next
// daemon's mount, if it hears of what is mounted there (rslave), as it is outside, also if
// the one before was read-only for it; one that was given the mount itself keeps the dead one.
func TestFaultContainerBind(t *testing.T) {
	need(t, "root", "fuse", "unshare")
	for name, opts := range map[string][]string{"now": nil, "Linux 5.10": {"--compat"}} {
		t.Run(name, func(t *testing.T) {
			around := volume(t)
			mustDo(t, unix.Mount("", around, "", unix.MS_SHARED, ""))
			dir, bound := filepath.Join(around, "static"), tempDir(t)
			mustDo(t, os.Mkdir(dir, 0o755))
			m := mountDir(t, dir, dir, opts...)
			agent(t).must("put", m.At("f"), "content", "creat")
			ready := filepath.Join(tempDir(t), "ready")
			cmd := exec.Command("unshare", "-m", "--propagation", "slave", "sh", "-c",
				`mount --bind "$1" "$2" && mount --make-private "$2" && mount -o remount,bind,ro "$1" && ! touch "$1/g" 2>/dev/null &&
				cat "$1/f" "$2/f" && : >"$3" && read x; cat "$1/f"; cat "$2/f"; touch "$1/g" && echo " written"`, "sh", dir, bound, ready)
			goOn, err := cmd.StdinPipe()
			mustDo(t, err)
			in := startCmd(t, cmd)
			eventually(t, "the container has both", func() bool { _, err := os.Stat(ready); return err == nil })
			m.kill()
			m.start(opts)
			m.awaitReady()
			_, err = goOn.Write([]byte("\n"))
			mustDo(t, err)
			if r := in.Wait(); r.Out != "contentcontentcontent written\n" || !strings.Contains(r.Err, bound+"/f: Transport endpoint is not connected") {
				t.Errorf("the container: %v, want the file by the directory around, which may be written, and ENOTCONN by the mount's own", r)
			}
		})
	}
}

var clockFlag = flag.Bool("clock", false, "let TestL4Clock step the machine's clock, for a fraction of a second")

// TestL4Clock: a step of the clock, an hour forwards or back, neither ends nor
// extends a lease, ends no lock, and makes no lock file stale (A11).
func TestL4Clock(t *testing.T) {
	if !*clockFlag {
		t.Skip("only with -clock: it steps the machine's clock, which others may be using")
	}
	m := mount(t)
	openDir(t, m.Back("L"))
	openDir(t, m.Back("S"))
	a, holder, other := agent(t), agent(t), agent(t)
	holder.must("mkdir", m.At("D"))
	holder.must("put", m.At("D/devserver"), "", "creat,excl")
	for _, hour := range []time.Duration{time.Hour, -time.Hour} {
		long := a.mustCommand(m, "acquire L client=x ttl=10m")
		short := a.mustCommand(m, "acquire S client=x ttl=1s")
		taken := time.Now()
		back := stepClock(t, hour)
		during := a.Try("ctl", m.control("ctl"), fmt.Sprintf("check L client=x token=%d", long.Token))
		left := m.Locks()["L"].Deadline
		_, shortHeld := m.Locks()["S"]
		early := time.Since(taken) < 900*time.Millisecond
		row, held := m.Locks()["D"]
		mtime := mtimeOf(t, other, m.At("D/devserver"))
		age := time.Since(mtime.Round(0)) // by the stepped clock
		mkdir := other.Try("mkdir", m.At("new"))
		rmdir := other.Try("rmdir", m.At("new"))
		back()
		if during != "ok" || left < 590 || left > 600 {
			t.Errorf("step of %v: the lease: %s, %v s left", hour, during, left)
		}
		if early && !shortHeld {
			t.Errorf("step of %v: the short lease has ended", hour)
		}
		if !held || row.Pid != holder.Pid {
			t.Errorf("step of %v: the lock on D: %+v", hour, row)
		}
		if age > time.Minute || age < -time.Minute {
			t.Errorf("step of %v: the lock file looks %v old", hour, age)
		}
		if mkdir != "ok" || rmdir != "ok" {
			t.Errorf("step of %v: mkdir = %s, rmdir = %s", hour, mkdir, rmdir)
		}
		m.awaitFree("S")
		if took := time.Since(taken); took > 20*time.Second {
			t.Errorf("step of %v: the short lease ended after %v", hour, took)
		}
		a.mustCommand(m, "release L client=x")
		if short.Token <= long.Token {
			t.Errorf("tokens %d, %d", long.Token, short.Token)
		}
	}
}

// stepClock steps the wall clock, until it is put back as if nothing had been.
func stepClock(t *testing.T, by time.Duration) (back func()) {
	t.Helper()
	set := func(to time.Time) error {
		ts := unix.NsecToTimespec(to.UnixNano())
		return unix.ClockSettime(unix.CLOCK_REALTIME, &ts)
	}
	at := time.Now()
	if err := set(at.Add(by)); err != nil {
		t.Skipf("the clock can't be set: %v", err)
	}
	done := false
	back = func() {
		if !done {
			done = true
			// time.Since goes by the monotonic clock.
			mustDo(t, set(at.Add(time.Since(at))))
		}
	}
	t.Cleanup(back)
	return back
}

// TestFaultWaitNextDaemon: who waits for a directory by command, or by the Go client, when the
// daemon is killed waits at the next one.
func TestFaultWaitNextDaemon(t *testing.T) {
	m := mount(t, "--supervise")
	holder, a := agent(t), agent(t)
	for _, dir := range []string{"D", "E"} {
		openDir(t, m.Back(dir))
		holder.mustCommand(m, "acquire %s", dir)
	}
	got := a.StartGet("client", "acquire", "l", m.At("D"), "", "", "wait")
	runs := []*Proc{m.runner(m.At("D"), "true"), m.runner(m.At("D/new"), "true"), m.runner("--client", "c", m.At("D"), "true")}
	for _, args := range [][]string{{"wait", m.At("D")}, {"acquire", "--client", "c", m.At("E")}} {
		runs = append(runs, startCmd(t, exec.Command(stagefsBin(), args...)))
	}
	for range 2 {
		eventually(t, "all wait", func() bool { return len(m.Listing().Waiters) == len(runs)+1 })
		pid := m.daemon()
		mustDo(t, syscall.Kill(pid, syscall.SIGKILL))
		m.awaitSupervised(pid)
	}
	eventually(t, "all wait", func() bool { return len(m.Listing().Waiters) == len(runs)+1 })
	holder.mustCommand(m, "release D")
	holder.mustCommand(m, "release E")
	if token := got(); token == "" || strings.Contains(token, " ") {
		t.Errorf("Acquire = %q, want a token", token)
	}
	a.client("ok", "", "release", "l")
	for _, p := range runs {
		if r := p.WaitFor(patience); r.Status != 0 {
			t.Errorf("%q: %v, want status 0", p.cmd.Args, r)
		}
	}
	m.wantFree("D")
}

// TestFaultRunNoDaemon: so does who comes when no daemon is there; but who does not wait is
// told at once.
func TestFaultRunNoDaemon(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	var p *Proc
	m.restart(func() {
		m.wantStatus(69, "dead", "run", "-n", m.At("D"), "true")
		p = m.runner(m.At("D"), "true")
		time.Sleep(300 * time.Millisecond)
	})
	if r := p.WaitFor(patience); r.Status != 0 {
		t.Errorf("run: %v, want status 0", r)
	}
	m.wantFree("D")
}

// TestFaultReleaseNoDaemon: a release by the Go client that meets a dead daemon waits
// for the next one for a while, and can be repeated if there is none by then: no lock
// is left of a program that goes on.
func TestFaultReleaseNoDaemon(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	dir := m.At("D")
	a, b := agent(t), agent(t)
	for _, id := range []string{"", "A"} {
		a.client("", "", "acquire", "l", dir, id)
		var released func() string
		m.restart(func() {
			released = a.StartGet("client", "release", "l")
			time.Sleep(500 * time.Millisecond)
		})
		if got := released(); got != "ok" {
			t.Errorf("release while the daemon is started again: %q", got)
		}
		m.wantFree("D")

		a.client("", "", "acquire", "l", dir, id)
		m.restart(func() {
			start := time.Now()
			a.client("", "daemon of", "release", "l")
			if took := time.Since(start); took > 5*time.Second {
				t.Errorf("release without a daemon took %v", took)
			}
		})
		b.client("failed ", "", "acquire", "l", dir)
		a.client("ok", "", "release", "l")
		a.client("ok", "", "release", "l")
		b.client("", "", "acquire", "l", dir)
		m.wantOwner("D", b.Pid)
		b.client("ok", "", "release", "l")
	}
}
