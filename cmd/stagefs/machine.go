//go:build linux

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs"
	"github.com/stagefs/stagefs/lockstate/filestore"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// A machine is what doctor looks at.
type machine struct {
	root string // where its files are; "": at /
	euid int
}

func (m machine) read(path string) string {
	data, _ := os.ReadFile(m.root + path)
	return strings.TrimSpace(string(data))
}

// examine makes all checks that need no directory.
func (m machine) examine() []finding {
	all := []finding{m.checkKernel(), m.checkFuse(), m.checkDevice(), m.checkUser()}
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

func (m machine) checkFuse() finding {
	for line := range strings.Lines(m.read("/proc/filesystems") + "\n") {
		if f := strings.Fields(line); len(f) > 0 && f[len(f)-1] == "fuse" {
			return finding{"fuse", statusOK, "the kernel has the FUSE file system", ""}
		}
	}
	return finding{"fuse", statusFail, "the kernel has no FUSE file system", "modprobe fuse, as root"}
}

func (m machine) checkDevice() finding {
	f := finding{"/dev/fuse", statusOK, "can be opened", ""}
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

const capSysAdmin = 21

func (m machine) checkUser() finding {
	if m.euid != 0 {
		return finding{"user", statusWarn, "an ordinary user's mount is for the processes of that user alone", "mount as root for full service"}
	}
	caps, err := strconv.ParseUint(procid.Status(m.read("/proc/self/status")).Field("CapEff"), 16, 64)
	if err == nil && caps&(1<<capSysAdmin) == 0 {
		return finding{"user", statusFail, "root without the right to mount (CAP_SYS_ADMIN)", "in a container: --cap-add SYS_ADMIN"}
	}
	return finding{"user", statusOK, "root", ""}
}

func (m machine) checkFusermount() finding {
	path, err := exec.LookPath("fusermount3")
	if err != nil {
		return finding{"fusermount3", statusFail, "missing; ordinary users can't mount without it", "apt-get install fuse3"}
	}
	if info, err := os.Stat(path); err != nil || info.Mode()&os.ModeSetuid == 0 {
		return finding{"fusermount3", statusFail, path + " is not set-user-id root", "chmod u+s " + path + ", as root"}
	}
	return finding{"fusermount3", statusOK, path, ""}
}

func (m machine) checkAllowOther() finding {
	for line := range strings.Lines(m.read("/etc/fuse.conf") + "\n") {
		if strings.TrimSpace(line) == "user_allow_other" {
			return finding{"allow_other", statusOK, "ordinary users may show their mounts to others", ""}
		}
	}
	return finding{"allow_other", statusWarn, "other users, root included, can't see an ordinary user's mount", "put the line user_allow_other into /etc/fuse.conf"}
}

// initPidNamespace is the fixed inode number of the first PID namespace.
const initPidNamespace = "pid:[4026531836]"

func (m machine) checkPidNamespace() finding {
	ns, err := os.Readlink(m.root + "/proc/self/ns/pid")
	if err == nil && ns != initPidNamespace {
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
				name, statusWarn, "the kernel ends a mount in which a lock is waited for longer than " + v + " s",
				"sysctl fs.fuse." + set + "=0, as root, and mount again",
			}
		}
	}
	return finding{name, statusOK, "none: locks may be waited for", ""}
}

// A daemonInfo is what a live mount says of its daemon.
type daemonInfo struct {
	transport  string // how the requests come
	unwritable string // why its state can't be written, if that is so
	stateDir   string // "" if it is too old to tell
}

func daemonSays(mountpoint string) (d daemonInfo) {
	b, _ := os.ReadFile(filepath.Join(mountpoint, fs.ControlDir, "version"))
	for line := range strings.Lines(string(b)) {
		switch key, value, _ := strings.Cut(strings.TrimSpace(line), " "); key {
		case "transport":
			d.transport = " (" + value + ")"
		case "unwritable":
			d.unwritable = value
		case "state":
			if d.stateDir = value; strings.HasPrefix(value, `"`) {
				d.stateDir, _ = strconv.Unquote(value)
			}
		}
	}
	return d
}

func (m machine) checkPassthrough() finding {
	const name = "passthrough"
	switch {
	case !m.atLeast(6, 9):
		return finding{name, statusNote, "not in this kernel: data goes through the daemon", "Linux 6.9 or newer"}
	case m.euid != 0:
		return finding{name, statusNote, "for root only: data goes through the daemon", "mount as root"}
	case m.read("/proc/sys/fs/leases-enable") == "0":
		return finding{name, statusWarn, "leases are turned off: data goes through the daemon", "sysctl fs.leases-enable=1"}
	}
	return finding{name, statusOK, "in this kernel, if it was built with CONFIG_FUSE_PASSTHROUGH; give a directory to have it tried", ""}
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

// checkMounts looks for mounts whose daemon is gone, or does not answer.
func checkMounts() finding {
	mounts, err := fs.ReadMounts()
	if err != nil {
		return finding{"mounts", statusWarn, err.Error(), ""}
	}
	var live, bad, fixes []string
	for _, e := range mounts {
		if e.FSType != fsType {
			continue
		}
		if state, fix := mountState(&e); state == "" {
			d := daemonSays(e.Path)
			if d.unwritable == "" {
				live = append(live, quote(e.Path)+d.transport)
				continue
			}
			bad = append(bad, quote(e.Path)+d.transport+" cannot write its state, so new locks would not outlive the daemon: "+d.unwritable)
			fixes = append(fixes, "make room for the state of "+quote(e.Path)+", or make it writable; its daemon goes on by itself")
		} else {
			bad = append(bad, quote(e.Path)+" "+state)
			fixes = append(fixes, fix)
		}
	}
	switch {
	case len(bad) > 0:
		return finding{"mounts", statusWarn, strings.Join(bad, "; "), strings.Join(fixes, "; ")}
	case len(live) > 0:
		return finding{"mounts", statusOK, "live: " + strings.Join(live, ", "), ""}
	}
	return finding{"mounts", statusOK, "no stagefs mount", ""}
}

// checkTables asks the daemon to verify its tables; only an admin may.
func checkTables(path string) error {
	ctl, err := os.OpenFile(filepath.Join(path, fs.ControlDir, "ctl"), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer ctl.Close()
	_, err = ctl.WriteString("check\n")
	return err
}

// restartTime is how long a supervisor may take to start a daemon again.
const restartTime = 500 * time.Millisecond

// mountState is empty for a mount that answers, and otherwise says what is
// wrong, and what helps.
func mountState(mount *fs.MountEntry) (state, fix string) {
	err := ask(mount.Path, true, answerTime)
	for end := time.Now().Add(restartTime); isDead(err) && time.Now().Before(end); err = ask(mount.Path, true, answerTime) {
		time.Sleep(50 * time.Millisecond)
	}
	switch {
	case errors.Is(err, errSilent):
		return "does not answer", silence(mount)
	case isDead(err):
		return "is dead", startAgain(mount)
	case errors.Is(err, unix.EIO):
		return "has damaged tables: its log says which; report it", ""
	}
	return "", ""
}

// isDead tells the kernel's answer for a mount without a daemon.
func isDead(err error) bool {
	return errors.Is(err, unix.ENOTCONN) || errors.Is(err, unix.ECONNABORTED) || errors.Is(err, unix.ECANCELED)
}

// startAgain says how to go on with a dead mount. To unmount it would open the
// directory to everybody; the next daemon takes its place.
func startAgain(mount *fs.MountEntry) string {
	line := "stagefs mount " + shellWord(mount.Source)
	if mount.Source != mount.Path {
		line += " " + shellWord(mount.Path)
	}
	return "start it again, with its options: " + line + "; only to give it up: stagefs umount " + shellWord(mount.Path)
}

// checkStateDir asks whether the daemon of backing, if it is given, could make or write
// its state directory.
func (m machine) checkStateDir(dir, backing string) finding {
	const name = "state"
	fix := "name another one with --state-dir"
	if dir == "" {
		var err error
		if dir, err = filestore.DefaultDir(); err != nil {
			return finding{name, statusFail, err.Error(), fix}
		}
	}
	dir, err := fs.Abs(dir)
	if err != nil {
		return finding{name, statusFail, err.Error(), fix}
	}
	if backing != "" {
		if err := checkOutside(fs.Options{Dir: backing, StateDir: dir}, ""); err != nil {
			return finding{name, statusFail, err.Error(), fix}
		}
	}
	for at := dir; ; at = filepath.Dir(at) {
		info, err := os.Stat(at)
		switch {
		case errors.Is(err, os.ErrNotExist) && at != "/":
			continue
		case err != nil:
			return finding{name, statusFail, err.Error(), fix}
		case !info.IsDir():
			return finding{name, statusFail, quote(at) + " is no directory", fix}
		case unix.Access(at, unix.W_OK|unix.X_OK) != nil:
			return finding{name, statusFail, quote(dir) + " can't be written", fix}
		case m.full(at):
			return finding{name, statusWarn, quote(dir) + " is on a file system with no room left: new locks would not outlive the daemon", "make room; or " + fix}
		}
		return finding{name, statusOK, quote(dir), ""}
	}
}

// roomForState is what the state of an ordinary mount may need at a time.
const roomForState = 1 << 20

// full tells whether there is no room for the state on a directory's file system.
func (m machine) full(dir string) bool {
	var st unix.Statfs_t
	if unix.Statfs(dir, &st) != nil {
		return false
	}
	free := st.Bavail
	if m.euid == 0 {
		free = st.Bfree
	}
	return free*uint64(st.Bsize) < roomForState || st.Files > 0 && st.Ffree == 0
}

// checkDirectory looks at a static directory that is to be served.
func checkDirectory(dir string) []finding {
	const name = "directory"
	if mount := leadsTo(dir); mount != nil {
		return []finding{checkServed(name, dir, mount)}
	}
	info, err := os.Stat(dir)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return []finding{{name, statusFail, quote(dir) + " is missing", "mkdir -p " + shellWord(dir)}}
	case err != nil:
		return []finding{{name, statusFail, err.Error(), ""}}
	case !info.IsDir():
		return []finding{{name, statusFail, quote(dir) + " is no directory", "name the directory itself"}}
	}
	mounts, err := fs.ReadMounts()
	if err != nil {
		return []finding{{name, statusWarn, err.Error(), ""}}
	}
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return []finding{{name, statusFail, err.Error(), ""}}
	}
	fstype := "an unknown file system"
	if on := covering(mounts, real); on != nil {
		fstype = on.FSType
	}
	var st unix.Statfs_t
	if err := unix.Statfs(real, &st); err != nil {
		return []finding{{name, statusFail, err.Error(), ""}}
	}
	first := finding{name, statusOK, quote(dir) + " is on " + fstype, ""}
	switch {
	case fs.IsKernelType(fstype):
		first = finding{name, statusFail, first.Detail + ", a file system of the kernel's own", "serve a directory of files"}
	case st.Type == unix.FUSE_SUPER_MAGIC:
		first = finding{name, statusFail, first.Detail + ", on FUSE", "serve a directory on a local file system"}
	default:
		if pid := fs.ServedBy(real); pid != 0 {
			if first = servedAlready(name, dir, real, pid, mounts); first.Status == statusOK {
				return []finding{first}
			}
		} else if overlap := fs.Overlapping(real); overlap != nil {
			text, fix := explainOverlap(overlap)
			first = finding{name, statusFail, text, fix}
		}
	}
	all := []finding{first}
	if st.Flags&unix.ST_RDONLY != 0 {
		all = append(all, finding{"writable", statusFail, "the file system is read-only", "mount -o remount,rw, as root"})
	} else if unix.Access(real, unix.W_OK|unix.X_OK) != nil {
		all = append(all, finding{"writable", statusWarn, "you can't write to it", "serve it as its owner, or as root"})
	}
	if first.Status == statusOK {
		all = append(all, abilities(real, fstype)...)
	}
	if _, err := unix.Lgetxattr(real, "user.stagefs.doctor", nil); errors.Is(err, unix.EOPNOTSUPP) {
		all = append(all, finding{"attributes", statusNote, "the file system has no extended attributes; nor will the mount, but for its own", ""})
	}
	return all
}

// servedAlready is about a directory that process pid has to itself.
func servedAlready(name, dir, real string, pid int, mounts []fs.MountEntry) finding {
	by, has := nameOf(pid), func(m fs.MountEntry) bool { return m.FSType == fsType && m.Source == real }
	if i := slices.IndexFunc(mounts, has); i >= 0 {
		return finding{name, statusOK, quote(dir) + " is served by " + by + ", at " + quote(mounts[i].Path), ""}
	}
	f := finding{name, statusFail, quote(dir) + " is served, or locked by flock(2), by " + by + ", and not mounted here", "end that process"}
	if other := elsewhere(has); other != 0 {
		f.Detail += ": it is in the mount namespace of " + nameOf(other)
		f.Fix = "unmount it there, too: nsenter -m -t " + strconv.Itoa(other) + " stagefs umount " + shellWord(real)
	}
	return f
}

// abilities tells what the file system below a directory can do for a mount.
func abilities(real, fstype string) (all []finding) {
	if os.Geteuid() == 0 {
		if fstype == "overlay" {
			all = append(all, finding{"passthrough", statusNote, "not on a stacked file system: data goes through the daemon", ""})
		} else if err := fs.CheckPassthrough(real); err != nil {
			all = append(all, finding{"passthrough", statusNote, err.Error(), ""})
		}
	}
	if known, why, err := fs.KnownByUUID(real); err == nil && known {
		all = append(all, finding{"identity", statusOK, "the state is found by the UUID of the file system", ""})
	} else if err == nil {
		all = append(all, unknownByUUID(why))
	}
	return all
}

// unknownByUUID says what is found by a device number, and what helps.
func unknownByUUID(why string) finding {
	fix := "serve a directory of ext4, xfs or btrfs"
	switch {
	case why == fs.NoUUID && !(machine{}).atLeast(6, 9):
		fix = "Linux 6.9 or newer"
	case why == fs.ZeroUUID:
		fix = "give it one; for ext4: tune2fs -U random DEVICE"
	case why == fs.NoBirth:
		fix = "serve a directory that was made with mkdir on ext4, xfs or btrfs"
	}
	return finding{"identity", statusNote, why + ": the state is found by the device number, and lost when that is another after a boot", fix}
}

// checkServed looks at a directory that is in a stagefs mount.
func checkServed(name, dir string, mount *fs.MountEntry) finding {
	state, fix := mountState(mount)
	if state != "" {
		return finding{name, statusWarn, quote(dir) + " is in the mount at " + quote(mount.Path) + ", which " + state, fix}
	}
	by := ""
	d := daemonSays(mount.Path)
	if pid, err := servedBy(mount.Path); err == nil {
		by = " by process " + strconv.Itoa(pid)
	}
	if d.unwritable != "" {
		return finding{name, statusWarn, quote(dir) + " is served" + by + d.transport + ", which cannot write its state: " + d.unwritable, "make room for it, or make it writable"}
	}
	return finding{name, statusOK, quote(dir) + " is served" + by + d.transport, ""}
}
