package fs

import (
	"sync"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// Descriptors in an ordinary user's mount. Its daemon has no more rights than who
// calls: a descriptor outlives a change of the mode, but what was not opened when
// the caller did cannot be opened any more.

// toOpenAgain returns what an ordinary user makes a file with that is to be written
// through a handle with these flags: its mode may not allow to open it again.
func toOpenAgain(flags uint32) int {
	return unix.O_RDWR | unix.O_NONBLOCK | int(flags)&(unix.O_SYNC|unix.O_NOATIME)
}

// openAgain opens the file of a descriptor, or shares that if it may do all and the
// file's mode allows no more than that.
func (fs *FS) openAgain(fd, flags int) (int, error) {
	own, err := fs.back.open(place{fd: fd}, flags)
	if err != unix.EACCES || fs.privileged {
		return own, err
	}
	have, bad := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if bad != nil || have&unix.O_PATH != 0 || have&unix.O_ACCMODE != unix.O_RDWR {
		return -1, err
	}
	return dup(fd)
}

// openToReadLocked returns a descriptor by which h is read, if its file has none yet;
// -1 if there is none to be had. fd is that of begin.
func (fs *FS) openToReadLocked(n *node, f *file, h *handle, fd int) int {
	if h.flags&unix.O_ACCMODE != unix.O_RDONLY {
		drop(fd) // it may write
		return -1
	}
	if fd < 0 && f.fd < 0 && h.fd.get() < 0 {
		// Who serves others too may not read all that root may: such a read fails.
		fd, _ = fs.openNode(n, unix.O_RDONLY|unix.O_NONBLOCK)
	}
	return fd
}

// openDirs are the directories that are open, by the number of the handle.
type openDirs struct {
	mu sync.Mutex
	of map[uint64]*openDir
}

// An openDir has the one position of its descriptor.
type openDir struct {
	mu sync.Mutex
	dirStream
}

func (t *openDirs) add(id uint64, n *node, fd int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.of == nil {
		t.of = make(map[uint64]*openDir)
	}
	t.of[id] = &openDir{dirStream: dirStream{node: n, fd: fd}}
}

// get returns the directory with a number, or nil. Numbers that the daemon before
// gave are unknown.
func (t *openDirs) get(id uint64, n *node) *openDir {
	t.mu.Lock()
	defer t.mu.Unlock()
	if d := t.of[id]; d != nil && d.node == n {
		return d
	}
	return nil
}

func (t *openDirs) remove(id uint64, n *node) *openDir {
	d := t.get(id, n)
	t.mu.Lock()
	defer t.mu.Unlock()
	if d != nil {
		delete(t.of, id)
	}
	return d
}

// OpenDir tells the kernel not to ask, but in an ordinary user's mount.
func (fs *FS) OpenDir(cancel <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	if fs.privileged {
		return fuse.ENOSYS
	}
	out.OpenFlags = fuse.FOPEN_KEEP_CACHE | fuse.FOPEN_CACHE_DIR // as if it had not asked
	n := fs.nodes.get(in.NodeId)
	if n == nil || !n.isDir() || !fs.spare.keep() {
		return fuse.OK
	}
	fd, err := fs.openDirNode(n)
	if err != nil {
		fs.spare.give()
		return fuse.OK
	}
	out.Fh = fs.handles.number()
	fs.openDirs.add(out.Fh, n, fd)
	return fuse.OK
}

// ReleaseDir is the last close(2) of a directory.
func (fs *FS) ReleaseDir(in *fuse.ReleaseIn) {
	if d := fs.openDirs.remove(in.Fh, fs.nodes.get(in.NodeId)); d != nil {
		d.mu.Lock()
		defer d.mu.Unlock()
		unix.Close(d.fd)
		fs.spare.give()
	}
}

// withDir calls do with a descriptor of the directory n, which is open as fh.
func (fs *FS) withDir(fh uint64, n *node, do func(fd int) error) error {
	if d := fs.openDirs.get(fh, n); d != nil {
		return do(d.fd)
	}
	fd, err := fs.openDirNode(n)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return do(fd)
}
