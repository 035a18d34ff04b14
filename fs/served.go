package fs

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// claim takes the backing for this daemon (M1), wherever another one keeps its
// state. The kernel drops the lock when the daemon dies.
//
// A daemon whose mount is gone already is waited for: umount(8) returns before
// it has ended.
func claim(root int, dir string) error {
	err := unix.Flock(root, unix.LOCK_EX|unix.LOCK_NB)
	for end := time.Now().Add(endTime); err == unix.EWOULDBLOCK && time.Now().Before(end) && !isMounted(dir); {
		time.Sleep(5 * time.Millisecond)
		err = unix.Flock(root, unix.LOCK_EX|unix.LOCK_NB)
	}
	if err == unix.EWOULDBLOCK {
		return &ServedError{Dir: dir, Pid: flockOwner(root)}
	}
	if err != nil {
		return fmt.Errorf("%s: flock: %w", dir, err)
	}
	return nil
}

// isMounted reports whether a static directory is served somewhere, by a daemon
// that lives or not.
func isMounted(dir string) bool {
	at, err := AbsoluteOf(dir)
	if err != nil {
		return true
	}
	mounts, err := Mounts()
	return err != nil || slices.ContainsFunc(mounts, func(m MountEntry) bool { return m.Source == dir || m.Source == at })
}

// DaemonOf returns the process that has a static directory to itself, as a daemon
// does (M1), or 0 if none is seen. It does not look at what is mounted over the
// directory: the caller makes sure that nothing is.
func DaemonOf(dir string) int {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0
	}
	defer unix.Close(fd)
	return flockOwner(fd)
}

// flockOwner returns the process that has the lock in the way of claim, as
// proc_locks(5) shows it, or 0.
func flockOwner(fd int) int {
	var st unix.Statx_t
	b, err := os.ReadFile("/proc/locks")
	if err != nil || statAt(fd, "", &st) != nil {
		return 0
	}
	// The subvolumes of btrfs have device numbers of their own, and the locks that of all of
	// it: so the inode number may be that of a directory in another one.
	own := uint64(identityOf(&st).dev)
	dev, _ := devOf(mountIDOf(fd))
	dev = cmp.Or(dev, own)
	file := fmt.Sprintf("%s:%d", hexDevice(dev), st.Ino)
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 5 && f[1] == "FLOCK" && f[5] == file {
			pid, _ := strconv.Atoi(f[4])
			if dev == own || hasLocked(pid, file, &st) {
				return pid
			}
		}
	}
	return 0
}

// hasLocked reports whether a process has a directory locked that proc_locks(5) calls file.
func hasLocked(pid int, file string, st *unix.Statx_t) bool {
	links, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fdinfo/*", pid))
	return slices.ContainsFunc(links, func(link string) bool {
		info, err := os.ReadFile(link)
		if err != nil || !strings.Contains(string(info), " "+file+" ") {
			return false
		}
		var other unix.Statx_t
		open := fmt.Sprintf("/proc/%d/fd/%s", pid, filepath.Base(link))
		err = unix.Statx(unix.AT_FDCWD, open, unix.AT_STATX_DONT_SYNC, statxMask, &other)
		return err == nil && identityOf(&other) == identityOf(st)
	})
}
