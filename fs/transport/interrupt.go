package transport

import (
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// A slot tells what a thread is at.
type slot struct {
	unique  atomic.Uint64 // the number that the kernel gave the request; 0: none
	order   atomic.Uint64 // of its arrival
	refused atomic.Bool   // it is cancelled as there is no room for it
	told    atomic.Uint64 // of which request the kernel has said that its caller has a signal
	halted  atomic.Uint64 // which request is cancelled for a Stop's sake
	tid     int           // of a thread that reads /dev/fuse; else 0
	reading atomic.Bool   // it is about to
	queue   *queue        // whose it is; may be nil
	tally   *tally        // of a thread its own; else all's

	// A thread that always does one request after another does most of them
	// with these. cancel is one for all, until it is used.
	quick  *quick
	mu     sync.Mutex
	own    bool // one is under way
	used   bool
	cancel chan struct{}
}

// begin returns what cancels the request whose number was set.
func (s *slot) begin() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cancel == nil || s.used {
		s.cancel, s.used = make(chan struct{}), false
	}
	s.own = true
	return s.cancel
}

func (s *slot) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.own = false
}

// interrupt cancels a request, and reports whether it is under way here.
func (s *slot) interrupt(unique uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.own || s.unique.Load() != unique {
		return false
	}
	if !s.used {
		s.used = true
		close(s.cancel)
	}
	return true
}

// inflight knows all slots.
type inflight struct {
	mu    sync.Mutex
	slots map[*slot]struct{}
	tally tally // of slots that have none, or are gone
}

func (f *inflight) add() *slot { return f.addAt(nil) }

func (f *inflight) addAt(q *queue) *slot {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.slots == nil {
		f.slots = make(map[*slot]struct{})
	}
	s := &slot{queue: q, tally: &f.tally}
	f.slots[s] = struct{}{}
	return s
}

func (s *slot) setTid(tid int, f *inflight) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s.tid = tid
}

func (f *inflight) remove(s *slot) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.keepLocked(s)
	delete(f.slots, s)
}

// any reports whether f does of a slot.
func (f *inflight) any(is func(*slot) bool) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for s := range f.slots {
		if is(s) {
			return true
		}
	}
	return false
}

// all returns the requests that are under way.
func (f *inflight) all() (uniques []uint64) {
	f.any(func(s *slot) bool {
		if u := s.unique.Load(); u != 0 {
			uniques = append(uniques, u)
		}
		return false
	})
	return uniques
}

// halt cancels what is under way for a Stop's sake. It returns the requests that go-fuse
// knows, or that have not begun.
func (f *inflight) halt() (others []uint64) {
	f.any(func(s *slot) bool {
		if u := s.unique.Load(); u != 0 {
			s.halted.Store(u)
			if !s.interrupt(u) {
				others = append(others, u)
			}
		}
		return false
	})
	return others
}

// quiet reports whether nobody is at a request, nor waits for one where any can come.
func (f *inflight) quiet() bool {
	return !f.any(func(s *slot) bool { return s.queue == nil || s.queue.online.Load() })
}

// call sends a signal to the threads that read.
func (f *inflight) call() {
	f.any(func(s *slot) bool {
		if s.tid != 0 && s.reading.Load() {
			unix.Tgkill(unix.Getpid(), s.tid, callSignal)
		}
		return false
	})
}

// tell notes that the caller of a request has a signal, and reports whether the
// request is under way.
func (f *inflight) tell(unique uint64) bool {
	return f.any(func(s *slot) bool {
		if s.unique.Load() != unique {
			return false
		}
		s.told.Store(unique)
		return true
	})
}

// interrupt cancels a request that go-fuse does not know, and reports whether it
// was under way.
func (f *inflight) interrupt(unique uint64) bool {
	return f.any(func(s *slot) bool { return s.interrupt(unique) })
}

func (f *inflight) has(unique uint64) bool {
	return f.any(func(s *slot) bool { return s.unique.Load() == unique })
}

// strayTime is how long an interrupt is kept whose request no thread is at: it
// has been answered, or it is still on its way, as the two come by different
// ways.
const strayTime = 100 * time.Millisecond

// interrupt cancels a request. If that has not begun yet, a goroutine goes on
// trying.
func (c *conn) interrupt(unique uint64) {
	if c.stopping.Load() {
		c.parking.interrupt(unique)
	}
	if c.passOn(unique) {
		return
	}
	c.threads.Add(1)
	go func() {
		defer c.threads.Done()
		stray := time.Now().Add(strayTime)
		for c.inflight.has(unique) || time.Now().Before(stray) {
			if c.passOn(unique) {
				return
			}
			time.Sleep(200 * time.Microsecond)
		}
	}()
}

// passOn cancels a request whose caller has a signal, and reports whether it was
// under way.
func (c *conn) passOn(unique uint64) bool {
	return c.inflight.tell(unique) && c.tryInterrupt(unique)
}

// tryInterrupt reports whether the request was under way.
func (c *conn) tryInterrupt(unique uint64) bool {
	if c.inflight.interrupt(unique) {
		return true
	}
	in := fuse.InterruptIn{Unique: unique}
	in.Length, in.Opcode = uint32(unsafe.Sizeof(in)), OpInterrupt
	var out [outHeaderSize]byte
	n, _ := c.proto.HandleRequest([][]byte{(*[unsafe.Sizeof(in)]byte)(unsafe.Pointer(&in))[:]}, [][]byte{out[:]})
	return n == 0 // only a failure is answered
}
