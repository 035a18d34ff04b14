package fs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Before Linux 6.5 the kernel mounts nothing beneath another mount when it is asked to.
// But what is mounted in a peer of the mount around (mount_namespaces(7)) comes there, too,
// and beneath what is mounted at its place already (Linux 4.11). The peer is made in a copy
// of the mount namespace, where nobody sees it, and goes with that.

// aside is where the peer is attached there.
const aside = "/proc/fs"

// takeWay finds out how a mount can be made beneath the dead one. It mounts nothing, and
// returns an [errNotBeneath] if it can't.
func (d *deadMount) takeWay(o *Options) error {
	if !o.Compat && canMountBeneath() {
		return nil
	}
	d.tucks = true
	if err := d.inPeer(func(int) error { return nil }); err != nil {
		return fmt.Errorf("%w: %w", errNotBeneath, err)
	}
	return nil
}

// tuck mounts mnt, which is not attached yet, beneath the only dead mount that is left, and
// returns the new mount's id.
func (d *deadMount) tuck(mnt int) (id int, err error) {
	err = d.inPeer(func(place int) error {
		return os.NewSyscallError("move_mount", unix.MoveMount(mnt, "", place, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH))
	})
	if err != nil {
		return 0, err
	}
	mounts, err := ReadMounts()
	if err != nil {
		return 0, err
	}
	for _, m := range mounts {
		if m.Path == d.path && m.Parent == d.entry.Parent && m.ID != d.entry.ID && m.IsStagefs() {
			return m.ID, nil
		}
	}
	return 0, errors.New("the kernel has put no mount beneath the dead one")
}

// inPeer calls f with the directory that the lowest dead mount covers, open in a peer of the
// mount that it is on.
func (d *deadMount) inPeer(f func(place int) error) (err error) {
	mounts, err := ReadMounts()
	if err != nil {
		return err
	}
	lowest := d.entry
	if d.husks > 0 {
		lowest = d.below[len(d.below)-d.husks]
	}
	around := mountByID(mounts, lowest.Parent)
	if around == nil || around.Path == d.path {
		return errors.New("the directory is the root of a mount")
	}
	for _, path := range []string{filepath.Dir(d.path), around.Path} {
		if !OnMount(path, around.ID) {
			return fmt.Errorf("something else is mounted over %s", plain(path))
		}
	}
	if !around.shared() {
		if err := unix.Mount("", around.Path, "", unix.MS_SHARED, ""); err != nil {
			return os.NewSyscallError("mount --make-shared", err)
		}
		defer func() {
			err = errors.Join(err, os.NewSyscallError("mount", unix.Mount("", around.Path, "", around.propagation(), "")))
		}()
	}
	onOwnThread(func() { err = d.inPeerHere(f) })
	return err
}

// inPeerHere is inPeer, on a thread of its own.
func (d *deadMount) inPeerHere(f func(place int) error) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	// So that what ends with this namespace stays where it is for everybody else.
	defer unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	if err := unix.Mount("", "/proc", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return os.NewSyscallError("mount --make-private", err)
	}
	if err := unix.Mount(filepath.Dir(d.path), aside, "", unix.MS_BIND, ""); err != nil {
		return os.NewSyscallError("mount --bind", err)
	}
	place, err := unix.Open(filepath.Join(aside, filepath.Base(d.path)), unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("open", err)
	}
	defer unix.Close(place)
	return f(place)
}

// settle gives the new mount with an id the propagation that the mount around had, which
// tucking it has changed.
func (d *deadMount) settle(id int) {
	mounts, err := ReadMounts()
	if err != nil {
		return
	}
	if around := mountByID(mounts, d.entry.Parent); around != nil && !around.shared() && OnMount(d.path, id) {
		unix.Mount("", d.path, "", unix.MS_PRIVATE, "")
	}
}
