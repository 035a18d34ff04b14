//go:build linux

package tests

import (
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestS1NoGap: a new daemon takes the place of a dead mount, and there is no
// moment in which the backing can be written past the two. Where writing needs
// a lock (W4), a single file of somebody without one would show it.
func TestS1NoGap(t *testing.T) {
	m := mountOver(t, "--unlocked", "deny")
	out := tempDir(t) + "/wrote"
	// Each turn goes through the path anew, and finds what is there then.
	loop := exec.Command("sh", "-c", `while :; do { echo x >"$0"/naked; } 2>/dev/null && echo wrote >>"$1"; done`, m.Path, out)
	startCmd(t, loop)
	for range 20 {
		m.kill()
		m.start([]string{"--unlocked", "deny"})
		m.awaitReady()
	}
	if wrote, err := os.ReadFile(out); err == nil {
		t.Errorf("the stranger wrote %d times", len(wrote)/len("wrote\n"))
	}
	if _, err := os.Lstat(m.At("naked")); !os.IsNotExist(err) {
		t.Errorf("the stranger's file in the backing: %v", err)
	}
	table, err := os.ReadFile("/proc/self/mountinfo")
	mustDo(t, err)
	if n := strings.Count(string(table), " / "+m.Path+" "); n != 1 {
		t.Errorf("%d mounts at the path, want 1", n)
	}
}

// TestS1Descriptors: what is open on the dead mount is no reason for --strict to
// refuse (M5). It reaches nothing, but for what passed the daemon: see
// TestW3Crash.
func TestS1Descriptors(t *testing.T) {
	m := mountOver(t, "--no-passthrough")
	a := agent(t)
	a.must("open", "w", m.At("file"), "rdwr,creat")
	m.kill()
	m.start([]string{"--strict", "--no-passthrough"})
	m.awaitReady()
	a.want("ENOTCONN", "write", "w", "x")
	a.want("ENOTCONN", "close", "w") // what close(2) says is no reason to try again
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
		eventually(t, "the next daemon answers", func() bool { pid := m.daemon(); return pid != 0 && pid != old })
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

// TestS1SupervisorKilled: the daemon serves on without it.
func TestS1SupervisorKilled(t *testing.T) {
	m := mountOver(t, "--supervise")
	pid := m.daemon()
	m.kill()
	mustDo(t, os.WriteFile(m.At("file"), nil, 0o644))
	if now := m.daemon(); now != pid {
		t.Errorf("daemon %d, want %d", now, pid)
	}
	if r := run(t, stagefsBin(), "umount", m.Path); r.Status != 0 {
		t.Error(r)
	}
	eventually(t, "the daemon ends", func() bool { return !running(pid) })
}

// TestS1SuperviseGivesUp: what cannot start is not tried for ever, and says why.
func TestS1SuperviseGivesUp(t *testing.T) {
	need(t, "root", "fuse")
	wantRefusal(t, "66", []string{"missing"}, "mount", "--supervise", "--state-dir", tempDir(t), tempDir(t)+"/missing")
	m := mountOver(t, "--supervise")
	r := run(t, stagefsBin(), "mount", "-d", "--supervise", "--state-dir", m.State, m.Dir)
	if r.Status == 0 {
		t.Errorf("a second daemon on one directory: %v", r)
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
	eventually(t, "the next daemon answers", func() bool { pid := m.daemon(); return pid != 0 && pid != old })
	now := m.daemon()
	if r := run(t, stagefsBin(), "umount", m.Path); r.Status != 0 {
		t.Error(r)
	}
	eventually(t, "the daemon ends", func() bool { return !running(now) })
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
	b, err := os.ReadFile("/proc/self/mountinfo")
	mustDo(t, err)
	id, n := "", 0
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); f[4] == path {
			id, n = f[0], n+1
		}
	}
	if n != 1 {
		return ""
	}
	return id
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
