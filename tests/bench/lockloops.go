//go:build linux

package main

import (
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// cycle does acquisitions and releases of one protocol.
func cycle(protocol func(d dir) func() error) loop {
	return func(j job) (func() (result, error), error) {
		d, err := openDir(j.Dir)
		if err != nil {
			return nil, err
		}
		once := protocol(d)
		return func() (result, error) { return timed(j.N, func(int) error { return once() }) }, once()
	}
}

func lockExcl(d dir) func() error {
	n := cstring(lockName)
	return func() error {
		if err := d.create(n); err != nil {
			return err
		}
		return d.unlink(n)
	}
}

// lockLink does what Python's lockfile does: a file of its own, linked to the
// lock's name, and a look at its link count (which some subjects get wrong).
func lockLink(d dir) func() error {
	host, _ := os.Hostname()
	own := cstring(fmt.Sprintf("%s-%x.%d", host, unix.Gettid(), os.Getpid()))
	n := cstring(lockName + ".lock")
	var st unix.Statx_t
	return func() error {
		if err := d.create(own); err != nil {
			return err
		}
		if err := d.link(own, n); err != nil {
			return err
		}
		if err := d.stat(own, &st); err != nil {
			return err
		}
		if err := d.unlink(own); err != nil {
			return err
		}
		return d.unlink(n)
	}
}

func lockMkdir(d dir) func() error {
	n := cstring(lockName + ".lock")
	return func() error {
		if err := d.mkdir(n); err != nil {
			return err
		}
		return d.rmdir(n)
	}
}

// withLockFile opens the lock file, which stays, for a cycle.
func withLockFile(d dir, lock, unlock func(n cname, fd uintptr) error) func() error {
	n := cstring(lockName)
	return func() error {
		fd, err := d.open(n, unix.O_CREAT|unix.O_RDWR, 0o644)
		if err != nil {
			return err
		}
		if err := lock(n, fd); err != nil {
			return err
		}
		if err := unlock(n, fd); err != nil {
			return err
		}
		return closeFD(n, fd)
	}
}

func lockFlock(d dir) func() error {
	do := func(how uintptr) func(cname, uintptr) error {
		return func(n cname, fd uintptr) error {
			_, err := call("flock", n, unix.SYS_FLOCK, fd, how, 0, 0, 0)
			return err
		}
	}
	return withLockFile(d, do(unix.LOCK_EX|unix.LOCK_NB), do(unix.LOCK_UN))
}

func lockFcntl(d dir) func() error {
	do := func(kind int16) func(cname, uintptr) error {
		whole := unix.Flock_t{Type: kind}
		return func(n cname, fd uintptr) error {
			_, err := call("fcntl", n, unix.SYS_FCNTL, fd, unix.F_SETLK, uintptr(unsafe.Pointer(&whole)), 0, 0)
			return err
		}
	}
	return withLockFile(d, do(unix.F_WRLCK), do(unix.F_UNLCK))
}
