//go:build linux

package main

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// What comes first must not pay for what comes after it, nor the other way
// round: each step begins with all written out and with memory at hand, and
// each subject has a part of the disk to itself.

// settle writes out what earlier steps left dirty, and has the memory ready that
// the next one needs.
func settle(root string, memory int64) error {
	d, err := os.Open(root)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := unix.Syncfs(int(d.Fd())); err != nil {
		return err
	}
	return touch(memory)
}

// touch takes memory and gives it back at once, so that it is the next that the
// kernel hands out. The pages of a virtual machine that nobody has used so far,
// or not for some seconds, are the host's to find first: that makes the same
// write(2) up to ten times as slow for whoever meets them.
func touch(size int64) error {
	mem, err := unix.Mmap(-1, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	if err != nil {
		return fmt.Errorf("%d bytes of memory: %w", size, err)
	}
	return unix.Munmap(mem)
}

// memory is how much a step may take of it.
func (s step) memory(z size) int64 {
	if s.narrow {
		return z.data + z.data/4 // the large file, and what goes with it
	}
	return z.data / 4
}

// spread makes a directory what ext4 calls the top of a hierarchy, as chattr(1)
// does with T: what is made in it lies elsewhere on the disk than what was made
// beside it. Without a journal (see inImage), a group of inodes in which another
// subject has just removed some thousand makes creating a file there take ten times
// as long. Other file systems have no such flag.
func spread(dir string) error {
	const topdir = 0x20000 // FS_TOPDIR_FL of linux/fs.h
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	flags, err := unix.IoctlGetUint32(int(f.Fd()), unix.FS_IOC_GETFLAGS)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, int(flags|topdir))
	}
	if errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EPERM) || errors.Is(err, unix.EINVAL) {
		return nil
	}
	return err
}
