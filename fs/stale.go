package fs

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// When unlink(2) is answered, the kernel goes by the name still until the thread that
// called it has run again. In a directory that somebody has acquired meanwhile, who
// opens the file by that name would write to what is gone already, and hear of no error
// (W3). So whoever finds a file without a name hears ESTALE: the kernel asks for the name
// again then, once, and waits for that thread before it makes the file anew. Who has got
// there without a name, as by /proc/self/fd, comes back and is served, and so is who is
// overtaken by another removal.

const (
	// maxStale bounds how many threads are remembered.
	maxStale = 1 << 12
	// againTime is within which a thread that was told so comes back, also if the daemon
	// or the backing is stopped meanwhile.
	againTime = time.Minute
	// askedTime is within which it mostly does: later it may be in another system call.
	askedTime = 100 * time.Millisecond
)

// staleFinds are the threads that are to look again.
type staleFinds struct {
	some  atomic.Bool // there are any
	mu    sync.Mutex
	byTid map[uint32]*staleFind
	asked map[uint32]staleAsk // threads that were told so when they asked for attributes
	swept time.Time           // when those were forgotten that did not come
}

type staleAsk struct {
	at    time.Time
	node  uint64 // what it has looked up since, or 0
	empty bool   // it has found no name since
}

type staleFind struct {
	at    time.Time // when it was told so,
	told  uint64    // in answer to which request
	node  uint64    // what it comes back to: what that was about, or what it has looked up since; 0: nothing
	in    uint64    // the directory that it has looked in since, or 0,
	empty string    // and what was the first name that it did not find there
	twice bool      // it has looked for that again: see looked
	makes string    // what it was about to make, or ""
	again uint64    // the request by which it came back
}

// found reports whether a thread is to look again, since it may have got somewhere by a
// name that is gone. It is told so once in a system call: that would fail else. Who comes
// to a file that it has not looked up, or names something in a directory that it has not
// looked in, is in another one: then it did not find the name, and nothing came of the
// first. makes is the name that the request is to make, or "", and dirs are further
// directories that it names something in.
func (t *staleFinds) found(stale, file bool, h *fuse.InHeader, makes string, dirs ...*node) bool {
	if h.Pid == 0 || !stale && !t.some.Load() {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	if f := t.byTid[h.Pid]; f != nil {
		if f.told == h.Unique {
			return stale
		}
		if now.Sub(f.at) < againTime && f.comesBack(file, h, dirs) {
			f.again = h.Unique
			return false
		}
		delete(t.byTid, h.Pid)
	}
	if now.Sub(t.swept) > againTime {
		t.swept = now
		maps.DeleteFunc(t.byTid, func(_ uint32, f *staleFind) bool { return now.Sub(f.at) > againTime })
		maps.DeleteFunc(t.asked, func(_ uint32, a staleAsk) bool { return now.Sub(a.at) > askedTime })
	}
	if stale && len(t.byTid) >= maxStale {
		maps.DeleteFunc(t.byTid, func(_ uint32, f *staleFind) bool { return f.again != 0 })
		stale = len(t.byTid) < maxStale
	}
	if stale {
		if t.byTid == nil {
			t.byTid = make(map[uint32]*staleFind)
		}
		t.byTid[h.Pid] = &staleFind{at: now, told: h.Unique, node: h.NodeId, makes: makes}
	}
	t.some.Store(len(t.byTid)+len(t.asked) > 0)
	return stale
}

// comesBack reports whether a request is of the system call in which its thread was told.
func (f *staleFind) comesBack(file bool, h *fuse.InHeader, dirs []*node) bool {
	switch {
	case f.again != 0:
		return f.again == h.Unique
	case file:
		return f.node == h.NodeId
	case f.twice && f.empty != f.makes:
		return false
	}
	return f.node == h.NodeId || f.in == h.NodeId || slices.ContainsFunc(dirs, func(d *node) bool { return f.in == d.id })
}

// gone is the answer to who can't be served by a name that leads nowhere: ESTALE, at which
// the kernel looks again, and ENOENT to who has done so and found the next that is gone,
// since the system call would fail with ESTALE then.
func (t *staleFinds) gone(file bool, h *fuse.InHeader) fuse.Status {
	first := h.Pid == 0 || t.found(true, file, h, "")
	t.mu.Lock()
	defer t.mu.Unlock()
	if first && !t.askedLocked(h) {
		return fuse.Status(unix.ESTALE)
	}
	t.forgetLocked(h.Pid)
	return fuse.ENOENT
}

// goneAttr is gone for who asks for attributes, as the kernel does on the way to what it
// is to open, or to change. Nobody is served for having been told so.
func (t *staleFinds) goneAttr(h *fuse.InHeader) fuse.Status {
	if h.Pid == 0 {
		return fuse.Status(unix.ESTALE)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	again := t.askedLocked(h)
	if f := t.byTid[h.Pid]; f != nil && f.again == 0 && f.node == h.NodeId && time.Since(f.at) < againTime {
		again = true
	}
	if again {
		t.forgetLocked(h.Pid)
		return fuse.ENOENT
	}
	if t.asked == nil || len(t.asked) >= maxStale {
		t.asked = make(map[uint32]staleAsk)
	}
	t.asked[h.Pid] = staleAsk{at: time.Now()}
	t.some.Store(true)
	return fuse.Status(unix.ESTALE)
}

// askedLocked reports whether a thread was told so when it asked for attributes, and has
// come back to what it has looked up since.
func (t *staleFinds) askedLocked(h *fuse.InHeader) bool {
	a := t.asked[h.Pid]
	return a.node != 0 && a.node == h.NodeId && time.Since(a.at) < askedTime
}

// forgetLocked takes note that a thread has heard of its end.
func (t *staleFinds) forgetLocked(tid uint32) {
	delete(t.asked, tid)
	delete(t.byTid, tid)
	t.some.Store(len(t.byTid)+len(t.asked) > 0)
}

// looked takes note of what a thread has looked up in a directory: node 0 says that there
// is no such name. The kernel may ask twice for a name in one system call: whether what it
// has found before is there still, and, if it is not, what is there instead. Or somebody
// else has taken that from its cache, and the second time is another system call already,
// in which the thread is not to be taken for told: what it does to the file that it has
// found just now is as good as done before that was gone, but what it does in a directory
// is not, unless it was told as it was about to make that name: then it comes back to make
// it. So it reports whether the kernel is not to remember the answer: who looks again
// is in another system call.
func (t *staleFinds) looked(tid uint32, in, node uint64, name string) (told bool) {
	if !t.some.Load() {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if f := t.byTid[tid]; f != nil && f.again == 0 {
		told = true
		switch {
		case f.twice || f.empty != "" && (f.in != in || f.empty != name):
			delete(t.byTid, tid)
			told = false
		case f.empty != "":
			f.node, f.twice = node, true
		default:
			f.node, f.in = node, in
			if node == 0 {
				f.empty = name
			}
		}
	}
	switch a, ok := t.asked[tid]; {
	case !ok:
	case node == 0 && a.empty || time.Since(a.at) >= askedTime:
		delete(t.asked, tid)
	default:
		a.node, a.empty = node, node == 0
		t.asked[tid] = a
	}
	return told
}

// takeBack forgets that a thread is told by a request to look again: it is served after all.
func (t *staleFinds) takeBack(h *fuse.InHeader) {
	if !t.some.Load() {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if f := t.byTid[h.Pid]; f != nil && f.told == h.Unique {
		t.forgetLocked(h.Pid)
	}
}

// openedStale is found for an open of a file. What is only read does no harm, and the
// kernel opens files by itself for ioctl(2) and fanotify(7), without a second try.
func (fs *FS) openedStale(n *node, in *fuse.OpenIn) bool {
	stale := writes(in.Flags) && n.isUnlinked()
	if !stale && fs.underWay.some.Load() {
		_, lockFile := fs.lockFileOf(n)
		stale = (lockFile || writes(in.Flags)) && fs.underWay.mislead(fs, n, in.Pid, lockFile)
	}
	return fs.stale.found(stale, true, &in.InHeader, "")
}

// changedStale is found for setattr and the like. Who has a file open may change it by the
// descriptor, where the kernel looks no name up again; all but its size, for which the
// descriptor would be told. Whether anybody has something else open is not known.
func (fs *FS) changedStale(n *node, h *fuse.InHeader, size bool) bool {
	stale := n.isUnlinked() || n.isFile() && fs.underWay.mislead(fs, n, h.Pid, false)
	if stale && !size && n.isOpen() {
		return false
	}
	return fs.stale.found(stale, n.isFile(), h, "")
}

// namedStale is found for what makes, removes or renames something in a directory, which
// may be an acquisition, and for what else it names. makes is the name that comes, or "".
func (fs *FS) namedStale(h *fuse.InHeader, acquires bool, makes string, dir *node, others ...*node) bool {
	stale := fs.underWay.mislead(fs, dir, h.Pid, acquires)
	for _, n := range others {
		stale = stale || fs.underWay.mislead(fs, n, h.Pid, acquires)
	}
	return fs.stale.found(stale, false, h, makes, others...)
}

// isUnlinked reports whether n is a regular file whose last name the kernel has had
// removed: who has anything else open, the daemon does not know.
func (n *node) isUnlinked() bool {
	m := n.more.Load()
	if m == nil || !m.unlinked.Load() || !n.isFile() {
		return false
	}
	_, _, fd := n.location()
	return fd >= 0
}
