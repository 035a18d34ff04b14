package fs

import (
	"slices"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// Flush is close(2) of one of perhaps several descriptors.
func (fs *FS) Flush(cancel <-chan struct{}, in *fuse.FlushIn) fuse.Status {
	if h := fs.handles.get(in.Fh, in.NodeId); h != nil {
		h.flushed.Store(time.Now().UnixNano())
		if h.lock != nil {
			h.lock.Closing()
		}
		h.noticed()
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
		return
	}
	h.released.Store(time.Now().UnixNano())
	fs.end(h)
}

// exiting is procid.Exiting for an owner. If that one is traced, nothing else may tell
// soon that it is dead.
func (fs *FS) exiting(id procid.ID) bool {
	if !procid.Exiting(id) {
		return false
	}
	fs.procs.Suspect(id)
	return true
}

// suspect is the same for who has a lock file open, without a lock on it. Exit(2) takes
// away a thread's memory before its descriptors.
func (fs *FS) suspect(in *fuse.FlushIn, h *handle) {
	p := h.openedBy()
	if p == nil || fs.table.Len() == 0 {
		return
	}
	if _, is := fs.lockFileOf(h.node); !is {
		return
	}
	if has, known := procid.HasMemory(int(in.Pid)); known && !has {
		fs.procs.Suspect(p.ID())
	}
}

// closedCopy drops the record locks of whoever closed a descriptor.
func (fs *FS) closedCopy(in *fuse.FlushIn, h *handle) {
	if !fs.advisory.Locked(in.NodeId) {
		fs.awaitDropped(fdKey{in.NodeId, false, in.LockOwner})
		fs.suspect(in, h)
		return // as with nearly all files
	}
	if fs.table.Tracks() {
		// A RELEASE would come too late to tell: close(2) does not wait for it.
		var dying *procid.ID
		for _, k := range fs.keysThrough(in.NodeId, in.Fh) {
			if owner, ok := fs.table.OwnerBy(k); ok && (k.flock || k.id != in.LockOwner) && fs.exiting(owner) {
				dying = &owner
				break
			}
		}
		h.dying.Store(dying)
	}
	fs.lockMu.Lock()
	defer fs.lockMu.Unlock()
	fs.advisory.Flush(in.NodeId, in.LockOwner)
	fs.settleLocked(in.NodeId, []fdKey{{in.NodeId, false, in.LockOwner}}, fs.exiting)
}

// awaitDropped waits for another thread of the same process that has closed a copy, and so
// dropped the locks that this one was to: what they kept ends before either close(2) does.
func (fs *FS) awaitDropped(k fdKey) {
	if fs.table.HasKey(k) {
		fs.lockMu.Lock()
		fs.lockMu.Unlock()
	}
}

// keysThrough returns what was locked through a description.
func (fs *FS) keysThrough(node, handle uint64) (keys []fdKey) {
	for _, l := range fs.advisory.Locks(node) {
		if l.Handle == handle {
			keys = append(keys, keyOf(node, &l))
		}
	}
	return keys
}

// closedLast drops what was locked through a description that is gone.
func (fs *FS) closedLast(in *fuse.ReleaseIn, h *handle) {
	if !fs.advisory.Locked(in.NodeId) {
		fs.advisory.Release(in.NodeId, in.Fh)
		return
	}
	fs.lockMu.Lock()
	defer fs.lockMu.Unlock()
	keys := fs.keysThrough(in.NodeId, in.Fh)
	fs.advisory.Release(in.NodeId, in.Fh)
	dying := fs.exiting
	if h.wasFlushed() {
		dying = func(id procid.ID) bool { d := h.dying.Load(); return d != nil && *d == id }
	}
	fs.settleLocked(in.NodeId, keys, dying)
}

// closedTime is how long after a close(2) the RELEASE of a description of a process that has
// died since is waited for, and closedLate the same where a busy machine is slow to send it.
// One that its child has open, too, has none for longer: so it does not count from the
// death, with which nobody else's is carried out meanwhile.
const (
	closedTime = 100 * time.Millisecond
	closedLate = time.Second
)

// awaitClosed waits for the RELEASE of what the dead owner of a lock had closed
// before it died. It reports false if the lock has ended by that: it was given up (R2).
func (fs *FS) awaitClosed(l lockstate.Lock) (still bool) {
	var wait patience
	closed := func(k any) bool {
		key := k.(fdKey)
		if !fs.table.HasKey(k) {
			return false
		}
		id, ok := fs.descriptionOf(key)
		h := fs.handles.get(id, key.node)
		if !ok || h == nil {
			return true // the RELEASE has come, and is about to end the lock
		}
		since := h.flushedSince()
		return h.dying.Load() == nil && (since < closedTime || since < closedLate && wait.looks < fewestLooks)
	}
	for slices.ContainsFunc(l.Keys, closed) && wait.more(closedTime) {
		time.Sleep(100 * time.Microsecond)
	}
	_, still = fs.table.Lock(l.Token)
	return still
}
