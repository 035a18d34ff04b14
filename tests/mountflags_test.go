//go:build linux

package tests

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// mountedOptions are those that the mount table shows of the topmost mount at a path.
func mountedOptions(t *testing.T, path string) []string {
	t.Helper()
	lines := mountLines(t, path)
	return strings.Split(lines[len(lines)-1][5], ",")
}

// readLater reads a file that was last read long ago, and tells whether that changed the
// access time.
func readLater(t *testing.T, path string) (changed bool) {
	t.Helper()
	var before, after unix.Stat_t
	mustDo(t, unix.UtimesNanoAt(unix.AT_FDCWD, path, []unix.Timespec{{Sec: 1000}, {Nsec: unix.UTIME_OMIT}}, 0))
	mustDo(t, unix.Stat(path, &before))
	_, err := os.ReadFile(path)
	mustDo(t, err)
	mustDo(t, unix.Stat(path, &after))
	return after.Atim != before.Atim
}

// TestM2MountFlags: options of mount(8) that are a mount's own are the mount's, whatever
// the file system of the directory has, and stay when the daemon is killed or replaced.
func TestM2MountFlags(t *testing.T) {
	need(t, "root", "fuse")
	for name, c := range map[string]struct {
		backing uintptr // flags of the directory's own mount
		opts    string
		wants   []string
		read    bool // changes the access time
	}{
		"none":                        {0, "", []string{"rw", "relatime"}, true},
		"noatime":                     {0, "noatime", []string{"rw", "noatime"}, false},
		"relatime over noatime":       {unix.MS_NOATIME, "relatime", []string{"rw", "relatime"}, true},
		"as the directory":            {unix.MS_NOATIME | unix.MS_NOSUID, "noexec", []string{"rw", "noatime", "nosuid", "noexec"}, false},
		"what is taken back":          {unix.MS_NOSUID, "noexec,suid,dev,exec", []string{"rw", "relatime"}, true},
		"all":                         {0, "nosuid,nodev,noexec,noatime,nodiratime", []string{"rw", "nosuid", "nodev", "noexec", "noatime", "nodiratime"}, false},
		"strictatime, no matter what": {unix.MS_NOATIME, "noatime,strictatime", []string{"rw"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			dir := staticDir(t)
			mustDo(t, unix.Mount(dir, dir, "", unix.MS_BIND, ""))
			t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
			mustDo(t, unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_BIND|c.backing, ""))
			opts := []string{"--supervise"}
			if c.opts != "" {
				opts = append(opts, "-o", c.opts)
			}
			m := mountDir(t, dir, dir, opts...)
			check := func(when string) {
				t.Helper()
				got := mountedOptions(t, dir)
				for _, option := range []string{"rw", "ro", "nosuid", "nodev", "noexec", "noatime", "relatime", "nodiratime"} {
					if slices.Contains(got, option) != slices.Contains(c.wants, option) {
						t.Errorf("%s: the mount has %q, want %q", when, got, c.wants)
						break
					}
				}
				for file, size := range map[string]int{"small": 100, "large": 1 << 20} { // which passes
					path := m.At(file)
					mustDo(t, os.WriteFile(path, make([]byte, size), 0o755))
					if changed := readLater(t, path); changed != c.read {
						t.Errorf("%s: to read the %s file changes its access time: %v, want %v", when, file, changed, c.read)
					}
				}
				writeProgram(t, m.At("script"), []byte("#!/bin/sh\n"))
				if err := exec.Command(m.At("script")).Run(); errors.Is(err, unix.EACCES) != slices.Contains(c.wants, "noexec") {
					t.Errorf("%s: to run a script: %v", when, err)
				}
			}
			check("at first")
			m.replace()
			check("replaced")
			old := m.daemon()
			mustDo(t, unix.Kill(old, unix.SIGKILL))
			m.awaitNext(old)
			check("after a crash")
		})
	}
}

// TestM2MountReadOnly: what is mounted with ro, or remounted so, cannot be changed, and is
// read; remounted with rw it can.
func TestM2MountReadOnly(t *testing.T) {
	m := mountOver(t)
	a := agent(t)
	a.must("put", m.At("file"), "x", "creat")
	remount := func(options string, status int) {
		t.Helper()
		m.wantStatus(status, "", "mount", "-o", "remount,"+options, m.Dir)
	}
	a.must("open", "w", m.At("file"), "wronly")
	remount("ro", 75) // somebody writes
	a.must("close", "w")
	remount("ro", 0)
	a.want("EROFS", "put", m.At("other"), "x", "creat")
	a.want("EROFS", "mkdir", m.At("D"))
	a.want("EROFS", "open", "w", m.At("file"), "wronly")
	a.must("open", "r", m.At("file"), "rdonly")
	m.wantFree("D")
	m.wantStatus(71, "stagefs mount -o remount,rw "+m.Path, "run", m.At("D"), "true")
	remount("rw,nosuid", 0)
	a.must("mkdir", m.At("D"))
	m.wantOwner("D", a.Pid)
	if got := mountedOptions(t, m.Path); !slices.Contains(got, "nosuid") || !slices.Contains(got, "rw") {
		t.Errorf("the mount has %q", got)
	}
	m.wantStatus(64, "a remount can't change when access times change", "mount", "-o", "remount,noatime", m.Dir)
	m.wantStatus(64, "say what is to change", "mount", "-o", "remount", m.Dir)
	remount("sync", 64)

	b := mount(t, "-o", "ro", "-o", "nosuid,allow_other,nodev")
	if got := mountedOptions(t, b.Path); !slices.Contains(got, "ro") || !slices.Contains(got, "nodev") {
		t.Errorf("the mount has %q, want what each -o says", got)
	}
	mustDo(t, os.Mkdir(b.Back("E"), 0o755))
	var before, after unix.Stat_t
	mustDo(t, unix.Stat(b.At("E"), &before))
	_, err := os.ReadDir(b.At("E"))
	mustDo(t, err)
	mustDo(t, unix.Stat(b.At("E"), &after))
	if after.Atim != before.Atim {
		t.Error("to list a directory of a read-only mount changes its access time")
	}
	a.want("EROFS", "mkdir", b.At("D"))
	if r := run(t, stagefsBin(), "mount", "-o", "remount,rw", b.Path); r.Status != 0 {
		t.Error(r)
	}
	a.must("mkdir", b.At("D"))
	b.wantOwner("D", a.Pid)
}

// TestM2NoSymFollow: where the directory is mounted with nosymfollow, the mount follows no
// symlinks either, and stays so when something else of it is changed.
func TestM2NoSymFollow(t *testing.T) {
	need(t, "root", "fuse")
	dir := staticDir(t)
	mustDo(t, unix.Mount(dir, dir, "", unix.MS_BIND, ""))
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	mustDo(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o644))
	mustDo(t, os.Symlink("file", filepath.Join(dir, "link")))
	mustDo(t, unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_NOSYMFOLLOW, ""))
	check := func(m *Mount, when string, want error) {
		t.Helper()
		if _, err := os.Stat(m.At("link")); !errors.Is(err, want) {
			t.Errorf("%s: stat(2) of a symlink: %v, want %v", when, err, want)
		}
		if got, err := os.Readlink(m.At("link")); got != "file" || err != nil {
			t.Errorf("%s: readlink(2): %q, %v", when, got, err)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "link")); !errors.Is(err, unix.ELOOP) {
		t.Skip("the kernel has no nosymfollow: ", err)
	}
	m := mountDir(t, dir, dir, "--supervise")
	check(m, "at first", unix.ELOOP)
	m.wantStatus(0, "", "mount", "-o", "remount,noexec", m.Dir)
	check(m, "remounted with noexec", unix.ELOOP)
	old := m.daemon()
	mustDo(t, unix.Kill(old, unix.SIGKILL))
	m.awaitNext(old)
	check(m, "after a crash", unix.ELOOP)
	m.wantStatus(0, "", "mount", "-o", "remount,symfollow", m.Dir)
	check(m, "remounted with symfollow", nil)
	m.stop()
	check(mountDir(t, dir, dir, "-o", "symfollow"), "with -o symfollow", nil)
}

// TestM2UserNoExec: what the file system of an ordinary user's directory keeps from being
// executed is not executed through the mount.
func TestM2UserNoExec(t *testing.T) {
	need(t, "root", "fuse", "fusermount3")
	dir := staticDir(t)
	mustDo(t, unix.Mount("none", dir, "tmpfs", unix.MS_NOEXEC, ""))
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	mustDo(t, os.WriteFile(filepath.Join(dir, "script"), []byte("#!/bin/sh\n"), 0o755))
	m := newMount(t, dir, dir)
	m.serveUser()
	if got := mountedOptions(t, dir); !slices.Contains(got, "noexec") {
		t.Errorf("the mount has %q, want noexec", got)
	}
	if got := stranger(t).Get("sh", m.At("script")); !strings.HasPrefix(got, "126 ") {
		t.Errorf("to run a script: %q, want status 126", got)
	}
}

// TestBadMountFlags: what cannot be had is said, and nothing is mounted.
func TestBadMountFlags(t *testing.T) {
	need(t, "root", "fuse")
	dir := staticDir(t)
	state := filepath.Join(tempDir(t), "state")
	refused := func(status int, says string, opts ...string) {
		t.Helper()
		r := run(t, stagefsBin(), append(append([]string{"mount", "-d", "--state-dir", state}, opts...), dir)...)
		if r.Status != status || !strings.Contains(r.Err, says) || mountedAt(dir) {
			t.Errorf("%q: %v, mounted: %v; want status %d, and %q said", opts, r, mountedAt(dir), status, says)
		}
	}
	refused(64, "option --options sync: is none of", "-o", "nosuid,sync")
	refused(64, "option --options sync: is none of", "-o", "sync", "-o", "nosuid")
	refused(64, `option --options "": is none of`, "-o", "")
	refused(69, "function not implemented", "--compat", "-o", "noatime")
	refused(64, "option --state-dir: a mount keeps it", "-o", "remount,ro")
	if r := run(t, stagefsBin(), "mount", "-o", "remount,ro", dir); r.Status != 69 || !strings.Contains(r.Err, "no stagefs mount") {
		t.Errorf("remount of none: %v", r)
	}
	within := filepath.Join(dir, "within")
	openDir(t, within)
	mustDo(t, unix.Mount("none", within, "tmpfs", 0, ""))
	t.Cleanup(func() { unix.Unmount(within, unix.MNT_DETACH) })
	refused(69, within+" is mounted within", "-o", "noatime")
}
