package fs

import "github.com/stagefs/stagefs/lockstate"

// renameUnderWay takes note that m is carried out, and not answered yet. token was the last
// when it was admitted.
func (fs *FS) renameUnderWay(m *renaming, token uint64) {
	u := &changeUnderWay{tid: m.r.header.Pid, from: m.from.parent.dir, to: m.to.parent.dir, token: token}
	if !fs.opts.NoLocking {
		u.nodes[0] = m.src.node
	}
	if m.dst != nil && m.dst.fd < 0 { // it has a name left
		u.nodes[1] = m.dst.node
		if !m.exchanges() {
			u.loser = m.dst.node
		}
	}
	fs.underWay.began(u)
}

// moving writes down where locks and candidates are about to go, so that the next daemon finds
// them if this one dies meanwhile (S1). What stays is written down again.
func (fs *FS) moving(m *renaming, stays bool) {
	announce := func(d *lockstate.Dir, v *victim, to link) {
		switch {
		case d == nil:
		case stays:
			fs.table.Stays(d)
		case to.parent == nil:
			fs.table.Moving(d, fs.fileID(&v.st), nil, "")
		default:
			fs.table.Moving(d, fs.fileID(&v.st), to.parent.dir, to.name)
			fs.cands.moving(fs.table.Path(d), join(fs.table.Path(to.parent.dir), to.name))
		}
	}
	announce(m.srcDir, m.src, m.to)
	switch {
	case m.exchanges():
		announce(m.dstDir, m.dst, m.from)
	case m.dstDir != m.srcDir:
		announce(m.dstDir, m.dst, link{})
	}
}

// renamed takes note of a rename that the backing has carried out.
func (fs *FS) renamed(m *renaming) {
	exchange := m.exchanges()
	switch {
	case exchange && m.srcDir != nil && m.dstDir != nil:
		fs.table.Exchange(m.srcDir, m.dstDir)
	case m.srcDir != nil:
		if m.dstDir != nil && m.dstDir != m.srcDir {
			fs.table.Remove(m.dstDir)
		}
		fs.table.Move(m.srcDir, m.to.parent.dir, m.to.name)
	case exchange && m.dstDir != nil:
		fs.table.Move(m.dstDir, m.from.parent.dir, m.from.name)
	}
	same := m.dst != nil && fs.identityOf(&m.src.st) == fs.identityOf(&m.dst.st)
	if same && !exchange {
		// Two names of one file: rename(2) does nothing.
		m.dst.spared()
		return
	}
	if m.dst != nil && !exchange {
		fs.lost(m.dst, m.to)
	}
	if m.src.node != nil {
		m.src.node.relink(m.from, m.to)
	}
	if exchange && m.dst.node != nil {
		m.dst.node.relink(m.to, m.from)
	}
	if m.srcDir != nil || m.dstDir != nil {
		fs.cands.moved()
		fs.orphans.moved(m.pathNow(fs))
	}
	// The kernel may have kept the attributes, which a lock file's observers are
	// not to see (A11).
	if fs.isLockName(m.from.parent, m.from.name) {
		switch {
		case exchange:
			fs.table.FileIs(m.from.parent.dir, m.from.name, fs.inodeOf(&m.dst.st))
			fs.notifyAttr(m.dst.node)
			fs.assume(m.dst.node, m.to)
		case m.fills():
			fs.table.FileIs(m.from.parent.dir, m.from.name, lockstate.Inode{})
		default:
			fs.released(m.from.parent.dir, m.from.name)
		}
	}
	if fs.isLockName(m.to.parent, m.to.name) {
		fs.table.FileIs(m.to.parent.dir, m.to.name, fs.inodeOf(&m.src.st))
		fs.notifyAttr(m.src.node)
		fs.assume(m.src.node, m.from)
	}
	fs.cands.forget(m.from.parent, m.from.name)
	fs.cands.forget(m.to.parent, m.to.name)
}

// pathNow returns what tells the path of a directory, once m is carried out, by the one that
// it had.
func (m *renaming) pathNow(fs *FS) func(dir string) string {
	from, to := join(fs.table.Path(m.from.parent.dir), m.from.name), join(fs.table.Path(m.to.parent.dir), m.to.name)
	return func(dir string) string {
		switch {
		case within(dir, from):
			return to + dir[len(from):]
		case m.exchanges() && within(dir, to):
			return from + dir[len(to):]
		}
		return dir
	}
}

// assume takes note that n has got a lock file's name in place of the one at from. To
// make the kernel ask for all names again costs too much for each rename: it is done
// when the lock file goes (R4).
func (fs *FS) assume(n *node, from link) {
	if n != nil && !fs.isLockName(from.parent, from.name) && !fs.mayBeCandidate(from.name) {
		n.assume()
	}
}
