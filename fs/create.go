package fs

import (
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// making is what the five operations that make an entry have in common: the
// entry may be a lock file, which makes it an acquisition (A3, A6), and what
// they make belongs to the caller.
type making struct {
	r        *request
	parent   *node
	name     string
	protocol string
	quiet    bool

	// before runs once the entry is admitted, if set; do makes it below the
	// open parent; see takes note of it, or of its node if not set.
	before func() error
	do     func(dir int) error
	see    func(dir int) error
	seen   func(dir int) error // if set: what follows when its node is known
	undo   int                 // flags of unlinkat for taking it back

	// also tells what else the operation touches: link's source.
	also func() (lockstate.Change, error)

	linked []*lockstate.Dir // where a file that gets another name has names

	// Results.
	st   unix.Statx_t
	node *node
}

// make passes the gate and makes the entry.
func (fs *FS) make(m *making) error {
	d, err := fs.back.dir(m.parent)
	if err != nil {
		return err
	}
	defer d.release()
	finish, err := fs.admitMaking(m)
	if err != nil {
		return err
	}
	return fs.carryOutMaking(m, d.fd, finish)
}

// carryOutMaking makes an entry that is admitted. The node knows its new name
// before an acquisition that waits for this can go on (W3).
func (fs *FS) carryOutMaking(m *making, dir int, finish func(made bool) bool) error {
	err := m.makeAt(dir)
	if err == nil {
		if err = m.seeAt(fs, dir); err != nil {
			m.takeBack(fs, dir)
			defer fs.notifyDir(m.parent)
		}
	}
	if err == nil && fs.table.Tracks() {
		fs.notePresence(m) // while the lock is in force that it is made under
	}
	if ok := finish(err == nil); ok || err != nil {
		return err
	}
	// The lock was lost meanwhile: nothing was made.
	m.takeBack(fs, dir)
	defer fs.notifyDir(m.parent)
	if m.node != nil {
		fs.nodes.forget(m.node.id, 1)
	}
	return lockstate.ErrFrozen
}

// takeBack removes the entry. Others may have looked it up already.
func (m *making) takeBack(fs *FS, dir int) {
	v, err := fs.take(dir, m.name, false)
	if err != nil {
		unix.Unlinkat(dir, m.name, m.undo)
		return
	}
	_ = fs.unlink(dir, link{m.parent, m.name}, v, m.undo)
}

func (m *making) makeAt(dir int) error {
	if m.before != nil {
		if err := m.before(); err != nil {
			return err
		}
	}
	return m.do(dir)
}

func (m *making) seeAt(fs *FS, dir int) (err error) {
	if m.see != nil {
		return m.see(dir)
	}
	if m.node, err = fs.nodes.lookAt(dir, m.parent, m.name, &m.st); err != nil {
		return err
	}
	m.node.followHandles()
	if m.seen != nil {
		if err = m.seen(dir); err != nil {
			m.node.relink(link{m.parent, m.name}, link{})
			fs.nodes.forget(m.node.id, 1)
		}
	}
	return err
}

// admitMaking passes the gate for m. The caller calls finish when the entry is
// made, or is not; it reports false when the lock was lost meanwhile.
func (fs *FS) admitMaking(m *making) (finish func(made bool) bool, err error) {
	entry, err := fs.admitEntry(m)
	if err != nil || m.also == nil {
		return entry, err
	}
	// In this order, since an acquisition waits for operations in flight.
	c, err := m.also()
	if err != nil {
		entry(false)
		return nil, err
	}
	also, err := m.r.admit(c)
	if err != nil {
		entry(false)
		return nil, err
	}
	return func(made bool) bool {
		defer also.End()
		return entry(made)
	}, nil
}

func (fs *FS) admitEntry(m *making) (finish func(made bool) bool, err error) {
	r := m.r
	if !fs.isLockName(m.parent, m.name) {
		op, err := r.admit(lockstate.Change{Dirs: m.covered(fs), Quiet: m.quiet})
		if err != nil {
			return nil, err
		}
		return func(bool) bool { op.End(); return true }, nil
	}
	r.errno = fuse.Status(unix.EEXIST) // A8
	return fs.admitLock(r, lockstate.Request{
		Dir: m.parent.dir, Inode: m.parent.key().inode(), Kind: lockstate.Explicit, Protocol: m.protocol, File: m.name,
	}, &m.st)
}

// covered returns the directories whose locks cover what m makes.
func (m *making) covered(fs *FS) []*lockstate.Dir {
	if m.r.op == "create" && fs.isSharedName(m.parent, m.name) {
		return nil // W5
	}
	return []*lockstate.Dir{m.parent.dir}
}

// admitLock acquires the directory of a lock file that is about to be made; file
// has its attributes then, if one is.
func (fs *FS) admitLock(r *request, q lockstate.Request, file *unix.Statx_t) (finish func(made bool) bool, err error) {
	_, finish, err = fs.grantLock(r, q, file)
	return finish, err
}

// grantLock is admitLock that returns the grant, too: nil where the mount only
// observes.
func (fs *FS) grantLock(r *request, q lockstate.Request, file *unix.Statx_t) (g *lockstate.Grant, finish func(made bool) bool, err error) {
	if r.forced {
		return nil, func(bool) bool { return true }, nil
	}
	if g, err = r.acquire(q); err != nil {
		return nil, nil, err
	}
	if err := fs.checkAliasWriters(r, q.Dir, g); err != nil {
		g.Abort()
		return nil, nil, err
	}
	return g, func(made bool) bool {
		if !made {
			g.Abort()
			return true
		}
		if file != nil {
			g.Saw(lockstate.Inode{}, fs.inodeOf(file))
		}
		l, ok := g.Commit()
		if ok {
			fs.acquired(r, l)
		}
		return ok
	}, nil
}

// acquired carries out what follows an acquisition.
func (fs *FS) acquired(r *request, l lockstate.Lock) {
	r.lock = l
	fs.narrow(r.proc, l)
	fs.log.Debug("acquired", "dir", l.Path, "protocol", l.Protocol, "pid", l.Owner.Pid, "token", l.Token)
}

// reserved refuses names that the control directory takes.
func (fs *FS) reserved(parent *node, name string) bool {
	return parent == fs.root && name == ControlDir
}

// newEntry serves mknod, mkdir and symlink: it makes an entry and tells the
// kernel of it.
func (fs *FS) newEntry(m *making, out *fuse.EntryOut) fuse.Status {
	r := m.r
	if r.parent = fs.nodes.get(r.header.NodeId); r.parent == nil {
		if fs.control.node(r.header.NodeId) != nil {
			return frozen
		}
		return fuse.Status(unix.ESTALE)
	}
	m.parent, r.name = r.parent, m.name
	if fs.reserved(m.parent, m.name) {
		return fuse.Status(unix.EEXIST)
	}
	m.quiet = m.quiet || fs.isAddedName(m.name)
	status := fs.attempt(r, false, func() error { return fs.make(m) })
	if status == fuse.OK {
		fs.fillEntry(r.header, out, m.node, &m.st, fs.isLockName(m.parent, m.name))
	}
	return status
}

// modeOf returns the mode that the backing is asked for in n, open as dir: with the umask, but
// where a default ACL takes its place (acl(5)).
func (fs *FS) modeOf(n *node, dir int, mode, umask uint32) uint32 {
	if umask == 0 || fs.hasDefaultACL(n, dir) {
		return mode
	}
	return mode &^ umask
}

// Mknod is mknod(2).
func (fs *FS) Mknod(cancel <-chan struct{}, in *fuse.MknodIn, name string, out *fuse.EntryOut) fuse.Status {
	m := &making{r: &request{fs: fs, cancel: cancel, header: &in.InHeader, op: "mknod"}, name: name, protocol: "mknod"}
	m.do = func(dir int) error {
		return fs.asCaller(&in.InHeader, func() error {
			return unix.Mknodat(dir, name, fs.modeOf(m.parent, dir, in.Mode, in.Umask), int(unix.Mkdev(in.Rdev>>8&0xfff, in.Rdev&0xff|in.Rdev>>12&0xfff00)))
		})
	}
	return fs.newEntry(m, out)
}

// Symlink is symlink(2).
func (fs *FS) Symlink(cancel <-chan struct{}, h *fuse.InHeader, target, name string, out *fuse.EntryOut) fuse.Status {
	m := &making{r: &request{fs: fs, cancel: cancel, header: h, op: "symlink"}, name: name, protocol: "symlink"}
	m.do = func(dir int) error {
		return fs.asCaller(h, func() error { return unix.Symlinkat(target, dir, name) })
	}
	return fs.newEntry(m, out)
}

// Mkdir is mkdir(2): an acquisition (A1), unless the name is a lock file's
// (A3) or the directory is a container (C4).
func (fs *FS) Mkdir(cancel <-chan struct{}, in *fuse.MkdirIn, name string, out *fuse.EntryOut) fuse.Status {
	r := &request{fs: fs, cancel: cancel, header: &in.InHeader, op: "mkdir"}
	m := &making{r: r, name: name, protocol: "mkdir", quiet: true, undo: unix.AT_REMOVEDIR}
	m.do = func(dir int) error {
		return fs.asCaller(&in.InHeader, func() error {
			return unix.Mkdirat(dir, name, fs.modeOf(m.parent, dir, in.Mode, in.Umask))
		})
	}
	parent := fs.nodes.get(in.NodeId)
	if parent == nil || fs.isLockName(parent, name) || fs.reserved(parent, name) {
		return fs.newEntry(m, out)
	}
	r.parent, r.name, m.parent = parent, name, parent
	r.waitable = func(held *lockstate.HeldError) bool { return fs.mayNarrow(parent, held) }

	status := fs.attempt(r, false, func() error { return fs.makeDir(m) })
	if status == fuse.OK {
		fs.fillEntry(&in.InHeader, out, m.node, &m.st, false)
	}
	return status
}

func (fs *FS) makeDir(m *making) error {
	d, err := fs.back.dir(m.parent)
	if err != nil {
		return err
	}
	defer d.release()
	child := fs.table.Dir(m.parent.dir, m.name)
	defer fs.table.Forget(child)

	finish := func(bool) bool { return true }
	q := lockstate.Request{Dir: child, Kind: lockstate.Implicit, Protocol: "mkdir"}
	switch container := fs.opts.NoLocking || fs.table.Level(child) < fs.opts.Depth; {
	case container || m.r.forced || m.r.process() == nil: // C4; H4: nobody acquires nothing
		op, err := m.r.admit(lockstate.Change{Dirs: []*lockstate.Dir{m.parent.dir}, Quiet: true, Free: container})
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
		if fs.control.node(in.Oldnodeid) != nil {
			return frozen
		}
		return fuse.Status(unix.ESTALE)
	}
	r := &request{fs: fs, cancel: cancel, header: &in.InHeader, op: "link"}
	m := &making{r: r, name: name, protocol: "link"}
	if src.candidate().private() {
		return fs.linkCandidate(m, src, out)
	}
	m.do = func(dir int) error {
		p, err := fs.back.place(src)
		if err != nil {
			return err
		}
		defer p.done()
		if p.name == "" {
			err = unix.Linkat(fs.back.proc, procName(p.fd), dir, name, unix.AT_SYMLINK_FOLLOW)
		} else {
			err = unix.Linkat(p.fd, p.name, dir, name, 0)
		}
		fs.nodes.linked()
		return err
	}
	if r.parent = fs.nodes.get(in.NodeId); r.parent == nil {
		if fs.control.node(in.NodeId) != nil {
			return frozen
		}
		return fuse.Status(unix.ESTALE)
	}
	m.parent, r.name = r.parent, name
	if fs.reserved(m.parent, name) {
		return fuse.Status(unix.EEXIST)
	}
	m.linked, _ = src.covering()
	m.also = func() (lockstate.Change, error) {
		// A new name outside would be a way around the lock of the
		// source; and what enters a lock is nobody else's to write.
		c, err := r.coveringAlone(src)
		c.Quiet = true
		c.Into, c.Files = m.parent.dir, src.handles()
		return c, err
	}
	var hot *hotDir
	m.before = func() error {
		if fs.table.Tracks() {
			fs.noteLinking(m, src)
		}
		hot.leave()
		hot = fs.heatLink(src, m.parent)
		return nil
	}
	status := func() fuse.Status {
		defer func() { hot.leave() }()
		return fs.attempt(r, false, func() error { return fs.make(m) })
	}()
	if status == fuse.OK {
		if fs.isLockName(m.parent, name) {
			fs.lookedUpByName(m.node)
		}
		fs.fillEntry(&in.InHeader, out, m.node, &m.st, fs.isLockName(m.parent, name))
	}
	return status
}
