package fs

import (
	"cmp"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// A file with several links may have a name beneath a lock that the kernel has
// never looked up. Whoever changes it through another name changes what the
// lock protects (W3). A backing keeps no index of names, so the locked
// directories are searched: for files with several links only, and only where
// others hold locks.

// findAliases returns directories with names of n beneath locks that the caller
// does not hold. It stays true until the try is over.
func (fs *FS) findAliases(r *request, n *node) ([]*lockstate.Dir, error) {
	if !n.hasUnknownNames() {
		return nil, nil
	}
	if !r.aliases {
		// From here on no acquisition completes; so the request must not
		// wait for one.
		r.aliases = true
		fs.aliasMu.RLock()
	}
	if fs.table.Len() == 0 {
		return nil, nil
	}
	p, err := r.must()
	if err != nil {
		return nil, err
	}
	for _, l := range fs.table.Foreign(p) {
		there, err := fs.hasInode(l.Path, n.key())
		if err != nil {
			return nil, err
		}
		if there {
			if d, ok := fs.table.Find(split(l.Path)...); ok {
				r.found = append(r.found, d)
			}
		}
	}
	return r.found, nil
}

// checkAliasWriters refuses an acquisition while another process has a file
// open for writing through a name elsewhere that has a name beneath dir too.
func (fs *FS) checkAliasWriters(r *request, dir *lockstate.Dir, g *lockstate.Grant) error {
	// Those that began before the lock was in force are over after this,
	// and all others find it.
	fs.aliasMu.Lock()
	//lint:ignore SA2001 the wait is the point
	fs.aliasMu.Unlock()
	p := r.process()
	err := fs.aliasWriter(fs.table.Path(dir), func(o *procid.Process) bool {
		return o.ID() == p.ID() || o.Descends(p.ID()) || g.Keeps(o)
	})
	if err != nil {
		return err
	}
	// Of names that were looked up before that, the table knows. It may not have
	// when it admitted the lock.
	return g.Confirm()
}

// aliasWriter returns an error if a process that is not allowed has a file open
// for writing that has a name beneath a directory which nobody looked up.
func (fs *FS) aliasWriter(dir string, allowed func(*procid.Process) bool) error {
	for _, h := range fs.handles.writers() {
		o := h.lock.Owner()
		if h.lock.Spent() || !h.node.hasUnknownNames() || allowed(o) {
			continue
		}
		there, err := fs.hasInode(dir, h.node.key())
		if err != nil {
			return err
		}
		if there {
			return &lockstate.HeldError{Err: lockstate.ErrOpen, Handles: []lockstate.HandleState{{
				Handle: h.lock, Owner: o.ID(), Path: fs.pathOfNode(h.node),
			}}}
		}
	}
	return nil
}

// pathOfNode returns a path of n for people to read.
func (fs *FS) pathOfNode(n *node) string {
	dirs, name := n.covering()
	if len(dirs) == 0 {
		return "(unlinked)"
	}
	return join(fs.table.Path(dirs[0]), name)
}

// hasInode reports whether a file has a name beneath a directory. The caller holds FS.ns.
func (fs *FS) hasInode(dir string, key identity) (bool, error) {
	path, err := fs.findInode(dir, key.ino, func(id identity) bool { return id == key })
	return path != "", err
}

// findInode returns the path of an entry beneath a directory with an inode number and
// the right identity, "" for none. It reads directories only, and has one open at a
// time, however deep they go. The same goes for it as for openPath.
func (fs *FS) findInode(dir string, ino uint64, right func(identity) bool) (path string, err error) {
	for dirs := []string{dir}; len(dirs) > 0; {
		dir = dirs[len(dirs)-1]
		dirs = dirs[:len(dirs)-1]
		fd, err := fs.openUnread(dir)
		if isGone(err) {
			continue
		}
		if err != nil {
			return "", err
		}
		var bad error
		err = eachEntry(fd, func(e dirEntry) bool {
			if dir == "." && e.name == ControlDir {
				return true // what no client can reach
			}
			if e.typ == unix.DT_DIR || e.typ == unix.DT_UNKNOWN {
				dirs = append(dirs, join(dir, e.name))
			}
			if e.ino != ino {
				return true
			}
			var st unix.Statx_t
			switch bad = statAt(fd, e.name, &st); {
			case isGone(bad):
				bad = nil
			case bad == nil && right(fs.identityOf(&st)):
				path = join(dir, e.name)
			}
			return path == "" && bad == nil
		})
		unix.Close(fd)
		err = cmp.Or(err, bad)
		if path != "" || err != nil && err != unix.ENOENT { // ENOENT: it is removed by now
			return path, err
		}
	}
	return "", nil
}
