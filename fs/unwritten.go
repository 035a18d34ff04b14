package fs

import (
	"errors"

	"golang.org/x/sys/unix"
)

// unwritten is what was heard by fsync(2) on the one descriptor that handles of a
// file share: each failure to write it out, once. The kernel tells everybody who
// had the file open by then, once each, and so does the daemon. Protected by the
// file's mutex.
type unwritten struct {
	times uint64 // how often it was heard
	err   error  // the last time
	under map[chan struct{}]*handle
}

// sync calls do, which is fsync(2), for h. A handle that has a descriptor of its own
// hears for itself.
func (fs *FS) sync(h *handle, do func(fd int) error) error {
	if h.fd.get() >= 0 {
		return fs.withFD(h, do)
	}
	f := h.node.lockFile() // it stays the file's as long as h is open
	u, over := &f.unwritten, make(chan struct{})
	if u.under == nil {
		u.under = make(map[chan struct{}]*handle)
	}
	u.under[over] = h
	f.mu.Unlock()

	err := fs.withFD(h, do)

	f.mu.Lock()
	defer f.mu.Unlock()
	delete(u.under, over)
	close(over)
	if errors.Is(err, unix.EIO) || errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		u.times++
		u.err, h.heard = err, u.times
	}
	if err != nil {
		return err
	}
	// Another call under way may have heard of it in the place of this one.
	var others []chan struct{}
	for c, by := range u.under {
		if by != h {
			others = append(others, c)
		}
	}
	f.mu.Unlock()
	for _, c := range others {
		<-c
	}
	f.mu.Lock()
	if h.heard == u.times {
		return nil
	}
	h.heard = u.times
	return u.err
}
