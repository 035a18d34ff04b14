package fs

import (
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// narrow carries out A12 after p has made the lock file of l: the implicit
// lock that p got on the way, by making the directories above, ends if they
// hold nothing but that way. The caller holds FS.ns.
func (fs *FS) narrow(p *procid.Process, l lockstate.Lock) {
	above, names, ok := fs.table.Chain(p, l.Dir)
	if ok {
		fs.table.Narrow(above.Token, l.Token, func() bool { return fs.leadsOnly(above.Path, names) })
	}
}

// leadsOnly reports whether a directory holds nothing but the way that names are.
func (fs *FS) leadsOnly(dir string, names []string) bool {
	fd, err := fs.openPath(dir)
	if err != nil {
		return false
	}
	defer func() { drop(fd) }()
	for _, name := range names {
		if only, ok := onlyEntry(fd); !ok || only.name != name {
			return false
		}
		at := fd
		fd, err = openAt(at, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		unix.Close(at)
		if err != nil {
			return false
		}
	}
	return true
}

// narrowOwned narrows for a process that locks were handed over to: the
// directories and the lock file may have been made by two of its children.
func (fs *FS) narrowOwned(id procid.ID) {
	p := fs.alive(id)
	if p == nil {
		return
	}
	fs.ns.RLock()
	defer fs.ns.RUnlock()
	for _, l := range fs.table.Owned(id) {
		if l.Kind == lockstate.Explicit {
			fs.narrow(p, l)
		}
	}
}

// onlyEntry returns the entry of an open directory that has just one.
func onlyEntry(fd int) (only dirEntry, ok bool) {
	n := 0
	err := eachEntry(fd, func(e dirEntry) bool {
		n++
		only = e
		return n < 2
	})
	return only, err == nil && n == 1
}

// mayNarrow reports whether a stager who wants to make a directory in parent
// is to be held back for a moment, because the lock in its way is about to
// shrink to a directory beside it (A12). While it is held back, the kernel
// keeps parent locked: so the lock's owner must have made its own next
// directory there already, and nothing else.
func (fs *FS) mayNarrow(parent *node, held *lockstate.HeldError) bool {
	fs.ns.RLock()
	defer fs.ns.RUnlock()
	l, ok := fs.table.Governing(parent.dir)
	if !ok || l.Token != held.Lock.Token {
		return false
	}
	d, err := fs.back.dir(parent)
	if err != nil {
		return false
	}
	defer d.release()
	fd, err := openAt(d.fd, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	only, ok := onlyEntry(fd)
	return ok && only.typeIn(fd) == unix.DT_DIR
}
