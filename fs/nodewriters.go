package fs

import (
	"slices"

	"github.com/stagefs/stagefs/lockstate"
)

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
	for _, h := range m.writers {
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

// writers returns the write handles open on n.
func (n *node) writers() []*lockstate.Handle {
	if n.more.Load() == nil {
		return nil
	}
	n.tab.mu.RLock()
	defer n.tab.mu.RUnlock()
	m := n.more.Load()
	if m == nil {
		return nil
	}
	return slices.Clone(m.writers)
}

func (n *node) addWriter(h *lockstate.Handle) {
	n.tab.mu.Lock()
	defer n.tab.mu.Unlock()
	m := n.needLocked()
	m.writers = append(m.writers, h)
}

func (n *node) removeWriter(h *lockstate.Handle) {
	n.tab.mu.Lock()
	defer n.tab.mu.Unlock()
	if m := n.more.Load(); m != nil {
		m.writers = without(m.writers, h)
		n.tidyLocked()
	}
}

// without returns the list less h, in any order.
func without(hs []*lockstate.Handle, h *lockstate.Handle) []*lockstate.Handle {
	i, last := slices.Index(hs, h), len(hs)-1
	if i < 0 {
		return hs
	}
	hs[i], hs[last] = hs[last], nil
	return hs[:last]
}
