package fs

import (
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// How a candidate is made private, and how it wins (A9).

// createCandidate serves the creation of a private candidate. It reports
// whether it did.
func (fs *FS) createCandidate(r *request, in *fuse.CreateIn, out *fuse.CreateOut) bool {
	if fs.opts.Observe || fs.isLockName(r.parent, r.name) || !fs.mayBeCandidate(r.name) {
		return false
	}
	fs.reapGoverning(r.parent.dir)
	_, held := fs.table.Governing(r.parent.dir)
	if !held && !fs.opts.DenyUnlocked {
		return false
	}
	p := r.process()
	if p == nil || !fs.isCandidateName(r.name, p) || held && fs.table.MayHold(p, r.parent.dir) {
		return false // a holder's file is not to be lost: the gate waits until it is known
	}
	return fs.openPrivate(r, in, out, false)
}

// openPrivate makes a private file for the caller of Create and opens it, and
// reports whether there was room. lockFile says what it stands for.
func (fs *FS) openPrivate(r *request, in *fuse.CreateIn, out *fuse.CreateOut, lockFile bool) bool {
	now := time.Now()
	c := &candidate{
		fs: fs, parent: r.parent, name: r.name, owner: r.process(), lockFile: lockFile,
		mode: unix.S_IFREG | in.Mode&^in.Umask&0o7777, uid: in.Uid, gid: in.Gid, atime: now, mtime: now,
	}
	st := unix.Statx_t{Mode: uint16(c.mode), Nlink: 1}
	c.node = fs.nodes.anonymous(&st, -1, c)
	if !fs.register(c) {
		fs.nodes.forget(c.node.id, 1)
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	h, err := c.addLocked(&in.InHeader, in.Flags)
	if err != nil {
		fs.cands.drop(c)
		fs.nodes.forget(c.node.id, 1)
		return false
	}
	out.EntryOut.NodeId = c.node.id
	c.fillLocked(&out.EntryOut.Attr)
	out.OpenOut.Fh = h.id
	out.OpenOut.OpenFlags = fuse.FOPEN_DIRECT_IO
	return true
}

// reapGoverning reaps the owner of the lock that governs d if it is dead.
func (fs *FS) reapGoverning(d *lockstate.Dir) {
	if l, ok := fs.table.Governing(d); ok {
		fs.reapIfDead(l)
	}
}

// renameCandidate serves rename(2) of a private candidate.
func (fs *FS) renameCandidate(m *renaming, c *candidate) fuse.Status {
	mk := &making{r: m.r, protocol: "rename"}
	m.r.header.NodeId, m.r.name = m.to.parent.id, m.to.name
	return fs.winCandidate(mk, c, nil)
}

// winCandidate makes a private candidate the lock file, if the directory can
// be acquired: only then does it reach the backing. By link(2), which has an out, its own
// name stays as a second one.
func (fs *FS) winCandidate(m *making, c *candidate, out *fuse.EntryOut) fuse.Status {
	r, keep := m.r, out != nil
	if r.parent = fs.nodes.get(r.header.NodeId); r.parent == nil {
		return fuse.Status(unix.ESTALE)
	}
	there := r.parent == c.parent && fs.isLockName(r.parent, r.name)
	if c.lockFile || !there {
		if there {
			r.errno = fuse.Status(unix.EEXIST) // A8
		}
		return fs.deny(r, &lockstate.HeldError{Err: lockstate.ErrHeld}, nil)
	}
	if !r.see() {
		return fuse.EINTR
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.won.Load() {
		return fuse.Status(unix.ESTALE)
	}
	names, record := []string{r.name}, uint64(0)
	if keep {
		names = append(names, c.name)
		record = fs.cands.record(c.parent, c.name, c.owner.ID())
		m.before = func() error { fs.cands.keep(); return nil } // with the lock's record, mostly
	}
	// Nobody is to see the file before it is known what it is: so it is made
	// alone. A crowd that has no chance need not wait for each other for that.
	_, held := fs.table.Governing(r.parent.dir)
	alone, again, fd := !held || r.proc != nil && fs.table.Holds(r.proc, r.parent.dir), false, -1
	defer func() { drop(fd) }()
	m.do = func(dir int) (err error) {
		if again = !alone; again {
			return unix.EAGAIN
		}
		drop(fd)
		fd, err = c.writeOutLocked(r, dir, r.name, keep)
		return err
	}
	var n *node
	m.see = func(dir int) error {
		for n = nil; n == nil; {
			removals, added := fs.nodes.removalsOf(r.parent), fs.nodes.added.Load()
			if err := statAt(dir, r.name, &m.st); err != nil {
				return err
			}
			n = fs.nodes.settle(c.node, &m.st, r.parent, names, removals, added)
		}
		c.settleLocked(n, fd, &m.st)
		return nil
	}
	status := fs.attempt(r, alone, func() error { return fs.make(m) })
	if again {
		alone = true
		status = fs.attempt(r, alone, func() error { return fs.make(m) })
	}
	if status != fuse.OK {
		fs.cands.unrecord(record)
		if n != nil { // the lock was lost at that moment, and the file is gone
			fs.discard(&discarding{name: c.name, place: func() (string, bool) {
				return fs.table.Path(c.parent.dir), n.has(link{c.parent, c.name})
			}})
			fs.cands.drop(c)
		}
		return status
	}
	if keep {
		fs.nodes.again(n)
		fs.fillEntry(r.header, out, n, &m.st, true)
	}
	fs.cands.drop(c)
	if keep {
		fs.notifyDir(c.parent)
		fs.registerCandidate(&candidate{
			fs: fs, parent: c.parent, name: c.name, owner: c.owner, key: fs.identityOf(&m.st), record: record,
		})
	}
	return fuse.OK
}

// writeOutLocked writes the candidate to the backing, as the caller's, and returns
// a descriptor of it.
func (c *candidate) writeOutLocked(r *request, dir int, name string, keep bool) (fd int, err error) {
	first := name
	if keep {
		first = c.name
	}
	uid, gid := r.header.Uid, r.header.Gid
	if c.fs.idmap {
		uid, gid = c.uid, c.gid // link(2) and rename(2) tell nothing
	}
	err = c.fs.asUser(uid, gid, func() (err error) {
		fd, err = openAt(dir, first, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL, c.mode&0o7777)
		return err
	})
	if err != nil {
		return -1, err
	}
	var n int
	if n, err = unix.Write(fd, c.data); err == nil && n < len(c.data) {
		err = unix.ENOSPC // there was room for a part of it
	}
	if err == nil && keep {
		err = unix.Linkat(dir, first, dir, name, 0)
		c.fs.nodes.linked()
	}
	if err != nil {
		unix.Close(fd)
		unix.Unlinkat(dir, first, 0)
		return -1, err
	}
	return fd, nil
}
