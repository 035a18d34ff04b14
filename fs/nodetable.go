package fs

import (
	"math"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// nodeTable holds the nodes, by the kernel's number and by the backing's
// identity.
type nodeTable struct {
	table  *lockstate.Table
	drop   func(*node, []int) []int // see FS.dropNode
	follow func(*node)              // see FS.follow
	// shared reports whether locks do not cover a file under a name (W5).
	shared func(parent *node, name string) bool
	// isLockName reports whether a name is a lock file's.
	isLockName func(parent *node, name string) bool

	changing changeLocks

	// reborn: see isReborn.
	reborn bool
	// hashing: positions in directories of the root's file system may be hashes.
	hashing bool

	validFor time.Duration // see validity

	files fileTable

	// added is how often a file got one more link: what was known of any before
	// may be too little.
	added atomic.Uint64

	dev uint32 // of the root

	mu    spinMutex
	byID  nodePages
	byKey nodeIndex
	next  uint64
	heap  heapTuner
	// settled are the nodes that others stand for, which were private: the
	// kernel goes on calling the file by the other's number, by which it is
	// found here. They are pinned.
	settled map[uint64]*node
	// doomed are descriptors that are closed when mu is given back: with the
	// last one of a removed file the backing gives its blocks back, and may
	// take longer for that than all the rest takes together.
	doomed []int
	big    atomic.Int32 // how many nodes have nodeMore.big; changed with mu held

	// For awaitRemoved. Changed with mu held, but for what was closed.
	awaited atomic.Int32 // nodes of this round that keep a removed file
	round   uint64
	gone    int32        // removed files among doomed
	closing atomic.Int32 // removed files that nothing keeps, until they are closed
}

// firstNode is the first number of an ordinary node: those below are the root
// and the control directory's.
const firstNode = 1 << 10

func newNodeTable(t *lockstate.Table) *nodeTable {
	// The kernel makes file handles of the numbers, and takes those for whatever has the
	// number in the next mount: so that has others, but for those of inodes.
	tab := &nodeTable{table: t, next: firstSerial + rand.Uint64N(firstSerial>>1), round: 1, validFor: validForLess}
	tab.byID.init()
	tab.byKey.init()
	tab.heap.locks = t.Len
	tab.heap.tune(0)
	return tab
}

// restoring tells that so many locks are about to be put back, at once.
func (t *nodeTable) restoring(locks int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.heap.rest(locks)
}

// locksThere tells that there are locks now, perhaps many, without nodes.
func (t *nodeTable) locksThere() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.heap.wake(t.byID.n)
}

// newRoot makes the node of the root, which stays for good.
func (t *nodeTable) newRoot(key identity, dir *lockstate.Dir, fd int) *node {
	n := &node{tab: t, id: fuse.FUSE_ROOT_ID, kind: unix.S_IFDIR >> 12, dir: dir, lookups: 1}
	n.setKey(key)
	n.more.Store(&nodeMore{fd: fd})
	t.mu.Lock()
	defer t.mu.Unlock()
	t.dev = key.dev
	t.byID.put(n)
	t.byKey.put(n)
	return n
}

// get returns the node with the kernel's number, or nil.
func (t *nodeTable) get(id uint64) *node {
	t.mu.RLock()
	n := t.byID.get(id)
	if len(t.settled) > 0 {
		if at := t.settled[id]; at != nil {
			n = at
		}
	}
	t.mu.RUnlock()
	return n
}

// find returns the node of a file of the backing, or nil.
func (t *nodeTable) find(key identity) *node {
	t.mu.RLock()
	n := t.byKey.get(key)
	t.mu.RUnlock()
	return n
}

// unlock gives mu back after nodes were released perhaps.
func (t *nodeTable) unlock() {
	doomed, gone := t.doomed, t.gone
	t.doomed, t.gone = nil, 0
	t.mu.Unlock()
	drop(doomed...)
	if gone > 0 {
		t.closing.Add(-gone)
	}
}

const (
	forgetTime = 200 * time.Millisecond // for the kernel to say that it has dropped a removed file
	soonTime   = 5 * time.Millisecond   // the same for a kernel that has time to, mostly
	returnTime = 2 * time.Second        // for the backing to give back what it held
)

// awaitRemoved waits until the backing has back what removed files held. The kernel
// drops them before the removal returns, but says so later, by FORGET. Those that
// somebody still has open are waited for only once, and not for long where all are such,
// of which open tells the number. It reports whether there were any.
func (t *nodeTable) awaitRemoved(open func() int32) bool {
	if t.awaited.Load() == 0 && t.closing.Load() == 0 {
		return false
	}
	if !awaitNone(&t.awaited, soonTime) && (open() >= t.awaited.Load() || !awaitNone(&t.awaited, forgetTime)) {
		t.mu.Lock()
		t.round++
		t.awaited.Store(0)
		t.mu.Unlock()
	}
	awaitNone(&t.closing, returnTime)
	return true
}

// countAwaited returns how many of some nodes awaitRemoved waits for.
func (t *nodeTable) countAwaited(nodes map[*node]struct{}) (n int32) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for node := range nodes {
		if m := node.more.Load(); m != nil && m.fd >= 0 && m.round == t.round {
			n++
		}
	}
	return n
}

func awaitNone(count *atomic.Int32, most time.Duration) bool {
	var end time.Time
	for count.Load() > 0 {
		if !more(&end, most) {
			return false
		}
		time.Sleep(100 * time.Microsecond)
	}
	return true
}

// removalsOf returns a number that changes when a name in parent goes. Whoever
// looks at the backing takes it before.
func (t *nodeTable) removalsOf(parent *node) uint64 { return parent.more.Load().removals.Load() }

// removed takes note that a name in parent has gone that no node had.
func (t *nodeTable) removed(parent *node) {
	t.mu.Lock()
	defer t.mu.Unlock()
	parent.more.Load().removals.Add(1)
}

// linked takes note that a file has one more link than before. Whoever makes one
// calls it before it is looked at.
func (t *nodeTable) linked() { t.added.Add(1) }

// see returns the node of what the backing has at name in parent, which the
// kernel is about to be told of. It returns nil if a name in parent has gone
// since the caller looked: it may have been this one; or if st may tell of fewer
// links than there are by now: then names that nobody looked up would not be
// searched for (W3). removals and added are from before the look. told says that n
// is open for writing and the name was not known. The caller holds FS.ns.
func (t *nodeTable) see(parent *node, name string, st *unix.Statx_t, removals, added uint64) (n *node, told bool) {
	key := t.identityOf(st)
	t.mu.Lock()
	defer t.mu.Unlock()
	n = t.byKey.get(key)
	isNew := n == nil || n.kind != uint8(st.Mode>>12)
	if t.outdatedLocked(n, isNew, parent, st, removals, added) {
		return nil, false
	}
	if isNew {
		n = t.newLocked(st)
		if n.isDir() {
			n.dir = t.table.Dir(parent.dir, name)
			n.more.Store(&nodeMore{fd: -1})
		}
		t.addLocked(n)
	}
	n.toldLocked()
	n.setNlinkLocked(st.Nlink)
	if n.linkLocked(parent, name) {
		told = n.tellHandlesLocked() // whoever may write to it, may do so here as well
	} else if t.reborn {
		n.preferLocked(link{parent, name})
	}
	return n, told
}

func (t *nodeTable) outdatedLocked(n *node, isNew bool, parent *node, st *unix.Statx_t, removals, added uint64) bool {
	if parent.more.Load().removals.Load() != removals {
		return true
	}
	fewer := isNew || min(st.Nlink, 0xffff) < uint32(n.nlink)
	return fewer && t.added.Load() != added && !isDirectory(st)
}

// newLocked makes a node that is not in the table yet.
func (t *nodeTable) newLocked(st *unix.Statx_t) *node {
	n := &node{tab: t, kind: uint8(st.Mode >> 12)}
	n.setKey(t.identityOf(st))
	n.id = t.numberLocked(n.key())
	n.setNlinkLocked(st.Nlink)
	return n
}

func (t *nodeTable) addLocked(n *node) {
	t.byID.put(n)
	t.byKey.put(n)
	t.heap.sized(t.byID.n)
}

// lookAt looks at name below dir, the open parent, and returns its node. The
// caller holds FS.ns.
func (t *nodeTable) lookAt(dir int, parent *node, name string, st *unix.Statx_t) (*node, error) {
	for {
		removals, added := t.removalsOf(parent), t.added.Load()
		if err := statAt(dir, name, st); err != nil {
			return nil, err
		}
		// An overlay's files have the device numbers of its layers.
		if dev := identityOf(st).dev; dev != parent.key().dev && (isDirectory(st) || !t.reborn) {
			if err := mayEnter(dir, name); err != nil {
				return nil, err
			}
		}
		if n, told := t.see(parent, name, st, removals, added); n != nil {
			if told {
				t.follow(n)
			}
			return n, nil
		}
	}
}

// anonymous adds a node without a name: an O_TMPFILE file or a private one.
func (t *nodeTable) anonymous(st *unix.Statx_t, fd int, c *candidate) *node {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.newLocked(st)
	if c != nil {
		n.id = t.serialLocked() // it may come to stand for another
	}
	n.lookups = 1
	n.more.Store(&nodeMore{fd: fd, cand: c})
	t.byID.put(n)
	if c == nil {
		t.byKey.put(n)
	}
	return n
}

// toldLocked counts one more time that the kernel is told of n.
func (n *node) toldLocked() {
	if n.lookups == math.MaxUint32 {
		n.needLocked().lookups += uint64(n.lookups)
		n.lookups = 0
	}
	n.lookups++
}

// again counts one more time that the kernel is told of n.
func (t *nodeTable) again(n *node) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n.toldLocked()
}

// forget takes back lookups that the kernel was told of.
func (t *nodeTable) forget(id, lookups uint64) {
	t.mu.Lock()
	defer t.unlock()
	n := t.byID.get(id)
	if n == nil || id < firstNode {
		return
	}
	all := uint64(n.lookups)
	m := n.more.Load()
	if m != nil {
		all += m.lookups
		m.lookups = 0
	}
	all -= min(lookups, all)
	n.lookups = uint32(min(all, math.MaxUint32))
	if all -= uint64(n.lookups); all > 0 {
		m.lookups = all
	}
	t.releaseLocked(n)
}

// releaseLocked drops n if nothing needs it, and parents that only it needed.
func (t *nodeTable) releaseLocked(n *node) {
	m := n.more.Load()
	if n.lookups > 0 || n.id < firstNode || m != nil && (m.lookups > 0 || m.kids > 0 || m.pins > 0) || t.byID.get(n.id) != n {
		return
	}
	t.byID.remove(n)
	t.byKey.remove(n)
	links := n.namesLocked()
	n.setFirstLocked(link{})
	if m != nil {
		m.links = nil
	}
	t.doomed = t.drop(n, t.doomed)
	t.heap.sized(t.byID.n)
	for _, l := range links {
		l.parent.more.Load().kids--
		t.releaseLocked(l.parent)
	}
	if at := t.settled[n.id]; at != nil {
		delete(t.settled, n.id)
		at.more.Load().pins--
		at.tidyLocked()
		t.releaseLocked(at)
	}
}

// disown takes n's identity and names away: what the backing has there is
// another node from now on, and n reaches nothing any more.
func (t *nodeTable) disown(n *node) {
	t.mu.Lock()
	defer t.unlock()
	t.byKey.remove(n)
	for _, l := range n.namesLocked() {
		n.unlinkLocked(l.parent, l.name)
	}
}

func (t *nodeTable) len() int {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.byID.n
}
