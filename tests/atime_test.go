//go:build linux

package tests

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestM2Strictatime: where the directory is mounted with strictatime, who
// opens and reads a file changes its access time, also if the kernel has it in
// its cache, and the mount says strictatime, too.
func TestM2Strictatime(t *testing.T) {
	need(t, "root", "fuse")
	dir := staticDir(t)
	mustDo(t, unix.Mount(dir, dir, "", unix.MS_BIND, ""))
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	mustDo(t, unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_STRICTATIME, ""))
	m := mountDir(t, dir, filepath.Join(tempDir(t), "mnt"))

	var st unix.Statfs_t
	mustDo(t, unix.Statfs(m.Path, &st))
	if st.Flags&(unix.ST_RELATIME|unix.ST_NOATIME) != 0 {
		t.Errorf("statfs of the mount: flags %#x, want those of strictatime", st.Flags)
	}
	mustDo(t, os.WriteFile(m.At("file"), []byte("content"), 0o644))
	for i := range 3 {
		var before, after unix.Stat_t
		mustDo(t, unix.Stat(m.At("file"), &before))
		for time.Since(time.Unix(before.Atim.Sec, before.Atim.Nsec)) < 20*time.Millisecond {
			time.Sleep(time.Millisecond) // so that now is another time
		}
		_, err := os.ReadFile(m.At("file"))
		mustDo(t, err)
		mustDo(t, unix.Stat(m.At("file"), &after))
		if after.Atim == before.Atim {
			t.Errorf("read no. %d changed no access time", i+1)
		}
	}
}

// TestM2Unread: the daemon looks for lock files in all directories as it starts, but
// changes no access time there: nobody has read anything.
func TestM2Unread(t *testing.T) {
	need(t, "root", "fuse")
	dir := staticDir(t)
	dirs := []string{".", "D", "D/sub", "E"}
	for _, d := range dirs {
		openDir(t, filepath.Join(dir, d))
		mustDo(t, os.Chown(filepath.Join(dir, d), nobody, nobody))
	}
	for _, d := range dirs {
		openFile(t, filepath.Join(dir, d, "devserver"), "")
	}
	long := []unix.Timespec{{Sec: 1000}, {Sec: 2000}} // ago: most mounts are with relatime
	for _, d := range dirs {
		mustDo(t, unix.UtimesNanoAt(unix.AT_FDCWD, filepath.Join(dir, d), long, 0))
	}
	m := mountDir(t, dir, filepath.Join(tempDir(t), "mnt"))
	eventually(t, "all lock files are found", func() bool { return len(m.Listing().Orphans) == len(dirs)-1 })
	for _, d := range dirs {
		var st unix.Stat_t
		mustDo(t, unix.Stat(filepath.Join(dir, d), &st))
		if st.Atim != long[0] {
			t.Errorf("%s: access time %v, want %v", d, st.Atim, long[0])
		}
	}
}
