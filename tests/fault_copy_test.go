//go:build linux

package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// detach takes the file system away, and its loop device with it; attach mounts
// it again, on the next device that is free.
func (i *image) detach() {
	i.t.Helper()
	mustDo(i.t, unix.Unmount(i.Dir, 0))
}

func (i *image) attach() {
	i.t.Helper()
	if r := run(i.t, "mount", "-o", "loop", i.file, i.Dir); r.Status != 0 {
		i.t.Fatal(r)
	}
}

// copy makes a copy of a detached image.
func (i *image) copy() *image {
	i.t.Helper()
	base := tempDir(i.t)
	c := &image{t: i.t, file: filepath.Join(base, "image"), Dir: filepath.Join(base, "fs")}
	mustDo(i.t, copyFile(i.file, c.file, 0o600))
	mustDo(i.t, os.Mkdir(c.Dir, 0o755))
	i.t.Cleanup(func() { unix.Unmount(c.Dir, unix.MNT_DETACH) })
	return c
}

func deviceOf(t *testing.T, path string) uint64 {
	t.Helper()
	var st unix.Stat_t
	mustDo(t, unix.Stat(path, &st))
	return st.Dev
}

const getFSUUID = 0x80111500 // FS_IOC_GETFSUUID

// needUUID skips where the kernel cannot tell ext4's UUID.
func needUUID(t *testing.T, dir string) {
	t.Helper()
	f, err := os.Open(dir)
	mustDo(t, err)
	defer f.Close()
	uuid := [24]byte{16}
	for _, request := range []uintptr{getFSUUID, 0x8008662c} { // EXT4_IOC_GETFSUUID
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(unsafe.Pointer(&uuid))); errno == 0 {
			return
		}
	}
	t.Skip("no UUID can be had here")
}

// TestFaultNoCommonUUID: the UUID is the same where the kernel has no common way to ask
// for it, as before Linux 6.9.
func TestFaultNoCommonUUID(t *testing.T) {
	needUUID(t, newImage(t, 8).static())
	const uuid = "5d0b1c3e-8a67-4f29-9b51-c2e4d7a06f13"
	t.Setenv(envForbid, fmt.Sprintf("%d:%d", unix.SYS_IOCTL, getFSUUID))
	for _, fs := range []struct {
		mib  int64
		mkfs []string
	}{
		{8, []string{"mkfs.ext4", "-q", "-F", "-U", uuid}},
		{512, []string{"mkfs.xfs", "-q", "-m", "uuid=" + uuid}},
		{128, []string{"mkfs.btrfs", "-q", "-U", uuid}},
	} {
		t.Run(fs.mkfs[0], func(t *testing.T) {
			need(t, "root", "fuse", fs.mkfs[0], "losetup")
			disk, err := imageBy(t, fs.mib, "loop", fs.mkfs...)
			if err != nil {
				t.Skip(err)
			}
			m := newMount(t, disk.static(), filepath.Join(tempDir(t), "mnt"))
			m.cmdBin = agentBin()
			m.serve()
			names, err := filepath.Glob(filepath.Join(m.State, strings.ReplaceAll(uuid, "-", "")+"-*.lock"))
			if len(names) != 1 || err != nil {
				t.Errorf("the state is not found by the UUID %s: %q", uuid, run(t, "ls", m.State).Out)
			}
		})
	}
}

// mountHeld serves dir with a lock of an agent on D, and a lease on L.
func mountHeld(t *testing.T, dir string) (m *Mount, a *Agent) {
	t.Helper()
	m = newMount(t, dir, filepath.Join(tempDir(t), "mnt"))
	m.serve()
	a = agent(t)
	a.must("mkdir", m.At("D"))
	mustDo(t, os.Mkdir(m.At("L"), 0o755))
	if s := m.Ctl("release L"); s != "ok" {
		t.Fatal(s)
	}
	if r := run(t, stagefsBin(), "acquire", "--client", "c", "--ttl", "600s", m.At("L")); r.Status != 0 {
		t.Fatal(r)
	}
	return m, a
}

// TestDoctorIdentity: a UUID of zeros identifies nothing, and doctor says so.
func TestDoctorIdentity(t *testing.T) {
	needUUID(t, newImage(t, 8).static())
	r := run(t, stagefsBin(), "doctor", newImage(t, 8, "-U", "clear").static())
	if !strings.Contains(r.Out, "the UUID of this file system is zero") || !strings.Contains(r.Out, "tune2fs -U random") {
		t.Errorf("doctor: %v", r)
	}
}

// TestFaultDeviceNumber: a file system that has another device number keeps its
// locks, leases and tokens, and one that has its former number gets none of them.
func TestFaultDeviceNumber(t *testing.T) {
	disk := newImage(t, 8)
	dir := disk.static()
	m, a := mountHeld(t, dir)
	before, device := m.Locks(), deviceOf(t, dir)
	m.stop()
	disk.detach()
	other := newImage(t, 8) // on the number that has become free
	disk.attach()
	if deviceOf(t, dir) == device || deviceOf(t, other.Dir) != device {
		t.Skip("the devices did not change places")
	}
	needUUID(t, dir)
	if r := run(t, stagefsBin(), "doctor", dir); !strings.Contains(r.Out, "by the UUID") {
		t.Errorf("doctor: %v", r)
	}
	m.start(nil)
	m.awaitReady()
	after := m.Locks()
	if len(after) != 2 || after["D"].Token != before["D"].Token || after["D"].Pid != a.Pid || after["L"].Client != "c" || after["L"].Token != before["L"].Token {
		t.Errorf("locks %+v, want %+v", after, before)
	}
	a.must("mkdir", m.At("E"))
	if token := m.Locks()["E"].Token; token <= before["L"].Token {
		t.Errorf("token %d after %d", token, before["L"].Token)
	}

	n := newMount(t, other.static(), filepath.Join(tempDir(t), "mnt"))
	n.State = m.State
	mustDo(t, os.Mkdir(filepath.Join(n.Dir, "D"), 0o777))
	mustDo(t, os.Chmod(filepath.Join(n.Dir, "D"), 0o777))
	mustDo(t, os.Mkdir(filepath.Join(n.Dir, "L"), 0o777))
	n.serve()
	if got := n.Locks(); len(got) != 0 {
		t.Errorf("another file system has the locks %+v", got)
	}
	stranger(t).must("creat", n.At("D", "x"), "wronly,creat")
}

// TestFaultOlderState: what an earlier stagefs has left under the device number
// is taken over.
func TestFaultOlderState(t *testing.T) {
	m := mountOver(t)
	a := agent(t)
	a.must("mkdir", m.At("D"))
	before := m.Locks()["D"]
	var st unix.Stat_t
	back, err := os.Open(m.State)
	mustDo(t, err)
	defer back.Close()
	var older string
	m.restart(func() {
		mustDo(t, unix.Unmount(m.Path, unix.MNT_DETACH))
		mustDo(t, unix.Stat(m.Dir, &st))
		older = fmt.Sprintf("%x-%x-%x", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino)
		names, err := back.Readdirnames(0)
		mustDo(t, err)
		for _, name := range names {
			_, rest, _ := strings.Cut(name, ".")
			if rest == "place" {
				mustDo(t, os.Remove(filepath.Join(m.State, name)))
				continue
			}
			mustDo(t, os.Rename(filepath.Join(m.State, name), filepath.Join(m.State, older+"."+rest)))
		}
	})
	for range 2 {
		if row := m.Locks()["D"]; row.Token != before.Token || row.Pid != a.Pid {
			t.Errorf("D: %+v, want %+v", row, before)
		}
		m.restart(nil)
	}
	a.must("mkdir", m.At("E"))
	if token := m.Locks()["E"].Token; token <= before.Token {
		t.Errorf("token %d after %d", token, before.Token)
	}
}

// newTwins returns an image with a static directory dir, and a copy of it; both are mounted.
func newTwins(t *testing.T) (disk, twin *image, dir string) {
	t.Helper()
	disk = newImage(t, 8)
	dir = disk.static()
	disk.detach()
	twin = disk.copy()
	disk.attach()
	twin.attach()
	needUUID(t, dir)
	return disk, twin, dir
}

// TestFaultCopy: of two copies of a file system that are mounted at a time, the
// second is refused the state of the first, also while nobody serves that, and
// says why.
func TestFaultCopy(t *testing.T) {
	_, twin, dir := newTwins(t)
	m, _ := mountHeld(t, dir)
	before := m.Locks()
	copied := filepath.Join(twin.Dir, "static")
	mustDo(t, os.Mkdir(filepath.Join(copied, "D"), 0o777))
	mustDo(t, os.Mkdir(filepath.Join(copied, "L"), 0o777))
	refused := func(what string) {
		t.Helper()
		r := run(t, "timeout", "8", stagefsBin(), "mount", "--state-dir", m.State, copied)
		if r.Status != 75 || !strings.Contains(r.Err, "is on a copy of the file system of "+dir) || !strings.Contains(r.Err, "--state-dir") {
			t.Fatalf("the copy, %s: %v", what, r)
		}
	}
	refused("while the other is served")
	m.kill()
	refused("while the other's daemon is dead")
	m.start(nil)
	m.awaitReady()
	for name, row := range m.Locks() {
		if row.Token != before[name].Token {
			t.Errorf("%s: %+v, want %+v", name, row, before[name])
		}
	}
	m.stop()
	refused("while the other is mounted")

	n := newMount(t, copied, copied)
	n.serve()
	if got := n.Locks(); len(got) != 0 {
		t.Errorf("with a state of its own, the copy has the locks %+v", got)
	}
	m.start(nil)
	m.awaitReady()
	if got := m.Locks(); len(got) != 2 || got["L"].Token != before["L"].Token {
		t.Errorf("locks %+v, want %+v", got, before)
	}
}
