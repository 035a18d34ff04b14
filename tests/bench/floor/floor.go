//go:build linux

package main

import (
	"errors"
	"strconv"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs/transport"
)

// valid is how long the kernel may keep names and attributes.
const valid = 24 * time.Hour

// A floor is the file system. Its nodes' numbers are the inodes'.
type floor struct {
	fuse.RawFileSystem
	kernel transport.Kernel
	shards [64]shard
}

type shard struct {
	mu    sync.RWMutex
	nodes map[uint64]*node
}

type node struct {
	fd      int
	ino     uint64
	lookups uint64

	mu      sync.Mutex
	opens   int
	backing int32 // 0: none
}

func newFloor(root int) *floor {
	f := &floor{RawFileSystem: fuse.NewDefaultRawFileSystem()}
	for i := range f.shards {
		f.shards[i].nodes = map[uint64]*node{}
	}
	f.shard(fuse.FUSE_ROOT_ID).nodes[fuse.FUSE_ROOT_ID] = &node{fd: root, ino: fuse.FUSE_ROOT_ID, lookups: 1}
	return f
}

func (f *floor) shard(ino uint64) *shard { return &f.shards[ino%uint64(len(f.shards))] }

func (f *floor) node(ino uint64) *node {
	s := f.shard(ino)
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.nodes[ino]
}

func status(err error) fuse.Status {
	var errno unix.Errno
	if errors.As(err, &errno) {
		return fuse.Status(errno)
	}
	return fuse.OK
}

// path leads to a file that is only known by an O_PATH descriptor.
func (n *node) path() string { return "/proc/self/fd/" + strconv.Itoa(n.fd) }

func fill(a *fuse.Attr, st *unix.Stat_t) {
	a.Ino, a.Size, a.Blocks, a.Blksize = st.Ino, uint64(st.Size), uint64(st.Blocks), uint32(st.Blksize)
	a.Atime, a.Atimensec = uint64(st.Atim.Sec), uint32(st.Atim.Nsec)
	a.Mtime, a.Mtimensec = uint64(st.Mtim.Sec), uint32(st.Mtim.Nsec)
	a.Ctime, a.Ctimensec = uint64(st.Ctim.Sec), uint32(st.Ctim.Nsec)
	a.Mode, a.Nlink, a.Uid, a.Gid, a.Rdev = st.Mode, uint32(st.Nlink), st.Uid, st.Gid, uint32(st.Rdev)
}

func (f *floor) lookup(parent uint64, name string, out *fuse.EntryOut) (*node, fuse.Status) {
	fd, err := unix.Openat(f.node(parent).fd, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, status(err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		unix.Close(fd)
		return nil, status(err)
	}
	s := f.shard(st.Ino)
	s.mu.Lock()
	n := s.nodes[st.Ino]
	if n == nil {
		n = &node{fd: fd, ino: st.Ino}
		s.nodes[st.Ino] = n
		fd = -1
	}
	n.lookups++
	s.mu.Unlock()
	if fd >= 0 {
		unix.Close(fd)
	}
	out.NodeId = n.ino
	out.SetEntryTimeout(valid)
	out.SetAttrTimeout(valid)
	fill(&out.Attr, &st)
	return n, fuse.OK
}

func (f *floor) Lookup(_ <-chan struct{}, in *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	_, code := f.lookup(in.NodeId, name, out)
	if code == fuse.ENOENT {
		out.SetEntryTimeout(valid) // it is known to be missing
		return fuse.OK
	}
	return code
}

func (f *floor) Forget(ino, count uint64) {
	s := f.shard(ino)
	s.mu.Lock()
	n := s.nodes[ino]
	n.lookups -= count
	gone := n.lookups == 0
	if gone {
		delete(s.nodes, ino)
	}
	s.mu.Unlock()
	if gone {
		unix.Close(n.fd)
	}
}

func (f *floor) getattr(n *node, out *fuse.AttrOut) fuse.Status {
	var st unix.Stat_t
	if err := unix.Fstat(n.fd, &st); err != nil {
		return status(err)
	}
	out.SetTimeout(valid)
	fill(&out.Attr, &st)
	return fuse.OK
}

func (f *floor) GetAttr(_ <-chan struct{}, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	return f.getattr(f.node(in.NodeId), out)
}

func (f *floor) SetAttr(_ <-chan struct{}, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	n := f.node(in.NodeId)
	if mode, ok := in.GetMode(); ok {
		if err := unix.Chmod(n.path(), mode); err != nil {
			return status(err)
		}
	}
	if size, ok := in.GetSize(); ok {
		if err := unix.Truncate(n.path(), int64(size)); err != nil {
			return status(err)
		}
	}
	uid, owner := in.GetUID()
	gid, group := in.GetGID()
	if owner || group {
		if err := unix.Fchownat(n.fd, "", id(uid, owner), id(gid, group), unix.AT_EMPTY_PATH); err != nil {
			return status(err)
		}
	}
	atime, accessed := in.GetATime()
	mtime, modified := in.GetMTime()
	if accessed || modified {
		times := []unix.Timespec{stamp(atime, accessed), stamp(mtime, modified)}
		if err := unix.UtimesNanoAt(unix.AT_FDCWD, n.path(), times, 0); err != nil {
			return status(err)
		}
	}
	return f.getattr(n, out)
}

func id(n uint32, set bool) int {
	if !set {
		return -1
	}
	return int(n)
}

func stamp(t time.Time, set bool) unix.Timespec {
	if !set {
		return unix.Timespec{Nsec: unix.UTIME_OMIT}
	}
	return unix.NsecToTimespec(t.UnixNano())
}

func (f *floor) Mkdir(_ <-chan struct{}, in *fuse.MkdirIn, name string, out *fuse.EntryOut) fuse.Status {
	if err := unix.Mkdirat(f.node(in.NodeId).fd, name, in.Mode); err != nil {
		return status(err)
	}
	_, code := f.lookup(in.NodeId, name, out)
	return code
}

func (f *floor) Unlink(_ <-chan struct{}, in *fuse.InHeader, name string) fuse.Status {
	return status(unix.Unlinkat(f.node(in.NodeId).fd, name, 0))
}

func (f *floor) Rmdir(_ <-chan struct{}, in *fuse.InHeader, name string) fuse.Status {
	return status(unix.Unlinkat(f.node(in.NodeId).fd, name, unix.AT_REMOVEDIR))
}

func (f *floor) Rename(_ <-chan struct{}, in *fuse.RenameIn, from, to string) fuse.Status {
	return status(unix.Renameat(f.node(in.NodeId).fd, from, f.node(in.Newdir).fd, to))
}

func (f *floor) Create(_ <-chan struct{}, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	fd, err := unix.Openat(f.node(in.NodeId).fd, name, int(in.Flags)|unix.O_CREAT|unix.O_CLOEXEC, in.Mode)
	if err != nil {
		return status(err)
	}
	n, code := f.lookup(in.NodeId, name, &out.EntryOut)
	if code != fuse.OK {
		unix.Close(fd)
		return code
	}
	f.opened(n, fd, &out.OpenOut)
	return fuse.OK
}

func (f *floor) Open(_ <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	n := f.node(in.NodeId)
	fd, err := unix.Open(n.path(), int(in.Flags)&^unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return status(err)
	}
	f.opened(n, fd, out)
	return fuse.OK
}

// opened has the kernel read and write the file by itself, if it can.
func (f *floor) opened(n *node, fd int, out *fuse.OpenOut) {
	out.Fh = uint64(fd)
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.opens++; n.backing == 0 {
		n.backing, _ = f.kernel.RegisterBackingFd(&fuse.BackingMap{Fd: int32(fd)})
	}
	if n.backing > 0 {
		out.BackingID, out.OpenFlags = n.backing, fuse.FOPEN_PASSTHROUGH
	}
}

func (f *floor) Flush(_ <-chan struct{}, in *fuse.FlushIn) fuse.Status {
	fd, err := unix.FcntlInt(uintptr(in.Fh), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return status(err)
	}
	return status(unix.Close(fd))
}

func (f *floor) Release(_ <-chan struct{}, in *fuse.ReleaseIn) {
	n := f.node(in.NodeId)
	n.mu.Lock()
	if n.opens--; n.opens == 0 && n.backing > 0 {
		f.kernel.UnregisterBackingFd(n.backing)
		n.backing = 0
	}
	n.mu.Unlock()
	unix.Close(int(in.Fh))
}

func (f *floor) Read(_ <-chan struct{}, in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	got, err := unix.Pread(int(in.Fh), buf, int64(in.Offset))
	return fuse.ReadResultData(buf[:max(got, 0)]), status(err)
}

func (f *floor) Write(_ <-chan struct{}, in *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	put, err := unix.Pwrite(int(in.Fh), data, int64(in.Offset))
	return uint32(max(put, 0)), status(err)
}

func (f *floor) Fsync(_ <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	return status(unix.Fsync(int(in.Fh)))
}

func (f *floor) StatFs(_ <-chan struct{}, in *fuse.InHeader, out *fuse.StatfsOut) fuse.Status {
	var st syscall.Statfs_t
	if err := syscall.Fstatfs(f.node(in.NodeId).fd, &st); err != nil {
		return status(err)
	}
	out.FromStatfsT(&st)
	return fuse.OK
}

func (f *floor) OpenDir(_ <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	fd, err := unix.Openat(f.node(in.NodeId).fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	out.Fh = uint64(fd)
	return status(err)
}

// ReadDir lists names only, from the offset that the kernel asks for.
func (f *floor) ReadDir(_ <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	fd := int(in.Fh)
	if _, err := unix.Seek(fd, int64(in.Offset), unix.SEEK_SET); err != nil {
		return status(err)
	}
	buf := make([]byte, in.Size)
	n, err := unix.Getdents(fd, buf)
	if err != nil {
		return status(err)
	}
	for buf = buf[:n]; len(buf) > 0; {
		d := (*unix.Dirent)(unsafe.Pointer(&buf[0]))
		e := fuse.DirEntry{Name: unix.ByteSliceToString(buf[unsafe.Offsetof(d.Name):d.Reclen]), Ino: d.Ino, Mode: uint32(d.Type) << 12, Off: uint64(d.Off)}
		if !out.AddDirEntry(e) {
			break
		}
		buf = buf[d.Reclen:]
	}
	return fuse.OK
}

func (f *floor) ReleaseDir(in *fuse.ReleaseIn) { unix.Close(int(in.Fh)) }
