package transport

import (
	"errors"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// start runs, once the thread has what it needs; err is why it has not. It goes on trying:
// answers wait, or requests do.
func (k *keeper) start(err error) {
	c := k.uring.conn
	for pause := time.Millisecond; ; pause = min(2*pause, time.Second) {
		if err == nil {
			err = k.run()
			k.ring.close()
		}
		if err != nil && !c.ended.Load() && !gone(err) {
			c.opts.Logger.Printf("a thread for the answers of core %d: %v", k.queue.id, err)
			time.Sleep(pause)
		}
		if k.finish() {
			return
		}
		err = k.openRing()
	}
}

func (k *keeper) openRing() (err error) {
	if k.ring, err = newRing(keeperCommands, keeperCompletions); err != nil {
		return err
	}
	k.ring.endure = k.queue.endure
	bell, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		k.ring.close()
		return os.NewSyscallError("eventfd", err)
	}
	k.mu.Lock()
	k.bell = bell
	k.mu.Unlock()
	return nil
}

// finish reports whether nothing is left to be done. If the kernel has let go of
// the connection, it lets go of everything.
func (k *keeper) finish() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.bell >= 0 {
		unix.Close(k.bell)
		k.bell = -1
	}
	if !k.uring.conn.ended.Load() {
		k.running = len(k.answers) > 0 || k.more > 0 && !k.uring.conn.stopping.Load()
		return !k.running
	}
	for _, p := range k.answers {
		k.uring.free(p)
	}
	for _, p := range k.spare {
		k.uring.free(p)
	}
	for _, p := range k.places {
		k.uring.free(p)
	}
	k.answers, k.spare, k.running = nil, nil, false
	clear(k.places)
	return true
}

// run returns when the kernel lets go, or when the transport stops and nothing
// can come any more.
func (k *keeper) run() error {
	c := k.uring.conn
	k.kicks, k.urgent = 0, 0
	if err := k.listen(); err != nil {
		return err
	}
	for {
		k.mu.Lock()
		k.rung = false
		n := min(len(k.answers), keeperCommands)
		answers := k.answers[:n:n]
		if k.answers = k.answers[n:]; len(k.answers) == 0 {
			k.answers = nil
		}
		again, more, shut := len(k.answers) > 0, k.more, k.close
		k.more, k.close = 0, false
		stopping := c.stopping.Load()
		if c.ended.Load() || stopping && n == 0 && (k.open.Load() == 0 || !k.queue.online.Load()) {
			k.mu.Unlock()
			return nil
		}
		k.mu.Unlock()

		for _, p := range answers {
			if err := k.deliver(p); err != nil {
				return err
			}
			if !k.uring.timed {
				k.kicks++
			}
		}
		if !stopping {
			if err := k.openMore(more); err != nil {
				return err
			}
		}
		if err := k.ring.flush(); err != nil {
			return err
		}
		if shut && !k.uring.timed {
			k.kicks, k.urgent = max(k.kicks, int(k.open.Load())), 0
		}
		for k.kicks > 0 && !c.stopping.Load() && k.queue.kick(k.node.Load()) {
			k.kicks--
		}
		for wait := !again; ; wait = false {
			done, err := k.ring.enter(wait)
			if err == errNoCompletion {
				break
			}
			if err != nil {
				return err
			}
			if err := k.came(done); err != nil {
				return err
			}
		}
	}
}

// listen has the thread woken by the bell.
func (k *keeper) listen() error {
	s, err := k.ring.next()
	if err != nil {
		return err
	}
	*s = ringSQE{opcode: ringOpRead, fd: int32(k.bell), addr: uint64(uintptr(unsafe.Pointer(&k.rings))), len: uint32(len(k.rings))}
	k.ring.submit()
	return nil
}

func (k *keeper) command(p *place, cmd uint32, commitID uint64) error {
	s, err := k.ring.next()
	if err != nil {
		return err
	}
	k.queue.command(s, p, cmd, commitID)
	s.userData = p.number()
	k.places[s.userData] = p
	k.open.Add(1)
	k.ring.submit()
	return nil
}

// deliver hands over an answer.
func (k *keeper) deliver(p *place) error {
	return k.command(p, uringCommitAndFetch, p.header.entry.commitID)
}

// openMore gives the kernel so many places.
func (k *keeper) openMore(n int) error {
	for range n {
		if p := k.take(); p != nil {
			p.answerEmpty()
			if err := k.deliver(p); err != nil {
				return err
			}
			continue
		}
		p, err := k.uring.newPlace()
		if err != nil {
			k.queue.full.Do(func() {
				k.uring.conn.opts.Logger.Printf("core %d, which may have to wait: %v", k.queue.id, err)
			})
			return nil
		}
		if err := k.command(p, uringRegister, 0); err != nil {
			k.uring.free(p)
			return err
		}
		// What waits for a place is handed out with the next answer.
		k.kicks++
		k.urgent++
	}
	return nil
}

// came takes what has completed.
func (k *keeper) came(done ringCQE) error {
	c := k.uring.conn
	if done.userData == 0 {
		return k.listen()
	}
	p := k.places[done.userData]
	delete(k.places, done.userData)
	k.open.Add(-1)
	if done.res != 0 {
		err := unix.Errno(-done.res)
		if k.queue.notBegun(p, err) {
			return k.deliver(p)
		}
		k.uring.free(p)
		if !c.ended.Load() && !gone(err) {
			c.opts.Logger.Printf("io_uring of core %d: %v", k.queue.id, err)
		}
		return nil
	}
	switch op := p.request().Opcode; {
	case c.stopping.Load():
		c.parkPlace(c.order.Add(1), k.queue, p)
	case op == OpNotifyReply && (k.urgent > 0 || k.uring.timed):
		k.urgent = max(k.urgent-1, 0)
		p.answerEmpty()
		return k.deliver(p)
	case op == OpNotifyReply:
		k.keep(p)
	default:
		k.queue.taken.Add(1)
		k.busy.Add(1)
		k.carry(p)
	}
	return nil
}

// carry has a goroutine answer the request in a place.
func (k *keeper) carry(p *place) {
	c, unique := k.uring.conn, p.request().Unique
	c.threads.Add(1)
	at := c.inflight.add()
	go func() {
		defer c.threads.Done()
		defer c.inflight.remove(at)
		n := k.uring.carryOut(at, k.queue, p)
		k.busy.Add(-1)
		k.give(p, unique, n)
	}()
}

// gone reports whether an error only says that the kernel has let go.
func gone(err error) bool {
	return errors.Is(err, unix.ENOTCONN) || errors.Is(err, unix.ECONNABORTED) || errors.Is(err, unix.ECANCELED)
}
