package fs

import (
	"sync/atomic"

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
	first  *byte // that name, see setFirstLocked

	more atomic.Pointer[nodeMore] // a directory's is never nil; set with tab.mu held

	lookups  uint32 // how often the kernel was told, less what it forgot, and less nodeMore.lookups
	plain    plainMark
	dev      uint32 // as ino
	nlink    uint16 // how many names the backing had at last, or 65535 for more
	kind     uint8  // S_IFMT bits, shifted
	firstLen uint8  // bytes in first, less than longName; or that
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
	writers []*lockstate.Handle

	leaving  atomic.Int32  // how many names in this directory are about to go, see FS.unlink
	removals atomic.Uint64 // how many names in this directory have gone; changed with nodeTable.mu held

	listed atomic.Int64 // the ctime in ns since which the kernel may have kept a part of its listing, see FS.listingEnds

	hashes atomic.Pointer[hashes] // of a directory's positions, if they are such; nil also before it is read

	assumed atomic.Bool // the kernel has given it a lock file's name, and does not ask for that each time

	unlinked atomic.Bool // the kernel has had its last name removed; it may have got another since

	cand *candidate // a private file (A9); set before the node is shared
}

// empty reports whether a file can do without.
func (m *nodeMore) empty() bool {
	return m.lookups == 0 && m.kids == 0 && m.links.len() == 0 && m.fd < 0 && m.pins == 0 && len(m.writers) == 0 && !m.assumed.Load() && m.cand == nil
}

// key returns the node's identity in the backing.
func (n *node) key() identity { return identity{dev: n.dev, ino: n.ino, birth: n.birth} }

func (n *node) shownIno() uint64 { return n.tab.shownIno(n.key()) }

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

// fdLocked returns the descriptor that stands for n, or -1.
func (n *node) fdLocked() int {
	if m := n.more.Load(); m != nil {
		return m.fd
	}
	return -1
}

// setNlinkLocked takes note of how many names the backing has.
func (n *node) setNlinkLocked(nlink uint32) { n.nlink = uint16(min(nlink, 0xffff)) }

// location returns one name of n, or the descriptor that stands for it: a name that leads
// to it still, if any does.
func (n *node) location() (parent *node, name string, fd int) {
	n.tab.mu.RLock()
	defer n.tab.mu.RUnlock()
	if fd := n.fdLocked(); fd >= 0 {
		return nil, "", fd
	}
	l := n.firstLocked()
	if m := n.more.Load(); m != nil && m.links != nil && l.parent != nil && l.parent.adriftLocked() {
		for _, other := range m.links.all {
			if !other.parent.adriftLocked() {
				l = other
				break
			}
		}
	}
	return l.parent, l.name, -1
}

// parentID returns the ID of the directory that n is in by one of its names, or 0.
func (n *node) parentID() uint64 {
	n.tab.mu.RLock()
	defer n.tab.mu.RUnlock()
	if n.parent == nil {
		return 0
	}
	return n.parent.id
}

func (n *node) isDir() bool { return n.kind == unix.S_IFDIR>>12 }

// isFile reports whether n is a regular file.
func (n *node) isFile() bool { return n.kind == unix.S_IFREG>>12 }

// adrift reports whether nothing leads to n any more: the daemon has put it aside, or
// what it is in.
func (n *node) adrift() bool {
	n.tab.mu.RLock()
	defer n.tab.mu.RUnlock()
	return n.adriftLocked()
}

func (n *node) adriftLocked() bool {
	for ; n.id >= firstNode; n = n.parent {
		if n.parent == nil {
			return n.fdLocked() < 0 && n.candidate() == nil
		}
	}
	return false
}

// keep takes note that n's last name is gone, and gives it a descriptor that stands for
// it, unless it has one. big says that it keeps the backing from giving back much room,
// too, and told that the kernel knows that the name is gone.
func (n *node) keep(fd int, big, told bool) (kept bool) {
	n.tab.mu.Lock()
	defer n.tab.mu.Unlock()
	m := n.needLocked()
	if kept = m.fd < 0; kept {
		m.fd = fd
	}
	if big && !m.big {
		m.big = true
		n.tab.big.Add(1)
	}
	if told {
		m.assumed.Store(false)
		m.unlinked.Store(true)
	}
	if told && m.round != n.tab.round {
		m.round = n.tab.round
		n.tab.awaited.Add(1)
	}
	return kept
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
// Linux 6.16 the kernel may go by its name still: it asks again when it hears ESTALE. A
// name that was found since leads to the file.
func (n *node) vanished() bool {
	if !n.isAssumed() {
		return false
	}
	n.tab.mu.RLock()
	defer n.tab.mu.RUnlock()
	return n.parent == nil && n.fdLocked() >= 0 && n.isAssumed() // still: see keep
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
