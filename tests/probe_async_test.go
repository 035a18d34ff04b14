//go:build linux

package tests

import (
	"fmt"
	"strings"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// asyncProbes are about I/O that other threads carry out, and other requests.
func asyncProbes() []probeCase {
	return []probeCase{
		{"io_submit", probeAIO},
		{"io_uring", probeRing},
		{"io_uring past the page cache", probeDirectRing},
	}
}

// An iocb is struct iocb of linux/aio_abi.h, and an ioEvent what it ends with.
type iocb struct {
	_         [2]uint64
	op, _     uint16
	fd        uint32
	buf, size uint64
	offset    int64
	_         [2]uint64
}

type ioEvent struct {
	data, obj uint64
	res, res2 int64
}

func probeAIO(p *probe) {
	const read, write, fsync = 0, 1, 2
	var ctx uintptr
	if _, _, errno := unix.Syscall(unix.SYS_IO_SETUP, 8, uintptr(unsafe.Pointer(&ctx)), 0); errno != 0 {
		p.try("io_setup", errno)
		return
	}
	defer unix.Syscall(unix.SYS_IO_DESTROY, ctx, 0, 0)
	buf, err := unix.Mmap(-1, 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	p.must(err)
	defer unix.Munmap(buf)
	do := func(what string, fd int, op uint16, size int, at int64) {
		c := &iocb{op: op, fd: uint32(fd), buf: uint64(uintptr(unsafe.Pointer(&buf[0]))), size: uint64(size), offset: at}
		if op == fsync {
			c.buf, c.size, c.offset = 0, 0, 0
		}
		if _, _, errno := unix.Syscall(unix.SYS_IO_SUBMIT, ctx, 1, uintptr(unsafe.Pointer(&c))); errno != 0 {
			p.try(what+", submit", errno)
			return
		}
		var e ioEvent
		n, errno := uintptr(0), unix.EINTR
		for errno == unix.EINTR {
			n, _, errno = unix.Syscall6(unix.SYS_IO_GETEVENTS, ctx, 1, 1, uintptr(unsafe.Pointer(&e)), 0, 0)
		}
		p.note("%s: %d event, result %d, errno %d, %q", what, n, e.res, errno, brief(buf[:16]))
	}
	for _, flags := range []int{0, unix.O_DIRECT, unix.O_APPEND} {
		fd := p.open("f"+hex(flags), unix.O_RDWR|unix.O_CREAT|flags)
		copy(buf, strings.Repeat("content.", 1024))
		do("write", fd, write, 8192, 0)
		copy(buf, "changed")
		do("write further on", fd, write, 4096, 4096)
		do("read", fd, read, 4096, 0)
		do("read over the end", fd, read, 8192, 4096)
		do("read after the end", fd, read, 4096, 1<<20)
		do("misaligned", fd, read, 100, 3)
		do("before the start", fd, read, 4096, -1)
		do("fsync", fd, fsync, 0, 0)
		unix.Close(fd)
		do("closed", fd, read, 4096, 0)
		p.content("f" + hex(flags))
	}
	fd := p.open("f0", unix.O_RDONLY)
	do("write to one opened to read", fd, write, 10, 0)
	unix.Close(fd)
}

// A ring is an io_uring with eight entries.
type ring struct {
	fd           int
	sqes         []byte
	sq, cq       []byte
	sqOff, cqOff [10]uint32
}

// openRing sets up an io_uring: struct io_uring_params of linux/io_uring.h.
func openRing() (*ring, error) {
	var params struct {
		sqEntries, cqEntries, flags, cpu, idle, features, wqFD uint32
		reserved                                               [3]uint32
		sq, cq                                                 [10]uint32
	}
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 8, uintptr(unsafe.Pointer(&params)), 0)
	if errno != 0 {
		return nil, errno
	}
	r := &ring{fd: int(fd), sqOff: params.sq, cqOff: params.cq}
	for _, m := range []struct {
		to   *[]byte
		off  int64
		size int
	}{
		{&r.sq, 0, int(params.sq[6] + 4*params.sqEntries)},
		{&r.cq, 0x8000000, int(params.cq[5] + 16*params.cqEntries)},
		{&r.sqes, 0x10000000, int(64 * params.sqEntries)},
	} {
		b, err := unix.Mmap(r.fd, m.off, m.size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			return nil, err
		}
		*m.to = b
	}
	return r, nil
}

func word(b []byte, off uint32) *uint32 { return (*uint32)(unsafe.Pointer(&b[off])) }

// do carries out one request and waits for its end.
func (r *ring) do(op uint8, fd int, addr uint64, size int, off uint64, flags uint32, sqeFlags uint8) int32 {
	tail := word(r.sq, r.sqOff[1])
	i := *tail & *word(r.sq, r.sqOff[2])
	e := r.sqes[64*i : 64*i+64]
	clear(e)
	e[0], e[1] = op, sqeFlags
	*word(e, 4) = uint32(fd)
	*(*uint64)(unsafe.Pointer(&e[8])) = off
	*(*uint64)(unsafe.Pointer(&e[16])) = addr
	*word(e, 24), *word(e, 28) = uint32(size), flags
	*word(r.sq, r.sqOff[6]+4*i) = i
	*tail++
	head, filled := word(r.cq, r.cqOff[0]), word(r.cq, r.cqOff[1])
	// A signal, as Go's runtime sends them, ends the wait as if it had succeeded.
	for submit := uintptr(1); submit == 1 || atomic.LoadUint32(filled) == *head; submit = 0 {
		if _, _, errno := unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), submit, 1, 1, 0, 0); errno != 0 && (submit == 1 || errno != unix.EINTR) {
			return -int32(errno)
		}
	}
	at := r.cqOff[5] + 16*(*head&*word(r.cq, r.cqOff[2]))
	res := int32(*word(r.cq, at+8))
	*head++
	return res
}

func probeRing(p *probe) {
	const (
		fsync, fallocate, openat, closeFD, statx, read, write = 3, 17, 18, 19, 21, 22, 23
		renameat, unlinkat, mkdirat, symlinkat, linkat        = 35, 36, 37, 38, 39

		async = 1 << 4
	)
	r, err := openRing()
	if !p.try("io_uring_setup", err) {
		return
	}
	defer unix.Close(r.fd)
	// What requests point at is where no garbage collector moves it.
	arena, err := unix.Mmap(-1, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	p.must(err)
	defer unix.Munmap(arena)
	used := 0
	memory := func(size int) []byte {
		b := arena[used : used+size]
		used += (size + 63) &^ 63
		return b
	}
	addr := func(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(&b[0]))) }
	path := func(name string) uint64 {
		b := memory(len(p.at(name)) + 1)
		copy(b, p.at(name))
		return addr(b)
	}
	const cwd, toCwd = unix.AT_FDCWD, 0xffffff9c
	for _, flag := range []uint8{0, async} {
		tag := fmt.Sprint("f", flag)
		note := func(what string, res int32) { p.note("%s: %s", what, errnoName(resultOf(res))) }
		size := func(what string, res int32) { p.note("%s: %d", what, res) }
		res := r.do(openat, cwd, path(tag), 0o640, 0, unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, flag)
		note("open", min(res, 0))
		fd := int(res)
		buf, got, st := memory(16_000), memory(20_000), memory(256)
		copy(buf, strings.Repeat("content.", 2000))
		size("write", r.do(write, fd, addr(buf), len(buf), 0, 0, flag))
		size("write at the position", r.do(write, fd, addr(buf), 100, ^uint64(0), 0, flag))
		n := r.do(read, fd, addr(got), len(got), 10, 0, flag)
		p.note("read: %d %s", n, brief(got[:max(n, 0)]))
		size("read after the end", r.do(read, fd, addr(got), 100, 1<<20, 0, flag))
		note("fsync", r.do(fsync, fd, 0, 0, 0, 0, flag))
		note("fallocate", r.do(fallocate, fd, 30_000, 0, 0, 0, flag))
		note("statx", r.do(statx, cwd, path(tag), unix.STATX_BASIC_STATS, addr(st), 0, flag))
		p.note("size %d", *(*uint64)(unsafe.Pointer(&st[40])))
		note("mkdir", r.do(mkdirat, cwd, path(tag+"d"), 0o750, 0, 0, flag))
		note("link", r.do(linkat, cwd, path(tag), toCwd, path(tag+"new"), 0, flag))
		note("link again", r.do(linkat, cwd, path(tag), toCwd, path(tag+"new"), 0, flag))
		note("rename", r.do(renameat, cwd, path(tag), toCwd, path(tag+"renamed"), 0, flag))
		note("rename none", r.do(renameat, cwd, path("none"), toCwd, path(tag+"renamed"), 0, flag))
		note("symlink", r.do(symlinkat, cwd, path("f"), 0, path(tag+"sym"), 0, flag))
		note("unlink", r.do(unlinkat, cwd, path(tag+"new"), 0, 0, 0, flag))
		note("unlink a directory", r.do(unlinkat, cwd, path(tag+"d"), 0, 0, 0, flag))
		note("close", r.do(closeFD, fd, 0, 0, 0, 0, 0))
		note("read of what is closed", r.do(read, fd, addr(got), 10, 0, 0, flag))
		p.content(tag + "renamed")
		p.must(unix.Unlink(p.at(tag + "sym"))) // it names the directory
	}
}

// probeDirectRing is about requests that end before the memory that was given does.
func probeDirectRing(p *probe) {
	const read, write, async, atPosition = 22, 23, 1 << 4, ^uint64(0)
	r, err := openRing()
	if !p.try("io_uring_setup", err) {
		return
	}
	defer unix.Close(r.fd)
	buf, err := unix.Mmap(-1, 0, 8*4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	p.must(err)
	defer unix.Munmap(buf)
	addr := uint64(uintptr(unsafe.Pointer(&buf[0])))
	for _, flag := range []uint8{0, async} {
		name := fmt.Sprint("f", flag)
		fd := p.open(name, unix.O_RDWR|unix.O_CREAT|unix.O_DIRECT)
		for _, c := range "abc" {
			copy(buf, strings.Repeat(string(c), 4096))
			p.note("write at the position: %d", r.do(write, fd, addr, 4096, atPosition, 0, flag))
		}
		for _, at := range []uint64{0, 4096, 3 * 4096} {
			clear(buf)
			n := r.do(read, fd, addr, len(buf), at, 0, flag)
			p.note("read over the end from %d on: %d %s", at, n, brief(buf))
		}
		p.must(unix.Close(fd))
		p.content(name)
	}
}

func resultOf(res int32) error {
	if res < 0 {
		return unix.Errno(-res)
	}
	return nil
}
