package fs

import (
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// newEntry serves mknod, mkdir and symlink: it makes an entry and tells the
// kernel of it.
func (fs *FS) newEntry(m *making, out *fuse.EntryOut) fuse.Status {
	r := m.r
	if status := fs.findParent(r); status != fuse.OK {
		return status
	}
	if !m.socket && fs.namedStale(r.header, fs.isLockName(r.parent, r.name), r.name, r.parent) {
		return fuse.Status(unix.ESTALE)
	}
	m.quiet = m.quiet || fs.isAddedName(r.name)
	status := fs.attempt(r, false, func() error { return fs.make(m) })
	if status == fuse.OK {
		fs.fillEntry(r.header, out, m.node, &m.st, fs.isLockName(r.parent, r.name))
	}
	return status
}

// findParent finds the directory in which r makes an entry.
func (fs *FS) findParent(r *request) fuse.Status {
	if r.parent = fs.nodes.get(r.header.NodeId); r.parent == nil {
		return fs.notFound(r.header.NodeId)
	}
	if fs.reserved(r.parent, r.name) {
		return fuse.Status(unix.EEXIST)
	}
	return fuse.OK
}

// notFound is the answer to who names a node that there is not in the tree.
func (fs *FS) notFound(id uint64) fuse.Status {
	if fs.control.node(id) != nil {
		return notInControl
	}
	return fuse.Status(unix.ESTALE)
}

// Mknod is mknod(2).
func (fs *FS) Mknod(cancel <-chan struct{}, in *fuse.MknodIn, name string, out *fuse.EntryOut) fuse.Status {
	if fs.idmap && name == lockstate.PermitName {
		return fs.permits.give(fs, &in.InHeader)
	}
	m := &making{r: &request{fs: fs, cancel: cancel, header: &in.InHeader, op: "mknod", name: name}, protocol: "mknod"}
	m.socket = in.Mode&unix.S_IFMT == unix.S_IFSOCK
	m.do = func(dir int) error {
		return fs.asMaker(&in.InHeader, m.r.parent, dir, in.Mode, in.Umask, func(mode uint32) error {
			return unix.Mknodat(dir, name, mode, int(unix.Mkdev(in.Rdev>>8&0xfff, in.Rdev&0xff|in.Rdev>>12&0xfff00)))
		})
	}
	return fs.newEntry(m, out)
}

// Symlink is symlink(2).
func (fs *FS) Symlink(cancel <-chan struct{}, h *fuse.InHeader, target, name string, out *fuse.EntryOut) fuse.Status {
	m := &making{r: &request{fs: fs, cancel: cancel, header: h, op: "symlink", name: name}, protocol: "symlink"}
	m.do = func(dir int) error {
		return fs.asCaller(h, func() error { return unix.Symlinkat(target, dir, name) })
	}
	return fs.newEntry(m, out)
}

// Mkdir is mkdir(2): an acquisition (A1), unless the name is a lock file's
// (A3) or the directory is a container (C4).
func (fs *FS) Mkdir(cancel <-chan struct{}, in *fuse.MkdirIn, name string, out *fuse.EntryOut) fuse.Status {
	r := &request{fs: fs, cancel: cancel, header: &in.InHeader, op: "mkdir", name: name}
	m := &making{r: r, protocol: "mkdir", quiet: true, undo: unix.AT_REMOVEDIR}
	m.do = func(dir int) error {
		return fs.asMaker(&in.InHeader, r.parent, dir, in.Mode, in.Umask, func(mode uint32) error {
			return unix.Mkdirat(dir, name, mode)
		})
	}
	parent := fs.nodes.get(in.NodeId)
	if parent == nil || fs.isLockName(parent, name) || fs.reserved(parent, name) {
		return fs.newEntry(m, out)
	}
	if fs.namedStale(r.header, false, name, parent) {
		return fuse.Status(unix.ESTALE)
	}
	r.parent = parent
	r.waitable = func(held *lockstate.HeldError) bool { return fs.mayNarrow(parent, held) }

	status := fs.attempt(r, false, func() error { return fs.makeDir(m) })
	if status == fuse.OK {
		fs.fillEntry(&in.InHeader, out, m.node, &m.st, false)
	}
	return status
}

func (fs *FS) makeDir(m *making) error {
	d, err := fs.back.dir(m.r.parent)
	if err != nil {
		return err
	}
	defer d.release()
	child := fs.table.Dir(m.r.parent.dir, m.r.name)
	defer fs.table.Forget(child)

	finish := func(bool) bool { return true }
	q := lockstate.Request{Dir: child, Kind: lockstate.Implicit, Protocol: "mkdir"}
	switch container := fs.opts.NoLocking || fs.table.Level(child) < fs.opts.Depth; {
	case container || m.r.forced || m.r.process() == nil && m.r.unknown == nil: // C4; H4: nobody acquires nothing
		op, err := m.r.admit(lockstate.Change{Dirs: []*lockstate.Dir{m.r.parent.dir}, Quiet: true, Free: container})
		if err != nil {
			return err
		}
		defer op.End()
	default:
		g, err := m.r.acquire(q)
		if err != nil {
			return err
		}
		finish = func(made bool) bool {
			if !made {
				g.Abort()
				return true
			}
			g.Saw(fs.inodeOf(&m.st), lockstate.Inode{})
			_, ok := g.Commit()
			return ok
		}
	}
	return fs.carryOutMaking(m, d.fd, finish)
}

// Link is link(2).
func (fs *FS) Link(cancel <-chan struct{}, in *fuse.LinkIn, name string, out *fuse.EntryOut) fuse.Status {
	src := fs.nodes.get(in.Oldnodeid)
	if src == nil {
		return fs.notFound(in.Oldnodeid)
	}
	r := &request{fs: fs, cancel: cancel, header: &in.InHeader, op: "link", name: name}
	m := &making{r: r, protocol: "link"}
	if src.candidate().private() {
		return fs.winCandidate(m, src.candidate(), out)
	}
	m.do = func(dir int) error {
		p, err := fs.back.place(src)
		if err != nil {
			return err
		}
		defer p.done()
		err = fs.callerSpends(&in.InHeader, entrySize, func() error {
			if p.name == "" {
				return unix.Linkat(fs.back.proc, procName(p.fd), dir, name, unix.AT_SYMLINK_FOLLOW)
			}
			return unix.Linkat(p.fd, p.name, dir, name, 0)
		})
		fs.nodes.linked()
		return err
	}
	if status := fs.findParent(r); status != fuse.OK {
		return status
	}
	if fs.namedStale(r.header, fs.isLockName(r.parent, name), name, r.parent, src) {
		return fuse.Status(unix.ESTALE)
	}
	m.linked, _ = src.covering()
	m.also = func() (lockstate.Change, error) {
		// A new name outside would be a way around the lock of the
		// source; and what enters a lock is nobody else's to write.
		c, err := r.coveringAlone(src)
		c.Quiet = true
		c.Into, c.Files = r.parent.dir, src.writers()
		return c, err
	}
	var hot *hotDir
	m.before = func() error {
		if err := r.awaits.check(fs, src); err != nil {
			return err // who may not link it does not wait (W2)
		}
		fs.noteLinking(m, src)
		hot.leave()
		hot = fs.heatLink(src, r.parent)
		return nil
	}
	defer func() { hot.leave() }()
	status := fs.attempt(r, false, func() error { return fs.make(m) })
	if status == fuse.OK {
		if fs.isLockName(r.parent, name) {
			fs.lookedUpByName(m.node)
		}
		fs.fillEntry(&in.InHeader, out, m.node, &m.st, fs.isLockName(r.parent, name))
	}
	return status
}
