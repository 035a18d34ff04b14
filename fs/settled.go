package fs

import (
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// A private file that settles onto a file which has a node already has two
// numbers with the kernel, which takes them for two inodes: what is changed by the
// one, it does not know of the other. So it keeps no attributes of the number of
// the private one, and is told of what is changed by that.

// changedBeside tells the kernel that n was changed by way of the number id.
func (fs *FS) changedBeside(id uint64, n *node) {
	if id == n.id {
		return
	}
	n.plain.setPassed(true)
	fs.notifyAttr(n)
	fs.kernel.DropPages(n.id, 0, 0)
}

// lockedBy returns the handle that a lock request is about, and its place if it
// is a lock file, as lockPlaceOf.
func (fs *FS) lockedBy(in *fuse.LkIn) (h *handle, at link, lockFile, unclear bool) {
	for {
		if h = fs.handles.get(in.Fh, in.NodeId); h == nil {
			return nil, link{}, false, false
		}
		at, lockFile, unclear = fs.lockPlaceOf(h)
		if h.cand == nil || h.cand.private() {
			return h, at, lockFile, unclear
		}
	}
}

// settle gives a node that was private its place in the backing, and returns the
// one that the file has from now on: n, or that by which the kernel knew it
// already, for which n stands then. It returns nil when see does. The caller holds
// FS.ns.
func (t *nodeTable) settle(n *node, st *unix.Statx_t, parent *node, names []string, removals, added uint64) *node {
	at, told := t.settleAt(n, st, parent, names, removals, added)
	if told {
		t.follow(at)
	}
	return at
}

func (t *nodeTable) settleAt(n *node, st *unix.Statx_t, parent *node, names []string, removals, added uint64) (at *node, told bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	at = t.byKey.get(t.identityOf(st))
	isNew := at == nil || at.kind != n.kind
	if t.outdatedLocked(at, isNew, parent, st, removals, added) {
		return nil, false
	}
	if isNew {
		n.setKey(t.identityOf(st))
		t.byKey.put(n)
		at = n
	} else {
		t.standLocked(n.id, at)
	}
	at.setNlinkLocked(st.Nlink)
	for _, name := range names {
		if at.linkLocked(parent, name) {
			told = at.tellHandlesLocked() || told
		}
	}
	return at, told
}

// settledAs returns the number of the node that a number leads to.
func (t *nodeTable) settledAs(id uint64) uint64 {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if at := t.settled[id]; at != nil {
		return at.id
	}
	return id
}

// standLocked has the node with a number stand for at.
func (t *nodeTable) standLocked(id uint64, at *node) {
	if t.settled == nil {
		t.settled = make(map[uint64]*node)
	}
	t.settled[id] = at
	at.needLocked().pins++
}
