package fs

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// MountFlags are what the mount has otherwise than the file system of the static
// directory, as flags of mount(2). The zero value is nothing.
type MountFlags struct {
	Set, Clear uintptr
}

// atimes are the flags that say when access times change.
const atimes = unix.MS_NOATIME | unix.MS_RELATIME | unix.MS_STRICTATIME | unix.MS_NODIRATIME

// flagOptions are the options of mount(8) that are flags of a mount.
var flagOptions = map[string]MountFlags{
	"ro":          {Set: unix.MS_RDONLY},
	"rw":          {Clear: unix.MS_RDONLY},
	"nosuid":      {Set: unix.MS_NOSUID},
	"suid":        {Clear: unix.MS_NOSUID},
	"nodev":       {Set: unix.MS_NODEV},
	"dev":         {Clear: unix.MS_NODEV},
	"noexec":      {Set: unix.MS_NOEXEC},
	"exec":        {Clear: unix.MS_NOEXEC},
	"atime":       {unix.MS_RELATIME, unix.MS_NOATIME | unix.MS_STRICTATIME}, // the kernel's default
	"noatime":     {unix.MS_NOATIME, unix.MS_RELATIME | unix.MS_STRICTATIME},
	"relatime":    {unix.MS_RELATIME, unix.MS_NOATIME | unix.MS_STRICTATIME},
	"strictatime": {unix.MS_STRICTATIME, unix.MS_NOATIME | unix.MS_RELATIME},
	"nodiratime":  {Set: unix.MS_NODIRATIME},
	"diratime":    {Clear: unix.MS_NODIRATIME},
	"nosymfollow": {Set: unix.MS_NOSYMFOLLOW},
	"symfollow":   {Clear: unix.MS_NOSYMFOLLOW},
}

// IsFlagOption reports whether an option of mount(8) is one for [ParseMountFlags].
func IsFlagOption(name string) bool {
	_, ok := flagOptions[name]
	return ok
}

// ParseMountFlags reads options as mount(8) takes them, separated by commas, of which a
// later one counts. The error is an [*OptionError] for the first that is no flag.
func ParseMountFlags(options string) (f MountFlags, err error) {
	for _, name := range strings.Split(options, ",") {
		flag, ok := flagOptions[name]
		if !ok {
			return f, &OptionError{"options", name, "is none of ro, nosuid, nodev, noexec, nosymfollow, noatime, relatime, strictatime, nodiratime and their opposites"}
		}
		f.add(flag)
	}
	return f, nil
}

// add has what other says count.
func (f *MountFlags) add(other MountFlags) {
	f.Set = f.Set&^other.Clear | other.Set
	f.Clear = f.Clear&^other.Set | other.Clear
}

// on returns flags of mount(2) with those of f.
func (f MountFlags) on(flags uintptr) uintptr {
	flags = flags&^f.Clear | f.Set
	if flags&(unix.MS_NOATIME|unix.MS_RELATIME) == 0 {
		flags |= unix.MS_STRICTATIME
	}
	return flags
}

// changesAtimes reports whether access times change otherwise than with some flags.
func (f MountFlags) changesAtimes(has uintptr) bool { return (f.on(has)^has)&atimes != 0 }

// forUser returns what fusermount3 is to be told of flags of mount(2). It has no
// set-user-ID programs and devices in any case, and does not know all of the others.
func forUser(flags uintptr) []string {
	var options []string
	for _, name := range []string{"ro", "noexec"} {
		if flags&flagOptions[name].Set != 0 {
			options = append(options, name)
		}
	}
	return options
}

// stNoSymFollow is ST_NOSYMFOLLOW of linux/statfs.h (Linux 5.10).
const stNoSymFollow = 0x2000

// flagsOf translates the flags of a mount from statfs(2) to mount(2).
func flagsOf(fd int) (uintptr, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err != nil {
		return 0, err
	}
	var flags uintptr
	for _, f := range []struct{ st, ms int }{
		{unix.ST_RDONLY, unix.MS_RDONLY},
		{unix.ST_NOSUID, unix.MS_NOSUID},
		{unix.ST_NODEV, unix.MS_NODEV},
		{unix.ST_NOEXEC, unix.MS_NOEXEC},
		{unix.ST_NOATIME, unix.MS_NOATIME},
		{unix.ST_NODIRATIME, unix.MS_NODIRATIME},
		{unix.ST_RELATIME, unix.MS_RELATIME},
		{stNoSymFollow, unix.MS_NOSYMFOLLOW},
	} {
		if int(st.Flags)&f.st != 0 {
			flags |= uintptr(f.ms)
		}
	}
	return MountFlags{}.on(flags), nil
}

// mountFlags are the flags of the mount: the backing's, and what o says.
func (o *Options) mountFlags(root int) uintptr {
	flags, err := flagsOf(root)
	if err != nil {
		flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_RELATIME
	}
	return o.MountFlags.on(flags)
}

// restriction returns which of nosuid and nodev something has that is mounted within the
// directory. The kernel goes by the flags of the mount alone: without them a program or a
// device there would give whoever may write there rights that it does not give below.
func restriction(inside []MountEntry) (flags uintptr, where map[string]string) {
	where = make(map[string]string)
	for _, m := range inside {
		for _, name := range strings.Split(m.Options, ",") {
			if f := flagOptions[name].Set & (unix.MS_NOSUID | unix.MS_NODEV); f&^flags != 0 && !IsKernelType(m.FSType) {
				flags |= f
				where[name] = m.Path
			}
		}
	}
	return flags, where
}

// mountAttrs turns flags of mount(2) into those of fsmount(2).
func mountAttrs(flags uintptr) int {
	attrs := 0
	for _, f := range []struct {
		ms   uintptr
		attr int
	}{
		{unix.MS_RDONLY, unix.MOUNT_ATTR_RDONLY},
		{unix.MS_NOSUID, unix.MOUNT_ATTR_NOSUID},
		{unix.MS_NODEV, unix.MOUNT_ATTR_NODEV},
		{unix.MS_NOEXEC, unix.MOUNT_ATTR_NOEXEC},
		{unix.MS_NOATIME, unix.MOUNT_ATTR_NOATIME},
		{unix.MS_NODIRATIME, unix.MOUNT_ATTR_NODIRATIME},
		{unix.MS_STRICTATIME, unix.MOUNT_ATTR_STRICTATIME},
		{unix.MS_NOSYMFOLLOW, unix.MOUNT_ATTR_NOSYMFOLLOW},
	} {
		if flags&f.ms != 0 {
			attrs |= f.attr
		}
	}
	return attrs
}

// withAtimes returns a descriptor of the same directory through which access times
// change as o says: of a mount of the daemon's own, which nobody else gets at, as the
// kernel goes by the backing's mount when data passes. It is root itself if that one does,
// and with an error.
func (o *Options) withAtimes(root int) (int, error) {
	has, err := flagsOf(root)
	if err != nil {
		return root, os.NewSyscallError("fstatfs", err)
	}
	if !o.MountFlags.changesAtimes(has) {
		return root, nil
	}
	if err := noMountsInside(root); err != nil {
		return root, o.unlessReadOnly(o.noAtimes(err))
	}
	tree, err := unix.OpenTree(root, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return root, o.unlessReadOnly(o.noAtimes(os.NewSyscallError("open_tree", err)))
	}
	defer unix.Close(tree)
	if err := o.setAtimes(tree); err != nil {
		return root, o.unlessReadOnly(err)
	}
	own, err := openAt(tree, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return root, &os.PathError{Op: "open", Path: o.Dir, Err: err}
	}
	return own, nil
}

// setAtimes has access times change as o says in a mount that is the daemon's own.
func (o *Options) setAtimes(tree int) error {
	has, err := flagsOf(tree)
	if err != nil {
		return os.NewSyscallError("fstatfs", err)
	}
	if !o.MountFlags.changesAtimes(has) {
		return nil
	}
	if o.Compat {
		return o.noAtimes(unix.ENOSYS) // Linux 5.12
	}
	attr := &unix.MountAttr{
		Attr_set:    uint64(mountAttrs(o.MountFlags.on(has) & atimes)),
		Attr_clr:    unix.MOUNT_ATTR__ATIME | unix.MOUNT_ATTR_NODIRATIME,
		Propagation: unix.MS_PRIVATE, // what is mounted over the directory is none of its
	}
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, attr); err != nil {
		return o.noAtimes(os.NewSyscallError("mount_setattr", err))
	}
	return nil
}

// unlessReadOnly returns an error of these, but for what is mounted read-only: there it is
// only to be hoped that access times don't change.
func (o *Options) unlessReadOnly(err error) error {
	if o.MountFlags.Set&unix.MS_RDONLY != 0 {
		return nil
	}
	return err
}

func (o *Options) noAtimes(why error) error {
	return fmt.Errorf("%s: %w: %w", o.Dir, ErrNoAtimes, why)
}

// noMountsInside fails if another file system is mounted within the directory, which
// would be missing in a mount of the daemon's own.
func noMountsInside(root int) error {
	inside, err := mountsInside(root)
	if err == nil && len(inside) > 0 {
		err = fmt.Errorf("%s is mounted within", inside[0].Path)
	}
	return err
}

// mountsInside returns what is mounted within the directory, and on that again.
func mountsInside(root int) ([]MountEntry, error) {
	dir, err := pathOfFD(root)
	if err != nil {
		return nil, err
	}
	return mountsOn(mountIDOf(root), dir)
}

// mountsOn returns what is mounted within a directory on a mount, and on that again.
func mountsOn(id int, dir string) (inside []MountEntry, err error) {
	mounts, err := ReadMounts()
	if err != nil {
		return nil, err
	}
	on := map[int]bool{id: true} // by ID; no mount comes before the one that it is on
	for _, m := range mounts {
		if on[m.Parent] && m.Path != dir && within(m.Path, dir) {
			on[m.ID] = true
			inside = append(inside, m)
		}
	}
	return inside, nil
}

// Remount changes flags of a mount. When access times change cannot be changed:
// the error wraps [ErrNoAtimes] then.
func Remount(mountpoint string, f MountFlags) error {
	fd, err := unix.Open(mountpoint, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: mountpoint, Err: err}
	}
	defer unix.Close(fd)
	has, err := flagsOf(fd)
	if err != nil {
		return &os.PathError{Op: "statfs", Path: mountpoint, Err: err}
	}
	if f.changesAtimes(has) {
		return fmt.Errorf("%s: %w while it is mounted", mountpoint, ErrNoAtimes)
	}
	if err := unix.Mount("", procPath(fd), "", unix.MS_REMOUNT|f.on(has), ""); err != nil {
		return fmt.Errorf("remount %s: %w", mountpoint, err)
	}
	return nil
}
