package fs

import (
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/stagefs/stagefs/lockstate"
)

// TestLinkSet holds the names of a file, few and many, against a plain list.
func TestLinkSet(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		root := &node{}
		fs := &FS{root: root}
		fs.setNames([]string{"devserver*"}, []string{"stamp*"}, nil)
		tab := newNodeTable(lockstate.New(lockstate.Options{}))
		tab.shared, tab.isLockName, tab.drop = fs.isSharedName, fs.isLockName, func(_ *node, doomed []int) []int { return doomed }
		parents := []*node{root}
		for i := range 4 {
			p := &node{tab: tab, id: uint64(i + 2), dir: tab.table.Dir(tab.table.Root(), fmt.Sprint(i))}
			p.more.Store(&nodeMore{fd: -1})
			parents = append(parents, p)
		}
		root.tab, root.dir = tab, tab.table.Root()
		root.more.Store(&nodeMore{fd: -1})

		n := &node{tab: tab, id: firstNode, lookups: 1}
		var want []link
		some := rapid.Custom(func(t *rapid.T) link {
			name := rapid.SampledFrom([]string{"f", "devserver", "stamp"}).Draw(t, "kind")
			return link{rapid.SampledFrom(parents).Draw(t, "parent"), fmt.Sprint(name, rapid.IntRange(0, 9).Draw(t, "n"))}
		})
		add := func(t *rapid.T) {
			l := some.Draw(t, "link")
			n.linkLocked(l.parent, l.name)
			if !slices.Contains(want, l) {
				want = append(want, l)
			}
		}
		remove := func(l link) {
			n.unlinkLocked(l.parent, l.name)
			want = slices.DeleteFunc(want, func(w link) bool { return w == l })
		}
		t.Repeat(map[string]func(*rapid.T){
			"add": add,
			"add many": func(t *rapid.T) {
				for range 2 * fewLinks {
					add(t)
				}
			},
			"remove any": func(t *rapid.T) { remove(some.Draw(t, "link")) },
			"remove one": func(t *rapid.T) {
				if len(want) > 0 {
					remove(rapid.SampledFrom(want).Draw(t, "link"))
				}
			},
			"": func(t *rapid.T) { checkLinks(t, fs, n, want, parents) },
		})
	})
}

func checkLinks(t *rapid.T, fs *FS, n *node, want []link, parents []*node) {
	var dirs []*lockstate.Dir
	var locks []link
	kids := make(map[*node]int)
	for _, l := range want {
		if !n.has(l) {
			t.Fatalf("%s is not known", l.name)
		}
		if fs.isLockName(l.parent, l.name) {
			locks = append(locks, l)
		}
		if !fs.isSharedName(l.parent, l.name) && !slices.Contains(dirs, l.parent.dir) {
			dirs = append(dirs, l.parent.dir)
		}
		kids[l.parent]++
	}
	if got := n.known(); got != len(want) {
		t.Fatalf("%d names are known, want %d", got, len(want))
	}
	got, name := n.covering()
	if !sameElements(got, dirs) {
		t.Fatalf("covered by %d directories, want %d", len(got), len(dirs))
	}
	if len(want) > 0 && !slices.ContainsFunc(want, func(l link) bool { return l.name == name }) {
		t.Fatalf("called %q, which is none of its names", name)
	}
	if got := n.lockNames(); !sameElements(got, locks) {
		t.Fatalf("lock files' names: %v, want %v", got, locks)
	}
	if got, want := n.everyName(fs.isLockName), len(want) > 0 && len(locks) == len(want); got != want {
		t.Fatalf("known as a lock file only: %v, want %v", got, want)
	}
	for _, p := range parents {
		if got := p.more.Load().kids; got != kids[p] {
			t.Fatalf("a directory counts %d names, want %d", got, kids[p])
		}
	}
}

// sameElements reports whether both have the same elements, each once.
func sameElements[E comparable](a, b []E) bool {
	return len(a) == len(b) && !slices.ContainsFunc(a, func(e E) bool { return !slices.Contains(b, e) })
}
