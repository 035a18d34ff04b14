package fs

import (
	"fmt"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// No two daemons serve directories of which one is inside the other (M1): each
// would have a table of its own for what is in both.
//
// A daemon says what it serves, and in which directories that is, by read locks
// (F_OFD_SETLK) on its descriptor of the backing. proc_locks(5) shows them to every
// process, whatever its user, mount namespace and state directory, and the kernel
// drops them with the daemon. The byte that is locked stands for a directory. Such
// locks on a directory are in nobody's way. Whose count is told in marker.go.

// A mark is a byte that a daemon locks.
type mark int64

const (
	markServed mark = 1 << 62       // the daemon serves this directory
	markAround mark = 1<<62 | 1<<61 // what the daemon serves is in this directory
)

// served is the mark of who serves a directory.
func served(name string) mark {
	h := fnv.New64a()
	io.WriteString(h, name)
	return markServed | mark(h.Sum64()>>3)
}

// around is the mark of who serves something inside a directory.
func around(name string) mark { return served(name) | markAround }

// A standing is where a static directory is among others. Names are those of
// inodeName and treeName: a directory has one of each.
type standing struct {
	path string // absolute, without symlinks
	own  []string
	in   map[string]string // the directories that it is in: their paths; "": none here

	dev, inside string   // where in its file system
	doubts      []string // why marks of others do not count
}

// inodeName names a directory by what it is.
func inodeName(st *unix.Statx_t) string {
	return fmt.Sprintf("inode %d:%d %d", st.Dev_major, st.Dev_minor, st.Ino)
}

// treeName names a directory by where in its file system it is. That can be told
// of what lies above the root of a bind mount, too, which no path leads to.
func treeName(dev, path string) string { return "tree " + dev + " " + path }

// standingOf tells where a static directory is. It looks at those above it, as far
// as they are on no FUSE file system: what is mounted on one of those is not in what
// its daemon serves.
func standingOf(root int, path string) (*standing, error) {
	var st unix.Statx_t
	if err := statAt(root, "", &st); err != nil {
		return nil, err
	}
	mounts, err := ReadMounts()
	if err != nil {
		return nil, err
	}
	s := &standing{path: path, own: []string{inodeName(&st)}, in: make(map[string]string)}
	on, inside := mountBeneath(mounts, path)
	s.dev, s.inside = on.Dev, inside
	s.own = append(s.own, treeName(on.Dev, inside))
	for dir := path; ; {
		if dir == on.Path {
			for up := on.Root; up != "/" && up != "."; {
				up = filepath.Dir(up)
				s.in[treeName(on.Dev, up)] = ""
			}
		}
		if dir == "/" {
			break
		}
		dir = filepath.Dir(dir)
		if on = MountOf(mounts, dir); strings.HasPrefix(on.FSType, "fuse") {
			break
		}
		if err := unix.Statx(unix.AT_FDCWD, dir, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT|unix.AT_STATX_DONT_SYNC, statxMask, &st); err == nil {
			s.in[inodeName(&st)] = dir
		}
	}
	for _, name := range s.own {
		delete(s.in, name) // it is bound into itself
	}
	return s, nil
}

// mountBeneath returns the mount that an absolute path is on, and where in its file
// system it leads. What stagefs has mounted there itself does not count.
func mountBeneath(mounts []MountEntry, path string) (on MountEntry, inside string) {
	on = MountOf(slices.DeleteFunc(slices.Clone(mounts), func(m MountEntry) bool {
		return m.Path == path && m.IsStagefs()
	}), path)
	return on, filepath.Join(on.Root, strings.TrimPrefix(path, on.Path))
}

// publish says where the directory is, until its descriptor is closed or it is
// taken back.
func (s *standing) publish(root int) error {
	set := func(m mark) error {
		return unix.FcntlFlock(uintptr(root), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_RDLCK, Start: int64(m), Len: 1})
	}
	for _, name := range s.own {
		if err := set(served(name)); err != nil {
			return err
		}
	}
	for name := range s.in {
		if err := set(around(name)); err != nil {
			return err
		}
	}
	return nil
}

func takeBack(root int) {
	_ = unix.FcntlFlock(uintptr(root), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_UNLCK, Start: int64(markServed)})
}

// An OverlapError says that another daemon serves a directory that is inside of
// this one, or that this one is inside of (M1).
type OverlapError struct {
	Dir        string
	Within     bool   // Dir is inside of the other
	Other      string // that one's static directory; "": not known
	Pid        int    // of that one's daemon; 0: not seen
	Mountpoint string // of that one; "": not in this mount namespace
}

func (e *OverlapError) Error() string {
	other := e.Other
	if other == "" {
		other = "another directory"
	}
	by := "which another stagefs serves"
	if e.Pid != 0 {
		by += fmt.Sprintf(" (pid %d)", e.Pid)
	}
	if e.Mountpoint != "" {
		by += ", mounted at " + e.Mountpoint
	}
	if e.Within {
		return fmt.Sprintf("%s is inside of %s, %s", e.Dir, other, by)
	}
	return fmt.Sprintf("inside of %s is %s, %s", e.Dir, other, by)
}

// overlap returns who serves a directory that is inside of this one, or that it is
// inside of; nil if nobody does.
func (s *standing) overlap() (*OverlapError, error) {
	locks, err := readKernelLocks()
	if err != nil {
		return nil, err
	}
	found := func(file string, within bool, other string) *OverlapError {
		e := &OverlapError{Dir: s.path, Within: within, Other: other, Pid: locks.holders[file]}
		e.locate()
		return e
	}
	for name, path := range s.in {
		for _, file := range locks.marks[served(name)] {
			if s.counts(locks, served(name), file, func(d *marked) bool { return d.is(name) }) {
				return found(file, true, path), nil
			}
		}
	}
	for _, name := range s.own {
		for _, file := range locks.marks[around(name)] {
			if s.counts(locks, around(name), file, func(d *marked) bool { return d.isIn(s) }) {
				return found(file, false, ""), nil
			}
		}
	}
	return nil, nil
}

// locate looks for the mount of the other directory.
func (e *OverlapError) locate() {
	mounts, err := ReadMounts()
	if err != nil {
		return
	}
	inside := func(path, dir string) bool {
		if path == dir {
			return false
		}
		on, at := mountBeneath(mounts, path)
		of, around := mountBeneath(mounts, dir)
		return within(path, dir) || on.Dev == of.Dev && at != around && within(at, around)
	}
	for _, m := range mounts {
		if m.IsStagefs() && (e.Within && inside(e.Dir, m.Source) || !e.Within && inside(m.Source, e.Dir)) {
			e.Other, e.Mountpoint = m.Source, m.Path
		}
	}
}

// kernelLocks are what proc_locks(5) shows of daemons. Files are named as there.
type kernelLocks struct {
	marks   map[mark][]string // the files that it is on
	holders map[string]int    // who has it to itself by flock(2)
}

func newKernelLocks() *kernelLocks {
	return &kernelLocks{make(map[mark][]string), make(map[string]int)}
}

func readKernelLocks() (*kernelLocks, error) {
	l := newKernelLocks()
	// It comes in parts of a page. What is between two of them can be missed when
	// other locks end meanwhile.
	for range 3 {
		b, err := os.ReadFile("/proc/locks")
		if err != nil {
			return nil, err
		}
		l.read(string(b))
		if len(b) < os.Getpagesize()/2 {
			break
		}
	}
	return l, nil
}

func (l *kernelLocks) read(text string) {
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) < 8 {
			continue
		}
		switch f[1] {
		case "FLOCK":
			if pid, err := strconv.Atoi(f[4]); err == nil && f[3] == "WRITE" {
				l.holders[f[5]] = pid
			}
		case "OFDLCK":
			if at, err := strconv.ParseInt(f[6], 10, 64); err == nil && mark(at) >= markServed && !slices.Contains(l.marks[mark(at)], f[5]) {
				l.marks[mark(at)] = append(l.marks[mark(at)], f[5])
			}
		}
	}
}

// claimAlone makes sure that no other daemon serves a directory inside of this one
// or around it, nor will while this one lives. The caller has claimed the directory
// itself.
//
// As there, a daemon that is ending is waited for. One that is about to start
// too may give way, or this one does: never do both go on. doubts are why what others
// say is not believed.
func claimAlone(root int, dir string) (doubts []string, err error) {
	path, err := AbsoluteOf(dir)
	if err != nil {
		return nil, err
	}
	s, err := standingOf(root, path)
	if err != nil {
		return nil, err
	}
	for end := time.Now().Add(endTime); ; {
		other, err := s.overlap()
		if err == nil && other == nil {
			if err = s.publish(root); err == nil {
				other, err = s.overlap()
			}
			if err == nil && other == nil {
				return s.doubts, nil
			}
			takeBack(root)
		}
		switch {
		case err != nil:
			return s.doubts, err
		case other.Mountpoint != "", time.Now().After(end):
			return s.doubts, other
		}
		time.Sleep(5*time.Millisecond + rand.N(10*time.Millisecond))
	}
}

// claimAgain says once more where a directory is that is served over itself, by
// a mount: the program before may not have known that it is to be said.
func claimAgain(root, mountID int) {
	mounts, err := ReadMounts()
	if err != nil {
		return
	}
	if m := mountByID(mounts, mountID); m != nil {
		if s, err := standingOf(root, m.Path); err == nil {
			_ = s.publish(root)
		}
	}
}

// Overlapping returns who serves a directory that is inside of dir, or that dir is
// inside of, as an [*OverlapError]; nil if nobody does, or it cannot be told.
func Overlapping(dir string) *OverlapError {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	defer unix.Close(fd)
	path, err := AbsoluteOf(dir)
	if err != nil {
		return nil
	}
	s, err := standingOf(fd, path)
	if err != nil {
		return nil
	}
	other, err := s.overlap()
	if err != nil {
		return nil
	}
	return other
}
