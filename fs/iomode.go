package fs

import (
	"errors"
	"sync/atomic"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// The kernel has one way at a time to the data of an inode: its own page cache,
// which READ and WRITE fill and empty, or the backing file itself
// (passthrough). An open that wants the other way fails with EIO, and pages
// that were read before are not dropped by what passes them by. So the way is
// chosen by the first open and stands until the last RELEASE: the kernel ends
// its side of an open before it sends that, and begins it after the answer.

// An ioMode is how the data of an open file is reached.
type ioMode uint8

const (
	ioCached  ioMode = iota // through the kernel's page cache
	ioDirect                // each read and write is a request; no shared mapping
	ioPassing               // the kernel goes to the backing file itself
	// ioDirectPassing is ioDirect where handles of the file pass: a mapping does so, too.
	ioDirectPassing
)

func (m ioMode) passes() bool { return m >= ioPassing }

// passing is how h passes. A file that passes keeps the flags of its open, whatever
// fcntl(2) makes of them: dd(1) takes O_DIRECT off for the last block. So what is written
// under one that can be taken off is a request, which has the flags of the moment.
func (h *handle) passing() ioMode {
	if h.lock != nil && h.flags&(unix.O_APPEND|unix.O_DIRECT) != 0 {
		return ioDirectPassing
	}
	return ioPassing
}

// writesPast reports whether the file may be changed through h without a request. What
// was opened with O_RDONLY and O_TRUNC has changed it already.
func (h *handle) writesPast(m ioMode) bool {
	return h.lock != nil && h.flags&unix.O_ACCMODE != unix.O_RDONLY && (m == ioPassing || m == ioDirectPassing && h.mapsWritable())
}

// passFrom is the size in bytes from which a file that is only read passes. A
// smaller one is read once into the page cache; that takes fewer steps.
const passFrom = 128 << 10

// passthrough says whether files can pass.
type passthrough struct {
	on  atomic.Bool
	dev uint32 // the file system that was tried

	noatime, strictatime bool // reading changes no access times; all of them
}

// errMayMap: the handle would have to be revocable, and a mapping of a file
// that passes is not.
var errMayMap = errors.New("the file is open past the daemon, where a writable mapping could not be taken back")

// choose says how h reaches the file, whose attributes are st.
func (f *file) choose(fs *FS, h *handle, st *unix.Statx_t) (ioMode, error) {
	// That nothing is written but at the end of a file that may only grow is
	// the daemon's to see to: fcntl(2) takes O_APPEND off a file that passes.
	direct := h.opener != nil || h.lock.Revocable() || h.lock != nil && appendOnly(st)
	switch {
	case h.beside():
		return ioDirect, nil // to the kernel it is another inode
	case direct && f.passing > 0 && h.mapsWritable():
		return 0, errMayMap
	case direct && f.passing > 0:
		return ioDirectPassing, nil
	case direct:
		return ioDirect, nil
	case f.passing > 0:
		return h.passing(), nil
	case len(f.lingering) > 0 && (f.direct > 0 || !fs.pass.on.Load()):
		return ioDirect, nil // pages would not show what is mapped
	case len(f.lingering) > 0:
		return h.passing(), nil
	case f.cached > 0 || f.direct > 0 || !fs.pass.on.Load() || h.node.dev != fs.pass.dev:
		return ioCached, nil
	case h.lock != nil && h.flags&unix.O_DIRECT != 0:
		// With FOPEN_DIRECT_IO the kernel forgets how far a request of io_uring(7) came,
		// and has it begin anew: reads repeat at the end, writes go over one another.
		return ioCached, nil
	case h.candidate.Load() || h.lock == nil && (appendOnly(st) || st.Size < passFrom && h.flags&(unix.O_DIRECT|unix.O_NOATIME) == 0 || fs.revocable(h.node)):
		return ioCached, nil // O_DIRECT and O_NOATIME are the backing's to obey
	}
	return h.passing(), nil
}

// revocable reports whether a holder who may lose its lock at any time may come
// to open n (L3): then nobody has it open in the way of that.
func (fs *FS) revocable(n *node) bool {
	if fs.table.Len() == 0 {
		return false
	}
	dirs, _ := n.covering()
	for _, d := range dirs {
		if l, ok := fs.table.Governing(d); ok && l.Client != "" {
			return true
		}
	}
	return false
}

// begin opens the data of h, a handle of n. fd is a descriptor of the file that it
// takes over, or -1; it only reads, but for that of [toOpenAgain]. st are the file's
// attributes. The caller holds FS.ns.
func (fs *FS) begin(n *node, h *handle, fd int, st *unix.Statx_t, out *fuse.OpenOut) error {
	h.node = n
	err := fs.beginData(n, h, fd, st, out)
	if err == nil && h.flags&unix.O_TRUNC != 0 {
		if err = fs.truncateOpen(h); err != nil {
			fs.end(h)
		}
	}
	return err
}

func (fs *FS) beginData(n *node, h *handle, fd int, st *unix.Statx_t, out *fuse.OpenOut) error {
	f := n.lockFile()
	defer n.unlockFile(f)
	if h.flags&fmodeExec != 0 && fs.stillMappedLocked(n, f) {
		drop(fd)
		return unix.ETXTBSY
	}
	mode, err := f.choose(fs, h, st)
	if err == nil && mode.passes() && h.lock != nil && fd < 0 { // or it was made just now
		// The kernel calls whatever its own open of the backing says EIO.
		err = fs.writableLocked(n, f, &fd)
	}
	if err == nil && mode.passes() {
		if err = fs.passLocked(n, f, &fd, h.spender(st)); err != nil && f.passing+len(f.lingering) == 0 {
			mode, err = ioCached, nil
		}
	}
	if err == nil && (mode == ioDirect || mode == ioDirectPassing || mode == ioCached && h.lock != nil) {
		err = fs.openOwnLocked(n, f, h, fd, st)
	}
	if err != nil {
		fs.closeOwnLocked(f, h)
		fs.passedLocked(f)
		drop(fd)
		return err
	}
	if !fs.privileged {
		fd = fs.openToReadLocked(n, f, h, fd)
	}
	fs.keepLocked(f, fd)
	f.count(h, mode, 1)
	f.cutLocked(h, h.flags&unix.O_TRUNC != 0)
	h.heard = f.unwritten.times
	fs.heatLocked(n, f)
	h.mode = mode
	out.OpenFlags, out.BackingID = fs.openFlags(n, f, h, st)
	if fs.opts.NoLocking {
		// FLUSH drops a closer's record locks, which the kernel keeps then.
		out.OpenFlags |= fuse.FOPEN_NOFLUSH
	}
	return nil
}

// openFlags tells the kernel of h.mode.
func (fs *FS) openFlags(n *node, f *file, h *handle, st *unix.Statx_t) (uint32, int32) {
	switch h.mode {
	case ioPassing:
		if h.lock != nil {
			n.plain.setPassed(true)
		}
		return fuse.FOPEN_PASSTHROUGH, f.backing
	case ioDirectPassing:
		n.plain.setPassed(true)
		return fuse.FOPEN_PASSTHROUGH | fuse.FOPEN_DIRECT_IO, f.backing
	case ioDirect:
		n.plain.setPassed(true)
		return fuse.FOPEN_DIRECT_IO, 0
	}
	if h.fresh = !fs.pagesAreGoodLocked(n, f, h, st); h.fresh {
		return 0, 0
	}
	return fuse.FOPEN_KEEP_CACHE, 0
}

// pagesAreGoodLocked reports whether h, a handle of n that was counted, may use the pages
// that the kernel has. They stay valid, since the backing changes only through this mount;
// but what passed them by must be seen, and a read that changes the access time get there.
//
// The kernel drops them late in open(2), and also such a one as somebody else is writing:
// it puts the new content into the page, and sends it without holding that. Who reads
// the page anew in between brings back the old content, which stays. So what is to be
// dropped is before anybody reads or writes through them; then that waits for nobody.
func (fs *FS) pagesAreGoodLocked(n *node, f *file, h *handle, st *unix.Statx_t) bool {
	passed, alone := n.plain.passed(), f.cached+f.direct == 1
	if !alone {
		return !passed
	}
	if n.plain.paged() && (passed || h.lock == nil && fs.readChangesAtime(st)) {
		// It drops the attributes, too, so the next open would ask for them each time.
		if fs.kernel.InodeNotify(n.id, 0, 0) != fuse.OK {
			return false
		}
		n.plain.setPaged(false)
	}
	n.plain.setPassed(false)
	return true
}

// writableLocked returns EROFS if the file is on a mount that is read-only, which may be one
// within the backing. *fd is a descriptor of it, or -1.
func (fs *FS) writableLocked(n *node, f *file, fd *int) (err error) {
	use := f.fd
	if use < 0 {
		if *fd, err = fs.openNode(n, unix.O_RDONLY|unix.O_NONBLOCK); err != nil {
			return nil // there may be another way
		}
		use = *fd
	}
	return writable(use)
}

// passLocked registers the file with the kernel, in the name of a user. *fd is a
// descriptor of it, or -1.
func (fs *FS) passLocked(n *node, f *file, fd *int, uid uint32) (err error) {
	if f.backing != 0 {
		return nil
	}
	use := f.fd
	if use < 0 {
		if *fd < 0 {
			if *fd, err = fs.openNode(n, unix.O_RDONLY|unix.O_NONBLOCK); err != nil {
				return err
			}
		}
		use = *fd
	}
	err = fs.asUser(uid, 0, func() error {
		id, errno := fs.kernel.RegisterBackingFd(&fuse.BackingMap{Fd: int32(use)})
		if errno != 0 {
			return errno
		}
		f.backing = id
		return nil
	})
	switch err {
	case nil, unix.ENOMEM, unix.ENOSPC, unix.EINTR:
		return err
	}
	if fs.pass.on.Swap(false) {
		fs.log.Warn("no passthrough any more", "err", err)
	}
	return err
}

// passedLocked takes the file back from the kernel when no handle passes.
func (fs *FS) passedLocked(f *file) {
	if f.passing == 0 && f.backing != 0 {
		fs.kernel.UnregisterBackingFd(f.backing)
		f.backing = 0
	}
}

// ownHandles is how many handles of a lock file have a descriptor of their own.
// Thousands may wait with it open, and hardly any of them reads or writes.
const ownHandles = 64

// openOwnLocked gives h a descriptor of its own. fd is one of the file, or -1.
// Where many have a lock file open, it only sees whether the backing lets h.
func (fs *FS) openOwnLocked(n *node, f *file, h *handle, fd int, st *unix.Statx_t) (err error) {
	shares := h.opener != nil && f.direct+f.passing >= ownHandles && h.flags&(unix.O_SYNC|unix.O_NOATIME) == 0 && !appendOnly(st)
	if !shares && !fs.spare.take() {
		return unix.ENFILE
	}
	flags := backingFlags(h.flags) &^ unix.O_TRUNC
	if appendOnly(st) {
		flags |= int(h.flags & unix.O_APPEND)
	}
	var own int
	if fd >= 0 {
		own, err = fs.openAgain(fd, flags)
	} else {
		own, err = fs.openNode(n, flags)
	}
	switch {
	case shares:
		drop(own)
		return err
	case err != nil:
		fs.spare.give()
		return err
	}
	h.fd.set(own)
	if h.flags&unix.O_ACCMODE != unix.O_RDONLY {
		f.writing++
	}
	return nil
}

func (fs *FS) closeOwnLocked(f *file, h *handle) {
	fd := h.fd.get()
	if fd < 0 {
		return
	}
	h.fd.set(-1)
	own := lateFD{fd, h.flags&unix.O_ACCMODE != unix.O_RDONLY}
	if f.comesLateLocked(h) && fs.mayWaitLocked(f) {
		f.late = append(f.late, own)
		return
	}
	fs.closeLocked(f, own)
	fs.closeLateLocked(f)
}

// keepLocked makes fd what the file is read by, if there is room for it.
func (fs *FS) keepLocked(f *file, fd int) {
	if fd < 0 {
		return
	}
	if f.fd >= 0 || !fs.spare.keep() {
		unix.Close(fd)
		return
	}
	f.fd = fd
}

// end closes the data of h.
func (fs *FS) end(h *handle) {
	n := h.node
	f := n.lockFile()
	defer n.unlockFile(f)
	fs.closeOwnLocked(f, h)
	f.count(h, h.mode, -1)
	if f.handles() == 0 || f.replacesLocked(h) {
		fs.closeLateLocked(f)
	}
	f.noticedLocked(h)
	if h.id != 0 && h.writesPast(h.mode) && h.mapsWritable() { // else nobody has had it to map
		f.lingering = append(f.lingering, h)
	} else {
		fs.handles.over(h)
	}
	fs.checkLocked(f, f.fd)
	fs.passedLocked(f)
	if f.handles() == 0 && f.fd >= 0 {
		unix.Close(f.fd)
		f.fd = -1
		fs.spare.give()
	}
	fs.keepLookingLocked(n, f)
}

// drop closes those that are open.
func drop(fds ...int) {
	for _, fd := range fds {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// fmodeExec is the open flag by which the kernel tells that a file is opened to
// be executed (FMODE_EXEC in linux/fs.h).
const fmodeExec = 0x20

// readChangesAtime reports whether the next read of a file changes its access
// time: under relatime, as mount(8) says.
func (fs *FS) readChangesAtime(st *unix.Statx_t) bool {
	if fs.pass.noatime || fs.pass.strictatime {
		return fs.pass.strictatime
	}
	return !later(st.Atime, st.Mtime) || !later(st.Atime, st.Ctime) ||
		time.Since(time.Unix(st.Atime.Sec, 0)) >= 24*time.Hour
}

func later(a, b unix.StatxTimestamp) bool {
	return a.Sec > b.Sec || a.Sec == b.Sec && a.Nsec > b.Nsec
}
