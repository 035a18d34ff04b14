package fs

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

var (
	// errParked: one more would keep others from being answered.
	errParked = fmt.Errorf("too many wait already: %w", unix.ENOLCK)
	// errTexts: one more would take too much of the daemon's memory.
	errTexts = fmt.Errorf("too much is open already: %w", unix.ENFILE)
)

// A request for a control file that waits takes memory. So the number of such
// requests is bounded, and that of each user but root: he is to lock nobody out.
const (
	maxParked     = 4096
	maxParkedUser = 1024
)

// What an open file of text shows takes memory, too, as many bytes. Root's do not count:
// whoever else fills the room keeps him from nothing.
const (
	maxTexts     = 256 << 20
	maxTextsUser = 64 << 20
)

// A bound is how much may be taken in all, and by each user but root. Who has nothing
// yet is not refused for wanting much.
type bound struct {
	most, mostUser int
	full           error // the answer where there is no room

	mu     sync.Mutex
	all    int
	byUser map[uint32]int
}

// enter takes n, or fails if that is too much. The caller calls leave to give it back.
func (b *bound) enter(uid uint32, n int) (leave func(), err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.all > 0 && b.all+n > b.most || uid != 0 && b.byUser[uid] > 0 && b.byUser[uid]+n > b.mostUser {
		return nil, b.full
	}
	if b.byUser == nil {
		b.byUser = make(map[uint32]int)
	}
	b.all += n
	b.byUser[uid] += n
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.all -= n
		if b.byUser[uid] -= n; b.byUser[uid] == 0 {
			delete(b.byUser, uid)
		}
	}, nil
}
