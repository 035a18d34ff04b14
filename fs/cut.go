package fs

import (
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// An open(2) with O_TRUNC is carried out by one request, and the kernel takes note of it
// only when the process that asked runs again, without keeping writers out until then: it
// sets its own size to 0, at first at once and then once more, whatever has been written
// meanwhile. So for a while its size is too large, and may be too small afterwards, until
// it asks. What it sends by that size is to go where the file really ends:
//
//   - what is written at the end (O_APPEND) would leave a hole before, or write over what
//     was appended before it
//   - what it writes back of a mapping would bring back what was cut off
//
// The kernel drops all pages with the size, so that none shows what was sent elsewhere.

// cutLocked takes note that h was opened, if that cuts the file off, or while another open
// does.
func (f *file) cutLocked(h *handle, cuts bool) {
	if cuts {
		h.cuts = true
		f.cutting++
		f.replacedLocked()
	}
	f.doubtLocked(f.inDoubt || f.cutting > 0 && f.handles() > 1)
}

// doubtLocked takes note of whether the kernel's size may be wrong.
func (f *file) doubtLocked(inDoubt bool) {
	f.inDoubt = inDoubt
	f.unsized.Store(f.cutting > 0 || f.inDoubt)
}

// noticedLocked takes note that the kernel has done what it does in open(2): h is closed.
func (f *file) noticedLocked(h *handle) {
	if h.cuts {
		h.cuts = false
		f.cutting--
	}
	f.doubtLocked(f.inDoubt && f.handles() > 0)
}

// noticed is noticedLocked at a close(2).
func (h *handle) noticed() {
	if !h.isFile() || h.flags&unix.O_TRUNC == 0 {
		return
	}
	f := h.node.lockFile()
	f.noticedLocked(h)
	h.node.unlockFile(f)
}

// writeUncut carries out a WRITE of h through fd, at an offset that the kernel may have from
// before the file was cut off.
func (fs *FS) writeUncut(h *handle, fd int, in *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	back, atEnd := in.WriteFlags&fuse.WRITE_CACHE != 0, in.Flags&unix.O_APPEND != 0
	if !back && !atEnd {
		return writeAt(fd, in, data, false)
	}
	f := h.node.tab.files.get(h.node)
	if f == nil {
		return writeAt(fd, in, data, atEnd && h.beside())
	}
	f.cut.RLock()
	defer f.cut.RUnlock()
	if !back && (!f.unsized.Load() || in.Flags&unix.O_DIRECT != 0) { // the parts of that may come in any order
		// Who has the file open past an earlier daemon may make it longer: of that, the
		// kernel is not told here.
		return writeAt(fd, in, data, h.beside() || f.adopted.Load())
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, statusOf(err)
	}
	if back {
		left := min(max(st.Size-int64(in.Offset), 0), int64(len(data)))
		n, status := writeAt(fd, in, data[:left], false)
		if int64(n) == left {
			n = uint32(len(data)) // the rest was cut off
		}
		return n, status
	}
	n, status := writeAt(fd, in, data, true)
	fs.wroteAtEnd(h, int64(in.Offset) == st.Size)
	return n, status
}

// wroteAtEnd takes note that something was appended, and whether where the kernel said.
func (fs *FS) wroteAtEnd(h *handle, asTold bool) {
	f := h.node.lockFile()
	if asTold && f.cutting == 0 {
		f.doubtLocked(false) // it knows the size
	}
	cached := f.cached > 0
	h.node.unlockFile(f)
	if !asTold && cached {
		fs.kernel.DropPages(h.node.id, 0, 0)
	}
}
