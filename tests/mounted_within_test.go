//go:build linux

package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// mountWithin mounts something in a static directory that is not served yet.
func mountWithin(t *testing.T, at, fstype string, flags uintptr) {
	t.Helper()
	openDir(t, at)
	mustDo(t, unix.Mount("none", at, fstype, flags, ""))
	t.Cleanup(func() { unix.Unmount(at, unix.MNT_DETACH) })
}

// TestM2WithinRights: what is mounted in the directory with nosuid and nodev gives nobody
// more rights through the mount, also after a crash; unless the mount is to have them.
func TestM2WithinRights(t *testing.T) {
	need(t, "root", "fuse", "id")
	dir := staticDir(t)
	within := filepath.Join(dir, "within")
	mountWithin(t, within, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV)
	openDir(t, filepath.Join(dir, "beside"))
	id, err := exec.LookPath("id")
	mustDo(t, err)
	program, err := os.ReadFile(id)
	mustDo(t, err)
	writeProgram(t, filepath.Join(within, "id"), program)
	mustDo(t, os.Chmod(filepath.Join(within, "id"), 0o755|os.ModeSetuid))
	mustDo(t, unix.Mknod(filepath.Join(within, "null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	mustDo(t, os.Chmod(filepath.Join(within, "null"), 0o666))
	a := stranger(t)
	check := func(m *Mount, when, uid, opens string) {
		t.Helper()
		if got := a.Get("sh", m.At("within/id")+" -u"); got != "0 "+uid+"\n" {
			t.Errorf("%s: a set-user-ID program runs as %q, want %s", when, got, uid)
		}
		if got := a.Try("open", "h", m.At("within/null"), "rdonly"); got != opens {
			t.Errorf("%s: open of a device: %s, want %s", when, got, opens)
		}
		a.Try("close", "h")
	}
	m := mountDir(t, dir, dir, "--supervise")
	check(m, "at first", itoa(nobody), "EACCES")
	old := m.daemon()
	mustDo(t, unix.Kill(old, unix.SIGKILL))
	m.awaitNext(old)
	check(m, "after a crash", itoa(nobody), "EACCES")
	if n := strings.Count(m.Log(), "the option nosuid, as "+within); n != 2 {
		t.Errorf("each daemon is to say that the mount has nosuid; both say:\n%s", m.Log())
	}
	m.stop()
	check(mountDir(t, dir, dir, "-o", "suid,dev"), "with -o suid,dev", "0", "ok")
}

// TestM2WithinKernelFS: nobody comes by the daemon's rights to what the kernel has
// mounted in the directory, where it goes by who opens something.
func TestM2WithinKernelFS(t *testing.T) {
	need(t, "root", "fuse")
	dir := staticDir(t)
	proc, groups := filepath.Join(dir, "proc"), filepath.Join(dir, "groups")
	mountWithin(t, proc, "proc", unix.MS_NOSUID)
	openDir(t, groups)
	if unix.Mount("none", groups, "cgroup2", unix.MS_NOSUID, "") == nil {
		t.Cleanup(func() { unix.Unmount(groups, unix.MNT_DETACH) })
	}
	m := mountDir(t, dir, dir)
	if slices.Contains(mountedOptions(t, dir), "nosuid") {
		t.Error("the mount has nosuid")
	}
	a := stranger(t)
	self := "proc/" + itoa(a.Pid)
	mine := a.Child()
	mine.want("EACCES", "open", "h", m.At(self, "oom_score_adj"), "wronly")
	mine.want("EACCES", "readdir", m.At("proc"))
	mine.want("EACCES", "read", m.At("proc/version"))
	if mountLines(t, groups) != nil {
		mine.want("EACCES", "read", m.At("groups/cgroup.procs"))
	}
	if got := mine.Get("readdir", m.Path); !strings.Contains(got, "proc") {
		t.Errorf("in the root is %q", got)
	}
	if log := m.Log(); !strings.Contains(log, proc+" cannot be entered") {
		t.Errorf("said %q", log)
	}
}

// TestM2WithinRoom: statfs(2) of a directory on which another file system is mounted below
// tells of that one.
func TestM2WithinRoom(t *testing.T) {
	need(t, "root", "fuse")
	dir := staticDir(t)
	within := filepath.Join(dir, "within")
	openDir(t, within)
	mustDo(t, unix.Mount("none", within, "tmpfs", 0, "size=5m"))
	t.Cleanup(func() { unix.Unmount(within, unix.MNT_DETACH) })
	openFile(t, filepath.Join(within, "file"), "x")
	blocks := func(path string) uint64 {
		var st unix.Statfs_t
		mustDo(t, unix.Statfs(path, &st))
		return st.Blocks
	}
	paths := []string{dir, within, filepath.Join(within, "file")}
	var want []uint64
	for _, path := range paths {
		want = append(want, blocks(path))
	}
	mountDir(t, dir, dir)
	for i, path := range paths {
		if got := blocks(path); got != want[i] {
			t.Errorf("%s has %d blocks, want %d", path, got, want[i])
		}
	}
}

// TestR7Within: what a dead owner has made on another file system is kept, and nothing else of
// it; where that is all, nothing is listed in quarantine.
func TestR7Within(t *testing.T) {
	need(t, "root", "fuse")
	for _, policy := range []string{"destroy", "quarantine"} {
		for _, beside := range []bool{true, false} {
			t.Run(policy+map[bool]string{true: ", with more"}[beside], func(t *testing.T) {
				dir := staticDir(t)
				openDir(t, filepath.Join(dir, "old"))
				mountWithin(t, filepath.Join(dir, "old/within"), "tmpfs", 0)
				mustDo(t, os.Chmod(filepath.Join(dir, "old/within"), 0o777))
				m := mountDir(t, dir, dir, "--on-crash", policy)
				a := agent(t)
				a.must("creat", m.At("old/devserver"), "wronly,creat,excl")
				a.must("put", m.At("old/within/f"), "1", "wronly,creat")
				for i := range 12 {
					if beside {
						a.must("mkdir", m.At("old", itoa(i)))
					}
					a.must("put", m.At("old/within", itoa(i)), "1", "wronly,creat")
				}
				a.Kill()
				m.awaitFree("old")
				if got := readNames(t, m.At("old")); !slices.Equal(got, []string{"within"}) {
					t.Errorf("in the directory: %q, want only what another file system is mounted on", got)
				}
				if got := readNames(t, m.At("old/within")); len(got) != 13 {
					t.Errorf("on the other file system: %q, want all 13 files", got)
				}
				want := 0
				if beside && policy == "quarantine" {
					want = 1
				}
				if all := m.quarantine(); len(all) != want {
					t.Errorf("in quarantine: %+v, want %d", all, want)
				}
				if !strings.Contains(m.Log(), "within") {
					t.Errorf("the log does not name what is kept:\n%s", m.Log())
				}
			})
		}
	}
}

// TestR7RestoreWithin: of what another file system is in the way of, a restore says so; it is
// not lost, and can be restored without that.
func TestR7RestoreWithin(t *testing.T) {
	need(t, "root", "fuse")
	dir := staticDir(t)
	openDir(t, filepath.Join(dir, "old"))
	openDir(t, filepath.Join(dir, "old/within"))
	m := mountDir(t, dir, dir, "--on-crash", "quarantine")
	a := agent(t)
	a.must("creat", m.At("old/devserver"), "wronly,creat,excl")
	a.must("put", m.At("old/within/f"), "valuable", "wronly,creat")
	a.Kill()
	m.awaitFree("old")
	within := m.At("old/within")
	m.unmounted(func() { mountWithin(t, within, "tmpfs", 0) }, "--on-crash", "quarantine")
	m.wantStatus(73, "old/within is on another file system; some of it may be back", "quarantine", "--restore", "1", m.Path)
	m.unmounted(func() { mustDo(t, unix.Unmount(within, 0)) }, "--on-crash", "quarantine")
	m.wantStatus(0, "", "quarantine", "--restore", "1", m.Path)
	wantTree(t, m.At("old"), []string{"within/", "within/f=valuable"})
}

// TestM2WithinReadOnly: where another directory of the same file system is bound into this
// one, read-only, nobody opens a file for writing, and hears why.
func TestM2WithinReadOnly(t *testing.T) {
	need(t, "root", "fuse")
	dir, other := staticDir(t), staticDir(t)
	within := filepath.Join(dir, "within")
	openDir(t, within)
	openFile(t, filepath.Join(other, "file"), "x")
	mustDo(t, unix.Mount(other, within, "", unix.MS_BIND, ""))
	t.Cleanup(func() { unix.Unmount(within, unix.MNT_DETACH) })
	mustDo(t, unix.Mount("", within, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	m := mountDir(t, dir, dir)
	a := stranger(t)
	for _, reader := range []string{"nobody", "somebody"} {
		for _, flags := range []string{"wronly", "rdwr", "wronly,append", "rdwr,trunc", "wronly,creat"} {
			if got := a.Try("open", "h", m.At("within/file"), flags); got != "EROFS" {
				t.Errorf("while %s reads it, open with %s: %s, want EROFS", reader, flags, got)
			}
		}
		a.must("open", "reads", m.At("within/file"), "rdonly")
	}
}

// TestM2WithinImmutable: an immutable file on a file system that is read-only, as all of
// erofs pass for, is refused as the file system is.
func TestM2WithinImmutable(t *testing.T) {
	need(t, "chattr")
	disk := newImage(t, 8)
	openFile(t, filepath.Join(disk.Dir, "file"), "x")
	if r := run(t, "chattr", "+i", filepath.Join(disk.Dir, "file")); r.Status != 0 {
		t.Skip(r)
	}
	if r := run(t, "mount", "-o", "remount,ro", disk.Dir); r.Status != 0 {
		t.Skip(r)
	}
	dir := staticDir(t)
	within := filepath.Join(dir, "within")
	openDir(t, within)
	mustDo(t, unix.Mount(disk.Dir, within, "", unix.MS_BIND, ""))
	t.Cleanup(func() { unix.Unmount(within, unix.MNT_DETACH) })
	m := mountDir(t, dir, dir+".mnt")
	for _, a := range []*Agent{agent(t), stranger(t)} {
		for _, flags := range []string{"wronly", "rdwr", "wronly,append", "rdwr,trunc", "wronly,creat"} {
			want := a.Try("open", "h", m.Back("within/file"), flags)
			if got := a.Try("open", "h", m.At("within/file"), flags); got != want {
				t.Errorf("open with %s: %s, want %s", flags, got, want)
			}
		}
		a.must("open", "reads", m.At("within/file"), "rdonly")
	}
}
