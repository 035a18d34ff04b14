package fs

import (
	"encoding/json"
	"errors"
	"log/slog"
	"os"
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
	if c.log == nil {
		c.log = newBurst(fs.log)
		defer c.log.done()
	}
	var spoils lockstate.Spoils
	var ok bool
	c.fs = fs
	err := c.locked(func() error { // what others make there is noted before, or refused
		spoils, ok = fs.table.Seal(l.Token)
		return nil
	})
	if err != nil {
		fs.clearLater(l, policy, how, c)
		return true
	}
	if !ok {
		return true // somebody else does it
	}
	if c.all {
		spoils.All()
	}
	if spoils.InUse {
		c.log.tell(slog.LevelInfo, "content is kept: somebody else holds the directory", "dir", l.Path, "token", l.Token, "policy", policy)
		return false
	}
	if spoils.Unknown {
		c.log.tell(slog.LevelWarn, "content is kept: what was made under the lock is not known", "dir", l.Path, "token", l.Token, "policy", policy)
		return false
	}
	c.spoils, c.policy, c.how = spoils, policy, how
	if spoils.Whole() {
		if err := c.moveWhole(); err != errNotEnded && !c.isFull(err) {
			return c.finish(err)
		}
	}
	if c.patient {
		return c.finish(c.sweep())
	}
	c.patient = true
	c.log.use()
	fs.clearings.Go(func() {
		defer c.log.done()
		if !c.finish(c.sweep()) {
			fs.table.EndAs(l.Token, how)
		}
	})
	return true
}

// clearLater clears, and ends the lock, when somebody else's call is over: no other lock
// is to wait for that (R4). Until then the owner passes for alive.
func (fs *FS) clearLater(l lockstate.Lock, policy string, how lockstate.Ending, c clearing) {
	c.log.use()
	c.patient = true
	fs.toClear.Store(l.Token, nil)
	fs.clearings.Go(func() {
		defer c.log.done()
		defer fs.toClear.Delete(l.Token)
		_, _ = fs.cleanUp(l, false) // else the lock file would be part of the content
		if !fs.clear(l, policy, how, c) && fs.table.EndAs(l.Token, how) == nil {
			fs.logReleased(l, how.Reason)
		}
	})
}

// isToClear reports whether clearLater waits with a lock.
func (fs *FS) isToClear(token uint64) bool {
	_, is := fs.toClear.Load(token)
	return is
}

// A clearing is what is done with the content of one lock.
type clearing struct {
	fs      *FS
	spoils  lockstate.Spoils
	policy  string
	how     lockstate.Ending
	log     *burst // nil: of this one alone
	patient bool   // it may take its time: somebody waits for it, or nobody at all
	all     bool   // the holder says: the whole directory

	gone   []*node // directories that were moved aside
	awaits atWork  // what was waited for

	dir   int    // the hidden directory of this clearing
	where string // trashDir or quarantineDir, which it is in
	name  string
	about *os.File // that is to be written to the disk yet; nil: it need not be
	moved int
	kept  error // what could not be moved first, while the rest could
}

// locked calls f with FS.ns held alone, or returns errNotEnded: while what is to take no
// time is carried out, no other lock ends (R4).
func (c *clearing) locked(f func() error) error {
	if c.patient {
		c.fs.lockNames()
	} else if err := c.fs.lockNamesBriefly(); err != nil {
		return err
	}
	defer c.fs.ns.Unlock()
	return f()
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
	defer c.removeMade()
	if err != nil {
		return false
	}
	c.fs.table.EndAs(l.Token, c.how)
	c.fs.logReleased(l, c.how.Reason)
	return true
}

// tellKernel makes what was moved aside disappear: the kernel asks for its attributes,
// hears ESTALE, and looks up the name again.
func (c *clearing) tellKernel() {
	elsewhere := false // a file is, too, or is open, which would not tell
	for _, n := range c.gone {
		elsewhere = elsewhere || !n.adrift() || n.isFile() && n.isOpen()
	}
	told := elsewhere && c.fs.forgetNames()
	for _, n := range c.gone {
		if told && n.isFile() {
			n.showAside()
		}
		c.fs.notifyAttr(n)
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
	err := c.locked(func() (err error) {
		now, ok := fs.table.Lock(c.spoils.Lock.Token)
		if !ok {
			return errBrokenOff
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
// the node of the directory that it was in. If to is negative it is removed. The caller holds
// FS.ns alone.
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
	if err := c.awaits.check(fs, v.node); err != nil {
		return parent, err
	}
	defer fs.reheatAside(join(dir, name), v)()
	fs.keepReadable(v.node)
	switch {
	case to >= 0:
		err = fs.back.move(fd, name, to, as)
	case isDirectory(&v.st):
		err = fs.back.unlink(fd, name, unix.AT_REMOVEDIR)
	default:
		err = fs.back.unlink(fd, name, 0)
	}
	if err != nil {
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
