//go:build linux

package procid

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// From linux/pidfd.h; golang.org/x/sys has none of these.
const (
	pidfdThread   = unix.O_EXCL // PIDFD_THREAD, Linux 6.9
	pidfdInfoExit = 1 << 3      // PIDFD_INFO_EXIT, Linux 6.15

	// PIDFD_GET_INFO, Linux 6.13: _IOWR(0xFF, 11, struct pidfd_info) with the
	// size of the struct's first version, which later kernels accept too. (On an
	// architecture that encodes ioctls otherwise it fails, and /proc is read.)
	pidfdGetInfo = 3<<30 | unsafe.Sizeof(pidfdInfo{})<<16 | 0xFF<<8 | 11
)

// pidfdInfo is struct pidfd_info of linux/pidfd.h up to PIDFD_INFO_SIZE_VER0.
type pidfdInfo struct {
	mask     uint64
	cgroupid uint64
	pid      uint32
	tgid     uint32
	ppid     uint32
	ruid     uint32
	rgid     uint32
	euid     uint32
	egid     uint32
	suid     uint32
	sgid     uint32
	fsuid    uint32
	fsgid    uint32
	exitCode int32
}

// pidfdOpen refers to a thread group by its leader's id, or with pidfdThread to
// one thread. The kernel sets close-on-exec by itself.
func pidfdOpen(pid, flags int) (int, error) {
	for {
		fd, err := unix.PidfdOpen(pid, flags)
		if err != unix.EINTR {
			return fd, err
		}
	}
}

// readable reports whether fd has something to say: for a pidfd, that the
// thread group is gone but for zombies, or with pidfdThread that the thread is. Where
// poll(2) can't tell, as it may not with a RLIMIT_NOFILE of 0, it is that it was reaped:
// so long no other one has its number.
//
// It bypasses the scheduler's bookkeeping (RawSyscall) since a poll without a
// timeout never waits.
func readable(fd int) bool {
	for {
		p := unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}
		var now unix.Timespec
		n, _, errno := unix.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&p)), 1, uintptr(unsafe.Pointer(&now)), 0, 0, 0)
		if errno == unix.EINTR { // also without a timeout: Go's own preemption signal
			continue
		}
		if errno != 0 {
			return unix.PidfdSendSignal(fd, 0, nil, 0) == unix.ESRCH
		}
		return n != 0
	}
}

// info asks a pidfd who it is. mask selects what is wanted beyond the ids and
// credentials, which are always there while the process is not reaped.
func info(fd int, mask uint64) (pidfdInfo, error) {
	in := pidfdInfo{mask: mask}
	_, _, errno := unix.RawSyscall(unix.SYS_IOCTL, uintptr(fd), pidfdGetInfo, uintptr(unsafe.Pointer(&in)))
	if errno != 0 {
		return pidfdInfo{}, errno
	}
	return in, nil
}
