package transport

import (
	"sync"
	"sync/atomic"
	"time"
)

// A crew is the threads that take requests from one source.
type crew struct {
	threads atomic.Int32
	idle    atomic.Int32  // threads that wait for a request, or are about to
	taken   atomic.Uint32 // requests so far
	grow    func() error  // adds a thread, and returns when it waits
	watch   *watch

	open   *atomic.Int32 // places that wait for a request besides; may be nil
	aside  *atomic.Int32 // requests that goroutines are at; may be nil
	settle func()        // is called when the watch falls asleep; may be nil

	// Of watch alone.
	seen  uint32
	stuck int // for how many ticks all are busy, and nothing was taken
	grown int // threads added since the watch slept
}

// busy is called when a thread has taken a request.
func (c *crew) busy() {
	c.taken.Add(1)
	if c.idle.Add(-1) <= 0 {
		c.watch.look()
	}
}

// watch adds threads to crews whose threads are all busy. It sleeps unless
// some crew had no idle thread a moment ago.
type watch struct {
	awake  atomic.Bool
	poke   chan struct{}
	done   chan struct{}
	once   sync.Once
	crews  []*crew // fixed from the start
	sysmon sysmon  // of run alone
}

// watchTick is how long all of a crew may be busy before it gets one more.
const watchTick = time.Millisecond

// watchTicks is for how many ticks without need the watch stays awake.
const watchTicks = 20

func (w *watch) init() {
	w.poke, w.done = make(chan struct{}, 1), make(chan struct{})
}

func (w *watch) stop() { w.once.Do(func() { close(w.done) }) }

// look wakes the watch.
func (w *watch) look() {
	if w.awake.Load() || w.awake.Swap(true) {
		return
	}
	select {
	case w.poke <- struct{}{}:
	default:
	}
}

func (w *watch) run() {
	w.sysmon.find()
	w.look() // threads are still being made
	again := time.NewTicker(sysmonTime)
	defer again.Stop()
	for {
		w.sysmon.suit(w.threads())
		select {
		case <-w.poke:
		case <-again.C:
			w.sysmon.find()
			continue
		case <-w.done:
			return
		}
		for quiet := 0; quiet < watchTicks; quiet++ {
			pause(watchTick)
			select {
			case <-w.done:
				return
			default:
			}
			for _, c := range w.crews {
				if c.check() {
					quiet = 0
				}
			}
			w.sysmon.suit(w.threads())
		}
		w.awake.Store(false)
		for _, c := range w.crews {
			c.grown = 0
			if c.settle != nil {
				c.settle()
			}
			if c.idle.Load() <= 0 {
				w.look() // what came in between
			}
		}
	}
}

// threads is how many threads, or goroutines, may be carrying out a request.
func (w *watch) threads() int {
	n := int32(0)
	for _, c := range w.crews {
		n += c.threads.Load()
		if c.aside != nil {
			n += c.aside.Load()
		}
	}
	return int(n)
}

// check adds a thread if all are busy, have been at the last check, and took
// nothing in between. It reports whether all are busy.
func (c *crew) check() bool {
	taken := c.taken.Load()
	switch {
	case c.idle.Load() > 0 || c.open != nil && c.open.Load() > 0:
		c.stuck = -1
		return false
	case c.seen != taken:
		c.stuck = -1
	}
	c.seen = taken
	if c.stuck++; c.stuck >= patience(c.grown) && c.grow() == nil { // else at the next tick
		c.stuck = 0
		c.grown++
	}
	return true
}

// patience is how many ticks a crew has to be stuck before it gets one more thread, if it got
// so many already: of a crowd that comes at once each is slow, and more threads make it slower.
// Nor may it take long to get past thousands that wait for the backing.
func patience(grown int) int { return max(1, min(grown*grown/4096, 5)) }
