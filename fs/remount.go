package fs

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// A deadMount is a stagefs mount whose daemon has died. The next daemon takes
// its place (S1): the new mount is made beneath the dead one, which is detached
// then, so that there is no moment in which the backing lies open.
type deadMount struct {
	path  string
	entry MountEntry
	below []MountEntry // others at the same path, the uppermost last
	husks int          // so many of those, the uppermost, are of stagefs too
	on    int          // the mount that all of these are on, by its ID
	hides bool         // mounts within the directory, which were there before
	tucks bool         // a mount comes beneath it by way of a peer, see tuck

	cleared bool  // it is not there any more
	taken   bool  // another mount has its place
	why     error // it had to be cleared before there was another mount; nil: it had not
	gone    bool  // nor was it when it was to be cleared: somebody has unmounted it
}

// FindDead reports whether there is a dead stagefs mount at path. It asks the
// mount, and returns [ErrStaleMount] for a dead one that is not stagefs's.
func FindDead(path string) (bool, error) {
	dead, err := findDead(path)
	return dead != nil, err
}

// findDead looks for a dead stagefs mount at path. It returns nil if there is
// nothing dead there, and [ErrStaleMount] if it is not stagefs's.
func findDead(path string) (*deadMount, error) {
	// Attributes are cached beyond the daemon's death; this always asks.
	var st unix.Statfs_t
	err := unix.Statfs(path, &st)
	for end := time.Now().Add(endTime); err == unix.ECANCELED && time.Now().Before(end); err = unix.Statfs(path, &st) {
		time.Sleep(time.Millisecond) // its daemon is about to be gone, and had a ring
	}
	if err == unix.ECANCELED || procid.IsShort(err) { // not gone, and no living one either
		return nil, &os.PathError{Op: "statfs", Path: path, Err: err}
	}
	if !isDead(err) {
		return nil, nil
	}
	at, err := AbsoluteOf(path)
	if err != nil {
		return nil, err
	}
	mounts, err := ReadMounts()
	if err != nil {
		return nil, err
	}
	var here []MountEntry
	for _, m := range mounts {
		if m.Path == at {
			here = append(here, m)
		}
	}
	if len(here) == 0 || !here[len(here)-1].IsStagefs() {
		return nil, fmt.Errorf("%s: %w", path, ErrStaleMount)
	}
	last := len(here) - 1
	d := &deadMount{path: at, entry: here[last], below: here[:last]}
	for last--; last >= 0 && here[last].IsStagefs(); last-- {
		d.husks++ // their daemons were killed while they took a dead mount's place
	}
	d.on = here[last+1].Parent
	on := func(m *MountEntry) bool { return m.ID == d.on }
	d.hides = slices.ContainsFunc(mountedOn(mounts, on), func(m MountEntry) bool { return m.Path != at && within(m.Path, at) })
	return d, nil
}

// isDead reports whether an error is what the kernel answers for a mount whose daemon has
// died.
func isDead(err error) bool { return err == unix.ENOTCONN || err == unix.ECONNABORTED }

// openBelow opens the directory that the dead mount covers. The mount around it
// is cloned for that, with those within the directory that were there before; the clone
// lasts as long as the descriptor.
func (d *deadMount) openBelow(o *Options) (fd int, err error) {
	if len(d.below) > d.husks || d.hides {
		// It is the root of a mount, which a clone of the one around does not show, or
		// the dead mount is in the way of those within.
		onOwnThread(func() { fd, err = d.openRoot(o) })
		return fd, err
	}
	return d.openInClone(o, filepath.Dir(d.path), filepath.Base(d.path), 0)
}

// openInClone opens the directory as name in a clone of the mount that dir is on; of those
// within, too, if how is AT_RECURSIVE.
func (d *deadMount) openInClone(o *Options, dir, name string, how uint) (int, error) {
	tree, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|how)
	if err != nil {
		return -1, fmt.Errorf("%w: open_tree: %w", errCovered, err)
	}
	defer unix.Close(tree)
	if err := o.unlessReadOnly(o.setAtimes(tree)); err != nil {
		return -1, err
	}
	fd, err := openAt(tree, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: d.path, Err: err}
	}
	return fd, nil
}

// openRoot is openBelow for the root of a mount, or with mounts within: it takes the dead
// mount away in a copy of the mount namespace, which only the calling thread is in.
func (d *deadMount) openRoot(o *Options) (int, error) {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return -1, fmt.Errorf("%w: unshare: %w", errCovered, err)
	}
	// So that what is unmounted here stays where it is for everybody else.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return -1, fmt.Errorf("%w: making its mounts private: %w", errCovered, err)
	}
	for range 1 + d.husks {
		var st unix.Statfs_t
		if !isDead(unix.Statfs(d.path, &st)) {
			break // somebody has unmounted it meanwhile
		}
		if err := unix.Unmount(d.path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return -1, fmt.Errorf("%w: umount in a copy of the mount namespace: %w", errCovered, err)
		}
	}
	return d.openInClone(o, d.path, ".", unix.AT_RECURSIVE)
}

// onOwnThread runs f on a thread that ends with it, so that what f changes about its
// thread concerns nobody else.
func onOwnThread(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The first thread would not end, and /proc/self shows its namespaces.
			onOwnThread(f)
			runtime.UnlockOSThread()
			return
		}
		f()
	}()
	<-done
}

// errCovered: what the dead mount covers cannot be reached past it.
var errCovered = errors.New("the directory cannot be reached past the dead mount")

// errOrdinary: fusermount3 mounts nothing beneath another mount.
var errOrdinary = fmt.Errorf("%w by an ordinary user", errCovered)

// errNotBeneath: nor can root's daemon.
var errNotBeneath = errors.New("nothing can be mounted beneath the dead mount before Linux 6.5")

// canMountBeneath reports whether the kernel mounts beneath another mount (MOVE_MOUNT_BENEATH).
func canMountBeneath() bool {
	const none = math.MaxInt32 // what no descriptor is
	return unix.MoveMount(none, "", none, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH|moveMountBeneath) == unix.EBADF
}

// clear detaches the dead mount, and dead ones below it.
func (d *deadMount) clear() error {
	mounts, err := ReadMounts()
	if err != nil {
		return err
	}
	if m := TopMount(mounts, d.path); m == nil || m.ID != d.entry.ID {
		d.gone = true // and what is there now is to stay
	} else if err := detach(d.path, true); errors.Is(err, ErrNoMount) {
		d.gone = true
	} else if err != nil {
		return err
	}
	d.cleared = true
	for {
		next, err := findDead(d.path)
		if err != nil || next == nil {
			return err
		}
		if err := detach(next.path, true); err != nil {
			return err
		}
	}
}

// noWay reports whether an error says that no mount can be made beneath a dead one: not
// only now, for want of descriptors or memory.
func noWay(err error) bool {
	return (errors.Is(err, errCovered) || errors.Is(err, errNotBeneath)) && !procid.IsShort(err)
}

// openStatic opens the static directory, past a dead mount over it if there is
// one that is stagefs's own, or after that has been cleared.
func openStatic(o *Options) (root int, dead *deadMount, err error) {
	dir := o.Dir
	if dead, err = findDead(dir); err != nil {
		return -1, nil, err
	}
	if dead == nil {
		root, err = openBacking(dir)
		return root, nil, err
	}
	if unix.Geteuid() != 0 {
		err = errOrdinary
	} else if err = dead.takeWay(o); err == nil {
		root, err = dead.openBelow(o)
	}
	if noWay(err) {
		// Until the new mount is there the backing lies open, as before the first.
		dead.why = err
		o.Mounted(false)
		if err := dead.clear(); err != nil {
			return -1, nil, err
		}
		root, err = openBacking(dir)
		return root, dead, err
	}
	if err != nil {
		return -1, nil, err
	}
	if err := checkBacking(root, dir); err != nil {
		unix.Close(root)
		return -1, nil, err
	}
	return root, dead, nil
}

// mountBeneath mounts with the connection fuse beneath the dead mount, and
// detaches that. If it fails the dead mount is still there, or somebody has unmounted
// it: that is [ErrUnmounted].
func (d *deadMount) mountBeneath(o *Options, fuse, root int) error {
	ctx, err := unix.Fsopen("fuse", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("fsopen", err)
	}
	defer unix.Close(ctx)
	for _, option := range [][2]string{
		{"source", o.Dir},
		{"subtype", "stagefs"},
		{"fd", strconv.Itoa(fuse)},
		{"rootmode", "40000"},
		{"user_id", "0"},
		{"group_id", "0"},
		{"max_read", strconv.Itoa(maxWrite)},
	} {
		if err := unix.FsconfigSetString(ctx, option[0], option[1]); err != nil {
			return fmt.Errorf("fsconfig %s: %w", option[0], err)
		}
	}
	for _, flag := range []string{"default_permissions", "allow_other"} {
		if err := unix.FsconfigSetFlag(ctx, flag); err != nil {
			return fmt.Errorf("fsconfig %s: %w", flag, err)
		}
	}
	if err := unix.FsconfigCreate(ctx); err != nil {
		return os.NewSyscallError("fsconfig", err)
	}
	mnt, err := unix.Fsmount(ctx, unix.FSMOUNT_CLOEXEC, mountAttrs(o.mountFlags(root)))
	if err != nil {
		return os.NewSyscallError("fsmount", err)
	}
	defer unix.Close(mnt)
	lowest, err := d.thin()
	if err != nil {
		return err
	}
	defer unix.Close(lowest)
	id := 0
	if d.tucks {
		id, err = d.tuck(mnt)
	} else {
		err = os.NewSyscallError("move_mount", unix.MoveMount(mnt, "", lowest, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH|moveMountBeneath))
	}
	if err != nil {
		return err
	}
	o.Mounted(true)
	d.cleared, d.taken = true, true
	if err = detachOpen(lowest); err == nil && d.tucks {
		d.settle(id)
	}
	if !errors.Is(err, ErrNoMount) {
		return err
	}
	// Whoever has unmounted it just now wants nothing there.
	if !d.tucks {
		err = detachOpen(mnt)
	} else if OnMount(d.path, id) {
		err = detach(d.path, true)
	}
	if err != nil && !errors.Is(err, ErrNoMount) {
		return err
	}
	return fmt.Errorf("%s: %w", d.path, ErrUnmounted)
}

// thin detaches all of the dead mounts but the lowest, which keeps the backing
// covered. It returns a descriptor of that one, so that nothing else is taken for it
// should somebody unmount it.
func (d *deadMount) thin() (fd int, err error) {
	for ; ; d.husks-- {
		if fd, err = unix.Open(d.path, unix.O_PATH|unix.O_CLOEXEC, 0); err != nil {
			return -1, &os.PathError{Op: "open", Path: d.path, Err: err}
		}
		on, err := onMount(procPath(fd), d.entry.ID)
		if err == nil && !on {
			err = fmt.Errorf("%s: %w", d.path, ErrUnmounted)
		}
		if err != nil {
			unix.Close(fd)
			return -1, err
		}
		if d.husks == 0 {
			return fd, nil
		}
		err = detachOpen(fd)
		unix.Close(fd)
		if err != nil {
			return -1, err
		}
		last := len(d.below) - 1
		d.entry, d.below = d.below[last], d.below[:last]
	}
}

// detachOpen detaches the mount whose root is open, wherever it is. It returns
// [ErrNoMount] if somebody has done that.
func detachOpen(root int) error {
	err := unix.Unmount(procPath(root), unix.MNT_DETACH)
	if err == unix.EINVAL {
		return ErrNoMount
	}
	return os.NewSyscallError("umount", err)
}

// moveMountBeneath is MOVE_MOUNT_BENEATH, Linux 6.5.
const moveMountBeneath = 0x200

// OnMount reports whether a link below /proc/PID leads to the mount with an id. It asks
// nothing of that mount.
func OnMount(link string, id int) bool {
	on, _ := onMount(link, id)
	return on
}

func onMount(link string, id int) (bool, error) {
	if filepath.Base(filepath.Dir(link)) != "fd" {
		fd, err := unix.Open(link, unix.O_PATH|unix.O_CLOEXEC, 0)
		if err != nil {
			return false, &os.PathError{Op: "open", Path: link, Err: err}
		}
		defer unix.Close(fd)
		link = procPath(fd)
	}
	info, err := descriptorInfo(link)
	return info["mnt_id"] == strconv.Itoa(id), err
}

// DescriptorInfo returns what proc(5) tells of a descriptor, given as a link in
// /proc/PID/fd.
func DescriptorInfo(link string) map[string]string {
	info, _ := descriptorInfo(link)
	return info
}

func descriptorInfo(link string) (info map[string]string, err error) {
	dir := filepath.Dir(link)
	b, err := os.ReadFile(filepath.Join(filepath.Dir(dir), "fdinfo", filepath.Base(link)))
	info = make(map[string]string)
	for line := range strings.Lines(string(b)) {
		key, value, _ := strings.Cut(line, ":")
		info[key] = strings.TrimSpace(value)
	}
	return info, err
}
