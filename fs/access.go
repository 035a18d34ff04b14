package fs

import (
	"errors"
	"runtime"
	"strconv"
	"strings"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// mayCreateIn reports whether the caller could make an entry in a directory:
// who could not has no business to lock it. A command names the directory in
// its text, so that the kernel has checked nothing. The caller holds FS.ns.
func (fs *FS) mayCreateIn(h *fuse.InHeader, dir string) error {
	return fs.withRightsOf(h, func() error {
		fd, err := fs.walk(dir)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return mayChangeEntries(fd)
	})
}

// rights are by what the backing decides what somebody may do.
type rights struct {
	UID, GID uint32
	Groups   []uint32
	Mapped   bool // the IDs are not the caller's own, see mappedRights
}

// rightsOf returns those of the caller.
func (fs *FS) rightsOf(h *fuse.InHeader) (x rights, err error) {
	if fs.idmap {
		return mappedRights(h)
	}
	x = rights{UID: h.Uid, GID: h.Gid}
	if h.Uid != 0 && fs.privileged {
		x.Groups, err = groupsOf(h.Pid)
	}
	return x, err
}

// withRightsOf calls do on a thread that has the caller's rights, and no more.
func (fs *FS) withRightsOf(h *fuse.InHeader, do func() error) error {
	x, err := fs.rightsOf(h)
	if err != nil {
		return err
	}
	return fs.withRights(&x, do)
}

func (fs *FS) withRights(x *rights, do func() error) error {
	if x.UID == 0 && !x.Mapped || !fs.privileged && x.UID == fs.uid {
		return do()
	}
	if !fs.privileged {
		return unix.EACCES // an ordinary user's daemon cannot ask for another
	}
	if x.UID == procid.NoID || x.GID == procid.NoID {
		return unix.EACCES // the kernel would let the daemon's stay
	}
	answer := make(chan error)
	go func() {
		// Never unlocked: the thread, which is the caller from here on, ends
		// with the goroutine.
		runtime.LockOSThread()
		var first unsafe.Pointer
		if len(x.Groups) > 0 {
			first = unsafe.Pointer(&x.Groups[0])
		}
		// The raw call concerns this thread alone.
		if _, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(x.Groups)), uintptr(first), 0); errno != 0 {
			answer <- errno
			return
		}
		setFSID(unix.SYS_SETFSGID, x.GID)
		setFSID(unix.SYS_SETFSUID, x.UID) // which takes the capabilities to pass checks away
		if x.UID == 0 {
			none := capabilities{header: fs.caps.header}
			if err := none.set(); err != nil {
				answer <- err
				return
			}
		}
		answer <- do()
	}()
	return <-answer
}

// mayChangeEntries reports whether the calling thread may, in an open directory.
func mayChangeEntries(fd int) error {
	return unix.Faccessat2(fd, "", unix.W_OK|unix.X_OK, unix.AT_EACCESS|unix.AT_EMPTY_PATH)
}

// walk opens a directory with the rights of the calling thread.
func (fs *FS) walk(dir string) (int, error) {
	fd, err := openBeneath(fs.back.root, split(dir), unix.O_PATH)
	if err == unix.ELOOP {
		err = unix.ENOTDIR
	}
	return fd, err
}

// mayRemove reports whether somebody could remove a directory with all that is
// in it: the daemon does it for nobody else. The caller holds FS.ns.
func (fs *FS) mayRemove(x *rights, dir string) error {
	if x.UID == 0 && !x.Mapped {
		return nil
	}
	return fs.withRights(x, func() error {
		parent, name := cutLast(dir)
		fd, err := fs.walk(parent)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := mayChangeEntries(fd); err != nil {
			return err
		}
		var up, st unix.Statx_t
		if err := errors.Join(statAt(fd, "", &up), statAt(fd, name, &st)); err != nil {
			return err
		}
		if stuck(&up, &st, x.UID) {
			return unix.EACCES
		}
		return fs.mayEmpty(dir, x.UID)
	})
}

// mayEmpty is mayRemove for what is in a directory.
func (fs *FS) mayEmpty(dir string, uid uint32) error {
	below, err := fs.mayRemoveEntries(dir, uid)
	if err != nil {
		return err
	}
	for _, d := range below {
		if err := fs.mayEmpty(d, uid); err != nil && !errors.Is(err, unix.ENOENT) { // gone: see below
			return err
		}
	}
	return nil
}

// mayRemoveEntries is mayEmpty for the entries alone, as if directories were empty: it
// returns those. Nothing is open when it does, however deep the tree.
func (fs *FS) mayRemoveEntries(dir string, uid uint32) (below []string, err error) {
	fd, err := fs.walk(dir)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	var st, entry unix.Statx_t
	if err := statAt(fd, "", &st); err != nil {
		return nil, err
	}
	list, err := openAt(fd, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(list)
	empty := true
	bad := eachEntry(list, func(e dirEntry) bool {
		if err = statAt(fd, e.name, &entry); err == unix.ENOENT {
			err = nil
			return true // who works there, as a child of the caller's, has removed it
		}
		empty = false
		if err == nil && stuck(&st, &entry, uid) {
			err = unix.EACCES
		}
		if isDirectory(&entry) {
			below = append(below, join(dir, e.name))
		}
		return err == nil
	})
	if err = errors.Join(bad, err); err == nil && !empty {
		err = mayChangeEntries(fd)
	}
	return below, err
}

// stuck reports whether the sticky bit of a directory keeps a user from removing
// an entry.
func stuck(dir, entry *unix.Statx_t, uid uint32) bool {
	return dir.Mode&unix.S_ISVTX != 0 && dir.Uid != uid && entry.Uid != uid
}

// groupsOf returns the supplementary groups of a thread.
func groupsOf(tid uint32) ([]uint32, error) {
	status, err := procid.ReadStatus(int(tid))
	if err != nil {
		return nil, err
	}
	return groupsIn(status)
}

func groupsIn(status procid.Status) ([]uint32, error) {
	var groups []uint32
	for f := range strings.FieldsSeq(status.Field("Groups")) {
		g, err := strconv.ParseUint(f, 10, 32)
		if err != nil {
			return nil, err
		}
		groups = append(groups, uint32(g))
	}
	return groups, nil
}
