package fs

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
)

// A burst is what the log is told of many locks at a time: of each message the
// first ones as they are, and at the end how many more there were. Its user gives
// it back; work that it leaves behind has a use of its own.
type burst struct {
	log *slog.Logger

	mu   sync.Mutex
	uses int
	told map[string]*counted // by message
}

// A counted is of what the log need not tell each one.
type counted struct {
	level slog.Level
	n     int
}

// eachLogged is how many have a line of their own.
const eachLogged = 100

// newBurst returns one in use.
func newBurst(log *slog.Logger) *burst {
	return &burst{log: log, uses: 1, told: make(map[string]*counted)}
}

// tell is [slog.Logger.Log].
func (b *burst) tell(level slog.Level, msg string, args ...any) {
	b.mu.Lock()
	c := b.told[msg]
	if c == nil {
		c = &counted{level: level}
		b.told[msg] = c
	}
	c.n++
	alone := c.n <= eachLogged
	b.mu.Unlock()
	if alone {
		b.log.Log(context.Background(), level, msg, args...)
	}
}

func (b *burst) use() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.uses++
}

// done ends a use. With the last one the log is told of the rest.
func (b *burst) done() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.uses--; b.uses > 0 {
		return
	}
	for _, msg := range slices.Sorted(maps.Keys(b.told)) {
		if c := b.told[msg]; c.n > eachLogged {
			b.log.Log(context.Background(), c.level, msg, "more", c.n-eachLogged)
		}
	}
	clear(b.told)
}
