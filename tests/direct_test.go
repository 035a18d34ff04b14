//go:build linux

package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestM2DirectAlignment: which reads and writes O_DIRECT is too strict for is the
// backing's to say: ext4 refuses what is not aligned, btrfs and tmpfs take it.
func TestM2DirectAlignment(t *testing.T) {
	asOnEach(t, direct)
}

// direct tells what becomes of reads and writes with O_DIRECT at some offsets, and of
// the file.
func direct(t *testing.T, dir string) (log string) {
	t.Helper()
	path := filepath.Join(dir, "file")
	mustDo(t, os.WriteFile(path, make([]byte, 10_000), 0o644))
	for _, mode := range []int{unix.O_RDONLY, unix.O_RDWR} {
		fd, err := unix.Open(path, mode|unix.O_DIRECT, 0)
		if err != nil && filepath.Base(dir) == "bare" {
			t.Skipf("open: %v", err) // tmpfs before Linux 6.6
		}
		mustDo(t, err)
		for _, at := range []struct{ offset, size int }{{0, 4096}, {0, 1000}, {100, 4096}, {4096, 8192}, {10_000, 100}, {20_000, 4096}} {
			buf := alignedBuffer(at.size)
			n, err := unix.Pread(fd, buf, int64(at.offset))
			log += fmt.Sprintf("%#x read %v: %d %v\n", mode, at, n, err)
			if mode == unix.O_RDWR && at.size%512 != 0 {
				for i := range buf {
					buf[i] = 'w'
				}
				n, err = unix.Pwrite(fd, buf, int64(at.offset))
				log += fmt.Sprintf("write %v: %d %v\n", at, n, err)
			}
		}
		mustDo(t, unix.Close(fd))
	}
	data, err := os.ReadFile(path)
	mustDo(t, err)
	return log + fmt.Sprintf("%d bytes, %d of them written\n", len(data), strings.Count(string(data), "w"))
}
