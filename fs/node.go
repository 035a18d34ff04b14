package fs

import (
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// A node is an inode that the kernel knows, or the parent of one.
type node struct {
	tab *nodeTable
	id  uint64   // what the kernel calls it; never used twice
	key identity // what the backing calls it
	typ uint32   // S_IFMT bits

	plain plainMark

	cached *dirFD         // protected by dirCache.mu
	dir    *lockstate.Dir // for a directory; set once

	// changing is held shared while a file is changed by its node, and
	// exclusively while it gets another name: a change belongs to the names
	// that the file had when it was admitted (W3).
	changing sync.RWMutex

	// Protected by tab.mu.
	lookups uint64 // how often the kernel was told, less what it forgot
	kids    int    // links that name this node as parent
	links   []link // the names that are known
	nlink   uint32 // how many names the backing had at last
	fd      int    // keeps a file that has lost its last name; else -1
	pins    int    // uses by the daemon itself
	writers map[*lockstate.Handle]struct{}

	removals uint64 // how many names in this directory have gone

	cand *candidate // a private file (A9); set before the node is shared
}

// A link is one name of a node.
type link struct {
	parent *node
	name   string
}

// location returns one name of n, or the descriptor that stands for it.
func (n *node) location() (parent *node, name string, fd int) {
	n.tab.mu.RLock()
	defer n.tab.mu.RUnlock()
	if n.fd >= 0 {
		return nil, "", n.fd
	}
	if len(n.links) == 0 {
		return nil, "", -1
	}
	return n.links[0].parent, n.links[0].name, -1
}

func (n *node) isDir() bool { return n.typ == unix.S_IFDIR }

// names returns the names of n that are known.
func (n *node) names() []link {
	n.tab.mu.RLock()
	defer n.tab.mu.RUnlock()
	return slices.Clone(n.links)
}

// nodeTable holds the nodes, by the kernel's number and by the backing's
// identity.
type nodeTable struct {
	table *lockstate.Table
	drop  func(*node) // called with mu held when a node is forgotten
	// shared reports whether locks do not cover a file under a name (W5).
	shared func(parent *node, name string) bool

	mu    sync.RWMutex
	byID  map[uint64]*node
	byKey map[identity]*node
	next  uint64
}

// firstNode is the first number of an ordinary node: those below are the root
// and the control directory's.
const firstNode = 1 << 10

func newNodeTable(t *lockstate.Table) *nodeTable {
	return &nodeTable{
		table: t, byID: make(map[uint64]*node), byKey: make(map[identity]*node), next: firstNode,
	}
}

// get returns the node with the kernel's number, or nil.
func (t *nodeTable) get(id uint64) *node {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.byID[id]
}

// find returns the node of a file of the backing, or nil.
func (t *nodeTable) find(key identity) *node {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.byKey[key]
}

// removalsOf returns a number that changes when a name in parent goes. Whoever
// looks at the backing takes it before.
func (t *nodeTable) removalsOf(parent *node) uint64 {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return parent.removals
}

// removed takes note that a name in parent has gone that no node had.
func (t *nodeTable) removed(parent *node) {
	t.mu.Lock()
	defer t.mu.Unlock()
	parent.removals++
}

// see returns the node of what the backing has at name in parent, which the
// kernel is about to be told of. It returns nil if a name in parent has gone
// since the caller looked: it may have been this one. The caller holds FS.ns.
func (t *nodeTable) see(parent *node, name string, st *unix.Statx_t, removals uint64) *node {
	key := identityOf(st)
	t.mu.Lock()
	defer t.mu.Unlock()
	if parent.removals != removals {
		return nil
	}
	n := t.byKey[key]
	if n == nil || n.typ != uint32(st.Mode)&unix.S_IFMT {
		n = &node{tab: t, id: t.next, key: key, typ: uint32(st.Mode) & unix.S_IFMT, fd: -1}
		t.next++
		if n.isDir() {
			n.dir = t.table.Dir(parent.dir, name)
		}
		t.byID[n.id] = n
		t.byKey[key] = n
	}
	n.lookups++
	n.nlink = st.Nlink
	n.linkLocked(parent, name)
	return n
}

// lookAt looks at name below dir, the open parent, and returns its node. The
// caller holds FS.ns.
func (t *nodeTable) lookAt(dir int, parent *node, name string, st *unix.Statx_t) (*node, error) {
	for {
		removals := t.removalsOf(parent)
		if err := statAt(dir, name, st); err != nil {
			return nil, err
		}
		if n := t.see(parent, name, st, removals); n != nil {
			return n, nil
		}
	}
}

// anonymous adds a node without a name: an O_TMPFILE file or a private one.
func (t *nodeTable) anonymous(st *unix.Statx_t, fd int, c *candidate) *node {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := &node{tab: t, id: t.next, key: identityOf(st), typ: uint32(st.Mode) & unix.S_IFMT, lookups: 1, nlink: st.Nlink, fd: fd, cand: c}
	t.next++
	t.byID[n.id] = n
	if c == nil {
		t.byKey[n.key] = n
	}
	return n
}

// linkLocked notes a name of n.
func (n *node) linkLocked(parent *node, name string) {
	for _, l := range n.links {
		if l.parent == parent && l.name == name {
			return
		}
	}
	if n.isDir() {
		// A directory has one name; an old one was renamed in the backing.
		for _, l := range n.links {
			l.parent.kids--
		}
		n.links = n.links[:0]
	}
	n.links = append(n.links, link{parent, name})
	parent.kids++
}

func (n *node) unlinkLocked(parent *node, name string) {
	for i, l := range n.links {
		if l.parent == parent && l.name == name {
			n.links = slices.Delete(n.links, i, i+1)
			parent.kids--
			n.tab.releaseLocked(parent)
			return
		}
	}
}

// relink changes names of n: one goes, one comes; either may be empty.
func (n *node) relink(old, now link) {
	n.tab.mu.Lock()
	if now.parent != nil {
		n.linkLocked(now.parent, now.name)
	}
	if old.parent != nil && old != now {
		old.parent.removals++
		n.unlinkLocked(old.parent, old.name)
	}
	n.tab.mu.Unlock()
	n.followHandles()
}

// followHandles tells the write handles of n where it is now.
func (n *node) followHandles() {
	n.tab.mu.RLock()
	hs := make([]*lockstate.Handle, 0, len(n.writers))
	for h := range n.writers {
		hs = append(hs, h)
	}
	n.tab.mu.RUnlock()
	if len(hs) == 0 {
		return
	}
	dirs, name := n.covering()
	for _, h := range hs {
		h.Moved(name, dirs...)
	}
}

// covering returns the directories whose locks cover n, and its name in the
// first: the directory itself, or all that are known to have a name of a file.
func (n *node) covering() (dirs []*lockstate.Dir, name string) {
	n.tab.mu.RLock()
	defer n.tab.mu.RUnlock()
	if n.dir != nil {
		return []*lockstate.Dir{n.dir}, "."
	}
	for i, l := range n.links {
		if i == 0 {
			name = l.name
		}
		if n.tab.shared(l.parent, l.name) {
			continue
		}
		if !slices.Contains(dirs, l.parent.dir) {
			dirs = append(dirs, l.parent.dir)
		}
	}
	return dirs, name
}

// handles returns the write handles open on n.
func (n *node) handles() []*lockstate.Handle {
	n.tab.mu.RLock()
	defer n.tab.mu.RUnlock()
	hs := make([]*lockstate.Handle, 0, len(n.writers))
	for h := range n.writers {
		hs = append(hs, h)
	}
	return hs
}

func (n *node) addWriter(h *lockstate.Handle) {
	n.tab.mu.Lock()
	defer n.tab.mu.Unlock()
	if n.writers == nil {
		n.writers = make(map[*lockstate.Handle]struct{})
	}
	n.writers[h] = struct{}{}
}

func (n *node) removeWriter(h *lockstate.Handle) {
	n.tab.mu.Lock()
	defer n.tab.mu.Unlock()
	delete(n.writers, h)
}

// keep gives n a descriptor that stands for it when its last name is gone.
func (n *node) keep(fd int) (kept bool) {
	n.tab.mu.Lock()
	defer n.tab.mu.Unlock()
	if n.fd >= 0 {
		return false
	}
	n.fd = fd
	return true
}

// pin keeps n in the table until unpin.
func (n *node) pin() {
	n.tab.mu.Lock()
	n.pins++
	n.tab.mu.Unlock()
}

func (n *node) unpin() {
	n.tab.mu.Lock()
	n.pins--
	n.tab.releaseLocked(n)
	n.tab.mu.Unlock()
}

// forget takes back lookups that the kernel was told of.
func (t *nodeTable) forget(id, lookups uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.byID[id]
	if n == nil || id < firstNode {
		return
	}
	n.lookups -= min(lookups, n.lookups)
	t.releaseLocked(n)
}

// releaseLocked drops n if nothing needs it, and parents that only it needed.
func (t *nodeTable) releaseLocked(n *node) {
	if n.lookups > 0 || n.kids > 0 || n.pins > 0 || n.id < firstNode || t.byID[n.id] != n {
		return
	}
	delete(t.byID, n.id)
	if t.byKey[n.key] == n {
		delete(t.byKey, n.key)
	}
	links := n.links
	n.links = nil
	t.drop(n)
	for _, l := range links {
		l.parent.kids--
		t.releaseLocked(l.parent)
	}
}

func (t *nodeTable) len() int {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return len(t.byID)
}

// settle gives a node that was private its place in the backing. It takes over
// fd, an O_PATH descriptor of it, or -1.
func (t *nodeTable) settle(n *node, st *unix.Statx_t, links []link, fd int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n.key, n.nlink = identityOf(st), st.Nlink
	if t.byKey[n.key] == nil {
		t.byKey[n.key] = n
	} else if fd >= 0 {
		// Another node stands for the same file: it is the one that hears
		// of changed names, so this one stands by a descriptor.
		n.fd = fd
		fd = -1
	}
	if fd >= 0 {
		unix.Close(fd)
	}
	for _, l := range links {
		n.linkLocked(l.parent, l.name)
	}
}

// again counts one more time that the kernel is told of n.
func (t *nodeTable) again(n *node) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n.lookups++
}
