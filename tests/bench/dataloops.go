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

func writeLoop(j job) (func() (result, error), error) {
	d, err := openDir(j.Dir)
	n, buf := cstring(dataName), pattern(chunk)
	return func() (result, error) {
		return timed(1, func(int) error {
			fd, err := d.open(n, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY, 0o644)
			if err != nil {
				return err
			}
			for at := int64(0); at < j.Size; at += chunk {
				if err := transfer(unix.SYS_PWRITE64, fd, buf, at); err != nil {
					return err
				}
			}
			return closeFD(n, fd)
		})
	}, err
}

func readLoop(j job) (func() (result, error), error) {
	d, err := openDir(j.Dir)
	n, buf, want := cstring(dataName), make([]byte, chunk), pattern(chunk)
	return func() (result, error) {
		return timed(1, func(int) error {
			fd, err := d.open(n, unix.O_RDONLY, 0)
			if err != nil {
				return err
			}
			for at := int64(0); at < j.Size; at += chunk {
				if err := transfer(unix.SYS_PREAD64, fd, buf, at); err != nil {
					return err
				}
				if buf[chunk-1] != want[chunk-1] {
					return fmt.Errorf("another content at %d than was written", at)
				}
			}
			return closeFD(n, fd)
		})
	}, err
}

// mapped times something on the whole file as a shared mapping, with the
// mapping itself and its end.
func mapped(flags, prot int, do func(mem []byte) error) loop {
	return func(j job) (func() (result, error), error) {
		d, err := openDir(j.Dir)
		n := cstring(dataName)
		return func() (result, error) {
			return timed(1, func(int) error {
				fd, err := d.open(n, flags, 0)
				if err != nil {
					return err
				}
				mem, err := unix.Mmap(int(fd), 0, int(j.Size), prot, unix.MAP_SHARED)
				if err != nil {
					return fmt.Errorf("mmap: %w", err)
				}
				if err := do(mem); err != nil {
					return err
				}
				if err := unix.Munmap(mem); err != nil {
					return fmt.Errorf("munmap: %w", err)
				}
				return closeFD(n, fd)
			})
		}, err
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
