//go:build linux

package tests

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// TestM3 swaps a directory of the backing for a symlink that leads out, while a
// process still holds the directory in the mount: nothing that it does then
// reaches what the symlink points to.
func TestM3(t *testing.T) {
	m := mount(t)
	outside := filepath.Join(tempDir(t), "outside")
	calls := [][]string{
		{"creat", "new", "wronly,creat"},
		{"creat", "file", "wronly,trunc"},
		{"put", "file", "overwritten", ""},
		{"truncate", "file", "0"},
		{"chmod", "file", "0777"},
		{"chown", "file", "1", "1"},
		{"utimens", "file", "5"},
		{"setxattr", "file", "user.k", "v"},
		{"removexattr", "file", "user.old"},
		{"setfacl", "file"},
		{"mkdir", "new"},
		{"mknod", "new", "fifo"},
		{"symlink", "x", "new"},
		{"link", "file", "new"},
		{"rename", "file", "new"},
		{"rename", "file", "file2", "exchange"},
		{"unlink", "file"},
		{"rmdir", "dir"},
		{"read", "file"},
		{"creat", "devserver", "wronly,creat,excl"},
		{"open", "tmp", ".", "tmpfile,rdwr"},
	}
	for i, call := range calls {
		for _, seen := range []bool{true, false} {
			t.Run(call[0]+map[bool]string{true: " of a known name", false: ""}[seen], func(t *testing.T) {
				dir := "dir" + itoa(i) + map[bool]string{true: "seen"}[seen]
				mustDo(t, os.RemoveAll(outside))
				openDir(t, outside)
				fixtures(t, outside)
				openDir(t, m.Back(dir))
				fixtures(t, m.Back(dir))
				a := agent(t)
				a.must("open", "d", m.At(dir), "path,directory")
				held := "/proc/self/fd/" + a.Get("fd", "d") + "/"
				if seen {
					for _, name := range []string{"file", "file2", "dir"} {
						a.must("stat", held+name)
					}
				}
				mustDo(t, os.Rename(m.Back(dir), m.Back(dir+".moved")))
				mustDo(t, os.Symlink(outside, m.Back(dir)))

				before := digest(t, outside)
				args := append([]string(nil), call...)
				for _, at := range pathArgs(call[0]) {
					args[at] = held + args[at]
				}
				answer, out := a.call(args)
				if after := digest(t, outside); after != before {
					t.Errorf("%q = %s changed what lies outside:\n%s", call, answer, diff(before, after))
				}
				if call[0] == "read" && answer == "ok" && out != "the old content of file" {
					t.Errorf("read %q", out)
				}
			})
		}
	}
}

// pathArgs are the arguments of a command that are paths.
func pathArgs(command string) []int {
	switch command {
	case "open", "symlink":
		return []int{2}
	case "link", "rename":
		return []int{1, 2}
	}
	return []int{1}
}

// TestM3Race: an unprivileged user who swaps a directory for a symlink again
// and again gets nothing outside changed by what root does in the mount.
func TestM3Race(t *testing.T) {
	m := mount(t)
	outside := filepath.Join(tempDir(t), "outside")
	openDir(t, outside)
	mustDo(t, os.WriteFile(filepath.Join(outside, "file"), []byte("root's"), 0o600))
	openDir(t, m.Back("W"))
	openDir(t, m.Back("W/dir"))
	mustDo(t, os.WriteFile(m.Back("W/dir/file"), []byte("free"), 0o666))
	mustDo(t, os.Symlink(outside, m.Back("W/sym")))
	before := digest(t, outside)

	user, root := stranger(t), agent(t)
	root.must("open", "d", m.At("W/dir"), "path,directory")
	held := "/proc/self/fd/" + root.Get("fd", "d") + "/file"
	for i := range 500 {
		swapped := user.Start("rename", m.At("W/dir"), m.At("W/sym"), "exchange")
		switch i % 4 {
		case 0:
			root.Try("chmod", held, "0666")
		case 1:
			root.Try("chown", held, "65534", "65534")
		case 2:
			root.Try("put", held, "written", "trunc")
		case 3:
			root.Try("setxattr", held, "user.k", "v")
		}
		if got := swapped(); got != "ok" {
			t.Fatalf("swap = %s", got)
		}
	}
	if after := digest(t, outside); after != before {
		t.Errorf("changed outside:\n%s", diff(before, after))
	}
}

// TestM3Root: no path of the mount leads above its root.
func TestM3Root(t *testing.T) {
	m := mount(t)
	a := agent(t)
	mustDo(t, os.WriteFile(filepath.Join(filepath.Dir(m.Dir), "beside"), []byte("outside"), 0o644))
	fd, err := unix.Open(m.Path, unix.O_PATH|unix.O_DIRECTORY, 0)
	mustDo(t, err)
	defer unix.Close(fd)
	how := unix.OpenHow{Flags: unix.O_RDONLY, Resolve: unix.RESOLVE_BENEATH}
	if got, err := unix.Openat2(fd, "../beside", &how); err == nil {
		unix.Close(got)
		t.Error("opened ../beside beneath the root")
	}
	a.must("mkdir", m.At("D"))
	a.must("symlink", "../../beside", m.At("D/out"))
	// A symlink is the reader's own way, as on any filesystem: up from the
	// mountpoint, not from the backing.
	if got, want := a.Try("read", m.At("D/out")), a.Try("read", filepath.Join(filepath.Dir(m.Path), "beside")); got != want {
		t.Errorf("read through a symlink = %s, want %s", got, want)
	}
}
