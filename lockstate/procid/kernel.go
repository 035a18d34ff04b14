//go:build linux

package procid

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// A kernel is what the running kernel offers.
type kernel struct {
	threads bool // PIDFD_THREAD, Linux 6.9
	info    bool // PIDFD_GET_INFO, Linux 6.13
	exits   bool // PIDFD_INFO_EXIT, Linux 6.15: it works also after the end
	blind   bool // of ends, for the tests
}

// probe finds out what the kernel offers by trying it on this process. It fails
// where not even the ways of Linux 5.10 work.
func probe(compat bool) (kernel, error) {
	// A /proc of another pid namespace would answer for other processes.
	self, err := os.Readlink("/proc/self")
	if err != nil {
		return kernel{}, fmt.Errorf("cannot tell processes apart without /proc: %w", err)
	}
	pid := os.Getpid()
	if self != fmt.Sprint(pid) {
		return kernel{}, fmt.Errorf("/proc belongs to another pid namespace: it calls process %d %s", pid, self)
	}
	if _, err := readStat(pid); err != nil {
		return kernel{}, fmt.Errorf("cannot tell processes apart: %w", err)
	}
	fd, err := pidfdOpen(pid, 0)
	if err != nil {
		return kernel{}, fmt.Errorf("pidfd_open(2): %w", err)
	}
	defer unix.Close(fd)
	if compat {
		return kernel{}, nil
	}
	var k kernel
	if fd, err := pidfdOpen(pid, pidfdThread); err == nil {
		k.threads = true
		unix.Close(fd)
	}
	in, err := info(fd, 0)
	k.info = err == nil && in.tgid == uint32(pid)
	k.exits = k.info && since(6, 15)
	return k, nil
}

// since reports whether this is the given version of Linux or a later one. It
// is for what cannot be tried: here, that would take a dead process. A kernel
// that has more than its version says only loses a shorter way.
func since(major, minor int) bool {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return false
	}
	var a, b int
	n, _ := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &a, &b)
	return n == 2 && (a > major || a == major && b >= minor)
}
