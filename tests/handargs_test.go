//go:build linux

package tests

import (
	"encoding/binary"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// alignedBuffer is good for O_DIRECT.
func alignedBuffer(size int) []byte {
	page := os.Getpagesize()
	buf := make([]byte, size+page)
	skip := page - int(uintptr(unsafe.Pointer(&buf[0]))%uintptr(page))
	return buf[skip : skip+size]
}

// monotonic is a clock that all processes share, in nanoseconds.
func monotonic() int64 {
	var ts unix.Timespec
	unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return ts.Nano()
}

// number parses a number in C notation; def stands for none.
func number(s string, def uint32) uint32 {
	if s == "" {
		return def
	}
	n, err := strconv.ParseInt(s, 0, 64)
	if err != nil {
		panic(err)
	}
	return uint32(n)
}

// openFlags parses a list such as "wronly,creat,excl".
func openFlags(list string) int {
	flags := map[string]int{
		"": 0, "rdonly": unix.O_RDONLY, "wronly": unix.O_WRONLY, "rdwr": unix.O_RDWR, "creat": unix.O_CREAT, "excl": unix.O_EXCL,
		"trunc": unix.O_TRUNC, "append": unix.O_APPEND, "tmpfile": unix.O_TMPFILE, "direct": unix.O_DIRECT, "directory": unix.O_DIRECTORY,
		"nofollow": unix.O_NOFOLLOW, "path": unix.O_PATH, "sync": unix.O_SYNC,
	}
	all := 0
	for _, name := range strings.Split(list, ",") {
		flag, known := flags[name]
		if !known {
			panic("no open flag " + name)
		}
		all |= flag
	}
	return all
}

// accessACL is u::rw,u:1000:r,g::r,m::r,o::r in the kernel's form, acl(5).
func accessACL() []byte {
	acl := binary.LittleEndian.AppendUint32(nil, 2)
	for _, e := range []struct {
		tag, perm uint16
		id        uint32
	}{{1, 6, ^uint32(0)}, {2, 4, 1000}, {4, 4, ^uint32(0)}, {0x10, 4, ^uint32(0)}, {0x20, 4, ^uint32(0)}} {
		acl = binary.LittleEndian.AppendUint16(acl, e.tag)
		acl = binary.LittleEndian.AppendUint16(acl, e.perm)
		acl = binary.LittleEndian.AppendUint32(acl, e.id)
	}
	return acl
}

// setFlags sets the no-dump attribute of chattr(1).
func setFlags(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	flags, err := unix.IoctlGetInt(fd, unix.FS_IOC_GETFLAGS)
	if err != nil {
		return err
	}
	return unix.IoctlSetPointerInt(fd, unix.FS_IOC_SETFLAGS, flags|0x40)
}

// describe tells what stat(2) says, in one line.
func describe(path string) (string, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return "", err
	}
	return attributes(&st), nil
}

func attributes(st *unix.Stat_t) string {
	return fmt.Sprintf("mode=%o uid=%d gid=%d size=%d nlink=%d ino=%d mtime=%s",
		st.Mode, st.Uid, st.Gid, st.Size, st.Nlink, st.Ino, time.Unix(st.Mtim.Unix()).UTC().Format(time.RFC3339Nano))
}
