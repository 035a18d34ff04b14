package fs

import (
	"slices"

	"github.com/stagefs/stagefs/lockstate"
)

// A linkSet holds the names of a file beyond its first. Few are looked through.
// A file can have as many as the backing allows, 65,000 on ext4, and then no
// operation on it may cost more for that: of many there is an index.
type linkSet struct {
	all   []link
	locks []link // of which are names of lock files

	at   map[link]int  // where each is in all; nil for few
	dirs map[*node]int // how many of them the locks on a directory cover; nil likewise
}

// fewLinks is how many names are looked through.
const fewLinks = 16

func (s *linkSet) len() int {
	if s == nil {
		return 0
	}
	return len(s.all)
}

// index returns where l is in all, or -1.
func (s *linkSet) index(l link) int {
	if s == nil {
		return -1
	}
	if s.at == nil {
		return slices.Index(s.all, l)
	}
	if i, ok := s.at[l]; ok {
		return i
	}
	return -1
}

// add adds a name that is not there.
func (s *linkSet) add(t *nodeTable, l link) {
	s.all = append(s.all, l)
	if t.isLockName(l.parent, l.name) {
		s.locks = append(s.locks, l)
	}
	switch {
	case s.at != nil:
		s.note(t, len(s.all)-1)
	case len(s.all) > fewLinks:
		s.at, s.dirs = make(map[link]int), make(map[*node]int)
		for i := range s.all {
			s.note(t, i)
		}
	}
}

// note puts the name at i into the index.
func (s *linkSet) note(t *nodeTable, i int) {
	l := s.all[i]
	s.at[l] = i
	if !t.shared(l.parent, l.name) {
		s.dirs[l.parent]++
	}
}

// remove takes the name at i out and returns it.
func (s *linkSet) remove(t *nodeTable, i int) link {
	l, last := s.all[i], len(s.all)-1
	s.all[i] = s.all[last]
	s.all[last] = link{}
	s.all = s.all[:last]
	if j := slices.Index(s.locks, l); j >= 0 {
		s.locks = slices.Delete(s.locks, j, j+1)
	}
	if s.at == nil {
		return l
	}
	if i < last {
		s.at[s.all[i]] = i
	}
	delete(s.at, l)
	if !t.shared(l.parent, l.name) {
		if s.dirs[l.parent]--; s.dirs[l.parent] == 0 {
			delete(s.dirs, l.parent)
		}
	}
	if len(s.all) <= fewLinks/2 {
		s.at, s.dirs = nil, nil
	}
	return l
}

// covering adds the directories whose locks cover a name to dirs, each once.
func (s *linkSet) covering(t *nodeTable, dirs []*lockstate.Dir) []*lockstate.Dir {
	if s == nil {
		return dirs
	}
	if s.at == nil {
		for _, l := range s.all {
			if !t.shared(l.parent, l.name) && !slices.Contains(dirs, l.parent.dir) {
				dirs = append(dirs, l.parent.dir)
			}
		}
		return dirs
	}
	first := slices.Clone(dirs)
	for parent := range s.dirs {
		if !slices.Contains(first, parent.dir) {
			dirs = append(dirs, parent.dir)
		}
	}
	return dirs
}

// lockNames returns the names of n that are a lock file's. Few have any.
func (n *node) lockNames() []link {
	n.tab.mu.RLock()
	defer n.tab.mu.RUnlock()
	var all []link
	if l := n.firstLocked(); l.parent != nil && n.tab.isLockName(l.parent, l.name) {
		all = append(all, l)
	}
	if m := n.more.Load(); m != nil && m.links != nil {
		all = append(all, m.links.locks...)
	}
	return all
}

// known returns how many names of n are known.
func (n *node) known() int {
	n.tab.mu.RLock()
	defer n.tab.mu.RUnlock()
	return n.knownLocked()
}

func (n *node) knownLocked() int {
	if n.parent == nil {
		return 0
	}
	if m := n.more.Load(); m != nil {
		return 1 + m.links.len()
	}
	return 1
}

// has reports whether l is known to be a name of n.
func (n *node) has(l link) bool {
	n.tab.mu.RLock()
	defer n.tab.mu.RUnlock()
	m := n.more.Load()
	return n.parent != nil && n.firstLocked() == l || m != nil && m.links.index(l) >= 0
}

// isIn reports whether parent has the first known name of n.
func (n *node) isIn(parent *node) bool {
	n.tab.mu.RLock()
	defer n.tab.mu.RUnlock()
	return n.parent == parent
}

// everyName reports whether n has names that are known, and f does of each. f
// must not ask for anything of a node.
func (n *node) everyName(f func(parent *node, name string) bool) bool {
	n.tab.mu.RLock()
	defer n.tab.mu.RUnlock()
	l := n.firstLocked()
	if l.parent == nil || !f(l.parent, l.name) {
		return false
	}
	if m := n.more.Load(); m != nil && m.links != nil {
		for _, l := range m.links.all {
			if !f(l.parent, l.name) {
				return false
			}
		}
	}
	return true
}
