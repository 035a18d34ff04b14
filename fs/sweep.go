package fs

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

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
		return c.withRoom(now.Path, c.moveWhole)
	}
	if len(moves) == 0 {
		return nil
	}
	if err := c.writeMade(); err != nil {
		c.log.tell(slog.LevelWarn, "content that is being cleared away is kept in part if the daemon is killed meanwhile: it cannot be noted", "dir", now.Path, "token", now.Token, "err", err)
	}
	if err := c.withRoom(now.Path, c.open); err != nil {
		return err
	}
	defer c.abandon() // unless something was moved
	defer c.close()
	defer c.removeCounterparts()
	// Others are let in between the batches: nobody holds the directory.
	for batch := range slices.Chunk(moves, 64) {
		move := func() error { return afterWork(true, func() error { return c.moveBatch(now.Path, batch) }) }
		if err := c.withRoom(now.Path, move); err != nil {
			return err
		}
	}
	return c.kept
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
		if c.isFull(err) && c.fs.statIn(join(from, dir), name, new(unix.Statx_t)) == unix.ENOENT {
			continue // it was deleted to make room
		}
		if err != nil {
			return err
		}
		parent, err := c.move(join(from, dir), name, to, name, &s.id)
		unix.Close(to)
		if parent != nil {
			touched[parent] = true
		}
		switch err {
		case nil, unix.ENOENT:
		case unix.EPERM, unix.EACCES, unix.EBUSY, unix.EXDEV: // it alone is kept
			if c.kept == nil {
				c.kept = fmt.Errorf("%s: %w", join(from, s.path), err)
			}
		default:
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
	at, err := dup(c.dir)
	if err != nil {
		return -1, err
	}
	path := from
	for i, name := range append([]string{contentName}, split(dir)...) {
		if i > 0 {
			path = join(path, name)
		}
		next, err := c.openLike(at, name, path)
		unix.Close(at)
		if err != nil {
			return -1, err
		}
		at = next
	}
	return at, nil
}

// removeCounterparts removes them if nothing was moved there.
func (c *clearing) removeCounterparts() {
	if c.moved == 0 {
		removeDirs(c.dir, contentName)
	}
}

// removeDirs removes a directory, and those in it, as far as there is nothing else.
func removeDirs(at int, name string) {
	fd, err := openAt(at, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return
	}
	names, _ := entryNames(fd)
	for _, n := range names {
		removeDirs(fd, n)
	}
	unix.Close(fd)
	unix.Unlinkat(at, name, unix.AT_REMOVEDIR) // else it stays, and is listed
}

// openLike opens a directory at a descriptor, which it makes if there is none.
func (c *clearing) openLike(at int, name, original string) (int, error) {
	err := unix.Mkdirat(at, name, 0o700)
	if err == nil {
		err = c.likeOriginal(at, name, original)
	}
	if err != nil && err != unix.EEXIST {
		return -1, err
	}
	return openAt(at, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
}

func (c *clearing) likeOriginal(at int, name, original string) error {
	var st unix.Statx_t
	if err := c.fs.statIn(original, "", &st); err != nil {
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
		if !c.reaches(join(dir, name), made) {
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
		case isDirectory(&st):
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
