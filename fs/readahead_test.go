package fs

import (
	"fmt"
	"testing"
)

// TestReadahead: the directories of the one that was listed last are read first, a few
// more with each that is listed, and none while the disk is not waited for.
func TestReadahead(t *testing.T) {
	var a readahead
	take := func() (got []string) {
		for {
			_, name, _, ok := a.take()
			if !ok {
				return got
			}
			got = append(got, name)
			a.done(slowRead)
		}
	}
	want := func(what string, got []string, want ...string) {
		t.Helper()
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: %v were read, want %v", what, got, want)
		}
	}
	names := func(prefix string, n int) (names []string) {
		for i := range n {
			names = append(names, fmt.Sprint(prefix, i))
		}
		return names
	}

	if a.begin(10, 1, true) {
		t.Error("the first listing is a walk")
	}
	if !a.begin(11, 10, true) {
		t.Error("a listing after that of the parent is no walk")
	}
	if a.add(11, slowRead-1, false, names("a", 100)) {
		t.Error("directories are read ahead where the disk is not waited for")
	}
	if !a.add(11, slowRead, false, names("a", 100)) {
		t.Fatal("nothing is read ahead where the disk is waited for")
	}
	want("before one is listed", take(), "a0", "a1", "a2", "a3")
	a.begin(12, 11, true)
	if !a.add(12, 0, false, names("b", 2)) {
		t.Fatal("nothing is read ahead after the next listing")
	}
	want("after one was listed", take(), "b0", "b1", "a4", "a5")
	for range 9 {
		a.begin(13, 11, true)
	}
	a.add(13, 0, false, nil)
	want("when ten were listed", take(), "a10", "a11", "a12", "a13", "a14", "a15", "a16", "a17", "a18", "a19", "a20", "a21", "a22", "a23")

	a.begin(13, 11, true)
	for range aheadCredit {
		a.done(0)
	}
	if a.add(13, 0, false, names("c", 1)) {
		t.Error("directories are read ahead where none had to be waited for any more")
	}
	want("where none had to be waited for", take())

	a.add(14, slowRead, false, names("d", maxAheadNames+1))
	a.add(14, slowRead, false, names("e", maxAheadNames))
	if n := len(a.todo[0].names); n != maxAheadNames {
		t.Errorf("%d directories are to be read in one, want %d", n, maxAheadNames)
	}
	for id := range uint64(2 * maxAhead) {
		a.add(100+id, slowRead, false, names("f", 1))
	}
	if n := len(a.todo); n != maxAhead {
		t.Errorf("directories are to be read in %d others, want %d", n, maxAhead)
	}
}
