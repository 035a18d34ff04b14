package fs

import (
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// Flush is close(2) of one of perhaps several descriptors.
func (fs *FS) Flush(cancel <-chan struct{}, in *fuse.FlushIn) fuse.Status {
	if h := fs.handles.get(in.Fh, in.NodeId); h != nil {
		h.flushed.Store(true)
		in.NodeId = h.node.id // which the locks on the file go by
		fs.closedCopy(in, h)
	}
	return fuse.OK
}

// Release is the last close.
func (fs *FS) Release(cancel <-chan struct{}, in *fuse.ReleaseIn) {
	if fs.control.node(in.NodeId) != nil {
		fs.control.release(in.Fh)
		return
	}
	h := fs.handles.remove(in.Fh)
	if h == nil {
		return
	}
	in.NodeId = h.node.id
	fs.closedLast(in, h)
	if h.cand != nil {
		h.cand.closed(h)
	}
	h.released.Store(time.Now().UnixNano())
	if h.isFile() {
		fs.end(h)
		return
	}
	if fd := h.fd.get(); fd >= 0 {
		unix.Close(fd)
	}
	fs.handles.over(h)
}
