package fs

import (
	"time"

	"golang.org/x/sys/unix"
)

// ext4 (auto_da_alloc), XFS and btrfs write a file out at the first close(2) after it was
// truncated, whose ever that is: so a crash of the machine leaves no empty file where
// programs replace the content without fsync(2). But close(2) does not wait for its RELEASE:
// that of who had the file open before may come only after the truncation, when there is
// nothing yet to be written out, and the one that follows the new content would do nothing.
// So such a descriptor is closed after the next other one, as it would have been before.
// But there may be any number of them: a mapping, or a descriptor that is sent to somebody,
// keeps the RELEASE back for as long as one likes.

// lateMost is how many wait so for the next close(2) of a file.
const lateMost = 64

// A lateFD is a descriptor whose handle is gone.
type lateFD struct {
	fd     int
	writes bool
}

// replacedLocked takes note that the content is about to be cut off through a handle.
func (f *file) replacedLocked() { f.replaced = time.Now().UnixNano() }

// comesLateLocked reports whether the close(2) of h was before the content was cut off.
func (f *file) comesLateLocked(h *handle) bool {
	closed := h.flushed.Load()
	return closed != 0 && closed < f.replaced
}

// mayWaitLocked reports whether there is room for one more that came late.
func (fs *FS) mayWaitLocked(f *file) bool { return len(f.late) < lateMost && fs.spare.plenty() }

// replacesLocked reports whether the close(2) of h may be that which follows the new content:
// also without a descriptor of its own, as with O_RDONLY and O_TRUNC.
func (f *file) replacesLocked(h *handle) bool {
	return h.flags&(unix.O_ACCMODE|unix.O_TRUNC) != unix.O_RDONLY && !f.comesLateLocked(h)
}

// closeLocked closes a descriptor that a handle had of its own.
func (fs *FS) closeLocked(f *file, d lateFD) {
	unix.Close(d.fd)
	fs.spare.give()
	if d.writes {
		f.writing--
	}
}

// closeLateLocked closes what came late: the new content was written out.
func (fs *FS) closeLateLocked(f *file) {
	for _, d := range f.late {
		fs.closeLocked(f, d)
	}
	f.late, f.replaced = nil, 0
}
