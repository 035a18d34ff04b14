//go:build linux

package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// wantRefusal runs stagefs and expects a status, a message of one or a few
// lines that has all of says in it, and no mount.
func wantRefusal(t *testing.T, status string, says []string, args ...string) {
	t.Helper()
	before := mountsBelow(testRoot())
	p := startCmd(t, exec.Command(stagefsBin(), args...))
	eventually(t, "it refuses", func() bool {
		return p.over() || len(mountsBelow(testRoot())) > len(before) && unmountNew(before) > 0
	})
	r := p.Wait()
	if !oneOf(itoa(r.Status), status) {
		t.Errorf("stagefs %q: %v, want status %s", args, r, status)
	}
	if r.Out != "" || strings.TrimSpace(r.Err) == "" || strings.Contains(r.Err, "goroutine") || strings.Contains(r.Err, "transport endpoint") {
		t.Errorf("stagefs %q: %v, want a message on stderr and nothing else", args, r)
	}
	wantTame(t, "stderr", r.Err, -1)
	for _, say := range says {
		if !strings.Contains(r.Err, say) {
			t.Errorf("stagefs %q: %q, want it to name %q", args, r.Err, say)
		}
	}
	if unmountNew(before) > 0 {
		t.Errorf("stagefs %q: left a mount", args)
	}
}

// unmountNew takes away the mounts that were not there before, and counts them.
func unmountNew(before map[string]string) int {
	count := 0
	for mnt := range mountsBelow(testRoot()) {
		if before[mnt] == "" {
			unix.Unmount(mnt, unix.MNT_DETACH)
			count++
		}
	}
	return count
}

// TestBadDirectory: a static directory that is missing, a file, itself on
// FUSE, or read-only.
func TestBadDirectory(t *testing.T) {
	need(t, "root", "fuse")
	base := tempDir(t)
	at := func(name string) string { return filepath.Join(base, name) }
	state := "--state-dir=" + at("state")
	mustDo(t, os.WriteFile(at("file"), nil, 0o644))
	mustDo(t, os.Symlink("nowhere", at("dangling")))
	mustDo(t, os.Mkdir(at("mnt"), 0o755))
	mustDo(t, os.Mkdir(at("dir"), 0o755))
	mustDo(t, os.Mkdir(at("ro"), 0o755))
	mustDo(t, unix.Mount(at("dir"), at("ro"), "", unix.MS_BIND, ""))
	defer unix.Unmount(at("ro"), unix.MNT_DETACH)
	mustDo(t, unix.Mount("", at("ro"), "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""))
	m := mount(t)
	openDir(t, m.Back("sub"))
	before := digest(t, at("dir"))

	wantRefusal(t, "66", []string{"missing"}, "mount", state, at("missing"))
	wantRefusal(t, "66", []string{"missing"}, "mount", state, at("missing"), at("mnt"))
	wantRefusal(t, "66", []string{"file"}, "mount", state, at("file"))
	wantRefusal(t, "66", []string{"dangling"}, "mount", state, at("dangling"))
	wantRefusal(t, "66", []string{"ro"}, "mount", state, at("ro"))
	wantRefusal(t, "66", []string{"ro"}, "mount", state, at("ro"), at("mnt"))
	wantRefusal(t, "66|73|75", []string{m.Path}, "mount", state, m.Path)
	wantRefusal(t, "75", []string{m.Dir + " is served already", ", at " + m.Path, "stagefs umount " + m.Path}, "mount", state, m.Dir)
	over := mountOver(t)
	wantRefusal(t, "75", []string{over.Path + " is served already", "stagefs mount --replace " + over.Path}, "mount", state, over.Path)
	mustDo(t, os.Symlink(over.Path, at("link")))
	if r := run(t, stagefsBin(), "mount", state, at("link")); r.Status != 75 || strings.Contains(r.Err, "not mounted here") {
		t.Errorf("mount of a link to what is served: %v, want status 75", r)
	}
	wantRefusal(t, "66", []string{m.At("sub")}, "mount", state, m.At("sub"))
	wantRefusal(t, "66", []string{m.At("sub")}, "mount", state, m.At("sub"), at("mnt"))
	wantRefusal(t, "66", nil, "mount", state, at("new\nline\x1b[2J"))
	for _, bad := range []string{at("file"), "/proc/none", "/proc", "/dev/null"} {
		wantRefusal(t, "66|73|77", []string{"state directory", bad, "name another with --state-dir"}, "mount", "--state-dir="+bad, at("dir"))
	}
	mustDo(t, os.Symlink("loop", at("loop")))
	for _, link := range []string{at("dangling"), at("loop"), at("dangling/sub")} {
		wantRefusal(t, "66", []string{link[:len(base)+5], "is a dangling symbolic link", "name another with --state-dir"}, "mount", "--state-dir="+link, at("dir"))
	}
	mustDo(t, os.Mkdir(at("open"), 0o755))
	mustDo(t, os.Chmod(at("open"), 0o777))
	mustDo(t, os.Mkdir(at("nobody"), 0o700))
	mustDo(t, os.Chown(at("nobody"), nobody, nobody))
	for bad, says := range map[string]string{at("open"): "can be written by others", at("nobody"): "belongs to uid " + itoa(nobody)} {
		wantRefusal(t, "77", []string{bad, says}, "mount", "--state-dir="+bad, at("dir"))
		if r := run(t, stagefsBin(), "doctor", "--state-dir="+bad, at("dir")); r.Status != 69 || !strings.Contains(r.Out, "fail  state           "+bad+" "+says) {
			t.Errorf("stagefs doctor: %v, want status 69 and %q", r, bad+" "+says)
		}
	}
	if after := digest(t, at("dir")); after != before {
		t.Errorf("changed by what was refused:\n%s", diff(before, after))
	}
}

// TestBadProc: without /proc, which tells what is mounted and who is who, nothing else
// is blamed.
func TestBadProc(t *testing.T) {
	need(t, "root", "fuse")
	dir := staticDir(t)
	for args, says := range map[string]string{"mount": "71 stagefs needs /proc", "umount": "71 stagefs needs /proc", "locks": "71 stagefs needs /proc", "doctor": "69 fail  /proc           missing"} {
		cmd := exec.Command("/bin/sh", "-c", `mount -t tmpfs none /proc && exec "$@" 2>&1`, "sh", stagefsBin(), args, dir)
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
		r, status, say := runCmd(t, cmd), says[:2], says[3:]
		if itoa(r.Status) != status || !strings.Contains(r.Out, say) || strings.Contains(r.Out, "make it first") || strings.Contains(r.Out, "kernel") {
			t.Errorf("stagefs %s without /proc: %v, want status %s, and %q said", args, r, status, say)
		}
	}
}

// TestBadCwd: what is relative to a working directory that was removed is refused so.
func TestBadCwd(t *testing.T) {
	m := mount(t)
	for _, args := range []string{"mount x", "mount -d x", "locks x", "run x true", "acquire x", "release x"} {
		gone := tempDir(t) + "/gone"
		r := sh(t, "/", "mkdir "+gone+" && cd "+gone+" && rmdir "+gone+" && exec "+stagefsBin()+" "+args)
		if r.Status != 66 || !strings.Contains(r.Err, "the working directory was removed; cd to another one") || strings.Count(r.Err, "\n") != 1 {
			t.Errorf("stagefs %s in a directory that was removed: %v", args, r)
		}
	}
	m.wantStatus(0, "", "run", m.At("D"), "true")
}

// TestBadCwdGone: one that is in a mount which was detached, or whose daemon was killed and
// has a successor, was not removed, and its path leads out of it.
func TestBadCwdGone(t *testing.T) {
	m := mountOver(t)
	agent(t).must("mkdir", m.At("D"))
	gone := func(end func()) {
		t.Helper()
		in, tell, err := os.Pipe()
		mustDo(t, err)
		shell := exec.Command("sh", "-c", `for command in locks check release acquire; do [ "$command" = locks ] && read told; "$0" $command . ; echo $?; done; cd "$PWD"`, stagefsBin())
		shell.Dir, shell.Stdin = m.At("D"), in
		p := startCmd(t, shell)
		end()
		tell.Close()
		in.Close()
		want := strings.Repeat("stagefs: the working directory is in a mount that is gone; cd to its path anew, or to another one\n", 4)
		if r := p.Wait(); r.Status != 0 || r.Out != strings.Repeat("66\n", 4) || r.Err != want {
			t.Errorf("in a mount that is gone: %v, want status 66 four times, and each time what to do; then 0", r)
		}
	}
	gone(func() { m.restart(nil) })
	gone(func() {
		if r := run(t, stagefsBin(), "umount", "--lazy", m.Path); r.Status != 0 {
			t.Fatal(r)
		}
	})
}

// TestBadLog: a FIFO for the log that nobody reads keeps no mount waiting; nor is a
// directory made for it.
func TestBadLog(t *testing.T) {
	need(t, "root", "fuse")
	dir, base := staticDir(t), tempDir(t)
	fifo, state := base+"/fifo", "--state-dir="+base+"/state"
	mustDo(t, unix.Mkfifo(fifo, 0o600))
	for _, args := range [][]string{{"mount", "-d"}, {"mount"}, {"mount", "--supervise"}} {
		wantRefusal(t, "73", []string{"nobody reads the FIFO " + fifo, "start its reader first"}, append(args, state, "--log", fifo, dir)...)
	}
	wantRefusal(t, "73", []string{"log file", base + "/none/log", "make its directory first"}, "mount", state, "--log", base+"/none/log", dir)
	reader := startCmd(t, exec.Command("cat", fifo))
	eventually(t, "a reader", func() bool {
		fd, err := unix.Open(fifo, unix.O_WRONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err == nil {
			defer unix.Close(fd) // once the daemon has it
			if r := run(t, stagefsBin(), "mount", "-d", state, "--log", fifo, dir); r.Status != 0 {
				t.Fatal(r)
			}
		}
		return err == nil
	})
	if r := run(t, stagefsBin(), "umount", dir); r.Status != 0 {
		t.Fatal(r)
	}
	if r := reader.Wait(); !strings.Contains(r.Out, "serving") {
		t.Errorf("the reader heard %q", r.Out)
	}
}

// TestBadMountpoint: one that is missing, a file, busy, or stale.
func TestBadMountpoint(t *testing.T) {
	need(t, "root", "fuse")
	base := tempDir(t)
	at := func(name string) string { return filepath.Join(base, name) }
	state := "--state-dir=" + at("state")
	for _, dir := range []string{"dir", "other"} {
		mustDo(t, os.Mkdir(at(dir), 0o755))
	}
	mustDo(t, os.WriteFile(at("file"), nil, 0o644))
	m := mount(t)
	mustDo(t, os.Symlink("loop", at("loop")))
	mustDo(t, os.Symlink("nowhere", at("dangling")))
	for _, bad := range []string{"missing", "file", "file/sub", "loop", "dangling"} {
		wantRefusal(t, "73", []string{"mountpoint", at(bad)}, "mount", state, at("dir"), at(bad))
	}
	wantRefusal(t, "64", []string{at("dir/missing"), "inside the static directory"}, "mount", state, at("dir"), at("dir/missing"))
	wantRefusal(t, "73", []string{m.Path}, "mount", state, at("dir"), m.Path)
	if _, err := os.ReadFile(m.control("version")); err != nil {
		t.Errorf("the mount that was in the way: %v", err)
	}
}

// TestStaleMount: what a killed daemon leaves is named, and cleared by umount or
// by the next daemon; then the directory can be served again.
func TestStaleMount(t *testing.T) {
	need(t, "root", "fuse")
	m := mountOver(t)
	m.kill()
	eventually(t, "reading it fails with ENOTCONN", func() bool {
		// What the kernel was about to hand to the daemon is ECANCELED.
		_, err := os.ReadDir(m.Path)
		return errnoName(err) == "ENOTCONN"
	})
	for _, args := range [][]string{{"locks"}, {"mount", "-o", "remount,ro"}} {
		wantRefusal(t, "69", []string{"the daemon of " + m.Path + " is dead", "umount"}, append(args, m.Path)...)
	}
	elsewhere := mount(t)
	mustDo(t, os.Symlink(elsewhere.At("a"), elsewhere.State+".link"))
	elsewhere.kill()
	for _, dead := range []struct{ dir, at, mount string }{
		{m.At("a/b"), m.Path, m.Path},
		{elsewhere.At("a/b"), elsewhere.Path, elsewhere.Dir + " " + elsewhere.Path},
		{elsewhere.State + ".link/b", elsewhere.Path, elsewhere.Dir + " " + elsewhere.Path},
	} {
		for _, args := range [][]string{{"run", dead.dir, "true"}, {"acquire", dead.dir}, {"release", dead.dir}, {"check", dead.dir}, {"wait", dead.dir}, {"renew", "--client", "c", dead.dir}} {
			wantRefusal(t, "69", []string{"the daemon of " + dead.at + " is dead", "stagefs mount " + dead.mount, "stagefs umount " + dead.at}, args...)
		}
	}
	if r := run(t, stagefsBin(), "umount", elsewhere.Path); r.Status != 0 {
		t.Errorf("stagefs umount of a dead mount: %v", r)
	}
	if r := run(t, stagefsBin(), "umount", m.Path); r.Status != 0 {
		t.Errorf("stagefs umount of a dead mount: %v", r)
	}
	m.start(nil)
	m.awaitReady()
}

// TestBadOptions: wrong usage is status 64, says what is wrong, and mounts nothing.
func TestBadOptions(t *testing.T) {
	dir := staticDir(t)
	for _, bad := range []struct {
		says string
		args []string
	}{
		{"--owner is empty", []string{"mount", "--owner", "", dir}},
		{"--on-crash is empty", []string{"mount", "--on-crash", "", dir}},
		{"--transport is empty", []string{"mount", "--transport=", dir}},
		{"lock-name", []string{"mount", "--lock-name", "a/b", dir}},
		{"lock-name", []string{"mount", "--lock-name", "", dir}},
		{"lock-name", []string{"mount", "--lock-name", "..", dir}},
		{"lock-name", []string{"mount", "--lock-name", "[", dir}},
		{"lock-name", []string{"mount", "--lock-name", "ok", dir, "--lock-name=a/b"}},
		{"--shared-name devserver: is a lock file's name", []string{"mount", "--shared-name", "devserver", dir}},
		{"is a lock file's name", []string{"mount", "--lock-name", "*.lck", "--shared-name", "a.lck", dir}},
		{"candidate", []string{"mount", "--candidate", "a/b", dir}},
		{"candidate", []string{"mount", "--candidate", "", dir}},
		{"depth", []string{"mount", "--depth", "-1", dir}},
		{"depth", []string{"mount", dir, "--depth", "-1"}},
		{"depth", []string{"mount", "--depth", "many", dir}},
		{"want 1 or more", []string{"mount", "--depth", "0", dir}},
		{"unlocked", []string{"mount", "--unlocked", "perhaps", dir}},
		{"--disable-locking and --unlocked=deny exclude", []string{"mount", "--disable-locking", "--unlocked=deny", dir}},
		{"--disable-locking and --enforce=observe exclude", []string{"mount", "--disable-locking", "--enforce=observe", dir}},
		{"frobnicate", []string{"mount", "--frobnicate", dir}},
		{"", []string{"mount"}},
		{"", []string{"mount", ""}},
		{"", []string{"mount", dir, dir + ".mnt", "third"}},
		{"frobnicate", []string{"frobnicate"}},
		{"", nil},
		{"", []string{"umount"}},
		{"", []string{"release"}},
		{"why", []string{"break", dir}},
		{"", []string{"why"}},
		{"", []string{"locks", "a", "b"}},
	} {
		wantRefusal(t, "64", []string{bad.says}, bad.args...)
	}
}

// TestNoMount: commands about a mount that is not there are status 69, and name the one
// that serves the directory elsewhere.
func TestNoMount(t *testing.T) {
	dir := staticDir(t)
	for _, args := range [][]string{
		{"umount", dir}, {"locks", dir}, {"why", dir}, {"release", dir}, {"break", "--why", "x", dir}, {"locks", "--json", dir}, {"why", "/proc"},
	} {
		wantRefusal(t, "69", nil, args...)
	}
	m := mount(t)
	for _, args := range [][]string{
		{"umount"},
		{"mount", "--replace"},
		{"mount", "-o", "remount,ro"},
		{"locks"},
		{"why"},
		{"events"},
		{"release"},
		{"check"},
		{"wait"},
		{"acquire"},
		{"break", "--why", "x"},
		{"quarantine"},
	} {
		wantRefusal(t, "69", []string{m.Dir + " is ", "no stagefs mount: it is served at " + m.Path}, append(args, m.Dir)...)
	}
	wantRefusal(t, "69", []string{m.Dir + "/D is in no stagefs mount: it is served at " + m.At("D")}, "run", m.Dir+"/D", "true")
}

// TestCommands: what the good commands print is data, and nothing else.
func TestCommands(t *testing.T) {
	m := mount(t)
	a := agent(t)
	a.must("mkdir", m.At("D"))
	for _, c := range []struct {
		has  string
		args []string
	}{
		{"stagefs", []string{"version"}},
		{"D ", []string{"locks", m.Path}},
		{"D ", []string{"locks", m.At("D/not/there")}},
		{`"dir"`, []string{"locks", "--json", m.Path}},
		{`"dir"`, []string{"locks", m.Path, "--json"}},
		{itoa(a.Pid), []string{"why", m.At("D/file")}},
		{"free", []string{"why", m.At("elsewhere")}},
		{"mount", []string{"--help"}},
		{"depth", []string{"mount", "--help"}},
		{"depth", []string{"h", "mount"}},
	} {
		r := run(t, stagefsBin(), c.args...)
		if r.Status != 0 || r.Err != "" || !strings.Contains(r.Out, c.has) {
			t.Errorf("stagefs %q: %v, want %q and status 0", c.args, r, c.has)
		}
	}
	if r := run(t, stagefsBin(), "doctor"); r.Status != 0 && r.Status != 69 || r.Out == "" {
		t.Errorf("stagefs doctor: %v", r)
	}
	if r := run(t, stagefsBin(), "doctor", m.At("none")); r.Status != 0 || !strings.Contains(r.Out, "warn  directory       "+m.At("none")+" is missing") {
		t.Errorf("stagefs doctor of what is missing in the mount: %v", r)
	}
	if r := sh(t, m.At("D"), stagefsBin()+" locks"); !strings.Contains(r.Out, "D ") {
		t.Errorf("stagefs locks in a directory of the mount: %v", r)
	}
}

// TestVanishingPid: callers that die in the middle of what they ask for block
// nobody, and leave no lock.
func TestVanishingPid(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	for range 40 {
		cmd := exec.Command("/bin/sh", "-c", `while :; do mkdir "$1/E"; : >"$1/D/devserver"; rm -f "$1/D/devserver"; rmdir "$1/E"; done 2>/dev/null`, "sh", m.Path)
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		p := startCmd(t, cmd)
		eventually(t, "it runs", func() bool { return len(m.Listing().Locks) > 0 })
		killGroup(t, p)
	}
	eventually(t, "no lock is left", func() bool { return len(m.Listing().Locks) == 0 })
	a := agent(t)
	a.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	m.wantOwner("D", a.Pid)
}
