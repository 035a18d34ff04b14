package transport

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// Notifications that a transport has to know.
const (
	notifyInvalInode = 2
	notifyStore      = 4
	notifyRetrieve   = 5
	notifyIncEpoch   = 8
)

const (
	inHeaderSize  = int(unsafe.Sizeof(fuse.InHeader{}))
	outHeaderSize = int(unsafe.Sizeof(fuse.OutHeader{}))
)

// A conn is a connection to the kernel that is served by own threads.
type conn struct {
	proto  *fuse.ProtocolServer
	served fuse.RawFileSystem // what proto serves
	opts   *fuse.MountOptions
	files  func() []uint64
	lines  func() uint64
	hurry  func() bool
	apart  uint64 // see Options

	fdMu sync.RWMutex
	fd   int // -1: closed; closed when all threads are gone

	threads  sync.WaitGroup
	serving  chan struct{} // closed by Serve: no request is looked at before
	ended    atomic.Bool   // the kernel has let go
	watch    watch
	inflight inflight
	waits    waits
	keepers  []*keeper     // fixed from the start
	kicks    atomic.Uint64 // numbers of own requests
	order    atomic.Uint64 // of requests

	init   []byte // see State
	agreed uint64

	growMu   sync.Mutex  // held while a thread is added
	stopping atomic.Bool // set with growMu held; no request is begun any more
	parking  parking
	redo     func([]*Parked) // carries out what was parked
	drops    drops
}

func newConn(fd int, mount *fuse.MountOptions, o *Options) *conn {
	c := &conn{
		opts: mount, fd: fd, serving: make(chan struct{}),
		files: o.Files, lines: o.Lines, hurry: o.Hurry, apart: cmp.Or(o.Apart, math.MaxUint64),
	}
	c.watch.init()
	return c
}

// awaitServing holds a request back that comes before the daemon is ready for
// it, and reports whether it is to be answered.
func (c *conn) awaitServing() bool {
	select {
	case <-c.serving:
		return true
	default:
	}
	<-c.serving
	return !c.ended.Load()
}

// giveUp ends a connection that is not going to be served.
func (c *conn) giveUp() {
	c.ended.Store(true)
	close(c.serving)
	for _, k := range c.keepers {
		k.poke()
	}
}

// readInit reads the kernel's first request.
func (c *conn) readInit() (*fuse.InitIn, []byte, error) {
	buf := make([]byte, minRead)
	n, err := unix.Read(c.fd, buf)
	for err == unix.EINTR || err == unix.EAGAIN {
		n, err = unix.Read(c.fd, buf)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("read /dev/fuse: %w", err)
	}
	in := (*fuse.InitIn)(unsafe.Pointer(&buf[0]))
	if n < inHeaderSize+16 || in.Opcode != OpInit {
		return nil, nil, errors.New("the kernel's first request is not FUSE_INIT")
	}
	return in, buf[:n], nil
}

// answerInit agrees on the protocol.
func (c *conn) answerInit(req []byte) error {
	out := make([]byte, 4096)
	n, status := c.proto.HandleRequest([][]byte{req}, [][]byte{out})
	if status != fuse.OK {
		return fmt.Errorf("FUSE_INIT: %v", status)
	}
	if _, err := unix.Write(c.fd, out[:n]); err != nil {
		return fmt.Errorf("FUSE_INIT: write /dev/fuse: %w", err)
	}
	if h := (*fuse.OutHeader)(unsafe.Pointer(&out[0])); h.Status != 0 {
		return fmt.Errorf("FUSE_INIT: %v", syscall.Errno(-h.Status))
	}
	c.noteInit(req, (*fuse.InitOut)(unsafe.Pointer(&out[outHeaderSize])).Flags64())
	return nil
}

// noteInit keeps what was agreed on.
func (c *conn) noteInit(req []byte, agreed uint64) {
	const initExt = 1 << 30 // FUSE_INIT_EXT: there is a second word of flags
	c.init, c.agreed = slices.Clone(req), agreed
	in := (*fuse.InitIn)(unsafe.Pointer(&c.init[0]))
	in.Flags &= uint32(agreed) | initExt
	in.Flags2 &= uint32(agreed >> 32)
}

// end is called when the kernel has let go: what is under way is cancelled.
func (c *conn) end() {
	if c.ended.Swap(true) {
		return
	}
	c.watch.stop()
	for _, k := range c.keepers {
		k.poke()
	}
	for _, unique := range c.inflight.all() {
		c.interrupt(unique)
	}
}

// close gives the descriptor back when all threads are gone.
func (c *conn) close() {
	c.fdMu.Lock()
	defer c.fdMu.Unlock()
	unix.Close(c.fd)
	c.fd = -1
}

// notify sends a message that answers nothing.
func (c *conn) notify(code int32, msg []byte) error {
	c.fdMu.RLock()
	defer c.fdMu.RUnlock()
	_, err := unix.Write(c.fd, notification(code, msg))
	return err
}

// notification is such a message as the kernel reads it.
func notification(code int32, msg []byte) []byte {
	buf := make([]byte, outHeaderSize, outHeaderSize+len(msg))
	*(*fuse.OutHeader)(unsafe.Pointer(&buf[0])) = fuse.OutHeader{Length: uint32(outHeaderSize + len(msg)), Status: code}
	return append(buf, msg...)
}

func (c *conn) InodeNotify(node uint64, off, length int64) fuse.Status {
	m := fuse.NotifyInvalInodeOut{Ino: node, Off: off, Length: length}
	err := c.notify(notifyInvalInode, (*[unsafe.Sizeof(m)]byte)(unsafe.Pointer(&m))[:])
	if c.opts.Debug {
		c.opts.Logger.Printf("notify: inode n%d off %d length %d: %v", node, off, length, err)
	}
	return fuse.ToStatus(err)
}

func (c *conn) NotifyStore(node uint64, off int64, content []byte) {
	m := fuse.NotifyStoreOut{Nodeid: node, Offset: uint64(off), Size: uint32(len(content))}
	// ENOENT: the kernel has let it go meanwhile.
	_ = c.notify(notifyStore, append((*[unsafe.Sizeof(m)]byte)(unsafe.Pointer(&m))[:], content...))
}

func (c *conn) ForgetNames() { _ = c.notify(notifyIncEpoch, nil) } // EINVAL: see TellsNames

func (c *conn) TellsNames() bool {
	return tellsNames((*fuse.InitIn)(unsafe.Pointer(&c.init[0])).Minor)
}

// tellsNames reports whether a kernel with that minor version of the protocol does.
func tellsNames(minor uint32) bool { return minor >= 44 }

func (c *conn) MapsIDs() bool { return mapsIDs(c.opts, (*fuse.InitIn)(unsafe.Pointer(&c.init[0]))) }

// mapsIDs is what comes of what is wanted and what the kernel offers.
func mapsIDs(o *fuse.MountOptions, init *fuse.InitIn) bool {
	return o.IDMappedMount && init.Flags64()&fuse.CAP_ALLOW_IDMAP != 0
}

// userOf returns who has sent a request, procid.NoID if that is not known.
func (c *conn) userOf(h *fuse.InHeader) uint32 {
	if !c.MapsIDs() {
		return h.Uid
	}
	uid, _ := procid.FSIDs(h.Pid)
	return uid
}

func (c *conn) Stopping() bool { return c.stopping.Load() || c.ended.Load() }

const (
	devBackingOpen  = 0x4010e501
	devBackingClose = 0x4004e502
)

func (c *conn) RegisterBackingFd(m *fuse.BackingMap) (int32, syscall.Errno) {
	c.fdMu.RLock()
	defer c.fdMu.RUnlock()
	id, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(c.fd), devBackingOpen, uintptr(unsafe.Pointer(m)))
	return int32(id), errno
}

func (c *conn) UnregisterBackingFd(id int32) syscall.Errno {
	c.fdMu.RLock()
	defer c.fdMu.RUnlock()
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(c.fd), devBackingClose, uintptr(unsafe.Pointer(&id)))
	return errno
}
