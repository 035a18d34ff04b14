package transport

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// A keeper is the thread of a queue that carries out nothing. It delivers the
// answers of requests that have waited, in whatever number, and has the places
// that are not in use.
//
// A place that was answered waits for a request again; here it is not wanted.
// So the keeper sends an empty request after it, which the kernel puts into the
// place that became free last, and leaves that unanswered: the place is spare,
// takes neither a thread nor a descriptor, and is free again as soon as the
// empty request is answered, by whichever thread needs a place.
//
// What else comes to a place of the keeper is carried out by a goroutine. So is all that
// comes there where the kernel ends a connection that leaves a request unanswered for
// too long: then no place is spare.
type keeper struct {
	uring *uring
	queue *queue
	node  atomic.Uint64 // a regular file that the kernel may know
	open  atomic.Int32  // places that wait for a request
	busy  atomic.Int32  // requests that goroutines are at

	mu      sync.Mutex
	running bool
	bell    int // an eventfd
	rung    bool
	answers []*place // to be delivered
	more    int      // places that are to be opened
	close   bool     // open places are to be spare
	spare   []*place

	// Of the thread alone.
	ring   *ring
	rings  [8]byte // what is read from bell
	places map[uint64]*place
	kicks  int // empty requests to be sent
	urgent int // empty requests to be answered at once
}

const (
	keeperCommands    = 64   // at a time
	keeperCompletions = 1024 // more of them are kept by the kernel
	// maxBusy bounds the requests of a mount that goroutines are at; those that
	// may wait without end do not count.
	maxBusy = 4096
)

// give has the answer to a request delivered, which takes n bytes of a place, unless the
// request was parked.
func (k *keeper) give(p *place, unique uint64, n int) {
	if n == parked {
		return
	}
	p.answered(unique, n)
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.uring.conn.ended.Load() {
		k.uring.free(p)
		return
	}
	k.answers = append(k.answers, p)
	k.wakeLocked()
}

// grow opens some more places: what the queue's threads are at takes long.
func (k *keeper) grow() error {
	c := k.uring.conn
	n := int32(0)
	for _, k := range c.keepers {
		n += k.busy.Load()
	}
	if n >= maxBusy {
		return fmt.Errorf("more than %d requests at a time", maxBusy)
	}
	c.growMu.Lock()
	defer c.growMu.Unlock()
	if c.Stopping() {
		return unix.ENODEV
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.more = int(min(max(k.busy.Load()/2, 1), keeperCommands))
	k.wakeLocked()
	return nil
}

// settle is called when nothing takes long any more.
func (k *keeper) settle() {
	if k.open.Load() > 0 {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.close = true
		if k.running {
			k.wakeLocked()
		}
	}
}

// keep takes a place that has an empty request.
func (k *keeper) keep(p *place) {
	p.trim()
	k.mu.Lock()
	defer k.mu.Unlock()
	k.spare = append(k.spare, p)
}

// take returns a place that has an empty request, or nil.
func (k *keeper) take() *place {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.spare) == 0 {
		return nil
	}
	p := k.spare[len(k.spare)-1]
	k.spare = k.spare[:len(k.spare)-1]
	return p
}

// answerSpare answers the empty requests in all spare places, which then wait for requests.
func (k *keeper) answerSpare() {
	for p := k.take(); p != nil; p = k.take() {
		unique := p.request().Unique
		k.give(p, unique, p.fail(unique, 0))
	}
}

// begin starts the thread, before it is needed: then there may be no descriptors
// left for its ring, as those that wait for the answers have them.
func (k *keeper) begin() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.running {
		k.wakeLocked()
	}
}

// prepare makes the thread, which begins as soon as start says so, if it can have its ring.
func (k *keeper) prepare(start <-chan bool) error {
	k.mu.Lock()
	k.running, k.rung = true, true
	k.mu.Unlock()
	ready := make(chan error, 1)
	k.spawn(func(err error) {
		ready <- err
		switch {
		case err == nil && <-start:
			k.start(nil)
			return
		case err == nil:
			k.ring.close()
		}
		k.finish()
	})
	return <-ready
}

// spawn runs on a new thread, which has a ring if err is nil.
func (k *keeper) spawn(run func(err error)) {
	c := k.uring.conn
	c.threads.Add(1)
	at := c.inflight.addAt(k.queue)
	go func() {
		defer c.threads.Done()
		defer c.inflight.remove(at)
		runtime.LockOSThread() // for good: the thread ends with the ring
		// An empty request has to be made on the queue's core. Elsewhere it does
		// no harm.
		_ = k.queue.pin()
		run(k.openRing())
	}()
}

// poke wakes the thread, if there is one.
func (k *keeper) poke() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.running {
		k.wakeLocked()
	}
}

func (k *keeper) wakeLocked() {
	switch {
	case !k.running:
		k.running, k.rung = true, true
		k.spawn(k.start)
	case !k.rung:
		k.rung = true
		unix.Write(k.bell, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	}
}
