//go:build linux

package procid

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A connector hears from the kernel how each thread of the system ends: the
// process events connector, linux/cn_proc.h. It needs CAP_NET_ADMIN and the
// initial pid, user and network namespaces.
//
// The message is sent after the parent was told that it may reap (exit_notify
// comes before proc_exit_connector in the kernel's do_exit), but by the dying
// thread itself, so it comes also when the process was reaped at once.
type connector struct {
	mu     sync.Mutex
	fd     int   // -1: not open; guarded by mu
	tried  bool  // whether to open it was tried, or is too late; guarded by mu
	failed error // why fd is not open after that; guarded by mu
}

// An exitEvent is the end of one thread.
type exitEvent struct {
	at        uint64 // CLOCK_MONOTONIC, ns
	pid, tgid int
	code      int // a wait status
}

var errDeaf = errors.New("the process events connector does not answer")

const (
	netlinkConnector = 11 // NETLINK_CONNECTOR; golang.org/x/sys has none of these
	cnIdxProc        = 1  // CN_IDX_PROC
	cnValProc        = 1  // CN_VAL_PROC
	procListen       = 1  // PROC_CN_MCAST_LISTEN
	procIgnore       = 2  // PROC_CN_MCAST_IGNORE
	procEventNone    = 0  // PROC_EVENT_NONE, an acknowledgement
	procEventExit    = 1 << 31

	// A message is a struct nlmsghdr, a struct cn_msg and a struct proc_event.
	offIdx, offVal, offAck, offLen = 16, 20, 28, 32
	offWhat, offTime, offData      = 36, 44, 52

	// exitBacklog is room for some ten thousand ends that wait to be read.
	exitBacklog = 8 << 20
)

// openConnector subscribes to the ends of threads.
func openConnector() (fd int, err error) {
	fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, netlinkConnector)
	if err != nil {
		return -1, fmt.Errorf("socket(2): %w", err)
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
			fd = -1
		}
	}()
	if err = filterExits(fd); err != nil {
		return fd, fmt.Errorf("SO_ATTACH_FILTER: %w", err)
	}
	setBacklog(fd)
	if err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1 << (cnIdxProc - 1)}); err != nil {
		return fd, fmt.Errorf("bind(2): %w", err)
	}
	cookie := rand.Uint32()
	if err = tellConnector(fd, procListen, cookie); err != nil {
		return fd, fmt.Errorf("PROC_CN_MCAST_LISTEN: %w", err)
	}
	// The kernel has carried out the request by now. It answers nothing to one
	// from another namespace.
	var buf [256]byte
	for {
		b, err := receive(fd, buf[:])
		switch {
		case err == unix.EAGAIN:
			return fd, errDeaf
		case err != nil && err != unix.ENOBUFS:
			return fd, fmt.Errorf("recvfrom(2): %w", err)
		case b != nil && what(b) == procEventNone && u32(b, offAck) == cookie+1:
			if errno := unix.Errno(u32(b, offData)); errno != 0 {
				return fd, fmt.Errorf("PROC_CN_MCAST_LISTEN: %w", errno)
			}
			return fd, nil
		}
	}
}

func setBacklog(fd int) {
	// Only a privileged process may exceed the limit of rmem_max.
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, exitBacklog) != nil {
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, exitBacklog)
	}
}

// filterExits keeps all other events, forks above all, from waking us.
func filterExits(fd int) error {
	const skip = 2
	value := func(what uint32) uint32 { // filters read in network byte order, the kernel writes in its own
		var b [4]byte
		binary.NativeEndian.PutUint32(b[:], what)
		return binary.BigEndian.Uint32(b[:])
	}
	prog := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offWhat},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: value(procEventExit), Jt: skip},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: value(procEventNone), Jt: skip - 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0},
		{Code: unix.BPF_RET | unix.BPF_K, K: 1<<32 - 1},
	}
	return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(prog)), Filter: &prog[0]})
}

// tellConnector sends a request of the form that all kernels know.
func tellConnector(fd int, op, cookie uint32) error {
	var b [offWhat + 4]byte
	ne := binary.NativeEndian
	ne.PutUint32(b[0:], uint32(len(b)))
	ne.PutUint16(b[4:], unix.NLMSG_DONE)
	ne.PutUint32(b[offIdx:], cnIdxProc)
	ne.PutUint32(b[offVal:], cnValProc)
	ne.PutUint32(b[offAck:], cookie)
	ne.PutUint16(b[offLen:], uint16(unsafe.Sizeof(op)))
	ne.PutUint32(b[offWhat:], op)
	return unix.Sendto(fd, b[:], 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
}

// receive reads a message without waiting. It returns nil for one that is not
// the kernel's, or not of this kind.
func receive(fd int, buf []byte) ([]byte, error) {
	for {
		n, from, err := unix.Recvfrom(fd, buf, unix.MSG_DONTWAIT)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, err
		}
		b := buf[:n]
		sender, ok := from.(*unix.SockaddrNetlink)
		if !ok || sender.Pid != 0 || len(b) < offData+12 || u32(b, offIdx) != cnIdxProc || u32(b, offVal) != cnValProc {
			return nil, nil
		}
		return b, nil
	}
}

func u32(b []byte, off int) uint32 { return binary.NativeEndian.Uint32(b[off:]) }

func what(b []byte) uint32 { return u32(b, offWhat) }

// parseExit reads a message of procEventExit.
func parseExit(b []byte) exitEvent {
	return exitEvent{
		at:   binary.NativeEndian.Uint64(b[offTime:]),
		pid:  int(u32(b, offData)),
		tgid: int(u32(b, offData+4)),
		code: int(u32(b, offData+8)),
	}
}
