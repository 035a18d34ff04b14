//go:build linux

package tests

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// handleOf is the file handle of a path.
func handleOf(t *testing.T, path string) unix.FileHandle {
	t.Helper()
	h, _, err := unix.NameToHandleAt(unix.AT_FDCWD, path, 0)
	mustDo(t, err)
	return h
}

// readByHandle opens a file by its handle, and reads it; of a directory it tells the path.
func readByHandle(mount int, h unix.FileHandle) (string, error) {
	fd, err := unix.OpenByHandleAt(mount, h, unix.O_RDONLY)
	if err != nil {
		return "", err
	}
	f := os.NewFile(uintptr(fd), "")
	defer f.Close()
	buf := make([]byte, 100)
	n, err := unix.Read(fd, buf)
	if err == unix.EISDIR {
		return os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	}
	return string(buf[:max(n, 0)]), err
}

func (m *Mount) openRoot() int {
	m.t.Helper()
	fd, err := unix.Open(m.Path, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	mustDo(m.t, err)
	m.t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// TestM2HandleOfAnEarlierMount: a file handle opens the file that it was made of, in each
// later mount, wherever that is by then; and if it is no more, nothing else.
func TestM2HandleOfAnEarlierMount(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("a/b/c"))
	handles := map[string]unix.FileHandle{}
	for _, name := range []string{"top", "a/b/stays", "a/b/c/moves", "a/goes", "a/linked", "quarantined"} {
		openFile(t, m.Back(name), name)
		handles[name] = handleOf(t, m.At(name))
	}
	for _, name := range []string{".", "a", "a/b/c"} {
		handles[name] = handleOf(t, m.At(name))
	}
	check := func(when string, wants map[string]string) {
		t.Helper()
		fd, err := unix.Open(m.Path, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		mustDo(t, err)
		defer unix.Close(fd)
		for name, h := range handles {
			got, err := readByHandle(fd, h)
			if err != nil {
				got = errnoName(err)
			}
			want, ok := wants[name]
			if !ok {
				want = name
				if at, isDir := strings.CutPrefix(name, "a"); isDir && (at == "" || at == "/b/c") {
					want = m.At(name)
				}
			}
			if name == "." {
				want = m.Path
			}
			if got != want {
				t.Errorf("%s: the handle of %s opens %q, want %q", when, name, got, want)
			}
		}
	}
	check("at first", nil)
	m.unmounted(func() {})
	check("unmounted and mounted", nil)
	m.unmounted(func() {
		mustDo(t, os.Rename(m.Back("a/b/c/moves"), m.Back("a/moved")))
		mustDo(t, os.Remove(m.Back("a/goes")))
		mustDo(t, os.Link(m.Back("a/linked"), m.Back("a/b/again")))
		mustDo(t, os.Remove(m.Back("a/linked")))
		mustDo(t, os.Rename(m.Back("a/b"), m.Back("b")))
		// What gets the removed one's inode number is another file.
		for i := range 20 {
			openFile(t, m.Back("a/another"+itoa(i)), "another")
		}
		mustDo(t, os.MkdirAll(m.Back(".stagefs/quarantine"), 0o700))
		mustDo(t, os.Chmod(m.Back(".stagefs"), 0o700))
		mustDo(t, os.Rename(m.Back("quarantined"), m.Back(".stagefs/quarantine/1")))
	})
	check("changed", map[string]string{"a/goes": "ESTALE", "quarantined": "ESTALE", "a/b/c": m.At("b/c")})
	m.restart(nil, "--no-passthrough")
	check("after a crash", map[string]string{"a/goes": "ESTALE", "quarantined": "ESTALE", "a/b/c": m.At("b/c")})
}

// TestW1ByHandle: who opens a file by its handle, which the kernel has forgotten, is
// refused as by its name, and stands in the way of the next owner as by its name; also
// when the daemon was killed in between.
func TestW1ByHandle(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	openFile(t, m.Back("D/f"), "x")
	openFile(t, m.Back("outside"), "x")
	mustDo(t, os.Link(m.Back("outside"), m.Back("D/linked")))
	file, dir, linked := handleOf(t, m.At("D/f")), handleOf(t, m.At("D")), handleOf(t, m.At("outside"))
	owner, rival := agent(t), agent(t)
	// byHandle calls f with a path that leads to the file of a handle.
	byHandle := func(h unix.FileHandle, f func(path string)) {
		t.Helper()
		root, err := unix.Open(m.Path, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		mustDo(t, err)
		defer unix.Close(root)
		fd, err := unix.OpenByHandleAt(root, h, unix.O_PATH)
		mustDo(t, err)
		defer unix.Close(fd)
		f(fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), fd))
	}
	lock := []string{"creat", m.At("D/devserver"), "wronly,creat,excl"}
	for _, h := range []unix.FileHandle{file, linked} {
		m.unmounted(func() {})
		byHandle(h, func(path string) { rival.must("open", "before", path, "wronly") })
		owner.want("EEXIST", lock...)
		rival.must("close", "before")
	}
	m.unmounted(func() {})
	owner.must(lock...)
	refused := func() {
		t.Helper()
		for _, h := range []unix.FileHandle{file, linked} {
			byHandle(h, func(path string) {
				rival.want("EBUSY", "open", "w", path, "wronly")
				rival.want("EBUSY", "chmod", path, "0600")
				rival.want("EBUSY", "truncate", path, "0")
				owner.must("open", "w", path, "rdwr")
				owner.must("write", "w", "y")
				owner.must("close", "w")
			})
		}
		byHandle(dir, func(path string) {
			rival.want("EBUSY", "creat", filepath.Join(path, "new"), "wronly,creat")
			owner.must("creat", filepath.Join(path, "new"), "wronly,creat")
		})
	}
	refused() // the kernel has D and its lock file, and nothing else
	m.restart(nil)
	refused()
}

// TestM2HandleForgotten: handles of files that the kernel forgets all the time, while others
// rename, replace and remove them, open the right file or are stale. It drops what all of
// the machine has in its cache.
func TestM2HandleForgotten(t *testing.T) {
	m := mount(t)
	root := m.openRoot()
	for d := range 4 {
		openDir(t, m.Back(itoa(d)))
	}
	var mu sync.Mutex
	handles := map[string]unix.FileHandle{} // by content
	var made atomic.Int64
	a := agent(t)
	make1 := func(dir string) {
		name := fmt.Sprint("f", made.Add(1))
		path := m.At(dir, name)
		a.must("put", path, name, "creat")
		h := handleOf(t, path)
		mu.Lock()
		handles[name] = h
		mu.Unlock()
	}
	for i := range 200 {
		make1(itoa(i % 4))
	}
	var over atomic.Bool
	var wg sync.WaitGroup
	var opened, stale atomic.Int64
	for range 2 {
		wg.Go(func() {
			for !over.Load() {
				mu.Lock()
				var name string
				var h unix.FileHandle
				for name, h = range handles { // any
					break
				}
				mu.Unlock()
				got, err := readByHandle(root, h)
				switch {
				case errors.Is(err, unix.ESTALE):
					stale.Add(1)
				case err != nil || got != name:
					t.Errorf("the handle of %s: %q, %v", name, got, err)
					return
				default:
					opened.Add(1)
				}
			}
		})
	}
	wg.Go(func() {
		for !over.Load() {
			if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("2"), 0); err != nil {
				t.Error(err)
				return
			}
			time.Sleep(5 * time.Millisecond)
		}
	})
	for end := time.Now().Add(4 * time.Second); time.Now().Before(end); {
		names, err := filepath.Glob(m.Back("[0-3]/f*"))
		mustDo(t, err)
		rel, err := filepath.Rel(m.Dir, names[rand.IntN(len(names))])
		mustDo(t, err)
		switch rand.IntN(4) {
		case 0, 1:
			a.must("rename", m.At(rel), m.At(itoa(rand.IntN(4)), filepath.Base(rel)))
		case 2:
			a.must("unlink", m.At(rel))
			make1(itoa(rand.IntN(4)))
		case 3:
			a.must("put", m.At(rel), filepath.Base(rel), "")
		}
	}
	over.Store(true)
	wg.Wait()
	if opened.Load() < 100 || stale.Load() == 0 {
		t.Errorf("%d opened, %d stale", opened.Load(), stale.Load())
	}
	t.Logf("%d opened, %d stale, %d files made", opened.Load(), stale.Load(), made.Load())
}
