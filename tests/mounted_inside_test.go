//go:build linux

package tests

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestR7MountInside: what somebody has mounted in a directory whose content is
// removed, a directory or a file, is not touched, and is told of; all else goes, and
// the rest with the next removal after it is unmounted.
func TestR7MountInside(t *testing.T) {
	m := mount(t, "--on-crash", "destroy")
	foreign := tempDir(t)
	mustDo(t, os.Mkdir(foreign+"/dir", 0o777))
	mustDo(t, os.WriteFile(foreign+"/dir/valuable", []byte("foreign"), 0o666))
	mustDo(t, os.WriteFile(foreign+"/file", []byte("foreign"), 0o666))
	die := func(dir string) *Agent {
		a := agent(t)
		for _, d := range []string{dir, dir + "/a", dir + "/a/here", dir + "/z"} {
			a.must("mkdir", m.At(d))
		}
		for _, f := range []string{dir + "/f", dir + "/a/f", dir + "/a/there", dir + "/z/f"} {
			a.must("put", m.At(f), "own", "wronly,creat")
		}
		return a
	}
	a := die("D")
	for from, to := range map[string]string{"dir": "here", "file": "there"} {
		at := m.Back("D/a", to)
		mustDo(t, unix.Mount(filepath.Join(foreign, from), at, "", unix.MS_BIND, ""))
		t.Cleanup(func() { unix.Unmount(at, unix.MNT_DETACH) })
	}
	a.Kill()
	m.awaitFree("D")
	eventually(t, "the log tells of what is left", func() bool {
		return strings.Contains(m.Log(), "something is mounted at") && strings.Contains(m.Log(), "a/here") && strings.Contains(m.Log(), "a/there")
	})
	wantTree(t, foreign, []string{"dir/", "dir/valuable=foreign", "file=foreign"})
	trash := m.Back(".stagefs/trash")
	for _, path := range tree(t, trash) {
		if strings.HasSuffix(path, "=own") || strings.HasSuffix(path, "/z/") {
			t.Errorf("%s is left", path)
		}
	}
	for _, mnt := range mountsAt(trash) {
		mustDo(t, unix.Unmount(mnt, 0))
	}
	die("E").Kill()
	eventually(t, "all is gone", func() bool {
		_, err := os.Stat(m.Back(".stagefs"))
		return os.IsNotExist(err)
	})
}

// mountsAt are the mounts beneath a directory.
func mountsAt(dir string) (all []string) {
	for at := range mountsBelow(dir) {
		all = append(all, at)
	}
	return all
}
