package fs

import (
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// A plainMark remembers that a file has no extended attributes, and so no ACL:
// most have none, and are asked for some all the time. It is forgotten when
// they are changed, and when the kernel forgets, too (see validity).
//
// The low half says in which period that was found, 0 for not; the high half
// grows with each change, so that what was found before it is not noted after.
// Its highest bits are other marks: see passed and paged.
type plainMark struct{ bits atomic.Uint32 }

// load returns the mark for isPlain and setPlain.
func (m *plainMark) load() uint32 { return m.bits.Load() }

// isPlain reports whether a loaded mark says that there are none.
func (fs *FS) isPlain(mark uint32) bool {
	return mark&0xffff != 0 && mark&0xffff == fs.period()
}

// setPlain notes that there are none, unless they were changed since mark was
// loaded.
func (fs *FS) setPlain(m *plainMark, mark uint32) {
	m.bits.CompareAndSwap(mark, mark&^0xffff|fs.period())
}

// changed forgets.
func (m *plainMark) changed() {
	for {
		old := m.bits.Load()
		if m.bits.CompareAndSwap(old, old&otherMarks|(old&^0xffff+1<<16)&^otherMarks) {
			return
		}
	}
}

const (
	passedBit  = 1 << 31
	pagedBit   = 1 << 30
	otherMarks = passedBit | pagedBit
)

// passed reports whether the pages that the kernel keeps of the file may not
// show what the backing has: it was written past them.
func (m *plainMark) passed() bool { return m.bits.Load()&passedBit != 0 }

func (m *plainMark) setPassed(passed bool) { m.set(passedBit, passed) }

// paged reports whether the kernel may keep pages of the file: it has asked to read,
// or written by its page cache, since they were dropped.
func (m *plainMark) paged() bool { return m.bits.Load()&pagedBit != 0 }

func (m *plainMark) setPaged(paged bool) { m.set(pagedBit, paged) }

func (m *plainMark) set(bit uint32, on bool) {
	switch set := m.bits.Load()&bit != 0; {
	case on && !set:
		m.bits.Or(bit)
	case !on && set:
		m.bits.And(^bit)
	}
}

// period numbers the spans since the start in which the kernel keeps what it was
// told, from 1 to 0xffff and again.
func (fs *FS) period() uint32 {
	return uint32(time.Since(fs.started)/fs.nodes.validFor)%0xffff + 1
}

// hasXattrs reports whether the file at p may have extended attributes.
func (fs *FS) hasXattrs(n *node, p place) bool {
	mark := n.plain.load()
	if fs.isPlain(mark) {
		return false
	}
	if size, err := fs.back.listxattr(p, nil); err != nil || size > 0 {
		return true
	}
	fs.setPlain(&n.plain, mark)
	return false
}

// tellsPlain reports whether listxattr(2) would show the attribute if it were
// there. Some file systems have others that it never shows.
func tellsPlain(attr string) bool {
	return strings.HasPrefix(attr, "security.") || strings.HasPrefix(attr, "system.posix_acl_")
}

// hasDefaultACL reports whether what is made in the directory gets its ACL.
func (fs *FS) hasDefaultACL(n *node, dir int) (bool, error) {
	if !fs.hasXattrs(n, place{fd: dir, name: "."}) {
		return false, nil
	}
	size, err := fs.back.getxattr(place{fd: dir, name: "."}, "system.posix_acl_default", nil)
	if err == unix.ENODATA || err == unix.EOPNOTSUPP {
		return false, nil
	}
	return size > 0, err
}
