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

// all calls f with each node.
func (p *nodePages) all(f func(*node)) {
	for _, pg := range p.pages {
		for _, n := range pg.nodes {
			if n != nil {
				f(n)
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

// A nodePart is a table with open addressing and linear probing.
type nodePart struct {
	slots []*node
	n     int
}

func (x *nodeIndex) init() { x.seed = [2]uint64{rand.Uint64(), rand.Uint64()} }

// find returns the part where a node of that identity belongs, and its hash.
func (x *nodeIndex) find(id identity) (*nodePart, uint64) {
	hi, lo := bits.Mul64(id.ino^x.seed[0], uint64(id.birth)^uint64(id.dev)<<40^x.seed[1])
	h := (hi ^ lo) * 0x9e3779b97f4a7c15
	return &x.parts[h>>56], h << 8
}

// home is where the search for a hash begins.
func (p *nodePart) home(hash uint64) int {
	hi, _ := bits.Mul64(hash, uint64(len(p.slots)))
	return int(hi)
}

func (p *nodePart) after(i int) int {
	if i++; i == len(p.slots) {
		return 0
	}
	return i
}

func (x *nodeIndex) get(id identity) *node {
	p, h := x.find(id)
	if p.n == 0 {
		return nil
	}
	for i := p.home(h); p.slots[i] != nil; i = p.after(i) {
		if n := p.slots[i]; n.key() == id {
			return n
		}
	}
	return nil
}

// put adds n, in place of another one of the same identity.
func (x *nodeIndex) put(n *node) {
	p, h := x.find(n.key())
	if p.n*4 >= len(p.slots)*3 {
		x.resize(p, max(8, len(p.slots)*4/3))
	}
	i := p.home(h)
	for p.slots[i] != nil && p.slots[i].key() != n.key() {
		i = p.after(i)
	}
	if p.slots[i] == nil {
		p.n++
	}
	p.slots[i] = n
}

// remove takes n out if it is there.
func (x *nodeIndex) remove(n *node) {
	p, h := x.find(n.key())
	if p.n == 0 {
		return
	}
	i := p.home(h)
	for p.slots[i] != n {
		if p.slots[i] == nil {
			return
		}
		i = p.after(i)
	}
	p.n--
	// What was pushed on by n moves back.
	for j := p.after(i); p.slots[j] != nil; j = p.after(j) {
		_, h := x.find(p.slots[j].key())
		if home := p.home(h); p.distance(home, j) >= p.distance(i, j) {
			p.slots[i] = p.slots[j]
			i = j
		}
	}
	p.slots[i] = nil
	if len(p.slots) > 8 && p.n*5 < len(p.slots) {
		x.resize(p, max(8, p.n*2))
	}
}

// distance is how many steps lead from slot i to slot j.
func (p *nodePart) distance(i, j int) int {
	if j < i {
		j += len(p.slots)
	}
	return j - i
}

func (x *nodeIndex) resize(p *nodePart, size int) {
	old := p.slots
	p.slots = make([]*node, size)
	for _, n := range old {
		if n == nil {
			continue
		}
		_, h := x.find(n.key())
		i := p.home(h)
		for p.slots[i] != nil {
			i = p.after(i)
		}
		p.slots[i] = n
	}
}
