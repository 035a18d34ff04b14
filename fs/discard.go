package fs

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// cleanUp removes the lock files of a lock that is about to end, and returns which are
// gone; briefly: see discardOf.
func (fs *FS) cleanUp(l lockstate.Lock, briefly bool) (gone []string, first error) {
	for _, name := range l.Files {
		id, err := fs.discardOf(l.Token, name, nil, briefly, func() (string, bool) {
			now, ok := fs.table.Lock(l.Token)
			return now.Path, ok && slices.Contains(now.Files, name)
		})
		if err == nil {
			gone = append(gone, name)
			continue
		}
		fs.orphans.add(orphanAt{l.Path, name})
		if !errors.Is(err, errNotLockDir) && !errors.Is(err, errLockDirUsed) {
			fs.leftovers.add(fs, l.Path, name, id)
		}
		if first == nil {
			first = fmt.Errorf("lock file %s: %w", name, err)
		}
	}
	return gone, first
}

// discard removes an entry of the backing on the daemon's own account, and
// tells the kernel. place says where it is and whether it is still the one;
// until the entry is gone, nobody else changes a name.
func (fs *FS) discard(name string, place func() (dir string, ok bool)) error {
	_, err := fs.discardOf(0, name, nil, false, place)
	return err
}

// discardOf is discard of the lock file of a lock, 0 for none; and of a certain file
// alone, if only is not nil. It returns which one could not be removed; briefly says not
// to wait for long for somebody else's call.
func (fs *FS) discardOf(token uint64, name string, only *identity, briefly bool, place func() (dir string, ok bool)) (id identity, err error) {
	var awaits atWork
	var parent *node
	assumed := false
	err = afterWork(briefly, func() (err error) {
		parent, assumed, id, err = fs.discardEntry(token, name, only, briefly, place, &awaits)
		return err
	})
	if parent != nil {
		fs.notifyDir(parent)
	}
	if assumed {
		fs.forgetNames() // R4: nobody is to see it any more
	}
	return id, err
}

// discardEntry is discardOf without telling the kernel. assumed: it has to be told of the
// name, too.
func (fs *FS) discardEntry(token uint64, name string, only *identity, briefly bool, place func() (dir string, ok bool), awaits *atWork) (parent *node, assumed bool, id identity, err error) {
	if !briefly {
		fs.lockNames()
	} else if err := fs.lockNamesBriefly(); err != nil {
		return nil, false, id, err
	}
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
	isDir := isDirectory(&v.st)
	if err == nil {
		err = awaits.check(fs, v.node)
	}
	if err == nil && isDir {
		err = fs.lockDirUsed(fd, dir, name, token)
	}
	if err == nil {
		err = fs.removeLockEntry(fd, name, isDir)
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

// What a lock directory holds at the most: a few files that say whose it is, as those
// of a MkdirLockFile, or of a script that notes its pid. More is content, which is never
// removed.
const (
	lockDirEntries = 16
	lockDirDepth   = 2
	lockDirBytes   = 256 // of a file that has no other name
)

// errNotLockDir: what was made under the name of a lock file is no lock file.
var errNotLockDir = errors.New("holds more than a lock directory does; left alone")

// removeLockEntry removes a lock file, or a lock directory with what is in it. The
// caller holds FS.ns alone.
func (fs *FS) removeLockEntry(dir int, name string, isDir bool) error {
	if !isDir {
		return fs.back.unlink(dir, name, 0)
	}
	left := lockDirEntries
	switch small, err := smallTree(dir, name, lockDirDepth, &left); {
	case err != nil:
		return err
	case !small:
		return errNotLockDir
	}
	return fs.removeTree(dir, name, true)
}

// smallTree reports whether a directory is known to hold no more than that. The error is why
// it can't be said now.
func smallTree(dir int, name string, depth int, left *int) (small bool, err error) {
	if depth == 0 {
		return false, nil
	}
	fd, err := openHere(dir, name, 0)
	if err != nil {
		return false, ifShort(err)
	}
	defer unix.Close(fd)
	small = true
	var bad error
	err = eachEntry(fd, func(e dirEntry) bool {
		var st unix.Statx_t
		switch *left--; {
		case *left < 0:
			small = false
		case e.typeIn(fd) == unix.DT_DIR:
			small, bad = smallTree(fd, e.name, depth-1, left)
		default:
			bad = statAt(fd, e.name, &st)
			small = bad == nil && (st.Size <= lockDirBytes || st.Nlink > 1)
		}
		return small
	})
	err = cmp.Or(err, bad)
	return err == nil && small, ifShort(err)
}
