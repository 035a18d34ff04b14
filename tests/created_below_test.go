//go:build linux

package tests

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// TestM2CreatedBelow: who opens with O_CREAT what was made past the mount, and is not there
// as far as the kernel knows, may do no more than its mode says, and no other than where
// the kernel knows it.
func TestM2CreatedBelow(t *testing.T) {
	m := mount(t)
	a := stranger(t)
	for i, c := range []struct {
		what  string
		make  func(path string) error
		flags string
		want  string
	}{
		{"another user's file", func(path string) error { return os.WriteFile(path, []byte("secret"), 0o600) }, "rdonly,creat", "EACCES"},
		{"another user's file", func(path string) error { return os.WriteFile(path, []byte("secret"), 0o600) }, "rdwr,creat", "EACCES"},
		{"another user's file", func(path string) error { return os.WriteFile(path, []byte("secret"), 0o644) }, "rdonly,creat,trunc", "EACCES"},
		{"a file to be read", func(path string) error { return os.WriteFile(path, []byte("secret"), 0o644) }, "rdonly,creat", "ok"},
		{"a file for all", func(path string) error {
			return unix.Mknod(path, unix.S_IFREG|0o666, 0)
		}, "rdwr,creat", "ok"},
		{"a symbolic link", func(path string) error { return os.Symlink("target", path) }, "rdwr,creat", "ok"},
		{"a directory", func(path string) error { return os.Mkdir(path, 0o777) }, "rdonly,creat", "EISDIR"},
		{"a device", func(path string) error { return unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))) }, "rdwr,creat", "EACCES"},
	} {
		for _, dir := range []string{m.Dir, m.Path} {
			name := "d" + itoa(i) + map[string]string{m.Dir: "", m.Path: "m"}[dir]
			openDir(t, m.Back(name))
			path := dir + "/" + name + "/x"
			a.want("ENOENT", "stat", path)
			old := unix.Umask(0)
			err := c.make(m.Back(name, "x"))
			unix.Umask(old)
			mustDo(t, err)
			if got := a.Try("open", "h", path, c.flags); got != c.want {
				t.Errorf("%s: open of %s with %s: %s, want %s", path, c.what, c.flags, got, c.want)
			}
			a.Try("close", "h")
			if b, err := os.ReadFile(m.Back(name, "x")); c.want == "EACCES" && err == nil && c.what != "a device" && string(b) != "secret" {
				t.Errorf("%s: %s has %q in it", path, c.what, b)
			}
		}
	}
}
