//go:build linux

package tests

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// TestM2HandleOfAnEarlierMount: a file handle that was made in an earlier mount of the
// directory opens no other file.
func TestM2HandleOfAnEarlierMount(t *testing.T) {
	m := mount(t, "--disable-locking")
	names := []string{"a", "b", "c", "d"}
	for _, name := range names {
		mustDo(t, os.WriteFile(m.Back(name), []byte(name), 0o644))
	}
	handles := make(map[string]unix.FileHandle)
	for _, name := range names {
		h, _, err := unix.NameToHandleAt(unix.AT_FDCWD, m.At(name), 0)
		if err != nil {
			t.Skip("name_to_handle_at:", err)
		}
		handles[name] = h
	}
	m.unmounted(func() {}, "--disable-locking")
	for i := range names { // the other way round, and all stay in the kernel's cache
		f, err := os.Open(m.At(names[len(names)-1-i]))
		mustDo(t, err)
		defer f.Close()
	}
	dir, err := unix.Open(m.Path, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	mustDo(t, err)
	defer unix.Close(dir)
	for name, h := range handles {
		fd, err := unix.OpenByHandleAt(dir, h, unix.O_RDONLY)
		if errors.Is(err, unix.ESTALE) {
			continue
		}
		mustDo(t, err)
		got := make([]byte, 8)
		n, err := unix.Read(fd, got)
		unix.Close(fd)
		mustDo(t, err)
		if string(got[:n]) != name {
			t.Errorf("the handle of %s opens %s", name, got[:n])
		}
	}
}
