//go:build linux

package tests

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// TestM2NoACL: on a file system without ACLs a file that has other attributes is as
// accessible as its mode says.
func TestM2NoACL(t *testing.T) {
	need(t, "root", "fuse", "mkfs.btrfs", "losetup")
	disk, err := imageBy(t, 128, "loop,noacl", "mkfs.btrfs")
	if err != nil {
		t.Skip(err)
	}
	dir := disk.static()
	openDir(t, filepath.Join(dir, "sub"))
	mustDo(t, os.WriteFile(filepath.Join(dir, "sub/file"), []byte("content"), 0o644))
	for _, name := range []string{"sub", "sub/file"} {
		mustDo(t, unix.Setxattr(filepath.Join(dir, name), "user.key", []byte("value"), 0))
		mustDo(t, os.Chown(filepath.Join(dir, name), 4711, 4711))
	}
	mustDo(t, os.Chmod(filepath.Join(dir, "sub"), 0o755))
	if _, err := unix.Getxattr(filepath.Join(dir, "sub"), "system.posix_acl_access", nil); !errors.Is(err, unix.EOPNOTSUPP) {
		t.Skipf("this file system has ACLs: %v", err)
	}
	m := mountDir(t, dir, filepath.Join(tempDir(t), "mnt"))
	for who, a := range map[string]*Agent{"root": agent(t), "a user": stranger(t)} {
		for _, step := range [][]string{
			{"readdir", "sub"},
			{"stat", "sub/file"},
			{"read", "sub/file"},
			{"open", "f", "sub/file", "rdwr"},
			{"getxattr", "sub/file", "user.key"},
			{"creat", "sub/new", "wronly,creat"},
		} {
			at := func(dir string) string {
				args := append([]string(nil), step...)
				for i, arg := range args {
					if len(arg) >= 3 && arg[:3] == "sub" {
						args[i] = filepath.Join(dir, arg)
					}
				}
				answer, _ := a.call(args)
				return answer
			}
			if want, got := at(dir), at(m.Path); got != want {
				t.Errorf("%s: %q = %s, want %s", who, step, got, want)
			}
		}
	}
	agent(t).want("ENOTSUP", "setfacl", m.At("sub/file"))
	// The kernel asks no otherwise for this than to check an access.
	agent(t).want("ENODATA", "getxattr", m.At("sub/file"), "system.posix_acl_access")
	want, got := run(t, "getfacl", "-c", filepath.Join(dir, "sub/file")), run(t, "getfacl", "-c", m.At("sub/file"))
	if got.Out != want.Out || got.Status != want.Status {
		t.Errorf("getfacl: %v, want %v", got, want)
	}
}
