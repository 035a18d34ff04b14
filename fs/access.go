package fs

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// mayCreateIn reports whether the caller could make an entry in a directory:
// who could not has no business to lock it. A command names the directory in
// its text, so that the kernel has checked nothing. The caller holds FS.ns.
func (fs *FS) mayCreateIn(h *fuse.InHeader, dir string) error {
	if h.Uid == 0 || !fs.privileged && h.Uid == fs.uid {
		return fs.reach(dir)
	}
	if !fs.privileged {
		return unix.EACCES // an ordinary user's daemon cannot ask for another
	}
	groups, err := groupsOf(h.Pid)
	if err != nil {
		return err
	}
	answer := make(chan error)
	go func() {
		// Never unlocked: the thread, which is the caller from here on, ends
		// with the goroutine.
		runtime.LockOSThread()
		var first unsafe.Pointer
		if len(groups) > 0 {
			first = unsafe.Pointer(&groups[0])
		}
		// The raw call concerns this thread alone.
		if _, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(first), 0); errno != 0 {
			answer <- errno
			return
		}
		setFSID(unix.SYS_SETFSGID, h.Gid)
		setFSID(unix.SYS_SETFSUID, h.Uid) // which takes the capabilities to pass checks away
		answer <- fs.reach(dir)
	}()
	return <-answer
}

// reach looks up a directory with the rights of the calling thread, and checks
// that it may make entries there.
func (fs *FS) reach(dir string) error {
	fd, err := openAt(fs.back.root, ".", unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	for _, name := range split(dir) {
		next, err := openAt(fd, name, unix.O_PATH|unix.O_DIRECTORY, 0)
		unix.Close(fd)
		if err == unix.ELOOP {
			err = unix.ENOTDIR
		}
		if err != nil {
			return err
		}
		fd = next
	}
	defer unix.Close(fd)
	return unix.Faccessat2(fd, "", unix.W_OK|unix.X_OK, unix.AT_EACCESS|unix.AT_EMPTY_PATH)
}

// groupsOf returns the supplementary groups of a thread.
func groupsOf(tid uint32) ([]uint32, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", tid))
	if err != nil {
		return nil, err
	}
	_, rest, ok := bytes.Cut(b, []byte("\nGroups:"))
	if !ok {
		return nil, unix.EACCES
	}
	line, _, _ := bytes.Cut(rest, []byte("\n"))
	var groups []uint32
	for f := range strings.FieldsSeq(string(line)) {
		g, err := strconv.ParseUint(f, 10, 32)
		if err != nil {
			return nil, err
		}
		groups = append(groups, uint32(g))
	}
	return groups, nil
}
