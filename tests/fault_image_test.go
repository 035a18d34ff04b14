//go:build linux

package tests

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// An image is a small ext4 file system of the test's own, in a file: what goes
// wrong with it concerns nothing else on the machine.
type image struct {
	t    *testing.T
	file string
	Dir  string // where it is mounted
	hogs []string
}

// newImage makes one of that many MiB, with further options for mkfs.ext4.
func newImage(t *testing.T, mib int64, opts ...string) *image {
	t.Helper()
	need(t, "root", "fuse", "mkfs.ext4", "losetup")
	base := tempDir(t)
	i := &image{t: t, file: filepath.Join(base, "image"), Dir: filepath.Join(base, "fs")}
	mustDo(t, os.WriteFile(i.file, nil, 0o600))
	mustDo(t, os.Truncate(i.file, mib<<20))
	if r := run(t, "mkfs.ext4", append(append([]string{"-q", "-F", "-m", "0"}, opts...), i.file)...); r.Status != 0 {
		t.Fatalf("mkfs.ext4: %v", r)
	}
	mustDo(t, os.Mkdir(i.Dir, 0o755))
	if r := run(t, "mount", "-o", "loop", i.file, i.Dir); r.Status != 0 {
		t.Skipf("no file system in a file can be mounted here: %v", r)
	}
	t.Cleanup(func() { unix.Unmount(i.Dir, unix.MNT_DETACH) })
	return i
}

// static makes a static directory in the image.
func (i *image) static() string {
	i.t.Helper()
	dir := filepath.Join(i.Dir, "static")
	openDir(i.t, dir)
	return dir
}

// mount serves the static directory elsewhere.
func (i *image) mount(opts ...string) *Mount {
	i.t.Helper()
	return mountDir(i.t, i.static(), filepath.Join(tempDir(i.t), "mnt"), opts...)
}

// fill leaves not one free block, and fillNodes not one free inode.
func (i *image) fill() {
	i.t.Helper()
	path := filepath.Join(i.Dir, "hog")
	f, err := os.Create(path)
	mustDo(i.t, err)
	defer f.Close()
	i.hogs = append(i.hogs, path)
	for at, size := int64(0), int64(1<<20); size >= 1024; {
		err := unix.Fallocate(int(f.Fd()), 0, at, size)
		switch {
		case err == nil:
			at += size
		case errors.Is(err, unix.ENOSPC):
			size /= 2
		default:
			i.t.Fatalf("filling up: %v", err)
		}
	}
	mustDo(i.t, f.Sync())
}

func (i *image) fillNodes() {
	i.t.Helper()
	dir := filepath.Join(i.Dir, "hogs")
	mustDo(i.t, os.MkdirAll(dir, 0o700))
	i.hogs = append(i.hogs, dir)
	for n := 0; ; n++ {
		err := unix.Mknod(filepath.Join(dir, itoa(n)), unix.S_IFREG|0o600, 0)
		if errors.Is(err, unix.ENOSPC) {
			return
		}
		mustDo(i.t, err)
	}
}

// free makes room again.
func (i *image) free() {
	i.t.Helper()
	for _, hog := range i.hogs {
		mustDo(i.t, os.RemoveAll(hog))
	}
	i.hogs = nil
	unix.Sync() // what was freed counts from the next commit on
}

// remount changes its options, such as "ro".
func (i *image) remount(how string) {
	i.t.Helper()
	if r := run(i.t, "mount", "-o", "remount,"+how, i.Dir); r.Status != 0 {
		i.t.Fatalf("mount -o remount,%s: %v", how, r)
	}
}

// breakDown makes every access to its disk fail with EIO from now on, as ext4
// does by itself when it finds its disk broken.
func (i *image) breakDown() {
	i.t.Helper()
	const (
		ext4Shutdown = 0x8004587d // EXT4_IOC_SHUTDOWN
		noLogFlush   = 2
	)
	f, err := os.Open(i.Dir)
	mustDo(i.t, err)
	defer f.Close()
	mustDo(i.t, unix.IoctlSetPointerInt(int(f.Fd()), ext4Shutdown, noLogFlush))
}
