package fs

import (
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// A node is an inode that the kernel knows, or the parent of one. There is one
// for each file that the kernel remembers, a million of them after a long walk:
// what few files need is in nodeMore.
type node struct {
	tab *nodeTable
	id  uint64         // what the kernel calls it, see numberLocked
	dir *lockstate.Dir // for a directory; set once

	// What the backing calls it, see identity.
	ino   uint64
	birth int64

	// Protected by tab.mu.
	parent *node // of the first name that is known; nil: none is
	first  *byte // that name

	more atomic.Pointer[nodeMore] // a directory's is never nil; set with tab.mu held

	lookups  uint32 // how often the kernel was told, less what it forgot, and less nodeMore.lookups
	plain    plainMark
	dev      uint32 // as ino
	nlink    uint16 // how many names the backing had at last, or 65535 for more
	kind     uint8  // S_IFMT bits, shifted
	firstLen uint8  // bytes in first
}

// nodeMore is what only directories need, and files that are open for writing,
// have several names or none.
type nodeMore struct {
	cached *dirFD // protected by dirCache.mu

	// Protected by nodeTable.mu.
	lookups uint64   // more of them
	kids    int      // links that name this node as parent
	links   *linkSet // names beyond the first, or nil
	fd      int      // keeps a file that has lost its last name; else -1
	big     bool     // and much room with it
	round   uint64   // nodeTable.round when it was given that; 0: the kernel does not know that its name is gone
	pins    int      // uses by the daemon itself
	writers map[*lockstate.Handle]struct{}

	leaving  atomic.Int32  // how many names in this directory are about to go, see FS.unlink
	removals atomic.Uint64 // how many names in this directory have gone; changed with nodeTable.mu held

	assumed atomic.Bool // the kernel has given it a lock file's name, and does not ask for that each time

	cand *candidate // a private file (A9); set before the node is shared
}

// empty reports whether a file can do without.
func (m *nodeMore) empty() bool {
	return m.lookups == 0 && m.kids == 0 && m.links.len() == 0 && m.fd < 0 && m.pins == 0 && len(m.writers) == 0 && !m.assumed.Load() && m.cand == nil
}

// A link is one name of a node.
type link struct {
	parent *node
	name   string
}

// key returns the node's identity in the backing.
func (n *node) key() identity { return identity{dev: n.dev, ino: n.ino, birth: n.birth} }

func (n *node) setKey(id identity) { n.dev, n.ino, n.birth = id.dev, id.ino, id.birth }

// candidate returns the private file that n stands for or stood for, or nil.
func (n *node) candidate() *candidate {
	if m := n.more.Load(); m != nil {
		return m.cand
	}
	return nil
}

// needLocked returns n's nodeMore, which it did not have perhaps.
func (n *node) needLocked() *nodeMore {
	m := n.more.Load()
	if m == nil {
		m = &nodeMore{fd: -1}
		n.more.Store(m)
	}
	return m
}

// tidyLocked drops a nodeMore that is not needed any more.
func (n *node) tidyLocked() {
	if m := n.more.Load(); m != nil && !n.isDir() && m.empty() {
		n.more.Store(nil)
	}
}

// firstLocked returns n's first name.
func (n *node) firstLocked() link {
	return link{n.parent, unsafe.String(n.first, n.firstLen)}
}

func (n *node) setFirstLocked(l link) {
	n.parent, n.first, n.firstLen = l.parent, unsafe.StringData(l.name), uint8(len(l.name))
}

// fdLocked returns the descriptor that stands for n, or -1.
func (n *node) fdLocked() int {
	if m := n.more.Load(); m != nil {
		return m.fd
	}
	return -1
}

// setNlinkLocked takes note of how many names the backing has.
func (n *node) setNlinkLocked(nlink uint32) { n.nlink = uint16(min(nlink, 0xffff)) }

// location returns one name of n, or the descriptor that stands for it.
func (n *node) location() (parent *node, name string, fd int) {
	n.tab.mu.RLock()
	defer n.tab.mu.RUnlock()
	if fd := n.fdLocked(); fd >= 0 {
		return nil, "", fd
	}
	l := n.firstLocked()
	return l.parent, l.name, -1
}

func (n *node) isDir() bool { return n.kind == unix.S_IFDIR>>12 }

// namesLocked returns the names of n that are known. The caller holds tab.mu.
func (n *node) namesLocked() []link {
	if n.parent == nil {
		return nil
	}
	all := []link{n.firstLocked()}
	if m := n.more.Load(); m != nil && m.links != nil {
		all = append(all, m.links.all...)
	}
	return all
}

// adrift reports whether nothing leads to n any more: the daemon has put it aside, or
// what it is in.
func (n *node) adrift() bool {
	n.tab.mu.RLock()
	defer n.tab.mu.RUnlock()
	for ; n.id >= firstNode; n = n.parent {
		if n.parent == nil {
			return n.fdLocked() < 0 && n.candidate() == nil
		}
	}
	return false
}

// lineage returns what the backing calls a directory and those above it.
func (n *node) lineage() (all []lockstate.FileID) {
	n.tab.mu.RLock()
	defer n.tab.mu.RUnlock()
	return n.lineageLocked(nil)
}

func (n *node) lineageLocked(all []lockstate.FileID) []lockstate.FileID {
	for ; n != nil; n = n.parent {
		all = append(all, lockstate.FileID{Dev: uint64(n.dev), Ino: n.ino, Birth: n.birth})
	}
	return all
}

// above returns the lineages of all directories that a file is known to be in.
func (n *node) above() (all []lockstate.FileID) {
	n.tab.mu.RLock()
	defer n.tab.mu.RUnlock()
	seen := make(map[*node]bool)
	for _, l := range n.namesLocked() {
		if !seen[l.parent] {
			seen[l.parent] = true
			all = l.parent.lineageLocked(all)
		}
	}
	return all
}

// hasUnknownNames reports whether the backing has names of n that the kernel
// never looked up.
func (n *node) hasUnknownNames() bool {
	if n.isDir() {
		return false
	}
	n.tab.mu.RLock()
	defer n.tab.mu.RUnlock()
	return n.nlink > 1 && (n.knownLocked() < int(n.nlink) || n.nlink == 0xffff)
}

// linkLocked notes a name of n, and reports whether it was not known.
func (n *node) linkLocked(parent *node, name string) (added bool) {
	l := link{parent, name}
	if n.parent != nil && n.firstLocked() == l {
		return false
	}
	m := n.more.Load()
	if m != nil && m.links.index(l) >= 0 {
		return false
	}
	if n.isDir() && n.parent != nil {
		// A directory has one name; an old one was renamed in the backing.
		n.parent.more.Load().kids--
		n.parent = nil
	}
	if n.parent == nil {
		n.setFirstLocked(l)
	} else {
		m = n.needLocked()
		if m.links == nil {
			m.links = new(linkSet)
		}
		m.links.add(n.tab, l)
	}
	parent.more.Load().kids++
	return true
}

// preferLocked makes a known name of n the one by which it is reached. To an overlay
// without an index one that was changed is another file. It stays a name of this one
// as far as locks go: they cover rather too much (W3).
func (n *node) preferLocked(l link) {
	m := n.more.Load()
	if m == nil || n.parent == nil || n.firstLocked() == l {
		return
	}
	if i := m.links.index(l); i >= 0 {
		m.links.remove(n.tab, i)
		m.links.add(n.tab, n.firstLocked())
		n.setFirstLocked(l)
	}
}

func (n *node) unlinkLocked(parent *node, name string) {
	l := link{parent, name}
	m := n.more.Load()
	switch {
	case n.parent != nil && n.firstLocked() == l:
		n.setFirstLocked(link{})
		if m != nil && m.links.len() > 0 {
			n.setFirstLocked(m.links.remove(n.tab, m.links.len()-1))
		}
	case m != nil && m.links.index(l) >= 0:
		m.links.remove(n.tab, m.links.index(l))
	default:
		return
	}
	if m != nil && m.links.len() == 0 {
		m.links = nil
	}
	n.tidyLocked()
	parent.more.Load().kids--
	n.tab.releaseLocked(parent)
}

// relink changes names of n: one goes, one comes; either may be empty. The caller
// holds FS.ns.
func (n *node) relink(old, now link) {
	if n.renamed(old, now) {
		n.tab.follow(n)
	}
}

// renamed is relink, and reports whether somebody may write to n.
func (n *node) renamed(old, now link) bool {
	n.tab.mu.Lock()
	defer n.tab.unlock()
	if now.parent != nil {
		n.linkLocked(now.parent, now.name)
	}
	if old.parent != nil && old != now {
		old.parent.more.Load().removals.Add(1)
		n.unlinkLocked(old.parent, old.name)
	}
	return n.tellHandlesLocked()
}

// followHandles tells the write handles of n where it is now.
func (n *node) followHandles() {
	if n.more.Load() == nil {
		return
	}
	n.tab.mu.RLock()
	defer n.tab.mu.RUnlock()
	n.tellHandlesLocked()
}

// tellHandlesLocked is followHandles in one step with what changed: who is told
// last must not be told what was before. It reports whether there are any.
func (n *node) tellHandlesLocked() bool {
	m := n.more.Load()
	if m == nil || len(m.writers) == 0 {
		return false
	}
	dirs, name := n.coveringLocked()
	for h := range m.writers {
		h.Moved(name, dirs...)
	}
	return true
}

// covering returns the directories whose locks cover n, and its name in the
// first: the directory itself, or all that are known to have a name of a file.
func (n *node) covering() (dirs []*lockstate.Dir, name string) {
	if n.dir != nil {
		return []*lockstate.Dir{n.dir}, "."
	}
	n.tab.mu.RLock()
	defer n.tab.mu.RUnlock()
	return n.coveringLocked()
}

func (n *node) coveringLocked() (dirs []*lockstate.Dir, name string) {
	m := n.more.Load()
	if n.parent == nil {
		return nil, ""
	}
	l := n.firstLocked()
	if !n.tab.shared(l.parent, l.name) {
		dirs = []*lockstate.Dir{l.parent.dir}
	}
	if m != nil {
		dirs = m.links.covering(n.tab, dirs)
	}
	return dirs, l.name
}

// handles returns the write handles open on n.
func (n *node) handles() []*lockstate.Handle {
	if n.more.Load() == nil {
		return nil
	}
	n.tab.mu.RLock()
	defer n.tab.mu.RUnlock()
	return n.writersLocked()
}

func (n *node) writersLocked() []*lockstate.Handle {
	m := n.more.Load()
	if m == nil || len(m.writers) == 0 {
		return nil
	}
	hs := make([]*lockstate.Handle, 0, len(m.writers))
	for h := range m.writers {
		hs = append(hs, h)
	}
	return hs
}

func (n *node) addWriter(h *lockstate.Handle) {
	n.tab.mu.Lock()
	defer n.tab.mu.Unlock()
	m := n.needLocked()
	if m.writers == nil {
		m.writers = make(map[*lockstate.Handle]struct{})
	}
	m.writers[h] = struct{}{}
}

func (n *node) removeWriter(h *lockstate.Handle) {
	n.tab.mu.Lock()
	defer n.tab.mu.Unlock()
	if m := n.more.Load(); m != nil {
		delete(m.writers, h)
		n.tidyLocked()
	}
}

// keep gives n a descriptor that stands for it when its last name is gone. big
// says that it keeps the backing from giving back much room, too, and told that the
// kernel knows that the name is gone.
func (n *node) keep(fd int, big, told bool) (kept bool) {
	n.tab.mu.Lock()
	defer n.tab.mu.Unlock()
	m := n.needLocked()
	if m.fd >= 0 {
		return false
	}
	m.fd, m.big, m.round = fd, big, 0
	if big {
		n.tab.big.Add(1)
	}
	if told {
		m.round = n.tab.round
		m.assumed.Store(false)
		n.tab.awaited.Add(1)
	}
	return true
}

// assume takes note that n has got a lock file's name by rename(2): the kernel knows it
// as it knew the one before, for some time.
func (n *node) assume() {
	n.tab.mu.Lock()
	n.needLocked().assumed.Store(true)
	n.tab.mu.Unlock()
}

// isAssumed reports whether n has had a lock file's name in that way.
func (n *node) isAssumed() bool {
	m := n.more.Load()
	return m != nil && m.assumed.Load()
}

// vanished reports whether n is such a lock file, and the daemon has removed it. Before
// Linux 6.16 the kernel may go by its name still: it asks again when it hears ESTALE.
func (n *node) vanished() bool {
	if !n.isAssumed() {
		return false
	}
	_, _, fd := n.location()
	return fd >= 0
}

// pin keeps n in the table until unpin.
func (n *node) pin() {
	n.tab.mu.Lock()
	n.needLocked().pins++
	n.tab.mu.Unlock()
}

func (n *node) unpin() {
	n.tab.mu.Lock()
	n.needLocked().pins--
	n.tidyLocked()
	n.tab.releaseLocked(n)
	n.tab.unlock()
}
