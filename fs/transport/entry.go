package transport

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// A place is where a queue puts one request at a time, and takes the answer.
type place struct {
	mem     []byte
	header  *uringHeader
	payload []byte
	iov     [2]unix.Iovec
	in      [3][]byte
	out     [2][]byte
}

func (u *uring) newPlace() (*place, error) {
	if u.places.Add(1) > maxPlaces {
		u.places.Add(-1)
		return nil, fmt.Errorf("more than %d requests at a time", maxPlaces)
	}
	// Untouched pages take no memory.
	mem, err := u.nextMemory()
	if err != nil {
		u.places.Add(-1)
		return nil, fmt.Errorf("buffers of a ring: %w", err)
	}
	return layOut(mem), nil
}

func layOut(mem []byte) *place {
	p := &place{mem: mem, header: (*uringHeader)(unsafe.Pointer(&mem[0])), payload: mem[page:]}
	p.iov[0].Base, p.iov[1].Base = &mem[0], &p.payload[0]
	p.iov[0].SetLen(int(unsafe.Sizeof(uringHeader{})))
	p.iov[1].SetLen(len(p.payload))
	p.out = [2][]byte{p.header.inOut[:outHeaderSize], p.payload}
	return p
}

func (p *place) free() { unmap(p.mem) }

func (p *place) request() *fuse.InHeader {
	return (*fuse.InHeader)(unsafe.Pointer(&p.header.inOut))
}

// split tells the parts of the request apart.
func (p *place) split() (in, out [][]byte) {
	payload := int(p.header.entry.payload)
	fixed := int(p.request().Length) - inHeaderSize - payload
	p.in = [3][]byte{p.header.inOut[:inHeaderSize], p.header.opIn[:max(fixed, 0)], p.payload[:payload]}
	return p.in[:], p.out[:]
}

// answered notes that the answer takes n bytes. The kernel wants one to each
// request that comes here.
func (p *place) answered(unique uint64, n int) {
	if n == 0 {
		n = p.fail(unique, unix.EIO)
	}
	p.header.entry.payload = uint32(n - outHeaderSize)
}

// fail makes an error the answer; 0 is success.
func (p *place) fail(unique uint64, errno unix.Errno) int {
	*(*fuse.OutHeader)(unsafe.Pointer(&p.header.inOut)) = fuse.OutHeader{Length: uint32(outHeaderSize), Unique: unique, Status: -int32(errno)}
	return outHeaderSize
}

// An entry is a thread that answers what comes to a place.
type entry struct {
	uring      *uring
	queue      *queue
	ring       *ring
	place      *place
	at         *slot
	ready      chan error
	registered chan error
	kick       uint64 // a node to begin with; 0: nothing can wait yet
}

// open is called on the entry's thread.
func (e *entry) open() error {
	if err := e.pin(); err != nil && e.queue.online {
		return err
	}
	var err error
	e.ring, err = newRing()
	return err
}

// pin ties the thread to the core of its queue: who waits for the reply runs
// there, and an added entry has to make a request there.
func (e *entry) pin() error {
	var set unix.CPUSet
	set.Set(e.queue.id)
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		return fmt.Errorf("a thread on core %d: %w", e.queue.id, err)
	}
	return nil
}

func (e *entry) close() {
	if e.ring != nil {
		e.ring.close()
	}
	if e.place != nil {
		e.place.free()
	}
}

func (e *entry) submit(cmd uint32, commitID uint64) {
	s := e.ring.sqe0
	*s = ringSQE{opcode: ringOpUringCmd, fd: int32(e.uring.conn.fd), cmd: cmd}
	if cmd == uringRegister {
		s.addr, s.len = uint64(uintptr(unsafe.Pointer(&e.place.iov))), uint32(len(e.place.iov))
	}
	*(*uringCmd)(unsafe.Pointer(&s.payload)) = uringCmd{commitID: commitID, queue: uint16(e.queue.id)}
	e.ring.submit()
}

// register makes a place and gives it to the kernel. A request may be there
// already.
func (e *entry) register() (done ringCQE, has bool, err error) {
	if e.place, err = e.uring.newPlace(); err != nil {
		return done, false, err
	}
	e.submit(uringRegister, 0)
	done, err = e.ring.enter(false)
	switch {
	case err == errNoCompletion:
		return done, false, nil
	case err == nil && done.res != 0:
		err = unix.Errno(-done.res)
	}
	if err != nil {
		return done, false, fmt.Errorf("register a ring: %w", err)
	}
	return done, true, nil
}

// run answers until the kernel lets go.
func (e *entry) run() {
	q, c := e.queue, e.uring.conn
	e.at = c.inflight.addAt(!q.online)
	defer c.inflight.remove(e.at)
	var done ringCQE
	var has bool
	var err error
	if e.place == nil {
		if done, has, err = e.register(); err != nil {
			e.registered <- err
			return
		}
	} else {
		e.submit(uringCommitAndFetch, e.place.header.entry.commitID)
	}
	q.idle.Add(1)
	e.registered <- nil
	if e.kick != 0 {
		e.move()
	}
	for {
		if !has {
			if done, err = e.ring.enter(true); err != nil {
				e.broken(err)
				return
			}
		}
		has = false
		if done.res != 0 {
			e.broken(unix.Errno(-done.res))
			return
		}
		if !q.conn.awaitServing() {
			q.idle.Add(-1)
			return
		}
		h := e.place.request()
		op, unique, n := h.Opcode, h.Unique, 0
		q.busy()
		if c.stopping.Load() {
			c.parkPlace(c.order.Add(1), q, e.place)
			e.place = nil
			return
		}
		e.at.order.Store(0)
		switch {
		case op == opNotifyReply: // by move
			n = e.place.fail(unique, 0)
		case mayWait(op, e.place.header.opIn[:]):
			var left bool
			if n, left = e.lock(); left {
				e.kick = h.NodeId
				if q.idle.Load() >= spareThreads {
					e.place = nil
					return
				}
				if done, has, err = e.another(); err == errStopping {
					e.place = nil
					return
				}
				if err != nil {
					e.broken(err)
					return
				}
				e.move()
				continue
			}
		default:
			before := *h
			in, out := e.place.split()
			n = c.handle(e.at, unique, in, out)
			if n > 0 && c.undone(e.at, e.place.header.inOut[:]) {
				e.place.restore(&before)
				c.parkPlace(e.at.order.Load(), q, e.place)
				e.place = nil
				return
			}
		}
		e.place.answered(unique, n)
		e.submit(uringCommitAndFetch, e.place.header.entry.commitID)
		q.idle.Add(1)
	}
}

// another gives the kernel another place, unless the transport stops.
func (e *entry) another() (done ringCQE, has bool, err error) {
	c := e.uring.conn
	c.growMu.Lock()
	defer c.growMu.Unlock()
	if c.stopping.Load() {
		return done, false, errStopping
	}
	done, has, err = e.register()
	if err == nil {
		e.queue.idle.Add(1)
	}
	return done, has, err
}

var errStopping = errors.New("the transport stops")

// move makes a request on this core, so that what waits for an entry is handed
// out.
func (e *entry) move() { e.uring.conn.kick(e.kick) }

// kick makes a request on the core that it runs on: it asks for the cached
// content of some file, which is none. (A look at the mount would do it too, but
// a daemon that is killed while it waits for its own answer never ends.)
func (c *conn) kick(node uint64) {
	m := struct {
		unique, node, offset uint64
		size, _              uint32
	}{unique: 1<<62 | c.kicks.Add(2)}
	for _, m.node = range append([]uint64{node}, c.files()...) {
		err := c.notify(notifyRetrieve, (*[unsafe.Sizeof(m)]byte)(unsafe.Pointer(&m))[:])
		if err != unix.ENOENT && err != unix.EINVAL { // not known, or no regular file
			return
		}
	}
}

// broken ends the thread: the kernel has let go.
func (e *entry) broken(err error) {
	e.queue.idle.Add(-1)
	if !e.uring.conn.ended.Load() && !errors.Is(err, unix.ENOTCONN) && !errors.Is(err, unix.ECONNABORTED) && !errors.Is(err, unix.ECANCELED) {
		e.uring.conn.opts.Logger.Printf("io_uring of core %d: %v", e.queue.id, err)
	}
}
