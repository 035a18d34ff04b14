package lockstate_test

import (
	"errors"
	"testing"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
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

// TestKeeps: a grant tells whose its directory is, or was before: the nearest lock's
// holder's, and nobody's who merely shares.
func TestKeeps(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	acquire := func(p *procid.Process, path string, k lockstate.Kind) *lockstate.Grant {
		t.Helper()
		g, err := f.Acquire(closed, f.request(p, path, k))
		if err != nil {
			t.Fatal(err)
		}
		return g
	}
	free := acquire(f.parent, "a", lockstate.Explicit)
	if !free.Keeps(f.parent) || free.Keeps(f.stranger) {
		t.Errorf("free: Keeps = %t for who gets it, %t for a stranger, want true and false", free.Keeps(f.parent), free.Keeps(f.stranger))
	}
	free.Commit()
	for _, path := range []string{"a/b", "a"} { // beneath, and in front
		g := acquire(f.child, path, lockstate.Explicit)
		if !g.Keeps(f.parent) || g.Keeps(f.stranger) {
			t.Errorf("%s: Keeps = %t for the holder, %t for a stranger, want true and false",
				path, g.Keeps(f.parent), g.Keeps(f.stranger))
		}
		g.Abort()
	}
	f.take(f.stranger, "s", lockstate.Shared)
	if acquire(f.parent, "s", lockstate.Shared).Keeps(f.stranger) {
		t.Error("who shares keeps something")
	}
}
