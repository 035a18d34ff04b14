package fs

import (
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// A shared mapping of a file that passes belongs to the backing file: the
// kernel sends RELEASE at the last close although the mapping can still write
// (W3). So a handle that may have been mapped writable lingers in the lock
// table until nobody has the backing file open for writing any more, a mapping
// included. fcntl(2) tells: a read lease is refused as long as somebody has.
//
// The lease lasts for a moment only, but an open for writing in that moment
// would wait for it, or fail. Nobody opens: the kernel opens the backing file
// for a handle that is counted in file.writers, the daemon for one in
// file.writing, and both are changed with the file's mutex held.

// checkLocked ends the handles that linger on a file, if nobody can write to
// it any more. fd is a read-only descriptor of it.
func (fs *FS) checkLocked(f *file, fd int) {
	if len(f.lingering) == 0 || f.openToWrite() || fd < 0 {
		return
	}
	if readLease(fd) != nil {
		return // EAGAIN; and when in doubt, it lingers
	}
	fs.endLingeringLocked(f)
}

func (fs *FS) endLingeringLocked(f *file) {
	for _, h := range f.lingering {
		fs.handles.over(h)
	}
	f.lingering = nil
}

// stillMappedLocked reports whether somebody may write to the file through a
// mapping that has outlived its handle. The caller holds FS.ns.
func (fs *FS) stillMappedLocked(n *node, f *file) bool {
	if len(f.lingering) == 0 || f.openToWrite() {
		return len(f.lingering) > 0
	}
	fd := f.fd
	if fd < 0 {
		var err error
		if fd, err = fs.openNode(n, unix.O_RDONLY|unix.O_NONBLOCK); err != nil {
			return true
		}
		defer unix.Close(fd)
	}
	fs.checkLocked(f, fd)
	return len(f.lingering) > 0
}

// lingers keeps the nodes with handles that linger, and looks at them again and
// again: there is no news of an munmap(2).
type lingers struct {
	mu    sync.Mutex
	nodes map[*node]*lingerCheck
	next  time.Time // when the first of them is due, as far as run knows
	wake  chan struct{}
	stop  chan struct{}
	done  chan struct{}
}

// A lingerCheck says when a node is looked at next.
type lingerCheck struct {
	due   time.Time
	delay time.Duration
}

const (
	firstLook  = time.Millisecond // the kernel lets go a moment after the RELEASE
	lastLook   = 30 * time.Second
	waitedLook = 50 * time.Millisecond // while somebody waits for a lock
)

// start begins to look, until close.
func (l *lingers) start(fs *FS) {
	l.nodes = make(map[*node]*lingerCheck)
	l.wake = make(chan struct{}, 1)
	l.stop, l.done = make(chan struct{}), make(chan struct{})
	go func() {
		defer close(l.done)
		l.run(fs)
	}()
}

func (l *lingers) close() {
	if l.stop != nil {
		close(l.stop)
		<-l.done
	}
}

func (l *lingers) len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.nodes)
}

func (l *lingers) run(fs *FS) {
	t := time.NewTimer(lastLook)
	defer t.Stop()
	for {
		t.Reset(l.pause())
		select {
		case <-l.stop:
			return
		case <-l.wake:
			continue
		case <-t.C:
		}
		for _, n := range l.due(fs.waits.any()) {
			fs.lookAgain(n)
		}
	}
}

// pause returns how long nothing is to be done.
func (l *lingers) pause() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	d := lastLook
	for _, c := range l.nodes {
		d = min(d, time.Until(c.due))
	}
	d = max(d, 0)
	l.next = time.Now().Add(d)
	return d
}

// due returns the nodes to look at now and puts their next time off.
func (l *lingers) due(waited bool) []*node {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	var all []*node
	for n, c := range l.nodes {
		if c.due.After(now) {
			continue
		}
		all = append(all, n)
		c.delay = min(2*c.delay, lastLook)
		if waited {
			c.delay = min(c.delay, waitedLook)
		}
		c.due = now.Add(c.delay)
	}
	return all
}

// soon has a node looked at from now on.
func (l *lingers) soon(n *node) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.soonLocked(n)
}

// sooner has a node that is looked at looked at sooner than it would be.
func (l *lingers) sooner(n *node) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, is := l.nodes[n]; is {
		l.soonLocked(n)
	}
}

func (l *lingers) soonLocked(n *node) {
	due := time.Now().Add(firstLook)
	l.nodes[n] = &lingerCheck{due: due, delay: firstLook}
	if !due.Before(l.next) {
		return // to wake somebody costs more than all the rest of a close
	}
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

func (l *lingers) forget(n *node) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.nodes, n)
}

// keepLookingLocked keeps the node of a file as long as a handle lingers on it.
func (fs *FS) keepLookingLocked(n *node, f *file) {
	switch linger := len(f.lingering) > 0; {
	case linger && !f.watched:
		n.pin()
		fs.linger.soon(n)
	case !linger && f.watched:
		fs.linger.forget(n)
		n.unpin()
	}
	f.watched = len(f.lingering) > 0
}

// lookAgain looks whether handles still linger on n. It returns those that do; none if
// somebody has it open for writing, as of which there is no telling.
func (fs *FS) lookAgain(n *node) (mapped []*handle) {
	fs.ns.RLock()
	defer fs.ns.RUnlock()
	f := n.lockFile()
	defer n.unlockFile(f)
	open := f.openToWrite()
	if fs.stillMappedLocked(n, f) && (n.forgotten() || fs.vanishedLocked(n, f)) {
		// It has no name and nobody can give it one: what is written to
		// it is seen by nobody but the mapping's own processes.
		fs.endLingeringLocked(f)
	}
	if !open {
		mapped = slices.Clone(f.lingering)
	}
	for _, h := range mapped {
		if !h.releasedJustNow() {
			h.lock.Written()
		}
	}
	fs.keepLookingLocked(n, f)
	return mapped
}

// forgotten reports whether n has no name and the kernel does not know it.
func (n *node) forgotten() bool {
	n.tab.mu.RLock()
	defer n.tab.mu.RUnlock()
	m := n.more.Load() // it is pinned: there is one
	var st unix.Statx_t
	return n.parent == nil && n.lookups == 0 && m.lookups == 0 && m.fd >= 0 && statAt(m.fd, "", &st) == nil && st.Nlink == 0
}

// vanishedLocked reports whether the file was taken from the backing past the
// mount, so that nothing can be learnt of it any more. The caller holds FS.ns.
func (fs *FS) vanishedLocked(n *node, f *file) bool {
	if f.fd >= 0 || f.openToWrite() {
		return false
	}
	fd, err := fs.openNode(n, unix.O_PATH)
	drop(fd)
	return err == unix.ENOENT || err == unix.ESTALE
}

// settleLingering looks at the handles in the way of an acquisition that
// linger, and reports whether one of them does no longer.
func (fs *FS) settleLingering(held *lockstate.HeldError) bool {
	ended := false
	for _, s := range held.Handles {
		h := fs.handles.byLock(s.Handle)
		if h == nil || !h.lingering() {
			continue
		}
		fs.lookAgain(h.node)
		if fs.handles.byLock(s.Handle) == nil {
			ended = true
		} else {
			fs.linger.sooner(h.node) // the next one need not be refused; or it is about to end
		}
	}
	return ended
}

// findMapped tells a lock that was acquired just now of what its owner, or another holder,
// has mapped beneath the directory since before: what is written there nobody tells (R5).
// The kernel lets go of a file before who has closed it goes on; but the RELEASE may come
// later, and then it is found out after a while.
func (fs *FS) findMapped(l *lockstate.Lock) {
	if l == nil || l.Changed || l.Client != "" || !fs.table.HandlesBelow(l.Dir) {
		return
	}
	_, open := fs.table.Below(l.Dir)
	looked := make(map[*node]bool)
	for _, s := range open {
		if h := fs.handles.byLock(s.Handle); h != nil && h.lingering() && !looked[h.node] {
			looked[h.node] = true
			for _, mapped := range fs.lookAgain(h.node) {
				mapped.lock.Written()
			}
		}
	}
}

// lingering reports whether h was released.
func (h *handle) lingering() bool { return h.released.Load() != 0 }

// releasedJustNow reports whether the kernel may not have let go of h yet.
func (h *handle) releasedJustNow() bool {
	return time.Now().UnixNano()-h.released.Load() < int64(closeTime)
}
