package transport

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

func TestStatCore(t *testing.T) {
	const rest = " S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37"
	for stat, want := range map[string]int{
		"12 (sh)" + rest:             36,
		"12 (a) S (b c)" + rest:      36,
		"12 (sh) S 1 2 3":            -1,
		"":                           -1,
		"12 (sh)" + rest[:100] + "x": -1,
	} {
		if got := statCore([]byte(stat)); got != want {
			t.Errorf("statCore(%q) = %d, want %d", stat, got, want)
		}
	}
}

// One caller after another is few, in turns is many, and what lies between
// changes nothing.
func TestGatheringLately(t *testing.T) {
	var l lately
	run := func(n, turn int) (last, decided bool) {
		for i := range n {
			many, now := l.note(uint32(1 + i/turn%4))
			if now {
				last, decided = many, true
			}
		}
		return last, decided
	}
	if many, decided := run(window, 1); !decided || !many {
		t.Errorf("in turns: %v, %v", many, decided)
	}
	if _, decided := run(20*window, 8); decided {
		t.Error("eight at a time decided something")
	}
	if _, decided := run((calmFor-1)*window, 1000); decided {
		t.Error("decided before it was calm for long")
	}
	if many, decided := run(window, 1000); !decided || many {
		t.Errorf("one after another: %v, %v", many, decided)
	}
	for range window - 1 {
		l.note(0)
	}
	if many, decided := l.note(0); !decided || !many {
		t.Errorf("not known: %v, %v", many, decided)
	}
}

// Threads follow a caller, all but the one that has found it; that is tied by
// whoever takes the next request.
func TestGatheringFollows(t *testing.T) {
	g := newGathering()
	if len(g.cores) < 2 {
		t.Skip("needs root and two cores")
	}
	core := func(s *sitting) int {
		var set unix.CPUSet
		if err := unix.SchedGetaffinity(s.tid, &set); err != nil || set.Count() != 1 {
			return -1
		}
		for core := range len(set) * 64 {
			if set.IsSet(core) {
				return core
			}
		}
		return -1
	}
	done := make(chan struct{})
	defer close(done)
	sit := func() *sitting {
		c := make(chan *sitting)
		go func() {
			runtime.LockOSThread() // for good: its core is not every goroutine's
			c <- g.sit(unix.Gettid())
			<-done
		}()
		return <-c
	}
	a, b := sit(), sit()
	if a.seat == b.seat || core(a) >= 0 || core(b) >= 0 {
		t.Fatalf("at first: seats %d, %d, cores %d, %d", a.seat, b.seat, core(a), core(b))
	}
	caller, seen := make(chan uint32), make(chan struct{})
	go func() {
		runtime.LockOSThread()
		for _, c := range g.cores[:2] {
			var one unix.CPUSet
			one.Set(c)
			unix.SchedSetaffinity(0, &one)
			caller <- uint32(unix.Gettid())
			<-seen
		}
	}()
	for _, want := range g.cores[:2] {
		tid := <-caller
		g.follow(a, tid)
		if core(b) != want || core(a) == want {
			t.Errorf("caller on core %d: threads on %d and %d", want, core(a), core(b))
		}
		g.took(b, OpLookup, tid)
		if core(a) != want {
			t.Errorf("caller on core %d: the first thread stayed on %d", want, core(a))
		}
		seen <- struct{}{}
	}
	for range 2 * window {
		g.took(a, OpGetAttr, 0)
	}
	if g.spread.Load() {
		t.Error("who may be in an exec was counted")
	}
	for i := range uint32(window) {
		g.took(a, OpLookup, 1000+i)
	}
	g.took(b, OpLookup, 1000)
	if core(a) != g.cores[a.seat] || core(b) != g.cores[b.seat] {
		t.Errorf("many callers: threads on %d and %d", core(a), core(b))
	}
	if got := g.threads(); got != len(g.cores) {
		t.Errorf("many callers: %d threads", got)
	}
}
