package transport

import (
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

func TestFollowVotes(t *testing.T) {
	f := newFollow()
	for i, tt := range []struct{ vote, want int32 }{
		{1, anyCore}, {1, anyCore}, {1, anyCore}, {1, 1}, // four are enough
		{0, 1}, {1, 1}, {1, 1}, // a bystander
		{0, anyCore}, {0, anyCore}, {0, anyCore}, {0, 0}, // moved
		{1, 0}, {1, anyCore}, {0, anyCore}, {1, anyCore}, {0, anyCore}, // several
	} {
		if f.vote(tt.vote); f.core.Load() != tt.want {
			t.Errorf("vote %d, for %d: core %d, want %d", i, tt.vote, f.core.Load(), tt.want)
		}
	}
}

func TestCoreIn(t *testing.T) {
	fields := ") S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35"
	for _, tt := range []struct {
		stat string
		core int32
		ok   bool
	}{
		{"12 (sh" + fields + " 7 0 0 0\n", 7, true},
		{"12 (a ) S 1 b (" + fields + " 3 0 0\n", 3, true},
		{"12 (sh" + fields, 0, false},
		{"12 (sh" + fields + " x 0", 0, false},
		{"", 0, false},
	} {
		if core, ok := coreIn([]byte(tt.stat)); ok != tt.ok || ok && core != tt.core {
			t.Errorf("coreIn(%q) = %d, %v, want %d, %v", tt.stat, core, ok, tt.core, tt.ok)
		}
	}
}

// TestCoreOf: of a thread that is tied to a core that is known.
func TestCoreOf(t *testing.T) {
	runtime.LockOSThread() // for good: the thread ends with the test
	f := newFollow()
	for core := range 1024 {
		if !f.all.IsSet(core) {
			continue
		}
		f := f.follower()
		f.move(int32(core))
		if got, ok := f.coreOf(uint32(unix.Gettid())); !ok || got != int32(core) {
			t.Errorf("this thread is on core %d, %v, want %d", got, ok, core)
		}
	}
	if _, ok := f.follower().coreOf(uint32(os.Getpid()) + 1<<22); ok {
		t.Error("a thread that is not there has a core")
	}
}
