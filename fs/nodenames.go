package fs

import (
	"encoding/binary"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// A link is one name of a node.
type link struct {
	parent *node
	name   string
}

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

const (
	// maxName is how many bytes the kernel lets a name have. File systems that count
	// characters, such as vfat, have names of more than 255.
	maxName = unix.PathMax - 1
	// longName says that a name is so long, or longer: then its length stands before it.
	longName = 255
)

// firstLocked returns n's first name.
func (n *node) firstLocked() link {
	if n.firstLen == longName {
		size := binary.NativeEndian.Uint16(unsafe.Slice(n.first, 2))
		return link{n.parent, unsafe.String((*byte)(unsafe.Add(unsafe.Pointer(n.first), 2)), size)}
	}
	return link{n.parent, unsafe.String(n.first, n.firstLen)}
}

func (n *node) setFirstLocked(l link) {
	n.parent = l.parent
	if len(l.name) < longName {
		n.first, n.firstLen = unsafe.StringData(l.name), uint8(len(l.name))
		return
	}
	long := binary.NativeEndian.AppendUint16(make([]byte, 0, 2+len(l.name)), uint16(len(l.name)))
	n.first, n.firstLen = unsafe.SliceData(append(long, l.name...)), longName
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
	if old.parent != nil && now.parent != nil && old != now && n.knownLocked() == 1 && n.firstLocked() == old {
		n.setFirstLocked(now)
		now.parent.more.Load().kids++
		m := old.parent.more.Load()
		m.removals.Add(1)
		m.kids--
		n.tab.releaseLocked(old.parent)
		return n.tellHandlesLocked()
	}
	if now.parent != nil {
		n.linkLocked(now.parent, now.name)
	}
	if old.parent != nil && old != now {
		old.parent.more.Load().removals.Add(1)
		n.unlinkLocked(old.parent, old.name)
	}
	return n.tellHandlesLocked()
}

// lineage returns what the backing calls a directory and those above it.
func (n *node) lineage() (all []lockstate.FileID) {
	n.tab.mu.RLock()
	defer n.tab.mu.RUnlock()
	return n.lineageLocked(nil)
}

func (n *node) lineageLocked(all []lockstate.FileID) []lockstate.FileID {
	for ; n != nil; n = n.parent {
		all = append(all, n.key().fileID())
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
