package transport

import (
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// What of io_uring's interface is used here; see io_uring(7).
const (
	ringSetupCQSize       = 1 << 3
	ringSetupSQE128       = 1 << 10
	ringSetupSingleIssuer = 1 << 12
	ringSetupDeferTaskrun = 1 << 13
	ringFeatSingleMmap    = 1 << 0
	ringEnterGetevents    = 1 << 0
	ringEnterRegistered   = 1 << 4
	ringRegisterRingFds   = 20
	ringOpRead            = 22
	ringOpUringCmd        = 46
	ringOffRings          = 0
	ringOffSQEs           = 0x10000000
)

type ringParams struct {
	sqEntries, cqEntries, flags, sqThreadCPU, sqThreadIdle, features, wqFd uint32

	_  [3]uint32
	sq struct {
		head, tail, mask, entries, flags, dropped, array, _ uint32

		_ uint64
	}
	cq struct {
		head, tail, mask, entries, overflow, cqes, flags, _ uint32

		_ uint64
	}
}

// A ringSQE is a submission of 128 bytes that carries a command to a file.
type ringSQE struct {
	opcode, flags uint8
	ioprio        uint16
	fd            int32
	cmd           uint32
	_             uint32
	addr          uint64
	len           uint32
	cmdFlags      uint32
	userData      uint64
	_             [8]byte
	payload       [80]byte
}

type ringCQE struct {
	userData uint64
	res      int32
	flags    uint32
}

// A ring is an io_uring of the thread that made it.
type ring struct {
	fd         int
	enterFd    uintptr
	enterFlags uintptr
	rings, sqe []byte

	sqEntries      uint32
	sqTail, sqHead *uint32
	cqTail, cqHead *uint32
	cqMask         uint32
	cqes           unsafe.Pointer
	sqe0           *ringSQE // of a ring with room for one command

	endure func(error) bool // decides whether a call that failed is made again; nil: it is not
}

// newRing makes a ring for the calling thread, which is locked to its
// goroutine. It has room for so many commands, and so many completions.
func newRing(commands, completions uint32) (*ring, error) {
	p := ringParams{flags: ringSetupSQE128 | ringSetupSingleIssuer | ringSetupDeferTaskrun | ringSetupCQSize, cqEntries: completions}
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, uintptr(commands), uintptr(unsafe.Pointer(&p)), 0)
	if errno != 0 {
		return nil, fmt.Errorf("io_uring_setup: %w", errno)
	}
	r := &ring{fd: int(fd), enterFd: fd, sqEntries: p.sqEntries}
	if p.features&ringFeatSingleMmap == 0 {
		r.close()
		return nil, fmt.Errorf("io_uring_setup: %w", unix.ENOSYS)
	}
	size := max(int(p.sq.array+p.sqEntries*4), int(p.cq.cqes+p.cqEntries*uint32(unsafe.Sizeof(ringCQE{}))))
	var err error
	prot, flags := unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE
	if r.rings, err = unix.Mmap(r.fd, ringOffRings, size, prot, flags); err == nil {
		r.sqe, err = unix.Mmap(r.fd, ringOffSQEs, int(p.sqEntries)*int(unsafe.Sizeof(ringSQE{})), prot, flags)
	}
	if err != nil {
		r.close()
		return nil, fmt.Errorf("io_uring: mmap: %w", err)
	}
	at := func(off uint32) *uint32 { return (*uint32)(unsafe.Pointer(&r.rings[off])) }
	r.sqHead, r.sqTail = at(p.sq.head), at(p.sq.tail)
	r.cqHead, r.cqTail, r.cqMask = at(p.cq.head), at(p.cq.tail), *at(p.cq.mask)
	r.cqes = unsafe.Pointer(&r.rings[p.cq.cqes])
	r.sqe0 = (*ringSQE)(unsafe.Pointer(&r.sqe[0]))
	for i := range p.sqEntries {
		*at(p.sq.array + 4*i) = i
	}
	r.register()
	// That it can be made does not mean that it may be used.
	if _, _, errno := unix.Syscall6(unix.SYS_IO_URING_ENTER, r.enterFd, 0, 0, ringEnterGetevents|r.enterFlags, 0, 0); errno != 0 {
		r.close()
		return nil, fmt.Errorf("io_uring_enter: %w", errno)
	}
	return r, nil
}

// register spares each enter the look-up of the descriptor. The kernel may
// refuse.
func (r *ring) register() {
	up := struct {
		offset, _ uint32
		data      uint64
	}{^uint32(0), 0, uint64(r.fd)}
	n, _, errno := unix.Syscall6(unix.SYS_IO_URING_REGISTER, uintptr(r.fd), ringRegisterRingFds, uintptr(unsafe.Pointer(&up)), 1, 0, 0)
	if errno == 0 && n == 1 {
		r.enterFd, r.enterFlags = uintptr(up.offset), ringEnterRegistered
	}
}

// next returns the place of the next command; submit queues it.
func (r *ring) next() (*ringSQE, error) {
	if *r.sqTail-atomic.LoadUint32(r.sqHead) == r.sqEntries {
		if err := r.flush(); err != nil {
			return nil, err
		}
	}
	return (*ringSQE)(unsafe.Pointer(&r.sqe[uintptr(*r.sqTail&(r.sqEntries-1))*unsafe.Sizeof(ringSQE{})])), nil
}

// flush hands over what was submitted.
func (r *ring) flush() error {
	for {
		n := *r.sqTail - atomic.LoadUint32(r.sqHead)
		if n == 0 {
			return nil
		}
		if err := r.call(n, 0); err != nil {
			return err
		}
	}
}

// ringPause is how long a thread leaves the kernel alone that has carried out nothing.
const ringPause = time.Millisecond

// call has the kernel take so many commands, and waits for as many completions, unless it is
// to be made again.
func (r *ring) call(submit, complete uint32) error {
	_, _, errno := unix.Syscall6(unix.SYS_IO_URING_ENTER, r.enterFd, uintptr(submit), uintptr(complete), ringEnterGetevents|r.enterFlags, 0, 0)
	switch errno {
	case 0, unix.EINTR:
		return nil
	case unix.EAGAIN, unix.EBUSY:
	default:
		if err := fmt.Errorf("io_uring_enter: %w", errno); r.endure == nil || !r.endure(err) {
			return err
		}
	}
	time.Sleep(ringPause)
	return nil
}

// submit queues what is in sqe0; enter tells the kernel.
func (r *ring) submit() { atomic.AddUint32(r.sqTail, 1) }

// enter hands over what was submitted and, if wait is set, returns with a
// completion.
func (r *ring) enter(wait bool) (ringCQE, error) {
	for {
		head := *r.cqHead
		if head != atomic.LoadUint32(r.cqTail) {
			c := *(*ringCQE)(unsafe.Add(r.cqes, uintptr(head&r.cqMask)*unsafe.Sizeof(ringCQE{})))
			atomic.StoreUint32(r.cqHead, head+1)
			return c, nil
		}
		submit := *r.sqTail - atomic.LoadUint32(r.sqHead)
		if submit == 0 && !wait {
			return ringCQE{}, errNoCompletion
		}
		var complete uint32
		if wait {
			complete = 1
		}
		if err := r.call(submit, complete); err != nil {
			return ringCQE{}, err
		}
	}
}

// takeBack forgets what was submitted and, as an enter has failed, not handed over.
func (r *ring) takeBack() { atomic.StoreUint32(r.sqTail, atomic.LoadUint32(r.sqHead)) }

func (r *ring) close() {
	for _, m := range [][]byte{r.sqe, r.rings} {
		if m != nil {
			unix.Munmap(m)
		}
	}
	unix.Close(r.fd)
}
