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
			a.done(true)
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
	if a.add(11, false, false, names("a", 100)) {
		t.Error("directories are read ahead where the disk is not waited for")
	}
	if !a.add(11, true, false, names("a", 100)) {
		t.Fatal("nothing is read ahead where the disk is waited for")
	}
	want("before one is listed", take(), "a0", "a1", "a2", "a3")
	a.begin(12, 11, true)
	if !a.add(12, false, false, names("b", 2)) {
		t.Fatal("nothing is read ahead after the next listing")
	}
	want("after one was listed", take(), "b0", "b1", "a4", "a5")
	for range 9 {
		a.begin(13, 11, true)
	}
	a.add(13, false, false, nil)
	want("when ten were listed", take(), "a10", "a11", "a12", "a13", "a14", "a15", "a16", "a17", "a18", "a19", "a20", "a21", "a22", "a23")

	if !a.add(13, true, false, nil) {
		t.Error("nobody runs where the disk is waited for")
	}
	for range aheadCredit {
		a.done(false)
	}
	if _, _, _, ok := a.take(); ok || a.ends != nil || len(a.todo) > 0 {
		t.Error("somebody goes on where none had to be waited for")
	}

	var b readahead
	b.add(14, true, false, names("d", maxAheadNames+1))
	b.add(14, true, false, names("e", maxAheadNames))
	if n := len(b.todo[0].names); n != maxAheadNames {
		t.Errorf("%d directories are to be read in one, want %d", n, maxAheadNames)
	}
	for id := range uint64(2 * maxAhead) {
		b.add(100+id, true, false, names("f", 1))
	}
	if n := len(b.todo); n != maxAhead {
		t.Errorf("directories are to be read in %d others, want %d", n, maxAhead)
	}
	if !b.pause(0) == (b.ends == nil) {
		t.Error("who pauses does not see whether somebody reads")
	}
	if _, _, _, ok := b.take(); ok || !b.pause(0) {
		t.Error("somebody goes on during a pause")
	}
}

// TestReadaheadMisses: where nobody goes down, nothing is read ahead until somebody does.
func TestReadaheadMisses(t *testing.T) {
	var a readahead
	read := func(dir uint64) (n int) {
		if a.add(dir, true, false, []string{"a", "b", "c"}) {
			for {
				if _, _, _, ok := a.take(); !ok {
					return n
				}
				a.done(true)
				n++
			}
		}
		return 0
	}
	for dir := range uint64(maxAhead + aheadMisses - 1) {
		if n := read(100 + dir); n != 3 {
			t.Fatalf("%d directories were read in the one listed as number %d, want 3", n, dir+1)
		}
	}
	if n := read(200); n != 0 {
		t.Errorf("%d directories were read, but nobody listed one of so many", n)
	}
	a.begin(300, 200, true)
	if n := read(300); n != 1 {
		t.Errorf("%d directories were read after one was listed, want 1 beside it", n)
	}
	a.begin(200, 1, true) // anew: so it is known that the ones in it are listed
	if n := read(400); n != 6 {
		t.Errorf("%d directories were read in the next one and that before, want 6", n)
	}
}
