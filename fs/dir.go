package fs

import (
	"bytes"
	"encoding/binary"
	"sync"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// A dirStream reads a directory. Positions are the backing's own, so that
// telldir and seekdir work as there.
type dirStream struct {
	mu  sync.Mutex
	buf []byte
	at  []byte // what of buf is still to be read
	pos uint64 // the position of at
}

// OpenDir is opendir(3).
func (fs *FS) OpenDir(cancel <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	if fs.control.node(in.NodeId) != nil {
		return fuse.OK
	}
	n := fs.nodes.get(in.NodeId)
	if n == nil {
		return fuse.Status(unix.ESTALE)
	}
	fs.ns.RLock()
	defer fs.ns.RUnlock()
	d, err := fs.back.dir(n)
	if err != nil {
		return statusOf(err)
	}
	defer d.release()
	fd, err := openAt(d.fd, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return statusOf(err)
	}
	out.Fh = fs.handles.add(&handle{fd: fd, node: n, dir: &dirStream{}})
	return fuse.OK
}

// ReleaseDir is closedir(3).
func (fs *FS) ReleaseDir(in *fuse.ReleaseIn) {
	if h := fs.handles.remove(in.Fh); h != nil {
		unix.Close(h.fd)
	}
}

// FsyncDir is fsync(2) on a directory.
func (fs *FS) FsyncDir(cancel <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	return fs.Fsync(cancel, in)
}

// A dirEntry is one linux_dirent64.
type dirEntry struct {
	ino  uint64
	next uint64 // position of the entry after it
	typ  uint8
	name string
}

// peek returns the entry at the stream's position without moving on; none at
// the end.
func (s *dirStream) peek(fd int) (e dirEntry, size int, err error) {
	if len(s.at) == 0 {
		if s.buf == nil {
			s.buf = make([]byte, 32<<10)
		}
		n, err := unix.Getdents(fd, s.buf)
		if err != nil || n == 0 {
			return e, 0, err
		}
		s.at = s.buf[:n]
	}
	size = int(binary.NativeEndian.Uint16(s.at[16:]))
	name := s.at[19:size]
	if i := bytes.IndexByte(name, 0); i >= 0 {
		name = name[:i]
	}
	return dirEntry{
		ino: binary.NativeEndian.Uint64(s.at), next: binary.NativeEndian.Uint64(s.at[8:]),
		typ: s.at[18], name: string(name),
	}, size, nil
}

// seek moves the stream to a position that an entry named.
func (s *dirStream) seek(fd int, pos uint64) error {
	if pos == s.pos && (pos != 0 || len(s.at) > 0) {
		return nil
	}
	s.at = nil
	s.pos = pos
	_, err := unix.Seek(fd, int64(pos), unix.SEEK_SET)
	return err
}

// ReadDir is getdents(2).
func (fs *FS) ReadDir(cancel <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	return fs.readDir(in, func(n *node, e dirEntry) bool {
		return out.AddDirEntry(fuse.DirEntry{Name: e.name, Ino: e.ino, Mode: uint32(e.typ) << 12, Off: e.next})
	})
}

// ReadDirPlus is getdents(2) with attributes.
func (fs *FS) ReadDirPlus(cancel <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	return fs.readDir(in, func(parent *node, e dirEntry) bool {
		entry := out.AddDirLookupEntry(fuse.DirEntry{Name: e.name, Ino: e.ino, Mode: uint32(e.typ) << 12, Off: e.next})
		if entry == nil {
			return false
		}
		if parent == nil || e.name == "." || e.name == ".." || fs.isLockName(parent, e.name) || fs.isCandidateName(e.name) {
			return true // no node: the kernel looks it up when it needs it
		}
		h := fs.handles.get(in.Fh, in.NodeId)
		var st unix.Statx_t
		if n, err := fs.nodes.lookAt(h.fd, parent, e.name, &st); err == nil {
			fs.fillEntry(&in.InHeader, entry, n, &st, false)
		}
		return true
	})
}

func (fs *FS) readDir(in *fuse.ReadIn, add func(*node, dirEntry) bool) fuse.Status {
	if fs.control.node(in.NodeId) != nil {
		return fs.control.readDir(in, func(e dirEntry) bool { return add(nil, e) })
	}
	h := fs.handles.get(in.Fh, in.NodeId)
	if h == nil || h.dir == nil {
		return fuse.EBADF
	}
	fs.ns.RLock()
	defer fs.ns.RUnlock()
	s := h.dir
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.seek(h.fd, in.Offset); err != nil {
		return statusOf(err)
	}
	for {
		e, size, err := s.peek(h.fd)
		if err != nil {
			return statusOf(err)
		}
		if size == 0 {
			return fuse.OK
		}
		if !fs.reserved(h.node, e.name) && !add(h.node, e) {
			return fuse.OK
		}
		s.at = s.at[size:]
		s.pos = e.next
	}
}
