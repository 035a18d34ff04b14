package transport

import (
	"encoding/binary"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// apartTime is how long a thread stays with a request that may wait without end.
const apartTime = 200 * time.Microsecond

// parked stands for the length of an answer: there is none yet.
const parked = -1

// mayWait reports whether a request may wait without end. args is what follows
// its header. To give up a lock comes as a wait for one too, from flock(2), and
// waits for nobody.
func (c *conn) mayWait(h *fuse.InHeader, args []byte) bool {
	const kind = unsafe.Offsetof(fuse.LkIn{}.Lk) + unsafe.Offsetof(fuse.FileLock{}.Typ) - unsafe.Sizeof(fuse.InHeader{})
	if h.Opcode == OpSetlkw {
		return len(args) < int(kind)+4 || binary.NativeEndian.Uint32(args[kind:]) != unix.F_UNLCK
	}
	return h.NodeId >= c.apart && (h.Opcode == OpRead || h.Opcode == OpWrite)
}

const (
	// maxWaits bounds the requests of a mount that wait for locks, and
	// maxWaitsUser those of each user but root: he is to lock nobody out.
	maxWaits     = 32768
	maxWaitsUser = 16384
)

// waits counts requests for locks.
type waits struct {
	mu     sync.Mutex
	all    int
	byUser map[uint32]int
}

// full reports whether one more is too many.
func (w *waits) full(uid uint32) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.all >= maxWaits || uid != 0 && w.byUser[uid] >= maxWaitsUser
}

// count is called with 1 when a request begins, and with -1 when it is over.
func (w *waits) count(uid uint32, n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.byUser == nil {
		w.byUser = make(map[uint32]int)
	}
	w.all += n
	if w.byUser[uid] += n; w.byUser[uid] == 0 {
		delete(w.byUser, uid)
	}
}

// aside carries out a request that may wait without end, on a goroutine. If that
// takes longer than a moment, or the request was parked, the thread has left the
// place to it, and needs another one or ends.
func (e *entry) aside() (n int, at *slot, left bool) {
	u, p, h := e.uring, e.place, *e.place.request()
	if h.Opcode == OpSetlkw && u.conn.waits.full(u.conn.userOf(&h)) {
		return p.fail(h.Unique, unix.ENOLCK), nil, false
	}
	var over atomic.Bool // one of the two is done with the other
	done := make(chan int, 1)
	u.conn.threads.Add(1)
	at = u.conn.inflight.add()
	go func() {
		defer u.conn.threads.Done()
		defer u.conn.inflight.remove(at)
		n := u.carryOut(at, e.queue, p)
		if over.CompareAndSwap(false, true) {
			done <- n
		} else {
			e.queue.keeper.give(p, h.Unique, n)
		}
	}()
	moment := time.NewTimer(apartTime)
	defer moment.Stop()
	select {
	case n = <-done:
		return n, nil, n == parked
	case <-moment.C:
	}
	if h.Opcode == OpSetlkw { // nothing of it is there
		p.trim() // before the place is left: it may have another request then
	}
	if over.CompareAndSwap(false, true) {
		return 0, at, true
	}
	n = <-done
	return n, nil, n == parked
}

// carryOut answers the request in a place, or parks it because the transport
// stops.
func (u *uring) carryOut(at *slot, q *queue, p *place) (n int) {
	h := *p.request()
	in, out := p.split()
	n = u.conn.wait(at, &h, in, out)
	if n > 0 && u.conn.undone(at, &h, p.header.inOut[:]) {
		p.restore(&h)
		u.conn.parkPlace(at.order.Load(), q, p)
		return parked
	}
	if at.refused.Load() && p.answer().Status == -int32(unix.EINTR) {
		n = p.fail(h.Unique, unix.ENOLCK)
	}
	return n
}
