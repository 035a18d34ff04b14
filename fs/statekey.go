package fs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/filestore"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// The state of a backing is found by what the backing is (S1), not by where: its
// file system's UUID, its inode number and its birth time. Device numbers change
// with the order in which a machine finds its disks.

// stateKeys returns under which names the state of a backing may be. The first
// is its own; a daemon that did not know that, or a kernel that could not tell,
// left it under one of the others.
func stateKeys(root int) ([]string, error) {
	var st unix.Statx_t
	if err := statAt(root, "", &st); err != nil {
		return nil, err
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(root, &fs); err != nil {
		return nil, err
	}
	keys := []string{fmt.Sprintf("%x-%x-%x", st.Dev_major, st.Dev_minor, st.Ino)}
	birth := identityOf(&st).birth
	if birth == 0 || fs.Type == unix.OVERLAYFS_SUPER_MAGIC {
		// A directory of an overlay is born again when it is first changed.
		return keys, nil
	}
	more := func(key string) { keys = append([]string{fmt.Sprintf("%s-%x-%x", key, st.Ino, birth)}, keys...) }
	more(fmt.Sprintf("%x-%x", st.Dev_major, st.Dev_minor))
	switch uuid := fsUUID(root); {
	case uuid == "":
	case fs.Type == unix.BTRFS_SUPER_MAGIC:
		// A snapshot has the inodes of its subvolume, and their birth times.
		// What statfs(2) tells is made of the UUID and the subvolume's number.
		more(fmt.Sprintf("%s-%08x%08x", uuid, uint32(fs.Fsid.Val[0]), uint32(fs.Fsid.Val[1])))
	default:
		more(uuid)
	}
	return keys, nil
}

// fsUUID returns the UUID of the file system that a descriptor is on, as
// hexadecimal digits, or "" where it has none or the kernel cannot tell.
func fsUUID(fd int) string {
	id, _ := readUUID(fd)
	if strings.Trim(string(id), "\x00") == "" {
		return ""
	}
	return fmt.Sprintf("%x", id)
}

// readUUID returns what the kernel tells, if it does.
func readUUID(fd int) (id []byte, told bool) {
	const getFSUUID = 0x80111500 // FS_IOC_GETFSUUID, Linux 6.9
	var buf [1024]byte
	ask := func(request uintptr) bool {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(unsafe.Pointer(&buf)))
		return errno == 0
	}
	if ask(getFSUUID) {
		return buf[1:][:min(buf[0], 16)], true
	}
	// Older kernels tell the same, each file system in its own way.
	at, request := 0, uintptr(0)
	switch fsType(fd) {
	case unix.EXT4_SUPER_MAGIC:
		buf[0] = 16                 // there is room for so much
		at, request = 8, 0x8008662c // EXT4_IOC_GETFSUUID, Linux 6.0
	case unix.XFS_SUPER_MAGIC:
		at, request = 64, 0x80705864 // XFS_IOC_FSGEOMETRY_V1
	case unix.BTRFS_SUPER_MAGIC:
		at, request = 16, 0x8400941f // BTRFS_IOC_FS_INFO
	default:
		return nil, false
	}
	return buf[at:][:16], ask(request)
}

// Why the state of a backing is not found by its file system's UUID.
const (
	NoUUID    = "the kernel tells no UUID of this file system"
	ZeroUUID  = "the UUID of this file system is zero"
	NoBirth   = "the directory has no birth time"
	OnOverlay = "a directory of an overlay has no lasting birth time"
)

// KnownByUUID reports whether the state of a backing is found by its file
// system's UUID, and if it is not, why.
func KnownByUUID(dir string) (known bool, why string, err error) {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false, "", &os.PathError{Op: "open", Path: dir, Err: err}
	}
	defer unix.Close(fd)
	keys, err := stateKeys(fd)
	if err != nil || len(keys) > 2 {
		return err == nil, "", err
	}
	var fs unix.Statfs_t
	switch err := unix.Fstatfs(fd, &fs); {
	case err != nil:
		return false, "", err
	case fs.Type == unix.OVERLAYFS_SUPER_MAGIC:
		return false, OnOverlay, nil
	case len(keys) == 1:
		return false, NoBirth, nil
	}
	if _, told := readUUID(fd); told {
		return false, ZeroUUID, nil
	}
	return false, NoUUID, nil
}

// A CopyError says that the state belongs to another file system with the same
// UUID: one of the two is a copy of the other.
type CopyError struct {
	Dir   string
	Other string // the static directory whose state it is
	Pid   int    // of the daemon that serves that; 0: none
}

func (e *CopyError) Error() string {
	served := ""
	if e.Pid != 0 {
		served = fmt.Sprintf(" (pid %d)", e.Pid)
	}
	return fmt.Sprintf("%s is on a copy of the file system of %s%s, with the same UUID, and the state belongs to that one", e.Dir, e.Other, served)
}

// A statePlace is where a backing was served last.
type statePlace struct {
	boot, dev string
	path      string
}

func (p statePlace) String() string { return p.boot + " " + p.dev + " " + p.path }

func parsePlace(text string) (p statePlace, ok bool) {
	f := strings.SplitN(text, " ", 3)
	if len(f) < 3 {
		return p, false
	}
	return statePlace{f[0], f[1], f[2]}, true
}

// placeOfState returns where a backing is served now.
func placeOfState(root int, dir string) (statePlace, error) {
	where, err := world()
	if err != nil {
		return statePlace{}, err
	}
	var st unix.Statx_t
	if err := statAt(root, "", &st); err != nil {
		return statePlace{}, err
	}
	path, err := AbsoluteOf(dir)
	if err != nil {
		return statePlace{}, err
	}
	return statePlace{bootOf(where), devName(&st), path}, nil
}

// same reports whether the backing at p is surely the one that was at q. Within
// a boot the device number tells, and from one to the next the path.
func (p statePlace) same(q statePlace) bool {
	if p.boot == q.boot {
		return p.dev == q.dev
	}
	return p.path == q.path
}

// confirm refuses the state of a backing that was served at another place, while
// a file system is mounted that might be the one there.
func (p statePlace) confirm(uuid, last string) error {
	q, ok := parsePlace(last)
	if !ok || p.same(q) {
		return nil
	}
	twin, err := twinMounted(uuid, p, q)
	if err == nil && twin {
		err = &CopyError{Dir: p.path, Other: q.path}
	}
	return err
}

// twinMounted reports whether another file system with the same UUID is mounted,
// which was perhaps served at q.
func twinMounted(uuid string, p, q statePlace) (bool, error) {
	mounts, err := ReadMounts()
	if uuid == "" || err != nil {
		return false, err
	}
	fstype := ""
	for _, m := range mounts {
		if m.Dev == p.dev {
			fstype = m.FSType
		}
	}
	if fstype == "btrfs" {
		return false, nil // its subvolumes look like that, and have keys of their own
	}
	for i, m := range mounts {
		if m.FSType != fstype || m.Dev == p.dev {
			continue
		}
		covered := false
		for j, c := range mounts {
			// Nothing on FUSE is touched: its daemon may be dead, or wait for
			// this one.
			covered = covered || strings.HasPrefix(c.FSType, "fuse") && within(m.Path, c.Path) || j > i && c.Path == m.Path
		}
		switch {
		case covered && (m.Dev != q.dev || p.boot != q.boot):
		case covered:
			return true, nil
		default:
			at, err := uuidAt(m)
			if err != nil || at == uuid {
				return err == nil, err
			}
		}
	}
	return false, nil
}

// uuidAt returns the UUID of a mounted file system, or "" if it cannot be reached. The
// error is for want of descriptors or memory.
func uuidAt(m MountEntry) (string, error) {
	type answer struct {
		uuid string
		err  error
	}
	a, _ := procid.Within(time.Second, func() (a answer) {
		fd, err := unix.Open(m.Path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return answer{err: ifShort(err)}
		}
		defer unix.Close(fd)
		var st unix.Statx_t
		if err := statAt(fd, "", &st); err != nil || devName(&st) != m.Dev {
			return answer{err: ifShort(err)}
		}
		return answer{uuid: fsUUID(fd)}
	})
	return a.uuid, a.err
}

// openState opens the state of a backing in a state directory. dead: the dead mount that is
// to be replaced. served: there was a daemon, whose mount is there still. required: its
// state must be, too.
func openState(stateDir, dir string, root int, dead *deadMount, served, required bool) (*filestore.Store, error) {
	keys, err := stateKeys(root)
	if err != nil {
		return nil, err
	}
	here, err := placeOfState(root, dir)
	if err != nil {
		return nil, err
	}
	uuid := fsUUID(root)
	o := filestore.Options{
		Key: keys[0], Older: keys[1:], Place: here.String(),
		Confirm: func(last string) error { return here.confirm(uuid, last) },
		Served:  served, Required: required, Another: dead.another,
	}
	for end := time.Now().Add(endTime); ; time.Sleep(5 * time.Millisecond) {
		store, err := filestore.Open(stateDir, o)
		var held *filestore.HeldError
		if errors.Is(err, ErrNewerState) {
			err = fmt.Errorf("%s.*: %w", filepath.Join(stateDir, keys[0]), err)
		}
		if !errors.As(err, &held) {
			return store, err
		}
		if there, ok := parsePlace(held.Place); ok && there.boot == here.boot && there.dev != here.dev {
			return nil, &CopyError{Dir: dir, Other: there.path, Pid: held.Pid}
		}
		// The backing is this daemon's by now: who still has its state is
		// ending, and lets go of one after the other.
		if time.Now().After(end) {
			return nil, &ServedError{Dir: dir, Pid: held.Pid}
		}
	}
}
