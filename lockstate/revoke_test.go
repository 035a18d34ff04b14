package lockstate_test

import (
	"errors"
	"testing"

	"github.com/stagefs/stagefs/lockstate"
)

// takeRevocable makes p the owner of a revocable lock on path and opens a
// handle beneath it.
func takeRevocable(f *fixture, path string) (lockstate.Lock, *lockstate.Handle) {
	f.Helper()
	q := f.request(f.parent, path, lockstate.Explicit)
	q.Revocable = true
	g, err := f.Acquire(closed, q)
	if err != nil {
		f.Fatalf("Acquire(%s) = %v, want a grant", path, err)
	}
	l, _ := g.Commit()
	h, err := f.OpenHandle(lockstate.Change{Process: f.child, Dirs: []*lockstate.Dir{f.dir(path)}}, "file")
	if err != nil {
		f.Fatalf("OpenHandle(%s) = %v, want a handle", path, err)
	}
	return l, h
}

// L3: once the lock is broken, nothing more is written through a handle that
// was opened under it, and it stands in nobody's way.
func TestRevocation(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	l, h := takeRevocable(f, "b/v")
	defer h.Close()
	if !l.Revocable || !h.Revocable() || h.Revoked() {
		t.Errorf("Revocable = %t, %t, Revoked() = %t, want true, true, false", l.Revocable, h.Revocable(), h.Revoked())
	}
	op, err := h.Begin()
	if err != nil {
		t.Fatalf("Begin() = %v, want nil", err)
	}
	f.End(l.Token, lockstate.Broken)
	if !h.Revoked() {
		t.Errorf("Revoked() after the lock was broken = false, want true")
	}
	if _, err := h.Begin(); !errors.Is(err, lockstate.ErrRevoked) {
		t.Errorf("Begin() after the lock was broken = %v, want ErrRevoked", err)
	}
	h.Moved("other", f.dir("b/v")) // it stays out
	// The change in flight is waited for, the handle is not.
	if _, err := f.try(f.stranger, "b/v", lockstate.Explicit); !errors.Is(err, lockstate.ErrCancelled) {
		t.Errorf("Acquire with a write in flight = %v, want ErrCancelled", err)
	}
	op.End()
	f.take(f.stranger, "b/v", lockstate.Explicit)
}

// R8: a handle whose lock was released stays what it was.
func TestReleaseRevokesNothing(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	l, h := takeRevocable(f, "b/v")
	defer h.Close()
	f.ReleaseFile(l.Dir, "devserver")
	if op, err := h.Begin(); err != nil {
		t.Errorf("Begin() after a release = %v, want nil", err)
	} else {
		op.End()
	}
	f.refused(f.stranger, "b/v", lockstate.Explicit, lockstate.ErrOpen, 0)
}

// A handle opened under an ordinary lock is never revoked.
func TestRevokeOrdinary(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	l := f.take(f.parent, "b/v", lockstate.Explicit)
	h, err := f.OpenHandle(lockstate.Change{Process: f.child, Dirs: []*lockstate.Dir{f.dir("b/v")}}, "file")
	if err != nil {
		t.Fatalf("OpenHandle = %v, want a handle", err)
	}
	defer h.Close()
	h.Revoke()
	f.End(l.Token, lockstate.Broken)
	if op, err := h.Begin(); op != nil || err != nil || h.Revoked() {
		t.Errorf("Begin() = %v, %v, Revoked() = %t, want nil, nil, false", op, err, h.Revoked())
	}
	f.refused(f.stranger, "b/v", lockstate.Explicit, lockstate.ErrOpen, 0)
}
