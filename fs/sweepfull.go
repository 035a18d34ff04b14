package fs

import (
	"errors"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// Whoever has filled the disk, and failed of that, leaves no room for what is to take the
// content, either. So where that is to be deleted anyway, some of it is in its place.

// isFull reports whether an error says that there is no room to destroy something.
func (c *clearing) isFull(err error) bool {
	return c.policy == lockstate.Destroy && (errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT))
}

// withRoom calls try, and makes room in a directory as long as that needs some.
func (c *clearing) withRoom(dir string, try func() error) error {
	err := try()
	if c.isFull(err) {
		err = c.makeRoom(dir, dir, try, err)
	}
	return err
}

// makeRoom deletes one thing after the other of what was made in dir, until try, whose last
// error is given, has the room that it needs.
func (c *clearing) makeRoom(top, dir string, try func() error, last error) error {
	dirs, made, _, err := c.scanEntries(dir)
	if err != nil {
		return errors.Join(last, err)
	}
	// Files first: they are what takes most.
	for _, s := range made {
		if last = c.replace(top, dir, s, try, last); !c.isFull(last) {
			return last
		}
	}
	for name, found := range dirs {
		isMade := c.spoils.Made(found)
		if !c.reaches(join(dir, name), isMade) {
			continue
		}
		if last = c.makeRoom(top, join(dir, name), try, last); c.isFull(last) && isMade {
			last = c.replace(top, dir, swept{name, found}, try, last)
		}
		if !c.isFull(last) {
			return last
		}
	}
	return last
}

// replace deletes one thing, and then calls try; if it cannot be deleted, the last error stays.
func (c *clearing) replace(top, dir string, s swept, try func() error, last error) error {
	switch err := c.deleteEntry(top, dir, s); err {
	case nil:
		return try()
	case errBrokenOff:
		return err
	}
	return last
}

// deleteEntry deletes a file, or a directory that is empty, in its place.
func (c *clearing) deleteEntry(top, dir string, s swept) error {
	parent, err := func() (*node, error) {
		c.fs.lockNames()
		defer c.fs.ns.Unlock()
		if now, ok := c.fs.table.Lock(c.spoils.Lock.Token); !ok || now.Path != top {
			return nil, errBrokenOff
		}
		parent, err := c.move(dir, s.path, -1, "", &s.id)
		if err == nil {
			c.fs.back.dirs.dropAdrift()
			c.fs.forgetPlace(join(dir, s.path))
		}
		return parent, err
	}()
	if parent != nil {
		c.fs.notifyDir(parent)
	}
	return err
}

// reaches reports whether something in a directory may be part of the content: not if
// somebody else holds it, or if it came from elsewhere.
func (c *clearing) reaches(dir string, made bool) bool {
	_, other := slices.BinarySearch(c.spoils.Others, dir)
	return !other && (made || !c.spoils.Fresh)
}
