package fs

import (
	"math"
	"sync"

	"golang.org/x/sys/unix"
)

// Positions in a directory are the backing's own, so that telldir and seekdir work as
// there, except on ext4. There a position is a hash of 31 bits, and another of 32 for
// those that share it; but a program of 32 bits that knows of no large files cannot
// list a directory that has greater ones than 31 bits, and gets the first hash alone.
// The kernel keeps one listing for all programs, and does not say whose it will be. So
// the mount shows the first hash, and for the few that have the same one a number.

const (
	// lastPosition is ext4's end of a directory, in 31 bits and in 63.
	lastPosition = math.MaxInt32
	lastHash     = math.MaxInt64
	// firstNumber is from where on shown positions are numbers.
	firstNumber = lastPosition - 1<<20
)

// hashes are the positions in a directory that has hashes for them.
type hashes struct {
	mu       sync.Mutex
	numbered []uint64          // those that have a number
	number   map[uint64]uint64 // the way back
}

// shown returns what the mount shows of a position, which comes right after another.
func (h *hashes) shown(pos, before uint64) uint64 {
	first := pos >> 32
	switch {
	case pos == lastHash:
		return lastPosition
	case first != before>>32 && first < firstNumber:
		return first
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	i, ok := h.number[pos]
	if !ok {
		if len(h.numbered) == lastPosition-firstNumber {
			return first
		}
		if h.number == nil {
			h.number = make(map[uint64]uint64)
		}
		i = uint64(len(h.numbered))
		h.numbered, h.number[pos] = append(h.numbered, pos), i
	}
	return firstNumber + i
}

// real is the way back.
func (h *hashes) real(shown uint64) uint64 {
	switch {
	case shown > lastPosition:
		return shown // by a version before this one
	case shown == lastPosition:
		return lastHash
	case shown < firstNumber:
		return shown << 32
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if i := shown - firstNumber; i < uint64(len(h.numbered)) {
		return h.numbered[i]
	}
	return shown << 32
}

// mayHash reports whether the directory may have hashes for positions.
func (n *node) mayHash() bool { return n.tab.hashing && n.dev == n.tab.dev }

// seen looks for hashes among the positions that were read from the directory.
func (s *dirStream) seen(entries []byte) {
	of := &s.node.more.Load().hashes
	if s.hashes = of.Load(); s.hashes != nil || !s.node.mayHash() {
		return
	}
	for len(entries) > 0 {
		var e dirEntry
		if e, entries = nextEntry(entries); e.next > math.MaxUint32 {
			of.CompareAndSwap(nil, new(hashes))
			s.hashes = of.Load()
			return
		}
	}
}

// seek moves the descriptor to the position to go on from. buf is to read into.
func (s *dirStream) seek(buf []byte) error {
	if s.hashes == nil && s.pos != 0 && s.pos <= lastPosition && s.node.mayHash() {
		// Nobody has read it since this daemon knows of it.
		if _, err := unix.Seek(s.fd, 0, unix.SEEK_SET); err != nil {
			return err
		}
		n, err := getdents(s.fd, buf)
		if err != nil {
			return err
		}
		s.seen(buf[:n])
	}
	s.at = s.pos
	if s.hashes != nil {
		s.at = s.hashes.real(s.pos)
	}
	_, err := unix.Seek(s.fd, int64(s.at), unix.SEEK_SET)
	return err
}
