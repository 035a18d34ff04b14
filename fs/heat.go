package fs

import (
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// A file that is open past the daemon is recorded (hot.go) by one of its names:
// before that one goes another one is, and before a file without a name gets one.
// Where the daemon itself removes a tree, what is in it is recorded right after.

// heatLocked has the next daemon look where n is, if it may be written to past
// this one.
func (fs *FS) heatLocked(n *node, f *file) {
	if f.hot == nil {
		fs.reheatLocked(n, f)
	}
}

// reheatLocked is heatLocked for one that is elsewhere now perhaps. The caller
// holds FS.ns.
func (fs *FS) reheatLocked(n *node, f *file) {
	if !f.writtenPast() {
		return
	}
	old := f.hot
	f.hot = nil
	if p, ok := fs.hotPlaceOf(n); ok {
		f.hot = fs.hot.enter(p)
	}
	old.leave()
}

// hotPlaceOf returns where the next daemon finds n, by one of its names: it
// searches for the others. ok is false if no name leads to it.
func (fs *FS) hotPlaceOf(n *node) (p hotPlace, ok bool) {
	parent, nlink, fd := n.homeBut(link{})
	if parent != nil {
		return fs.placeIn(parent), true
	}
	if nlink > 1 && fd >= 0 {
		var st unix.Statx_t
		if statAt(fd, "", &st) == nil && st.Nlink == 0 {
			return p, false
		}
	}
	return everywhere, nlink > 1 // the only name has gone, if there was one
}

// placeIn returns where the next daemon finds a file in a directory.
func (fs *FS) placeIn(parent *node) hotPlace {
	return placeOf(fs.table.Path(parent.dir), fs.opts.Depth)
}

// homeBut returns a directory in the tree where n has a name other than l, or
// nil if none is known; and how many names it has at the most, and the descriptor
// that stands for it or -1.
func (n *node) homeBut(l link) (parent *node, nlink uint16, fd int) {
	n.tab.mu.RLock()
	defer n.tab.mu.RUnlock()
	nlink, fd = n.nlink, n.fdLocked()
	if o := n.firstLocked(); o.parent != nil && o != l && o.parent.attachedLocked() {
		return o.parent, nlink, fd
	}
	if m := n.more.Load(); m != nil && m.links != nil {
		for _, o := range m.links.all {
			if o != l && o.parent.attachedLocked() {
				return o.parent, nlink, fd
			}
		}
	}
	return nil, nlink, fd
}

// attachedLocked reports whether a directory is in the tree: what was removed or
// moved aside is not.
func (n *node) attachedLocked() bool {
	for ; n != nil; n = n.parent {
		if n.id == fuse.FUSE_ROOT_ID {
			return true
		}
	}
	return false
}

// isHot reports whether n may be written to past the daemon.
func (fs *FS) isHot(n *node) bool {
	if n == nil || n.more.Load() == nil {
		return false
	}
	f := fs.nodes.files.get(n)
	if f == nil {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.writtenPast()
}

// follow records where a file is that may be written to, and has got or lost a
// name. The caller holds FS.ns.
func (fs *FS) follow(n *node) {
	f := fs.nodes.files.get(n)
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.dead {
		fs.reheatLocked(n, f)
	}
}

// heatElsewhere records where else a file is that is open past the daemon, whose
// name l is about to go. The caller leaves it when the name has. It holds FS.ns.
func (fs *FS) heatElsewhere(v *victim, l link) *hotDir {
	if v == nil || v.st.Nlink <= 1 || v.node == nil || v.node.isDir() || !fs.isHot(v.node) {
		return nil
	}
	if parent, _, _ := v.node.homeBut(l); parent != nil {
		return fs.hot.enter(fs.placeIn(parent))
	}
	return fs.hot.enter(everywhere)
}

// heatLink records where a file without a name is about to get one. The caller
// leaves it when it has. It holds FS.ns.
func (fs *FS) heatLink(n, parent *node) *hotDir {
	if !fs.isHot(n) {
		return nil
	}
	if home, _, _ := n.homeBut(link{}); home != nil {
		return nil
	}
	return fs.hot.enter(fs.placeIn(parent))
}

// reheat records where m takes files that are open past the daemon, before it
// does, and afterwards where they are: FS.follow does so for a single one. The caller
// holds FS.ns, alone if m moves a directory.
func (fs *FS) reheat(m *renaming) (done func()) {
	var to []*hotDir
	move := func(v *victim, dir *lockstate.Dir, there link) {
		switch {
		case v == nil:
		case dir != nil && fs.hotBelow(dir):
			path := join(fs.table.Path(there.parent.dir), there.name)
			to = append(to, fs.hot.enter(hotPlace{lockstate.Bytes(path), true}))
		case dir == nil && fs.isHot(v.node):
			to = append(to, fs.hot.enter(fs.placeIn(there.parent)))
		}
	}
	move(m.src, m.srcDir, m.to)
	if m.exchanges() {
		move(m.dst, m.dstDir, m.from)
	} else if d := fs.heatElsewhere(m.dst, m.to); d != nil {
		to = append(to, d)
	}
	return func() {
		if m.srcDir != nil || m.dstDir != nil {
			fs.reheatAll(to)
			return
		}
		for _, d := range to {
			d.leave()
		}
	}
}

// hotBelow reports whether files beneath a directory may be open past the daemon.
// Of those that no lock covers the table does not know (W5).
func (fs *FS) hotBelow(dir *lockstate.Dir) bool {
	return fs.table.HandlesBelow(dir) || len(fs.opts.SharedNames) > 0 && fs.hot.near(fs.table.Path(dir))
}

// reheatAside is reheat for an entry that is put where no path leads.
func (fs *FS) reheatAside(path string, v *victim) (done func()) {
	var to []*hotDir
	if v.node != nil && (v.node.isDir() && fs.hot.near(path) || v.st.Nlink > 1 && fs.isHot(v.node)) {
		to = append(to, fs.hot.enter(everywhere))
	}
	return func() { fs.reheatAll(to) }
}

// reheatAll records where all files are now, if some were moved, and leaves what
// was recorded meanwhile.
func (fs *FS) reheatAll(moved []*hotDir) {
	if len(moved) == 0 {
		return
	}
	for n, f := range fs.nodes.files.all() {
		f.mu.Lock()
		if !f.dead {
			fs.reheatLocked(n, f)
		}
		f.mu.Unlock()
	}
	for _, d := range moved {
		d.leave()
	}
}
