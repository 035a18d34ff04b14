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
	r        *request // parent and name say where
	protocol string
	quiet    bool
	socket   bool // bind(2) does not look names up again

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
	// Once more, since directories stand still from here on: who acquires one that has moved
	// meanwhile has it under a name that is gone.
	if r := m.r; !m.socket && fs.isLockName(r.parent, r.name) && fs.namedStale(r.header, true, r.name, r.parent) {
		return unix.ESTALE
	}
	d, err := fs.back.dir(m.r.parent)
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
			defer fs.notifyDir(m.r.parent)
		}
	}
	if err == nil && (fs.table.Tracks() || fs.isSharedName(m.r.parent, m.r.name)) {
		fs.notePresence(m) // while the lock is in force that it is made under
	}
	if ok := finish(err == nil); ok || err != nil {
		return err
	}
	// The lock was lost meanwhile: nothing was made.
	m.takeBack(fs, dir)
	defer fs.notifyDir(m.r.parent)
	if m.node != nil {
		fs.nodes.forget(m.node.id, 1)
	}
	return lockstate.ErrEnded
}

// notePresence tells the table what was made in a directory.
func (fs *FS) notePresence(m *making) {
	if m.node == nil || len(m.linked) > 0 {
		return // a private file, or noted by noteLinking
	}
	id := fs.fileID(&m.st)
	if len(m.covered(fs)) == 0 && !fs.table.HoldsAll(m.r.process(), m.r.parent.dir) {
		fs.table.Entered(m.r.parent.dir, id, nil, nil, true) // W5: it is a stranger's
		return
	}
	fs.table.Made(m.r.parent.dir, id)
}

// noteLinking tells the table what is about to come into a directory by link(2),
// from wherever it has a name. Before: a daemon that dies in between lost nothing.
func (fs *FS) noteLinking(m *making, src *node) {
	quiet := fs.isLockName(m.r.parent, m.r.name) // see noteEntering
	if len(m.linked) == 0 || !quiet && !fs.table.Tracks() {
		return // it has no name, and was made for this one
	}
	fs.table.Entered(m.r.parent.dir, src.key().fileID(), m.linked[0], src.above(), quiet)
}

// takeBack removes the entry. Others may have looked it up already.
func (m *making) takeBack(fs *FS, dir int) {
	v, err := fs.take(dir, m.r.name, false)
	if err != nil {
		err = unix.Unlinkat(dir, m.r.name, m.undo)
	} else {
		err = fs.unlink(dir, link{m.r.parent, m.r.name}, v, m.undo)
	}
	if err == nil {
		fs.cands.forget(m.r.parent, m.r.name)
	}
}

func (m *making) makeAt(dir int) error {
	if m.before != nil {
		if err := m.before(); err != nil {
			return err
		}
	}
	m.r.fs.takingName(link{m.r.parent, m.r.name})
	return m.do(dir)
}

func (m *making) seeAt(fs *FS, dir int) (err error) {
	if m.see != nil {
		return m.see(dir)
	}
	if m.node, err = fs.nodes.lookAt(dir, m.r.parent, m.r.name, &m.st); err != nil {
		return err
	}
	m.node.followHandles()
	if m.seen != nil {
		if err = m.seen(dir); err != nil {
			m.node.relink(link{m.r.parent, m.r.name}, link{})
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
	if !fs.isLockName(r.parent, r.name) {
		c := lockstate.Change{Dirs: m.covered(fs), Quiet: m.quiet}
		if m.also != nil {
			c.Into, c.From = r.parent.dir, m.linked // by link(2)
		}
		op, err := r.admit(c)
		if err != nil {
			return nil, err
		}
		return func(bool) bool { op.End(); return true }, nil
	}
	r.errno = fuse.Status(unix.EEXIST) // A8
	_, finish, err = fs.admitLock(r, lockstate.Request{
		Dir: r.parent.dir, Inode: r.parent.key().inode(), Kind: lockstate.Explicit, Protocol: m.protocol, File: r.name,
	}, &m.st)
	return finish, err
}

// covered returns the directories whose locks cover what m makes. What is being cleared
// away is no place for what others share.
func (m *making) covered(fs *FS) []*lockstate.Dir {
	if r := m.r; r.op == "create" && fs.isSharedName(r.parent, r.name) && !fs.table.Sealed(r.parent.dir) {
		return nil // W5
	}
	return []*lockstate.Dir{m.r.parent.dir}
}

// admitLock acquires the directory of a lock file that is about to be made; file
// has its attributes then, if one is. There is no grant where the mount only observes.
func (fs *FS) admitLock(r *request, q lockstate.Request, file *unix.Statx_t) (g *lockstate.Grant, finish func(made bool) bool, err error) {
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
	r.lock = &l
	fs.narrow(r.proc, l)
	fs.log.Debug("acquired", "dir", l.Path, "protocol", l.Protocol, "pid", l.Owner.Pid, "token", l.Token)
}

// reserved reports whether a name is taken by the control directory.
func (fs *FS) reserved(parent *node, name string) bool {
	return parent == fs.root && name == ControlDir
}

// asMaker is asCaller for what makes an entry in n, open as dir: f gets the mode that the
// backing is asked for, with the umask, but where a default ACL takes its place (acl(5)).
func (fs *FS) asMaker(h *fuse.InHeader, n *node, dir int, mode, umask uint32, f func(mode uint32) error) error {
	return fs.asCaller(h, func() error {
		if umask != 0 {
			has, err := fs.hasDefaultACL(n, dir)
			if err != nil {
				return err
			}
			if !has {
				mode &^= umask
			}
		}
		return f(mode)
	})
}
