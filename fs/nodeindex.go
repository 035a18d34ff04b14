package fs

import (
	"math/bits"
	"math/rand/v2"
)

// nodePages finds nodes by number. Those of a directory's files are mostly in a row, and
// forgotten together, so that a page of them goes as a whole.
type nodePages struct {
	pages map[uint64]*nodePage
	n     int
}

// A nodePage is a round number of bytes for the allocator.
type nodePage struct {
	nodes [63]*node
	n     int
}

func (p *nodePages) init() { p.pages = make(map[uint64]*nodePage) }

func nodePlace(id uint64) (page, at uint64) {
	const size = uint64(len(nodePage{}.nodes))
	return id / size, id % size
}

func (p *nodePages) get(id uint64) *node {
	page, at := nodePlace(id)
	if pg := p.pages[page]; pg != nil {
		return pg.nodes[at]
	}
	return nil
}

// put adds a node whose number is not there.
func (p *nodePages) put(n *node) {
	page, at := nodePlace(n.id)
	pg := p.pages[page]
	if pg == nil {
		pg = new(nodePage)
		p.pages[page] = pg
	}
	pg.nodes[at] = n
	pg.n++
	p.n++
}

// remove takes out a node that is there.
func (p *nodePages) remove(n *node) {
	page, at := nodePlace(n.id)
	pg := p.pages[page]
	pg.nodes[at] = nil
	p.n--
	if pg.n--; pg.n == 0 {
		delete(p.pages, page)
		if len(p.pages) == 0 {
			p.pages = make(map[uint64]*nodePage) // a map never shrinks
		}
	}
}

// all is each node.
func (p *nodePages) all(yield func(*node) bool) {
	for _, pg := range p.pages {
		for _, n := range pg.nodes {
			if n != nil && !yield(n) {
				return
			}
		}
	}
}

// nodeIndex finds nodes by identity. It is a hash table in many parts, so that
// none takes long to grow.
type nodeIndex struct {
	seed  [2]uint64
	parts [256]nodePart
}

// A nodePart is a table with open addressing and linear probing. A search reads the
// tags, which lie side by side, and hardly a node that is not the one.
type nodePart struct {
	slots []*node
	tags  []uint16 // bits of the hashes, by which the slots are chosen; 0: a slot is empty
	n     int
}

func (x *nodeIndex) init() { x.seed = [2]uint64{rand.Uint64(), rand.Uint64()} }

// find returns the part where a node of that identity belongs, and its tag.
func (x *nodeIndex) find(id identity) (*nodePart, uint16) {
	hi, lo := bits.Mul64(id.ino^x.seed[0], uint64(id.birth)^uint64(id.dev)<<40^x.seed[1])
	h := (hi ^ lo) * 0x9e3779b97f4a7c15
	return &x.parts[h>>56], max(1, uint16(h>>40))
}

// home is where the search for a tag begins.
func (p *nodePart) home(tag uint16) int { return int(uint64(tag) * uint64(len(p.slots)) >> 16) }

func (p *nodePart) after(i int) int {
	if i++; i == len(p.slots) {
		return 0
	}
	return i
}

// search returns the slot of the node with a tag that is says is the one, or else the
// empty one where it would be. There is an empty one.
func (p *nodePart) search(tag uint16, is func(*node) bool) (i int, found bool) {
	for i = p.home(tag); p.tags[i] != 0; i = p.after(i) {
		if p.tags[i] == tag && is(p.slots[i]) {
			return i, true
		}
	}
	return i, false
}

func (x *nodeIndex) get(id identity) *node {
	p, tag := x.find(id)
	if p.n == 0 {
		return nil
	}
	if i, found := p.search(tag, func(n *node) bool { return n.key() == id }); found {
		return p.slots[i]
	}
	return nil
}

// put adds n, in place of another one of the same identity.
func (x *nodeIndex) put(n *node) {
	p, tag := x.find(n.key())
	if p.n*4 >= len(p.slots)*3 {
		p.resize(max(8, len(p.slots)*4/3))
	}
	i, found := p.search(tag, func(other *node) bool { return other.key() == n.key() })
	if !found {
		p.n++
	}
	p.slots[i], p.tags[i] = n, tag
}

// remove takes n out if it is there.
func (x *nodeIndex) remove(n *node) {
	p, tag := x.find(n.key())
	if p.n == 0 {
		return
	}
	i, found := p.search(tag, func(other *node) bool { return other == n })
	if !found {
		return
	}
	p.n--
	// What was pushed on by n moves back.
	for j := p.after(i); p.tags[j] != 0; j = p.after(j) {
		if home := p.home(p.tags[j]); p.distance(home, j) >= p.distance(i, j) {
			p.slots[i], p.tags[i] = p.slots[j], p.tags[j]
			i = j
		}
	}
	p.slots[i], p.tags[i] = nil, 0
	if len(p.slots) > 8 && p.n*5 < len(p.slots) {
		p.resize(max(8, p.n*2))
	}
}

// distance is how many steps lead from slot i to slot j.
func (p *nodePart) distance(i, j int) int {
	if j < i {
		j += len(p.slots)
	}
	return j - i
}

func (p *nodePart) resize(size int) {
	slots, tags := p.slots, p.tags
	p.slots, p.tags = make([]*node, size), make([]uint16, size)
	for i, tag := range tags {
		if tag != 0 {
			at, _ := p.search(tag, func(*node) bool { return false })
			p.slots[at], p.tags[at] = slots[i], tag
		}
	}
}
