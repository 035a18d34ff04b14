package fs

import (
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

// A dirStream is a directory that is being read.
type dirStream struct {
	node   *node
	fd     int
	pos    uint64  // the position to go on from, as it is shown
	at     uint64  // the same, as the backing has it, unless moved
	hashes *hashes // if they differ
	moved  bool    // the descriptor is elsewhere

	noatime bool // the descriptor has O_NOATIME
}

// setNoatime is called with the flags of who reads, which change no access time
// if O_NOATIME is among them. Whether it may set that the kernel has looked.
func (s *dirStream) setNoatime(flags uint32) {
	noatime := flags & unix.O_NOATIME
	if s.noatime == (noatime != 0) {
		return
	}
	if _, err := unix.FcntlInt(uintptr(s.fd), unix.F_SETFL, int(noatime)); err == nil {
		s.noatime = noatime != 0
	}
}

// read calls f with the entries from the position on until it returns false,
// with buf to read into, and reports whether it met the end. Nothing that was
// read is kept for later: it would be stale when the directory has changed.
// Who has got entries hears of an error the next time, as of getdents(2).
func (s *dirStream) read(buf []byte, f func(dirEntry) bool) (end bool, err error) {
	for some := false; ; some = true {
		if s.moved {
			if err := s.seek(buf); err != nil {
				return false, err
			}
			s.moved = false
		}
		n, err := getdents(s.fd, buf)
		if err != nil && some {
			s.moved = true
			return false, nil
		}
		if err != nil || n == 0 {
			return true, err
		}
		if s.hashes == nil {
			s.seen(buf[:n])
		}
		for rest := buf[:n]; len(rest) > 0; {
			var e dirEntry
			e, rest = nextEntry(rest)
			next := e.next
			if s.hashes != nil {
				e.next = s.hashes.shown(next, s.at)
			}
			if !f(e) {
				s.moved = true
				return false, nil
			}
			s.pos, s.at = e.next, next
		}
	}
}

// maxStreams is how many directories stay open between two reads. A reader
// whose stream was closed goes on with another one.
const maxStreams = 32

// dirStreams are those that nobody reads at the moment, the last used last.
type dirStreams struct {
	mu   sync.Mutex
	idle []*dirStream
}

// take returns a stream of n that stands at pos, or nil.
func (t *dirStreams) take(n *node, pos uint64) *dirStream {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := len(t.idle) - 1; i >= 0; i-- {
		if s := t.idle[i]; s.node == n && s.pos == pos {
			t.idle = slices.Delete(t.idle, i, i+1)
			return s
		}
	}
	return nil
}

// put gives a stream back.
func (t *dirStreams) put(s *dirStream) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.idle) == maxStreams {
		unix.Close(t.idle[0].fd)
		t.idle = slices.Delete(t.idle, 0, 1)
	}
	t.idle = append(t.idle, s)
}

// drop forgets the streams of a node, and adds their descriptors to those that
// the caller is to close.
func (t *dirStreams) drop(n *node, doomed []int) []int {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.idle = slices.DeleteFunc(t.idle, func(s *dirStream) bool {
		if s.node == n {
			doomed = append(doomed, s.fd)
		}
		return s.node == n
	})
	return doomed
}
