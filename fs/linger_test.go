package fs

import (
	"testing"
	"time"
)

// Who looks at the nodes with handles that linger is woken for one that is due before he
// would look by himself, and for no other: that one is seen in time as well.
func TestLingerWakes(t *testing.T) {
	for _, c := range []struct {
		name  string
		pause time.Duration // that he has begun
		wakes bool
	}{
		{"long pause", lastLook, true},
		{"short pause", firstLook / 2, false},
		{"looking", -time.Millisecond, false},
	} {
		l := lingers{nodes: make(map[*node]*lingerCheck), wake: make(chan struct{}, 1)}
		l.next = time.Now().Add(c.pause)
		l.soon(new(node))
		if woken := len(l.wake) > 0; woken != c.wakes {
			t.Errorf("%s: woken: %v, want %v", c.name, woken, c.wakes)
		}
		if d := l.pause(); d > firstLook {
			t.Errorf("%s: the next pause takes %v, want %v at the most", c.name, d, firstLook)
		}
		if d := time.Until(l.next); d > firstLook {
			t.Errorf("%s: it is to end in %v", c.name, d)
		}
	}
	l := lingers{nodes: make(map[*node]*lingerCheck), wake: make(chan struct{}, 1)}
	if d := l.pause(); d != lastLook || time.Until(l.next) <= lastLook/2 {
		t.Errorf("with no node: a pause of %v until %v from now", d, time.Until(l.next))
	}
}
