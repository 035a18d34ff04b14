package transport

import (
	"bytes"
	"runtime/debug"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// The kernel asks for names and attributes more than for all else together, and
// before most changes. These two requests wait for nobody, so that there is
// nothing to interrupt, and are carried out without what go-fuse does for those
// that may: a channel, and a place in a list of what is under way.

const (
	opLookup  = 1
	opGetAttr = 3
)

// A quick is what a thread needs for that.
type quick struct {
	get   fuse.GetAttrIn
	entry fuse.EntryOut
	attr  fuse.AttrOut
}

// takes reports whether a request is one of them. With Debug set go-fuse shows
// each.
func (c *conn) takes(h *fuse.InHeader) bool {
	return (h.Opcode == opLookup || h.Opcode == opGetAttr) && h.TotalExtlen == 0 && !c.opts.Debug
}

// carryOut returns the answer and what follows its header in the kernel's
// buffer. args is what follows the request's.
func (c *conn) carryOut(q *quick, h *fuse.InHeader, args, rest []byte) fuse.OutHeader {
	q.get.InHeader = *h
	status, data := c.raw(q, args)
	if status != fuse.OK {
		data = nil
	}
	n := copy(rest, data)
	return fuse.OutHeader{Length: uint32(outHeaderSize + n), Status: -int32(status), Unique: q.get.Unique}
}

func (c *conn) raw(q *quick, args []byte) (status fuse.Status, data []byte) {
	defer func() {
		if r := recover(); r != nil {
			c.opts.Logger.Printf("panic: %v\n%s", r, debug.Stack())
			status = fuse.EIO
		}
	}()
	if q.get.Opcode == opLookup {
		name, _, ended := bytes.Cut(args, []byte{0})
		if !ended {
			return fuse.EIO, nil
		}
		q.entry = fuse.EntryOut{}
		return c.served.Lookup(nil, &q.get.InHeader, string(name), &q.entry), structBytes(&q.entry)
	}
	fixed := structBytes(&q.get)[inHeaderSize:]
	if len(args) < len(fixed) {
		return fuse.EIO, nil
	}
	copy(fixed, args)
	q.attr = fuse.AttrOut{}
	return c.served.GetAttr(nil, &q.get, &q.attr), structBytes(&q.attr)
}

func structBytes[T any](p *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(p)), unsafe.Sizeof(*p))
}
