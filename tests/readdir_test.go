//go:build linux

package tests

import (
	"fmt"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// TestM2ListingOfTwo: who begins to list a directory when somebody else has read it, and
// files have been removed since, is told of none of them, wherever the other goes on.
func TestM2ListingOfTwo(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	for i := range 100 {
		mustDo(t, os.WriteFile(m.At("D", fmt.Sprintf("%03d", i)), nil, 0o644))
	}
	list := func(fd, size int) (names []string) {
		buf := make([]byte, size)
		n, err := unix.Getdents(fd, buf)
		mustDo(t, err)
		_, _, names = unix.ParseDirent(buf[:n], -1, nil)
		return names
	}
	open := func() int {
		fd, err := unix.Open(m.At("D"), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		mustDo(t, err)
		t.Cleanup(func() { unix.Close(fd) })
		return fd
	}
	before := open()
	names := list(before, 32<<10)
	if len(names) != 100 {
		t.Fatalf("%d names were read at a time, want 100", len(names))
	}
	for _, name := range names[30:] {
		mustDo(t, os.Remove(m.At("D", name)))
	}
	after := open()
	got := list(after, 256) // to go on from where nothing has changed
	if rest := list(before, 32<<10); len(rest) != 0 {
		t.Fatalf("%q were read twice", rest)
	}
	for {
		more := list(after, 32<<10)
		if len(more) == 0 {
			break
		}
		got = append(got, more...)
	}
	if !slices.Equal(got, names[:30]) {
		t.Errorf("%d names were listed, of which %d were removed before", len(got), len(got)-30)
	}
}
