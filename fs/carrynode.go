package fs

import (
	"encoding/binary"
	"errors"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// There may be a million nodes, so they are written down by hand: numbers as in
// [binary.AppendUvarint], names after their length.

// What a node is besides.
const (
	nodePassed   = 1 << iota // see plainMark.passed
	nodeUnlisted             // it is not found by its identity
	nodeAssumed              // see nodeMore.assumed
)

func (c *carried) carryNodes(fs *FS, cands *candidateList, fds *[]int) {
	t := fs.nodes
	t.mu.RLock()
	defer t.mu.RUnlock()
	c.NextNode, c.Numbered = t.next, make(map[uint64][]uint64)
	b := make([]byte, 0, 64*t.byID.n)
	put := func(v uint64) { b = binary.AppendUvarint(b, v) }
	for n := range t.byID.all {
		if n.id < firstNode {
			continue
		}
		lookups, fd, cand, flags := uint64(n.lookups), -1, -1, uint64(0)
		if m := n.more.Load(); m != nil {
			lookups += m.lookups
			fd, cand = m.fd, cands.index(m.cand)
			if m.assumed.Load() {
				flags |= nodeAssumed
			}
			if h := m.hashes.Load(); h != nil && len(h.numbered) > 0 {
				c.Numbered[n.id] = h.numbered
			}
		}
		if fd >= 0 {
			*fds = append(*fds, fd)
		}
		if n.plain.passed() {
			flags |= nodePassed
		}
		if t.byKey.get(n.key()) != n {
			flags |= nodeUnlisted
		}
		for _, v := range []uint64{n.id, uint64(n.kind), uint64(n.nlink), uint64(n.dev), n.ino, uint64(n.birth), lookups, flags, uint64(fd + 1), uint64(cand + 1)} {
			put(v)
		}
		links := n.namesLocked()
		put(uint64(len(links)))
		for _, l := range links {
			put(l.parent.id)
			put(uint64(len(l.name)))
			b = append(b, l.name...)
		}
	}
	c.Nodes = b
	c.Settled = make(map[uint64]uint64)
	for id, at := range t.settled {
		c.Settled[id] = at.id
	}
}

var errNodes = errors.New("what the daemon before has written down of the nodes makes no sense")

// A takenNode is one that has no names yet.
type takenNode struct {
	n     *node
	cand  int // index, or -1
	links []takenLink
}

type takenLink struct {
	parent uint64
	name   string
}

// takeUpNodes makes the nodes again.
func (fs *FS) takeUpNodes(b []byte, next uint64, settled map[uint64]uint64, cands []*candidate) error {
	var all []takenNode
	for len(b) > 0 {
		x, rest, err := fs.readNode(b)
		if err != nil {
			return err
		}
		all, b = append(all, x), rest
	}
	t := fs.nodes
	t.mu.Lock()
	defer t.mu.Unlock()
	t.next = next
	at := make(map[uint64]int)
	for i, x := range all {
		t.byID.put(x.n)
		if x.n.isDir() {
			at[x.n.id] = i
		}
		if x.cand >= 0 {
			if x.cand >= len(cands) {
				return errNodes
			}
			x.n.more.Load().cand = cands[x.cand]
			cands[x.cand].node = x.n
		}
	}
	for i := range all {
		if !fs.placeNodeLocked(all, at, i, 0) {
			return errNodes
		}
	}
	for _, x := range all {
		for _, l := range x.links {
			p := t.byID.get(l.parent)
			if p == nil || !p.isDir() {
				return errNodes
			}
			x.n.linkLocked(p, l.name)
		}
	}
	for id, to := range settled {
		at := t.byID.get(to)
		if at == nil || t.byID.get(id) == nil {
			return errNodes
		}
		t.standLocked(id, at)
	}
	t.heap.sized(t.byID.n)
	return nil
}

// takeUpNumbered takes over what positions in directories are shown as. Nodes are there.
func (fs *FS) takeUpNumbered(numbered map[uint64][]uint64) {
	for id, positions := range numbered {
		if n := fs.nodes.get(id); n != nil && n.isDir() {
			h := &hashes{numbered: positions, number: make(map[uint64]uint64)}
			for i, pos := range positions {
				h.number[pos] = uint64(i)
			}
			n.more.Load().hashes.Store(h)
		}
	}
}

// placeNodeLocked gives a directory its place in the lock table, after those
// above it.
func (fs *FS) placeNodeLocked(all []takenNode, at map[uint64]int, i, depth int) bool {
	x := &all[i]
	if !x.n.isDir() || x.n.dir != nil {
		return true
	}
	if len(x.links) == 0 {
		x.n.dir = fs.table.GoneDir()
		return true
	}
	l := x.links[0]
	if l.parent == fs.root.id {
		x.n.dir = fs.table.Dir(fs.table.Root(), l.name)
		return true
	}
	p, ok := at[l.parent]
	if !ok || depth > 1<<16 || !fs.placeNodeLocked(all, at, p, depth+1) {
		return false
	}
	x.n.dir = fs.table.Dir(all[p].n.dir, l.name)
	return true
}

// readNode reads one node.
func (fs *FS) readNode(b []byte) (x takenNode, rest []byte, err error) {
	get := func() uint64 {
		v, n := binary.Uvarint(b)
		if n <= 0 {
			err = errNodes
			b = nil
			return 0
		}
		b = b[n:]
		return v
	}
	n := &node{tab: fs.nodes, id: get(), kind: uint8(get())}
	n.nlink = uint16(get())
	n.dev, n.ino, n.birth = uint32(get()), get(), int64(get())
	if fs.nodes.reborn {
		n.birth = 0 // the daemon before may have gone by it
	}
	lookups, flags, fd := get(), get(), int(get())-1
	x = takenNode{n: n, cand: int(get()) - 1}
	if fd >= 0 {
		unix.CloseOnExec(fd)
	}
	if n.isDir() || fd >= 0 || x.cand >= 0 {
		n.more.Store(&nodeMore{fd: fd})
	}
	n.lookups = uint32(min(lookups, 1<<32-1))
	if lookups -= uint64(n.lookups); lookups > 0 {
		n.needLocked().lookups = lookups
	}
	if flags&nodeAssumed != 0 {
		n.needLocked().assumed.Store(true)
	}
	n.plain.setPassed(flags&nodePassed != 0)
	n.plain.setPaged(true) // for all that is known
	for range get() {
		parent, size := get(), get()
		if err != nil || size > uint64(len(b)) || size > maxName {
			return x, nil, errNodes
		}
		// A copy: b is large and goes.
		x.links = append(x.links, takenLink{parent, strings.Clone(unsafe.String(unsafe.SliceData(b), int(size)))})
		b = b[size:]
	}
	if err != nil || n.id < firstNode || n.kind > unix.S_IFMT>>12 {
		return x, nil, errNodes
	}
	if flags&nodeUnlisted == 0 {
		fs.nodes.byKey.put(n)
	}
	return x, b, nil
}
