package fs

import (
	"sync"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// eventsKept bounds how far a reader may fall behind.
const eventsKept = 4096

// An eventLog keeps the last events for those who read the events file.
type eventLog struct {
	mu      sync.Mutex
	readers int
	ring    []lockstate.Event // nil: nobody reads
	next    uint64            // how many there were
	bell    chan struct{}     // closed at the next one; nil: nobody waits
}

// add notes an event. It is called with the table's mutex held, which is what
// puts the events in order.
func (g *eventLog) add(e lockstate.Event) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.readers == 0 {
		return
	}
	e.Time = time.Now()
	g.ring[g.next%eventsKept] = e
	g.next++
	if g.bell != nil {
		close(g.bell)
		g.bell = nil
	}
}

// An eventReader is an open events file: it tells what happens from its open
// on, and waits for it.
type eventReader struct {
	fs *FS
	// nonblock is what open(2) said. What fcntl(2) says later does not count:
	// Go's os package sets O_NONBLOCK on what epoll(7) takes, and would wait
	// for ever for a readiness that the kernel tells of no FUSE file.
	nonblock bool

	mu   sync.Mutex
	next uint64 // the first event that was not read
	rest []byte // of a line that did not fit into a read
}

func openEvents(fs *FS, in *fuse.OpenIn) (controlFile, error) {
	return fs.newEventReader(in.Flags&unix.O_NONBLOCK != 0), nil
}

func (fs *FS) newEventReader(nonblock bool) *eventReader {
	fs.table.Listen(1)
	g := fs.events
	g.mu.Lock()
	defer g.mu.Unlock()
	g.readers++
	if g.ring == nil {
		g.ring = make([]lockstate.Event, eventsKept)
	}
	return &eventReader{fs: fs, next: g.next, nonblock: nonblock}
}

func (r *eventReader) close() {
	r.fs.table.Listen(-1)
	g := r.fs.events
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.readers--; g.readers == 0 {
		g.ring, g.next = nil, 0 // the paths in it may be megabytes
	}
}

func (r *eventReader) write(<-chan struct{}, *fuse.WriteIn, []byte) fuse.Status { return fuse.EBADF }

func (r *eventReader) read(cancel <-chan struct{}, in *fuse.ReadIn) ([]byte, fuse.Status) {
	if in.ReadFlags&fuse.READ_LOCKOWNER == 0 {
		// It is for a page of the cache, where events have no place: who is told this by
		// sendfile(2) goes on with read(2).
		return nil, fuse.EINVAL
	}
	var leave func()
	for {
		b, bell := r.take(int(in.Size))
		switch {
		case len(b) > 0:
			return b, fuse.OK
		case r.nonblock:
			return nil, fuse.EAGAIN
		}
		if leave == nil {
			var err error
			if leave, err = r.fs.control.parked.enter(r.fs.userOf(&in.InHeader), 1); err != nil {
				return nil, statusOf(err)
			}
			defer leave()
		}
		select {
		case <-bell:
		case <-cancel:
			return nil, fuse.EINTR
		case <-r.fs.control.shutting:
			return nil, fuse.OK // the end
		}
	}
}

// take returns what there is to read, whole lines as far as they fit, or a
// channel that is closed when there is something.
func (r *eventReader) take(size int) ([]byte, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	b := r.rest
	for len(b) < size {
		e, ok, bell := r.fs.events.get(&r.next)
		if !ok {
			if len(b) == 0 {
				return nil, bell
			}
			break
		}
		e.Dir, e.DirBytes = text(e.Dir)
		line := encode(e)
		if len(b) > 0 && len(b)+len(line) > size {
			// The line is for the next read.
			r.rest = line
			return b, nil
		}
		b = append(b, line...)
	}
	n := min(len(b), size)
	r.rest = b[n:]
	return b[:n:n], nil
}

// get returns the next event of a reader, or a channel that is closed when
// there is one. Instead of what was overwritten since, it tells how much that
// was.
func (g *eventLog) get(next *uint64) (e lockstate.Event, ok bool, bell <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if first := g.next - min(g.next, eventsKept); *next < first {
		e = lockstate.Event{Time: time.Now(), Event: lockstate.EventsMissed, Count: first - *next}
		*next = first
		return e, true, nil
	}
	if *next < g.next {
		e = g.ring[*next%eventsKept]
		*next++
		return e, true, nil
	}
	if g.bell == nil {
		g.bell = make(chan struct{})
	}
	return e, false, g.bell
}
