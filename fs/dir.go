package fs

import (
	"encoding/binary"
	"strings"
	"sync"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// The kernel opens and closes directories without asking, keeps the listings
// it has read, and drops a listing when a name in the directory changes
// through the mount, or when the daemon says that one did (notifyDir). A
// listing is the same for everybody: private files are in none.

// FsyncDir is fsync(2) on a directory.
func (fs *FS) FsyncDir(cancel <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	if fs.control.node(in.NodeId) != nil {
		return fuse.OK
	}
	n := fs.nodes.get(in.NodeId)
	if n == nil {
		return fuse.Status(unix.ESTALE)
	}
	return statusOf(fs.withDir(in.Fh, n, func(fd int) error {
		return syncFD(fd, in.FsyncFlags)
	}))
}

// syncFD is fsync(2), or fdatasync(2) if the kernel's flags of a request say so.
func syncFD(fd int, flags uint32) error {
	return ignoringEINTR(func() error {
		if flags&1 != 0 { // FUSE_FSYNC_FDATASYNC
			return unix.Fdatasync(fd)
		}
		return unix.Fsync(fd)
	})
}

// openDirNode opens a directory for reading.
func (fs *FS) openDirNode(n *node) (int, error) {
	fs.ns.RLock()
	defer fs.ns.RUnlock()
	d, err := fs.back.dir(n)
	if err != nil {
		return -1, err
	}
	defer d.release()
	fd, err := openAt(d.fd, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err == unix.EACCES {
		// To look up "." takes a right to search it, which a listing does not.
		fd, err = fs.back.open(place{fd: d.fd}, unix.O_RDONLY|unix.O_DIRECTORY)
	}
	return fd, err
}

// A dirEntry is one linux_dirent64.
type dirEntry struct {
	ino  uint64
	next uint64 // position of the entry after it
	typ  uint8
	name string
}

// direntSize is how many bytes there are before the name.
const direntSize = 19

// nextEntry cuts an entry off what getdents64(2) returned. Its name is valid as
// long as b is not written to.
func nextEntry(b []byte) (e dirEntry, rest []byte) {
	size := int(binary.NativeEndian.Uint16(b[16:]))
	name := unsafe.String(&b[direntSize], size-direntSize)
	if i := strings.IndexByte(name, 0); i >= 0 {
		name = name[:i]
	}
	return dirEntry{
		ino: binary.NativeEndian.Uint64(b), next: binary.NativeEndian.Uint64(b[8:]),
		typ: b[18], name: name,
	}, b[size:]
}

// typeIn returns the type of an entry of the directory that is open as dir, also where the
// file system has none there: ext4 without filetype, XFS without ftype.
func (e *dirEntry) typeIn(dir int) uint8 {
	var st unix.Statx_t
	if e.typ == unix.DT_UNKNOWN && statAt(dir, e.name, &st) == nil {
		return uint8(st.Mode >> 12)
	}
	return e.typ
}

// isDot reports whether the entry is "." or "..".
func (e *dirEntry) isDot() bool { return e.name == "." || e.name == ".." }

// eachEntry calls f with the entries of an open directory, but for "." and
// "..", until it returns false.
func eachEntry(fd int, f func(dirEntry) bool) error {
	room := direntBuffers.Get().(*[direntBuffer]byte)
	defer direntBuffers.Put(room)
	return eachEntryIn(room[:], fd, f)
}

// entryNames lists what is in an open directory.
func entryNames(fd int) (names []string, err error) {
	err = eachEntry(fd, func(e dirEntry) bool { names = append(names, e.name); return true })
	return names, err
}

// eachEntryIn is eachEntry that reads no more at a time than buf has room for.
func eachEntryIn(buf []byte, fd int, f func(dirEntry) bool) error {
	for {
		n, err := getdents(fd, buf)
		if err != nil || n == 0 {
			return err
		}
		for rest := buf[:n]; len(rest) > 0; {
			var e dirEntry
			e, rest = nextEntry(rest)
			e.name = strings.Clone(e.name)
			if !e.isDot() && !f(e) {
				return nil
			}
		}
	}
}

func getdents(fd int, buf []byte) (n int, err error) {
	err = ignoringEINTR(func() (err error) {
		n, err = unix.Getdents(fd, buf)
		return err
	})
	return n, err
}

// direntBuffer is how many bytes of entries are read at a time.
const direntBuffer = 32 << 10

var direntBuffers = sync.Pool{New: func() any { return new([direntBuffer]byte) }}

// ReadDir is getdents(2).
func (fs *FS) ReadDir(cancel <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	return fs.readDir(in, in.Size, func(_ *node, _ int, e dirEntry) bool {
		return out.AddDirEntry(fuse.DirEntry{Name: e.name, Ino: e.ino, Mode: uint32(e.typ) << 12, Off: e.next})
	})
}

// ReadDirPlus is getdents(2) with attributes.
func (fs *FS) ReadDirPlus(cancel <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	n := fs.nodes.get(in.NodeId)
	w := fs.wanted(in.Pid, n, in.Offset)
	ahead := fs.listingAhead(n, in.Offset, !w.lean)
	// With attributes an entry takes some five times as much.
	status := fs.readDir(in, in.Size/5, func(parent *node, fd int, e dirEntry) bool {
		ahead.entry(e)
		entry := out.AddDirLookupEntry(fuse.DirEntry{Name: e.name, Ino: e.ino, Mode: uint32(e.typ) << 12, Off: e.next})
		if entry == nil {
			return false
		}
		if parent == nil || e.isDot() || fs.isLockName(parent, e.name) || fs.mayBeCandidate(e.name) || !w.want(e) {
			return true // no node: the kernel looks it up when it needs it
		}
		var st unix.Statx_t
		if n, err := fs.nodes.lookAt(fd, parent, strings.Clone(e.name), &st); err == nil {
			fs.fillEntry(&in.InHeader, entry, n, &st, false)
		}
		return true
	})
	ahead.end()
	return status
}

// readDir calls add with the entries from a position on until it returns
// false. It reads about size bytes of them at a time.
func (fs *FS) readDir(in *fuse.ReadIn, size uint32, add func(n *node, fd int, e dirEntry) bool) fuse.Status {
	if fs.control.node(in.NodeId) != nil {
		return fs.control.readDir(in, func(e dirEntry) bool { return add(nil, -1, e) })
	}
	n := fs.nodes.get(in.NodeId)
	if n == nil || !n.isDir() {
		return fuse.Status(unix.ESTALE)
	}
	var s *dirStream
	open := fs.openDirs.get(in.Fh, n)
	if open != nil {
		open.mu.Lock()
		defer open.mu.Unlock()
		s = &open.dirStream
		s.moved, s.pos = s.moved || s.pos != in.Offset, in.Offset
	} else {
		s = fs.streams.take(n, in.Offset)
	}
	if s == nil {
		fd, err := fs.openDirNode(n)
		if err != nil {
			return statusOf(err)
		}
		s = &dirStream{node: n, fd: fd, pos: in.Offset, moved: in.Offset != 0}
	}
	s.setNoatime(in.Flags)
	if listed := &n.more.Load().listed; in.Offset == 0 && listed.Load() == 0 {
		listed.CompareAndSwap(0, ctimeOf(s.fd))
	}
	pool := direntBuffers.Get().(*[direntBuffer]byte)
	defer direntBuffers.Put(pool)
	end, found := false, false
	inos := fs.nodes.inosOf(n.key().dev)
	err := fs.locked(false, func() (err error) {
		end, err = s.read(pool[:min(max(size, 4<<10), direntBuffer)], func(e dirEntry) bool {
			if fs.reserved(n, e.name) {
				return true
			}
			found = true
			e.ino ^= inos
			return add(n, s.fd, e)
		})
		return err
	})
	if err == nil && end && !found {
		fs.listingEnds(n, s.fd)
	}
	switch {
	case open != nil:
	case err != nil || end:
		unix.Close(s.fd)
	default:
		fs.streams.put(s)
	}
	return statusOf(err)
}

// listingEnds is called before the kernel is told that there are no more entries in n,
// which fd is open on. From then on it takes what it has kept of the directory for the
// whole listing, and serves also those with it who have read a part by themselves. But
// it goes on with the part that another has read, however long before: if names have
// changed since that was begun, what it has is dropped. (Who begins to read it later
// finds out without that.)
func (fs *FS) listingEnds(n *node, fd int) {
	listed := &n.more.Load().listed
	if now := ctimeOf(fd); listed.Load() != now {
		fs.notifyDir(n)
		listed.Store(now)
	}
}

// ctimeOf returns when a file was changed last, in ns; 0 if that cannot be told.
func ctimeOf(fd int) int64 {
	var st unix.Statx_t
	if statAt(fd, "", &st) != nil {
		return 0
	}
	return st.Ctime.Sec*1e9 + int64(st.Ctime.Nsec)
}
