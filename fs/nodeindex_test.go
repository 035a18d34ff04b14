package fs

import (
	"testing"
	"unsafe"

	"pgregory.net/rapid"
)

// TestNodeIndex holds the two look-ups of the node table against maps.
func TestNodeIndex(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var (
			pages nodePages
			index nodeIndex
			next  uint64
		)
		pages.init()
		index.init()
		byID := make(map[uint64]*node)
		byKey := make(map[identity]*node)
		key := rapid.Custom(func(t *rapid.T) identity {
			return identity{
				dev: rapid.Uint32Range(0, 2).Draw(t, "dev"),
				ino: rapid.Uint64Range(0, 400).Draw(t, "ino"), birth: rapid.Int64Range(0, 1).Draw(t, "birth"),
			}
		})
		add := func(t *rapid.T) {
			n := &node{id: next}
			next += rapid.Uint64Range(1, 200).Draw(t, "step")
			n.setKey(key.Draw(t, "key"))
			pages.put(n)
			index.put(n)
			byID[n.id], byKey[n.key()] = n, n
		}
		t.Repeat(map[string]func(*rapid.T){
			"add": add,
			"add many": func(t *rapid.T) {
				for range 50 {
					add(t)
				}
			},
			"remove some": func(t *rapid.T) {
				below := rapid.Uint64Range(0, next).Draw(t, "below")
				for id, n := range byID {
					if id >= below {
						continue
					}
					pages.remove(n)
					index.remove(n)
					delete(byID, id)
					if byKey[n.key()] == n {
						delete(byKey, n.key())
					}
				}
			},
			"": func(t *rapid.T) {
				if pages.n != len(byID) {
					t.Fatalf("pages hold %d nodes, want %d", pages.n, len(byID))
				}
				for id, n := range byID {
					if got := pages.get(id); got != n {
						t.Fatalf("pages.get(%d) = %p, want %p", id, got, n)
					}
				}
				found := 0
				for i := range index.parts {
					found += index.parts[i].n
				}
				if found != len(byKey) {
					t.Fatalf("index holds %d nodes, want %d", found, len(byKey))
				}
				for k, n := range byKey {
					if got := index.get(k); got != n {
						t.Fatalf("index.get(%v) = %p, want %p", k, got, n)
					}
				}
				k := key.Draw(t, "any key")
				if got := index.get(k); got != byKey[k] {
					t.Fatalf("index.get(%v) = %p, want %p", k, got, byKey[k])
				}
			},
		})
	})
}

// TestNodeSize: what a million files cost depends on this number first.
func TestNodeSize(t *testing.T) {
	if got := unsafe.Sizeof(node{}); got > 80 {
		t.Errorf("a node takes %d bytes, want at most 80", got)
	}
}
