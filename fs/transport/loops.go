package transport

import (
	"encoding/binary"
	"fmt"
	"math"
	"runtime"
	"slices"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

const (
	// minRead is the smallest buffer that the kernel fills.
	minRead = 8192
	page    = 4096
)

// maxLoops bounds the threads that read /dev/fuse. Go has no more than 10,000
// threads in all.
const maxLoops = 2048

// loops are the threads that read /dev/fuse.
type loops struct {
	crew
	conn   *conn
	gather *gathering
	size   int // of the largest request and reply

	lazy bool // nothing but news comes here: other requests have their rings
}

func (c *conn) newLoops(gather *gathering) *loops {
	l := &loops{conn: c, gather: gather, size: max(c.opts.MaxWrite, minRead) + 2*page}
	l.watch = &c.watch
	l.crew.grow = l.start
	c.watch.crews = append(c.watch.crews, &l.crew)
	return l
}

// fill adds threads until all that are to wait for requests are there.
func (l *loops) fill() {
	for l.threads.Load() < int32(l.gather.threads()) && l.start() == nil {
	}
}

// start adds a thread.
func (l *loops) start() error {
	l.conn.growMu.Lock()
	defer l.conn.growMu.Unlock()
	if l.conn.Stopping() {
		return unix.ENODEV
	}
	if l.threads.Load() >= maxLoops {
		return fmt.Errorf("more than %d requests at a time", maxLoops)
	}
	buf, err := mapAt(0, 2*l.size)
	if err != nil {
		return fmt.Errorf("buffers of a thread: %w", err)
	}
	l.idle.Add(1)
	l.threads.Add(1)
	l.conn.threads.Add(1)
	at := l.conn.inflight.add()
	go func() {
		defer l.conn.threads.Done()
		defer l.conn.inflight.remove(at)
		defer l.threads.Add(-1)
		runtime.LockOSThread() // for good: the thread ends with the loop
		l.run(at, buf)
		unmap(buf)
	}()
	return nil
}

// run reads and answers until the kernel lets go, or more threads wait than
// need be.
func (l *loops) run(at *slot, buf []byte) {
	c := l.conn
	at.setTid(unix.Gettid(), &c.inflight)
	own := l.gather.sit(unix.Gettid())
	defer l.gather.stand(own)
	// What is written to a file lies at the start of a page, and so does what
	// is read from one: O_DIRECT wants it so.
	const writeHeader, readHeader = int(unsafe.Sizeof(fuse.WriteIn{})), outHeaderSize
	in, out := buf[page-writeHeader:l.size], buf[l.size+page-readHeader:]
	ins, outs := [1][]byte{}, [1][]byte{out}
	h := headerAt(in)
	c.inflight.forLong(at)
	for {
		at.reading.Store(true)
		if c.stopping.Load() {
			l.idle.Add(-1)
			return
		}
		n, err := unix.Read(c.fd, in)
		at.reading.Store(false)
		switch err {
		case nil:
		case unix.EINTR, unix.EAGAIN, unix.ENOENT: // the request was taken back
			continue
		case unix.ENODEV, unix.ECONNABORTED:
			c.end()
			return
		default:
			if c.ended.Load() {
				return
			}
			c.opts.Logger.Printf("read /dev/fuse: %v", err)
			time.Sleep(10 * time.Millisecond) // no busy loop
			continue
		}
		if n < inHeaderSize {
			continue
		}
		if h.Opcode == OpInterrupt {
			c.interrupt((*fuse.InterruptIn)(unsafe.Pointer(h)).Unique)
			continue
		}
		if c.stopping.Load() && c.takeOver(in[:n]) {
			continue
		}
		waits := c.mayWait(h, in[inHeaderSize:n])
		if waits && h.Opcode != OpSetlkw {
			l.aside(in[:n])
			continue
		}
		l.busy()
		if l.gather.took(own, h.Opcode, h.Pid) {
			go l.fill()
		}
		ins[0] = in[:n]
		switch {
		case waits:
			if done := c.lockAtOnce(at, ins[:], outs[:]); done > 0 {
				c.write(out[:done])
			} else {
				l.aside(in[:n])
			}
		case c.takes(h):
			c.write(out[:c.atOnce(at, ins[:], outs[:])])
		default:
			at.order.Store(0)
			l.answer(at, h.Unique, ins[:], outs[:])
		}
		l.gather.gave(h.Opcode)
		if l.idle.Add(1) > int32(l.gather.threads()) {
			l.idle.Add(-1)
			return
		}
		if l.lazy && (h.Opcode == OpForget || h.Opcode == OpBatchForget) && !c.hurry() {
			rest()
		}
	}
}

// forgetPause is how long a thread leaves /dev/fuse alone after a forget, if no
// requests come there.
const forgetPause = 500 * time.Microsecond

// rest lets forgets gather: each that finds a thread waiting wakes it, which
// costs the process that removes files more than the removal itself.
func rest() { pause(forgetPause) }

// pause is time.Sleep for a moment that comes again and again: the thread sleeps, too. Of
// the runtime's timers each wakes others.
func pause(d time.Duration) {
	t := unix.NsecToTimespec(int64(d))
	_ = unix.Nanosleep(&t, nil)
}

// answer has a request carried out and writes the reply.
func (l *loops) answer(at *slot, unique uint64, in, out [][]byte) {
	n := l.conn.handle(at, unique, in, out)
	switch {
	case n == 0:
	case l.conn.undone(at, headerOf(in), out[0]):
		l.conn.parkRaw(at.order.Load(), in[0])
	default:
		l.conn.write(out[0][:n])
	}
}

func (c *conn) write(answer []byte) {
	if _, err := unix.Write(c.fd, answer); err != nil && err != unix.ENOENT && !c.ended.Load() {
		c.opts.Logger.Printf("write /dev/fuse: %v", err)
	}
}

// aside answers a request that may wait without end, on no thread.
func (l *loops) aside(req []byte) {
	c, req := l.conn, slices.Clone(req)
	h := headerAt(req)
	size, uid := 64, uint32(0)
	switch h.Opcode {
	case OpSetlkw:
		if uid = c.userOf(h); c.waits.full(uid) {
			var out [outHeaderSize]byte
			c.write(out[:reply(out[:], h.Unique, fuse.Status(unix.ENOLCK), 0)])
			return
		}
		c.waits.count(uid, 1)
	case OpRead:
		size = l.size
	}
	c.threads.Add(1)
	at := c.inflight.add()
	go func() {
		defer c.threads.Done()
		defer c.inflight.remove(at)
		if h.Opcode == OpSetlkw {
			defer c.waits.count(uid, -1)
		}
		l.answer(at, h.Unique, [][]byte{req}, [][]byte{make([]byte, size)})
	}()
}

// handle has a request carried out and returns the length of the reply; 0:
// there is none.
func (c *conn) handle(at *slot, unique uint64, in, out [][]byte) int {
	if at.order.Load() == 0 {
		at.order.Store(c.order.Add(1))
	}
	at.tally.add(headerOf(in))
	at.unique.Store(unique)
	if c.ended.Load() {
		c.interrupt(unique)
	}
	most := longest(in) // the answer may take the request's place
	n, status := c.request(at, in, out)
	at.unique.Store(0)
	if status == fuse.OK {
		if n > most {
			n = most
			(*fuse.OutHeader)(unsafe.Pointer(&out[0][0])).Length = uint32(n)
		}
		return n
	}
	return reply(out[0], unique, status, 0) // the request is not understood
}

// reply makes the header of an answer with so many bytes behind it, and returns how
// long that is in all.
func reply(out []byte, unique uint64, status fuse.Status, size int) int {
	n := outHeaderSize + size
	*(*fuse.OutHeader)(unsafe.Pointer(&out[0])) = fuse.OutHeader{Length: uint32(n), Status: -int32(status), Unique: unique}
	return n
}

// getVersion is FS_IOC_GETVERSION of linux/fs.h. It names a size of 8 bytes, but
// file systems write 4, and programs have no room for more.
const getVersion = 0x80087601

// longest returns how long the answer to a request may be.
func longest(in [][]byte) int {
	const cmd = 12 // after the header and the handle and the flags
	if headerOf(in).Opcode != OpIoctl {
		return math.MaxInt
	}
	args := in[0][inHeaderSize:]
	if len(in) > 1 {
		args = in[1]
	}
	if len(args) < cmd+4 || binary.NativeEndian.Uint32(args[cmd:]) != getVersion {
		return math.MaxInt
	}
	return outHeaderSize + int(unsafe.Sizeof(fuse.IoctlOut{})) + 4
}
