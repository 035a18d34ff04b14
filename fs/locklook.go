package fs

import "sync"

// A lock file with several names is one in each of their directories, and locks the
// one that it was opened in (A4). open(2) tells of the file alone. But what the kernel
// knows of a lock file's name is not valid for any time, so that it looks it up just
// before, with the same thread.

// maxLockLooks bounds how many threads are remembered.
const maxLockLooks = 1 << 12

type lockLooks struct {
	mu    sync.Mutex
	byTid map[uint32]lockLook
}

// A lockLook is what a thread looked up at last.
type lockLook struct {
	node uint64
	at   link
}

// note takes note that a thread has looked up a lock file, which has several names
// or not. What it looked up before it does not open.
func (t *lockLooks) note(tid uint32, n *node, at link, several bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !several {
		delete(t.byTid, tid)
		return
	}
	if t.byTid == nil || len(t.byTid) >= maxLockLooks {
		t.byTid = make(map[uint32]lockLook)
	}
	t.byTid[tid] = lockLook{n.id, at}
}

// lookedUpByName sees to it that a lock file with several names is looked up before
// it is opened, also by a name that it got by rename(2): the kernel knows that one as
// it knew the one before, for some time. (Before Linux 6.16 it can't be told.)
func (fs *FS) lookedUpByName(n *node) {
	if len(n.lockNames()) > 1 {
		fs.forgetNames()
	}
}

// lost reports whether a thread has just found n by the name of a lock file that it has
// no longer: what it has still is not what the thread opens. That is said once.
func (t *lockLooks) lost(tid uint32, n *node) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	l, ok := t.byTid[tid]
	if !ok || l.node != n.id {
		return false
	}
	delete(t.byTid, tid)
	return !n.has(l.at)
}

// by returns the name by which a thread opens a lock file: none if that is not known,
// or one that the file has no longer.
func (t *lockLooks) by(tid uint32, n *node) link {
	t.mu.Lock()
	defer t.mu.Unlock()
	if l, ok := t.byTid[tid]; ok && l.node == n.id {
		delete(t.byTid, tid)
		return l.at
	}
	if names := n.lockNames(); len(names) == 1 {
		return names[0]
	}
	return link{}
}
