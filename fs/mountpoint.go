package fs

import (
	"fmt"
	"os"
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
// directory, which root is.
func checkMountpoint(o *Options, root int) (at string, dead *deadMount, err error) {
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
	if err := dead.confirmSame(o, root); err != nil {
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
		err = dead.clear()
	default:
		if err = dead.takeWay(o); noWay(err) {
			err = dead.clear()
		}
	}
	if err != nil {
		return "", nil, err
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
	at, err := AbsoluteOf(at)
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
		if TopMount(mounts, at) != nil {
			return "", fmt.Errorf("%s: %w", at, ErrMountpointBusy)
		}
	}
	return at, nil
}
