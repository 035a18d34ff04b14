package fs

import (
	"cmp"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// cleanUp removes the lock files of a lock that is about to end, and returns which are
// gone; briefly: see discarding.
func (fs *FS) cleanUp(l lockstate.Lock, briefly bool) (gone []string, first error) {
	for _, name := range l.Files {
		x := &discarding{name: name, lock: l.Token, briefly: briefly, place: func() (string, bool) { return fs.table.KeptByFile(l.Token, name) }}
		err := fs.discard(x)
		if err == nil {
			gone = append(gone, name)
			continue
		}
		fs.orphans.add(orphanAt{l.Path, name})
		// Once the lock has ended, nobody can tell what its owner's children have staged.
		if !errors.Is(err, errNotLockDir) && !errors.Is(err, errLockDirUsed) && !fs.stagersLive(l.Token) {
			fs.leftovers.add(fs, l.Path, name, x.id)
		}
		if first == nil {
			first = fmt.Errorf("lock file %s: %w", name, err)
		}
	}
	return gone, first
}

// A discarding is the removal of an entry of the backing on the daemon's own account.
type discarding struct {
	name string
	// place says where it is and whether it is still the one: until the entry is gone,
	// nobody else changes a name.
	place   func() (dir string, ok bool)
	lock    uint64    // whose lock file it is; 0: none's
	only    *identity // the file that alone is to be removed; nil: any
	briefly bool      // somebody else's call is not waited for for long

	// What the last try has found out.
	id      identity // which one it is; zero: there is none
	parent  *node    // nil: the kernel does not know the directory
	assumed bool     // the kernel has to be told of the name, too
	awaits  atWork   // over all tries, what was waited for
}

// discard carries out a removal, and tells the kernel.
func (fs *FS) discard(x *discarding) error {
	err := afterWork(x.briefly, func() error { return fs.discardEntry(x) })
	if x.parent != nil {
		fs.notifyDir(x.parent)
	}
	if x.assumed {
		fs.forgetNames() // R4: nobody is to see it any more
	}
	return err
}

// discardEntry is one try of discard, which tells the kernel nothing.
func (fs *FS) discardEntry(x *discarding) error {
	x.id, x.parent, x.assumed = identity{}, nil, false
	if !x.briefly {
		fs.lockNames()
	} else if err := fs.lockNamesBriefly(); err != nil {
		return err
	}
	defer fs.ns.Unlock()
	dir, ok := x.place()
	if !ok {
		return nil
	}
	fd, parent, err := fs.openKnown(dir)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	x.parent = parent
	v, err := fs.take(fd, x.name, true)
	if err == unix.ENOENT {
		return nil
	}
	if err != nil {
		return err
	}
	x.id = fs.identityOf(&v.st)
	if x.only != nil {
		err = x.only.mayRemove(fs, dir, &v.st)
	}
	isDir := isDirectory(&v.st)
	if err == nil {
		err = x.awaits.check(fs, v.node)
	}
	if err == nil && isDir {
		err = fs.lockDirUsed(fd, dir, x.name, x.lock)
	}
	if err == nil {
		err = fs.removeLockEntry(fd, x.name, isDir)
	}
	if err == nil && isDir {
		d := fs.table.At(split(join(dir, x.name))...)
		fs.table.Remove(d) // R3
		fs.table.Forget(d)
	}
	if err != nil || parent == nil {
		v.spared()
		return err
	}
	x.assumed = v.node != nil && v.node.isAssumed()
	fs.lostUntold(v, link{parent, x.name})
	return nil
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
