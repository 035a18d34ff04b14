package fs

import (
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// A handle is an open file or directory of the backing.
type handle struct {
	id   uint64
	fd   int
	node *node
	lock *lockstate.Handle // for one that may write

	// flushed is set once a descriptor of it was closed: a RELEASE may be
	// on its way.
	flushed atomic.Bool
	// candidate is set for a file that a link(2) protocol will link (A9).
	candidate atomic.Bool

	// opener is who opened a lock file. Such a handle may be opened by
	// anyone, in any mode, to be locked (A10); what is written through it
	// passes the gate each time.
	opener *procid.Process

	cand *candidate // for a private file, or one that was when it was opened
	dir  *dirStream // for a directory
}

// handleTable holds the open handles.
type handleTable struct {
	mu     sync.RWMutex
	byID   map[uint64]*handle
	locked map[*lockstate.Handle]*handle
	next   uint64
}

func (t *handleTable) init() {
	t.byID = make(map[uint64]*handle)
	t.locked = make(map[*lockstate.Handle]*handle)
	t.next = firstHandle
}

// firstHandle keeps 0 free, which go-fuse and the kernel use for none.
const firstHandle = 1 << 10

// get returns the handle with a number, if it is one of the given node: a
// number that the kernel has from elsewhere, as from a control file, finds
// nothing.
func (t *handleTable) get(id, node uint64) *handle {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if h := t.byID[id]; h != nil && h.node.id == node {
		return h
	}
	return nil
}

func (t *handleTable) byLock(l *lockstate.Handle) *handle {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.locked[l]
}

func (t *handleTable) add(h *handle) uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	h.id = t.next
	t.next++
	t.byID[h.id] = h
	if h.lock != nil {
		t.locked[h.lock] = h
	}
	return h.id
}

func (t *handleTable) remove(id uint64) *handle {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := t.byID[id]
	delete(t.byID, id)
	if h != nil && h.lock != nil {
		delete(t.locked, h.lock)
	}
	return h
}

// writes reports whether open flags let a file be changed.
func writes(flags uint32) bool {
	return flags&unix.O_ACCMODE != unix.O_RDONLY || flags&unix.O_TRUNC != 0
}

// backingFlags returns the flags that the backing file is opened with. The
// kernel has computed offsets (O_APPEND) and aligned nothing (O_DIRECT); and
// the daemon never waits in an open.
func backingFlags(flags uint32) int {
	return int(flags)&^(unix.O_CREAT|unix.O_EXCL|unix.O_APPEND|unix.O_DIRECT|unix.O_NOCTTY|unix.O_NOFOLLOW) | unix.O_NONBLOCK
}

// openForWrite admits a write handle. The caller closes it if the backing
// refuses.
func (r *request) openForWrite(c lockstate.Change, name string) (*lockstate.Handle, error) {
	c.Process, c.Force = r.process(), r.forced
	return r.fs.table.OpenHandle(c, name)
}

// Create is open(2) of a file that is not there.
func (fs *FS) Create(cancel <-chan struct{}, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	r := &request{fs: fs, cancel: cancel, header: &in.InHeader, op: "create", name: name}
	if r.parent = fs.nodes.get(in.NodeId); r.parent == nil {
		return frozen
	}
	if fs.reserved(r.parent, name) {
		return fuse.Status(unix.EEXIST)
	}
	if done, status := fs.createCandidate(r, in, out); done {
		return status
	}
	m := &making{r: r, parent: r.parent, name: name, protocol: "create"}
	if in.Flags&unix.O_EXCL == 0 {
		m.protocol = "open"                     // A6
		r.quiet = fs.isLockName(r.parent, name) // a waiter is not refused (A10)
	}
	h := &handle{fd: -1}
	exists := false
	status := fs.attempt(r, false, func() error {
		err := fs.create(m, in, h)
		exists = err == unix.EEXIST && in.Flags&unix.O_EXCL == 0
		if err == nil {
			fs.opened(m.node, h, &out.OpenOut)
		}
		return err
	})
	if status == fuse.Status(unix.EEXIST) && !exists && m.protocol == "open" && r.errno == status {
		return fs.createPrivateLockFile(r, in, out)
	}
	if exists {
		// It is in the backing and the kernel did not know: an open.
		return fs.createExisting(r, in, out)
	}
	if status == fuse.OK {
		uncached := fs.isLockName(r.parent, name) || fs.isCandidateName(name)
		fs.fillEntry(&in.InHeader, &out.EntryOut, m.node, &m.st, uncached)
	}
	return status
}

func (fs *FS) create(m *making, in *fuse.CreateIn, h *handle) error {
	r := m.r
	lockFile := fs.isLockName(r.parent, r.name)
	candidate := !lockFile && fs.isCandidateName(r.name)
	m.quiet = candidate
	m.before = func() (err error) {
		switch {
		case lockFile:
			h.opener = r.process()
		case writes(in.Flags):
			h.lock, err = r.openForWrite(lockstate.Change{
				Dirs: m.covered(fs), Quiet: candidate,
			}, r.name)
		}
		return err
	}
	m.do = func(dir int) error {
		return fs.asCaller(r.header, func() (err error) {
			flags := backingFlags(in.Flags)&^unix.O_TRUNC | unix.O_CREAT | unix.O_EXCL
			h.fd, err = openAt(dir, r.name, flags, fs.modeOf(m.parent, dir, in.Mode, in.Umask))
			return err
		})
	}
	if err := fs.make(m); err != nil {
		h.drop()
		return err
	}
	if candidate {
		fs.noteCandidate(r, h, identityOf(&m.st))
	}
	return nil
}

// drop closes a handle that the kernel was not told of.
func (h *handle) drop() {
	if h.fd >= 0 {
		unix.Close(h.fd)
	}
	h.lock.Close()
	h.fd, h.lock = -1, nil
}

// createExisting opens a file that Create met in the backing.
func (fs *FS) createExisting(r *request, in *fuse.CreateIn, out *fuse.CreateOut) fuse.Status {
	status := fs.Lookup(r.cancel, r.header, r.name, &out.EntryOut)
	if status != fuse.OK {
		return status
	}
	if out.EntryOut.NodeId == 0 {
		return fuse.ENOENT
	}
	open := &fuse.OpenIn{InHeader: *r.header, Flags: in.Flags}
	open.NodeId = out.EntryOut.NodeId
	if status = fs.Open(r.cancel, open, &out.OpenOut); status != fuse.OK {
		fs.nodes.forget(open.NodeId, 1)
	}
	return status
}

// opened hands a handle to the kernel.
func (fs *FS) opened(n *node, h *handle, out *fuse.OpenOut) {
	h.node = n
	if h.lock != nil {
		n.addWriter(h.lock)
		n.followHandles() // it may have been renamed since the gate
	}
	out.Fh = fs.handles.add(h)
	// Pages stay valid: the backing changes only through this mount.
	out.OpenFlags = fuse.FOPEN_KEEP_CACHE
	if h.opener != nil {
		// Each write comes with the process that makes it.
		out.OpenFlags = fuse.FOPEN_DIRECT_IO
	}
}

// Open is open(2) of a file that is there.
func (fs *FS) Open(cancel <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	if c := fs.control.node(in.NodeId); c != nil {
		return c.openFile(in, out)
	}
	n := fs.nodes.get(in.NodeId)
	if n == nil {
		return fuse.Status(unix.ESTALE)
	}
	if n.candidate().private() {
		return n.candidate().open(fs, in, out)
	}
	r := &request{fs: fs, cancel: cancel, header: &in.InHeader, op: "open", node: n}
	h := &handle{fd: -1}
	return fs.attempt(r, false, func() error {
		flags := in.Flags
		if _, lockFile := fs.lockFileOf(n); lockFile {
			h.opener = r.process()
			if flags&unix.O_TRUNC != 0 {
				op, ok := fs.mayChange(r, n)
				defer op.End()
				if !ok {
					flags &^= unix.O_TRUNC // A10: succeeds and changes nothing
				}
			}
		} else if writes(flags) {
			c, err := r.covering(n)
			if err != nil {
				return err
			}
			_, name := n.covering()
			if h.lock, err = r.openForWrite(c, name); err != nil {
				return err
			}
			n.addWriter(h.lock)
		}
		if err := fs.openNode(n, h, backingFlags(flags)); err != nil {
			if h.lock != nil {
				n.removeWriter(h.lock)
			}
			h.drop()
			return err
		}
		// Within the try: from here on an acquisition finds the handle.
		fs.opened(n, h, out)
		return nil
	})
}

func (fs *FS) openNode(n *node, h *handle, flags int) error {
	p, err := fs.back.place(n)
	if err != nil {
		return err
	}
	defer p.done()
	h.fd, err = fs.back.open(p, flags)
	return err
}

// Tmpfile is open(2) with O_TMPFILE.
func (fs *FS) Tmpfile(cancel <-chan struct{}, in *fuse.CreateIn, out *fuse.CreateOut) fuse.Status {
	parent := fs.nodes.get(in.NodeId)
	if parent == nil {
		return frozen
	}
	r := &request{fs: fs, cancel: cancel, header: &in.InHeader, op: "tmpfile", node: parent}
	var st unix.Statx_t
	h := &handle{fd: -1}
	keep := -1
	status := fs.attempt(r, false, func() (err error) {
		d, err := fs.back.dir(parent)
		if err != nil {
			return err
		}
		defer d.release()
		if h.lock, err = r.openForWrite(lockstate.Change{Dirs: []*lockstate.Dir{parent.dir}}, ""); err != nil {
			return err
		}
		defer func() {
			if err != nil {
				h.lock.Close()
				if h.fd >= 0 {
					unix.Close(h.fd)
				}
			}
		}()
		// It has no name: it is beneath nothing until it is linked.
		h.lock.Moved("")
		flags := int(in.Flags)&^(unix.O_CREAT|unix.O_APPEND|unix.O_DIRECT|unix.O_NOFOLLOW) | unix.O_TMPFILE
		err = fs.asCaller(&in.InHeader, func() (err error) {
			h.fd, err = unix.Openat(d.fd, ".", flags|unix.O_CLOEXEC, fs.modeOf(parent, d.fd, in.Mode, in.Umask))
			return err
		})
		if err != nil {
			return err
		}
		if keep, err = unix.Openat(fs.back.proc, procName(h.fd), unix.O_PATH|unix.O_CLOEXEC, 0); err != nil {
			return err
		}
		return statAt(h.fd, "", &st)
	})
	if status != fuse.OK {
		return status
	}
	n := fs.nodes.anonymous(&st, keep, nil)
	fs.fillEntry(&in.InHeader, &out.EntryOut, n, &st, false)
	fs.opened(n, h, &out.OpenOut)
	return fuse.OK
}

// Flush is close(2) of one of perhaps several descriptors.
func (fs *FS) Flush(cancel <-chan struct{}, in *fuse.FlushIn) fuse.Status {
	if h := fs.handles.get(in.Fh, in.NodeId); h != nil {
		h.flushed.Store(true)
		fs.closedCopy(h, in)
	}
	return fuse.OK
}

// mayChange reports whether the caller may change n now. The caller ends the
// operation.
func (fs *FS) mayChange(r *request, n *node) (op *lockstate.Op, ok bool) {
	c, err := r.covering(n)
	if err != nil {
		return nil, false
	}
	c.Quiet, c.Force = true, fs.opts.Observe
	op, err = r.admit(c)
	return op, err == nil
}

// Release is the last close.
func (fs *FS) Release(cancel <-chan struct{}, in *fuse.ReleaseIn) {
	if fs.control.node(in.NodeId) != nil {
		fs.control.release(in.Fh)
		return
	}
	h := fs.handles.remove(in.Fh)
	if h == nil {
		return
	}
	fs.closedLast(h, in)
	if h.cand != nil {
		h.cand.closed()
	}
	if h.fd >= 0 {
		unix.Close(h.fd)
	}
	if h.lock != nil {
		h.node.removeWriter(h.lock)
		h.lock.Close()
	}
}

// Read is read(2).
func (fs *FS) Read(cancel <-chan struct{}, in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	if fs.control.node(in.NodeId) != nil {
		return fs.control.read(cancel, in)
	}
	h := fs.handles.get(in.Fh, in.NodeId)
	if h == nil {
		return nil, fuse.EBADF
	}
	if h.cand != nil {
		return h.cand.read(in, buf)
	}
	return fuse.ReadResultFd(uintptr(h.fd), int64(in.Offset), int(in.Size)), fuse.OK
}

// Write is write(2), or the kernel writing back a mapping.
func (fs *FS) Write(cancel <-chan struct{}, in *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	if fs.control.node(in.NodeId) != nil {
		return fs.control.write(cancel, in, data)
	}
	h := fs.handles.get(in.Fh, in.NodeId)
	if h == nil {
		return 0, fuse.EBADF
	}
	if h.opener != nil {
		return fs.writeLockFile(cancel, h, in, data)
	}
	if h.cand != nil {
		return h.cand.write(in, data)
	}
	if h.lock == nil {
		return 0, fuse.EBADF
	}
	return writeAt(h.fd, in, data)
}

// writeLockFile writes to a lock file if the caller may now (A10).
func (fs *FS) writeLockFile(cancel <-chan struct{}, h *handle, in *fuse.WriteIn, data []byte) (n uint32, status fuse.Status) {
	status = fs.changeLockFile(cancel, &in.InHeader, h, "write", func() (s fuse.Status) {
		if h.cand != nil {
			n, s = h.cand.write(in, data)
		} else {
			n, s = writeAt(h.fd, in, data)
		}
		return s
	})
	return n, status
}

// changeLockFile passes the gate for one change through a handle on a lock
// file.
func (fs *FS) changeLockFile(cancel <-chan struct{}, header *fuse.InHeader, h *handle, op string, change func() fuse.Status) fuse.Status {
	r := &request{fs: fs, cancel: cancel, header: header, op: op, node: h.node}
	return fs.attempt(r, false, func() error {
		if h.cand.private() {
			return lockstate.ErrHeld
		}
		c, err := r.covering(h.node)
		if err != nil {
			return err
		}
		c.Quiet = true
		op, err := r.admit(c)
		if err != nil {
			return err
		}
		defer op.End()
		if s := change(); s != fuse.OK {
			return syscall.Errno(s)
		}
		return nil
	})
}

func writeAt(fd int, in *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	done := 0
	for done < len(data) {
		n, err := unix.Pwrite(fd, data[done:], int64(in.Offset)+int64(done))
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			if done > 0 {
				break
			}
			return 0, statusOf(err)
		}
		done += n
	}
	return uint32(done), fuse.OK
}

// Fsync is fsync(2) and fdatasync(2).
func (fs *FS) Fsync(cancel <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	h := fs.handles.get(in.Fh, in.NodeId)
	if h == nil || h.fd < 0 {
		return fuse.OK
	}
	return statusOf(ignoringEINTR(func() error {
		if in.FsyncFlags&1 != 0 {
			return unix.Fdatasync(h.fd)
		}
		return unix.Fsync(h.fd)
	}))
}

// Lseek is lseek(2) with SEEK_DATA or SEEK_HOLE.
func (fs *FS) Lseek(cancel <-chan struct{}, in *fuse.LseekIn, out *fuse.LseekOut) fuse.Status {
	h := fs.handles.get(in.Fh, in.NodeId)
	if h != nil && h.cand != nil {
		return h.cand.lseek(in, out)
	}
	if h == nil || h.fd < 0 {
		return fuse.EBADF
	}
	off, err := unix.Seek(h.fd, int64(in.Offset), int(in.Whence))
	out.Offset = uint64(off)
	return statusOf(err)
}

// Fallocate is fallocate(2).
func (fs *FS) Fallocate(cancel <-chan struct{}, in *fuse.FallocateIn) fuse.Status {
	h := fs.handles.get(in.Fh, in.NodeId)
	if h == nil || h.fd < 0 || h.lock == nil && h.opener == nil {
		return fuse.EBADF
	}
	change := func() fuse.Status {
		return statusOf(ignoringEINTR(func() error {
			return unix.Fallocate(h.fd, in.Mode, int64(in.Offset), int64(in.Length))
		}))
	}
	if h.opener != nil {
		return fs.changeLockFile(cancel, &in.InHeader, h, "fallocate", change)
	}
	return change()
}

// CopyFileRange is copy_file_range(2) between two files of the mount.
func (fs *FS) CopyFileRange(cancel <-chan struct{}, in *fuse.CopyFileRangeIn) (uint32, fuse.Status) {
	src, dst := fs.handles.get(in.FhIn, in.NodeId), fs.handles.get(in.FhOut, in.NodeIdOut)
	if src == nil || dst == nil || src.fd < 0 || dst.fd < 0 || dst.lock == nil && dst.opener == nil {
		return 0, fuse.EBADF
	}
	n := 0
	change := func() fuse.Status {
		from, to := int64(in.OffIn), int64(in.OffOut)
		var err error
		n, err = unix.CopyFileRange(src.fd, &from, dst.fd, &to, int(min(in.Len, 1<<30)), 0)
		return statusOf(err)
	}
	status := fuse.OK
	if dst.opener != nil {
		status = fs.changeLockFile(cancel, &in.InHeader, dst, "copy_file_range", change)
	} else {
		status = change()
	}
	return uint32(max(n, 0)), status
}
