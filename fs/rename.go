package fs

import (
	"errors"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
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

// exchanges reports whether m swaps two entries.
func (m *renaming) exchanges() bool { return m.flags&unix.RENAME_EXCHANGE != 0 }

// fills reports whether something else takes the name that m takes from its source.
func (m *renaming) fills() bool { return m.flags&(unix.RENAME_EXCHANGE|unix.RENAME_WHITEOUT) != 0 }

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
	fs.takingName(m.to)
	if m.fills() {
		fs.takingName(m.from)
	}
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
