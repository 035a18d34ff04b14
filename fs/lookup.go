package fs

import (
	"slices"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// fillEntry tells the kernel of n under a name. An uncached name looks
// different to different callers (A9, A11), so the kernel asks each time.
func (fs *FS) fillEntry(h *fuse.InHeader, out *fuse.EntryOut, n *node, st *unix.Statx_t, uncached bool) {
	out.NodeId, out.Generation = n.id, n.generation()
	fs.fillAttr(&out.Attr, st)
	if !uncached {
		out.SetEntryTimeout(fs.nodes.validFor)
	}
	out.SetAttrTimeout(fs.disguise(h, n, &out.Attr))
}

// validForTick is the least that the kernel takes for a time: until its clock has
// ticked, at most twice. To check the modes in the same system call it asks once more for
// attributes that it is not to keep at all.
const validForTick = time.Nanosecond

// freshTime is how old a file may be that was modified "just now".
const freshTime = 100 * time.Millisecond

// disguise shows the lock file of a live lock as modified just now to all but
// its holders, so that no tool breaks it by age (A11). It returns how long the kernel may
// keep the attributes: those of a lock file for a tick, if they are what all are to see.
func (fs *FS) disguise(h *fuse.InHeader, n *node, a *fuse.Attr) time.Duration {
	valid := n.attrsValidFor(a.Size)
	if n.isFile() && fs.underWay.countsDown(n, h.Pid) {
		valid = 0 // or link(2) fails once the kernel counts none
	}
	if n.isDir() && fs.table.Len() == 0 || fs.opts.Observe {
		return valid
	}
	names := n.lockNames()
	if len(names) == 0 {
		return valid
	}
	now := time.Now()
	for _, l := range names {
		if fs.isLive(l) && !fs.table.Holds(fs.glance(h), l.parent.dir) {
			a.Mtime, a.Mtimensec = uint64(now.Unix()), uint32(now.Nanosecond())
			a.Ctime, a.Ctimensec = a.Mtime, a.Mtimensec
			return 0
		}
	}
	if age := now.Sub(time.Unix(int64(a.Mtime), int64(a.Mtimensec))); age < 0 || age > freshTime {
		return 0
	}
	return min(valid, validForTick)
}

// keeps reports whether the entry is the lock file of a lock.
func (fs *FS) keeps(l link) bool {
	return slices.ContainsFunc(fs.table.On(l.parent.dir), func(lock lockstate.Lock) bool { return slices.Contains(lock.Files, l.name) })
}

// isLive reports whether the entry is the lock file of a lock: one that keeps it, or
// of which a locked descriptor does (A4).
func (fs *FS) isLive(l link) bool {
	return fs.table.IsLockFile(l.parent.dir, l.name)
}

// Lookup finds a name in a directory.
func (fs *FS) Lookup(cancel <-chan struct{}, h *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	status := fs.lookup(h, name, out)
	if fs.stale.looked(h.Pid, h.NodeId, out.NodeId, name) {
		out.SetEntryTimeout(0)
	}
	return status
}

func (fs *FS) lookup(h *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	switch name {
	case ".":
		return fs.lookupSelf(h, out)
	case "..":
		return fs.lookupParent(h, out)
	}
	parent := fs.nodes.get(h.NodeId)
	if c, ok := fs.control.lookup(h, parent, name); ok {
		if c == nil {
			return fuse.ENOENT
		}
		c.fillEntry(out)
		return fuse.OK
	}
	if parent == nil {
		return fuse.Status(unix.ESTALE)
	}
	uncached := fs.isLockName(parent, name)
	if uncached {
		fs.reapOn(parent.dir)
		if fs.table.Len() > 0 {
			fs.glance(h) // for disguise
		}
	} else {
		uncached = fs.mayBeCandidate(name)
	}
	if uncached {
		if c := fs.cands.get(fs, h, parent, name); c != nil {
			return c.entry(fs, out)
		}
	}
	if !fs.ns.TryRLock() {
		if !uncached && fs.lacks(parent, name) {
			out.SetEntryTimeout(fs.nodes.validFor)
			return fuse.OK
		}
		fs.ns.RLock()
	}
	defer fs.ns.RUnlock()
	return fs.lookupIn(parent, h, name, uncached, out)
}

// lookupIn asks the backing. The caller holds FS.ns.
func (fs *FS) lookupIn(parent *node, h *fuse.InHeader, name string, uncached bool, out *fuse.EntryOut) fuse.Status {
	d, err := fs.back.dir(parent)
	if err != nil {
		return statusOf(err)
	}
	defer d.release()
	var st unix.Statx_t
	n, err := fs.nodes.lookAt(d.fd, parent, name, &st)
	if err != nil {
		if err == unix.ENOENT && !uncached {
			out.SetEntryTimeout(fs.nodes.validFor) // node 0: the name is known not to be there
			return fuse.OK
		}
		return statusOf(err)
	}
	if !n.isDir() {
		if uncached && fs.isLockName(parent, name) {
			fs.lockLooks.note(h.Pid, n, link{parent, name}, st.Nlink > 1)
		}
		fs.listers.asked(h.Pid, parent, name)
	}
	fs.fillEntry(h, out, n, &st, uncached)
	return fuse.OK
}

// lacks reports whether an open directory has nothing called so, as one may know
// while somebody else renames something: that is a single step.
func (fs *FS) lacks(parent *node, name string) bool {
	which := fs.renames.Load()
	if which%2 == 0 {
		return false
	}
	d := fs.back.dirs.get(parent)
	if d == nil {
		return false
	}
	defer d.release()
	var st unix.Statx_t
	return statAt(d.fd, name, &st) == unix.ENOENT && fs.renames.Load() == which
}

// Forget takes note that the kernel has dropped a node.
func (fs *FS) Forget(id, lookups uint64) { fs.nodes.forget(id, lookups) }

// awaitsForget reports whether much room in the backing is given back as soon as
// the kernel has forgotten something.
func (fs *FS) awaitsForget() bool { return fs.nodes.big.Load() > 0 }
