//go:build linux

package main

import (
	"fmt"

	"golang.org/x/sys/unix"
)

const (
	dataName = "big"
	chunk    = 1 << 20
	page     = 4096
)

// inChunks times something on a file, chunk by chunk, with its open and close.
func inChunks(j job, flags, mode int, do func(fd uintptr, at int64) error) (func() (result, error), error) {
	d, err := openDir(j.Dir)
	n, last := cstring(dataName), int(j.Size/chunk)-1
	return func() (result, error) {
		var fd uintptr
		return timed(last+1, func(i int) error {
			if i == 0 {
				if fd, err = d.open(n, flags, mode); err != nil {
					return err
				}
			}
			if err := do(fd, int64(i)*chunk); err != nil || i < last {
				return err
			}
			return closeFD(n, fd)
		})
	}, err
}

func writeLoop(j job) (func() (result, error), error) {
	buf := pattern(chunk)
	return inChunks(j, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY, 0o644, func(fd uintptr, at int64) error {
		return transfer(unix.SYS_PWRITE64, fd, buf, at)
	})
}

func readLoop(j job) (func() (result, error), error) {
	buf, want := make([]byte, chunk), pattern(chunk)
	return inChunks(j, unix.O_RDONLY, 0, func(fd uintptr, at int64) error {
		if err := transfer(unix.SYS_PREAD64, fd, buf, at); err != nil {
			return err
		}
		if buf[chunk-1] != want[chunk-1] {
			return fmt.Errorf("another content at %d than was written", at)
		}
		return nil
	})
}

// mapped times something on the whole file as a shared mapping, chunk by chunk,
// with the mapping itself and its end.
func mapped(flags, prot int, do func(mem []byte) error) loop {
	return func(j job) (func() (result, error), error) {
		var mem []byte
		return inChunks(j, flags, 0, func(fd uintptr, at int64) (err error) {
			if at == 0 {
				if mem, err = unix.Mmap(int(fd), 0, int(j.Size), prot, unix.MAP_SHARED); err != nil {
					return fmt.Errorf("mmap: %w", err)
				}
			}
			if err := do(mem[at : at+chunk]); err != nil || at+chunk < j.Size {
				return err
			}
			if err := unix.Munmap(mem); err != nil {
				return fmt.Errorf("munmap: %w", err)
			}
			return nil
		})
	}
}

// mmapReadLoop looks at a byte of each cache line.
func mmapReadLoop(j job) (func() (result, error), error) {
	return mapped(unix.O_RDONLY, unix.PROT_READ, func(mem []byte) error {
		zeros := 0
		for i := 0; i < len(mem); i += 64 {
			if mem[i] == 0 {
				zeros++
			}
		}
		if zeros > 0 {
			return fmt.Errorf("%d zero bytes, which nobody wrote", zeros)
		}
		return nil
	})(j)
}

// mmapWriteLoop writes to each page.
func mmapWriteLoop(j job) (func() (result, error), error) {
	return mapped(unix.O_RDWR, unix.PROT_READ|unix.PROT_WRITE, func(mem []byte) error {
		for i := 0; i < len(mem); i += page {
			mem[i] = 7
		}
		return nil
	})(j)
}

// randomLoop reads or writes pages all over the file, in the same order each time.
func randomLoop(trap uintptr) loop {
	return func(j job) (func() (result, error), error) {
		d, err := openDir(j.Dir)
		if err != nil {
			return nil, err
		}
		n, buf := cstring(dataName), pattern(page)
		fd, err := d.open(n, unix.O_RDWR, 0)
		next := uint64(88172645463325252) // xorshift
		pages := uint64(j.Size / page)
		return func() (result, error) {
			return timed(j.N, func(int) error {
				next ^= next << 13
				next ^= next >> 7
				next ^= next << 17
				return transfer(trap, fd, buf, int64(next%pages)*page)
			})
		}, err
	}
}
