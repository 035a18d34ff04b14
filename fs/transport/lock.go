package transport

import (
	"encoding/binary"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

const (
	// lockTime is how long a thread stays with a request for a lock that it
	// may have to wait for.
	lockTime = 200 * time.Microsecond
	// spareThreads is how many idle threads of a queue are enough.
	spareThreads = 2
)

// mayWait tells a request that may wait without end. args is what follows its
// header. To give up a lock comes as one too, from flock(2), and waits for
// nobody.
func mayWait(op uint32, args []byte) bool {
	const kind = unsafe.Offsetof(fuse.LkIn{}.Lk) + unsafe.Offsetof(fuse.FileLock{}.Typ) - unsafe.Sizeof(fuse.InHeader{})
	return op == opSetlkw && (len(args) < int(kind)+4 || binary.NativeEndian.Uint32(args[kind:]) != unix.F_UNLCK)
}

// parked stands for the length of an answer: there is none yet.
const parked = -1

// lock carries out a request that may wait without end, on a goroutine. If that
// takes longer than a moment, or the request was parked, the thread has left the
// place to it, and needs another one or ends.
func (e *entry) lock() (n int, left bool) {
	u, p, unique := e.uring, e.place, e.place.request().Unique
	if u.places.Load() >= maxPlaces/2 {
		return p.fail(unique, unix.ENOLCK), false
	}
	var over atomic.Bool // one of the two is done with the other
	done := make(chan int, 1)
	u.conn.threads.Add(1)
	at := u.conn.inflight.add()
	go func() {
		defer u.conn.threads.Done()
		defer u.conn.inflight.remove(at)
		h := *p.request()
		in, out := p.split()
		n := u.conn.wait(at, &h, in, out)
		if u.conn.undone(at, p.header.inOut[:]) {
			p.restore(&h)
			u.conn.parkPlace(at.order.Load(), e.queue, p)
			if over.CompareAndSwap(false, true) {
				done <- parked
			}
			return
		}
		if over.CompareAndSwap(false, true) {
			done <- n
			return
		}
		p.answered(unique, n)
		u.giveBack(e.queue, p)
	}()
	moment := time.NewTimer(lockTime)
	defer moment.Stop()
	select {
	case n = <-done:
		return n, n == parked
	case <-moment.C:
	}
	if over.CompareAndSwap(false, true) {
		return 0, true
	}
	n = <-done
	return n, n == parked
}

// giveBack lets a new thread deliver the answer that is in a place, and go on
// there.
func (u *uring) giveBack(q *queue, p *place) {
	start := make(chan bool, 1)
	start <- true
	for pause := time.Millisecond; !u.conn.ended.Load(); pause = min(2*pause, time.Second) {
		e, err := u.spawn(q, p, start)
		if err == nil {
			<-e.registered
			return
		}
		u.conn.opts.Logger.Printf("a thread for an answer: %v", err)
		time.Sleep(pause)
	}
	p.free()
}
