package fs

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// Everybody can set marks, on any file that can be opened. One counts if a daemon can
// have set it that may serve where it says:
//
//   - A daemon has claimed what it marks with flock(2) before, and so have those of all
//     versions. Of an OFD lock the kernel shows no process, of an flock it does. A mark
//     on a file without one is nobody's.
//   - A daemon of root's, or of the user's own, is believed.
//   - Another user's is if the directory belongs to that user, and is where the mark
//     says: else one user could keep the others, and root, from serving what is theirs.
//     Who serves what is not theirs has descriptors of it as any process that was there
//     before (M5), and is warned of as such.
//
// In a PID namespace that is not the first one the flocks of processes outside are not
// shown, but their marks are. There, a mark without an flock counts unless a process is
// seen that has it. It may be a lie, whose descriptor is hidden, such as in a message
// that nobody has received; but to go on would be two daemons in one directory where it
// is none. Likewise, what may not be looked at is believed.

// A marked directory is one that another user's daemon has marked.
type marked struct {
	uid         int    // whose it is
	name        string // see inodeName
	path        string // "": not known in this mount namespace
	dev, inside string // where in its file system; or in which directory there, at the least
}

// counts reports whether a mark on a file counts. there tells whether a directory is
// where the mark says.
func (s *standing) counts(locks *kernelLocks, m mark, file string, there func(*marked) bool) bool {
	pid := locks.holders[file]
	if pid <= 0 {
		if firstPIDNamespace() || markSeen(m, file) {
			s.doubt("it is not believed that another daemon serves what is in here, or around it: the lock that says so is no daemon's")
			return false
		}
		return true
	}
	uid, known := userOf(pid)
	if !known {
		return unix.Kill(pid, 0) != unix.ESRCH
	}
	trusted := uid == 0 || uid == unix.Geteuid()
	look, inTime := procid.Within(time.Second, func() markLook { return lookForMark(pid, m, file) })
	switch {
	case !inTime: // no daemon's way, but that of one who is being replaced
		if trusted {
			return true
		}
	case look.refused:
		return true
	case look.fd >= 0 && (trusted || look.dir != nil && look.dir.uid == uid && there(look.dir)):
		return true
	case look.fd < 0 && unix.Kill(pid, 0) == unix.ESRCH:
		return false // it has ended just now
	}
	s.doubt("it is not believed that another daemon serves what is in here, or around it: process %d of the user %d says so, who may not", pid, uid)
	return false
}

// doubt notes once why a mark does not count.
func (s *standing) doubt(format string, args ...any) {
	if text := fmt.Sprintf(format, args...); !slices.Contains(s.doubts, text) {
		s.doubts = append(s.doubts, text)
	}
}

// firstPIDNamespace reports whether this process sees all others, and the flocks of
// all.
func firstPIDNamespace() bool {
	ns, err := os.Readlink("/proc/self/ns/pid")
	return err == nil && ns == procid.InitNamespace
}

// userOf returns whose process it is: root's only if nobody else has started it. A
// set-user-ID program has its starter's descriptors, and locks.
func userOf(pid int) (uid int, known bool) {
	status, err := procid.ReadStatus(pid)
	if err != nil {
		return 0, false
	}
	for _, id := range strings.Fields(status.Field("Uid")) {
		if uid, err = strconv.Atoi(id); err != nil {
			return 0, false
		}
		known = true
		if uid != 0 {
			break
		}
	}
	return uid, known
}

// A markLook is a look at what a process has open.
type markLook struct {
	refused bool    // by the kernel, or for want of descriptors or memory
	fd      int     // that the mark is set by; -1: none
	dir     *marked // nil: not to be told
}

// lookForMark looks for the descriptor by which a process has set a mark.
func lookForMark(pid int, m mark, file string) (l markLook) {
	proc := fmt.Sprintf("/proc/%d", pid)
	l.fd = -1
	entries, err := os.ReadDir(proc + "/fdinfo")
	if os.IsPermission(err) || procid.IsShort(err) {
		l.refused = true
	}
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil || fd <= 2 { // a set-user-ID program may have those of its starter
			continue
		}
		b, err := os.ReadFile(filepath.Join(proc, "fdinfo", e.Name()))
		if os.IsPermission(err) || procid.IsShort(err) {
			l.refused = true
			return l
		}
		locks := newKernelLocks()
		locks.read(strings.ReplaceAll(string(b), "lock:", ""))
		if slices.Contains(locks.marks[m], file) {
			l.fd, l.dir = fd, markedBy(proc, e.Name())
			return l
		}
	}
	return l
}

// markSeen reports whether a process is seen that has set a mark.
func markSeen(m mark, file string) bool {
	seen, _ := procid.Within(3*time.Second, func() bool {
		entries, _ := os.ReadDir("/proc")
		return slices.ContainsFunc(entries, func(e os.DirEntry) bool {
			pid, err := strconv.Atoi(e.Name())
			return err == nil && lookForMark(pid, m, file).fd >= 0
		})
	})
	return seen
}

// markedBy tells which directory a descriptor of another process leads to, or nil. It
// asks no file system: that may be one of the other's making.
func markedBy(proc, fd string) *marked {
	link := filepath.Join(proc, "fd", fd)
	var st unix.Statx_t
	if unix.Statx(unix.AT_FDCWD, link, unix.AT_NO_AUTOMOUNT|unix.AT_STATX_DONT_SYNC, statxMask, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return nil
	}
	d := &marked{uid: int(st.Uid), name: inodeName(&st)}
	path, err := os.Readlink(link)
	id := DescriptorInfo(link)["mnt_id"]
	mounts, bad := ReadMounts()
	if err != nil || bad != nil {
		return d
	}
	is := func(m MountEntry) bool { return strconv.Itoa(m.ID) == id }
	if i := slices.IndexFunc(mounts, is); i >= 0 && within(path, mounts[i].Path) {
		m := mounts[i]
		d.path, d.dev, d.inside = path, m.Dev, filepath.Join(m.Root, strings.TrimPrefix(path, m.Path))
		return d
	}
	// Paths of another mount namespace are its owner's to choose; what is mounted
	// there is not.
	b, _ := os.ReadFile(proc + "/mountinfo")
	theirs := ParseMounts(string(b))
	if i := slices.IndexFunc(theirs, is); i >= 0 {
		d.dev, d.inside = theirs[i].Dev, theirs[i].Root
	}
	return d
}

// is reports whether that is the directory with a name.
func (d *marked) is(name string) bool {
	return d.name == name || d.path != "" && treeName(d.dev, d.inside) == name
}

// isIn reports whether it is in the directory that s is about.
func (d *marked) isIn(s *standing) bool {
	return d.path != "" && within(d.path, s.path) || d.dev == s.dev && within(d.inside, s.inside)
}
