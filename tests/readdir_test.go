//go:build linux

package tests

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
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

// TestM2Positions: a program of 32 bits that knows of no large files can list a directory
// of ext4, which positions of more than 31 bits would keep it from, and from each position
// a listing goes on where it was, also with the next program.
func TestM2Positions(t *testing.T) {
	// With this seed debugfs's dx_hash of the first two names differs in the lower half
	// alone; that of the next ones begins with 11 ones, and such are shown as numbers.
	disk := newImage(t, 16, "-E", "hash_seed=8a5d2a61-0000-4000-8000-000000000001")
	names := []string{"n36180", "n53142", "n1542", "n8436", "n8940", "n9146"}
	for i := range 60 {
		names = append(names, fmt.Sprintf("some%d", i))
	}
	m := disk.mount()
	openDir(t, m.Back("D"))
	for _, name := range names {
		mustDo(t, os.WriteFile(m.At("D", name), nil, 0o644))
	}
	type entry struct {
		name string
		next int64
	}
	list := func(from int64) (all []entry) {
		t.Helper()
		// The kernel asks anew.
		mustDo(t, os.WriteFile(m.At("D/passing"), nil, 0o644))
		mustDo(t, os.Remove(m.At("D/passing")))
		fd, err := unix.Open(m.At("D"), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		mustDo(t, err)
		defer unix.Close(fd)
		_, err = unix.Seek(fd, from, unix.SEEK_SET)
		mustDo(t, err)
		buf := make([]byte, 32<<10)
		for {
			n, err := unix.Getdents(fd, buf)
			mustDo(t, err)
			if n == 0 {
				return all
			}
			for b := buf[:n]; len(b) > 0; b = b[binary.NativeEndian.Uint16(b[16:]):] {
				name, _, _ := bytes.Cut(b[19:], []byte{0})
				all = append(all, entry{string(name), int64(binary.NativeEndian.Uint64(b[8:]))})
			}
		}
	}
	all := list(0)
	if len(all) != len(names)+2 {
		t.Errorf("%d entries, want %d", len(all), len(names)+2)
	}
	check := func(when string) {
		t.Helper()
		for i, e := range slices.Backward(all) { // so that no position is met before it is gone to
			if e.next > math.MaxInt32 {
				t.Errorf("%s: the position after %s is %#x, of more than 31 bits", when, e.name, e.next)
			}
			if rest := list(e.next); !slices.Equal(rest, all[i+1:]) {
				t.Errorf("%s: after %s come %d entries, want %d, and the same", when, e.name, len(rest), len(all)-i-1)
			}
		}
	}
	check("at first")
	m.replace()
	check("replaced")
}
