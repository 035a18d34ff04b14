package fs

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// crashed reports whether an owner ended in a way that leaves its content in
// doubt (R7). What is not known passes for a success, as with R5.
func crashed(how procid.Exit) bool { return how.Known && !how.Success() }

// crashText tells how a process crashed, or "".
func crashText(how procid.Exit) string {
	switch {
	case !crashed(how):
		return ""
	case how.Signal != 0:
		return "signal " + strconv.Itoa(how.Signal)
	}
	return "status " + strconv.Itoa(how.Code)
}

// clear does with the content of a lock what its policy says, and then ends the
// lock. It reports false if there is nothing to do or it cannot be done: then
// the content is kept, and the caller ends the lock. Until the lock has ended
// nobody holds the directory. The lock files are gone already.
//
// What can be moved aside in one step is; other trees are swept in the
// background, unless c says to wait.
func (fs *FS) clear(l lockstate.Lock, policy string, how lockstate.Ending, c clearing) bool {
	if policy == lockstate.Keep || l.Kind == lockstate.Shared || fs.opts.Observe {
		return false
	}
	spoils, ok := fs.table.Seal(l.Token)
	if !ok {
		return true // somebody else does it
	}
	if c.all {
		spoils.All()
	}
	if c.log == nil {
		c.log = newBurst(fs.log)
		defer c.log.done()
	}
	if spoils.InUse {
		c.log.tell(slog.LevelInfo, "content is kept: somebody else holds the directory", "dir", l.Path, "token", l.Token, "policy", policy)
		return false
	}
	if spoils.Unknown {
		c.log.tell(slog.LevelWarn, "content is kept: what was made under the lock is not known", "dir", l.Path, "token", l.Token, "policy", policy)
		return false
	}
	c.fs, c.spoils, c.policy, c.how = fs, spoils, policy, how
	if spoils.Whole() {
		return c.finish(c.moveWhole())
	}
	if c.wait {
		return c.finish(c.sweep())
	}
	c.log.use()
	fs.clearings.Go(func() {
		defer c.log.done()
		if !c.finish(c.sweep()) {
			fs.table.EndAs(l.Token, how)
		}
	})
	return true
}

// A clearing is what is done with the content of one lock.
type clearing struct {
	fs     *FS
	spoils lockstate.Spoils
	policy string
	how    lockstate.Ending
	log    *burst // nil: of this one alone
	wait   bool   // somebody waits for it
	all    bool   // the holder says: the whole directory

	gone []*node // directories that were moved aside

	dir   int    // the hidden directory of this clearing
	where string // trashDir or quarantineDir, which it is in
	name  string
	about *os.File // that is to be written to the disk yet; nil: it need not be
	moved int
}

// finish tells how it went. What could not be moved is still there.
func (c *clearing) finish(err error) bool {
	l := c.spoils.Lock
	if err != nil {
		c.log.tell(slog.LevelError, "content is kept, all or in part", "dir", l.Path, "token", l.Token, "policy", c.policy, "err", err)
	}
	if err == nil || c.moved > 0 {
		c.fs.table.Cleared(l, c.policy)
		c.log.tell(slog.LevelInfo, "content cleared", "dir", l.Path, "token", l.Token, "policy", c.policy, "reason", c.how.Reason, "moved", c.moved)
	}
	c.tellKernel()
	if c.policy == lockstate.Destroy && c.moved > 0 {
		c.fs.clearings.Go(c.fs.emptyTrash)
	}
	if err != nil {
		return false
	}
	c.fs.table.EndAs(l.Token, c.how)
	c.fs.logReleased(l, c.how.Reason)
	return true
}

// tellKernel makes what was moved aside disappear.
func (c *clearing) tellKernel() {
	for i, n := range c.gone {
		c.fs.notifyAttr(n)
		if i == 0 {
			c.fs.notifyNames(n)
		}
	}
	c.gone = nil
}

// open makes the place that the content goes to.
func (c *clearing) open() error {
	c.where = trashDir
	if c.policy == lockstate.Quarantine {
		c.where = quarantineDir
	}
	if err := c.openIn(); err != nil || c.where != quarantineDir {
		return err
	}
	err := c.describe()
	if err != nil {
		c.close()
		c.abandon()
	}
	return err
}

func (c *clearing) openIn() error {
	fs := c.fs
	fs.hiddenMu.Lock()
	defer fs.hiddenMu.Unlock()
	fd, err := fs.openHidden(c.where, true)
	if err == nil {
		c.name, c.dir, err = newHidden(fd, c.spoils.Lock.Token)
		unix.Close(fd)
	}
	if err != nil {
		fs.tidyHidden()
		return err
	}
	if fs.filling == nil {
		fs.filling = make(map[string]bool)
	}
	fs.filling[c.where+"/"+c.name] = true
	return nil
}

// aboutFile describes what is in quarantine, beside it.
const (
	aboutFile   = "about.json"
	contentName = "content"
)

// aboutAttr has the same as aboutFile. The owner's lock is to end at once (R4), so
// nobody can wait for the disk to have the file; but a journal has an attribute
// that was set before the content was moved, if it has the move.
const aboutAttr = "user.stagefs.about"

// describe writes down what is about to be put in quarantine, before it is.
func (c *clearing) describe() error {
	l := c.spoils.Lock
	about := lockstate.Quarantined{
		Dir: lockstate.Bytes(l.Path), Token: l.Token, Pid: l.Owner.Pid, UID: l.UID, Client: l.Client,
		Reason: string(c.how.Reason), Why: c.how.Why, Time: time.Now().UTC(),
	}
	data, err := json.Marshal(about)
	if err != nil {
		return err
	}
	fd, err := openAt(c.dir, aboutFile, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), aboutFile)
	_, err = f.Write(append(data, '\n'))
	if err == nil && unix.Fsetxattr(c.dir, aboutAttr, data, 0) != nil {
		c.about = f // the best that can be had here
		return nil
	}
	return errors.Join(err, f.Close())
}

// close lets go of the place that the content went to.
func (c *clearing) close() {
	c.fs.hiddenMu.Lock()
	delete(c.fs.filling, c.where+"/"+c.name)
	c.fs.hiddenMu.Unlock()
	dir, about := c.dir, c.about
	c.about = nil
	if about == nil {
		unix.Close(dir)
		return
	}
	c.fs.clearings.Go(func() {
		err := errors.Join(about.Sync(), about.Close(), ignoringEINTR(func() error { return unix.Fsync(dir) }))
		unix.Close(dir)
		if err != nil {
			c.fs.log.Warn("the description of what is in quarantine may not outlive a power cut", "id", c.name, "err", err)
		}
	})
}

// moveWhole moves the directory itself aside.
func (c *clearing) moveWhole() error {
	if err := c.open(); err != nil {
		return err
	}
	defer c.close()
	fs := c.fs
	var node *node
	err := fs.locked(true, func() (err error) {
		now, ok := fs.table.Lock(c.spoils.Lock.Token)
		if !ok {
			return nil
		}
		parent, name := cutLast(now.Path)
		if node, err = c.move(parent, name, c.dir, contentName, nil); err != nil {
			return err
		}
		fs.back.dirs.dropAdrift()
		fs.table.EndAs(now.Token, c.how)
		fs.forgetPlace(now.Path)
		return nil
	})
	c.abandon() // unless it was moved
	if node != nil {
		fs.notifyDir(node)
	}
	return err
}

// abandon removes the place for what was not moved.
func (c *clearing) abandon() {
	fs := c.fs
	if c.moved > 0 {
		return
	}
	fs.hiddenMu.Lock()
	defer fs.hiddenMu.Unlock()
	fd, err := fs.openHidden(c.where, false)
	if err == nil {
		err = removeEmpty(fd, c.name)
		unix.Close(fd)
	}
	if err != nil {
		fs.log.Warn("cannot remove what was to take the content", "where", c.where, "id", c.name, "err", err)
	}
	fs.tidyHidden()
}

// move moves an entry aside, if it is still the one that was found, and returns
// the node of the directory that it was in. The caller holds FS.ns alone.
func (c *clearing) move(dir, name string, to int, as string, found *lockstate.FileID) (parent *node, err error) {
	fs := c.fs
	fd, parent, err := fs.openKnown(dir)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	// Who is inside has lost the place: it is nobody's to write any more.
	v, err := fs.take(fd, name, false)
	if err != nil {
		return parent, err
	}
	if found != nil && fs.fileID(&v.st) != *found {
		return parent, unix.ENOENT
	}
	defer fs.reheatAside(join(dir, name), v)()
	if err := fs.back.move(fd, name, to, as); err != nil {
		return parent, err
	}
	c.moved++
	if parent != nil {
		fs.lostUntold(v, link{parent, name})
	}
	if v.node != nil {
		c.gone = append(c.gone, v.node)
	}
	return parent, nil
}

// A swept is something to be moved aside: a path relative to the directory, and
// what was found there.
type swept struct {
	path string
	id   lockstate.FileID
}

// errBrokenOff: the lock has ended; what is there now is not its owner's.
var errBrokenOff = errors.New("the lock was broken meanwhile")

// sweep moves aside what was made under the lock, and nothing else.
func (c *clearing) sweep() error {
	now, ok := c.fs.table.Lock(c.spoils.Lock.Token)
	if !ok {
		return errBrokenOff
	}
	all, moves, err := c.scan(now.Path)
	if err != nil {
		return err
	}
	if all && c.spoils.Fresh {
		return c.moveWhole()
	}
	if len(moves) == 0 {
		return nil
	}
	if err := c.open(); err != nil {
		return err
	}
	defer c.close()
	// Others are let in between the batches: nobody holds the directory.
	for batch := range slices.Chunk(moves, 64) {
		if err := c.moveBatch(now.Path, batch); err != nil {
			return err
		}
	}
	return nil
}

func (c *clearing) moveBatch(from string, batch []swept) error {
	touched := make(map[*node]bool)
	defer func() {
		for n := range touched {
			c.fs.notifyDir(n)
		}
	}()
	c.fs.lockNames()
	defer c.fs.ns.Unlock()
	defer c.fs.back.dirs.dropAdrift()
	if now, ok := c.fs.table.Lock(c.spoils.Lock.Token); !ok || now.Path != from {
		return errBrokenOff
	}
	for _, s := range batch {
		dir, name := cutLast(s.path)
		to, err := c.counterpart(from, dir)
		if err != nil {
			return err
		}
		parent, err := c.move(join(from, dir), name, to, name, &s.id)
		unix.Close(to)
		if parent != nil {
			touched[parent] = true
		}
		if err != nil && err != unix.ENOENT {
			return fmt.Errorf("%s: %w", join(from, s.path), err)
		}
		if err == nil {
			c.fs.forgetPlace(join(from, s.path))
		}
	}
	return nil
}

// forgetPlace tells the table that what it knows of an entry that was put aside, if
// that was a directory, is of none any more: another one may come there.
func (fs *FS) forgetPlace(path string) {
	if d, ok := fs.table.Find(split(path)...); ok {
		fs.table.Remove(d)
		fs.table.Forget(d)
	}
}

// counterpart opens the directory, of those put aside, that stands for dir: made
// with the rights of the one that stays.
func (c *clearing) counterpart(from, dir string) (int, error) {
	at, err := unix.FcntlInt(uintptr(c.dir), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return -1, err
	}
	path := from
	for i, name := range append([]string{contentName}, split(dir)...) {
		if i > 0 {
			path = join(path, name)
		}
		if err := unix.Mkdirat(at, name, 0o700); err == nil {
			err = c.likeOriginal(at, name, path)
			if err != nil {
				unix.Close(at)
				return -1, err
			}
		} else if err != unix.EEXIST {
			unix.Close(at)
			return -1, err
		}
		next, err := openAt(at, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		unix.Close(at)
		if err != nil {
			return -1, err
		}
		at = next
	}
	return at, nil
}

func (c *clearing) likeOriginal(at int, name, original string) error {
	fd, err := c.fs.openPath(original)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Statx_t
	if err := statAt(fd, "", &st); err != nil {
		return err
	}
	if err := unix.Fchownat(at, name, int(st.Uid), int(st.Gid), unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	return unix.Fchmodat(at, name, uint32(st.Mode)&0o7777, 0)
}

// scan returns what in a directory was made under the lock, as few paths
// relative to it as possible, and whether that is all. Directories that others
// hold are none of it.
func (c *clearing) scan(dir string) (all bool, moves []swept, err error) {
	dirs, moves, all, err := c.scanEntries(dir)
	if err != nil {
		return false, nil, err
	}
	for name, found := range dirs {
		made := c.spoils.Made(found)
		_, other := slices.BinarySearch(c.spoils.Others, join(dir, name))
		if other || c.spoils.Fresh && !made { // came from elsewhere, with all that is in it
			all = false
			continue
		}
		whole, below, err := c.scan(join(dir, name))
		if errors.Is(err, unix.ENOENT) { // who holds what is in it has removed it
			all = false
			continue
		}
		if err != nil {
			return false, nil, err
		}
		if whole && made {
			moves = append(moves, swept{name, found})
			continue
		}
		all = false
		for _, s := range below {
			moves = append(moves, swept{join(name, s.path), s.id})
		}
	}
	return all, moves, nil
}

// scanEntries looks at the entries of one directory: it tells its directories,
// and which other entries were made under the lock.
func (c *clearing) scanEntries(dir string) (dirs map[string]lockstate.FileID, made []swept, all bool, err error) {
	// Others are let in between the directories: the tree may be a big one. What
	// they change meanwhile is not moved.
	c.fs.ns.RLock()
	defer c.fs.ns.RUnlock()
	fd, err := c.fs.openPath(dir)
	if err != nil {
		return nil, nil, false, err
	}
	defer unix.Close(fd)
	dirs, all = make(map[string]lockstate.FileID), true
	bad := eachEntry(fd, func(e dirEntry) bool {
		var st unix.Statx_t
		if err = statAt(fd, e.name, &st); err == unix.ENOENT {
			all, err = false, nil
			return true
		}
		if err != nil {
			return false
		}
		id := c.fs.fileID(&st)
		switch {
		case uint32(st.Mode)&unix.S_IFMT == unix.S_IFDIR:
			dirs[e.name] = id
		case c.spoils.Made(id):
			made = append(made, swept{e.name, id})
		default:
			all = false
		}
		return true
	})
	return dirs, made, all, errors.Join(err, bad)
}

func (fs *FS) fileID(st *unix.Statx_t) lockstate.FileID {
	id := fs.identityOf(st)
	return lockstate.FileID{Dev: uint64(id.dev), Ino: id.ino, Birth: id.birth}
}

// cutLast splits a path of the table before its last name.
func cutLast(path string) (dir, name string) {
	for i := len(path) - 1; i >= 0; i-- {
		if path[i] == '/' {
			return path[:i], path[i+1:]
		}
	}
	return ".", path
}

// notePresence tells the table what was made in a directory.
func (fs *FS) notePresence(m *making) {
	if m.node == nil || len(m.linked) > 0 {
		return // a private file, or noted by noteLinking
	}
	id := fs.fileID(&m.st)
	if len(m.covered(fs)) == 0 && !fs.table.Holds(m.r.process(), m.parent.dir) {
		fs.table.Entered(m.parent.dir, id, nil, nil) // W5: it is a stranger's
		return
	}
	fs.table.Made(m.parent.dir, id)
}

// noteLinking tells the table what is about to come into a directory by link(2),
// from wherever it has a name. Before: a daemon that dies in between lost nothing.
func (fs *FS) noteLinking(m *making, src *node) {
	if len(m.linked) == 0 {
		return // it has no name, and was made for this one
	}
	id := src.key()
	fs.table.Entered(m.parent.dir, lockstate.FileID{Dev: uint64(id.dev), Ino: id.ino, Birth: id.birth}, m.linked[0], src.above())
}
