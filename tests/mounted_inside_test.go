//go:build linux

package tests

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// TestR7MountInside: what somebody has mounted in a directory whose content is
// removed, a directory or a file, is not touched, and is told of; all else goes, and
// the rest with the next removal after it is unmounted.
func TestR7MountInside(t *testing.T) {
	m := mount(t, "--on-crash", "destroy")
	foreign := tempDir(t)
	mustDo(t, os.Mkdir(foreign+"/dir", 0o777))
	mustDo(t, os.WriteFile(foreign+"/dir/valuable", []byte("foreign"), 0o666))
	mustDo(t, os.WriteFile(foreign+"/file", []byte("foreign"), 0o666))
	die := func(dir string) *Agent {
		a := agent(t)
		for _, d := range []string{dir, dir + "/a", dir + "/a/here", dir + "/z"} {
			a.must("mkdir", m.At(d))
		}
		for _, f := range []string{dir + "/f", dir + "/a/f", dir + "/a/there", dir + "/z/f"} {
			a.must("put", m.At(f), "own", "wronly,creat")
		}
		return a
	}
	a := die("D")
	for from, to := range map[string]string{"dir": "here", "file": "there"} {
		at := m.Back("D/a", to)
		mustDo(t, unix.Mount(filepath.Join(foreign, from), at, "", unix.MS_BIND, ""))
		t.Cleanup(func() { unix.Unmount(at, unix.MNT_DETACH) })
	}
	a.Kill()
	m.awaitFree("D")
	eventually(t, "the log tells of what is left", func() bool {
		return strings.Contains(m.Log(), "something is mounted at") && strings.Contains(m.Log(), "a/here") && strings.Contains(m.Log(), "a/there")
	})
	wantTree(t, foreign, []string{"dir/", "dir/valuable=foreign", "file=foreign"})
	trash := m.Back(".stagefs/trash")
	for _, path := range tree(t, trash) {
		if strings.HasSuffix(path, "=own") || strings.HasSuffix(path, "/z/") {
			t.Errorf("%s is left", path)
		}
	}
	for _, mnt := range mountsAt(trash) {
		mustDo(t, unix.Unmount(mnt, 0))
	}
	die("E").Kill()
	eventually(t, "all is gone", func() bool {
		_, err := os.Stat(m.Back(".stagefs"))
		return os.IsNotExist(err)
	})
}

// mountsAt are the mounts beneath a directory.
func mountsAt(dir string) (all []string) {
	for at := range mountsBelow(dir) {
		all = append(all, at)
	}
	return all
}

// TestM2Inodes: files on several file systems in the directory are never taken for one,
// though they have the same inode number, and hard links are.
func TestM2Inodes(t *testing.T) {
	need(t, "root", "fuse")
	dir := staticDir(t)
	for _, name := range []string{"a", "b", "a/in"} {
		at := filepath.Join(dir, name)
		openDir(t, at)
		mustDo(t, unix.Mount("tmpfs", at, "tmpfs", 0, "size=1m"))
		t.Cleanup(func() { unix.Unmount(at, unix.MNT_DETACH) })
		mustDo(t, os.WriteFile(filepath.Join(at, "file"), []byte("content of "+name), 0o644))
		mustDo(t, os.Link(filepath.Join(at, "file"), filepath.Join(at, "link")))
	}
	m := mountDir(t, dir, filepath.Join(tempDir(t), "mnt"))
	number := func(rel string) uint64 {
		var st unix.Stat_t
		mustDo(t, unix.Lstat(m.At(rel), &st))
		return st.Ino
	}
	seen := map[uint64]string{}
	for _, rel := range []string{".", "a", "b", "a/in", "a/file", "b/file", "a/in/file"} {
		ino := number(rel)
		if other, ok := seen[ino]; ok {
			t.Errorf("%s and %s have the same number", rel, other)
		}
		seen[ino] = rel
		if file := strings.HasSuffix(rel, "/file"); file && number(filepath.Dir(rel)+"/link") != ino {
			t.Errorf("%s and its hard link have two numbers", rel)
		}
	}
	for _, script := range []string{"find .", "cp -f a/file b/file && cat b/file", "ls -i a/in | awk '{print $1}' | uniq | wc -l"} {
		want := sh(t, dir, script)
		if got := sh(t, m.Path, script); got != want {
			t.Errorf("%s: %v, want %v", script, got, want)
		}
	}
}

// TestS1MountInside: what was mounted in the directory before the daemon started is there
// after a crash, with its locks, and is not kept when the mount has ended.
func TestS1MountInside(t *testing.T) {
	need(t, "root", "fuse")
	dir := staticDir(t)
	inside := []string{filepath.Join(dir, "sub"), filepath.Join(dir, "sub/deep")}
	for _, at := range inside {
		openDir(t, at)
		mustDo(t, unix.Mount("tmpfs", at, "tmpfs", 0, "size=1m"))
		t.Cleanup(func() {
			if err := unix.Unmount(at, 0); err != nil {
				t.Errorf("umount %s: %v", at, err)
				unix.Unmount(at, unix.MNT_DETACH)
			}
		})
		openDir(t, filepath.Join(at, "D"))
		mustDo(t, os.WriteFile(filepath.Join(at, "file"), []byte("content"), 0o644))
	}
	m := mountDir(t, dir, dir)
	a, rival := agent(t), agent(t)
	for _, at := range inside {
		a.must("creat", filepath.Join(at, "D/devserver"), "wronly,creat,excl")
	}
	before := m.Locks()
	for range 2 {
		m.restart(nil)
		for _, at := range inside {
			if b, err := os.ReadFile(filepath.Join(at, "file")); err != nil || string(b) != "content" {
				t.Errorf("%s/file after a crash: %q, %v", at, b, err)
			}
			if got := rival.Try("creat", filepath.Join(at, "D/x"), "wronly,creat,excl"); got != "EBUSY" {
				t.Errorf("somebody else makes a file in %s/D: %s", at, got)
			}
		}
		for name, row := range m.Locks() {
			if row.Token != before[name].Token {
				t.Errorf("the lock of %s has token %d, want %d", name, row.Token, before[name].Token)
			}
		}
	}
}

// TestM2MountedOn: what somebody has mounted on a directory of the mount stays there
// when content is destroyed, put aside and restored elsewhere, when a lock file goes
// with its owner, and when the daemon is replaced: also in another mount namespace.
func TestM2MountedOn(t *testing.T) {
	need(t, "root", "fuse")
	for _, policy := range []string{"destroy", "quarantine"} {
		t.Run(policy, func(t *testing.T) { testMountedOn(t, policy, 0) })
	}
	t.Run("elsewhere", func(t *testing.T) {
		ns, err := os.Open("/proc/self/ns/mnt")
		mustDo(t, err)
		defer ns.Close()
		const next = 0x8010b70b // NS_MNT_GET_NEXT
		switch fd, err := unix.IoctlRetInt(int(ns.Fd()), next); err {
		case nil:
			unix.Close(fd)
		case unix.ENOENT:
		default:
			t.Skipf("other mount namespaces are not to be seen here: %v", err)
		}
		testMountedOn(t, "quarantine", syscall.CLONE_NEWNS)
	})
}

// testMountedOn is TestM2MountedOn with what is mounted by a process with so many
// namespaces of its own.
func testMountedOn(t *testing.T, policy string, unshare uintptr) {
	m := mount(t, "--on-crash", policy)
	inside := m.At("T", "sub")
	mustDo(t, os.MkdirAll(m.Back("T", "sub"), 0o755))
	in := awaitAgent(t, func(sock string) {
		cmd := agentCmd(sock)
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unshare}
		startCmd(t, cmd)
	})
	t.Cleanup(func() { unix.Unmount(inside, unix.MNT_DETACH) })
	if got := in.Get("sh", "mount -t tmpfs -o size=1m none '"+inside+"'"); got != "0 " {
		t.Fatalf("mount: %s", got)
	}
	in.must("creat", filepath.Join(inside, "file"), "wronly,creat,excl")
	stays := func(after string) {
		t.Helper()
		tree(t, m.Path) // looks up each name
		if got := in.Try("stat", filepath.Join(inside, "file")); got != "ok" {
			t.Fatalf("after %s: %s", after, got)
		}
	}
	openDir(t, m.Back("E"))
	openDir(t, m.Back("F"))
	for _, dir := range []string{"D", "E"} { // which was made, and was there
		a := agent(t)
		if dir == "D" {
			a.must("mkdir", m.At(dir))
		}
		a.must("open", "lock", m.At(dir, "devserver"), "wronly,creat,excl")
		a.must("put", m.At(dir, "own"), "staged", "wronly,creat,excl")
		tree(t, m.At(dir))
		a.Kill()
		m.awaitFree(dir)
		stays("content of " + dir + " was cleared away")
		if _, err := os.Stat(m.At(dir, "own")); !os.IsNotExist(err) {
			t.Errorf("%s/own, which was cleared away: %v", dir, err)
		}
	}
	a := agent(t)
	a.must("creat", m.At("F/temp"), "wronly,creat,excl")
	a.must("rename", m.At("F/temp"), m.At("F/devserver"))
	a.Kill()
	m.awaitFree("F")
	stays("a lock file that was renamed went with its owner")
	if policy == "quarantine" {
		m.wantStatus(0, "", "quarantine", "--restore", m.quarantine()[0].ID, m.Path)
		stays("content was restored")
	}
	m.replace()
	stays("the daemon was replaced")
}

// TestR7LinkedGone: of what was cleared away the name is gone at once, also if the file
// has another one elsewhere.
func TestR7LinkedGone(t *testing.T) {
	m := mount(t, "--on-crash", "destroy")
	openDir(t, m.Back("D"))
	openDir(t, m.Back("E"))
	a := agent(t)
	a.must("open", "lock", m.At("D", "devserver"), "wronly,creat,excl")
	a.must("put", m.At("D", "own"), "staged", "wronly,creat,excl")
	a.must("link", m.At("D", "own"), m.At("E", "alias"))
	tree(t, m.Path)
	a.Kill()
	m.awaitFree("D")
	wantTree(t, m.Path, []string{"D/", "E/", "E/alias=staged"})
	if _, err := os.Stat(m.At("D", "own")); !os.IsNotExist(err) {
		t.Errorf("D/own, which was cleared away: %v", err)
	}
}
