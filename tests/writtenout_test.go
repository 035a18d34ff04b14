//go:build linux

package tests

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// TestM2WrittenOut: where the file system writes out what has replaced a file's content when
// that is closed, so that a crash of the machine does not leave an empty file, it does so
// through the mount, too.
func TestM2WrittenOut(t *testing.T) {
	bare := filepath.Join(staticDir(t), "file")
	for name, cut := range map[string]func(path string) (*os.File, error){
		"O_TRUNC": func(path string) (*os.File, error) { return os.OpenFile(path, os.O_WRONLY|os.O_TRUNC, 0) },
		"ftruncate": func(path string) (*os.File, error) {
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err == nil {
				err = f.Truncate(0)
			}
			return f, err
		},
	} {
		t.Run(name, func(t *testing.T) {
			if !rewritten(t, bare, bare, cut, time.Second) {
				t.Skip("the file system of the directory does not do so itself")
			}
			cutMounts(t, func(m *Mount) error {
				if !rewritten(t, m.At("file"), m.Back("file"), cut, 10*time.Second) {
					return errors.New("what was written before close(2) is in memory alone")
				}
				return nil
			})
		})
	}
}

// TestM2WrittenOutLate: the same if the daemon hears of an earlier close(2) only after the
// truncation. That is on its way on a core that does nothing but what is in this test, for
// which it has a queue of its own over io_uring.
func TestM2WrittenOutLate(t *testing.T) {
	if runtime.NumCPU() < 2 {
		t.Skip("needs two cores")
	}
	bare := filepath.Join(staticDir(t), "file")
	open := func(path string) (*os.File, error) { return os.OpenFile(path, os.O_WRONLY|os.O_TRUNC, 0) }
	if !rewritten(t, bare, bare, open, time.Second) {
		t.Skip("the file system of the directory does not do so itself")
	}
	cutMounts(t, func(m *Mount) error {
		path := m.At("file")
		content := bytes.Repeat([]byte("content "), 4<<10)
		mustDo(t, os.WriteFile(path, content, 0o644))
		first, err := os.Create(path)
		mustDo(t, err)
		_, err = first.Write(content)
		mustDo(t, err)
		mustDo(t, first.Sync())
		var closed, truncated atomic.Bool
		over := make(chan error)
		go func() {
			runtime.LockOSThread() // for good
			onCore(0)
			err := unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 1}, 0)
			if err == nil {
				err = first.Close()
			}
			closed.Store(true)
			for err == nil && !truncated.Load() {
			}
			over <- err
		}()
		type opened struct {
			file *os.File
			err  error
		}
		second := make(chan opened)
		go func() {
			runtime.LockOSThread()
			onCore(1)
			for !closed.Load() {
			}
			f, err := open(path)
			truncated.Store(true)
			second <- opened{f, err}
		}()
		f := <-second
		err = <-over
		mustDo(t, f.err)
		defer f.file.Close()
		if errors.Is(err, unix.EPERM) {
			t.Skip("may not have a thread scheduled first")
		}
		mustDo(t, err)
		_, err = f.file.Write(content)
		mustDo(t, err)
		look, err := os.Open(m.Back("file"))
		mustDo(t, err)
		defer look.Close()
		mustDo(t, f.file.Close())
		if !getsPlace(t, look, 10*time.Second) {
			return errors.New("what was written before close(2) is in memory alone")
		}
		return nil
	})
}

// onCore keeps the calling thread on a core.
func onCore(i int) {
	var one unix.CPUSet
	one.Set(i)
	unix.SchedSetaffinity(0, &one) // where there is none, the race is lost
}

// rewritten replaces the content of a file, and reports whether that has its place on the
// disk soon. back is the file in its file system.
func rewritten(t *testing.T, path, back string, cut func(path string) (*os.File, error), within time.Duration) bool {
	t.Helper()
	content := bytes.Repeat([]byte("content "), 4<<10)
	f, err := os.Create(path)
	mustDo(t, err)
	_, err = f.Write(content)
	mustDo(t, err)
	mustDo(t, f.Sync())
	mustDo(t, f.Close())
	f, err = cut(path)
	mustDo(t, err)
	_, err = f.Write(content)
	mustDo(t, err)
	mustDo(t, f.Close())
	look, err := os.Open(back) // and close(2) only at the end: that writes out, too
	mustDo(t, err)
	defer look.Close()
	return getsPlace(t, look, within)
}

// getsPlace reports whether [hasPlace] does within that time.
func getsPlace(t *testing.T, look *os.File, within time.Duration) bool {
	t.Helper()
	for until := time.Now().Add(within); ; time.Sleep(10 * time.Millisecond) {
		placed, err := hasPlace(look)
		if err == unix.EOPNOTSUPP || err == unix.ENOTTY {
			return false
		}
		mustDo(t, err)
		if placed || time.Now().After(until) {
			return placed
		}
	}
}

// hasPlace reports whether the file system has given all that was written to a file a place
// on its disk: see the kernel's Documentation/filesystems/fiemap.rst.
func hasPlace(f *os.File) (bool, error) {
	const (
		fsIocFiemap = 0xc020660b
		delalloc    = 4 // FIEMAP_EXTENT_DELALLOC
	)
	const most = 16
	ask := make([]byte, 32+56*most) // struct fiemap, and of struct fiemap_extent
	binary.NativeEndian.PutUint64(ask[8:], 1<<62)
	binary.NativeEndian.PutUint32(ask[24:], most)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), fsIocFiemap, uintptr(unsafe.Pointer(&ask[0])))
	runtime.KeepAlive(ask)
	if errno != 0 {
		return false, errno
	}
	n := binary.NativeEndian.Uint32(ask[20:])
	for i := range n {
		if binary.NativeEndian.Uint32(ask[32+56*i+40:])&delalloc != 0 {
			return false, nil
		}
	}
	return n > 0, nil
}

// TestM2LateBounded: who keeps back the daemon's news of a close(2) until after a truncation,
// here with a mapping, again and again, takes no more than a few of its descriptors.
func TestM2LateBounded(t *testing.T) {
	cutMounts(t, func(m *Mount) error {
		f, err := os.Create(m.At("file"))
		mustDo(t, err)
		defer f.Close()
		mustDo(t, f.Truncate(2<<12))
		before := m.openFiles()
		for range 300 {
			closed, err := os.OpenFile(m.At("file"), os.O_RDWR, 0)
			mustDo(t, err)
			mapped, err := unix.Mmap(int(closed.Fd()), 0, 1<<12, unix.PROT_READ, unix.MAP_SHARED)
			mustDo(t, err)
			mustDo(t, closed.Close())
			mustDo(t, f.Truncate(2<<12))
			mustDo(t, unix.Munmap(mapped))
		}
		eventually(m.t, "most are closed", func() bool { return m.openFiles() < before+100 })
		return nil
	})
}

// TestM2LateClosed: what waits for the close(2) of who has cut a file off does not wait for
// who only reads it: as long as the daemon has it open for writing, there is no telling
// whether a mapping still writes to it, and the directory cannot be locked.
func TestM2LateClosed(t *testing.T) {
	cutMounts(t, func(m *Mount) error {
		openDir(t, m.Back("D"))
		path := m.At("D", "file")
		first, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o666)
		mustDo(t, err)
		mustDo(t, first.Truncate(1<<12))
		mapped, err := unix.Mmap(int(first.Fd()), 0, 1<<12, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		mustDo(t, err)
		reader, err := os.Open(path)
		mustDo(t, err)
		defer reader.Close()
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		mustDo(t, err)
		mustDo(t, unix.Sendmsg(pair[0], []byte{0}, unix.UnixRights(int(first.Fd())), nil, 0))
		mustDo(t, first.Close()) // not the last descriptor: that is on its way
		mustDo(t, unix.Munmap(mapped))
		cuts, err := os.OpenFile(path, os.O_RDONLY|os.O_TRUNC, 0)
		mustDo(t, err)
		for _, fd := range pair {
			mustDo(t, unix.Close(fd))
		}
		mustDo(t, cuts.Close())
		a := stranger(t)
		eventually(m.t, "nobody writes there any more", func() bool { return a.Try("creat", m.At("D/devserver"), "wronly,creat,excl") == "ok" })
		return nil
	})
}
