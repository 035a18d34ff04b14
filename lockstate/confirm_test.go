package lockstate_test

import (
	"errors"
	"testing"

	"github.com/stagefs/stagefs/lockstate"
)

// TestConfirm: what is learnt of an open file after a lock was admitted, and
// before it is final, counts like what was known (C3d).
func TestConfirm(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	d := f.dir("a/d")
	others, own := f.open(f.stranger, "b"), f.open(f.child, "b")
	g, err := f.Acquire(closed, f.request(f.parent, "a/d", lockstate.Explicit))
	if err != nil {
		t.Fatal(err)
	}
	own.Moved("g", f.dir("b"), f.dir("a/d/x"))
	if err := g.Confirm(); err != nil {
		t.Errorf("with a descendant's handle: Confirm() = %v, want nil", err)
	}
	others.Moved("g", f.dir("b"), f.dir("a/d/x"))
	if err := g.Confirm(); !errors.Is(err, lockstate.ErrOpen) {
		t.Errorf("with a stranger's handle: Confirm() = %v, want %v", err, lockstate.ErrOpen)
	}
	others.Close()
	if err := g.Confirm(); err != nil {
		t.Errorf("after it was closed: Confirm() = %v, want nil", err)
	}
	if _, ok := g.Commit(); !ok || !f.Holds(f.parent, d) {
		t.Error("not held in the end")
	}
}
