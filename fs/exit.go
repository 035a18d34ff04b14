package fs

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// watch makes sure that the death of a process is noticed (R4).
func (fs *FS) watch(p *procid.Process) error {
	fs.watchMu.Lock()
	defer fs.watchMu.Unlock()
	return fs.watchLocked(p)
}

func (fs *FS) watchLocked(p *procid.Process) error {
	if fs.watched[p.ID()] != nil {
		return nil
	}
	if err := fs.procs.Watch(p.ID(), fs.exited); err != nil {
		return err
	}
	fs.watched[p.ID()] = p
	return nil
}

// watchLine watches a process that is about to own a lock, and those that the
// lock may pass to: so that it is known later whether they lived (R5).
func (fs *FS) watchLine(p *procid.Process) error {
	fs.watchMu.Lock()
	defer fs.watchMu.Unlock()
	if err := fs.watchLocked(p); err != nil {
		return err
	}
	for i, a := range p.Lineage() {
		if a.Reaper {
			break
		}
		if fs.watched[a.ID] != nil {
			continue
		}
		heir := fs.procs.Process(a.ID)
		if heir == nil { // not to be looked at with locks held
			heir = procid.Recorded(a.ID, p.UID(), p.Lineage()[i+1:])
		}
		if fs.watchLocked(heir) != nil {
			break // out of reach
		}
	}
	return nil
}

// heir returns a process that a lock may pass to, or nil if its own death has
// been carried out.
func (fs *FS) heir(id procid.ID) *procid.Process {
	fs.watchMu.Lock()
	p := fs.watched[id]
	fs.watchMu.Unlock()
	if p != nil {
		return p
	}
	if p = fs.alive(id); p != nil {
		if err := fs.watch(p); err != nil && !errors.Is(err, os.ErrClosed) {
			return nil // its own death would not be noticed
		}
	}
	return p
}

// unwatch stops watching a process that owns nothing any more.
func (fs *FS) unwatch(id procid.ID) {
	fs.watchMu.Lock()
	defer fs.watchMu.Unlock()
	if fs.watched[id] != nil && !fs.table.Owns(id) && len(fs.table.Before(id)) == 0 && !fs.cands.has(id) {
		fs.procs.Unwatch(id)
		delete(fs.watched, id)
	}
}

// exited is told of the death of a watched process.
func (fs *FS) exited(id procid.ID, how procid.Exit) {
	fs.reapMu.Lock()
	defer fs.reapMu.Unlock()
	fs.carryOut(id, how)
	// From here on no lock passes to it; still under reapMu.
	fs.watchMu.Lock()
	delete(fs.watched, id)
	fs.watchMu.Unlock()
}

// reap carries out the death of a process that stands in somebody's way,
// without waiting for the news of it.
func (fs *FS) reap(id procid.ID) {
	fs.reapMu.Lock()
	defer fs.reapMu.Unlock()
	if fs.table.Owns(id) || fs.cands.has(id) {
		fs.carryOut(id, fs.procs.ExitOf(id))
	}
}

// reapOn reaps the dead owners of locks on d.
func (fs *FS) reapOn(d *lockstate.Dir) {
	if fs.table.Len() == 0 {
		return
	}
	for _, l := range fs.table.On(d) {
		if !fs.lives(l) {
			fs.reapLock(l)
		}
	}
}

// reapDead reaps the dead among the owners of some locks and reports whether
// there were any.
func (fs *FS) reapDead(locks []lockstate.LockState) bool {
	found := false
	for _, l := range locks {
		if !fs.lives(l.Lock) {
			fs.reapLock(l.Lock)
			found = true
		}
	}
	return found
}

// carryOut does what R4 and R5 say. The lock files go before the locks, so
// that nobody finds a lock file without its lock.
func (fs *FS) carryOut(id procid.ID, how procid.Exit) {
	if fs.reaping[id] {
		return
	}
	if fs.reaping == nil {
		fs.reaping = make(map[procid.ID]bool)
	}
	fs.reaping[id] = true
	defer delete(fs.reaping, id)
	for _, o := range fs.table.Before(id) {
		if !fs.procs.Alive(o) {
			fs.carryOut(o, fs.procs.ExitOf(o))
		}
	}
	dead, heirs := fs.table.Exit(id, how, fs.heir)
	for _, h := range heirs {
		fs.narrowOwned(h)
	}
	if len(heirs) > 0 {
		fs.callHolders()
	}
	log := newBurst(fs.log)
	defer log.done()
	members := make(map[lockstate.Scope]member)
	var later []uint64
	for _, l := range dead {
		if l.Scope.Kind != lockstate.ProcessScope {
			m, known := members[l.Scope]
			if !known {
				m.proc, m.busy = fs.member(l.Scope)
				members[l.Scope] = m
			}
			if m.proc != nil && fs.represent(l, m.proc) {
				continue
			}
			if m.proc == nil && m.busy {
				later = append(later, l.Token)
				continue
			}
		}
		if l.Sealed {
			continue // what it left is being cleared away
		}
		policy := fs.table.Policy(l)
		clears := (l.Crashed || crashed(how)) && policy != lockstate.Keep
		if clears && !fs.awaitClosed(l) {
			continue
		}
		fs.endKeys(l)
		fs.reapWithin(l, fs.carryOutOf)
		if err := fs.cleanUp(l); err != nil {
			log.tell(slog.LevelWarn, "cannot clean up after a dead process", "dir", l.Path, "err", err)
		}
		if clears && fs.clear(l, policy, lockstate.Ending{Reason: lockstate.Exited, Why: crashText(how)}, clearing{log: log}) {
			continue
		}
		fs.table.End(l.Token, lockstate.Exited)
		fs.logReleased(l, lockstate.Exited)
	}
	if len(later) > 0 {
		fs.representLater(id, how, later)
	}
	fs.cands.reap(fs, id)
}

// A member is who may stand for a scope that owns locks; busy: those that are left
// can't be looked at now.
type member struct {
	proc *procid.Process
	busy bool
}

// represent has p stand for the scope that owns a lock (H3), and reports false if
// that lock is no more.
func (fs *FS) represent(l lockstate.Lock, p *procid.Process) bool {
	ended, ok := fs.table.Represent(l.Token, p)
	if !ok {
		return false
	}
	if ended != nil {
		fs.logReleased(*ended, lockstate.Unlocked)
		return true
	}
	if err := fs.watch(p); err != nil {
		fs.log.Warn("the end of a lock's scope may be noticed late", "dir", l.Path, "pid", p.ID().Pid, "err", err)
	}
	return true
}

// unrepresented are locks of scopes whose members are all in execve(2), so that
// nobody can be told to stand for them.
type unrepresented struct {
	tokens sync.Map               // their tokens
	owners map[procid.ID][]uint64 // the same by the dead owner; protected by FS.reapMu
	over   bool                   // likewise: nobody looks again
}

// representTime is how soon the members are looked at again.
const representTime = 100 * time.Millisecond

// representLater leaves locks to their dead owner for a while. The caller holds
// FS.reapMu.
func (fs *FS) representLater(id procid.ID, how procid.Exit, tokens []uint64) {
	u := &fs.unrepresented
	for _, t := range tokens {
		u.tokens.Store(t, nil)
	}
	old, known := u.owners[id]
	for _, t := range old {
		if !slices.Contains(tokens, t) {
			u.tokens.Delete(t)
		}
	}
	if u.owners == nil {
		u.owners = make(map[procid.ID][]uint64)
	}
	if u.owners[id] = tokens; known || u.over {
		return
	}
	time.AfterFunc(representTime, func() {
		fs.reapMu.Lock()
		defer fs.reapMu.Unlock()
		for _, t := range u.owners[id] {
			u.tokens.Delete(t)
		}
		delete(u.owners, id)
		if !u.over && fs.table.Owns(id) {
			fs.carryOut(id, how)
		}
	})
}

// stopRepresenting ends that, and waits for what is under way.
func (fs *FS) stopRepresenting() {
	fs.reapMu.Lock()
	defer fs.reapMu.Unlock()
	fs.unrepresented.over = true
}

// alive returns the process with an identity, or nil if it is dead. One that
// can't be looked at lives.
func (fs *FS) alive(id procid.ID) *procid.Process {
	p, err := fs.procs.ByPid(id.Pid)
	if errors.Is(err, procid.ErrBusy) || errors.Is(err, os.ErrClosed) {
		return procid.Recorded(id, 0, nil)
	}
	switch {
	case !fs.procs.Alive(id):
		return nil
	case err != nil || p.ID() != id:
		return procid.Recorded(id, 0, nil)
	}
	return p
}

// cleanUp removes the lock files of a lock that is about to end.
func (fs *FS) cleanUp(l lockstate.Lock) error {
	var first error
	for _, name := range l.Files {
		id, err := fs.discardOf(l.Token, name, nil, func() (string, bool) {
			now, ok := fs.table.Lock(l.Token)
			return now.Path, ok && slices.Contains(now.Files, name)
		})
		if err != nil {
			fs.orphans.add(orphanAt{l.Path, name})
		}
		if err != nil && !errors.Is(err, errNotLockDir) && !errors.Is(err, errLockDirUsed) {
			fs.leftovers.add(fs, l.Path, name, id)
		}
		if err != nil && first == nil {
			first = fmt.Errorf("lock file %s: %w", name, err)
		}
	}
	return first
}

// discard removes an entry of the backing on the daemon's own account, and
// tells the kernel. place says where it is and whether it is still the one;
// until the entry is gone, nobody else changes a name.
func (fs *FS) discard(name string, place func() (dir string, ok bool)) error {
	_, err := fs.discardOne(name, nil, place)
	return err
}

// discardOne is discard of a certain file, if only is not nil, and returns which
// one could not be removed.
func (fs *FS) discardOne(name string, only *identity, place func() (dir string, ok bool)) (identity, error) {
	return fs.discardOf(0, name, only, place)
}

// discardOf is discardOne of the lock file of a lock, 0 for none.
func (fs *FS) discardOf(token uint64, name string, only *identity, place func() (dir string, ok bool)) (identity, error) {
	parent, assumed, id, err := fs.discardEntry(token, name, only, place)
	if parent != nil {
		fs.notifyDir(parent)
	}
	if assumed && fs.kernel != nil {
		fs.kernel.ForgetNames() // R4: nobody is to see it any more
	}
	return id, err
}

// discardEntry is discardOf without telling the kernel. assumed: it has to be told of the
// name, too.
func (fs *FS) discardEntry(token uint64, name string, only *identity, place func() (dir string, ok bool)) (parent *node, assumed bool, id identity, err error) {
	fs.lockNames()
	defer fs.ns.Unlock()
	dir, ok := place()
	if !ok {
		return nil, false, id, nil
	}
	fd, parent, err := fs.openKnown(dir)
	if err != nil {
		return nil, false, id, err
	}
	defer unix.Close(fd)
	v, err := fs.take(fd, name, true)
	if err == unix.ENOENT {
		return parent, false, id, nil
	}
	if err != nil {
		return parent, false, id, err
	}
	id = fs.identityOf(&v.st)
	if only != nil {
		err = only.mayRemove(fs, dir, &v.st)
	}
	isDir := uint32(v.st.Mode)&unix.S_IFMT == unix.S_IFDIR
	if err == nil && isDir {
		err = fs.lockDirUsed(fd, dir, name, token)
	}
	if err == nil {
		err = fs.removeLockEntry(fd, name)
	}
	if err == nil && isDir {
		d := fs.table.At(split(join(dir, name))...)
		fs.table.Remove(d) // R3
		fs.table.Forget(d)
	}
	if err != nil || parent == nil {
		v.spared()
		return parent, false, id, err
	}
	assumed = v.node != nil && v.node.isAssumed()
	fs.lostUntold(v, link{parent, name})
	return parent, assumed, id, nil
}

// openKnown opens a directory of the backing and returns its node as well, if it
// has one. The caller holds FS.ns.
func (fs *FS) openKnown(dir string) (fd int, n *node, err error) {
	if fd, err = fs.openPath(dir); err != nil {
		return -1, nil, err
	}
	var st unix.Statx_t
	if err = statAt(fd, "", &st); err != nil {
		unix.Close(fd)
		return -1, nil, err
	}
	return fd, fs.nodes.find(fs.identityOf(&st)), nil
}

// What a lock directory holds at the most, as that of a MkdirLockFile does: a
// few files. More is content, which is never removed.
const (
	lockDirEntries = 256
	lockDirDepth   = 4
)

// errNotLockDir: what was made under the name of a lock file is no lock file.
var errNotLockDir = errors.New("holds more than a lock directory does; left alone")

// removeLockEntry removes a lock file, or a lock directory with what is in it. The
// caller holds FS.ns alone.
func (fs *FS) removeLockEntry(dir int, name string) error {
	err := fs.back.unlink(dir, name, 0)
	if err != unix.EISDIR && err != unix.EPERM {
		return err
	}
	left := lockDirEntries
	if !smallTree(dir, name, lockDirDepth, &left) {
		return errNotLockDir
	}
	return fs.removeTree(dir, name, nil)
}

func smallTree(dir int, name string, depth int, left *int) bool {
	fd, err := openHere(dir, name)
	if err != nil || depth == 0 {
		if err == nil {
			unix.Close(fd)
		}
		return false
	}
	defer unix.Close(fd)
	small := true
	err = eachEntry(fd, func(e dirEntry) bool {
		*left--
		small = *left >= 0 && (e.typ != unix.DT_DIR || smallTree(fd, e.name, depth-1, left))
		return small
	})
	return err == nil && small
}
