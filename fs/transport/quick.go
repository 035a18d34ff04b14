package transport

import (
	"bytes"
	"runtime/debug"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// The kernel asks for names and attributes more than for all else together, and
// before most changes. These requests, and a few short ones beside, wait for nobody,
// but to know their caller, which looks for a signal itself (fs/see.go). So
// there is nothing to interrupt, and they are carried out without
// what go-fuse does for those that may: a channel, and a place in a list of what
// is under way.

// A quick is what a thread needs for that.
type quick struct {
	in    fuse.SetAttrIn // the largest; a header is where each begins
	entry fuse.EntryOut
	attr  fuse.AttrOut
}

// takes reports whether a request is one of them. With Debug set go-fuse shows
// each.
func (c *conn) takes(h *fuse.InHeader) bool {
	switch h.Opcode {
	case opLookup, opGetAttr, opSetAttr, opUnlink, opRmdir:
		return h.TotalExtlen == 0 && !c.opts.Debug
	}
	return false
}

// named reports whether all that follows the header is a name.
func named(op uint32) bool { return op != opGetAttr && op != opSetAttr }

// carryOut returns the answer and what follows its header in the kernel's
// buffer. args is what follows the request's.
func (c *conn) carryOut(q *quick, h *fuse.InHeader, args, rest []byte) fuse.OutHeader {
	q.in.InHeader = *h
	status, data := c.raw(q, args)
	if status != fuse.OK {
		data = nil
	}
	n := copy(rest, data)
	return fuse.OutHeader{Length: uint32(outHeaderSize + n), Status: -int32(status), Unique: q.in.Unique}
}

func (c *conn) raw(q *quick, args []byte) (status fuse.Status, data []byte) {
	defer func() {
		if r := recover(); r != nil {
			c.opts.Logger.Printf("panic: %v\n%s", r, debug.Stack())
			status = fuse.EIO
		}
	}()
	h := &q.in.InHeader
	if named(h.Opcode) {
		name, _, ended := bytes.Cut(args, []byte{0})
		switch {
		case !ended:
			return fuse.EIO, nil
		case h.Opcode == opUnlink:
			return c.served.Unlink(nil, h, string(name)), nil
		case h.Opcode == opRmdir:
			return c.served.Rmdir(nil, h, string(name)), nil
		}
		q.entry = fuse.EntryOut{}
		return c.served.Lookup(nil, h, string(name), &q.entry), structBytes(&q.entry)
	}
	q.attr = fuse.AttrOut{}
	get := (*fuse.GetAttrIn)(unsafe.Pointer(&q.in))
	fixed := structBytes(&q.in)
	if h.Opcode == opGetAttr {
		fixed = structBytes(get)
	}
	if copy(fixed[inHeaderSize:], args) < len(fixed)-inHeaderSize {
		return fuse.EIO, nil
	}
	if h.Opcode == opSetAttr {
		return c.served.SetAttr(nil, &q.in, &q.attr), structBytes(&q.attr)
	}
	return c.served.GetAttr(nil, get, &q.attr), structBytes(&q.attr)
}

func structBytes[T any](p *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(p)), unsafe.Sizeof(*p))
}
