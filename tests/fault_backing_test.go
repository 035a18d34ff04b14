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

// TestFaultImmutable: a dead owner's lock file that may not be removed does not keep its lock,
// and goes as soon as it may be, whatever becomes of the daemon and of the directory's name
// meanwhile.
func TestFaultImmutable(t *testing.T) {
	need(t, "chattr", "root", "fuse")
	rename := func(m *Mount) { agent(m.t).must("rename", m.At("D"), m.At("E")) }
	for name, meanwhile := range map[string]func(m *Mount){
		"served on":             func(*Mount) {},
		"restarted":             func(m *Mount) { m.restart(nil) },
		"renamed and restarted": func(m *Mount) { rename(m); m.restart(nil); m.restart(nil) },
		"upgraded":              func(m *Mount) { m.replace(); rename(m); m.restart(nil) },
		"unmounted":             func(m *Mount) { m.unmounted(func() {}) },
	} {
		t.Run(name, func(t *testing.T) {
			m := mount(t)
			openDir(t, m.Back("D"))
			owner, dirOwner := agent(t), agent(t)
			owner.must("creat", m.At("D/devserver"), "wronly,creat,excl")
			dirOwner.must("mkdir", m.At("D2"))
			dirOwner.must("mkdir", m.At("D2/devserver"))
			m.setImmutable(m.Back("D/devserver"), m.Back("D2/devserver"))
			owner.Kill()
			dirOwner.Kill()
			m.awaitFree("D")
			m.awaitFree("D2")
			meanwhile(m)
			files, err := filepath.Glob(m.Back("*/devserver"))
			mustDo(t, err)
			m.awaitOrphans(filepath.Base(filepath.Dir(files[0]))+"/devserver", filepath.Base(filepath.Dir(files[1]))+"/devserver")
			m.clearImmutable(files...)
			eventually(t, "the lock files are gone", func() bool {
				mustDo(t, os.Mkdir(m.At("new"), 0o755)) // whatever changes, it is tried again
				mustDo(t, os.Remove(m.At("new")))
				return !exists(files[0]) && !exists(files[1])
			})
			m.awaitOrphans()
		})
	}
}

// setImmutable is chattr +i, and -i in the end.
func (m *Mount) setImmutable(files ...string) {
	m.t.Helper()
	if r := startCmd(m.t, exec.Command("chattr", append([]string{"+i"}, files...)...)).Wait(); r.Status != 0 {
		m.t.Skipf("chattr +i: %v", r)
	}
	m.t.Cleanup(func() { exec.Command("chattr", "-R", "-f", "-i", m.Back()).Run() })
}

func (m *Mount) clearImmutable(files ...string) {
	m.t.Helper()
	if r := startCmd(m.t, exec.Command("chattr", append([]string{"-i"}, files...)...)).Wait(); r.Status != 0 {
		m.t.Fatalf("chattr -i: %v", r)
	}
}

// TestFaultImmutableCandidate: nor is a dead process's candidate forgotten, also if the
// daemon is killed meanwhile, before that one dies or after that, and if the directory was
// renamed.
func TestFaultImmutableCandidate(t *testing.T) {
	need(t, "chattr", "root", "fuse")
	m := mount(t)
	openDir(t, m.Back("D"))
	early, late := agent(t), agent(t)
	var files []string
	for _, maker := range []*Agent{early, late} {
		name := candidateName(t, maker)
		files = append(files, m.Back("E", name))
		maker.must("creat", m.At("D", name), "wronly,creat,excl")
	}
	agent(t).must("rename", m.At("D"), m.At("E"))
	m.setImmutable(files...)
	early.Kill()
	eventually(t, "it is tried to remove the first", func() bool { return strings.Contains(m.Log(), "cannot remove a dead process's candidate") })
	agent(t).must("rename", m.At("E"), m.At("F"))
	for i, f := range files {
		files[i] = m.Back("F", filepath.Base(f))
	}
	m.restart(late.Kill)
	m.restart(nil)
	m.clearImmutable(files...)
	eventually(t, "the candidates are gone", func() bool { return len(readNames(t, m.Back("F"))) == 0 })
}

// TestR6FaultImmutable: a break, or a release, that could remove one of two lock files alone
// leaves a lock that ends with the other one (R1).
func TestR6FaultImmutable(t *testing.T) {
	need(t, "chattr", "root", "fuse")
	m := mount(t)
	for _, command := range [][]string{{"break", "--why", "it hangs"}, {"release"}} {
		for i, files := range [][]string{{"devserver", "devserver.lock"}, {"devserver.lock", "devserver"}} {
			dir := command[0] + itoa(i)
			openDir(t, m.Back(dir))
			owner := agent(t)
			for _, name := range files {
				owner.must("creat", m.At(dir, name), "wronly,creat,excl")
			}
			chattr := func(flag string) {
				t.Helper()
				if r := startCmd(t, exec.Command("chattr", flag, m.Back(dir, files[1]))).Wait(); r.Status != 0 {
					t.Skipf("chattr %s: %v", flag, r)
				}
			}
			chattr("+i")
			t.Cleanup(func() { exec.Command("chattr", "-i", m.Back(dir, files[1])).Run() })
			if r := runCmdAs(t, owner, append(command, m.At(dir))...); !strings.HasPrefix(r, "77 ") || !strings.Contains(r, "lock file "+files[1]+": operation not permitted") {
				t.Errorf("stagefs %s: %s, want status 77, and which lock file is in the way", command[0], r)
			}
			m.wantOwner(dir, owner.Pid)
			if exists(m.Back(dir, files[0])) {
				t.Errorf("%s is there still", files[0])
			}
			chattr("-i")
			owner.must("unlink", m.At(dir, files[1]))
			m.wantFree(dir)
		}
	}
}

// TestFaultReadOnly: while the backing is read-only, whoever changes something
// hears EROFS, also to take a lock; what is held stays held, and a lock that
// ends is ended although its file cannot be removed. That file is an orphan
// then, which goes as soon as the backing can be written again (R4).
func TestFaultReadOnly(t *testing.T) {
	disk := newImage(t, 8)
	m := disk.mount()
	openDir(t, m.Back("D"))
	openDir(t, m.Back("E"))
	openDir(t, m.Back("F"))
	openDir(t, m.Back("C"))
	holder, dies, a, rival := agent(t), agent(t), agent(t), stranger(t)
	candidate := candidateNames(t, dies.Pid)["lockfile"]
	dies.must("put", m.At("C", candidate), "", "creat")
	holder.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	holder.must("put", m.At("D/f"), "content", "creat")
	dies.must("creat", m.At("E/devserver"), "wronly,creat,excl")
	disk.remount("ro")

	for _, call := range [][]string{
		{"put", m.At("D/f"), "x", ""},
		{"put", m.At("D/new"), "x", "creat"},
		{"unlink", m.At("D/f")},
		{"unlink", m.At("D/devserver")},
		{"rename", m.At("D/f"), m.At("D/g")},
		{"chmod", m.At("D/f"), "0600"},
		{"utimens", m.At("D/f")},
		{"truncate", m.At("D/f"), "0"},
		{"setxattr", m.At("D/f"), "user.x", "y"},
	} {
		holder.want("EROFS", call...)
	}
	m.wantOwner("D", holder.Pid)
	for way, call := range lockWays(m.At("F/devserver")) {
		if way != "link" && way != "rename" {
			a.want("EROFS", call[0]...)
			m.wantFree("F")
		}
	}
	a.want("EROFS", "mkdir", m.At("G"))
	rival.want("EBUSY|EROFS", "put", m.At("D/f"), "x", "")
	rival.want("ok", "read", m.At("D/f"))

	dies.Kill()
	m.awaitFree("E")
	if s := m.Ctl("break D cannot be released"); s != "EROFS" {
		t.Errorf("break of a lock whose file cannot be removed = %s, want EROFS", s)
	}
	m.wantOwner("D", holder.Pid)
	orphans := map[string]bool{}
	for _, o := range m.Listing().Orphans {
		orphans[o.Path] = true
	}
	disk.remount("rw")
	if len(orphans) != 1 || !orphans["E/devserver"] {
		t.Errorf("orphans %v, want the dead owner's lock file, which could not be removed", orphans)
	}
	a.must("put", m.At("E/g"), "x", "creat")
	for _, left := range []string{"E/devserver", "C/" + candidate} {
		eventually(t, left+" is removed", func() bool { return !exists(m.Back(left)) })
		rival.want("ENOENT", "stat", m.At(left))
	}
	if o := m.Listing().Orphans; len(o) != 0 {
		t.Errorf("orphans %v, want none", o)
	}
	holder.must("put", m.At("D/f"), "more", "trunc")
	holder.must("unlink", m.At("D/devserver"))
	for _, dir := range []string{"D", "E", "F"} {
		a.must("creat", m.At(dir, "devserver"), "wronly,creat,excl")
		m.wantOwner(dir, a.Pid)
	}
}

// TestFaultEIO: when the backing's disk fails, its users hear EIO; nobody hangs,
// locks are kept, end with their owners, and the mount can be unmounted.
func TestFaultEIO(t *testing.T) {
	for _, opts := range [][]string{nil, {"--no-passthrough"}} {
		t.Run(strings.Join(opts, ""), func(t *testing.T) {
			disk := newImage(t, 8)
			m := disk.mount(opts...)
			for _, dir := range []string{"D", "E", "F"} {
				openDir(t, m.Back(dir))
			}
			holder, dies, waits, a := agent(t), agent(t), locker(t), agent(t)
			holder.must("creat", m.At("D/devserver"), "wronly,creat,excl")
			holder.must("put", m.At("D/f"), "content", "creat")
			holder.must("open", "h", m.At("D/f"), "rdwr")
			dies.must("open", "l", m.At("E/devserver"), "rdwr,creat")
			dies.must("flock", "l")
			waits.must("open", "l", m.At("E/devserver"), "rdwr")
			turn := waits.Start("turn", "l", "flock", "ex")
			m.awaitWaiters("E", 1)
			disk.breakDown()

			holder.want("EIO", "write", "h", "x")
			holder.want("EIO", "put", m.At("D/new"), "x", "creat")
			holder.want("EIO", "unlink", m.At("D/f"))
			holder.want("EIO", "rename", m.At("D/f"), m.At("D/g"))
			holder.want("EIO", "chmod", m.At("D/f"), "0600")
			for way, call := range lockWays(m.At("F/devserver")) {
				if way != "link" && way != "rename" {
					a.want("EIO", call[0]...)
					m.wantFree("F")
				}
			}
			a.want("EIO", "mkdir", m.At("G"))
			m.wantFree("G")
			m.wantOwner("D", holder.Pid)
			stranger(t).want("EBUSY|EIO", "put", m.At("D/f"), "x", "")
			dies.Kill()
			if got := turn(); got != "ok" && got != "EIO" {
				t.Errorf("who waited = %s", got)
			}
			waits.Try("close", "l")
			m.awaitFree("E")
			holder.Try("close", "h")
			holder.Kill()
			m.awaitFree("D")
		})
	}
}

// TestFaultBadBlocks: a disk that cannot be read in places gives EIO for just
// what lies there.
func TestFaultBadBlocks(t *testing.T) {
	disk := newImage(t, 16)
	m := disk.mount()
	holder := agent(t)
	holder.must("mkdir", m.At("D"))
	holder.must("put", m.At("D/first"), strings.Repeat("x", 4096), "creat")
	holder.must("put", m.At("D/f"), strings.Repeat("x", 4<<10), "creat")
	mustDo(t, os.WriteFile(m.Back("D/big"), make([]byte, 6<<20), 0o666))
	unix.Sync()
	// The file's blocks lie behind the end of the disk then, but for those of
	// the file system itself, at its beginning.
	whole, err := os.Stat(disk.file)
	mustDo(t, err)
	mustDo(t, os.Truncate(disk.file, 1<<20))
	dropCaches(t, m.Back("D/big"))
	holder.want("EIO", "read", m.At("D/big"))
	m.wantOwner("D", holder.Pid)
	mustDo(t, os.Truncate(disk.file, whole.Size()))
	stranger(t).want("EBUSY", "put", m.At("D/new"), "x", "creat")
	holder.want("ok", "read", m.At("D/big"))
	holder.must("mkdir", m.At("D/sub"))
}

// dropCaches makes the next read of a file go to the disk.
func dropCaches(t *testing.T, path string) {
	t.Helper()
	f, err := os.Open(path)
	mustDo(t, err)
	defer f.Close()
	mustDo(t, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
}

// TestFaultVanished: the content of the static directory is removed below the
// mount, and then the file system it is on is detached. What is gone is ENOENT,
// locks on it end with their owners, the rest goes on, and so does a mount
// whose backing has no name any more.
func TestFaultVanished(t *testing.T) {
	disk := newImage(t, 8)
	m := disk.mount()
	a, b := agent(t), agent(t)
	a.must("mkdir", m.At("D"))
	a.must("put", m.At("D/devserver"), "", "creat,excl")
	a.must("open", "h", m.At("D/f"), "rdwr,creat")
	b.must("mkdir", m.At("E"))
	entries, err := os.ReadDir(m.Dir)
	mustDo(t, err)
	for _, e := range entries {
		mustDo(t, os.RemoveAll(m.Back(e.Name())))
	}
	a.must("write", "h", "x")
	a.want("ENOENT", "put", m.At("D/new"), "", "creat")
	a.want("ENOENT", "mkdir", m.At("D/sub"))
	a.Try("close", "h")
	b.want("ENOENT", "put", m.At("E/new"), "", "creat")
	b.must("mkdir", m.At("F"))
	m.wantOwner("F", b.Pid)
	a.Kill()
	m.awaitFree("D")
	c := agent(t)
	eventually(t, "the name is free again", func() bool { return c.Try("mkdir", m.At("D")) == "ok" })
	m.wantOwner("D", c.Pid)

	mustDo(t, unix.Unmount(disk.Dir, unix.MNT_DETACH))
	c.must("put", m.At("D/f"), "content", "creat")
	stranger(t).want("EBUSY", "put", m.At("D/f"), "x", "")
	c.must("rename", m.At("D"), m.At("G"))
	m.wantOwner("G", c.Pid)
	if got := c.Get("read", m.At("G/f")); got != "content" {
		t.Errorf("read = %q", got)
	}
	b.Kill()
	m.awaitFree("F")
}

// TestFaultRootRemoved: the static directory itself is removed below the mount.
func TestFaultRootRemoved(t *testing.T) {
	m := mount(t)
	a := agent(t)
	a.must("mkdir", m.At("D"))
	mustDo(t, os.RemoveAll(m.Dir))
	a.want("ENOENT", "mkdir", m.At("E"))
	a.want("ENOENT", "put", m.At("D/new"), "", "creat")
	a.want("ENOENT", "put", m.At("new"), "", "creat")
	a.Kill()
	m.awaitFree("D")
	if r := run(t, stagefsBin(), "umount", m.Path); r.Status != 0 {
		t.Errorf("stagefs umount: %v", r)
	}
	eventually(t, "the daemon ends", m.dead)
}

// TestFaultParentRenamed: the parent of the mountpoint gets another name: the
// mount is used, found and unmounted by that; and a daemon that is started for
// the directory under its new name has the state of the one before, which is
// found by the backing's identity (S1).
func TestFaultParentRenamed(t *testing.T) {
	parent := filepath.Join(tempDir(t), "old")
	mustDo(t, os.Mkdir(parent, 0o755))
	dir := filepath.Join(parent, "static")
	openDir(t, dir)
	m := mountDir(t, dir, dir)
	a, rival := agent(t), stranger(t)
	a.must("mkdir", m.At("D"))
	token := m.Locks()["D"].Token
	renamed := filepath.Join(filepath.Dir(parent), "new")
	mustDo(t, os.Rename(parent, renamed))
	m.Dir, m.Path = filepath.Join(renamed, "static"), filepath.Join(renamed, "static")

	a.must("put", m.At("D/f"), "content", "creat")
	rival.want("EBUSY", "put", m.At("D/f"), "x", "")
	rival.want("EEXIST", "creat", m.At("D/devserver"), "wronly,creat,excl")
	for _, command := range []string{"locks", "why", "status"} {
		r := run(t, stagefsBin(), command, m.At("D"))
		if command != "status" && r.Status != 0 {
			t.Errorf("stagefs %s: %v", command, r)
		}
	}
	if r := run(t, stagefsBin(), "locks", m.Path); r.Status != 0 || !strings.Contains(r.Out, itoa(a.Pid)) {
		t.Errorf("stagefs locks: %v, want pid %d", r, a.Pid)
	}
	// One daemon a backing, by whatever name.
	r := run(t, stagefsBin(), "mount", "--state-dir", m.State, m.Dir)
	if r.Status == 0 || !strings.Contains(r.Err, itoa(m.cmd.Process.Pid)) {
		t.Errorf("a second daemon: %v, want a refusal that names pid %d", r, m.cmd.Process.Pid)
	}
	m.restart(nil)
	if row := m.Locks()["D"]; row.Token != token || row.Pid != a.Pid {
		t.Errorf("after kill -9 and a start under the new name: token %d of pid %d, want %d of %d", row.Token, row.Pid, token, a.Pid)
	}
	if r := run(t, stagefsBin(), "umount", m.Path); r.Status != 0 {
		t.Errorf("stagefs umount: %v", r)
	}
	eventually(t, "the daemon ends", m.dead)
	m.start(nil)
	m.awaitReady()
	if row := m.Locks()["D"]; row.Token != token || row.Pid != a.Pid {
		t.Errorf("after an unmount: token %d of pid %d, want %d of %d", row.Token, row.Pid, token, a.Pid)
	}
	// And again while mounted, ended by a signal this time.
	mustDo(t, os.Rename(renamed, parent))
	m.Dir, m.Path = dir, dir
	a.must("put", m.At("D/g"), "content", "creat")
	mustDo(t, m.cmd.Process.Signal(syscall.SIGTERM))
	eventually(t, "the daemon ends", m.dead)
	if mountedAt(dir) {
		t.Error("still mounted after SIGTERM under another name")
	}
}
