//go:build linux

package tests

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// TestW3PinnedPages: nobody registers pages of a file with io_uring, by which it could
// be changed when it is mapped no more: of a mapping nothing would be left to see. On a
// bare tmpfs that works.
func TestW3PinnedPages(t *testing.T) {
	need(t, "root", "fuse")
	for _, kind := range []string{"tmpfs", "ext4"} {
		t.Run(kind, func(t *testing.T) {
			dir := filepath.Join(tempDir(t), "fs")
			if kind == "tmpfs" {
				mustDo(t, os.Mkdir(dir, 0o755))
				mustDo(t, unix.Mount("none", dir, "tmpfs", 0, ""))
				t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
				if err := pin(t, filepath.Join(dir, "bare")); err != nil {
					t.Skipf("io_uring registers no pages here: %v", err)
				}
			} else {
				dir = newImage(t, 16).Dir
			}
			static := filepath.Join(dir, "static")
			openDir(t, static)
			m := mountDir(t, static, filepath.Join(tempDir(t), "mnt"))
			if err := pin(t, m.At("file")); err == nil {
				t.Error("io_uring has registered a page of a file")
			}
			a := agent(t)
			a.must("mkdir", m.At("D"))
			a.must("creat", m.At("D/file"), "wronly,creat,excl")
		})
	}
}

// pin registers a page of a file for I/O with io_uring, and gives it back.
func pin(t *testing.T, path string) error {
	t.Helper()
	f, err := os.Create(path)
	mustDo(t, err)
	defer f.Close()
	mustDo(t, f.Truncate(4096))
	page, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	mustDo(t, err)
	defer unix.Munmap(page)
	page[0] = 'x'
	var params [120]byte // struct io_uring_params
	ring, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&params)), 0)
	if errno != 0 {
		return errno
	}
	defer unix.Close(int(ring))
	const registerBuffers = 0
	buffer := unix.Iovec{Base: &page[0], Len: 4096}
	_, _, errno = unix.Syscall6(unix.SYS_IO_URING_REGISTER, ring, registerBuffers, uintptr(unsafe.Pointer(&buffer)), 1, 0, 0)
	runtime.KeepAlive(page)
	if errno != 0 {
		return errno
	}
	return nil
}
