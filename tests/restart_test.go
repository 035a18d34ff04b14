//go:build linux

package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestS1NoGap: a new daemon takes the place of a dead mount, and there is no
// moment in which the backing can be written past the two. Where writing needs
// a lock (W4), a single file of somebody without one would show it.
func TestS1NoGap(t *testing.T) {
	need(t, "root", "fuse")
	t.Run("directory", func(t *testing.T) { wantNoGap(t, staticDir(t), func(string) {}) })
	// Where the kernel has to be tricked into it; but not with volumes.
	t.Run("directory, Linux 5.10", func(t *testing.T) { wantNoGap(t, staticDir(t), func(string) {}, "--compat") })
	t.Run("volume", func(t *testing.T) { wantNoGap(t, volume(t), func(string) {}) })
	t.Run("shared volume", func(t *testing.T) {
		dir := volume(t)
		mustDo(t, unix.Mount("", dir, "", unix.MS_SHARED, ""))
		wantNoGap(t, dir, func(string) {})
	})
	t.Run("bind mount", func(t *testing.T) {
		dir := staticDir(t)
		mustDo(t, unix.Mount(staticDir(t), dir, "", unix.MS_BIND, ""))
		t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
		wantNoGap(t, dir, func(string) {})
	})
	// As a daemon leaves it that is killed while it takes a dead mount's place.
	twice := func(dir string) { mustDo(t, unix.Mount(dir, dir, "", unix.MS_BIND, "")) }
	t.Run("directory, two dead mounts", func(t *testing.T) { wantNoGap(t, staticDir(t), twice) })
	t.Run("directory, two dead mounts, Linux 5.10", func(t *testing.T) { wantNoGap(t, staticDir(t), twice, "--compat") })
	for flag, name := range map[uintptr]string{unix.MS_SHARED: "shared", unix.MS_PRIVATE: "private", unix.MS_SLAVE: "slave"} {
		t.Run("in a volume, Linux 5.10, "+name, func(t *testing.T) {
			around := volume(t)
			mustDo(t, unix.Mount("", around, "", unix.MS_SHARED, ""))
			if flag == unix.MS_SLAVE {
				peer := tempDir(t)
				mustDo(t, unix.Mount(around, peer, "", unix.MS_BIND, ""))
				t.Cleanup(func() { unix.Unmount(peer, unix.MNT_DETACH) })
			}
			mustDo(t, unix.Mount("", around, "", flag, ""))
			dir := filepath.Join(around, "static")
			mustDo(t, os.Mkdir(dir, 0o755))
			before := propagationOf(t, around)
			wantNoGap(t, dir, func(string) {}, "--compat")
			if after := propagationOf(t, around); after != before {
				t.Errorf("the mount around is %q, was %q", after, before)
			}
		})
	}
	t.Run("volume, two dead mounts", func(t *testing.T) { wantNoGap(t, volume(t), twice) })
}

// TestS1NoGapMidway: nor is there one if a daemon is killed when its mount is beneath the dead
// one, and has not detached that.
func TestS1NoGapMidway(t *testing.T) {
	needInject(t)
	for name, opts := range map[string][]string{"bare": nil, "supervised": {"--supervise"}, "Linux 5.10": {"--compat"}, "Linux 5.10, supervised": {"--compat", "--supervise"}} {
		supervised := slices.Contains(opts, "--supervise")
		t.Run(name, func(t *testing.T) {
			dir := staticDir(t)
			m := newMount(t, dir, dir)
			var armed atomic.Bool
			detaching, forever := make(chan int, 1), make(chan struct{})
			t.Cleanup(func() { close(forever) })
			m.inject(&fault{call: unix.SYS_UMOUNT2, until: func(a asked) <-chan struct{} {
				if !armed.Swap(false) {
					return nil
				}
				detaching <- a.pid
				return forever
			}})
			opts := append(opts, "--unlocked", "deny")
			m.serve(opts...)
			a := agent(t)
			a.must("mkdir", m.At("D"))
			wrote := m.writtenDuring(func() {
				for range 3 {
					old := m.daemon()
					armed.Store(true)
					mustDo(t, syscall.Kill(old, syscall.SIGKILL))
					if !supervised {
						<-m.gone
						m.start(opts)
					}
					mustDo(t, syscall.Kill(<-detaching, syscall.SIGKILL))
					if !supervised {
						<-m.gone
						if n := mountsOn(t, dir); n != 2 {
							t.Errorf("%d mounts at the path, want two dead ones", n)
						}
						m.start(opts)
					}
					m.awaitSupervised(old)
					if n := mountsOn(t, dir); n != 1 {
						t.Errorf("%d mounts at the path, want 1", n)
					}
					m.wantOwner("D", a.Pid)
				}
			})
			if wrote > 0 {
				t.Errorf("the stranger wrote %d times", wrote)
			}
		})
	}
}

// volume is a directory that is the root of a file system.
func volume(t *testing.T) string {
	t.Helper()
	dir := staticDir(t)
	mustDo(t, unix.Mount("stagefs-test", dir, "tmpfs", 0, "mode=777"))
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	return dir
}

// wantNoGap kills the daemon of a directory again and again, does something to what
// it leaves, and starts another.
func wantNoGap(t *testing.T, dir string, atDead func(dir string), opts ...string) {
	t.Helper()
	opts = append(opts, "--unlocked", "deny")
	m := mountDir(t, dir, dir, opts...)
	mounts, propagation := mountsOn(t, dir), propagationOf(t, dir)
	wrote := m.writtenDuring(func() {
		for range 5 {
			m.kill()
			atDead(dir)
			m.start(opts)
			m.awaitReady()
		}
	})
	if wrote > 0 {
		t.Errorf("the stranger wrote %d times", wrote)
	}
	if _, err := os.Lstat(m.At("naked")); !os.IsNotExist(err) {
		t.Errorf("the stranger's file in the backing: %v", err)
	}
	if n := mountsOn(t, dir); n != mounts {
		t.Errorf("%d mounts at the path, want %d", n, mounts)
	}
	if now := propagationOf(t, dir); now != propagation {
		t.Errorf("the mount is %q, was %q", now, propagation)
	}
}

// propagationOf says whether the mount at a path has peers or a master; not which.
func propagationOf(t *testing.T, path string) (how string) {
	t.Helper()
	lines := mountLines(t, path)
	for _, f := range lines[len(lines)-1][6:] {
		if f == "-" {
			break
		}
		kind, _, _ := strings.Cut(f, ":")
		how += kind + " "
	}
	return how
}

// mountsOn counts the mounts on a directory.
func mountsOn(t *testing.T, dir string) int { t.Helper(); return len(mountLines(t, dir)) }

// mountLines has the lines of mountinfo about a directory, in fields.
func mountLines(t *testing.T, dir string) (lines [][]string) {
	t.Helper()
	table, err := os.ReadFile("/proc/self/mountinfo")
	mustDo(t, err)
	for line := range strings.Lines(string(table)) {
		if f := strings.Fields(line); f[4] == dir {
			lines = append(lines, f)
		}
	}
	return lines
}

// TestS1Volume: the volume at the directory stays where it is while daemons come and
// go, its locks and its content too, and can be unmounted after the last.
func TestS1Volume(t *testing.T) {
	need(t, "root", "fuse")
	dir := volume(t)
	m := mountDir(t, dir, dir)
	owner, other := agent(t), stranger(t)
	owner.must("mkdir", m.At("D"))
	token := m.Locks()["D"].Token
	for i := range 3 {
		m.kill()
		m.start([]string{"--strict"})
		m.awaitReady()
		if row := m.Locks()["D"]; row.Token != token || row.Pid != owner.Pid {
			t.Fatalf("D: %+v, want token %d of pid %d", row, token, owner.Pid)
		}
		other.want("EBUSY", "put", m.At("D/naked"), "x", "creat")
		name := m.At("D", itoa(i))
		owner.must("put", name, "x", "creat")
		owner.must("link", name, name+".link")
		owner.must("rename", name, name+".moved")
	}
	if r := run(t, stagefsBin(), "umount", dir); r.Status != 0 {
		t.Fatal(r)
	}
	<-m.gone
	if n := mountsOn(t, dir); n != 1 {
		t.Errorf("%d mounts at the path, want the volume alone", n)
	}
	if left, err := filepath.Glob(dir + "/D/*"); len(left) != 6 {
		t.Errorf("in the volume: %q, %v", left, err)
	}
	mustDo(t, unix.Unmount(dir, 0))
}

// TestS1VolumeUnmounted: whoever unmounts while a daemon takes a dead mount's place
// unmounts that or the new one, and never the volume.
func TestS1VolumeUnmounted(t *testing.T) {
	need(t, "root", "fuse")
	dir := volume(t)
	for i := range 12 {
		m := mountDir(t, dir, dir)
		m.kill()
		m.start(nil)
		time.Sleep(time.Duration(i) * 4 * time.Millisecond)
		err := unix.Unmount(dir, unix.MNT_DETACH)
		if err == unix.EINVAL { // the daemon detached the dead mount that the kernel had found here: its own is left
			err = unix.Unmount(dir, unix.MNT_DETACH)
		}
		mustDo(t, err)
		eventually(t, "the daemon serves or has ended", func() bool { return m.dead() || m.daemon() != 0 })
		if mountedAt(dir) && !m.dead() {
			if r := run(t, stagefsBin(), "umount", dir); r.Status != 0 {
				t.Fatal(r)
			}
		}
		<-m.gone
		if n := mountsOn(t, dir); n != 1 {
			t.Fatalf("%d mounts at the path, want the volume alone", n)
		}
	}
}

// TestS1Descriptors: what is open on the dead mount, or mapped, is no reason for --strict to
// refuse (M5). It reaches nothing, but for what passed the daemon: see
// TestW3Crash.
func TestS1Descriptors(t *testing.T) {
	for _, opts := range [][]string{{"--no-passthrough"}, nil} {
		t.Run(strings.Join(opts, " "), func(t *testing.T) {
			m := mountOver(t, opts...)
			a := agent(t)
			for _, h := range []string{"mapped", "w"} {
				a.must("open", h, m.At("file"), "rdwr,creat")
			}
			a.must("mmap", "m", "mapped")
			a.must("close", "mapped")
			m.kill()
			m.start(append([]string{"--strict"}, opts...))
			m.awaitReady()
			if opts == nil {
				return
			}
			a.want("ENOTCONN", "write", "w", "x")
			a.want("ENOTCONN", "close", "w") // what close(2) says is no reason to try again
		})
	}
}

// daemon is the process that serves the mount.
func (m *Mount) daemon() int {
	version, err := m.version()
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(version)) {
		if text, ok := strings.CutPrefix(line, "pid "); ok {
			pid, _ := strconv.Atoi(strings.TrimSpace(text))
			return pid
		}
	}
	return 0
}

// servedAnew reports whether another daemon than that one answers.
func (m *Mount) servedAnew(old int) bool {
	pid := m.daemon()
	return pid != 0 && pid != old
}

// awaitNext waits until another daemon than that one answers.
func (m *Mount) awaitNext(old int) {
	m.t.Helper()
	eventually(m.t, "the next daemon answers", func() bool { return m.servedAnew(old) })
}

// awaitSupervised is awaitNext for a supervisor's daemon, which is not to end itself.
func (m *Mount) awaitSupervised(old int) {
	m.t.Helper()
	eventually(m.t, "the next daemon answers", func() bool {
		if m.dead() {
			m.t.Fatalf("the supervisor ended: %v", m.cmd.ProcessState)
		}
		return m.servedAnew(old)
	})
}

// TestS1Supervise: with --supervise another daemon takes over at once, however
// often one is killed, and what ends the supervisor ends the mount.
func TestS1Supervise(t *testing.T) {
	m := mountOver(t, "--supervise")
	mustDo(t, os.WriteFile(m.At("file"), []byte("kept"), 0o644))
	n := max(*kills/20, 1)
	var outages []time.Duration
	for range n {
		time.Sleep(600 * time.Millisecond) // one that dies sooner has failed to start, and is given a pause
		old := m.daemon()
		killed := time.Now()
		mustDo(t, syscall.Kill(old, syscall.SIGKILL))
		m.awaitNext(old)
		outages = append(outages, time.Since(killed))
		if b, err := os.ReadFile(m.At("file")); string(b) != "kept" {
			t.Fatalf("read after a restart: %q, %v", b, err)
		}
	}
	slices.Sort(outages)
	t.Logf("from kill -9 to the next answer, %d kills: median %v, max %v", n, outages[n/2], outages[n-1])
	mustDo(t, m.cmd.Process.Signal(syscall.SIGTERM))
	<-m.gone
	if mountedAt(m.Path) {
		t.Error("still mounted after SIGTERM to the supervisor")
	}
}

// TestS1SupervisorKilled: the daemon serves on without it. When that one is killed, too,
// whoever mounts next has the locks, and the directory does not lie open before.
func TestS1SupervisorKilled(t *testing.T) {
	m := mountOver(t, "--supervise")
	pid := m.daemon()
	m.kill()
	mustDo(t, os.WriteFile(m.At("file"), nil, 0o644))
	if now := m.daemon(); now != pid {
		t.Errorf("daemon %d, want %d", now, pid)
	}
	a := agent(t)
	a.must("mkdir", m.At("D"))
	mustDo(t, syscall.Kill(pid, syscall.SIGKILL))
	awaitEnd(t, "the daemon ends", pid)
	if a.Try("mkdir", m.At("E")) == "ok" {
		t.Error("E can be made while no daemon is there")
	}
	if r := run(t, stagefsBin(), "mount", "-d", "--supervise", "--state-dir", m.State, m.Dir); r.Status != 0 {
		t.Fatal(r)
	}
	pid = m.daemon()
	if row := m.Locks()["D"]; row.Pid != a.Pid {
		t.Errorf("D: %+v, want a lock of pid %d", row, a.Pid)
	}
	if r := run(t, stagefsBin(), "umount", m.Path); r.Status != 0 {
		t.Error(r)
	}
	awaitEnd(t, "the daemon ends", pid)
}

// TestS1SuperviseGivesUp: what cannot start the first time is not tried again, and says
// why once. Nobody waits for that mount yet but who starts it, who can mend it.
func TestS1SuperviseGivesUp(t *testing.T) {
	need(t, "root", "fuse")
	m := mountOver(t, "--supervise")
	missing := tempDir(t) + "/missing"
	for _, tt := range []struct {
		dir, says string
		status    int
	}{
		{missing, missing, 66},
		{m.Dir, "is served already", 75},
	} {
		for _, d := range []string{"", "-d"} {
			args := []string{"mount", "--supervise", "--state-dir", m.State, tt.dir}
			if d != "" {
				args = append(args, d)
			}
			r := run(t, stagefsBin(), args...)
			if r.Status != tt.status || !strings.Contains(r.Err, tt.says) || strings.Count(r.Err, "\n") != 1 {
				t.Errorf("stagefs %q: %v, want status %d, and %q said in one line", args, r, tt.status, tt.says)
			}
		}
	}
}

// TestS1SuperviseDaemon: in the background as well.
func TestS1SuperviseDaemon(t *testing.T) {
	need(t, "root", "fuse")
	dir := staticDir(t)
	m := newMount(t, dir, dir)
	if r := run(t, stagefsBin(), "mount", "-d", "--supervise", "--state-dir", m.State, m.Dir); r.Status != 0 {
		t.Fatal(r)
	}
	old := m.daemon()
	mustDo(t, syscall.Kill(old, syscall.SIGKILL))
	m.awaitNext(old)
	now := m.daemon()
	if r := run(t, stagefsBin(), "umount", m.Path); r.Status != 0 {
		t.Error(r)
	}
	awaitEnd(t, "the daemon ends", now)
	eventually(t, "its supervisor ends", func() bool { return exec.Command("pgrep", "-f", m.State).Run() != nil })
}

// TestS1SuperviseUnmounted: who unmounts while a daemon that took over has not
// served yet ends the supervisor, as who unmounts later.
func TestS1SuperviseUnmounted(t *testing.T) {
	for range 10 {
		m := mountOver(t, "--supervise")
		before := newestMount(t, m.Path)
		mustDo(t, syscall.Kill(m.daemon(), syscall.SIGKILL))
		eventuallySpin(t, "another mount in the dead one's place", func() bool {
			id := newestMount(t, m.Path)
			return id != before && id != ""
		})
		mustDo(t, syscall.Unmount(m.Path, syscall.MNT_DETACH))
		eventually(t, "the supervisor ends", m.dead)
		if mountedAt(m.Path) {
			t.Fatal("mounted again")
		}
	}
}

// TestS1SuperviseUnmountedEarly: so does who unmounts the first daemon's mount before
// that serves, or before it has told its supervisor that it does, and is killed.
func TestS1SuperviseUnmountedEarly(t *testing.T) {
	needInject(t)
	dir := staticDir(t)
	m := newMount(t, dir, dir)
	mounted, unmounted := make(chan struct{}), make(chan struct{})
	m.inject(&fault{call: unix.SYS_SETPRIORITY, times: 1, is: func(asked) bool {
		select {
		case <-mounted:
		default:
			close(mounted)
		}
		<-unmounted
		return false
	}})
	m.start([]string{"--supervise"})
	t.Cleanup(m.stop)
	<-mounted
	mustDo(t, syscall.Unmount(m.Path, syscall.MNT_DETACH))
	mustDo(t, syscall.Kill(m.supervisedPid(), syscall.SIGKILL))
	close(unmounted)
	eventually(t, "the supervisor ends", func() bool {
		if mountedAt(m.Path) {
			t.Fatal("mounted again")
		}
		return m.dead()
	})
}

// newestMount is the id of the only mount at a path, as mountinfo shows it, or "".
func newestMount(t *testing.T, path string) string {
	t.Helper()
	lines := mountLines(t, path)
	if len(lines) != 1 {
		return ""
	}
	return lines[0][0]
}

// TestM1AtOnce: umount(8) returns before the daemon has ended; the next mount
// waits for that.
func TestM1AtOnce(t *testing.T) {
	m := mountOver(t)
	for range 20 {
		// The one before may not serve yet: then it says so, and ends.
		mustDo(t, syscall.Unmount(m.Path, 0))
		old := m.gone
		m.start(nil)
		m.awaitReady()
		<-old
	}
}

// TestS1DeadOfAnother: who mounts over the dead mount of another directory is told that
// this one has given way; whoever takes its own one's place is not. Its locks are there when
// it is mounted elsewhere.
func TestS1DeadOfAnother(t *testing.T) {
	m := mountDir(t, staticDir(t), filepath.Join(tempDir(t), "mnt"))
	a := agent(t)
	a.must("mkdir", m.At("D"))
	m.kill()
	dir := staticDir(t)
	other := newMount(t, dir, dir)
	other.Path = m.Path
	other.serve()
	other.wantLog("the dead mount of "+m.Dir, m.Path, "gives way")
	mustDo(t, os.Mkdir(other.At("a"), 0o755))
	if !exists(other.Back("a")) {
		t.Errorf("%s does not show %s", m.Path, other.Dir)
	}
	other.restart(nil)
	if n := strings.Count(other.Log(), "gives way"); n != 1 {
		t.Errorf("told %d times, want once:\n%s", n, other.Log())
	}
	moved := newMount(t, m.Dir, filepath.Join(tempDir(t), "mnt"))
	moved.State = m.State
	moved.serve()
	moved.wantOwner("D", a.Pid)
}
