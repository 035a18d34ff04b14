package lockstate_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// TestCarriedRows: another table has the same locks, whichever way they went.
func TestCarriedRows(t *testing.T) {
	f := newFixture(t, lockstate.Options{World: "w", LastToken: 1})
	// By a descriptor that has outlived a daemon, and is carried over two of them.
	outlived := lockstate.Record{
		Token: 1, World: "w", Path: "lost", Kind: lockstate.Explicit, Protocol: "flock", Owner: f.parent.ID(), File: "devserver",
		Keys: true, Opened: []lockstate.FileID{{Dev: 1, Ino: 2}},
	}
	if _, err := f.Restore(outlived, nil, []string{"lost"}, f.parent, nil); err != nil {
		t.Fatal(err)
	}
	f.take(f.parent, "a", lockstate.Implicit)
	f.take(f.parent, `od"d`, lockstate.Implicit)
	f.take(f.stranger, "b/c", lockstate.Explicit)
	member := f.take(f.parent, "m", lockstate.Implicit)
	if !f.Holds(f.grandchild, f.dir("m")) {
		t.Fatal("a grandchild does not hold")
	}
	q := f.request(f.stranger, "leased", lockstate.Explicit)
	q.Client, q.UID = "id", 7
	g, err := f.Acquire(closed, q)
	if err != nil {
		t.Fatal(err)
	}
	g.Commit()
	f.take(f.parent, "z", lockstate.Explicit)

	text, rows, ok := f.CarryRows()
	if !ok || len(text) == 0 || len(rows) == 0 {
		t.Fatalf("CarryRows() = %d B, %d rows, %v", len(text), len(rows), ok)
	}
	procs := make(map[procid.ID]*procid.Process)
	for _, p := range []*procid.Process{f.parent, f.stranger} {
		procs[p.ID()] = p
	}
	next := lockstate.New(lockstate.Options{World: "w", LastToken: f.LastToken()})
	var last uint64
	for row, err := range lockstate.CarriedRows(text, rows) {
		if err != nil {
			t.Fatal(err)
		}
		rec := row.Record
		if rec.Token <= last {
			t.Errorf("token %d after %d", rec.Token, last)
		}
		last = rec.Token
		if err := next.TakeUpRow(row, strings.Split(string(rec.Path), "/"), procs[rec.Owner], nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := next.Check(); err != nil {
		t.Error(err)
	}
	text2, rows2, _ := next.CarryRows()
	if diff := cmp.Diff(rows, rows2, cmpopts.EquateComparable(procid.ID{})); diff != "" || string(text) != string(text2) {
		t.Errorf("then (-want +got): %s\nand %q, want %q", diff, text2, text)
	}
	if !next.Holds(f.grandchild, dirAt(next, "m")) || !next.HasToken(member.Token) || next.HasToken(last+1) {
		t.Error("the lock with a member is another one")
	}

	whole := 0
	for n := range text {
		for _, err := range lockstate.CarriedRows(text[:n], nil) {
			if err != nil {
				whole--
			}
		}
		whole++
	}
	if plain := f.Len() - len(rows); whole != plain {
		t.Errorf("%d of %d cuts pass, want %d", whole, len(text), plain)
	}
}
