package fs

import (
	"sync"

	"golang.org/x/sys/unix"
)

// dirFD is an open directory of the backing.
type dirFD struct {
	cache *dirCache
	node  *node
	fd    int

	// Protected by cache.mu.
	refs    int
	evicted bool
	newer   *dirFD
	older   *dirFD
}

func (d *dirFD) release() {
	c := d.cache
	c.mu.Lock()
	d.refs--
	last := d.refs == 0 && d.evicted
	c.mu.Unlock()
	if last {
		unix.Close(d.fd)
	}
}

// dirCache keeps the directories that were used last open, up to a limit, so
// that descriptors do not grow with the tree.
type dirCache struct {
	mu     sync.Mutex
	limit  int
	n      int
	newest *dirFD
	oldest *dirFD
}

// get returns n's descriptor with a reference, or nil.
func (c *dirCache) get(n *node) *dirFD {
	c.mu.Lock()
	defer c.mu.Unlock()
	d := n.more.Load().cached
	if d == nil {
		return nil
	}
	d.refs++
	if c.newest != d {
		c.unlink(d)
		c.push(d)
	}
	return d
}

// put adds a descriptor of n and returns it with a reference. If there is one
// already, that is returned and fd is closed.
func (c *dirCache) put(n *node, fd int) *dirFD {
	var doomed []int
	c.mu.Lock()
	d := n.more.Load().cached
	if d != nil {
		doomed = append(doomed, fd)
		d.refs++
	} else {
		d = &dirFD{cache: c, node: n, fd: fd, refs: 1}
		n.more.Load().cached = d
		c.push(d)
		for old := c.oldest; c.n > c.limit && old != nil && old != d; {
			next := old.newer
			if c.evict(old) {
				doomed = append(doomed, old.fd)
			}
			old = next
		}
	}
	c.mu.Unlock()
	drop(doomed...)
	return d
}

// drop forgets n's descriptor and, if nobody uses it, adds it to those that the
// caller is to close.
func (c *dirCache) drop(n *node, doomed []int) []int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if d := n.more.Load().cached; d != nil && c.evict(d) {
		doomed = append(doomed, d.fd)
	}
	return doomed
}

// dropAdrift forgets the descriptors of directories to which nothing leads any more:
// who is in them, or knows their names, has lost the place. The caller holds FS.ns
// alone.
func (c *dirCache) dropAdrift() {
	var all []*node
	c.mu.Lock()
	for d := c.newest; d != nil; d = d.older {
		all = append(all, d.node)
	}
	c.mu.Unlock()
	var doomed []int
	for _, n := range all {
		if n.adrift() {
			doomed = c.drop(n, doomed)
		}
	}
	drop(doomed...)
}

// evict takes d out and reports whether its descriptor is to be closed now.
func (c *dirCache) evict(d *dirFD) bool {
	c.unlink(d)
	d.node.more.Load().cached = nil
	d.evicted = true
	return d.refs == 0
}

func (c *dirCache) push(d *dirFD) {
	d.older, d.newer = c.newest, nil
	if c.newest != nil {
		c.newest.newer = d
	}
	c.newest = d
	if c.oldest == nil {
		c.oldest = d
	}
	c.n++
}

func (c *dirCache) unlink(d *dirFD) {
	if d.newer != nil {
		d.newer.older = d.older
	} else {
		c.newest = d.older
	}
	if d.older != nil {
		d.older.newer = d.newer
	} else {
		c.oldest = d.newer
	}
	d.newer, d.older = nil, nil
	c.n--
}

// dirCacheLimit leaves most descriptors to open files.
func dirCacheLimit() int {
	return int(min(max(maxDescriptors()/8, 64), 4096))
}
