package lockstate_test

import (
	"errors"
	"testing"

	"github.com/stagefs/stagefs/lockstate"
)

// takeRevocable takes a lease on path and opens a handle beneath it.
func takeRevocable(f *fixture, path string) (lockstate.Lock, *lockstate.Handle) {
	f.Helper()
	q := f.request(f.parent, path, lockstate.Explicit)
	q.Client = "c"
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
	if !h.Revocable() || h.Revoked() {
		t.Errorf("Revocable() = %t, Revoked() = %t, want true, false", h.Revocable(), h.Revoked())
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
	f.End(l.Token, lockstate.Broken)
	if op, err := h.Begin(); op != nil || err != nil || h.Revoked() {
		t.Errorf("Begin() = %v, %v, Revoked() = %t, want nil, nil, false", op, err, h.Revoked())
	}
	f.refused(f.stranger, "b/v", lockstate.Explicit, lockstate.ErrOpen, 0)
}

// W3: what is in flight through a handle that was revoked is waited for where its file
// has got a name meanwhile, and brings nothing into another's lock; once it is over, the
// handle stands in the way of neither.
func TestRevokedInFlight(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	l, h := takeRevocable(f, "b/v")
	defer h.Close()
	op, err := h.Begin()
	if err != nil {
		t.Fatalf("Begin() = %v, want nil", err)
	}
	f.End(l.Token, lockstate.Broken)
	if h.Spent() {
		t.Error("Spent() with a change in flight = true, want false")
	}
	h.Moved("file", f.dir("b/w"))
	if _, err := f.try(f.stranger, "b/w", lockstate.Explicit); !errors.Is(err, lockstate.ErrCancelled) {
		t.Errorf("Acquire where the file went = %v, want ErrCancelled", err)
	}
	f.take(f.stranger, "b/x", lockstate.Explicit)
	enters := lockstate.Change{
		Process: f.stranger, Dirs: []*lockstate.Dir{f.dir("b/x")}, Into: f.dir("b/x"), Files: []*lockstate.Handle{h},
	}
	tree := enters
	tree.Files, tree.EnteringTree = nil, f.dir("b/v")
	for _, c := range []lockstate.Change{enters, tree} {
		if _, err := f.Begin(c); !errors.Is(err, lockstate.ErrOpen) {
			t.Errorf("Begin(%+v) with a change in flight = %v, want ErrOpen", c, err)
		}
	}
	op.End()
	if !h.Spent() {
		t.Error("Spent() after it = false, want true")
	}
	for _, c := range []lockstate.Change{enters, tree} {
		op, err := f.Begin(c)
		if err != nil {
			t.Errorf("Begin(%+v) after it = %v, want nil", c, err)
		}
		op.End()
	}
	f.take(f.stranger, "b/w", lockstate.Explicit)
}

// A8: whoever waits for a directory hears of each end of what was in his way: of a
// handle, of its right to write, of its name there, and of what was in flight.
func TestBell(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	l, h := takeRevocable(f, "b/v")
	op, err := h.Begin()
	if err != nil {
		t.Fatalf("Begin() = %v, want nil", err)
	}
	open := f.open(f.parent, "b/v")
	for _, end := range []struct {
		of string
		do func()
	}{
		{"a name there", func() { open.Moved("f", f.dir("b/w")) }},
		{"a handle", open.Close},
		{"its right to write", func() { f.End(l.Token, lockstate.Broken) }},
		{"what was in flight", op.End},
	} {
		bell := f.Bell()
		end.do()
		select {
		case <-bell:
		default:
			t.Errorf("nobody heard of the end of %s", end.of)
		}
	}
	h.Close()
}

// C3d: a handle that was closed stands in nobody's way, also if its file's new name is
// told only now.
func TestMovedWhenClosed(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	h := f.open(f.stranger, "b/v")
	h.Close()
	h.Moved("g", f.dir("b/w"))
	f.take(f.parent, "b/w", lockstate.Explicit)
}

// L3: what was opened under a lease that was to end, and did not, is under the one that
// its client took instead.
func TestRevocationOfTwin(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	take := func() lockstate.Lock {
		t.Helper()
		q := f.request(f.parent, "b/v", lockstate.Explicit)
		q.Client, q.Command = "c", true
		g, err := f.Acquire(closed, q)
		if err != nil {
			t.Fatal(err)
		}
		l, _ := g.Commit()
		return l
	}
	old := take()
	h, err := f.OpenHandle(lockstate.Change{Process: f.parent, Dirs: []*lockstate.Dir{f.dir("b/v")}}, "file")
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	f.Doom(old.Token)
	again := take()
	f.Remains(old.Token)
	if h.Revoked() {
		t.Error("Revoked() under the lease taken instead = true, want false")
	}
	f.End(again.Token, lockstate.Expired)
	if !h.Revoked() {
		t.Error("Revoked() after that one = false, want true")
	}
}
