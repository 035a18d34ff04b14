package transport

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// A transport can be stopped: its threads end, what waits is cancelled and
// parked, and the kernel keeps what it has not handed out. Nothing is lost: the
// same transport goes on, or another process does that has the descriptor and
// the State.
//
// A thread that reads /dev/fuse is called back by a signal. A ring's thread is
// sent an empty request, which it keeps like any other: the kernel must not find
// a place that nobody looks at, or a request would be lost there.

// errEnded says that the kernel has let go of the connection.
var errEnded = errors.New("the connection to the kernel has ended")

// ErrBusy says that something is not answered for long: the backing does not
// answer either.
var ErrBusy = errors.New("some requests have waited for the backing")

// stopTime is how long a Stop takes at most, and nobody is answered in favour of it.
// What is cancelled ends within milliseconds; writing out a file may take seconds.
const stopTime = 5 * time.Second

func errBusy() error { return fmt.Errorf("%w for more than %v", ErrBusy, stopTime) }

// A State is what another process needs to go on with a connection.
type State struct {
	FD       int    // of /dev/fuse
	Name     string // the transport's
	Init     []byte // the kernel's first request, with what was agreed on
	Agreed   uint64 // flags of the answer
	MaxWrite int
	Places   uint64 // how many addresses were given to places
	Kicks    uint64 // how many own requests were made
	Order    uint64
	Parked   []*Parked
	Drop     []uint64 // nodes whose pages the kernel is to drop
	Timed    bool     // the kernel ends the connection if a request is not answered for long
}

// Stop implements [Transport].
func (o *own) Stop(node uint64, begun func()) (*State, error) {
	c := o.conn
	if o.uring != nil {
		if o.uring.fixed.Load() {
			return nil, fmt.Errorf("buffers of the rings cannot be moved: %w", ErrUnavailable)
		}
		if err := o.uring.goesOn(); err != nil {
			return nil, fmt.Errorf("io_uring %w: %v; see to that, or unmount and mount again: %w", ErrUnavailable, err, unix.EOPNOTSUPP)
		}
	}
	if err := callable(); err != nil {
		return nil, err
	}
	c.threads.Add(1) // Serve goes on
	end := time.Now().Add(stopTime)
	late := func() bool { return time.Now().After(end) }
	if !c.drops.hold(func() bool { return late() || c.ended.Load() }) && !c.ended.Load() {
		// The kernel waits for a page that is being read.
		c.dropAll(c.drops.release())
		c.threads.Done()
		return nil, errBusy()
	}
	c.growMu.Lock()
	c.stopping.Store(true)
	c.growMu.Unlock()
	begun()
	for _, k := range c.keepers {
		k.poke()
	}
	busy := o.drain(node, late)
	if c.ended.Load() {
		c.threads.Done()
		return nil, errEnded
	}
	for _, k := range c.keepers {
		for p := k.take(); p != nil; p = k.take() {
			c.parkPlace(c.order.Add(1), k.queue, p)
		}
	}
	s := &State{
		FD: c.fd, Name: o.Name(), Init: c.init, Agreed: c.agreed, MaxWrite: c.opts.MaxWrite,
		Kicks: c.kicks.Load(), Order: c.order.Load(), Parked: c.parking.take(), Drop: c.drops.release(),
	}
	if o.uring != nil {
		s.Places, s.Timed = o.uring.given.Load(), o.uring.timed
	}
	for _, r := range s.Parked {
		if r.place != nil {
			r.place.save(r)
		}
	}
	return s, busy
}

// drain cancels what is under way until all threads have ended, or it is late.
func (o *own) drain(node uint64, late func() bool) error {
	var kickers sync.WaitGroup
	defer kickers.Wait()
	over := make(chan struct{})
	defer close(over)
	if o.uring != nil {
		for _, q := range o.uring.queues {
			if q.online.Load() {
				kickers.Go(func() { q.empty(node, over) })
			}
		}
	}
	for !o.inflight.quiet() && !o.ended.Load() {
		for _, unique := range o.inflight.halt() {
			o.tryInterrupt(unique)
		}
		o.inflight.call()
		if late() { // each has heard of it at least once
			return errBusy()
		}
		time.Sleep(100 * time.Microsecond)
	}
	return nil
}

// Resume implements [Transport].
func (o *own) Resume(s *State) {
	c := o.conn
	c.growMu.Lock()
	c.stopping.Store(false)
	c.growMu.Unlock()
	o.dropped = s.Drop
	o.run(append(s.Parked, c.parking.take()...))
	c.threads.Done()
}

// run replays what was parked, and takes requests.
func (o *own) run(parked []*Parked) {
	o.replay(parked)
	o.dropAll(o.dropped)
	o.dropped = nil
	if o.uring != nil {
		for _, q := range o.uring.queues {
			if q.idle.Load() <= 0 { // also where the core is off: it may be switched on
				if err := o.uring.relieve(q); err != nil {
					o.conn.opts.Logger.Printf("%v", err)
				}
			}
			if q.online.Load() {
				q.keeper.begin()
			}
		}
	}
	o.answerSpare()
	for range o.loops.gather.threads() {
		if err := o.loops.start(); err != nil {
			o.conn.opts.Logger.Printf("%v", err)
		}
	}
}

const (
	// lineTime bounds how long a replay waits until requests stand in line, or are done: on
	// a busy machine, a thread may run late, and who comes after it is not to pass it (A8).
	lineTime = time.Second
	// After that, it waits for each for lateTime: some are held up by the backing.
	lateTime = 20 * time.Millisecond
	// soonTime is more than nearly all need: to sleep takes longer.
	soonTime = 200 * time.Microsecond
)

// awaitLined waits until end, and for lateTime at least, for a request to stand in line
// or to be done.
func (c *conn) awaitLined(before uint64, done <-chan struct{}, end time.Time) {
	if late := time.Now().Add(lateTime); late.After(end) {
		end = late
	}
	for began := time.Now(); c.lined() == before && time.Now().Before(end); {
		select {
		case <-done:
			return
		default:
		}
		if time.Since(began) < soonTime {
			runtime.Gosched()
		} else {
			time.Sleep(20 * time.Microsecond)
		}
	}
}

// empty sends requests through a queue until no thread waits there.
func (q *queue) empty(node uint64, over <-chan struct{}) {
	runtime.LockOSThread() // for good: the thread is tied to a core
	_ = q.pin()
	for {
		if q.idle.Load() > 0 || q.keeper.open.Load() > 0 {
			q.kick(node)
		}
		select {
		case <-over:
			return
		case <-time.After(200 * time.Microsecond):
		}
	}
}

// callSignal is sent to a thread that reads /dev/fuse. Nobody else has a use
// for it.
const callSignal = syscall.Signal(62)

var callOnce struct {
	sync.Once
	err error
}

// callable makes callSignal end a read(2): Go's own handler, but without
// SA_RESTART.
func callable() error {
	callOnce.Do(func() {
		signal.Notify(make(chan os.Signal, 1), callSignal)
		var act [4]uint64 // struct sigaction of the kernel: the flags come second
		const saRestart = 0x10000000
		_, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(callSignal), 0, uintptr(unsafe.Pointer(&act)), 8, 0, 0)
		if errno == 0 {
			act[1] &^= saRestart
			_, _, errno = unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(callSignal), uintptr(unsafe.Pointer(&act)), 0, 8, 0, 0)
		}
		if errno != 0 {
			callOnce.err = os.NewSyscallError("rt_sigaction", errno)
		}
	})
	return callOnce.err
}

// Continue goes on with a connection that another process has stopped.
func Continue(s *State, opts Options) (Transport, error) {
	o := *opts.Mount
	o.MaxWrite = s.MaxWrite
	c := newConn(s.FD, &o, &opts)
	c.init, c.agreed = s.Init, s.Agreed
	c.kicks.Store(s.Kicks)
	c.order.Store(s.Order)
	t := &own{conn: c}
	c.redo = t.replayLate
	if s.Name == Uring {
		o.ExtraCapabilities |= fuse.CAP_OVER_IO_URING
		t.uring = &uring{conn: c, room: max(o.MaxWrite, minRead)}
		t.uring.given.Store(s.Places)
		if err := t.uring.list(); err != nil {
			return nil, err
		}
		t.uring.timed = t.uring.timed || s.Timed // that stays as it was at the mount
		if err := t.uring.moveIn(s.Parked); err != nil {
			return nil, err
		}
	}
	c.proto, c.served = fuse.NewProtocolServer(opts.FS, &o), opts.FS
	opts.Attach(t)
	if err := c.agreeAgain(); err != nil {
		return nil, err
	}
	if t.uring != nil {
		t.loops = c.newLoops(&gathering{least: 1})
		t.loops.lazy = opts.Hurry != nil
	} else {
		t.loops = c.newLoops(newGathering())
	}
	t.parked, t.dropped = s.Parked, s.Drop
	return t, nil
}

// agreeAgain tells the protocol what was agreed on. The kernel is not told.
func (c *conn) agreeAgain() error {
	out := make([]byte, 4096)
	n, status := c.proto.HandleRequest([][]byte{c.init}, [][]byte{out})
	if status != fuse.OK || n < outHeaderSize+int(unsafe.Sizeof(fuse.InitOut{})) {
		return fmt.Errorf("FUSE_INIT: %v", status)
	}
	if got := (*fuse.InitOut)(unsafe.Pointer(&out[outHeaderSize])).Flags64(); got != c.agreed {
		return fmt.Errorf("FUSE_INIT: flags %#x, but %#x were agreed on", got, c.agreed)
	}
	return nil
}

// outSize is enough for any answer.
func (c *conn) outSize() int { return max(c.opts.MaxWrite, minRead) + page }

func (c *conn) lined() uint64 {
	if c.lines == nil {
		return 0
	}
	return c.lines()
}
