package transport

import (
	"cmp"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// A Parked is a request that was taken from the kernel and is not answered:
// nothing was done about it yet, or it waited and has changed nothing. Whoever
// serves the connection next carries it out.
type Parked struct {
	Order uint64 // of arrival
	// Interrupted: the kernel has said that the caller has a signal.
	Interrupted bool

	Raw []byte // as it was read; or, if it came through a ring:

	Queue           int
	Addr            uint64 // of the place
	Header, Payload []byte // what is there

	place *place
	queue *queue
}

// parking is where requests are parked while a transport stops.
type parking struct {
	mu          sync.Mutex
	all         []*Parked
	interrupted map[uint64]struct{} // by the kernel meanwhile
}

func (p *parking) add(r *Parked) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all = append(p.all, r)
}

func (p *parking) interrupt(unique uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.interrupted == nil {
		p.interrupted = make(map[uint64]struct{})
	}
	p.interrupted[unique] = struct{}{}
}

// take returns what is parked, in order of arrival.
func (p *parking) take() []*Parked {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := p.all
	for _, r := range all {
		if _, ok := p.interrupted[r.header().Unique]; ok {
			r.Interrupted = true
		}
	}
	p.all, p.interrupted = nil, nil
	slices.SortFunc(all, func(a, b *Parked) int { return cmp.Compare(a.Order, b.Order) })
	return all
}

func (r *Parked) header() *fuse.InHeader {
	if r.place != nil {
		return r.place.request()
	}
	return headerAt(r.Raw)
}

// undone reports whether a request that was carried out waited, and was only
// cancelled because the transport stops, or was to stop. out is its answer.
func (c *conn) undone(at *slot, h *fuse.InHeader, out []byte) bool {
	answer := (*fuse.OutHeader)(unsafe.Pointer(&out[0]))
	if answer.Status != -int32(unix.EINTR) || !c.stopping.Load() && at.halted.Load() != answer.Unique {
		return false
	}
	return at.told.Load() != answer.Unique || !signalEnds(h.Opcode) && !Killed(h.Pid)
}

// signalEnds reports whether a signal that does not kill ends the wait of a request:
// of one that may wait without end.
func signalEnds(op uint32) bool { return op == OpSetlkw || op == OpRead || op == OpWrite }

// park keeps a request until the transport goes on. That may be so already.
func (c *conn) park(r *Parked) {
	c.growMu.Lock()
	stopping := c.stopping.Load()
	if stopping {
		c.parking.add(r)
	}
	c.growMu.Unlock()
	if !stopping {
		c.redo([]*Parked{r})
	}
}

// parkRaw keeps a request that was read from /dev/fuse.
func (c *conn) parkRaw(order uint64, req []byte) {
	c.park(&Parked{Order: order, Raw: slices.Clone(req)})
}

// parkPlace keeps a request that is in a place of a ring.
func (c *conn) parkPlace(order uint64, q *queue, p *place) {
	c.park(&Parked{Order: order, Queue: q.id, place: p, queue: q})
}

// takeOver decides about what a thread has read after the transport was told to
// stop, and reports whether that was all that is to be done about it.
func (c *conn) takeOver(req []byte) bool {
	switch headerAt(req).Opcode {
	case OpForget, OpBatchForget: // nobody waits for an answer
		return false
	case OpNotifyReply:
		return true
	}
	c.parkRaw(c.order.Add(1), req)
	return true
}

// replay carries out what was parked. Those who stand in line somewhere get
// there in the order in which they arrived.
func (o *own) replay(all []*Parked) {
	c := o.conn
	end := time.Now().Add(lineTime)
	for _, r := range all {
		op := r.header().Opcode
		if op == OpNotifyReply {
			if r.place != nil {
				r.queue.keeper.keep(r.place)
			}
			continue
		}
		before := c.lined()
		done := make(chan struct{})
		at := c.inflight.add()
		c.threads.Add(1)
		go func() {
			defer c.threads.Done()
			defer c.inflight.remove(at)
			defer close(done)
			o.again(at, r)
		}()
		if op == OpSetlkw || op == OpWrite {
			c.awaitLined(before, done, end)
		}
	}
}

// replayLate carries out what was parked when the transport went on already.
func (o *own) replayLate(all []*Parked) {
	o.replay(all)
	o.answerSpare()
}

// answerSpare leaves no empty request unanswered that was parked, where the kernel would end
// the connection for that.
func (o *own) answerSpare() {
	if o.uring == nil || !o.uring.timed {
		return
	}
	for _, q := range o.uring.queues {
		q.keeper.answerSpare()
	}
}

// again carries out one request that was parked.
func (o *own) again(at *slot, r *Parked) {
	c, h := o.conn, *r.header()
	at.order.Store(r.Order)
	if r.Interrupted {
		c.interrupt(h.Unique)
	}
	if r.place == nil {
		size := c.outSize()
		if h.Opcode == OpSetlkw { // of which there may be thousands
			size = outHeaderSize
		}
		out := make([]byte, size)
		n := c.wait(at, &h, [][]byte{r.Raw}, [][]byte{out})
		switch {
		case n == 0:
		case c.undone(at, &h, out):
			c.parkRaw(r.Order, r.Raw)
		default:
			c.write(out[:n])
		}
		return
	}
	r.queue.keeper.give(r.place, h.Unique, o.uring.carryOut(at, r.queue, r.place))
}
