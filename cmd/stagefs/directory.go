//go:build linux

package main

import (
	"cmp"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs"
	"github.com/stagefs/stagefs/lockstate/filestore"
)

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
	if err := awake(dir, answerTime); err != nil {
		return finding{name, statusFail, err.Error(), fix}
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
		kind := typeOf(at)
		link, _ := os.Lstat(at)
		switch {
		case err != nil && link != nil && link.Mode()&os.ModeSymlink != 0:
			return finding{name, statusFail, quote(at) + " is a dangling symbolic link", fix}
		case errors.Is(err, os.ErrNotExist) && at != "/":
			continue
		case err != nil:
			return finding{name, statusFail, err.Error(), fix}
		case !info.IsDir():
			return finding{name, statusFail, quote(at) + " is no directory", fix}
		case fs.IsKernelType(kind):
			return finding{name, statusFail, quote(dir) + " is on " + kind + ", a file system of the kernel's own, where no files can be made", fix}
		case unix.Access(at, unix.W_OK|unix.X_OK) != nil:
			return finding{name, statusFail, quote(dir) + " can't be written", fix}
		case at == dir && filestore.CheckDir(dir, info) != nil:
			return finding{name, statusFail, filestore.CheckDir(dir, info).Error(), "mend that, or " + fix}
		case m.full(at):
			return finding{name, statusWarn, quote(dir) + " is on a file system with no room left: a first mount fails, and new locks of others would not outlive the daemon", "make room; or " + fix}
		}
		return finding{name, statusOK, quote(dir), ""}
	}
}

// typeOf is the type of the file system that an existing path is on, "" if that can't be
// told.
func typeOf(path string) string {
	mounts, _ := fs.ReadMounts()
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return ""
	}
	return fs.MountOf(mounts, real).FSType
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

// checkWay looks for a mount that the path of a static directory leads into, and whose
// daemon does not tell where it goes on from there.
func checkWay(dir string) (bad []finding) {
	if dir == "" {
		return nil
	}
	fs.LeadsThrough(dir, func(mount *fs.MountEntry, _ bool) bool {
		if state, fix := mountState(mount); state != "" {
			bad = []finding{{ofDirectory, statusWarn, quote(dir) + " is in the mount at " + quote(mount.Path) + ", which " + state, fix}}
		}
		return bad == nil
	})
	return bad
}

// ofDirectory names the findings about a static directory itself.
const ofDirectory = "directory"

// checkDirectory looks at a static directory that is to be served, or is: then served is
// the mount.
func checkDirectory(dir string) (all []finding, served *fs.MountEntry) {
	mounts, err := fs.ReadMounts()
	if err != nil {
		return []finding{{ofDirectory, statusWarn, err.Error(), ""}}, nil
	}
	real, err := fs.AbsoluteOf(dir)
	if err != nil {
		return []finding{{ofDirectory, statusFail, err.Error(), ""}}, nil
	}
	if on := fs.MountOf(mounts, real); on.IsStagefs() {
		if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
			return []finding{checkServed(on.Path, &on), missing(dir, statusWarn)}, &on
		}
		return []finding{checkServed(dir, &on)}, &on
	}
	return checkToServe(dir, mounts), nil
}

// checkToServe looks at a static directory that is in no mount.
func checkToServe(dir string, mounts []fs.MountEntry) []finding {
	info, err := os.Stat(dir)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return []finding{missing(dir, statusFail)}
	case err != nil:
		return []finding{{ofDirectory, statusFail, err.Error(), ""}}
	case !info.IsDir():
		return []finding{{ofDirectory, statusFail, quote(dir) + " is no directory", "name the directory itself"}}
	}
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return []finding{{ofDirectory, statusFail, err.Error(), ""}}
	}
	fstype := cmp.Or(fs.MountOf(mounts, real).FSType, "an unknown file system")
	var st unix.Statfs_t
	if err := unix.Statfs(real, &st); err != nil {
		return []finding{{ofDirectory, statusFail, err.Error(), ""}}
	}
	first := finding{ofDirectory, statusOK, quote(dir) + " is on " + fstype, ""}
	switch {
	case fs.IsKernelType(fstype):
		first = finding{ofDirectory, statusFail, first.Detail + ", a file system of the kernel's own", "serve a directory of files"}
	case st.Type == unix.FUSE_SUPER_MAGIC:
		first = finding{ofDirectory, statusFail, first.Detail + ", on FUSE", "serve a directory on a local file system"}
	default:
		if pid := fs.DaemonOf(real); pid != 0 {
			if first = servedAlready(dir, real, pid, mounts); first.Status == statusOK {
				return []finding{first}
			}
		} else if overlap := fs.Overlapping(real); overlap != nil {
			text, fix := explainOverlap(overlap)
			first = finding{ofDirectory, statusFail, text, fix}
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

func missing(dir, status string) finding {
	return finding{ofDirectory, status, quote(dir) + " is missing", "mkdir -p " + shellWord(dir)}
}

// servedAlready is about a directory that process pid has to itself.
func servedAlready(dir, real string, pid int, mounts []fs.MountEntry) finding {
	by, has := nameOf(pid), func(m fs.MountEntry) bool { return m.IsStagefs() && m.Source == real }
	if i := slices.IndexFunc(mounts, has); i >= 0 {
		return finding{ofDirectory, statusOK, quote(dir) + " is served by " + by + ", at " + quote(mounts[i].Path), ""}
	}
	f := finding{ofDirectory, statusFail, quote(dir) + " is served, or locked by flock(2), by " + by + ", and not mounted here", "end that process"}
	if other := elsewhere(has); other != 0 {
		f.Detail += ": it is in the mount namespace of " + nameOf(other)
		f.Fix = "unmount it there, too: " + umountIn(other, real)
	}
	return f
}

// abilities tells what the file system below a directory can do for a mount.
func abilities(real, fstype string) (all []finding) {
	if m := (machine{}); os.Geteuid() == 0 && m.atLeast(6, 9) && !m.ownUserNamespace() { // else it was said that the kernel has none
		if fstype == "overlay" {
			all = append(all, finding{"passthrough", statusNote, "not on a stacked file system: data goes through the daemon", ""})
		} else if err := fs.CheckPassthrough(real); err != nil {
			all = append(all, finding{"passthrough", statusNote, err.Error(), ""})
		} else {
			all = append(all, finding{"passthrough", statusOK, "tried: the directory's file system does for it", ""})
		}
	}
	if fs.FoldsCase(real) {
		all = append(all, finding{
			"names", statusWarn, "those that differ in case alone are the same file's, but locks go by names as they are written: whoever writes one otherwise may get past a lock",
			"serve a directory of a file system that tells them apart; on ext4 and the like, one without chattr +F",
		})
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

// checkServed looks at a directory that is in a stagefs mount, which answers.
func checkServed(dir string, mount *fs.MountEntry) finding {
	by := ""
	d, _ := daemonSays(mount.Path)
	if d.pid != 0 {
		by = " by process " + strconv.Itoa(d.pid)
	}
	if d.unwritable != "" {
		return finding{ofDirectory, statusWarn, quote(dir) + " is served" + by + d.transport + ", which cannot write its state: " + d.unwritable, "make room for it, or make it writable"}
	}
	return finding{ofDirectory, statusOK, quote(dir) + " is served" + by + d.transport, ""}
}
