package fs

import (
	"maps"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// orphanList remembers the lock files that no lock stands behind: those that
// were there before the mount (S3), and those that the backing did not let go
// of when their locks ended.
type orphanList struct {
	mu    sync.Mutex
	paths map[orphanAt]uint64 // with the number of the call that added it
	adds  uint64
	stop  chan struct{}
	done  chan struct{}
}

// An orphanAt is a place by path: the directory may be unknown to the kernel.
type orphanAt struct{ dir, name string }

// scan looks for lock files in the backing until it has seen all or stop is
// called. Where they are known, need is false.
func (o *orphanList) scan(fs *FS, need bool) {
	o.stop, o.done = make(chan struct{}), make(chan struct{})
	if !need {
		close(o.done)
		return
	}
	go func() {
		defer close(o.done)
		o.walk(fs, ".")
	}()
}

func (o *orphanList) close() {
	if o.stop != nil {
		close(o.stop)
		<-o.done
	}
}

func (o *orphanList) walk(fs *FS, dir string) {
	if isClosed(o.stop) {
		return
	}
	fs.ns.RLock()
	fd, err := fs.openUnread(dir)
	fs.ns.RUnlock() // to read it may take long
	if err != nil {
		return
	}
	var subdirs []string
	eachEntry(fd, func(e dirEntry) bool {
		switch {
		case dir == "." && e.name == ControlDir: // see hidden.go
		case dir != "." && fs.names.lock.has(e.name):
			if fs.isOrphan(dir, e.name) {
				o.add(orphanAt{dir, e.name})
			}
		case e.typeIn(fd) == unix.DT_DIR:
			subdirs = append(subdirs, e.name)
		}
		return true
	})
	unix.Close(fd)
	for _, s := range subdirs {
		o.walk(fs, join(dir, s))
	}
}

// moved takes note of a rename of directories: now tells the path of one that had another.
func (o *orphanList) moved(now func(dir string) string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	var there []orphanAt
	var added []uint64
	for at, n := range o.paths { // there may be many, and few of them move
		if dir := now(at.dir); dir != at.dir {
			there, added = append(there, orphanAt{dir, at.name}), append(added, n)
			delete(o.paths, at)
		}
	}
	for i, at := range there {
		o.paths[at] = added[i]
	}
}

func (o *orphanList) add(at orphanAt) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.paths == nil {
		o.paths = make(map[orphanAt]uint64)
	}
	o.adds++
	o.paths[at] = o.adds
}

// isOrphan reports whether no lock stands behind a lock file.
func (fs *FS) isOrphan(dir, name string) bool {
	return !slices.ContainsFunc(fs.locksOn(dir), func(l lockstate.Lock) bool { return slices.Contains(l.Files, name) })
}

// locksOn returns the locks on a directory.
func (fs *FS) locksOn(dir string) []lockstate.Lock {
	d, ok := fs.table.Find(split(dir)...)
	if !ok {
		return nil
	}
	defer fs.table.Forget(d)
	return fs.table.On(d)
}

// current returns the orphans that still are some, and forgets the others.
func (o *orphanList) current(fs *FS) []orphanAt {
	o.mu.Lock()
	known := maps.Clone(o.paths)
	o.mu.Unlock() // what follows may wait for the backing, and who adds one for nobody
	var all []orphanAt
	for at, added := range known {
		if fs.isOrphan(at.dir, at.name) && fs.exists(at) {
			all = append(all, at)
			continue
		}
		o.mu.Lock()
		if o.paths[at] == added {
			delete(o.paths, at)
		}
		o.mu.Unlock()
	}
	return all
}

// exists reports whether there is something, or whether that can't be said now.
func (fs *FS) exists(at orphanAt) bool {
	fs.ns.RLock()
	defer fs.ns.RUnlock()
	var st unix.Statx_t
	return !isGone(fs.statIn(at.dir, at.name, &st))
}

// isLockedBy reports whether a lock is by a descriptor of the lock file with that
// name; of one that another daemon's client had it may be any (R2).
func (fs *FS) isLockedBy(l lockstate.Lock, name string) bool {
	return l.LostKey || slices.ContainsFunc(l.Keys, func(k any) bool {
		n := fs.nodes.get(k.(fdKey).node)
		return n != nil && slices.ContainsFunc(n.lockNames(), func(at link) bool { return at.parent.dir == l.Dir && at.name == name })
	})
}

// idle returns the orphans that nobody has locked by a descriptor meanwhile.
func (o *orphanList) idle(fs *FS) []orphanAt {
	return slices.DeleteFunc(o.current(fs), func(at orphanAt) bool {
		return slices.ContainsFunc(fs.locksOn(at.dir), func(l lockstate.Lock) bool { return fs.isLockedBy(l, at.name) })
	})
}

// list returns the paths of all orphans.
func (o *orphanList) list(fs *FS) []string {
	var all []string
	for _, at := range o.idle(fs) {
		all = append(all, join(at.dir, at.name))
	}
	slices.Sort(all)
	return all
}

// in returns the names of the orphans in one directory.
func (o *orphanList) in(fs *FS, dir string) []string {
	var all []string
	for _, at := range o.idle(fs) {
		if at.dir == dir {
			all = append(all, at.name)
		}
	}
	return all
}
