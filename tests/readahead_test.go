//go:build linux

package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestM2ReadAhead: the daemon reads directories on a slow disk before who walks a tree
// lists them, but leaves no trace in those that nobody lists, and reads none that is
// mounted inside.
func TestM2ReadAhead(t *testing.T) {
	img := newImage(t, 64)
	const all, listed = 40, 10
	board := filepath.Join(img.static(), "board")
	for i := range all {
		for _, sub := range []string{"a", "b", "c"} {
			dir := filepath.Join(board, fmt.Sprint(i), sub)
			mustDo(t, os.MkdirAll(dir, 0o755))
			mustDo(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o644))
		}
	}
	order := readNames(t, board)
	inside := filepath.Join(board, order[3], "b")
	mustDo(t, unix.Mount("none", inside, "tmpfs", 0, "size=1m"))
	t.Cleanup(func() { unix.Unmount(inside, unix.MNT_DETACH) })
	m := img.mount()
	mustDo(t, unix.Mount("", img.Dir, "", unix.MS_REMOUNT|unix.MS_STRICTATIME, ""))
	watch, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	mustDo(t, err)
	defer unix.Close(watch)
	_, err = unix.InotifyAddWatch(watch, inside, unix.IN_OPEN)
	mustDo(t, err)
	unlisted := make(map[string]unix.Timespec) // when they were read
	atime := func(dir string) unix.Timespec {
		var st unix.Stat_t
		mustDo(t, unix.Stat(dir, &st))
		return st.Atim
	}
	for i, name := range order {
		if i >= listed {
			unlisted[filepath.Join(board, name)] = atime(filepath.Join(board, name))
		}
		for _, sub := range []string{"a", "b", "c"} {
			dir := filepath.Join(board, name, sub)
			unlisted[dir] = atime(dir)
		}
	}
	time.Sleep(20 * time.Millisecond) // so that now is another time

	ahead := func() int { return m.metric("read_ahead_directories_total") }
	for try := 0; ahead() == 0; try++ {
		if try == 20 {
			t.Fatal("no directory was read ahead")
		}
		unix.Sync()
		mustDo(t, os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0o200))
		readNames(t, m.Path)
		readNames(t, m.At("board"))
		for _, name := range order[:listed] {
			readNames(t, m.At("board", name))
		}
	}
	for n := -1; n != ahead(); time.Sleep(50 * time.Millisecond) {
		n = ahead()
	}
	if n, _ := unix.Read(watch, make([]byte, 4096)); n > 0 {
		t.Errorf("%s, where something is mounted, was opened", inside)
	}
	for dir, before := range unlisted {
		if after := atime(dir); after != before {
			t.Errorf("%s: access time %v, and %v after others were listed", dir, before, after)
		}
	}
}

// readNames lists a directory in its own order.
func readNames(t *testing.T, dir string) []string {
	t.Helper()
	f, err := os.Open(dir)
	mustDo(t, err)
	defer f.Close()
	names, err := f.Readdirnames(-1)
	mustDo(t, err)
	return names
}
