package lockstate_test

import (
	"errors"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// An attempt is an Acquire that runs on its own.
type attempt struct {
	cancel chan struct{}
	done   bool
	grant  *lockstate.Grant
	err    error
}

// start runs Acquire until it returns or waits for something.
func (f *fixture) start(q lockstate.Request) *attempt {
	a := &attempt{cancel: make(chan struct{})}
	go func() {
		a.grant, a.err = f.Acquire(a.cancel, q)
		a.done = true
	}()
	synctest.Wait()
	return a
}

func (f *fixture) waits(a *attempt, want bool, why string) {
	f.Helper()
	synctest.Wait()
	if a.done == want {
		f.Errorf("%s: Acquire waits = %v, want %v", why, !a.done, want)
	}
}

func (f *fixture) begin(c lockstate.Change) *lockstate.Op {
	f.Helper()
	op, err := f.Begin(c)
	if err != nil {
		f.Fatalf("Begin(%v) = %v, want nil", c.Process.ID(), err)
	}
	return op
}

// bubble runs test with a fixture in a synctest bubble.
func bubble(t *testing.T, o lockstate.Options, test func(*fixture)) {
	synctest.Test(t, func(t *testing.T) { test(newFixture(t, o)) })
}

// W3: an acquisition waits for exactly the operations beneath it that began
// before, and for nothing that begins after it.
func TestAcquireWaitsForOperationsInFlight(t *testing.T) {
	bubble(t, lockstate.Options{}, func(f *fixture) {
		in := func(path string) lockstate.Change {
			return lockstate.Change{Process: f.stranger, Dirs: []*lockstate.Dir{f.dir(path)}}
		}
		beside, above := f.begin(in("b")), f.begin(in("."))
		on, below := f.begin(in("a")), f.begin(in("a/x/y"))

		a := f.start(f.request(f.parent, "a", lockstate.Explicit))
		f.waits(a, true, "two operations in flight")
		f.mayNotChange(f.stranger, "a/x", 1)
		f.refused(f.stranger, "a/x", lockstate.Implicit, lockstate.ErrHeld, 1)
		own := f.begin(lockstate.Change{Process: f.child, Dirs: []*lockstate.Dir{f.dir("a")}})

		on.End()
		f.waits(a, true, "one operation in flight")
		below.End()
		below.End() // once more: harmless
		f.waits(a, false, "only operations elsewhere, and a later one, in flight")
		if a.err != nil {
			t.Fatalf("Acquire = %v, want nil", a.err)
		}
		if _, ok := a.grant.Commit(); !ok {
			t.Errorf("Commit() = false, want true")
		}
		own.End()
		beside.End()
		above.End()
	})
}

// Ending an operation twice does not end another one.
func TestEndTwice(t *testing.T) {
	bubble(t, lockstate.Options{}, func(f *fixture) {
		c := lockstate.Change{Process: f.stranger, Dirs: []*lockstate.Dir{f.dir("d")}}
		first, second := f.begin(c), f.begin(c)
		first.End()
		first.End()
		a := f.start(f.request(f.parent, "d", lockstate.Explicit))
		f.waits(a, true, "the second operation is in flight")
		second.End()
		f.waits(a, false, "both are over")
		a.grant.Abort()
	})
}

// C1, W3: the name of a directory is covered too, so an acquisition waits for
// whoever is about to move or remove what it is in.
func TestAcquireWaitsForRenameAbove(t *testing.T) {
	bubble(t, lockstate.Options{}, func(f *fixture) {
		up := f.dir("up")
		op := f.begin(lockstate.Change{Process: f.stranger, Dirs: []*lockstate.Dir{f.Root()}, Trees: []*lockstate.Dir{up}})
		a := f.start(f.request(f.parent, "up/d", lockstate.Explicit))
		f.waits(a, true, "a rename of the parent is in flight")
		f.Move(up, f.Root(), "new")
		op.End()
		f.waits(a, false, "the rename is over")
		if l, ok := a.grant.Commit(); !ok || l.Path != "new/d" {
			t.Errorf("Commit() = %q, %v, want the lock on new/d", l.Path, ok)
		}
	})
}

func TestAcquireOfWhatWasRemoved(t *testing.T) {
	bubble(t, lockstate.Options{}, func(f *fixture) {
		d := f.dir("a/d")
		op := f.begin(lockstate.Change{Process: f.stranger, Dirs: []*lockstate.Dir{f.dir("a")}, Trees: []*lockstate.Dir{d}})
		a := f.start(f.request(f.parent, "a/d", lockstate.Explicit))
		f.Remove(d)
		op.End()
		f.waits(a, false, "the removal is over")
		if a.err != lockstate.ErrGone {
			t.Errorf("Acquire = %v, want %v", a.err, lockstate.ErrGone)
		}
		if _, err := f.Acquire(nil, lockstate.Request{Process: f.parent, Dir: d}); err != lockstate.ErrGone {
			t.Errorf("Acquire of a removed directory = %v, want %v", err, lockstate.ErrGone)
		}
		if _, err := f.Acquire(nil, lockstate.Request{Process: f.parent, Dir: f.Dir(d, "sub")}); err != lockstate.ErrGone {
			t.Errorf("Acquire in a removed directory = %v, want %v", err, lockstate.ErrGone)
		}
	})
}

// W3: what was in flight may end with another's handle, or lock, beneath the
// directory. Then the acquisition is refused after all, and leaves nothing.
func TestAcquireLooksAgainAfterWaiting(t *testing.T) {
	t.Run("handle", func(t *testing.T) {
		bubble(t, lockstate.Options{}, func(f *fixture) {
			h := f.open(f.stranger, "out")
			op := f.begin(lockstate.Change{
				Process: f.stranger, Dirs: []*lockstate.Dir{f.dir("out"), f.dir("d")},
				Into: f.dir("d"), Files: []*lockstate.Handle{h},
			})
			a := f.start(f.request(f.parent, "d", lockstate.Explicit))
			h.Moved("f", f.dir("d"))
			op.End()
			f.waits(a, false, "the rename is over")
			f.wantError("Acquire", "d", a.err, lockstate.ErrOpen, 0)
			f.governs("d", 0)
		})
	})
	t.Run("tree with a lock", func(t *testing.T) {
		bubble(t, lockstate.Options{}, func(f *fixture) {
			theirs := f.take(f.stranger, "tree/x", lockstate.Explicit)
			op := f.begin(lockstate.Change{
				Process: f.stranger, Dirs: []*lockstate.Dir{f.Root(), f.dir("d")},
				Trees: []*lockstate.Dir{f.dir("tree")}, Into: f.dir("d"), EnteringTree: f.dir("tree"),
			})
			a := f.start(f.request(f.parent, "d", lockstate.Explicit))
			f.Move(f.dir("tree"), f.dir("d"), "tree")
			op.End()
			f.waits(a, false, "the rename is over")
			f.wantError("Acquire", "d", a.err, lockstate.ErrHeld, theirs.Token)
			f.governs("d", 0)
			f.governs("d/tree/x", theirs.Token)
		})
	})
	t.Run("child in front", func(t *testing.T) {
		bubble(t, lockstate.Options{}, func(f *fixture) {
			op := f.begin(lockstate.Change{Process: f.stranger, Dirs: []*lockstate.Dir{f.dir("d")}})
			a := f.start(f.request(f.parent, "d", lockstate.Explicit))
			b := f.start(f.request(f.child, "d", lockstate.Explicit))
			f.waits(b, true, "the operation is in flight")
			op.End()
			f.waits(a, false, "the operation is over")
			f.waits(b, false, "the operation is over")
			if a.err != nil || b.err != nil {
				t.Errorf("Acquire by parent and child = %v, %v, want grants", a.err, b.err)
			}
			a.grant.Abort()
			b.grant.Abort()
		})
	})
}

func TestAcquireIsCancelled(t *testing.T) {
	bubble(t, lockstate.Options{}, func(f *fixture) {
		op := f.begin(lockstate.Change{Process: f.stranger, Dirs: []*lockstate.Dir{f.dir("d/x")}})
		a := f.start(f.request(f.parent, "d", lockstate.Explicit))
		f.waits(a, true, "an operation is in flight")
		close(a.cancel)
		f.waits(a, false, "cancelled")
		if !errors.Is(a.err, lockstate.ErrCancelled) || a.grant != nil {
			t.Errorf("Acquire = %v, %v, want %v", a.grant, a.err, lockstate.ErrCancelled)
		}
		f.governs("d", 0)
		f.mayChange(f.stranger, "d")
		op.End()
		if l := f.take(f.parent, "d", lockstate.Explicit); l.Token != 2 {
			t.Errorf("token after a cancelled acquisition = %d, want 2: none is given out twice", l.Token)
		}
	})
}

// R6: the lock can be broken while its acquisition still waits.
func TestLockEndsWhileAcquireWaits(t *testing.T) {
	bubble(t, lockstate.Options{}, func(f *fixture) {
		op := f.begin(lockstate.Change{Process: f.stranger, Dirs: []*lockstate.Dir{f.dir("d")}})
		a := f.start(f.request(f.parent, "d", lockstate.Explicit))
		if err := f.Table.End(1, lockstate.Broken); err != nil {
			t.Fatalf("End(1) = %v, want nil", err)
		}
		f.mayChange(f.stranger, "d")
		op.End()
		f.waits(a, false, "the operation is over")
		if a.err != nil {
			t.Fatalf("Acquire = %v, want nil", a.err)
		}
		if _, ok := a.grant.Commit(); ok {
			t.Errorf("Commit() of a broken lock = true, want false")
		}
	})
}

// Mkdirs beneath a lock that the process holds (A2) count as operations: a
// child that locks the new directory waits until they are through.
func TestAcquireWaitsForCoveredMkdir(t *testing.T) {
	for name, over := range map[string]func(*lockstate.Grant){
		"made":   func(g *lockstate.Grant) { g.Commit() },
		"failed": func(g *lockstate.Grant) {},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, lockstate.Options{}, func(f *fixture) {
				f.take(f.parent, "d", lockstate.Explicit)
				g, err := f.Acquire(nil, f.request(f.parent, "d/sub", lockstate.Implicit))
				if err != nil || !g.Covered() {
					f.Fatalf("Acquire(d/sub) = %v, %v, want a covered grant", g, err)
				}
				a := f.start(f.request(f.child, "d/sub", lockstate.Explicit))
				f.waits(a, true, "the mkdir is in flight")
				over(g)
				g.Abort() // of what was made it is too late to matter
				f.waits(a, false, "the mkdir is over")
				if _, ok := a.grant.Commit(); !ok {
					f.Errorf("Commit() = false, want true")
				}
			})
		})
	}
}

// A2: a mkdir beneath a lock that is being acquired waits for what becomes of it, and
// needs a lock of its own if that is nothing.
func TestCoveredMkdirWaitsForAcquisition(t *testing.T) {
	for name, over := range map[string]func(*lockstate.Grant){
		"acquired": func(g *lockstate.Grant) { g.Commit() },
		"given up": (*lockstate.Grant).Abort,
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, lockstate.Options{}, func(f *fixture) {
				g, err := f.Acquire(nil, f.request(f.parent, "d", lockstate.Explicit))
				if err != nil {
					f.Fatalf("Acquire(d) = %v, want a grant", err)
				}
				waiting := []*attempt{
					f.start(f.request(f.child, "d/x", lockstate.Implicit)),
					f.start(f.request(f.child, "d/y", lockstate.Implicit)),
				}
				for _, a := range waiting {
					f.waits(a, true, "the lock above is being acquired")
				}
				over(g)
				for _, a := range waiting {
					f.waits(a, false, "the lock above is decided about")
					if a.err != nil || a.grant.Covered() != (name == "acquired") {
						f.Fatalf("%s: Covered() = %t, %v", name, a.grant.Covered(), a.err)
					}
					a.grant.Commit()
				}
			})
		})
	}
}

// Tokens are reserved before one is given out; a store that blocks holds up
// neither changes nor releases.
func TestReserveBlocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var reserved uint64
		release := make(chan struct{})
		f := newFixture(t, lockstate.Options{LastToken: 7, Reserve: func(upTo uint64) error {
			<-release
			reserved = upTo
			return nil
		}})
		a := f.start(f.request(f.parent, "d", lockstate.Explicit))
		f.waits(a, true, "the store blocks")
		f.mayChange(f.stranger, "d")
		f.governs("d", 0)
		close(release)
		f.waits(a, false, "the store answered")
		l, ok := a.grant.Commit()
		if !ok || l.Token != 8 || reserved < l.Token {
			t.Errorf("Commit() = token %d, %v with %d reserved, want token 8, reserved before", l.Token, ok, reserved)
		}
	})
}

func TestReserveFails(t *testing.T) {
	broken := errors.New("disk full")
	fail := true
	f := newFixture(t, lockstate.Options{Reserve: func(uint64) error {
		if fail {
			return broken
		}
		return nil
	}})
	for range 2 {
		if _, err := f.try(f.parent, "d", lockstate.Explicit); !errors.Is(err, broken) {
			t.Fatalf("Acquire = %v, want %v", err, broken)
		}
		f.governs("d", 0)
		f.mayChange(f.stranger, "d")
	}
	fail = false
	if l := f.take(f.parent, "d", lockstate.Explicit); l.Token != 1 {
		t.Errorf("token = %d, want 1: what failed used none up", l.Token)
	}
}

// TestTokensGrowAcrossTables: tokens never go back, also not from one table to the
// next, as long as the mark is kept: the second begins above all that the first
// reserved.
func TestTokensGrowAcrossTables(t *testing.T) {
	var mark, last uint64
	reserve := func(upTo uint64) error {
		if upTo <= mark {
			t.Errorf("Reserve(%d) with %d reserved already: not ahead", upTo, mark)
		}
		mark = upTo
		return nil
	}
	for range 3 {
		f := newFixture(t, lockstate.Options{LastToken: mark, Reserve: reserve})
		for range 5000 { // more than one reservation
			l := f.take(f.parent, "d", lockstate.Explicit)
			if l.Token <= last || l.Token > mark {
				t.Fatalf("token %d after %d with %d reserved", l.Token, last, mark)
			}
			last = l.Token
			f.end(l.Token)
		}
	}
}

// Tokens that are used up end neither in a loop nor in lower ones: nobody gets a lock.
func TestTokensUsedUp(t *testing.T) {
	for _, last := range []uint64{lockstate.MemberBase - 1, math.MaxUint64 - 5, math.MaxUint64} {
		f := newFixture(t, lockstate.Options{LastToken: last})
		if l, err := f.try(f.parent, "d", lockstate.Explicit); !errors.Is(err, lockstate.ErrTokens) {
			t.Errorf("after token %d: token %d, %v, want ErrTokens", last, l.Token, err)
		}
	}
}

// The channels of Watch are closed at the first change, and at the end.
func TestWatch(t *testing.T) {
	bubble(t, lockstate.Options{Now: time.Now}, func(f *fixture) {
		l := f.take(f.parent, "d", lockstate.Implicit)
		if !l.Since.Equal(time.Now()) {
			t.Errorf("Since = %v, want %v", l.Since, time.Now())
		}
		isClosed := func(c <-chan struct{}) bool {
			select {
			case <-c:
				return true
			default:
				return false
			}
		}
		ended, changed := f.Table.Watch(l.Token)
		want := func(e, c bool) {
			t.Helper()
			if isClosed(ended) != e || isClosed(changed) != c {
				t.Errorf("ended, changed = %v, %v, want %v, %v", isClosed(ended), isClosed(changed), e, c)
			}
		}
		want(false, false)
		f.mayChange(f.child, "d/x")
		want(false, true)
		f.end(l.Token)
		want(true, true)
		ended, changed = f.Table.Watch(l.Token)
		want(true, true)
	})
}

// M4: a frozen table grants nothing, but ends and changes go on.
func TestFreeze(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	l := f.take(f.parent, "d", lockstate.Explicit)
	f.Freeze()
	if _, err := f.try(f.parent, "e", lockstate.Explicit); err != lockstate.ErrFrozen {
		t.Errorf("Acquire = %v, want %v", err, lockstate.ErrFrozen)
	}
	f.mayChange(f.parent, "d")
	f.mayNotChange(f.stranger, "d", l.Token)
	f.end(l.Token)
}

// H4: whoever cannot be known acquires nothing and holds nothing.
func TestNobody(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	for _, p := range []*procid.Process{nil, procid.Fake(procid.ID{}, nil)} {
		if _, err := f.Acquire(nil, f.request(p, "d", lockstate.Explicit)); err != lockstate.ErrNobody {
			t.Errorf("Acquire by nobody = %v, want %v", err, lockstate.ErrNobody)
		}
	}
	f.mayChange(nil, "d")
	h, err := f.OpenHandle(lockstate.Change{Dirs: []*lockstate.Dir{f.dir("d")}}, "f")
	if err != nil {
		t.Fatalf("OpenHandle by nobody of a free file = %v, want nil", err)
	}
	f.refused(f.parent, "d", lockstate.Explicit, lockstate.ErrOpen, 0)
	h.Close()
	l := f.take(f.parent, "d", lockstate.Explicit)
	f.mayNotChange(nil, "d", l.Token)
	if _, err := f.OpenHandle(lockstate.Change{Dirs: []*lockstate.Dir{f.dir("d")}}, "f"); !errors.Is(err, lockstate.ErrHeld) {
		t.Errorf("OpenHandle by nobody = %v, want %v", err, lockstate.ErrHeld)
	}
	if f.Holds(nil, f.dir("d")) {
		t.Errorf("Holds(nobody) = true, want false")
	}
}
