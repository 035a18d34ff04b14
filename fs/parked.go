package fs

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// errParked: one more would keep others from being answered.
var errParked = fmt.Errorf("too many wait already: %w", unix.ENOLCK)

// A request for a control file that waits takes memory. So the number of such
// requests is bounded, and that of each user but root: he is to lock nobody out.
const (
	maxParked     = 4096
	maxParkedUser = 1024
)

// parked counts the requests that wait in control files.
type parked struct {
	mu     sync.Mutex
	all    int
	byUser map[uint32]int
}

// enter counts one more, or fails if there are too many. The caller calls leave
// when the wait is over.
func (p *parked) enter(uid uint32) (leave func(), err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.all >= maxParked || uid != 0 && p.byUser[uid] >= maxParkedUser {
		return nil, errParked
	}
	if p.byUser == nil {
		p.byUser = make(map[uint32]int)
	}
	p.all++
	p.byUser[uid]++
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.all--
		if p.byUser[uid]--; p.byUser[uid] == 0 {
			delete(p.byUser, uid)
		}
	}, nil
}
