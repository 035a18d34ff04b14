package fs

import (
	"bytes"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"
)

// unmount takes this mount from its path, which is another one than at first if
// a directory above it was renamed. What is mounted in its place by now stays; what is
// mounted over it keeps it busy, and goes with it if it is detached.
func (s *Server) unmount(lazy bool) error {
	for {
		mounts, err := ReadMounts()
		if err != nil {
			return err
		}
		m := mountByID(mounts, s.fs.mountID)
		if m == nil || !m.IsStagefs() {
			return fmt.Errorf("%s: %w", s.mountpoint, ErrNoMount)
		}
		covered := slices.ContainsFunc(mounts, func(c MountEntry) bool { return c.Parent == m.ID && c.Path == m.Path })
		if covered && !lazy {
			return fmt.Errorf("something is mounted over %s: %w", m.Path, unix.EBUSY)
		}
		if err := detach(m.Path, lazy); err != nil || !covered {
			return err
		}
	}
}

// Unmount unmounts a stagefs mount, a dead one too. lazy detaches one that is
// busy. It returns an error that wraps EBUSY, EPERM, [ErrNoMount] or [ErrMountLocked].
func Unmount(mountpoint string, lazy bool) error {
	at, err := AbsoluteOf(mountpoint) // which asks nothing of the mount
	if err != nil {
		return err
	}
	for tried := 0; ; {
		mounts, err := ReadMounts()
		if err != nil {
			return err
		}
		m := TopMount(mounts, at)
		if m == nil || !m.IsStagefs() {
			return fmt.Errorf("%s: %w", mountpoint, ErrNoMount)
		}
		if m.ID == tried { // mount_namespaces(7): it came with others from a namespace with more privilege
			return fmt.Errorf("umount %s: %w", at, ErrMountLocked)
		}
		// A daemon that takes a dead mount's place detaches that: its own is left then.
		if err = detach(at, lazy); !errors.Is(err, ErrNoMount) {
			return err
		}
		tried = m.ID
	}
}

// UnmountDead detaches the dead mount at an absolute path where the mount table
// cannot be read, because it is what covers /proc.
func UnmountDead(at string) error {
	var st unix.Statfs_t
	if !isDead(unix.Statfs(at, &st)) {
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
	cmd := fusermountCommand(append(args, "--", at)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a second Ctrl-C is not for it
	out, err := cmd.CombinedOutput()
	switch {
	case errors.Is(err, exec.ErrNotFound):
		return fmt.Errorf("umount %s: %w: fusermount3 is missing; install fuse3", at, ErrNoFuse)
	case err == nil:
		return nil
	case bytes.Contains(out, []byte("busy")):
		return fmt.Errorf("umount %s: %w", at, unix.EBUSY)
	case len(bytes.TrimSpace(out)) == 0: // it was killed, or could not be run
		return fmt.Errorf("umount %s: fusermount3: %w", at, err)
	}
	return fmt.Errorf("umount %s: %s", at, bytes.TrimSpace(out))
}
