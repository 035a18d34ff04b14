package transport

import (
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// A slot tells which request a thread is at, by the number the kernel gave it;
// 0: none.
type slot struct{ unique atomic.Uint64 }

// inflight knows all slots.
type inflight struct {
	mu    sync.Mutex
	slots map[*slot]struct{}
}

func (f *inflight) add() *slot {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.slots == nil {
		f.slots = make(map[*slot]struct{})
	}
	s := new(slot)
	f.slots[s] = struct{}{}
	return s
}

func (f *inflight) remove(s *slot) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.slots, s)
}

func (f *inflight) has(unique uint64) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for s := range f.slots {
		if s.unique.Load() == unique {
			return true
		}
	}
	return false
}

func (f *inflight) all() (uniques []uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for s := range f.slots {
		if u := s.unique.Load(); u != 0 {
			uniques = append(uniques, u)
		}
	}
	return uniques
}

// strayTime is how long an interrupt is kept whose request no thread is at: it
// has been answered, or it is still on its way, as the two come by different
// ways.
const strayTime = 100 * time.Millisecond

// interrupt cancels a request. If that has not begun yet, a goroutine goes on
// trying.
func (c *conn) interrupt(unique uint64) {
	if c.tryInterrupt(unique) {
		return
	}
	c.threads.Add(1)
	go func() {
		defer c.threads.Done()
		stray := time.Now().Add(strayTime)
		for c.inflight.has(unique) || time.Now().Before(stray) {
			if c.tryInterrupt(unique) {
				return
			}
			time.Sleep(200 * time.Microsecond)
		}
	}()
}

// tryInterrupt reports whether the request was under way.
func (c *conn) tryInterrupt(unique uint64) bool {
	in := fuse.InterruptIn{Unique: unique}
	in.Length, in.Opcode = uint32(unsafe.Sizeof(in)), opInterrupt
	var out [outHeaderSize]byte
	n, _ := c.proto.HandleRequest([][]byte{(*[unsafe.Sizeof(in)]byte)(unsafe.Pointer(&in))[:]}, [][]byte{out[:]})
	return n == 0 // only a failure is answered
}
