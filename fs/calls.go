package fs

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// CheckCalls fails with [ErrNoCall] if a system call is missing that nothing takes the
// place of: Linux 5.10 has them all, but a container's seccomp profile may forbid one that
// is younger than the profile.
func CheckCalls() error {
	for _, call := range []struct {
		name string
		try  func() error
	}{
		{"statx", func() error { return unix.Statx(unix.AT_FDCWD, "/", 0, unix.STATX_INO, new(unix.Statx_t)) }},
		{"faccessat2", func() error { return unix.Faccessat2(unix.AT_FDCWD, "/", unix.F_OK, unix.AT_EACCESS) }},
		{"pidfd_open", func() error {
			fd, err := unix.PidfdOpen(os.Getpid(), 0)
			if err == nil {
				unix.Close(fd)
			}
			return err
		}},
	} {
		if err := call.try(); err == unix.EPERM || err == unix.ENOSYS {
			return fmt.Errorf("%w: %s(2): %w", ErrNoCall, call.name, err)
		}
	}
	return nil
}
