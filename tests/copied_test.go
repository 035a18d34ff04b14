//go:build linux

package tests

import (
	"fmt"
	"os"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// TestM2MappedWhileCopied: what is stored in a mapping while somebody else copies to
// another part of the same page with copy_file_range(2) is there.
func TestM2MappedWhileCopied(t *testing.T) {
	cutMounts(t, mapWhileCopied)
}

func mapWhileCopied(m *Mount) error {
	const size = 4096
	for _, name := range []string{"file", "source"} {
		if err := os.WriteFile(m.Back(name), make([]byte, size), 0o644); err != nil {
			return err
		}
	}
	// Who only reads a small file comes first: then all have it through the kernel's pages.
	var fds [4]int
	for i, name := range []string{"file", "file", "file", "source"} {
		fd, err := unix.Open(m.At(name), []int{unix.O_RDONLY, unix.O_RDWR, unix.O_WRONLY, unix.O_RDONLY}[i]|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		fds[i] = fd
	}
	mapped, err := unix.Mmap(fds[1], 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	defer unix.Munmap(mapped)

	var over atomic.Bool
	copied := make(chan error)
	go func() {
		for !over.Load() {
			from, to := int64(0), int64(size/2)
			if n, err := unix.CopyFileRange(fds[3], &from, fds[2], &to, size/2, 0); err != nil || n != size/2 {
				copied <- fmt.Errorf("copy_file_range: %d, %w", n, err)
				return
			}
		}
		copied <- nil
	}()
	stored := (*uint64)(unsafe.Pointer(&mapped[0]))
	lost, n := 0, uint64(0)
	for until := seconds(1); time.Now().Before(until); {
		for range 1000 {
			n++
			atomic.StoreUint64(stored, n)
			for range 100 {
				if atomic.LoadUint64(stored) != n {
					lost++
					break
				}
			}
		}
	}
	over.Store(true)
	if err := <-copied; err != nil {
		return err
	}
	if lost > 0 {
		return fmt.Errorf("%d of %d numbers that were stored are gone", lost, n)
	}
	return nil
}
