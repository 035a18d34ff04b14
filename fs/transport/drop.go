package transport

import (
	"sync"
	"time"
)

// drops are pages that the kernel is told to drop. It locks each one for that, and
// whoever waits for a page that is being read sleeps so deeply that not even exec(2)
// ends it. So none is told of while a transport stops: a read is parked then, and
// goes on with the next program.
type drops struct {
	mu       sync.Mutex
	underWay int
	held     bool     // all that come are
	later    []uint64 // nodes: all of their pages
}

// begin reports whether the kernel is to be told of a node now. The caller calls end
// when it has been.
func (d *drops) begin(node uint64) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.held {
		d.later = append(d.later, node)
		return false
	}
	d.underWay++
	return true
}

func (d *drops) end() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.underWay--
}

// hold keeps back what comes from now on, and reports whether nothing is under way
// any more, unless over reports true before.
func (d *drops) hold(over func() bool) bool {
	for {
		d.mu.Lock()
		d.held = true
		n := d.underWay
		d.mu.Unlock()
		switch {
		case n == 0:
			return true
		case over():
			return false
		}
		time.Sleep(100 * time.Microsecond)
	}
}

// release returns what was kept back.
func (d *drops) release() (later []uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	later, d.later, d.held = d.later, nil, false
	return later
}

// DropPages implements [Kernel]. It does not wait within the request: the kernel may
// have pages locked that are part of it.
func (c *conn) DropPages(node uint64, off, length int64) {
	if c.drops.begin(node) {
		c.threads.Add(1)
		go func() {
			defer c.threads.Done()
			defer c.drops.end()
			c.InodeNotify(node, off, length)
		}()
	}
}

// FlushPages implements [Kernel].
func (c *conn) FlushPages(node uint64) bool {
	if !c.drops.begin(node) {
		return false
	}
	defer c.drops.end()
	c.InodeNotify(node, 0, 0)
	return true
}

// dropAll has the kernel drop what was kept back.
func (c *conn) dropAll(later []uint64) {
	for _, node := range later {
		c.DropPages(node, 0, 0)
	}
}
