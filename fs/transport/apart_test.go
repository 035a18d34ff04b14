package transport

import "testing"

// A user who has as many requests wait as he may keeps no other from waiting,
// until all places are taken.
func TestWaits(t *testing.T) {
	var w waits
	fill := func(uid uint32) (n int) {
		for ; !w.full(uid); n++ {
			w.count(uid, 1)
		}
		return n
	}
	if n := fill(1); n != maxWaitsUser {
		t.Errorf("one user: %d, want %d", n, maxWaitsUser)
	}
	if n := fill(0); n != maxWaits-maxWaitsUser {
		t.Errorf("root besides: %d, want %d", n, maxWaits-maxWaitsUser)
	}
	if n := fill(2); n != 0 {
		t.Errorf("where all are taken: %d, want 0", n)
	}
	w.count(1, -1)
	if n := fill(2); n != 1 {
		t.Errorf("after one has ended: %d, want 1", n)
	}
	w.count(2, -1)
	if _, ok := w.byUser[2]; ok {
		t.Error("a user who waits no more is remembered")
	}
}
