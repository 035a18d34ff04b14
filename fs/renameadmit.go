package fs

import (
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// tableDirs finds what the table calls the directories that m moves.
func (fs *FS) tableDirs(m *renaming) (forget func()) {
	m.srcDir = fs.tableDir(m.src, m.from)
	m.dstDir = fs.tableDir(m.dst, m.to)
	return func() {
		for _, d := range []*lockstate.Dir{m.srcDir, m.dstDir} {
			if d != nil {
				fs.table.Forget(d)
			}
		}
	}
}

// tableDir returns what the table calls the directory at l, with a new reference; nil if
// that is none. It may have another name there, where those that differ in case alone are
// the same directory's.
func (fs *FS) tableDir(v *victim, l link) *lockstate.Dir {
	switch {
	case v == nil || !isDirectory(&v.st):
		return nil
	case v.node != nil && v.node.isDir() && v.node.isIn(l.parent) && !fs.table.IsGone(v.node.dir):
		return fs.table.Again(v.node.dir)
	}
	return fs.table.Dir(l.parent.dir, l.name)
}

// admitRename passes the gate for both sides of m. Onto the name of a lock file
// it acquires first, since the other checks are about what that lock covers.
func (fs *FS) admitRename(m *renaming) (finish func(bool) bool, err error) {
	var ops []*lockstate.Op
	var finishes []func(bool) bool
	finish = func(made bool) bool {
		endAll(ops)
		ok := true
		for _, f := range finishes {
			ok = f(made) && ok
		}
		return ok
	}
	if fs.isLockName(m.to.parent, m.to.name) {
		m.r.errno = fuse.Status(unix.EEXIST) // A8
	}
	for _, l := range fs.ontoLockNames(m) {
		_, f, err := fs.admitLock(m.r, lockstate.Request{
			Dir: l.parent.dir, Inode: l.parent.key().inode(), Kind: lockstate.Explicit, Protocol: "rename", File: l.name,
		}, nil)
		if err != nil {
			finish(false)
			return nil, err
		}
		finishes = append(finishes, f)
	}
	if ops, err = fs.admitMoves(m); err != nil {
		finish(false)
		return nil, err
	}
	return finish, nil
}

// ontoLockNames returns where m puts something under a lock file's name (A3). Where
// that takes a lock file's place the lock goes on, whoever of its holders does it: a
// second one, of a child, would take the file along (R4), or outlive it (R1). One that
// is gone already, since its lock is about to end, has no place.
func (fs *FS) ontoLockNames(m *renaming) (onto []link) {
	if m.fills() && fs.isLockName(m.from.parent, m.from.name) && !fs.keeps(m.from) {
		onto = append(onto, m.from)
	}
	if fs.isLockName(m.to.parent, m.to.name) && (m.dst == nil || !fs.keeps(m.to)) {
		onto = append(onto, m.to)
	}
	return onto
}

// admitMoves passes the gate for what moves one way, and for what goes or moves
// the other way.
func (fs *FS) admitMoves(m *renaming) (ops []*lockstate.Op, err error) {
	dirs := []*lockstate.Dir{m.from.parent.dir, m.to.parent.dir}
	quiet, loud := fs.isQuiet(m)
	there := lockstate.Change{Dirs: dirs, Quiet: quiet, Loud: loud, Into: m.to.parent.dir, From: dirs[:1], Named: m.srcDir}
	if err := fs.entering(&there, m.src, m.srcDir, m.from); err != nil {
		return nil, err
	}
	op, err := m.r.admit(there)
	if err != nil || m.dst == nil {
		return []*lockstate.Op{op}, err
	}
	back := lockstate.Change{Dirs: dirs, Quiet: quiet, Loud: loud}
	if m.exchanges() {
		back.Into, back.From = m.from.parent.dir, dirs[1:]
	}
	if err = fs.entering(&back, m.dst, m.dstDir, m.to); err == nil {
		var other *lockstate.Op
		if other, err = m.r.admit(back); err == nil {
			return []*lockstate.Op{op, other}, nil
		}
	}
	op.End()
	return nil, err
}

// isQuiet reports whether m is about a lock file, which is no content (R5). If it is not
// called so at one end, and that is in another directory, it is content there: loud.
func (fs *FS) isQuiet(m *renaming) (quiet bool, loud *lockstate.Dir) {
	from, to := fs.isLockName(m.from.parent, m.from.name), fs.isLockName(m.to.parent, m.to.name)
	switch {
	case m.from.parent == m.to.parent || from == to:
	case from:
		loud = m.to.parent.dir
	default:
		loud = m.from.parent.dir
	}
	return from || to, loud
}

// entering tells the table what moves, and what others can write of it.
func (fs *FS) entering(c *lockstate.Change, v *victim, dir *lockstate.Dir, at link) error {
	if dir == nil {
		if v.node != nil {
			c.Files = v.node.writers()
		}
		return nil
	}
	c.Trees, c.EnteringTree = []*lockstate.Dir{dir}, dir
	if c.Into == nil {
		return nil
	}
	if _, locked := fs.table.Governing(c.Into); !locked {
		return nil
	}
	return fs.aliasWriter(join(fs.table.Path(at.parent.dir), at.name), func(p *procid.Process) bool {
		return fs.table.HoldsAll(p, c.Into)
	})
}

// noteEntering tells the table what is about to come into a directory (R7).
func (fs *FS) noteEntering(m *renaming) {
	if m.from.parent == m.to.parent {
		return
	}
	enters := func(v *victim, to, from link) {
		// A lock file is no content (R5), but may be called otherwise later.
		quiet := fs.isLockName(to.parent, to.name)
		if quiet || fs.table.Tracks() {
			fs.table.Entered(to.parent.dir, fs.fileID(&v.st), from.parent.dir, from.parent.lineage(), quiet)
		}
	}
	enters(m.src, m.to, m.from)
	if m.exchanges() {
		enters(m.dst, m.from, m.to)
	}
}
