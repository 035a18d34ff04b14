package fs

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// A candidate is the temporary file of a link(2) protocol: the client makes it
// before it knows whether it will get the lock (A9). In a directory that
// somebody else holds it is private: it exists in the daemon's memory, for its
// creator alone, until it wins or goes. In a free directory it is an ordinary
// file that the creator may link and remove whatever happens meanwhile.
type candidate struct {
	fs     *FS
	parent *node // pinned while the candidate is registered
	name   string
	owner  *procid.Process
	node   *node    // pinned likewise; nil for an ordinary file
	key    identity // of an ordinary file
	// lockFile: it stands for the lock file itself, opened by somebody who
	// waits for the directory (A10).
	lockFile bool
	record   uint64 // see candidates.record; 0: none

	won atomic.Bool // it is an ordinary file now, or was from the start

	// Protected by mu, for private ones.
	mu      sync.Mutex
	handles []*handle // that are open on it
	data    []byte
	mode    uint32
	uid     uint32
	gid     uint32
	atime   time.Time
	mtime   time.Time
}

const (
	candidateSize = 4096 // bytes in one

	// What one process may have at a time: so many candidates, or so many whose content is not
	// kept here: lock files, as a program may wait for many directories, and ordinary files, as
	// it may be given many locks (R5).
	candidatesEach = 16
	lockFilesEach  = 1024
)

// candidates are all that live, by place: everybody may have one of the same
// name.
type candidates struct {
	table *lockstate.Table
	store lockstate.Store // nil: they are not recorded
	world string

	mu   sync.Mutex
	all  map[link][]*candidate
	each map[procid.ID]int   // the parts of lockFilesEach that are taken
	next uint64              // record
	left map[uint64]leftover // of dead processes, by the record
}

func (cs *candidates) init(table *lockstate.Table) {
	cs.table = table
	cs.all = make(map[link][]*candidate)
	cs.each = make(map[procid.ID]int)
	cs.left = make(map[uint64]leftover)
}

// private reports whether c stands for a file that is not in the backing.
func (c *candidate) private() bool {
	return c != nil && !c.won.Load()
}

// room is what c takes of what its owner may have.
func (c *candidate) room() int {
	if c.lockFile || c.node == nil {
		return 1
	}
	return lockFilesEach / candidatesEach
}

// add registers c and reports whether there is room.
func (cs *candidates) add(c *candidate) bool {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	at, id := link{c.parent, c.name}, c.owner.ID()
	if cs.each[id]+c.room() > lockFilesEach {
		return false
	}
	for _, o := range cs.all[at] {
		if o.owner.ID() == id {
			return false
		}
	}
	cs.all[at] = append(cs.all[at], c)
	cs.each[id] += c.room()
	c.parent.pin()
	if c.node != nil {
		c.node.pin()
	}
	return true
}

// drop forgets c.
func (cs *candidates) drop(c *candidate) {
	cs.mu.Lock()
	at, id := link{c.parent, c.name}, c.owner.ID()
	i := slices.Index(cs.all[at], c)
	if i < 0 {
		cs.mu.Unlock()
		return
	}
	if cs.all[at] = slices.Delete(cs.all[at], i, i+1); len(cs.all[at]) == 0 {
		delete(cs.all, at)
	}
	if cs.each[id] -= c.room(); cs.each[id] == 0 {
		delete(cs.each, id)
	}
	cs.mu.Unlock()
	cs.unrecord(c.record)
	c.parent.unpin()
	if c.node != nil {
		c.node.unpin()
	}
	c.fs.unwatch(id)
}

// forget drops the ordinary candidate at a place that has lost its name.
func (cs *candidates) forget(parent *node, name string) {
	for _, c := range cs.here(parent, name) {
		if c.node == nil {
			cs.drop(c)
		}
	}
}

// here returns the candidates at a place.
func (cs *candidates) here(parent *node, name string) []*candidate {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return slices.Clone(cs.all[link{parent, name}])
}

func (cs *candidates) has(id procid.ID) bool {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return cs.each[id] > 0
}

// at returns the candidate of the caller at a place.
func (cs *candidates) at(parent *node, name string, caller func() *procid.Process) *candidate {
	all := cs.here(parent, name)
	if len(all) == 0 {
		return nil
	}
	p := caller()
	for _, c := range all {
		if p != nil && (p.ID() == c.owner.ID() || p.Descends(c.owner.ID()) && !c.hiddenFrom(p)) {
			return c
		}
	}
	return nil
}

// hiddenFrom reports whether a descendant of the owner does not see c: a holder of the
// directory makes its lock file there, whatever an ancestor waits with for that to end.
func (c *candidate) hiddenFrom(p *procid.Process) bool {
	d := c.parent.dir
	return c.lockFile && c.fs.table.Holds(p, d) && !c.fs.table.Holds(c.owner, d)
}

// get returns the caller's private candidate at a place.
func (cs *candidates) get(fs *FS, h *fuse.InHeader, parent *node, name string) *candidate {
	if c := cs.at(parent, name, func() *procid.Process { p, _, _ := fs.process(h); return p }); c.private() && c.node != nil {
		return c
	}
	return nil
}

// owned reports whether the request is about a candidate of the caller's that
// is an ordinary file. The caller holds FS.ns.
func (cs *candidates) owned(r *request) bool {
	c := cs.at(r.parent, r.name, r.process)
	if c == nil || c.node != nil {
		return false
	}
	_, ok := c.place()
	return ok
}

// ownsOnly reports whether n is a candidate of the caller's that is an ordinary file, and
// has no other name.
func (fs *FS) ownsOnly(r *request, n *node) bool {
	var at link
	names := 0
	n.everyName(func(parent *node, name string) bool {
		at = link{parent, name}
		names++
		return true
	})
	if names != 1 || !fs.mayBeCandidate(at.name) {
		return false
	}
	c := fs.cands.at(at.parent, at.name, r.process)
	if c == nil || c.node != nil {
		return false
	}
	var st unix.Statx_t
	return fs.statNode(n, &st) == nil && st.Nlink == 1 && fs.identityOf(&st) == c.key && !fs.isContent(at.name, &st)
}

// isCandidate reports whether an entry of the backing is a candidate: one that
// somebody was seen to make, or of a pattern of the mount.
func (fs *FS) isCandidate(parent *node, name string) bool {
	return fs.mayBeCandidate(name) && (fs.isAddedName(name) ||
		slices.ContainsFunc(fs.cands.here(parent, name), func(c *candidate) bool { return c.node == nil }))
}

// announceCandidate records a file that the caller is about to make under a
// candidate's name in a directory that it may write to. Only a name that tells
// the caller's own pid is believed: the file will be removed when the caller
// dies. It returns 0 for any other.
func (fs *FS) announceCandidate(r *request) (record uint64) {
	p := r.process()
	if !fs.ownCandidateName(r.name, p) {
		return 0
	}
	record = fs.cands.record(r.parent, r.name, p.ID())
	fs.cands.keep()
	return record
}

// noteCandidate registers the file, once made.
func (fs *FS) noteCandidate(r *request, h *handle, key identity, record uint64) {
	c := &candidate{fs: fs, parent: r.parent, name: r.name, owner: r.process(), key: key, record: record}
	h.candidate.Store(fs.registerCandidate(c))
}

// registerCandidate registers an ordinary file as a candidate.
func (fs *FS) registerCandidate(c *candidate) bool {
	c.won.Store(true)
	if c.record == 0 {
		c.record = fs.cands.recordMade(c)
	}
	if fs.register(c) {
		return true
	}
	fs.cands.unrecord(c.record)
	return false
}

// register adds a candidate and has its owner watched. It reports false where
// there is no room, or the owner cannot be watched.
func (fs *FS) register(c *candidate) bool {
	if !fs.cands.add(c) {
		return false
	}
	if err := fs.watchNew(c.owner, fs.watch); err != nil {
		fs.cands.drop(c)
		return false
	}
	return true
}

// reap removes the candidates of a dead process, but for those of locks that go on: they
// are of use to whoever releases such a lock.
func (cs *candidates) reap(fs *FS, id procid.ID) {
	cs.mu.Lock()
	var gone []*candidate
	if cs.each[id] > 0 {
		for _, here := range cs.all {
			for _, c := range here {
				if c.owner.ID() == id {
					gone = append(gone, c)
				}
			}
		}
	}
	cs.mu.Unlock()
	for _, c := range gone {
		if c.node == nil && !c.passOn() {
			if err := fs.discard(&discarding{name: c.name, place: c.place, briefly: true}); err != nil {
				fs.leftCandidate(fs.table.Path(c.parent.dir), c.name, c.key, err)
			}
		}
		cs.drop(c)
	}
}

// leftCandidate takes note of a dead process's candidate that could not be removed.
func (fs *FS) leftCandidate(dir, name string, key identity, err error) {
	fs.leftovers.add(fs, dir, name, key)
	fs.log.Warn("cannot remove a dead process's candidate", "dir", dir, "file", name, "err", err)
}

// passOn gives an ordinary candidate to who owns the lock now that it became the lock file
// of (R5, H3), and reports whether there is one.
func (c *candidate) passOn() bool {
	heir := c.fs.ownerBy(c.fs.table.Path(c.parent.dir), c.key)
	return heir != nil && heir.ID() != c.owner.ID() &&
		c.fs.registerCandidate(&candidate{fs: c.fs, parent: c.parent, name: c.name, owner: heir, key: c.key})
}

// ownerBy returns the owner of the lock on a directory that a file keeps, or nil.
func (fs *FS) ownerBy(dir string, file identity) *procid.Process {
	if l, ok := fs.lockBy(dir, file); ok {
		return fs.heir(l.Owner)
	}
	return nil
}

// lockBy returns the lock on a directory that a file keeps.
func (fs *FS) lockBy(dir string, file identity) (l lockstate.Lock, ok bool) {
	for _, l := range fs.locksOn(dir) {
		for _, name := range l.Files {
			var st unix.Statx_t
			if fs.statIn(l.Path, name, &st) == nil && fs.identityOf(&st) == file {
				return l, true
			}
		}
	}
	return l, false
}

// place says where an ordinary candidate is, if its name is still its own and it is no
// content. The node need not know that name: it may have been seen by another one since a
// restart. The caller holds FS.ns.
func (c *candidate) place() (dir string, ok bool) {
	dir = c.fs.table.Path(c.parent.dir)
	var st unix.Statx_t
	err := c.fs.statIn(dir, c.name, &st)
	if err == nil && c.fs.isContent(c.name, &st) {
		return dir, false
	}
	if err == nil {
		return dir, c.fs.identityOf(&st) == c.key
	}
	n := c.fs.nodes.find(c.key)
	return dir, n != nil && n.has(link{c.parent, c.name})
}

// isContent reports whether a file that is called like a candidate holds more than a link(2)
// protocol writes: then it is content.
func (fs *FS) isContent(name string, st *unix.Statx_t) bool {
	return st.Size > candidateSize || st.Size > 0 && fs.mayBeLog(name)
}
