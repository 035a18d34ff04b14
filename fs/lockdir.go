package fs

import (
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// errLockDirUsed: a lock directory is left to who works in it.
var errLockDirUsed = fmt.Errorf("a lock directory is left alone: somebody works in it: %w", lockstate.ErrHeld)

// lockDirUsed returns errLockDirUsed if somebody living holds something in a lock
// directory, or has something open there for writing, or has staged there under the
// lock, and not removed it. dir is its parent's path, open as fd. The caller holds
// FS.ns alone.
func (fs *FS) lockDirUsed(fd int, dir, name string, token uint64) error {
	used := fs.stagersLive(token)
	if d, ok := fs.table.Find(split(join(dir, name))...); ok {
		locks, open := fs.table.Below(d)
		fs.table.Forget(d)
		for _, l := range locks {
			if l.Pending || fs.lives(l) {
				return errLockDirUsed
			}
		}
		for _, h := range open {
			if h.Owner == (procid.ID{}) {
				return errLockDirUsed // by whom is not known
			}
			used = used || fs.procs.Alive(h.Owner)
		}
	}
	if used && !emptyDir(fd, name) {
		return errLockDirUsed
	}
	return nil
}

// stagersLive reports whether somebody lives who has staged something in a lock directory
// of a lock.
func (fs *FS) stagersLive(token uint64) bool {
	return slices.ContainsFunc(fs.table.Stagers(token), fs.procs.Alive)
}

// noteContent tells the table of locks whose owner has exited with more in a lock directory
// than such a one holds: that is content, which he has changed (R5). The error is why that
// can't be said now.
func (fs *FS) noteContent(id procid.ID) error {
	for _, l := range fs.table.Owned(id) {
		if l.Changed || len(l.Files) == 0 {
			continue
		}
		err := fs.locked(false, func() error {
			fd, err := fs.openPath(fs.table.Path(l.Dir))
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			for _, name := range l.Files {
				var st unix.Statx_t
				err := ifShort(statAt(fd, name, &st))
				small, left := true, lockDirEntries
				if err == nil && isDirectory(&st) {
					small, err = smallTree(fd, name, lockDirDepth, &left)
				}
				if err != nil {
					return err
				}
				if !small {
					fs.table.Change(l.Token)
				}
			}
			return nil
		})
		// What open(2) and the like have made is no directory.
		if procid.IsShort(err) && (l.Protocol == "mkdir" || len(l.Files) > 1) {
			return err
		}
	}
	return nil
}

// emptyDir reports whether a directory is known to have no entries.
func emptyDir(parent int, name string) bool {
	fd, err := openAt(parent, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	empty := true
	err = eachEntry(fd, func(dirEntry) bool { empty = false; return false })
	return err == nil && empty
}

// carryOutOf is reapLock for who holds FS.reapMu.
func (fs *FS) carryOutOf(l lockstate.Lock) { fs.carryOut(l.Owner, fs.procs.ExitOf(l.Owner)) }

// reapWithin reaps the dead who have locks in the lock directories of a lock that is
// about to end: those may pass to somebody who lives, or are to go with it.
func (fs *FS) reapWithin(l lockstate.Lock, reap func(lockstate.Lock)) {
	for _, name := range l.Files {
		d, ok := fs.table.Find(split(join(l.Path, name))...)
		if !ok {
			continue
		}
		locks, _ := fs.table.Below(d)
		fs.table.Forget(d)
		for _, in := range locks {
			if in.Client == "" && in.Owner != l.Owner && !fs.lives(in) {
				reap(in)
			}
		}
	}
}
