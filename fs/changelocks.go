package fs

import (
	"slices"
	"sync"
)

// changeLocks has a lock for each node: it is held shared while a file is changed by its
// node, and alone while it gets another name: a change belongs to the names that the file
// had when it was admitted (W3). Each is a lock of its own: whom the backing keeps waiting
// with one keeps nobody who is about another file.
type changeLocks [64]struct {
	mu   sync.Mutex
	busy []nodeLock // few: of calls that are under way; protected by mu
	_    [cacheLine]byte
}

type nodeLock struct {
	node   *node
	shared int           // by how many, or -1: alone
	wants  int           // how many want it alone, and let no more share it
	ended  chan struct{} // closed when somebody gives it back; nil: nobody waits for that
}

// take takes the lock of n. Who has taken one takes another only as renamePlain does.
func (l *changeLocks) take(n *node, alone bool) {
	s := &l[n.id%uint64(len(l))]
	s.mu.Lock()
	defer s.mu.Unlock()
	for waited := false; ; waited = true {
		at := slices.IndexFunc(s.busy, func(c nodeLock) bool { return c.node == n })
		if at < 0 {
			at = len(s.busy)
			s.busy = append(s.busy, nodeLock{node: n})
		}
		c := &s.busy[at]
		if alone && waited {
			c.wants--
		}
		switch {
		case alone && c.shared == 0:
			c.shared = -1
			return
		case !alone && c.shared >= 0 && c.wants == 0:
			c.shared++
			return
		}
		if alone {
			c.wants++
		}
		if c.ended == nil {
			c.ended = make(chan struct{})
		}
		ended := c.ended
		s.mu.Unlock()
		<-ended
		s.mu.Lock()
	}
}

// give gives back what take took.
func (l *changeLocks) give(n *node) {
	s := &l[n.id%uint64(len(l))]
	s.mu.Lock()
	defer s.mu.Unlock()
	at := slices.IndexFunc(s.busy, func(c nodeLock) bool { return c.node == n })
	c := &s.busy[at]
	if c.shared--; c.shared < 0 {
		c.shared = 0
	}
	if c.ended != nil {
		close(c.ended)
		c.ended = nil
	}
	if c.shared == 0 && c.wants == 0 {
		s.busy = slices.Delete(s.busy, at, at+1)
	}
}
