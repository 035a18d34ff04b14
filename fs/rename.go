package fs

import (
	"errors"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// renaming is one rename(2) on its way.
type renaming struct {
	r        *request
	from, to link
	flags    uint

	// alone: it has FS.ns alone. What is renamed otherwise is a file, with no name that is
	// special at either end.
	alone, needsAlone bool
	done              bool // the backing has carried it out, for good

	src, dst       *victim        // dst is nil where there was nothing, which is no exchange
	srcDir, dstDir *lockstate.Dir // of directories
}

// Rename is renameat2(2), with every flag. It carries locks along (R3);
// renaming a lock file away ends its lock (R1), unless something else is called
// so afterwards; renaming onto its name is an acquisition (A3), unless it takes the
// place of one that keeps a lock.
func (fs *FS) Rename(cancel <-chan struct{}, in *fuse.RenameIn, oldName, newName string) fuse.Status {
	from, to := fs.nodes.get(in.NodeId), fs.nodes.get(in.Newdir)
	if from == nil || to == nil || fs.reserved(from, oldName) || fs.reserved(to, newName) {
		return notInControl
	}
	m := &renaming{
		r:    &request{fs: fs, cancel: cancel, header: &in.InHeader, op: "rename", parent: from, name: oldName},
		from: link{from, oldName}, to: link{to, newName}, flags: uint(in.Flags),
	}
	m.alone = m.flags&^unix.RENAME_NOREPLACE != 0 || fs.isSpecial(m.from) || fs.isSpecial(m.to)
	if c := fs.cands.get(fs, &in.InHeader, from, oldName); c != nil {
		return fs.renameCandidate(m, c)
	}
	if fs.namedStale(&in.InHeader, fs.isLockName(from, oldName) || fs.isLockName(to, newName), newName, from, to) {
		return fuse.Status(unix.ESTALE)
	}
	try := func() error { return fs.rename(m) }
	status := fs.attempt(m.r, m.alone, try)
	if !m.alone && m.needsAlone {
		m.alone = true
		status = fs.attempt(m.r, true, try)
	}
	if status != fuse.OK {
		return status
	}
	if m.src.node != nil && fs.isLockName(to, newName) {
		fs.lookedUpByName(m.src.node)
	}
	if m.srcDir != nil || m.dstDir != nil {
		fs.callHolders()
	}
	if fs.table.Leased() && fs.isLockName(to, newName) {
		fs.table.Touch(to.dir, m.r.process()) // L2
	}
	return status
}

// isSpecial reports whether an entry of that name is, or may be, a lock file or a candidate.
func (fs *FS) isSpecial(l link) bool {
	return fs.isLockName(l.parent, l.name) || fs.mayBeCandidate(l.name)
}

// errAlone ends the try of a rename that needs FS.ns alone.
var errAlone = errors.New("names have to stand still")

func (fs *FS) rename(m *renaming) error {
	if m.alone {
		fs.renames.Add(1)
		defer fs.renames.Add(1)
	}
	fromDir, err := fs.back.dir(m.from.parent)
	if err != nil {
		return err
	}
	defer fromDir.release()
	toDir, err := fs.back.dir(m.to.parent)
	if err != nil {
		return err
	}
	defer toDir.release()

	if m.src, err = fs.take(fromDir.fd, m.from.name, false); err != nil {
		return err
	}
	if m.needsAlone = !m.alone && !m.src.isFileAt(m.from); m.needsAlone {
		return errAlone
	}
	m.dst, err = fs.take(toDir.fd, m.to.name, !m.exchanges())
	if err != nil && (m.exchanges() || err != unix.ENOENT) {
		return err // rename(2): what is exchanged has to be there, and may be gone since the kernel looked
	}
	defer func() {
		if !m.done {
			m.dst.spared()
		}
	}()
	if m.dst != nil && m.dst.fd < 0 {
		fs.underWay.losing.Add(1)
		defer fs.underWay.losing.Add(-1)
	}
	if m.alone {
		return fs.renameAlone(m, fromDir.fd, toDir.fd)
	}
	if m.needsAlone = m.dst != nil && (!m.dst.isFileAt(m.to) || m.dst.node == m.src.node); m.needsAlone {
		return errAlone
	}
	return fs.renamePlain(m, fromDir.fd, toDir.fd)
}

// isFileAt reports whether v is no directory, and known to have that name.
func (v *victim) isFileAt(l link) bool {
	return !isDirectory(&v.st) && v.node != nil && v.node.has(l)
}

// renamePlain renames a file beside all that others do. The kernel keeps out who would
// change names in either directory, or the files themselves, by whatever name. What it does
// not know of, as one by another name that nobody has looked up, is kept out by the locks
// of both; and who only looks at a file finds it all the same (leaving.go).
func (fs *FS) renamePlain(m *renaming, from, to int) error {
	m.r.changeAlone(m.src.node, m.dst)
	token := fs.table.LastToken() // before, since who acquires waits for this afterwards
	ops, err := fs.admitMoves(m)
	if err != nil {
		return err
	}
	defer endAll(ops)
	if err := m.awaited(fs); err != nil {
		return err
	}
	fs.noteEntering(m) // before: a daemon that dies in between lost nothing
	defer fs.reheat(m)()
	for _, l := range [...]link{m.from, m.to} {
		leaving := &l.parent.more.Load().leaving
		leaving.Add(1)
		defer leaving.Add(-1)
	}
	err = fs.callerSpends(m.r.header, entrySize, func() error {
		return unix.Renameat2(from, m.from.name, to, m.to.name, m.flags)
	})
	if err != nil {
		return err
	}
	fs.renameUnderWay(m, token)
	m.done = true
	fs.renamed(m) // while it is under way: who acquires finds the files where they are (W3)
	return nil
}

// changeAlone takes the locks of two files, or one, in the order in which everybody does.
func (r *request) changeAlone(n *node, also *victim) {
	both := [2]*node{n}
	if also != nil {
		if both[1] = also.node; both[1].id < n.id {
			both[0], both[1] = both[1], n
		}
	}
	for _, n := range both {
		if n != nil {
			r.fs.nodes.changing.take(n, true)
			r.changing[0], r.changing[1] = n, r.changing[0]
		}
	}
}

func endAll(ops []*lockstate.Op) {
	for _, op := range ops {
		op.End()
	}
}

// renameAlone renames anything. Everything beneath a directory changes its path, so that
// nothing else may be under way: an acquisition beneath, for instance (W3). The caller has
// FS.ns alone.
func (fs *FS) renameAlone(m *renaming, from, to int) error {
	defer fs.tableDirs(m)()

	finish, err := fs.admitRename(m)
	if err != nil {
		return err
	}
	if err = m.awaited(fs); err != nil {
		finish(false)
		return err
	}
	fs.moving(m, false)
	fs.noteEntering(m) // before: a daemon that dies in between lost nothing
	defer fs.reheat(m)()
	move := func() error {
		return unix.Renameat2(from, m.from.name, to, m.to.name, m.flags)
	}
	if m.flags&unix.RENAME_WHITEOUT != 0 {
		err = fs.asCaller(m.r.header, move) // the whiteout is new, and the caller's
	} else {
		err = fs.callerSpends(m.r.header, entrySize, move)
	}
	if err == nil {
		fs.renameUnderWay(m, fs.table.LastToken())
	}
	ok := finish(err == nil)
	if err == nil && !ok && m.dst == nil && !m.fills() &&
		unix.Renameat2(to, m.to.name, from, m.from.name, unix.RENAME_NOREPLACE) == nil {
		err = lockstate.ErrEnded // the lock was lost meanwhile: nothing was renamed
	}
	if err != nil {
		fs.moving(m, true)
		return err
	}
	m.done = true
	fs.renamed(m)
	if !ok {
		return lockstate.ErrEnded
	}
	return nil
}

// awaited returns an atWorkError if one of the files has to be waited for: only who may
// rename them does (W2).
func (m *renaming) awaited(fs *FS) error {
	err := m.r.awaits.check(fs, m.src.node)
	if err == nil && m.dst != nil {
		err = m.r.awaits.check(fs, m.dst.node)
	}
	return err
}

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

// exchanges reports whether m swaps two entries.
func (m *renaming) exchanges() bool { return m.flags&unix.RENAME_EXCHANGE != 0 }

// fills reports whether something else takes the name that m takes from its source.
func (m *renaming) fills() bool { return m.flags&(unix.RENAME_EXCHANGE|unix.RENAME_WHITEOUT) != 0 }

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
