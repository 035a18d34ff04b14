package fs

import "github.com/hanwen/go-fuse/v2/fuse"

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
