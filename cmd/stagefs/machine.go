//go:build linux

package main

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// A machine is what doctor looks at.
type machine struct {
	root string // where its files are; "": at /
	euid int
	dir  bool // a directory is looked at, too
}

func (m machine) read(path string) string {
	data, _ := os.ReadFile(m.root + path)
	return strings.TrimSpace(string(data))
}

// examine makes all checks that need no directory.
func (m machine) examine() []finding {
	if m.read("/proc/self/status") == "" { // what is looked at is there
		return []finding{{"/proc", statusFail, "missing", "mount -t proc proc /proc, as root"}}
	}
	if m.read("/proc/sys/kernel/osrelease") == "" {
		return []finding{{"/proc", statusFail, "shows processes alone (subset=pid)", "mount -t proc proc /proc, as root"}}
	}
	device := m.checkDevice() // to open it loads the kernel's module
	all := []finding{m.checkKernel(), checkCalls(), m.checkFuse(), device, m.checkUser()}
	if m.euid != 0 {
		all = append(all, m.checkFusermount(), m.checkAllowOther())
	}
	return append(all, m.checkPidNamespace(), m.checkPidfd(), checkBirths(), m.checkUring(), m.checkTimeout(), m.checkPassthrough(),
		checkOpenFiles(), checkMounts())
}

// kernel is the version as major, minor.
func (m machine) kernel() (major, minor int, release string) {
	release = m.read("/proc/sys/kernel/osrelease")
	fmt.Sscanf(release, "%d.%d", &major, &minor)
	return major, minor, release
}

func (m machine) atLeast(major, minor int) bool {
	a, b, _ := m.kernel()
	return a > major || a == major && b >= minor
}

func (m machine) checkKernel() finding {
	_, _, release := m.kernel()
	f := finding{"kernel", statusOK, "Linux " + release, ""}
	if !m.atLeast(5, 10) {
		f.Status, f.Detail = statusFail, f.Detail+"; stagefs needs 5.10 or newer"
		f.Fix = "install a newer kernel"
	}
	return f
}

// checkCalls tries the system calls that a mount can't do without.
func checkCalls() finding {
	const name = "system calls"
	if err := fs.CheckCalls(); err != nil {
		return finding{name, statusFail, err.Error(), "in a container, allow it in its seccomp profile, as a newer container engine and libseccomp do"}
	}
	return finding{name, statusOK, "those that are needed can be made", ""}
}

func (m machine) checkFuse() finding {
	for line := range strings.Lines(m.read("/proc/filesystems")) {
		if f := strings.Fields(line); len(f) > 0 && f[len(f)-1] == "fuse" {
			return finding{"fuse", statusOK, "the kernel has the FUSE file system", ""}
		}
	}
	return finding{"fuse", statusFail, "the kernel has no FUSE file system", "modprobe fuse, as root"}
}

func (m machine) checkDevice() finding {
	f := finding{"/dev/fuse", statusOK, "can be opened", ""}
	if info, err := os.Stat(m.root + "/dev/fuse"); err == nil && info.Mode()&os.ModeCharDevice == 0 { // a volume of a container is a directory
		return finding{f.Name, statusFail, "is no device", "remove it; mknod -m 666 /dev/fuse c 10 229, as root; in a container: --device /dev/fuse"}
	}
	file, err := os.OpenFile(m.root+"/dev/fuse", os.O_RDWR, 0)
	switch {
	case err == nil:
		file.Close()
	case errors.Is(err, os.ErrNotExist):
		f.Status, f.Detail = statusFail, "missing"
		f.Fix = "modprobe fuse; in a container, give it the device: --device /dev/fuse --cap-add SYS_ADMIN"
	default:
		f.Status, f.Detail = statusFail, err.Error()
		f.Fix = "chmod 666 /dev/fuse, as root; in a container, allow the device"
	}
	return f
}

func (m machine) checkUser() finding {
	if m.euid != 0 {
		return finding{"user", statusWarn, "an ordinary user's mount is for the processes of that user alone", "mount as root for full service"}
	}
	caps, err := strconv.ParseUint(procid.Status(m.read("/proc/self/status")).Field("CapEff"), 16, 64)
	if err == nil && caps&(1<<unix.CAP_SYS_ADMIN) == 0 {
		return finding{"user", statusFail, "root without the right to mount (CAP_SYS_ADMIN)", "in a container: --cap-add SYS_ADMIN"}
	}
	if !m.ownsMounts() {
		return finding{"user", statusFail, "root of a user namespace, to which the mounts here do not belong", "mount as the machine's root; or in a mount namespace of that one's own, where only its processes see it: unshare -m"}
	}
	return finding{"user", statusOK, "root", ""}
}

// ownUserNamespace reports whether this is not the machine's first user namespace, to
// whose root alone the kernel gives passthrough.
func (m machine) ownUserNamespace() bool {
	ns, err := os.Readlink(m.root + "/proc/self/ns/user")
	return err == nil && ns != "user:[4026531837]" // linux/proc_ns.h
}

// ownsMounts reports whether the mount namespace is one of this user namespace's, or of
// one within: else nothing can be mounted there, user_namespaces(7).
func (m machine) ownsMounts() bool {
	ns, err := os.Open(m.root + "/proc/self/ns/mnt")
	if err != nil {
		return true // or nobody knows
	}
	defer ns.Close()
	owner, err := unix.IoctlRetInt(int(ns.Fd()), unix.NS_GET_USERNS)
	if err == nil {
		unix.Close(owner)
	}
	return err != unix.EPERM
}

func (m machine) checkFusermount() finding {
	path, err := fs.LookFusermount()
	if err != nil {
		return finding{"fusermount3", statusFail, "missing; ordinary users can't mount without it", "apt-get install fuse3"}
	}
	if info, err := os.Stat(path); err != nil || info.Mode()&os.ModeSetuid == 0 {
		return finding{"fusermount3", statusFail, path + " is not set-user-id root", "chmod u+s " + path + ", as root"}
	}
	return finding{"fusermount3", statusOK, path, ""}
}

func (m machine) checkAllowOther() finding {
	if fs.UserAllowOther(m.read("/etc/fuse.conf")) {
		return finding{"allow_other", statusOK, "ordinary users may show their mounts to others", ""}
	}
	return finding{"allow_other", statusWarn, "other users, root included, can't see an ordinary user's mount", "put the line user_allow_other into /etc/fuse.conf"}
}

func (m machine) checkPidNamespace() finding {
	ns, err := os.Readlink(m.root + "/proc/self/ns/pid")
	if err == nil && ns != procid.InitNamespace {
		return finding{"pid namespace", statusWarn, "not the machine's first one: processes outside of it hold and change nothing", "run the daemon outside of the container"}
	}
	return finding{"pid namespace", statusOK, "the machine's first one: every process can be told", ""}
}

// checkPidfd tries the two calls that tell a process from a thread id quickly.
func (m machine) checkPidfd() finding {
	fd, err := unix.PidfdOpen(unix.Gettid(), unix.PIDFD_THREAD)
	if err != nil {
		return finding{"pidfd", statusWarn, "no PIDFD_THREAD: /proc is read instead, which is slower", "Linux 6.9 or newer"}
	}
	defer unix.Close(fd)
	info := unix.PidfdInfo{Mask: unix.PIDFD_INFO_PID}
	switch err := unix.IoctlPidfdInfo(fd, &info); {
	case err != nil:
		return finding{"pidfd", statusWarn, "no PIDFD_GET_INFO: /proc is read instead, which is slower", "Linux 6.13 or newer"}
	case !m.atLeast(6, 15):
		return finding{"pidfd", statusNote, "does not tell the exit status of a process that was reaped: hand-over to the parent may be missed", "Linux 6.15 or newer"}
	}
	return finding{"pidfd", statusOK, "tells threads, parents and exit statuses", ""}
}

// checkBirths tries whether the kernel tells who makes which process.
func checkBirths() finding {
	const name = "descent"
	if err := procid.TryBirths(); err != nil {
		return finding{
			name, statusNote, fmt.Sprintf("who loses its parent before its first call in the mount is nobody's descendant: %v", err),
			"mount as root; in a container: with --cap-add PERFMON, and the kernel's own /sys",
		}
	}
	return finding{name, statusOK, "also known of processes that lost their parents before their first call in the mount", ""}
}

// checkUring tells which transport a mount takes, and how it gets the fastest.
func (m machine) checkUring() finding {
	const name = "transport"
	slow := finding{name, statusNote, "", ""}
	switch m.read("/sys/module/fuse/parameters/enable_uring") {
	case "Y":
		if m.root == "" {
			if err := fs.TryUring(); err != nil {
				slow.Detail = fmt.Sprintf("threads: %v", err)
				slow.Fix = "sysctl kernel.io_uring_disabled=0, as root; in a container, allow io_uring in its seccomp profile, and all cores"
				return slow
			}
		}
		return finding{name, statusOK, "uring: FUSE over io_uring, the fastest", ""}
	case "N":
		slow.Detail = "threads: FUSE over io_uring, which is faster, is switched off"
		slow.Fix = "echo Y > /sys/module/fuse/parameters/enable_uring, as root, and mount again; to keep it: options fuse enable_uring=1 in /etc/modprobe.d/fuse.conf, or fuse.enable_uring=1 on the kernel's command line if fuse is built in"
		return slow
	}
	slow.Detail, slow.Fix = "threads: this kernel has no FUSE over io_uring, which is faster", "Linux 6.14 or newer"
	return slow
}

// checkTimeout tells whether the kernel ends a mount where locks are waited for.
func (m machine) checkTimeout() finding {
	const name = "request timeout"
	for _, set := range []string{"default_request_timeout", "max_request_timeout"} {
		if v := m.read("/proc/sys/fs/fuse/" + set); v != "" && v != "0" {
			return finding{
				name, statusWarn, "the kernel ends a mount in which a lock or an event is waited for longer than " + v + " s",
				"sysctl fs.fuse." + set + "=0, as root, and mount again",
			}
		}
	}
	return finding{name, statusOK, "none: locks may be waited for", ""}
}

func (m machine) checkPassthrough() finding {
	const name = "passthrough"
	switch {
	case !m.atLeast(6, 9):
		return finding{name, statusNote, "not in this kernel: data goes through the daemon", "Linux 6.9 or newer"}
	case m.euid != 0:
		return finding{name, statusNote, "for root only: data goes through the daemon", "mount as root"}
	case m.ownUserNamespace():
		return finding{name, statusNote, "not for a user namespace's root: data goes through the daemon", "mount as the machine's root"}
	case m.read("/proc/sys/fs/leases-enable") == "0":
		return finding{name, statusWarn, "leases are turned off: data goes through the daemon", "sysctl fs.leases-enable=1"}
	}
	f := finding{name, statusOK, "in this kernel, if it was built with CONFIG_FUSE_PASSTHROUGH", ""}
	if !m.dir {
		f.Detail += "; give a directory to have it tried"
	}
	return f
}

// enoughFiles is a limit on descriptors with which no ordinary work fails: an
// open file below the mount is one of the daemon's.
const enoughFiles = 4096

func checkOpenFiles() finding {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		return finding{"open files", statusWarn, err.Error(), ""}
	}
	if lim.Max < enoughFiles {
		return finding{"open files", statusWarn, fmt.Sprintf("at most %d can be open below the mount at a time, less some", lim.Max), fmt.Sprintf("ulimit -Hn %d or more; LimitNOFILE= in a systemd unit", enoughFiles)}
	}
	return finding{"open files", statusOK, fmt.Sprintf("up to %d", lim.Max), ""}
}
