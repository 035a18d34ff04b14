package fs

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// raiseDescriptors lets the daemon have as many files open as the kernel
// allows: it has one for each that any of its clients has open, and each of
// those may have as many as it may itself. A sandbox may forbid it.
func raiseDescriptors() {
	b, err := os.ReadFile("/proc/sys/fs/nr_open")
	if err != nil {
		return
	}
	most, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		return
	}
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &lim) == nil && lim.Max < most {
		unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: most, Max: most})
	}
}

// maxDescriptors is how many descriptors the daemon may have.
func maxDescriptors() uint64 {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		return 512
	}
	return lim.Cur
}

// raiseLimits takes the limits off that would end what others write, or the daemon
// itself: they are of whoever started it. It returns what it could not raise.
func raiseLimits() (left []string) {
	for _, l := range []struct {
		which int
		text  string
	}{
		{unix.RLIMIT_FSIZE, "the limit on file sizes (ulimit -f) cannot be raised: no file whose data goes through the daemon can grow beyond %d bytes, whoever writes"},
		{unix.RLIMIT_CPU, "the limit on CPU time (ulimit -t) cannot be raised: the daemon is killed when it has used %d s"},
		{unix.RLIMIT_AS, "the limit on virtual memory (ulimit -v) cannot be raised: the daemon ends when it needs more than %d bytes"},
		{unix.RLIMIT_DATA, "the limit on data memory (ulimit -d) cannot be raised: the daemon ends when it needs more than %d bytes"},
	} {
		var lim unix.Rlimit
		if unix.Getrlimit(l.which, &lim) != nil || lim.Cur == unix.RLIM_INFINITY {
			continue
		}
		if unix.Setrlimit(l.which, &unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}) == nil {
			continue
		}
		// An ordinary user may go as far as his hard limit.
		if unix.Setrlimit(l.which, &unix.Rlimit{Cur: lim.Max, Max: lim.Max}) == nil {
			lim.Cur = lim.Max
		}
		if lim.Cur != unix.RLIM_INFINITY {
			left = append(left, fmt.Sprintf(l.text, lim.Cur))
		}
	}
	return left
}

// obeyQuotas gives up the right to exceed disk quotas, capabilities(7), which
// would count for what the daemon writes for others, and with passthrough for
// what they write themselves.
func (c *capabilities) obeyQuotas() {
	const bit = 1 << unix.CAP_SYS_RESOURCE
	if c.data[0].Effective&bit == 0 {
		return
	}
	c.data[0].Effective &^= bit
	h, d := c.header, c.data
	h.Pid = 0
	// All threads have the same rights. In a build with cgo this fails, and
	// root's right stays.
	syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&h)), uintptr(unsafe.Pointer(&d[0])), 0)
}
