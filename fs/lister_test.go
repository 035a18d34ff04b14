package fs

import "testing"

// A reader that asks for no file gets the attributes of directories only, and
// those of all again once it asks for one.
func TestListers(t *testing.T) {
	var l listers
	dir := &node{id: 7}
	read := func(tid uint32) (lean bool) {
		lean, try := l.begin(tid)
		if try {
			l.leave(tid, dir, "file")
		}
		return lean
	}
	until := func(tid uint32, lean bool) (n int) {
		for n = 0; n < 1000 && read(tid) != lean; n++ {
		}
		return n
	}
	if n := until(1, true); n != leanAfter+1 {
		t.Errorf("a reader of %d directories asked for no file and still gets all, want %d", n, leanAfter+1)
	}
	l.asked(1, dir, "other")
	if read(1) {
		t.Error("a reader that asked for a file gets directories only")
	}
	for range 200 {
		if read(2) {
			t.Fatal("a reader that asks for each file that is left out gets directories only")
		}
		l.asked(2, dir, "file")
		l.asked(2, dir, "another")
	}
	for tid := range uint32(3 * maxListers) {
		read(tid)
	}
	if len(l.byTid) > maxListers {
		t.Errorf("%d readers are remembered, want %d at most", len(l.byTid), maxListers)
	}
}
