package fs

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// openBacking opens the static directory. What is mounted over it later does
// not concern this descriptor.
func openBacking(dir string) (int, error) {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	switch {
	case err == unix.ENOTDIR:
		return -1, fmt.Errorf("%s: %w", dir, ErrNotDirectory)
	case err == unix.ENOTCONN:
		return -1, fmt.Errorf("%s: %w", dir, ErrStaleMount)
	case err != nil:
		return -1, &os.PathError{Op: "open", Path: dir, Err: err}
	}
	if err := checkBacking(fd, dir); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// checkBacking refuses what cannot be served.
func checkBacking(fd int, dir string) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err != nil {
		return &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	switch fstype, err := kernelType(fd); {
	case st.Type == unix.FUSE_SUPER_MAGIC:
		return onFuse(dir)
	case err != nil:
		return err
	case fstype != "": // which may be read-only
		return fmt.Errorf("%s: %w (%s)", dir, ErrKernelFS, fstype)
	case st.Flags&unix.ST_RDONLY != 0:
		return fmt.Errorf("%s: %w", dir, ErrReadOnly)
	}
	return nil
}

// onFuse tells a directory that is served already from any other on FUSE.
func onFuse(dir string) error {
	mount, rel, err := FindMount(dir)
	if err != nil {
		return fmt.Errorf("%s: %w", dir, ErrOnFuse)
	}
	if rel != "." {
		return fmt.Errorf("%s, beneath the stagefs mount %s: %w", dir, mount, ErrOnFuse)
	}
	e := &ServedError{Dir: dir}
	if b, err := os.ReadFile(filepath.Join(mount, ControlDir, "version")); err == nil {
		for line := range strings.Lines(string(b)) {
			if pid, ok := strings.CutPrefix(line, "pid "); ok {
				e.Pid, _ = strconv.Atoi(strings.TrimSpace(pid))
			}
		}
	}
	return e
}

// checkMountpoint returns where to mount, as an absolute path without
// symlinks, and a dead mount that is there, or was, and not over the static
// directory.
func checkMountpoint(o *Options) (at string, dead *deadMount, err error) {
	if o.Mountpoint == "" {
		if at, err = AbsoluteOf(o.Dir); err == nil {
			err = checkPlace(at)
		}
		return at, nil, err
	}
	at = o.Mountpoint
	if dead, err = findDead(at); err != nil {
		return "", nil, err
	}
	dir, err := AbsoluteOf(o.Dir)
	if err != nil {
		return "", nil, err
	}
	switch {
	case dead == nil:
	case dir == dead.path:
		return dir, nil, nil // its place is taken when all else is ready
	case len(dead.below) > dead.husks || unix.Geteuid() != 0:
		if err := dead.clear(); err != nil {
			return "", nil, err
		}
	}
	if dead == nil || dead.cleared {
		at, err = freeMountpoint(at, dir)
	} else {
		at = dead.path // likewise, so that nobody writes beneath it meanwhile
	}
	if err == nil && at != dir && strings.HasPrefix(at+"/", dir+"/") {
		err = fmt.Errorf("%s: %w", at, ErrInside)
	}
	return at, dead, err
}

// freeMountpoint returns at as an absolute path without symlinks, if something
// can be mounted there.
func freeMountpoint(at, dir string) (string, error) {
	var st unix.Stat_t
	switch err := unix.Stat(at, &st); {
	case err == unix.ENOTCONN:
		return "", fmt.Errorf("%s: %w", at, ErrStaleMount)
	case err != nil:
		return "", &os.PathError{Op: "stat", Path: at, Err: err}
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return "", fmt.Errorf("%s: %w", at, ErrNotDirectory)
	}
	at, err := absolute(at)
	if err == nil {
		err = checkPlace(at)
	}
	if err == nil {
		err = checkPlaceType(at)
	}
	if err != nil {
		return "", err
	}
	if at != dir {
		mounts, err := ReadMounts()
		if err != nil {
			return "", err
		}
		for _, m := range mounts {
			if m.Path == at {
				return "", fmt.Errorf("%s: %w", at, ErrMountpointBusy)
			}
		}
	}
	return at, nil
}

// A MountEntry is one line of /proc/self/mountinfo.
type MountEntry struct {
	ID        int
	Parent    int    // of the mount that it is mounted on
	Dev       string // major:minor
	Root      string // which directory of the file system is mounted
	Path      string // where
	Options   string // of the mount
	FSType    string
	Source    string
	FSOptions string // of the file system
}

// ReadMounts reads the mount table: it knows dead and hanging mounts too, and
// touches none. Later entries cover earlier ones.
func ReadMounts() ([]MountEntry, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	return ParseMounts(string(b)), nil
}

// ParseMounts reads lines as proc_pid_mountinfo(5) describes them. It skips
// those that are not.
func ParseMounts(text string) []MountEntry {
	var all []MountEntry
	for line := range strings.Lines(text) {
		left, right, ok := strings.Cut(line, " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if !ok || len(l) < 6 || len(r) < 3 {
			continue
		}
		id, err := strconv.Atoi(l[0])
		parent, bad := strconv.Atoi(l[1])
		if err != nil || bad != nil {
			continue
		}
		all = append(all, MountEntry{
			ID: id, Parent: parent, Dev: l[2], Root: unescape(l[3]), Path: unescape(l[4]), Options: l[5],
			FSType: r[0], Source: unescape(r[1]), FSOptions: r[2],
		})
	}
	return all
}

// unescape undoes the octal escapes of the mount table.
func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// mountAt returns what the kernel calls the mount at a path, and its device; 0
// if there is none.
func mountAt(path string) (id int, dev uint64) {
	mounts, err := ReadMounts()
	if err != nil {
		return 0, 0
	}
	for _, m := range mounts {
		if m.Path == path {
			id, dev = m.ID, m.device() // the last one is on top
		}
	}
	return id, dev
}

// devOf returns the device of a mount.
func devOf(id int) uint64 {
	mounts, _ := ReadMounts()
	for _, m := range mounts {
		if m.ID == id {
			return m.device()
		}
	}
	return 0
}

// device is the number of the mount's device as in an identity.
func (m *MountEntry) device() uint64 {
	major, minor, _ := strings.Cut(m.Dev, ":")
	a, _ := strconv.ParseUint(major, 10, 12)
	b, _ := strconv.ParseUint(minor, 10, 20)
	return a<<20 | b
}

// unmount takes this mount from its path, which is another one than at first if
// a directory above it was renamed. What is mounted in its place by now stays.
func (s *Server) unmount(lazy bool) error {
	mounts, err := ReadMounts()
	if err != nil {
		return err
	}
	for _, m := range mounts {
		if m.ID == s.fs.mountID && m.FSType == "fuse.stagefs" {
			return detach(m.Path, lazy)
		}
	}
	return fmt.Errorf("%s: %w", s.mountpoint, ErrNoMount)
}

// MountInfo is one stagefs mount.
type MountInfo struct {
	Mountpoint string
	Source     string // the static directory
}

// Mounts returns the stagefs mounts, dead ones included.
func Mounts() ([]MountInfo, error) {
	lines, err := ReadMounts()
	if err != nil {
		return nil, err
	}
	var all []MountInfo
	for _, m := range lines {
		if m.FSType == "fuse.stagefs" {
			all = append(all, MountInfo{Mountpoint: m.Path, Source: m.Source})
		}
	}
	return all, nil
}

// FindMount returns the innermost stagefs mount at or above path, and path
// relative to it. It returns [ErrNoMount] if there is none, or another mount
// lies between.
func FindMount(path string) (mountpoint, rel string, err error) {
	abs, err := AbsoluteOf(path)
	if err != nil {
		return "", "", err
	}
	lines, err := ReadMounts()
	if err != nil {
		return "", "", err
	}
	var best MountEntry
	for _, m := range lines {
		// Of mounts on the same point the later one is on top.
		if within(abs, m.Path) && len(m.Path) >= len(best.Path) {
			best = m
		}
	}
	if best.FSType != "fuse.stagefs" {
		return "", "", fmt.Errorf("%s: %w", path, ErrNoMount)
	}
	if rel, err = filepath.Rel(best.Path, abs); err != nil {
		return "", "", err
	}
	return best.Path, rel, nil
}

// AbsoluteOf resolves the symlinks of a path that need not exist, or that a dead
// mount hides. It asks nothing of what is at its end: that may be the root of a mount
// whose daemon does not answer.
func AbsoluteOf(path string) (string, error) {
	if !filepath.IsAbs(path) {
		wd, err := os.Getwd()
		if err != nil {
			return "", err
		}
		path = wd + "/" + path
	}
	const maxLinks = 40 // as in the kernel
	at, rest := "/", strings.Split(path, "/")
	for links := 0; len(rest) > 0; {
		next := filepath.Join(at, rest[0]) // also if that is "..": no symlink is left in at
		rest = rest[1:]
		target, err := os.Readlink(next)
		if err != nil {
			at = next
			continue
		}
		if links++; links > maxLinks {
			return filepath.Clean(path), nil // whoever opens it hears why
		}
		if strings.HasPrefix(target, "/") {
			at = "/"
		}
		rest = append(strings.Split(target, "/"), rest...)
	}
	return at, nil
}

// Abs makes a path an absolute one that leads to the same: unlike for [filepath.Abs],
// a ".." behind a symlink, or in a working directory whose name has one, is the parent
// of where that leads.
func Abs(path string) (string, error) {
	up := strings.LastIndex("/"+path+"/", "/../")
	if up < 0 {
		return filepath.Abs(path)
	}
	up += len("..")
	parent, err := AbsoluteOf(path[:up])
	return filepath.Join(parent, path[up:]), err
}

func within(path, dir string) bool {
	return path == dir || dir == "/" || strings.HasPrefix(path, dir+"/")
}

// Unmount unmounts a stagefs mount, a dead one too. lazy detaches one that is
// busy. It returns an error that wraps EBUSY, EPERM or [ErrNoMount].
func Unmount(mountpoint string, lazy bool) error {
	at, err := AbsoluteOf(mountpoint) // which asks nothing of the mount
	if err != nil {
		return err
	}
	mounts, err := ReadMounts()
	if err != nil {
		return err
	}
	found := ""
	for _, m := range mounts {
		if m.Path == at {
			found = m.FSType // of several on the same point the last is on top
		}
	}
	if found != "fuse.stagefs" {
		return fmt.Errorf("%s: %w", mountpoint, ErrNoMount)
	}
	return detach(at, lazy)
}

// UnmountDead detaches the dead mount at an absolute path where the mount table
// cannot be read, because it is what covers /proc.
func UnmountDead(at string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(at, &st); err != unix.ENOTCONN && err != unix.ECONNABORTED {
		return fmt.Errorf("%s: %w", at, ErrNoMount)
	}
	return detach(at, true)
}

// detach unmounts what is at an absolute path without looking at it.
func detach(at string, lazy bool) error {
	if unix.Geteuid() == 0 {
		flags := unix.UMOUNT_NOFOLLOW
		if lazy {
			flags |= unix.MNT_DETACH
		}
		if err := unix.Unmount(at, flags); err == unix.EINVAL {
			return fmt.Errorf("%s: %w", at, ErrNoMount)
		} else if err != nil {
			return fmt.Errorf("umount %s: %w", at, err)
		}
		return nil
	}
	return fusermount(at, lazy)
}

func fusermount(at string, lazy bool) error {
	args := []string{"-u"}
	if lazy {
		args = append(args, "-z")
	}
	out, err := exec.Command("fusermount3", append(args, "--", at)...).CombinedOutput()
	switch {
	case errors.Is(err, exec.ErrNotFound):
		return fmt.Errorf("umount %s: %w: fusermount3 is missing; install fuse3", at, ErrNoFuse)
	case err == nil:
		return nil
	case bytes.Contains(out, []byte("busy")):
		return fmt.Errorf("umount %s: %w", at, unix.EBUSY)
	}
	return fmt.Errorf("umount %s: %s", at, bytes.TrimSpace(out))
}
