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
