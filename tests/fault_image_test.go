//go:build linux

package tests

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
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
	i, err := tryImage(t, mib, opts...)
	if err != nil {
		t.Skip(err)
	}
	return i
}

// tryImage is newImage for who can do without one.
func tryImage(t *testing.T, mib int64, opts ...string) (*image, error) {
	t.Helper()
	return imageBy(t, mib, "loop", append([]string{"mkfs.ext4", "-q", "-F", "-m", "0"}, opts...)...)
}

// imageBy is tryImage of what a program makes, mounted with options. It may be that this
// program is not there, or that the kernel has no such file system.
func imageBy(t *testing.T, mib int64, options string, mkfs ...string) (*image, error) {
	t.Helper()
	base := tempDir(t)
	i := &image{t: t, file: filepath.Join(base, "image"), Dir: filepath.Join(base, "fs")}
	mustDo(t, os.WriteFile(i.file, nil, 0o600))
	mustDo(t, os.Truncate(i.file, mib<<20))
	mustDo(t, os.Mkdir(i.Dir, 0o755))
	argv := append(mkfs, i.file)
	out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
	if strings.Contains(string(out), "cannot check mount status") {
		// btrfs's asks for the source of each mount on the machine, and wants none that
		// lets nobody in, or is dead, as another test's may be: so it is to see no mount.
		const blind = `mount -t tmpfs none /proc && mkdir /proc/self && : >/proc/self/mounts && exec "$@"`
		out, err = exec.Command("unshare", append([]string{"-m", "sh", "-c", blind, "sh"}, argv...)...).CombinedOutput()
	}
	if failed := new(exec.ExitError); errors.As(err, &failed) {
		t.Fatalf("%q: %v: %s", mkfs, err, out)
	}
	if err == nil {
		out, err = exec.Command("mount", "-o", options, i.file, i.Dir).CombinedOutput()
	}
	if err != nil {
		return nil, fmt.Errorf("no file system in a file can be had here: %s: %w: %s", mkfs[0], err, out)
	}
	t.Cleanup(func() { unix.Unmount(i.Dir, unix.MNT_DETACH) })
	return i, nil
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
	i.hogs = append(i.hogs, path)
	mustDo(i.t, hog(path))
}

// hog makes a file of all free blocks.
func hog(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	for at, size := int64(0), int64(64<<20); size >= 1024; {
		err := unix.Fallocate(int(f.Fd()), 0, at, size)
		switch {
		case err == nil:
			at += size
		case errors.Is(err, unix.ENOSPC):
			size /= 2
		case !errors.Is(err, unix.EINTR):
			return fmt.Errorf("filling up: %w", err)
		}
	}
	return f.Sync()
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
	const noLogFlush = 2
	i.shutDown(noLogFlush)
}

// shutDown is EXT4_IOC_SHUTDOWN.
func (i *image) shutDown(how int) {
	i.t.Helper()
	const ext4Shutdown = 0x8004587d
	f, err := os.Open(i.Dir)
	mustDo(i.t, err)
	defer f.Close()
	mustDo(i.t, unix.IoctlSetPointerInt(int(f.Fd()), ext4Shutdown, how))
}

// powerCut leaves the disk as it is when the power fails right after the journal
// was written: with all that has happened, but for data of files on their way.
func (i *image) powerCut() {
	i.t.Helper()
	const logFlush = 1
	i.shutDown(logFlush)
}
