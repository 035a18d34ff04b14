package transport

import (
	"bytes"
	"runtime/debug"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// Nearly all requests about names, attributes and open files are carried out
// without go-fuse: it makes an object and a channel for each, notes it in a list
// that all threads share, and leaves much for the collector.

// A quick is what a thread needs for that.
type quick struct {
	in     fuse.SetAttrIn // the largest; a header is where each begins
	entry  fuse.EntryOut
	attr   fuse.AttrOut
	open   fuse.OpenOut
	made   fuse.CreateOut
	size   fuse.GetXAttrOut
	statfs fuse.StatfsOut
	room   [1][]byte // for what is read
}

// takes reports whether a request is one that waits for nobody, but to know its
// caller, which looks for a signal itself (fs/see.go): there is nothing to
// interrupt. With Debug set go-fuse shows each.
func (c *conn) takes(h *fuse.InHeader) bool {
	switch h.Opcode {
	case OpLookup, OpGetAttr:
		return c.mayTake(h)
	}
	return false
}

func (c *conn) mayTake(h *fuse.InHeader) bool { return h.TotalExtlen == 0 && !c.opts.Debug }

// takesOwn reports whether a request is one that may be interrupted, and is
// carried out without go-fuse.
func (c *conn) takesOwn(h *fuse.InHeader) bool {
	switch h.Opcode {
	case OpSetAttr, OpSymlink, OpMknod, OpMkdir, OpUnlink, OpRmdir, OpRename, OpLink, OpOpen, OpRelease, OpFlush, OpOpenDir,
		OpReleaseDir, OpCreate, OpRename2, OpRead, OpReadDir, OpReadDirPlus, OpStatfs, OpGetXattr, OpListXattr, OpSetlk, OpSetlkw:
		return c.mayTake(h)
	}
	return false
}

// fixedSize is how long that is what precedes the names.
func fixedSize(op uint32) int {
	switch op {
	case OpGetAttr:
		return int(unsafe.Sizeof(fuse.GetAttrIn{})) - inHeaderSize
	case OpSetAttr:
		return int(unsafe.Sizeof(fuse.SetAttrIn{})) - inHeaderSize
	case OpOpen, OpOpenDir:
		return int(unsafe.Sizeof(fuse.OpenIn{})) - inHeaderSize
	case OpCreate:
		return int(unsafe.Sizeof(fuse.CreateIn{})) - inHeaderSize
	case OpMkdir:
		return int(unsafe.Sizeof(fuse.MkdirIn{})) - inHeaderSize
	case OpRename2:
		return int(unsafe.Sizeof(fuse.RenameIn{})) - inHeaderSize
	case OpRename:
		return 8 // the directory alone
	case OpMknod:
		return int(unsafe.Sizeof(fuse.MknodIn{})) - inHeaderSize
	case OpLink:
		return int(unsafe.Sizeof(fuse.LinkIn{})) - inHeaderSize
	case OpFlush:
		return int(unsafe.Sizeof(fuse.FlushIn{})) - inHeaderSize
	case OpRelease, OpReleaseDir:
		return int(unsafe.Sizeof(fuse.ReleaseIn{})) - inHeaderSize
	case OpRead, OpReadDir, OpReadDirPlus:
		return int(unsafe.Sizeof(fuse.ReadIn{})) - inHeaderSize
	case OpGetXattr, OpListXattr:
		return int(unsafe.Sizeof(fuse.GetXAttrIn{})) - inHeaderSize
	case OpSetlk, OpSetlkw:
		return int(unsafe.Sizeof(fuse.LkIn{})) - inHeaderSize
	}
	return 0
}

// load takes the request whose parts are in, but for its names, and returns those. It
// reports false if the request ends too early.
func (q *quick) load(in [][]byte) (names []byte, ok bool) {
	q.in.InHeader = *headerOf(in)
	size := fixedSize(q.in.Opcode)
	var fixed []byte
	if len(in) == 3 {
		fixed, names = in[1], in[2]
	} else {
		rest := in[0][inHeaderSize:]
		n := min(size, len(rest))
		fixed, names = rest[:n], rest[n:]
	}
	return names, copy(structBytes(&q.in)[inHeaderSize:][:size], fixed) == size
}

// atOnce carries out a request that waits for nobody, and returns how long the
// answer is in out.
func (c *conn) atOnce(at *slot, in, out [][]byte) int {
	at.tally.add(headerOf(in))
	return c.carryOut(at.quick, nil, in, out)
}

// carryOut returns how long the answer is in out, whose header may be in the place
// of the request's. in has the request's parts.
func (c *conn) carryOut(q *quick, cancel <-chan struct{}, in, out [][]byte) int {
	rest := out[0][outHeaderSize:]
	if len(out) == 2 {
		rest = out[1]
	}
	status, data := c.raw(q, cancel, in, rest)
	if status != fuse.OK {
		data = nil
	}
	n := len(data)
	if n > 0 && &data[0] != &rest[0] {
		n = copy(rest, data)
	}
	return reply(out[0], q.in.Unique, status, n)
}

// headerOf returns the header of a request whose parts are in.
func headerOf(in [][]byte) *fuse.InHeader { return headerAt(in[0]) }

// headerAt returns the header that a request begins with.
func headerAt(req []byte) *fuse.InHeader { return (*fuse.InHeader)(unsafe.Pointer(&req[0])) }

// raw is ask, or EIO if that panics.
func (c *conn) raw(q *quick, cancel <-chan struct{}, in [][]byte, out []byte) (status fuse.Status, data []byte) {
	defer func() {
		if r := recover(); r != nil {
			c.opts.Logger.Printf("panic: %v\n%s", r, debug.Stack())
			status = fuse.EIO
		}
	}()
	return c.ask(q, cancel, in, out)
}

// ask has the file system answer, which may be in out: that is where the names of the
// request are, too. It has many returns, and so defers nothing: that costs more then.
func (c *conn) ask(q *quick, cancel <-chan struct{}, in [][]byte, out []byte) (status fuse.Status, data []byte) {
	names, ok := q.load(in)
	if !ok {
		return fuse.EIO, nil
	}
	h, to := &q.in.InHeader, unsafe.Pointer(&q.in)
	switch h.Opcode {
	case OpGetAttr:
		q.attr = fuse.AttrOut{}
		return c.served.GetAttr(cancel, (*fuse.GetAttrIn)(to), &q.attr), structBytes(&q.attr)
	case OpSetAttr:
		q.attr = fuse.AttrOut{}
		return c.served.SetAttr(cancel, &q.in, &q.attr), structBytes(&q.attr)
	case OpOpen:
		q.open = fuse.OpenOut{}
		return c.served.Open(cancel, (*fuse.OpenIn)(to), &q.open), structBytes(&q.open)
	case OpOpenDir:
		q.open = fuse.OpenOut{}
		return c.served.OpenDir(cancel, (*fuse.OpenIn)(to), &q.open), structBytes(&q.open)
	case OpSetlk:
		return c.served.SetLk(cancel, (*fuse.LkIn)(to)), nil
	case OpSetlkw:
		return c.served.SetLkw(cancel, (*fuse.LkIn)(to)), nil
	case OpFlush:
		return c.served.Flush(cancel, (*fuse.FlushIn)(to)), nil
	case OpRelease:
		c.served.Release(cancel, (*fuse.ReleaseIn)(to))
		return fuse.OK, nil
	case OpReleaseDir:
		c.served.ReleaseDir((*fuse.ReleaseIn)(to))
		return fuse.OK, nil
	case OpStatfs:
		q.statfs = fuse.StatfsOut{}
		return c.served.StatFs(cancel, h, &q.statfs), structBytes(&q.statfs)
	case OpRead, OpReadDir, OpReadDirPlus:
		in := (*fuse.ReadIn)(to)
		if int(in.Size) > len(out) {
			return fuse.EIO, nil
		}
		return c.read(q, cancel, in, out[:in.Size])
	case OpListXattr:
		return c.xattr(q, out, func(dest []byte) (uint32, fuse.Status) { return c.served.ListXAttr(cancel, h, dest) })
	}
	first, names, ended := bytes.Cut(names, []byte{0})
	if !ended {
		return fuse.EIO, nil
	}
	name := string(first)
	switch h.Opcode {
	case OpGetXattr:
		return c.xattr(q, out, func(dest []byte) (uint32, fuse.Status) { return c.served.GetXAttr(cancel, h, name, dest) })
	case OpUnlink:
		return c.served.Unlink(cancel, h, name), nil
	case OpRmdir:
		return c.served.Rmdir(cancel, h, name), nil
	case OpLookup:
		q.entry = fuse.EntryOut{}
		return c.served.Lookup(cancel, h, name, &q.entry), structBytes(&q.entry)
	case OpMkdir:
		q.entry = fuse.EntryOut{}
		return c.served.Mkdir(cancel, (*fuse.MkdirIn)(to), name, &q.entry), structBytes(&q.entry)
	case OpMknod:
		q.entry = fuse.EntryOut{}
		return c.served.Mknod(cancel, (*fuse.MknodIn)(to), name, &q.entry), structBytes(&q.entry)
	case OpLink:
		q.entry = fuse.EntryOut{}
		return c.served.Link(cancel, (*fuse.LinkIn)(to), name, &q.entry), structBytes(&q.entry)
	case OpCreate:
		q.made = fuse.CreateOut{}
		return c.served.Create(cancel, (*fuse.CreateIn)(to), name, &q.made), structBytes(&q.made)
	}
	second, _, ended := bytes.Cut(names, []byte{0})
	if !ended {
		return fuse.EIO, nil
	}
	if h.Opcode == OpSymlink {
		q.entry = fuse.EntryOut{}
		return c.served.Symlink(cancel, h, string(second), name, &q.entry), structBytes(&q.entry)
	}
	rename := (*fuse.RenameIn)(to)
	if h.Opcode == OpRename {
		rename.Flags = 0
	}
	return c.served.Rename(cancel, rename, name, string(second)), nil
}

// A Locker may be what is served: TryLockw reports whether SetLkw would get the lock
// without a wait, and has done so then. Else it leaves no trace.
type Locker interface {
	TryLockw(in *fuse.LkIn) bool
}

// lockAtOnce carries out a request that may wait for a lock, if it need not: a
// goroutine costs more than the lock. It returns how long the answer is in out; 0: it
// has to wait.
func (c *conn) lockAtOnce(at *slot, in, out [][]byte) int {
	h := headerOf(in)
	locker, ok := c.served.(Locker)
	if !ok || h.Opcode != OpSetlkw || at.quick == nil || !c.mayTake(h) {
		return 0
	}
	q := at.quick
	if _, ok := q.load(in); !ok || !locker.TryLockw((*fuse.LkIn)(unsafe.Pointer(&q.in))) {
		return 0
	}
	at.tally.add(h)
	return reply(out[0], q.in.Unique, fuse.OK, 0)
}

// read returns what a file or a directory has, of which there is room for so much.
func (c *conn) read(q *quick, cancel <-chan struct{}, in *fuse.ReadIn, room []byte) (fuse.Status, []byte) {
	switch in.Opcode {
	case OpReadDir:
		list := fuse.NewDirEntryList(room, in.Offset)
		return c.served.ReadDir(cancel, in, list), list.Bytes()
	case OpReadDirPlus:
		list := fuse.NewDirEntryList(room, in.Offset)
		return c.served.ReadDirPlus(cancel, in, list), list.Bytes()
	}
	found, status := c.served.Read(cancel, in, room)
	if found == nil {
		return status, nil
	}
	defer found.Done()
	if status != fuse.OK {
		return status, nil
	}
	if v, ok := found.(interface {
		Readv([][]byte) (int, fuse.Status)
	}); ok {
		q.room[0] = room
		n, status := v.Readv(q.room[:])
		return status, room[:n]
	}
	data, status := found.Bytes(room)
	return status, data
}

// xattr returns what get reads of extended attributes, or how long that is if the
// request has no room.
func (c *conn) xattr(q *quick, out []byte, get func(dest []byte) (uint32, fuse.Status)) (fuse.Status, []byte) {
	room := int((*fuse.GetXAttrIn)(unsafe.Pointer(&q.in)).Size)
	if room > len(out) {
		return fuse.EIO, nil
	}
	n, status := get(out[:room])
	switch {
	case room > 0 && status == fuse.OK:
		return fuse.OK, out[:n]
	case room > 0:
		return status, nil
	case status == fuse.ERANGE:
		status = fuse.OK
	}
	q.size = fuse.GetXAttrOut{Size: n}
	return status, structBytes(&q.size)
}

// request has a request carried out that may be interrupted, with go-fuse unless
// that is not needed, and returns how long the answer is in out.
func (c *conn) request(at *slot, in, out [][]byte) (int, fuse.Status) {
	if !c.takesOwn(headerOf(in)) {
		return c.proto.HandleRequest(in, out)
	}
	if at.quick == nil {
		at.quick = new(quick)
	}
	n := c.carryOut(at.quick, at.begin(), in, out)
	at.end()
	return n, fuse.OK
}

func structBytes[T any](p *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(p)), unsafe.Sizeof(*p))
}
