//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// fullDisk mounts a file system whose disk has less room than it promises. From fill
// on, what is written where nothing was fails when it is written out.
func fullDisk(t *testing.T) (dir string, fill func()) {
	t.Helper()
	need(t, "root", "fuse", "mkfs.ext4", "losetup")
	base := tempDir(t)
	small, top := filepath.Join(base, "small"), filepath.Join(base, "fs")
	for _, name := range []string{small, top} {
		mustDo(t, os.Mkdir(name, 0o755))
	}
	mustDo(t, unix.Mount("tmpfs", small, "tmpfs", 0, "size=6m"))
	t.Cleanup(func() { unix.Unmount(small, unix.MNT_DETACH) })
	image := filepath.Join(small, "image")
	mustDo(t, os.WriteFile(image, nil, 0o600))
	mustDo(t, os.Truncate(image, 64<<20))
	for _, argv := range [][]string{
		{"mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=1", image},
		{"mount", "-o", "loop,errors=continue", image, top},
	} {
		if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
			t.Skipf("no file system in a file can be had here: %q: %v: %s", argv, err, out)
		}
	}
	t.Cleanup(func() { unix.Unmount(top, unix.MNT_DETACH) })
	openDir(t, filepath.Join(top, "static"))
	return filepath.Join(top, "static"), func() { mustDo(t, hog(filepath.Join(small, "hog"))) }
}

// TestM2WriteBack: that a file could not be written out is told once to each
// descriptor that was there by then.
func TestM2WriteBack(t *testing.T) {
	play := func(dir string, fill, meanwhile func()) string {
		var log strings.Builder
		a := agent(t)
		try := func(args ...string) {
			fmt.Fprintln(&log, strings.ReplaceAll(strings.Join(args, " "), dir, ""), a.Try(args...))
		}
		file := filepath.Join(dir, "file")
		try("open", "a", file, "rdwr,creat,excl")
		try("fallocate", "a", "0", "0", "16777216")
		try("fsync", "a") // all but the data has its place
		fill()
		try("open", "b", file, "rdwr")
		try("open", "c", file, "wronly")
		try("pwrite", "a", "x", "16777216", "0")
		try("open", "d", file, "rdwr") // nobody knows yet
		for _, name := range []string{"a", "b", "c", "d"} {
			try("fsync", name)
			meanwhile()
		}
		for range 2 {
			a.Try("fsync", "a") // the disk's EIO is told to the first who asks again
		}
		try("open", "e", file, "rdwr") // nothing new to whom opens it now
		try("fsync", "e")
		try("fsync", "a")
		a.Exit(0)
		return strings.ReplaceAll(log.String(), "EIO", "ENOSPC")
	}
	dir, fill := fullDisk(t)
	want := play(dir, fill, func() {})
	if strings.Count(want, "fsync d ENOSPC") != 1 || !strings.Contains(want, "fsync e ok") {
		t.Skipf("writing out does not fail here: %s", want)
	}
	for _, opts := range []string{"", "--no-passthrough"} {
		for _, upgraded := range []bool{false, true} {
			dir, fill := fullDisk(t)
			m := mountDir(t, dir, filepath.Join(tempDir(t), "mnt"), strings.Fields(opts)...)
			meanwhile := func() {}
			if upgraded {
				meanwhile = m.replace
			}
			if got := play(m.Path, fill, meanwhile); got != want {
				t.Errorf("with %q, upgraded %t, answers differ from a plain directory's:\n%s\n%s", opts, upgraded, got, want)
			}
		}
	}
}
