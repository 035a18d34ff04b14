//go:build linux

package tests

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestM2TruncateTimes: whether truncate(2) to the size that a file has already
// changes its times is the backing's to say: with ext4 it does, with btrfs and XFS not.
func TestM2TruncateTimes(t *testing.T) {
	asOnEach(t, truncateTimes)
}

// asOnEach compares what log tells of a directory on each of several file systems with
// what it tells of one in a mount there, with passthrough and without.
func asOnEach(t *testing.T, log func(t *testing.T, dir string) string) {
	t.Helper()
	need(t, "root", "fuse")
	for _, kind := range []string{"tmpfs", "ext4", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			var dir string
			switch kind {
			case "tmpfs":
				dir = filepath.Join(tempDir(t), "fs")
				mustDo(t, os.Mkdir(dir, 0o755))
				mustDo(t, unix.Mount("none", dir, "tmpfs", 0, ""))
				t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
			case "ext4":
				dir = newImage(t, 16).Dir
			case "btrfs":
				dir = filepath.Dir(newQuota(t, "none").Dir)
			}
			openDir(t, filepath.Join(dir, "bare"))
			want := log(t, filepath.Join(dir, "bare"))
			for _, opts := range [][]string{nil, {"--no-passthrough"}} {
				static := filepath.Join(dir, "static"+strings.Join(opts, ""))
				openDir(t, static)
				m := mountDir(t, static, filepath.Join(tempDir(t), "mnt"), opts...)
				if got := log(t, m.Path); got != want {
					t.Errorf("with options %q:\n%s", opts, diff(want, got))
				}
			}
		})
	}
}

// truncateTimes tells for each way to truncate a file, and each size, which times
// it changes.
func truncateTimes(t *testing.T, dir string) (log string) {
	t.Helper()
	path := filepath.Join(dir, "file")
	ways := []struct {
		name string
		do   func(size int64) error
	}{
		{"truncate", func(size int64) error { return unix.Truncate(path, size) }},
		{"truncate while open", func(size int64) error {
			fd, err := unix.Open(path, unix.O_RDWR, 0)
			mustDo(t, err)
			defer unix.Close(fd)
			return unix.Truncate(path, size)
		}},
		{"ftruncate", func(size int64) error {
			fd, err := unix.Open(path, unix.O_RDWR, 0)
			mustDo(t, err)
			defer unix.Close(fd)
			return unix.Ftruncate(fd, size)
		}},
	}
	for _, way := range ways {
		for _, size := range []int64{0, 1000, 5000, 9000} {
			mustDo(t, os.WriteFile(path, make([]byte, 5000), 0o644))
			past := []unix.Timespec{{Sec: 5}, {Sec: 5}}
			mustDo(t, unix.UtimesNanoAt(unix.AT_FDCWD, path, past, 0))
			var before, after unix.Stat_t
			mustDo(t, unix.Stat(path, &before))
			laterThan(t, dir, before.Ctim)
			mustDo(t, way.do(size))
			mustDo(t, unix.Stat(path, &after))
			log += way.name + " to " + itoa(int(size)) + ": " + itoa(int(after.Size)) + " bytes"
			if after.Mtim != before.Mtim {
				log += ", mtime"
			}
			if after.Ctim != before.Ctim {
				log += ", ctime"
			}
			log += "\n"
		}
	}
	return log
}

// laterThan returns when what changes in dir gets another time than that.
func laterThan(t *testing.T, dir string, than unix.Timespec) {
	t.Helper()
	eventually(t, "the clock of the files goes on", func() bool {
		path := filepath.Join(dir, "clock")
		mustDo(t, os.WriteFile(path, nil, 0o644))
		mustDo(t, os.Chmod(path, 0o600))
		var st unix.Stat_t
		mustDo(t, unix.Stat(path, &st))
		return st.Ctim != than
	})
}
