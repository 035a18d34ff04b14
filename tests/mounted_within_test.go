//go:build linux

package tests

import (
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

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
