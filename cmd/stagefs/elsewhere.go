//go:build linux

package main

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs"
)

// A mount namespace that was made while something was mounted has a mount of its
// own of that, and its daemon serves on when ours is gone.

// elsewhere returns a process in whose mount namespace, which is not this one,
// there is a stagefs mount that is wanted; 0 if none is seen.
func elsewhere(wanted func(fs.MountEntry) bool) int {
	ours, _ := os.Readlink("/proc/self/ns/mnt")
	var seen sync.Map // a look that took too long may still be under way
	seen.Store(ours, nil)
	seen.Store("", nil)
	return findProcess(func(proc string) bool {
		ns, _ := os.Readlink(proc + "/ns/mnt")
		if _, known := seen.LoadOrStore(ns, nil); known {
			return false
		}
		table, _ := os.ReadFile(proc + "/mountinfo")
		return slices.ContainsFunc(fs.ParseMounts(string(table)), func(m fs.MountEntry) bool {
			return m.IsStagefs() && wanted(m)
		})
	})
}

// nameOf describes a process.
func nameOf(pid int) string {
	comm, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/comm")
	return fmt.Sprintf("process %d (%s)", pid, quote(strings.TrimSuffix(string(comm), "\n")))
}

// umountIn is the command that unmounts in the mount namespace of a process.
func umountIn(pid int, mountpoint string) string {
	return fmt.Sprintf("nsenter -m -t %d stagefs umount %s", pid, shellWord(mountpoint))
}

const (
	// endTime is how long umount waits for the daemon's end.
	endTime = 10 * time.Second
	// lookTime is how long a daemon may need to end before it is looked for
	// what keeps it.
	lookTime = 200 * time.Millisecond
)

// awaitEnd waits until the daemon of a mount that is gone from here has ended, and
// so has let go of the backing. It says what keeps it, unless the mount was detached
// though it may be in use. pid is the daemon's where it was seen.
func (c *command) awaitEnd(mount *fs.MountEntry, pid int, lazy bool) {
	at := shownAt(mount)
	if served, here := mountpointOf(mount.Source); pid == 0 && (!here || at != "" && served == at && at != mount.Source) {
		pid = fs.DaemonOf(mount.Source)
	}
	if pid == 0 {
		return // there is none, or nobody who may be known
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	if ended(fd, lookTime) || lazy {
		return
	}
	if other := elsewhere(func(m fs.MountEntry) bool { return m.Dev == mount.Dev }); other != 0 {
		c.say("%s is unmounted here, but its daemon, process %d, serves on: it is mounted in the mount namespace of %s, too; to end it: %s", quote(mount.Path), pid, nameOf(other), umountIn(other, mount.Path))
		return
	}
	if at != "" {
		c.say("%s is unmounted, but its daemon, process %d, serves on: it is mounted at %s, too; to end it: stagefs umount %s", quote(mount.Path), pid, quote(at), shellWord(at))
		return
	}
	if how := halt(pid); how != "" {
		c.say("%s is unmounted, but its daemon, process %d, has not ended: %s", quote(mount.Path), pid, how)
		return
	}
	if !ended(fd, endTime) {
		c.say("%s is unmounted, but its daemon, process %d, has not ended yet", quote(mount.Path), pid)
	}
}

// ended waits for the end of a process.
func ended(pidfd int, within time.Duration) bool {
	for end := time.Now().Add(within); ; {
		left := max(time.Until(end), 0)
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, int(left.Milliseconds()))
		if err == nil {
			return n > 0
		}
		if err != unix.EINTR {
			return false
		}
	}
}

// shownAt returns where else the file system of a mount that is gone is mounted here, ""
// if it is not.
func shownAt(mount *fs.MountEntry) string {
	mounts, _ := fs.ReadMounts()
	for _, m := range mounts {
		if m.IsStagefs() && m.Dev == mount.Dev && m.Source == mount.Source {
			return m.Path
		}
	}
	return ""
}

// mountpointOf reports whether a static directory is served here, and where, if that
// is seen.
func mountpointOf(dir string) (at string, here bool) {
	mounts, err := fs.Mounts()
	if err != nil {
		return "", true
	}
	real, err := fs.AbsoluteOf(dir)
	if err != nil {
		real = dir
	}
	for _, m := range mounts {
		if m.Source == dir || m.Path == dir || m.Source == real || m.Path == real {
			return m.Path, true
		}
	}
	return "", false
}
