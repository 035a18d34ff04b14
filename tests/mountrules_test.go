//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestM1Over: mounted over itself, a directory keeps its path and content, and
// is the same again after the umount.
func TestM1Over(t *testing.T) {
	dir := staticDir(t)
	fixtures(t, dir)
	before, plain := digest(t, dir), shape(t, dir)
	m := mountDir(t, dir, dir)
	if during := digest(t, dir); during != before {
		t.Errorf("shown differently:\n%s", diff(before, during))
	}
	a, b := agent(t), agent(t)
	a.must("mkdir", m.At("D"))
	b.want("EBUSY", "creat", m.At("D/new"), "wronly,creat")
	a.must("rmdir", m.At("D"))
	m.stop()
	if !m.dead() {
		t.Error("the daemon still runs")
	}
	if after := shape(t, dir); after != plain {
		t.Errorf("another tree after the umount:\n%s", diff(plain, after))
	}
}

// TestM1Second: a second daemon for the same backing fails, whichever path
// leads there, and names the first one's pid; the first serves on.
func TestM1Second(t *testing.T) {
	need(t, "root", "fuse")
	base := tempDir(t)
	at := func(name string) string { return filepath.Join(base, name) }
	for _, dir := range []string{"mnt", "mnt2", "bind"} {
		mustDo(t, os.Mkdir(at(dir), 0o755))
	}
	dir := staticDir(t)
	mustDo(t, os.Symlink(dir, at("link")))
	mustDo(t, unix.Mount(dir, at("bind"), "", unix.MS_BIND, ""))
	defer unix.Unmount(at("bind"), unix.MNT_DETACH)
	m := mountDir(t, dir, at("mnt"))
	pid := itoa(m.cmd.Process.Pid)
	for _, again := range []string{dir, at("link"), at("bind"), dir + "/."} {
		wantRefusal(t, "75", []string{pid}, "mount", "--state-dir", m.State, again, at("mnt2"))
		// The guard is the backing's, not the state directory's.
		wantRefusal(t, "75", []string{pid}, "mount", "--state-dir", at("other-state"), again, at("mnt2"))
	}
	agent(t).must("mkdir", m.At("D"))

	m.kill() // the kernel drops its lock
	unix.Unmount(m.Path, unix.MNT_DETACH)
	m.start(nil)
	m.awaitReady()
}

// TestM1SecondSubvolume: the daemon of a subvolume of btrfs is told from that of another one,
// whose root has the same inode number, to the kernel's list of locks on the same device.
func TestM1SecondSubvolume(t *testing.T) {
	need(t, "root", "fuse", "mkfs.btrfs", "btrfs", "losetup")
	disk, err := imageBy(t, 128, "loop", "mkfs.btrfs", "-q")
	if err != nil {
		t.Skip(err)
	}
	names := func(dir string, m *Mount) bool {
		return regexp.MustCompile(`\bprocess ` + itoa(m.cmd.Process.Pid) + `\b`).MatchString(run(t, stagefsBin(), "doctor", dir).Out)
	}
	var served []*Mount
	for _, name := range []string{"a", "b", "c"} {
		dir := filepath.Join(disk.Dir, name)
		if r := run(t, "btrfs", "subvolume", "create", dir); r.Status != 0 {
			t.Fatal(r)
		}
		if name != "c" {
			served = append(served, mountDir(t, dir, filepath.Join(tempDir(t), "mnt")))
		}
	}
	for _, m := range served {
		if !names(m.Dir, m) {
			t.Errorf("doctor does not name the daemon of %s", m.Dir)
		}
		if names(filepath.Join(disk.Dir, "c"), m) {
			t.Errorf("doctor names the daemon of %s for what nobody serves", m.Dir)
		}
	}
}

// TestM4Idle: SIGTERM and SIGINT unmount, and end the daemon with status 0.
func TestM4Idle(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		m := mountOver(t)
		agent(t).must("mkdir", m.At("D"))
		mustDo(t, m.cmd.Process.Signal(sig))
		eventually(t, "the daemon ends", m.dead)
		if status := m.cmd.ProcessState.ExitCode(); status != 0 {
			t.Errorf("status after %v: %d, want 0", sig, status)
		}
		if _, err := os.Stat(filepath.Join(m.Path, ".stagefs")); !os.IsNotExist(err) {
			t.Errorf("still mounted after %v", sig)
		}
		if _, err := os.Stat(m.Back("D")); err != nil {
			t.Errorf("content after %v: %v", sig, err)
		}
	}
}

// TestM4Busy: a mount that is in use past the grace time is detached, and said
// so; who is inside is served until it leaves.
func TestM4Busy(t *testing.T) {
	m := mount(t, "--grace", "200ms")
	a := agent(t)
	a.must("mkdir", m.At("D"))
	a.must("open", "h", m.At("D/file"), "wronly,creat")
	mustDo(t, m.cmd.Process.Signal(syscall.SIGTERM))
	eventually(t, "the mount is detached", func() bool { return !mountedAt(m.Path) })
	eventually(t, "the daemon says so", func() bool { return strings.Contains(m.Log(), "detached") })
	if m.dead() {
		t.Fatal("the daemon ended although somebody is inside")
	}
	a.must("write", "h", "the last words")
	a.must("close", "h")
	eventually(t, "the daemon ends when nobody is left", m.dead)
	if b, _ := os.ReadFile(m.Back("D/file")); string(b) != "the last words" {
		t.Errorf("content = %q", b)
	}
}

// TestM4BusyNamed: who is inside is named as long as it is not detached.
func TestM4BusyNamed(t *testing.T) {
	m := mount(t, "--grace", "20s")
	a := agent(t)
	a.must("chdir", m.Path)
	mustDo(t, m.cmd.Process.Signal(syscall.SIGTERM))
	eventually(t, "the daemon names who is inside", func() bool {
		return strings.Contains(m.Log(), "is in use by:") && strings.Contains(m.Log(), "process "+itoa(a.Pid)+" ")
	})
	a.must("chdir", "/")
	eventually(t, "the daemon ends", m.dead)
}

// TestM4Covered: what somebody has mounted over the mount keeps it busy, and goes with it
// only after the grace time.
func TestM4Covered(t *testing.T) {
	cover := func(m *Mount) {
		mustDo(t, unix.Mount("none", m.Path, "tmpfs", 0, "size=1m"))
		mustDo(t, os.WriteFile(m.At("file"), nil, 0o644))
	}
	t.Run("waits", func(t *testing.T) {
		m := mountOver(t, "--grace", "1h")
		a := agent(t)
		a.must("chdir", m.Path)
		cover(m)
		mustDo(t, m.cmd.Process.Signal(syscall.SIGTERM))
		m.awaitFrozenAt(a, "D")
		a.must("chdir", "/")
		if _, err := os.Stat(m.At("file")); err != nil {
			t.Errorf("what is mounted over the mount: %v", err)
		}
		if err := unix.Unmount(m.Path, 0); err != nil {
			t.Errorf("umount of that: %v", err)
		}
		eventually(t, "it ends", m.dead)
	})
	t.Run("detached", func(t *testing.T) {
		m := mountOver(t, "--grace", "10ms")
		cover(m)
		mustDo(t, m.cmd.Process.Signal(syscall.SIGTERM))
		eventually(t, "it ends", m.dead)
		if mountedAt(m.Path) {
			t.Error("something is mounted there still")
		}
	})
}

// TestM4Bound: that it is in use is also said of a mount that is unmounted, but shown at
// another place.
func TestM4Bound(t *testing.T) {
	m := mountOver(t)
	a := agent(t)
	bound := filepath.Join(tempDir(t), "bound")
	openDir(t, bound)
	mustDo(t, unix.Mount(m.Path, bound, "", unix.MS_BIND, ""))
	t.Cleanup(func() { unix.Unmount(bound, unix.MNT_DETACH) })
	mustDo(t, m.cmd.Process.Signal(syscall.SIGTERM))
	m.awaitFrozenAt(a, filepath.Join(bound, "D"))
	eventually(t, "the daemon says so", func() bool { return strings.Contains(m.Log(), "still in use, mounted at ") })
	if mountedAt(m.Path) {
		t.Error("it is still mounted over the directory")
	}
	mustDo(t, unix.Unmount(bound, 0))
	eventually(t, "it ends", m.dead)
}

// awaitFrozen waits until a daemon that was told to end gives nobody a lock any more,
// which is a moment after it has said that it ends.
func (m *Mount) awaitFrozen(a *Agent, dir string) {
	m.t.Helper()
	m.awaitFrozenAt(a, m.At(dir))
}

func (m *Mount) awaitFrozenAt(a *Agent, path string) {
	m.t.Helper()
	eventually(m.t, "no directory can be made", func() bool {
		status := a.Try("mkdir", path)
		if status == "ok" {
			a.must("rmdir", path) // and with it the lock
		} else if status != "EBUSY" {
			m.t.Fatalf("mkdir = %s, want EBUSY", status)
		}
		return status == "EBUSY"
	})
}

// TestM4Twice: a second signal ends at once.
func TestM4Twice(t *testing.T) {
	m := mount(t, "--grace", "1h")
	a := agent(t)
	a.must("mkdir", m.At("D"))
	a.must("chdir", m.At("D"))
	mustDo(t, m.cmd.Process.Signal(syscall.SIGTERM))
	m.awaitFrozen(agent(t), "E")
	time.Sleep(200 * time.Millisecond) // sooner it is one with the first
	mustDo(t, m.cmd.Process.Signal(syscall.SIGTERM))
	eventually(t, "it ends", m.dead)
}

// TestM4Frozen: once it has been told to end, the daemon gives nobody a lock, by
// whatever protocol, each of which hears what it understands (A8). What is held is
// held, and written, as before.
func TestM4Frozen(t *testing.T) {
	m := mount(t, "--grace", "1h")
	file := m.lockFile("F")
	openDir(t, m.Back("G"))
	a, b, l := agent(t), agent(t), locker(t)
	a.must("mkdir", m.At("D"))
	a.must("chdir", m.At("D"))
	b.must("creat", m.At("G/devserver.tmp"), "wronly,creat")
	l.must("open", "x", file, "rdwr")
	mustDo(t, m.cmd.Process.Signal(syscall.SIGTERM))
	m.awaitFrozen(b, "E")
	for way, calls := range lockWays(m.At("G/devserver")) {
		if got := b.Try(calls[0]...); got != "EEXIST" {
			t.Errorf("a lock by %s = %s, want EEXIST", way, got)
		}
	}
	for _, call := range lockCalls() {
		for _, try := range [][]string{call.tryExclusive("x"), call.tryShared("x")} {
			if got := l.Try(try...); got != "EAGAIN" {
				t.Errorf("%q = %s, want EAGAIN", try, got)
			}
		}
	}
	b.wantCommand(m, "EBUSY", "acquire G")
	if rows := m.Listing().Locks; len(rows) != 1 || rows[0].Dir != "D" {
		t.Errorf("rows: %+v, want that of D alone", rows)
	}
	a.must("put", m.At("D/file"), "x", "creat")
	a.must("mkdir", m.At("D/sub"))
	b.want("EBUSY", "put", m.At("D/file"), "y", "")
	b.must("put", m.At("G/file"), "x", "creat")
	l.must("close", "x")
	a.must("chdir", "/")
	eventually(t, "it ends when nobody is inside", m.dead)
}

// TestUmountBusy: umount refuses while somebody is inside, and names who.
func TestUmountBusy(t *testing.T) {
	m := mount(t)
	a := agent(t)
	openDir(t, m.Back("D"))
	a.must("chdir", m.At("D"))
	r := run(t, stagefsBin(), "umount", m.Path)
	if r.Status != 75 || !strings.Contains(r.Err, itoa(a.Pid)) {
		t.Errorf("stagefs umount: %v, want status 75 and pid %d", r, a.Pid)
	}
	a.must("mkdir", m.At("E"))
	m.wantOwner("E", a.Pid)
	a.must("chdir", "/")
	if r := run(t, stagefsBin(), "umount", m.Path); r.Status != 0 {
		t.Errorf("stagefs umount: %v", r)
	}
	eventually(t, "the daemon ends", m.dead)
	if mountedAt(m.Path) {
		t.Error("it is still mounted")
	}
}

// TestDaemonize: mount -d returns once the mount answers, or with its error.
func TestDaemonize(t *testing.T) {
	need(t, "root", "fuse")
	dir := staticDir(t)
	state := filepath.Join(tempDir(t), "state")
	r := run(t, stagefsBin(), "mount", "-d", "--state-dir", state, dir)
	if r.Status != 0 {
		t.Fatalf("stagefs mount -d: %v", r)
	}
	version, err := os.ReadFile(filepath.Join(dir, ".stagefs/version"))
	if err != nil {
		t.Fatalf("the mount does not answer: %v", err)
	}
	again := run(t, stagefsBin(), "mount", "-d", "--state-dir", state, dir)
	if again.Status == 0 || again.Err == "" {
		t.Errorf("stagefs mount -d again: %v, want its error", again)
	}
	if r := run(t, stagefsBin(), "umount", dir); r.Status != 0 {
		t.Errorf("stagefs umount: %v", r)
	}
	_, rest, _ := strings.Cut(string(version), "pid ")
	pid := atoi(strings.Fields(rest)[0])
	awaitEnd(t, "the daemon ends", pid)
}

// TestM5: ways under the mount that exist already are named; --strict refuses.
func TestM5(t *testing.T) {
	need(t, "root", "fuse", "unshare")
	ways := map[string]func(t *testing.T, a *Agent, dir string){
		"cwd":        func(t *testing.T, a *Agent, dir string) { a.must("chdir", dir) },
		"cwd below":  func(t *testing.T, a *Agent, dir string) { openDir(t, dir+"/sub"); a.must("chdir", dir+"/sub") },
		"descriptor": func(t *testing.T, a *Agent, dir string) { a.must("open", "h", dir+"/file", "wronly,creat") },
		"directory":  func(t *testing.T, a *Agent, dir string) { a.must("open", "h", dir, "rdonly,directory") },
		"mapping": func(t *testing.T, a *Agent, dir string) {
			a.must("open", "h", dir+"/file", "rdwr,creat")
			a.must("mmap", "m", "h")
			a.must("close", "h")
		},
	}
	for name, way := range ways {
		t.Run(name, func(t *testing.T) {
			dir := staticDir(t)
			a := agent(t)
			way(t, a, dir)
			wantNamed(t, dir, itoa(a.Pid))
		})
	}
	t.Run("unseen", func(t *testing.T) {
		need(t, "setpriv")
		dir := staticDir(t)
		stranger(t).must("chdir", dir)
		m := newMount(t, dir, dir)
		m.cmdBin = lacking(t, "sys_ptrace")
		r := run(t, m.cmdBin, "mount", "--strict", "--state-dir", m.State, dir)
		if r.Status != 75 || !strings.Contains(r.Err, "CAP_SYS_PTRACE") {
			t.Errorf("mount --strict that may not look at processes: %v, want status 75 and what it lacks", r)
		}
		m.serve()
		eventually(t, "a warning", func() bool { return strings.Contains(m.Log(), "without CAP_SYS_PTRACE") })
	})
	t.Run("elsewhere", func(t *testing.T) {
		dir := staticDir(t)
		m := mountDir(t, dir, dir+".mnt", "--strict")
		eventually(t, "a warning", func() bool { return strings.Contains(m.Log(), "what is done in "+dir+" itself is not seen") })
	})
	t.Run("namespace", func(t *testing.T) {
		dir := staticDir(t)
		a := agentOver(t, dir, dir)
		a.must("chdir", dir)
		wantNamed(t, dir, itoa(a.Pid))
	})
	t.Run("nobody", func(t *testing.T) {
		dir := staticDir(t)
		a := agentOver(t, staticDir(t), dir) // what has its path there is something else
		a.must("put", dir+"/file", "content", "creat")
		a.must("open", "h", dir+"/file", "wronly")
		a.must("chdir", dir)
		m := mountDir(t, dir, dir, "--strict")
		eventually(t, "the daemon says that it serves", func() bool { return strings.Contains(m.Log(), "stagefs: serving") })
		if strings.Contains(m.Log(), "warning") {
			t.Errorf("said %q without a reason", m.Log())
		}
	})
}

// TestM5Passing: what is closed again while it is looked at, and was no way under the mount,
// is none either.
func TestM5Passing(t *testing.T) {
	need(t, "root", "fuse", "unshare", "python3")
	dir, other := staticDir(t), staticDir(t)
	file := filepath.Join(dir, "file")
	mustDo(t, os.WriteFile(filepath.Join(other, "file"), nil, 0o644))
	for range 3 {
		startLines(t, nil, "unshare", "-m", "sh", "-c", `mount --bind "$1" "$2" && exec python3 -c "$3" "$4"`, "sh", other, dir, openAndClose, file).hear("begins")
	}
	m := newMount(t, dir, dir)
	for range 2 {
		m.serve("--strict") // which refuses otherwise
		m.stop()
	}
}

// openAndClose opens and closes a file hundreds of times, again and again.
const openAndClose = `import os, sys
print("begins", flush=True)
while True:
    fds = [os.open(sys.argv[1], os.O_RDONLY) for i in range(1000)]
    for fd in fds:
        os.close(fd)`

// TestM5Mounts: so are mounts, of the directory, of what it is in, and of what is mounted
// in it.
func TestM5Mounts(t *testing.T) {
	need(t, "root", "fuse")
	bind := func(t *testing.T, from, to string) string {
		openDir(t, to)
		mustDo(t, unix.Mount(from, to, "", unix.MS_BIND, ""))
		t.Cleanup(func() { unix.Unmount(to, unix.MNT_DETACH) })
		return to
	}
	inside := func(t *testing.T, dir string) string {
		at := filepath.Join(dir, "sub")
		openDir(t, at)
		mustDo(t, unix.Mount("tmpfs", at, "tmpfs", 0, "size=1m"))
		t.Cleanup(func() { unix.Unmount(at, unix.MNT_DETACH) })
		return at
	}
	ways := map[string]func(t *testing.T, dir, at string) (named string){
		"itself": func(t *testing.T, dir, at string) string { return bind(t, dir, at) },
		"around": func(t *testing.T, dir, at string) string { return bind(t, filepath.Dir(dir), at) + "/static" },
		"a part": func(t *testing.T, dir, at string) string { openDir(t, dir+"/sub"); return bind(t, dir+"/sub", at) },
		"a part, inside": func(t *testing.T, dir, at string) string {
			openDir(t, dir+"/sub")
			return bind(t, dir+"/sub", dir+"/other")
		},
		"what is in it":     func(t *testing.T, dir, at string) string { return bind(t, inside(t, dir), at) },
		"that, inside":      func(t *testing.T, dir, at string) string { return bind(t, inside(t, dir), dir+"/twice") },
		"what is elsewhere": func(t *testing.T, dir, at string) string { openDir(t, at); bind(t, at, dir+"/sub"); return at },
	}
	for name, way := range ways {
		t.Run(name, func(t *testing.T) {
			dir := staticDir(t)
			wantNamed(t, dir, way(t, dir, filepath.Join(tempDir(t), "way")))
		})
	}
	t.Run("on btrfs", func(t *testing.T) {
		need(t, "mkfs.btrfs", "losetup")
		disk, err := imageBy(t, 128, "loop", "mkfs.btrfs")
		if err != nil {
			t.Skip(err)
		}
		dir := filepath.Join(disk.Dir, "static")
		openDir(t, dir)
		wantNamed(t, dir, bind(t, dir, filepath.Join(tempDir(t), "way")))
	})
	t.Run("none", func(t *testing.T) {
		dir := staticDir(t)
		inside(t, dir)
		bind(t, dir, dir) // covers what it is of
		m := mountDir(t, dir, dir, "--strict")
		// What is mounted in the mount goes with it when the daemon has died.
		bind(t, inside(t, dir), filepath.Join(tempDir(t), "way"))
		m.kill()
		m.start([]string{"--strict"})
		m.awaitReady()
	})
}

// agentOver starts an agent in a mount namespace where one directory is mounted over another.
func agentOver(t *testing.T, what, dir string) *Agent {
	t.Helper()
	return awaitAgent(t, func(sock string) {
		cmd := agentCmd(sock)
		mount := exec.Command("unshare", "-m", "sh", "-c", `mount --bind "$1" "$2" && exec "$0"`, cmd.Path, what, dir)
		mount.Env = cmd.Env
		startCmd(t, mount)
	})
}

// wantNamed expects a warning that names something, and to be refused with --strict.
func wantNamed(t *testing.T, dir, what string) {
	t.Helper()
	wantRefusal(t, "75", []string{what}, "mount", "--strict", "--state-dir", filepath.Join(tempDir(t), "state"), dir)
	m := mountDir(t, dir, dir)
	eventually(t, "the daemon says that it serves", func() bool { return strings.Contains(m.Log(), "stagefs: serving") })
	if log := m.Log(); !strings.Contains(log, "warning") || !strings.Contains(log, what) {
		t.Errorf("said %q, want a warning that names %s", log, what)
	}
}

// TestM5Supervisor: a supervisor that was started in the directory itself is no way
// under the mount, and starts the next daemon there all the same.
func TestM5Supervisor(t *testing.T) {
	need(t, "root", "fuse", "fusermount3")
	serve := map[string]func(*Mount){
		"root": func(m *Mount) { m.serve("--supervise", "--strict") },
		"user": func(m *Mount) { m.serveUser("--supervise") },
	}
	for name, serve := range serve {
		t.Run(name, func(t *testing.T) {
			dir := staticDir(t)
			m := newMount(t, dir, dir)
			m.inside = true
			serve(m)
			a, b := stranger(t), stranger(t)
			a.must("mkdir", m.At("D"))
			a.must("put", m.At("D/file"), "content", "creat")
			for range 2 {
				if got := b.Try("put", fmt.Sprintf("/proc/%d/cwd/D/file", m.cmd.Process.Pid), "evil", "trunc"); got == "ok" {
					t.Error("the held file was written by way of the supervisor's working directory")
				}
				old := m.supervisedPid()
				mustDo(t, syscall.Kill(old, syscall.SIGKILL))
				eventually(t, "the next daemon serves", func() bool {
					answer, version := b.call([]string{"read", m.control("version")})
					return answer == "ok" && !strings.Contains(version, fmt.Sprintf("pid %d\n", old))
				})
			}
			b.want("EBUSY", "put", m.At("D/file"), "evil", "trunc")
			if got := a.Get("read", m.At("D/file")); got != "content" {
				t.Errorf("content %q", got)
			}
		})
	}
}

func mountedAt(path string) bool { return mountsBelow(filepath.Dir(path))[path] != "" }
