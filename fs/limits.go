package fs

import (
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
