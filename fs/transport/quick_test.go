package transport

import (
	"bytes"
	"fmt"
	"log"
	"math/rand/v2"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// A recorder is a file system that notes what it is asked for.
type recorder struct {
	fuse.RawFileSystem
	called string
	status fuse.Status
	file   int // that is read
	wait   func(cancel <-chan struct{}, h *fuse.InHeader) fuse.Status
}

func (r *recorder) note(op string, in any, out []byte, names ...string) fuse.Status {
	r.called = fmt.Sprintf("%s %+v %q", op, in, names)
	for i := range out {
		if out[i] != 0 {
			panic("the answer does not begin empty")
		}
		out[i] = byte(i + 1)
	}
	return r.status
}

func (r *recorder) Lookup(_ <-chan struct{}, h *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	return r.note("lookup", *h, structBytes(out), name)
}

func (r *recorder) GetAttr(_ <-chan struct{}, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	return r.note("getattr", *in, structBytes(out))
}

func (r *recorder) SetAttr(_ <-chan struct{}, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	return r.note("setattr", *in, structBytes(out))
}

func (r *recorder) Open(_ <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	return r.note("open", *in, structBytes(out))
}

func (r *recorder) OpenDir(_ <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	return r.note("opendir", *in, structBytes(out))
}

func (r *recorder) Create(_ <-chan struct{}, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	return r.note("create", *in, structBytes(out), name)
}

func (r *recorder) Mkdir(cancel <-chan struct{}, in *fuse.MkdirIn, name string, out *fuse.EntryOut) fuse.Status {
	if r.wait != nil {
		return r.wait(cancel, &in.InHeader)
	}
	return r.note("mkdir", *in, structBytes(out), name)
}

func (r *recorder) Mknod(_ <-chan struct{}, in *fuse.MknodIn, name string, out *fuse.EntryOut) fuse.Status {
	return r.note("mknod", *in, structBytes(out), name)
}

func (r *recorder) Symlink(_ <-chan struct{}, h *fuse.InHeader, target, name string, out *fuse.EntryOut) fuse.Status {
	return r.note("symlink", *h, structBytes(out), target, name)
}

func (r *recorder) Link(_ <-chan struct{}, in *fuse.LinkIn, name string, out *fuse.EntryOut) fuse.Status {
	return r.note("link", *in, structBytes(out), name)
}

func (r *recorder) Unlink(_ <-chan struct{}, h *fuse.InHeader, name string) fuse.Status {
	return r.note("unlink", *h, nil, name)
}

func (r *recorder) Rmdir(_ <-chan struct{}, h *fuse.InHeader, name string) fuse.Status {
	return r.note("rmdir", *h, nil, name)
}

func (r *recorder) Rename(_ <-chan struct{}, in *fuse.RenameIn, from, to string) fuse.Status {
	in.Padding = 0
	return r.note("rename", *in, nil, from, to)
}

func (r *recorder) Flush(_ <-chan struct{}, in *fuse.FlushIn) fuse.Status {
	return r.note("flush", *in, nil)
}

func (r *recorder) SetLk(_ <-chan struct{}, in *fuse.LkIn) fuse.Status {
	return r.note("setlk", *in, nil)
}

func (r *recorder) SetLkw(_ <-chan struct{}, in *fuse.LkIn) fuse.Status {
	return r.note("setlkw", *in, nil)
}

// TryLockw does without waiting for a range that is even.
func (r *recorder) TryLockw(in *fuse.LkIn) bool {
	return in.Lk.Start%2 == 0 && r.status == fuse.OK && r.SetLkw(nil, in) == fuse.OK
}

func (r *recorder) Release(_ <-chan struct{}, in *fuse.ReleaseIn) {
	r.status = fuse.OK
	r.note("release", *in, nil)
}

func (r *recorder) ReleaseDir(in *fuse.ReleaseIn) {
	r.status = fuse.OK
	r.note("releasedir", *in, nil)
}

func (r *recorder) StatFs(_ <-chan struct{}, h *fuse.InHeader, out *fuse.StatfsOut) fuse.Status {
	return r.note("statfs", *h, structBytes(out))
}

// Read answers with what is in the room that it was given, or elsewhere, or in a file.
func (r *recorder) Read(_ <-chan struct{}, in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	status := r.note(fmt.Sprint("read ", len(buf)), *in, nil)
	n := int(in.Offset % uint64(len(buf)+1))
	switch in.Offset % 4 {
	case 0:
		if status != fuse.OK {
			return nil, status
		}
	case 1:
		return fuse.ReadResultFd(uintptr(r.file), int64(in.Offset%100), len(buf)), status
	case 2:
		buf = make([]byte, n)
	}
	for i := range buf[:n] {
		buf[i] = byte(in.Offset) + byte(i)
	}
	return fuse.ReadResultData(buf[:n]), status
}

func (r *recorder) ReadDir(_ <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	for i := range in.Offset % 64 {
		out.AddDirEntry(fuse.DirEntry{Name: fmt.Sprint("name ", i*i*i), Ino: i, Mode: uint32(i), Off: in.Offset + i})
	}
	return r.note(fmt.Sprint("readdir ", out.Offset), *in, nil)
}

func (r *recorder) ReadDirPlus(_ <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	for i := range in.Offset % 64 {
		if e := out.AddDirLookupEntry(fuse.DirEntry{Name: fmt.Sprint("name ", i*i*i), Ino: i, Off: in.Offset + i}); e != nil {
			e.Attr.Size = i
		}
	}
	return r.note(fmt.Sprint("readdirplus ", out.Offset), *in, nil)
}

func (r *recorder) GetXAttr(_ <-chan struct{}, h *fuse.InHeader, attr string, dest []byte) (uint32, fuse.Status) {
	return r.xattr(r.note(fmt.Sprint("getxattr ", len(dest)), *h, nil, attr), h, dest)
}

func (r *recorder) ListXAttr(_ <-chan struct{}, h *fuse.InHeader, dest []byte) (uint32, fuse.Status) {
	return r.xattr(r.note(fmt.Sprint("listxattr ", len(dest)), *h, nil), h, dest)
}

// xattr has an attribute of some length, which may not fit.
func (r *recorder) xattr(status fuse.Status, h *fuse.InHeader, dest []byte) (uint32, fuse.Status) {
	n := h.Unique % 200
	if status != fuse.OK {
		return uint32(n), status
	}
	if int(n) > len(dest) {
		return uint32(n), fuse.ERANGE
	}
	for i := range dest[:n] {
		dest[i] = byte(h.Unique) + byte(i)
	}
	return uint32(n), fuse.OK
}

func newQuick(t *testing.T, r *recorder) *conn {
	r.RawFileSystem = fuse.NewDefaultRawFileSystem()
	o := &fuse.MountOptions{Logger: log.New(testWriter{t}, "", 0)}
	c := newConn(-1, o, new(Options))
	c.proto, c.served = fuse.NewProtocolServer(r, o), r
	return c
}

type testWriter struct{ t *testing.T }

func (w testWriter) Write(b []byte) (int, error) {
	w.t.Logf("%.200s", b)
	return len(b), nil
}

// quickOps are what is carried out without go-fuse, and how many bytes and names
// follow the header as fuse.h of the kernel has it.
var quickOps = map[uint32]struct{ fixed, names int }{
	OpLookup:     {0, 1},
	OpGetAttr:    {16, 0},
	OpSetAttr:    {88, 0},
	OpSymlink:    {0, 2},
	OpMknod:      {16, 1},
	OpMkdir:      {8, 1},
	OpUnlink:     {0, 1},
	OpRmdir:      {0, 1},
	OpRename:     {8, 2},
	OpLink:       {8, 1},
	OpOpen:       {8, 0},
	OpRelease:    {24, 0},
	OpFlush:      {24, 0},
	OpOpenDir:    {8, 0},
	OpReleaseDir: {24, 0},
	OpCreate:     {16, 1},
	OpRename2:    {16, 2},

	OpStatfs:      {0, 0},
	OpRead:        {40, 0},
	OpReadDir:     {40, 0},
	OpReadDirPlus: {40, 0},
	OpGetXattr:    {8, 1},
	OpListXattr:   {8, 0},
	OpSetlk:       {48, 0},
	OpSetlkw:      {48, 0},
}

// made returns a request and how much of it follows the names, as an extension.
func made(op uint32, rnd *rand.Rand, ext bool) (req []byte, fixed int) {
	q := quickOps[op]
	req = make([]byte, inHeaderSize+q.fixed)
	for i := range req {
		req[i] = byte(rnd.Uint32())
	}
	for range q.names {
		for range 1 + rnd.IntN(254) {
			req = append(req, byte(1+rnd.IntN(255)))
		}
		req = append(req, 0)
	}
	switch op { // there is room for the answer, none, or not enough
	case OpRead, OpReadDir, OpReadDirPlus:
		(*fuse.ReadIn)(unsafe.Pointer(&req[0])).Size = uint32(rnd.IntN(4096 - outHeaderSize))
	case OpGetXattr, OpListXattr:
		(*fuse.GetXAttrIn)(unsafe.Pointer(&req[0])).Size = uint32(rnd.IntN(3) * rnd.IntN(200))
	}
	h := headerAt(req)
	h.Opcode, h.TotalExtlen = op, 0
	h.NodeId = h.NodeId>>1 | 1 // not what go-fuse keeps for itself
	if ext {                   // supplementary groups: one
		e := []uint32{16, 32, 1, 1000}
		req = append(req, unsafe.Slice((*byte)(unsafe.Pointer(&e[0])), 16)...)
		h = headerAt(req)
		h.TotalExtlen = 2
	}
	h.Length = uint32(len(req))
	return req, q.fixed
}

// do has a request carried out on a thread of its own kind.
func (c *conn) do(at *slot, in, out [][]byte) []byte {
	h := headerOf(in)
	switch {
	case c.lockAtOnce(at, in, out) > 0:
	case c.takes(h):
		c.atOnce(at, in, out)
	default:
		c.handle(at, h.Unique, in, out)
	}
	n := (*fuse.OutHeader)(unsafe.Pointer(&out[0][0])).Length
	return bytes.Join(out, nil)[:n]
}

// What is carried out without go-fuse asks the file system for the same, and is
// answered by the same bytes, however it was read, and whatever came before.
func TestQuickAsGoFuse(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	file, err := os.Create(t.TempDir() + "/file")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	file.WriteString(strings.Repeat("what a file has ", 20))
	for _, minor := range []uint32{12, 23, 28, 31, 45} {
		r := &recorder{file: int(file.Fd())}
		c := newQuick(t, r)
		init := fuse.InitIn{Major: 7, Minor: minor, Flags: ^uint32(0), Flags2: ^uint32(0)}
		init.Opcode, init.Length = OpInit, uint32(unsafe.Sizeof(init))
		if _, status := c.proto.HandleRequest([][]byte{structBytes(&init)}, [][]byte{make([]byte, 4096)}); status != fuse.OK {
			t.Fatal(status)
		}
		at := c.inflight.add()
		c.inflight.forLong(at)
		var ops []uint32
		for op := range quickOps {
			for range 40 {
				ops = append(ops, op)
			}
		}
		rnd.Shuffle(len(ops), func(i, j int) { ops[i], ops[j] = ops[j], ops[i] })
		for i, op := range ops {
			status := fuse.Status(i % 3 * int(unix.EBUSY))
			req, fixed := made(op, rnd, i%5 == 0)
			ask := func(f func() []byte) (string, []byte) {
				r.called, r.status = "", status
				answer := f()
				return r.called, answer
			}
			wantCall, want := ask(func() []byte {
				out := make([]byte, 4096)
				n, _ := c.proto.HandleRequest([][]byte{bytes.Clone(req)}, [][]byte{out})
				return out[:n]
			})
			for way, f := range map[string]func() []byte{
				"one part": func() []byte {
					return c.do(at, [][]byte{bytes.Clone(req)}, [][]byte{make([]byte, 4096)})
				},
				"a place": func() []byte {
					p := layOut(make([]byte, page+minRead))
					copy(p.header.inOut[:], req[:inHeaderSize])
					copy(p.header.opIn[:], req[inHeaderSize:][:fixed])
					p.header.entry.payload = uint32(copy(p.payload, req[inHeaderSize+fixed:]))
					in, out := p.split()
					answer := c.do(at, in, [][]byte{out[0], out[1]})
					return answer
				},
			} {
				call, got := ask(f)
				if call != wantCall || !bytes.Equal(got, want) {
					t.Fatalf("minor %d, opcode %d, %s:\n%s\n%x, want\n%s\n%x", minor, op, way, call, got, wantCall, want)
				}
			}
		}
	}
}

// A request that ends too early asks for nothing.
func TestQuickShort(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	r := &recorder{}
	c := newQuick(t, r)
	at := c.inflight.add()
	c.inflight.forLong(at)
	for op := range quickOps {
		req, _ := made(op, rnd, false)
		for n := inHeaderSize; n < len(req); n++ {
			r.called = ""
			answer := c.do(at, [][]byte{bytes.Clone(req[:n])}, [][]byte{make([]byte, 4096)})
			h := (*fuse.OutHeader)(unsafe.Pointer(&answer[0]))
			if r.called != "" || h.Status != -int32(unix.EIO) || len(answer) != outHeaderSize {
				t.Fatalf("opcode %d, %d of %d bytes: %q, %+v", op, n, len(req), r.called, *h)
			}
		}
	}
}

func mkdirRequest(unique uint64) []byte {
	req := make([]byte, inHeaderSize+8, 64)
	h := headerAt(req)
	h.Opcode, h.Unique, h.NodeId = OpMkdir, unique, 1
	return append(req, "x\x00"...)
}

// A request that makes the file system panic fails, and the next one does not.
func TestQuickPanic(t *testing.T) {
	bad := true
	r := &recorder{wait: func(<-chan struct{}, *fuse.InHeader) fuse.Status {
		if bad {
			panic("bad")
		}
		return fuse.OK
	}}
	c := newQuick(t, r)
	at := c.inflight.add()
	c.inflight.forLong(at)
	for _, bad = range []bool{true, false, true, false} {
		answer := c.do(at, [][]byte{mkdirRequest(7)}, [][]byte{make([]byte, 4096)})
		h := (*fuse.OutHeader)(unsafe.Pointer(&answer[0]))
		want := fuse.OutHeader{Length: uint32(outHeaderSize), Status: -int32(unix.EIO), Unique: 7}
		if !bad {
			want.Length, want.Status = uint32(outHeaderSize)+uint32(unsafe.Sizeof(fuse.EntryOut{})), 0
		}
		if *h != want {
			t.Errorf("panics %v: %+v, want %+v", bad, *h, want)
		}
		if at.own || at.unique.Load() != 0 || c.inflight.interrupt(7) {
			t.Errorf("panics %v: the request is under way yet", bad)
		}
	}
}

// Whoever is interrupted at whatever moment: that request is cancelled, and no
// other; and it is known of each whether the kernel said so.
func TestQuickInterrupt(t *testing.T) {
	const threads, turns = 8, 100
	type state struct {
		signalled, cancelled atomic.Bool
	}
	all := make([]state, threads*turns+1)
	r := &recorder{wait: func(cancel <-chan struct{}, h *fuse.InHeader) fuse.Status {
		most := time.After(20 * time.Second)
		if h.Unique%3 != 0 { // it waits for nobody
			most = time.After(time.Duration(h.Unique%5) * time.Microsecond)
		}
		select {
		case <-cancel:
			all[h.Unique].cancelled.Store(true)
			return fuse.EINTR
		case <-most:
			return fuse.OK
		}
	}}
	c := newQuick(t, r)
	var next atomic.Uint64
	var wg, others sync.WaitGroup
	over := make(chan struct{})
	for range threads {
		at := c.inflight.add()
		c.inflight.forLong(at)
		wg.Go(func() {
			for {
				unique := next.Add(1)
				if unique > threads*turns {
					return
				}
				out := make([]byte, 4096)
				in := [][]byte{mkdirRequest(unique)}
				c.handle(at, unique, in, [][]byte{out})
				h := (*fuse.OutHeader)(unsafe.Pointer(&out[0]))
				s := &all[unique]
				// The odd ones are interrupted by the kernel, the others by Stop.
				byKernel := unique%2 == 1
				switch {
				case h.Unique != unique:
					t.Errorf("request %d: the answer is to %d", unique, h.Unique)
				case s.cancelled.Load() != (h.Status == -int32(unix.EINTR)):
					t.Errorf("request %d: cancelled %v, status %d", unique, s.cancelled.Load(), h.Status)
				case s.cancelled.Load() && !s.signalled.Load():
					t.Errorf("request %d: cancelled, and was not interrupted", unique)
				case unique%3 == 0 && !s.cancelled.Load():
					t.Errorf("request %d: was not cancelled", unique)
				case h.Status != 0 && (at.told.Load() == unique) != byKernel:
					t.Errorf("request %d: its caller has a signal %v, want %v", unique, !byKernel, byKernel)
				}
			}
		})
	}
	for i := range 2 {
		others.Go(func() {
			for unique := uint64(1); unique <= threads*turns; {
				if unique > next.Load()+2 { // a little early, too
					select {
					case <-over:
						return
					default:
						continue
					}
				}
				s := &all[unique]
				switch {
				case i == 0 && unique%2 == 1:
					s.signalled.Store(true)
					c.interrupt(unique)
					// One that came too early on a slow machine is forgotten.
					for again := time.Now(); unique%3 == 0 && !s.cancelled.Load(); runtime.Gosched() {
						if time.Since(again) > strayTime {
							c.interrupt(unique)
							again = time.Now()
						}
					}
				case i == 1 && unique%2 == 0 && unique%3 == 0:
					s.signalled.Store(true)
					for c.inflight.has(unique) || !s.cancelled.Load() {
						c.tryInterrupt(unique)
					}
				}
				unique++
			}
		})
	}
	wg.Wait()
	close(over)
	others.Wait()
	c.threads.Wait()
}
