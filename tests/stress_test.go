//go:build linux

package tests

import (
	"os"
	"strings"
	"testing"
)

// stressors are those of stress-ng's file system class that work on files of
// the directory that they are given.
const stressors = `access chattr chdir chmod chown copy-file dentry dir dirdeep dirmany dnotify dup fallocate fcntl
	fiemap file-ioctl filename flock fpunch fsize fstat getdent handle hdd inode-flags inotify iomix lease link
	locka lockf lockofd mknod open rename symlink sync-file touch utime xattr`

// TestM2Stress runs stress-ng's stressors in a mount: none of them fails that
// does not fail in a plain directory. The shell that starts them holds the
// directory, so that the lock of one worker is in no other's way.
func TestM2Stress(t *testing.T) {
	stress(t, stressors)
}

// TestM2StressIO is the same for the one that opens all mounts of the machine, which
// nobody can unmount meanwhile.
func TestM2StressIO(t *testing.T) { stress(t, "io") }

func stress(t *testing.T, stressors string) {
	t.Helper()
	need(t, "stress-ng", "flock")
	seconds, ops := "1", "100" // whichever is reached first
	if *soakFlag > 0 {
		seconds, ops = "5", "0" // what --dir has made then it lists again and again before it ends
	}
	m := mount(t)
	mustDo(t, os.Mkdir(m.Back("base"), 0o777))
	plain := tempDir(t)
	const script = `exec 9>devserver && flock 9 && stress-ng --temp-path . --"$1" 2 --"$1"-ops "$3" -t "$2" --verify 2>&1`
	for _, name := range strings.Fields(stressors) {
		t.Run(name, func(t *testing.T) {
			got := sh(t, m.At("base"), script, name, seconds, ops)
			if got.Status == 0 {
				return
			}
			if want := sh(t, plain, script, name, seconds, ops); want.Status != got.Status {
				t.Errorf("stress-ng --%s = %d, want %d as in a plain directory:\n%s", name, got.Status, want.Status, got.Out)
			}
		})
	}
}
