package fs

import (
	"path"
	"slices"
	"strings"
)

// A nameSet is a set of names and path.Match patterns of [Options], sorted out for a look
// at each name that is asked for.
type nameSet struct{ names, patterns []string }

func newNameSet(names []string) nameSet {
	s := nameSet{names: names}
	for _, n := range names {
		if isPattern(n) {
			s.patterns = append(s.patterns, n)
		}
	}
	return s
}

// has reports whether a name is one of those given, or matches a pattern among them.
func (s *nameSet) has(name string) bool {
	return slices.Contains(s.names, name) || slices.ContainsFunc(s.patterns, func(p string) bool {
		ok, _ := path.Match(p, name)
		return ok
	})
}

func isPattern(name string) bool { return strings.ContainsAny(name, `*?[\`) }

// setNames tells which names are special.
func (fs *FS) setNames(lock, shared, candidate []string) {
	fs.names.lock, fs.names.shared, fs.names.candidate = newNameSet(lock), newNameSet(shared), newNameSet(candidate)
	fs.names.locked = newNameSet(lockedNames(lock))
}
