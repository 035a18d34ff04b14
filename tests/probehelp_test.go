//go:build linux

package tests

import (
	"crypto/sha256"
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// threadUser makes the calling thread alone another user; setuid(3) and its
// kin do it to the whole process.
func threadUser(uid, gid int, groups []int) error {
	gids := make([]uint32, len(groups), len(groups)+1)
	for i, g := range groups {
		gids[i] = uint32(g)
	}
	p := unsafe.Pointer(unsafe.SliceData(gids[:cap(gids)]))
	_, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(gids)), uintptr(p), 0)
	runtime.KeepAlive(gids)
	if errno == 0 {
		_, _, errno = unix.RawSyscall(unix.SYS_SETRESGID, uintptr(gid), uintptr(gid), uintptr(gid))
	}
	if errno == 0 {
		_, _, errno = unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid))
	}
	if errno != 0 {
		return errno
	}
	return nil
}

// brief shows short text as it is, and the rest as size and digest.
func brief(b []byte) string {
	if len(b) <= 64 {
		return fmt.Sprintf("%q", b)
	}
	return fmt.Sprintf("%d bytes %x", len(b), sha256.Sum256(b))
}
