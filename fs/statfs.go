package fs

import (
	"errors"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// StatFs is statfs(2).
func (fs *FS) StatFs(cancel <-chan struct{}, h *fuse.InHeader, out *fuse.StatfsOut) fuse.Status {
	fs.awaitRemoved()
	fs.ns.RLock()
	defer fs.ns.RUnlock()
	var st unix.Statfs_t
	ask := func(fd int) error { return ignoringEINTR(func() error { return unix.Fstatfs(fd, &st) }) }
	err := error(unix.ESTALE)
	if n := fs.nodes.get(h.NodeId); n != nil {
		// A file system mounted in the backing answers for itself, also for the directory
		// that it is mounted on; and a directory with a quota for its project.
		if p, e := fs.back.place(n); e == nil {
			if err = p.withFD(ask); err != nil {
				err = ask(p.fd)
			}
			p.done()
		}
	}
	if err != nil {
		err = ask(fs.back.root)
	}
	if err != nil {
		return statusOf(err)
	}
	out.Blocks, out.Bfree, out.Bavail = st.Blocks, st.Bfree, st.Bavail
	out.Files, out.Ffree = st.Files, st.Ffree
	out.Bsize, out.Frsize, out.NameLen = uint32(st.Bsize), uint32(st.Frsize), uint32(st.Namelen)
	return fuse.OK
}

// awaitRemoved is [nodeTable.awaitRemoved].
func (fs *FS) awaitRemoved() bool {
	return fs.nodes.awaitRemoved(func() int32 {
		open := make(map[*node]struct{})
		for _, h := range fs.handles.all() {
			open[h.node] = struct{}{}
		}
		return fs.nodes.countAwaited(open)
	})
}

// awaitRoom waits for what removed files held where room is short: data that passes the
// daemon by cannot wait later.
func (fs *FS) awaitRoom() {
	var st unix.Statfs_t
	if fs.nodes.awaited.Load() == 0 && fs.nodes.closing.Load() == 0 || unix.Fstatfs(fs.back.root, &st) != nil {
		return
	}
	if st.Bavail < shortRoom(&st) {
		fs.awaitRemoved()
	}
}

// roomShort is what bytes are little to have left, if it is also little of all: a
// sixteenth.
const roomShort = 1 << 30

// shortRoom is roomShort in blocks.
func shortRoom(st *unix.Statfs_t) uint64 { return min(st.Blocks/16, roomShort/uint64(st.Bsize)) }

// hasRoomNow reports whether what failed for want of room may succeed now.
func (fs *FS) hasRoomNow(err error) bool {
	return (errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT)) && fs.awaitRemoved()
}
