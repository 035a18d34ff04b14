package transport

import (
	"errors"
	"fmt"
	"os"
	"time"
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

// free is for a place that the kernel does not know, or knows no more.
func (u *uring) free(p *place) {
	unmap(p.mem)
	u.places.Add(-1)
}

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

// answerEmpty answers the empty request that is in a spare place.
func (p *place) answerEmpty() {
	unique := p.request().Unique
	p.answered(unique, p.fail(unique, 0))
}

// number tells the place from all others.
func (p *place) number() uint64 { return uint64(uintptr(unsafe.Pointer(&p.mem[0]))) }

func (p *place) answer() *fuse.OutHeader { return (*fuse.OutHeader)(unsafe.Pointer(&p.header.inOut)) }

// trim gives back what memory the payload takes.
func (p *place) trim() { unix.Madvise(p.payload, unix.MADV_DONTNEED) }

// fail makes an error the answer; 0 is success.
func (p *place) fail(unique uint64, errno unix.Errno) int {
	return reply(p.header.inOut[:], unique, fuse.Status(errno), 0)
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
	if err := e.queue.pin(); err != nil && e.queue.online.Load() {
		return err
	}
	var err error
	if e.ring, err = newRing(1, 2); err == nil {
		e.ring.endure = e.queue.endure
	}
	return err
}

// pin ties the thread to the core of its queue: who waits for the reply runs
// there, and an added entry has to make a request there.
func (q *queue) pin() error {
	var set unix.CPUSet
	set.Set(q.id)
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		return fmt.Errorf("a thread on core %d: %w", q.id, err)
	}
	return nil
}

// kick makes a request on the queue's core, and reports whether it could. The calling
// thread is tied to that core, and may have been tied to others since, as by
// taskset(1), or by the core's having been off.
func (q *queue) kick(node uint64) bool {
	var set unix.CPUSet
	if unix.SchedGetaffinity(0, &set) != nil || set.Count() != 1 || !set.IsSet(q.id) {
		if err := q.pin(); err != nil {
			q.lost.Do(func() {
				q.conn.opts.Logger.Printf("%v: what is called there may have to wait for others' locks", err)
			})
		}
	}
	return q.conn.kick(node)
}

func (e *entry) close() {
	if e.ring != nil {
		e.ring.close()
	}
	if e.place != nil {
		e.uring.free(e.place)
	}
}

func (e *entry) submit(cmd uint32, commitID uint64) {
	e.queue.command(e.ring.sqe0, e.place, cmd, commitID)
	e.ring.submit()
}

// command fills a submission in.
func (q *queue) command(s *ringSQE, p *place, cmd uint32, commitID uint64) {
	*s = ringSQE{opcode: ringOpUringCmd, fd: int32(q.conn.fd), cmd: cmd}
	if cmd == uringRegister {
		s.addr, s.len = uint64(uintptr(unsafe.Pointer(&p.iov))), uint32(len(p.iov))
	}
	*(*uringCmd)(unsafe.Pointer(&s.payload)) = uringCmd{commitID: commitID, queue: uint16(q.id)}
}

// register makes a place and gives it to the kernel. A request may be there
// already.
func (e *entry) register() (done ringCQE, has bool, err error) {
	if e.place, err = e.uring.newPlace(); err != nil {
		return done, false, err
	}
	e.submit(uringRegister, 0)
	endure := e.ring.endure
	e.ring.endure = nil // there is another way to go on
	done, err = e.ring.enter(false)
	e.ring.endure = endure
	switch {
	case err == errNoCompletion:
		return done, false, nil
	case err == nil && done.res != 0:
		err = unix.Errno(-done.res)
	}
	if err != nil {
		// Who tries again makes another one.
		e.ring.takeBack()
		e.uring.free(e.place)
		e.place = nil
		return done, false, fmt.Errorf("register a ring: %w", err)
	}
	return done, true, nil
}

// run answers until the kernel lets go.
func (e *entry) run() {
	q, c := e.queue, e.uring.conn
	e.at = c.inflight.addAt(q)
	c.inflight.forLong(e.at)
	defer c.inflight.remove(e.at)
	q.threads.Add(1)
	defer q.threads.Add(-1)
	var done ringCQE
	var has, serving bool
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
			if !e.again(unix.Errno(-done.res)) {
				return
			}
			continue
		}
		if serving = serving || c.awaitServing(); !serving {
			q.idle.Add(-1)
			return
		}
		h := e.place.request()
		unique, n := h.Unique, 0
		q.busy()
		if c.stopping.Load() {
			c.parkPlace(c.order.Add(1), q, e.place)
			e.place = nil
			return
		}
		e.at.order.Store(0)
		switch {
		case h.Opcode == OpNotifyReply: // by move, or a keeper
			n = e.place.fail(unique, 0)
		case c.mayWait(h, e.place.header.opIn[:]):
			in, out := e.place.split()
			if n = c.lockAtOnce(e.at, in, out); n > 0 {
				break
			}
			var left bool
			var at *slot
			e.kick = h.NodeId
			if n, at, left = e.aside(); left {
				var goesOn bool
				if done, has, goesOn = e.goOn(at, unique); !goesOn {
					return
				}
				continue
			}
		default:
			in, out := e.place.split()
			if c.takes(h) {
				n = c.atOnce(e.at, in, out)
				break
			}
			before := *h
			n = c.handle(e.at, unique, in, out)
			if n > 0 && c.undone(e.at, &before, e.place.header.inOut[:]) {
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

// goOn gets another place for a thread that has left its own to a request, and
// reports whether the thread is to go on there. If there is no room, the request
// is refused.
func (e *entry) goOn(at *slot, unique uint64) (done ringCQE, has, goesOn bool) {
	c := e.uring.conn
	e.queue.keeper.node.Store(e.kick)
	e.place = nil
	for pause := time.Millisecond; ; pause = min(2*pause, time.Second) {
		spare, done, has, err := e.another()
		if err == nil {
			if !spare {
				e.move()
			}
			return done, has, true
		}
		if err == errStopping || c.ended.Load() {
			return done, false, false
		}
		if at != nil && !at.refused.Swap(true) {
			c.opts.Logger.Printf("a request that waits is refused: %v", err)
			c.tryInterrupt(unique)
		}
		time.Sleep(pause)
	}
}

// another gives the kernel another place, a spare one if there is one, unless
// the transport stops.
func (e *entry) another() (spare bool, done ringCQE, has bool, err error) {
	c := e.uring.conn
	c.growMu.Lock()
	defer c.growMu.Unlock()
	if c.stopping.Load() {
		return false, done, false, errStopping
	}
	if e.place = e.queue.keeper.take(); e.place != nil {
		spare = true
		e.place.answerEmpty()
		e.submit(uringCommitAndFetch, e.place.header.entry.commitID)
	} else {
		done, has, err = e.register()
	}
	if err == nil {
		e.queue.idle.Add(1)
	}
	return spare, done, has, err
}

var errStopping = errors.New("the transport stops")

// move makes a request on this core, so that what waits for an entry is handed
// out.
func (e *entry) move() { e.queue.kick(e.kick) }

// kick makes a request on the core that it runs on, and reports whether it
// could: it asks for the cached content of some file, which is none. (A look at
// the mount would do it too, but a daemon that is killed while it waits for its
// own answer never ends.)
func (c *conn) kick(node uint64) bool {
	m := struct {
		unique, node, offset uint64
		size, _              uint32
	}{unique: 1<<62 | c.kicks.Add(2)}
	try := func() (done, again bool) {
		err := c.notify(notifyRetrieve, (*[unsafe.Sizeof(m)]byte)(unsafe.Pointer(&m))[:])
		return err == nil, err == unix.ENOENT || err == unix.EINVAL // not known, or no regular file
	}
	if m.node = node; m.node > fuse.FUSE_ROOT_ID {
		if done, again := try(); !again {
			return done
		}
	}
	for _, m.node = range c.files() {
		if done, again := try(); !again {
			return done
		}
	}
	return false
}

// endure reports whether a thread of the queue is to make a call again that failed: what is in
// its ring, nobody else can take out.
func (q *queue) endure(err error) bool {
	if q.conn.ended.Load() {
		return false
	}
	q.failed.Do(func() { q.conn.opts.Logger.Printf("core %d, which may have to wait: %v", q.id, err) })
	return true
}

// notBegun reports whether the kernel had no memory for the command that was to deliver the
// answer in p, and has not begun it. It is to be given again then: nobody else can deliver that.
func (q *queue) notBegun(p *place, errno unix.Errno) bool {
	if errno != unix.ENOMEM || p.header.entry.commitID == 0 || !q.endure(os.NewSyscallError("a command of io_uring", errno)) {
		return false
	}
	time.Sleep(ringPause)
	return true
}

// again delivers an answer once more that was not delivered. Else the thread ends.
func (e *entry) again(errno unix.Errno) bool {
	if !e.queue.notBegun(e.place, errno) {
		e.broken(errno)
		return false
	}
	e.submit(uringCommitAndFetch, e.place.header.entry.commitID)
	return true
}

// broken ends the thread: the kernel has let go.
func (e *entry) broken(err error) {
	e.queue.idle.Add(-1)
	if !e.uring.conn.ended.Load() && !gone(err) {
		e.uring.conn.opts.Logger.Printf("io_uring of core %d: %v", e.queue.id, err)
	}
}
