package lockstate_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

const (
	implicit = lockstate.Implicit
	explicit = lockstate.Explicit
)

// C3, C4: who may acquire what. Each case sets the scene and returns the token
// of the lock that is to be in the way, if any.
func TestMayAcquire(t *testing.T) {
	for _, c := range []struct {
		rule  string
		scene func(*fixture) uint64
		who   func(*fixture) *procid.Process
		kind  lockstate.Kind
		want  error
	}{
		{"C3a free", func(f *fixture) uint64 { return 0 }, parent, explicit, nil},
		{"C3a held by the caller", func(f *fixture) uint64 { return f.take(f.parent, "a/d", implicit).Token }, parent, explicit, nil},
		{"C3a held by an ancestor", func(f *fixture) uint64 { return f.take(f.parent, "a/d", implicit).Token }, grandchild, explicit, nil},
		{"C3a held by a descendant", func(f *fixture) uint64 { return f.take(f.child, "a/d", implicit).Token }, parent, explicit, lockstate.ErrHeld},
		{"C3a held by a stranger", func(f *fixture) uint64 { return f.take(f.stranger, "a/d", implicit).Token }, parent, explicit, lockstate.ErrHeld},
		{"C3a held by a stranger, mkdir", func(f *fixture) uint64 { return f.take(f.stranger, "a/d", explicit).Token }, parent, implicit, lockstate.ErrHeld},
		{"C3a a child stands in front", func(f *fixture) uint64 {
			f.take(f.parent, "a/d", implicit)
			return f.take(f.child, "a/d", explicit).Token
		}, parent, explicit, lockstate.ErrHeld},
		{"C3b held by the caller", func(f *fixture) uint64 { return f.take(f.parent, "a", explicit).Token }, parent, explicit, nil},
		{"C3b held by an ancestor", func(f *fixture) uint64 { return f.take(f.parent, "a", explicit).Token }, child, explicit, nil},
		{"C3b held by a stranger", func(f *fixture) uint64 { return f.take(f.stranger, "a", explicit).Token }, parent, explicit, lockstate.ErrHeld},
		{"C3b not committed yet", func(f *fixture) uint64 {
			if _, err := f.Acquire(nil, f.request(f.stranger, "a", explicit)); err != nil {
				f.Fatal(err)
			}
			return 1
		}, parent, explicit, lockstate.ErrHeld},
		{"C3b nearer held, further not", func(f *fixture) uint64 {
			f.take(f.child, "a/d", explicit)
			return f.take(f.parent, "a", explicit).Token
		}, grandchild, explicit, nil},
		{"C3c held by the caller", func(f *fixture) uint64 { return f.take(f.parent, "a/d/x/y", implicit).Token }, parent, explicit, nil},
		{"C3c held by a descendant", func(f *fixture) uint64 { return f.take(f.grandchild, "a/d/x/y", implicit).Token }, parent, explicit, nil},
		{"C3c held by an ancestor", func(f *fixture) uint64 { return f.take(f.parent, "a/d/x/y", implicit).Token }, child, explicit, lockstate.ErrHeld},
		{"C3c held by a stranger", func(f *fixture) uint64 { return f.take(f.stranger, "a/d/x/y", implicit).Token }, parent, explicit, lockstate.ErrHeld},
		{"C3c beside", func(f *fixture) uint64 { return f.take(f.stranger, "a/dd", explicit).Token }, parent, explicit, nil},
		{"C3d handle of the caller", func(f *fixture) uint64 { f.open(f.parent, "a/d/x"); return 0 }, parent, explicit, nil},
		{"C3d handle of a descendant", func(f *fixture) uint64 { f.open(f.grandchild, "a/d/x"); return 0 }, parent, explicit, nil},
		{"C3d handle of an ancestor", func(f *fixture) uint64 { f.open(f.parent, "a/d/x"); return 0 }, child, explicit, lockstate.ErrOpen},
		{"C3d handle of a stranger", func(f *fixture) uint64 { f.open(f.stranger, "a/d/x"); return 0 }, parent, explicit, lockstate.ErrOpen},
		{"C3d handle on the directory itself", func(f *fixture) uint64 { f.open(f.stranger, "a/d"); return 0 }, parent, explicit, lockstate.ErrOpen},
		{"C3d handle beside", func(f *fixture) uint64 { f.open(f.stranger, "a"); return 0 }, parent, explicit, nil},
		{"C3d handle closed", func(f *fixture) uint64 { f.open(f.stranger, "a/d/x").Close(); return 0 }, parent, explicit, nil},
		{"C3d handle of an unlinked file", func(f *fixture) uint64 { f.open(f.stranger, "a/d/x").Moved(""); return 0 }, parent, explicit, nil},
		{"C3d handle that came by rename", func(f *fixture) uint64 {
			f.open(f.stranger, "b").Moved("g", f.dir("a/d/x"))
			return 0
		}, parent, explicit, lockstate.ErrOpen},
		{"C3d handle with a second name", func(f *fixture) uint64 {
			f.open(f.stranger, "b").Moved("g", f.dir("b"), f.dir("a/d/x"))
			return 0
		}, parent, explicit, lockstate.ErrOpen},
		{"C3d handle of the holder who delegates", func(f *fixture) uint64 {
			f.take(f.parent, "a", explicit)
			f.open(f.parent, "a/d")
			return 0
		}, child, explicit, nil},
		{"C3d handle of another holder, a sibling", func(f *fixture) uint64 {
			f.take(f.parent, "a", explicit)
			f.open(newProc(150, 15, f.parent), "a/d")
			return 0
		}, child, explicit, nil},
		{"C3d handle of one who delegated to the holder", func(f *fixture) uint64 {
			f.open(f.parent, "a/d/x")
			f.take(f.parent, "a", explicit)
			f.take(f.child, "a/d", explicit) // this is the lock that governs a/d now
			return 0
		}, grandchild, explicit, lockstate.ErrOpen},
		{"C3d handle left open by a former owner", func(f *fixture) uint64 {
			l := f.take(f.stranger, "a/d", explicit)
			f.open(f.stranger, "a/d/x")
			f.end(l.Token)
			return 0
		}, parent, explicit, lockstate.ErrOpen}, // R8
		{"H1 the pid of the owner again", func(f *fixture) uint64 {
			again := newProc(f.parent.ID().Pid, 999, f.init)
			return f.take(again, "a/d", explicit).Token
		}, parent, explicit, lockstate.ErrHeld},
	} {
		t.Run(c.rule, func(t *testing.T) {
			f := newFixture(t, lockstate.Options{})
			token := c.scene(f)
			before := f.Len()
			_, err := f.try(c.who(f), "a/d", c.kind)
			if c.want == nil {
				if err != nil {
					t.Errorf("Acquire(a/d) = %v, want a grant", err)
				}
				return
			}
			f.wantError("Acquire", "a/d", err, c.want, token)
			if f.Len() != before {
				t.Errorf("Len() = %d after a refusal, want %d", f.Len(), before)
			}
		})
	}
}

func parent(f *fixture) *procid.Process     { return f.parent }
func child(f *fixture) *procid.Process      { return f.child }
func grandchild(f *fixture) *procid.Process { return f.grandchild }

// C1, W1: who may change what. The lock on a/d is the parent's.
func TestMayChange(t *testing.T) {
	for _, c := range []struct {
		rule  string
		who   func(*fixture) *procid.Process
		dirs  string // separated by blanks
		trees string
		ok    bool
	}{
		{"C1 in it, owner", parent, "a/d", "", true},
		{"C1 in it, descendant", grandchild, "a/d", "", true},
		{"C1 in it, stranger", stranger, "a/d", "", false},
		{"C1 beneath, stranger", stranger, "a/d/x/y", "", false},
		{"C1 beside", stranger, "a a/dd b .", "", true},
		{"W1 one of two names, stranger", stranger, "b a/d/x", "", false},
		{"C1 its name, stranger", stranger, "a", "a/d", false},
		{"C1 its name, owner", parent, "a", "a/d", true},
		{"C1 an ancestor's name, stranger", stranger, ".", "a", false},
		{"C1 an ancestor's name, holder", child, ".", "a", true},
		{"C1 a sibling's name, stranger", stranger, "a", "a/dd", true},
		{"H4 nobody", func(*fixture) *procid.Process { return nil }, "a/d", "", false},
		{"H4 nobody renames", func(*fixture) *procid.Process { return nil }, "a", "a/d", false},
	} {
		t.Run(c.rule, func(t *testing.T) {
			f := newFixture(t, lockstate.Options{})
			l := f.take(f.parent, "a/d", explicit)
			change := lockstate.Change{Process: c.who(f)}
			for path := range strings.FieldsSeq(c.dirs) {
				change.Dirs = append(change.Dirs, f.dir(path))
			}
			for path := range strings.FieldsSeq(c.trees) {
				change.Trees = append(change.Trees, f.dir(path))
			}
			op, err := f.Begin(change)
			op.End()
			if c.ok && err != nil {
				t.Errorf("Begin = %v, want nil", err)
			} else if !c.ok {
				f.wantError("Begin", c.dirs, err, lockstate.ErrHeld, l.Token)
			}
		})
	}
}

func stranger(f *fixture) *procid.Process { return f.stranger }

// Who asks is found out only where a lock makes it matter, and once.
func TestWho(t *testing.T) {
	for _, c := range []struct {
		name        string
		dirs, trees string
		who         func(*fixture) *procid.Process
		asked       int
		ok          bool
	}{
		{"free", "b", "", parent, 0, true},
		{"above", "a", "", parent, 0, true},
		{"free tree", ".", "b", parent, 0, true},
		{"owner", "a/d", "", parent, 1, true},
		{"descendant", "a/d/x", "", grandchild, 1, true},
		{"stranger", "b a/d", "", stranger, 1, false},
		{"nobody", "a/d", "", func(*fixture) *procid.Process { return nil }, 1, false},
		{"tree, owner", ".", "a", parent, 1, true},
		{"tree, descendant", ".", "a", grandchild, 1, true},
		{"tree, stranger", ".", "a", stranger, 1, false},
		{"tree, nobody", ".", "a", func(*fixture) *procid.Process { return nil }, 1, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFixture(t, lockstate.Options{})
			l := f.take(f.parent, "a/d", explicit)
			asked := 0
			change := lockstate.Change{Who: func() *procid.Process { asked++; return c.who(f) }}
			for path := range strings.FieldsSeq(c.dirs) {
				change.Dirs = append(change.Dirs, f.dir(path))
			}
			for path := range strings.FieldsSeq(c.trees) {
				change.Trees = append(change.Trees, f.dir(path))
			}
			op, err := f.Begin(change)
			op.End()
			if asked != c.asked {
				t.Errorf("Who was called %d times, want %d", asked, c.asked)
			}
			if c.ok && err != nil {
				t.Errorf("Begin = %v, want nil", err)
			} else if !c.ok {
				f.wantError("Begin", c.name, err, lockstate.ErrHeld, l.Token)
			}
		})
	}
}

// C2: a holder's child may lock a part; then it is the child's, and the
// parent's again when it ends.
func TestNearestLockDecides(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	upper := f.take(f.parent, "d", explicit)
	lower := f.take(f.child, "d/sub", explicit)
	f.governs("d/other", upper.Token)
	f.governs("d/sub/x", lower.Token)
	f.mayChange(f.grandchild, "d/sub")
	f.mayNotChange(f.parent, "d/sub", lower.Token)
	f.refused(f.parent, "d/sub/x", implicit, lockstate.ErrHeld, lower.Token)
	f.mayNotChange(f.stranger, "d/sub", lower.Token)
	f.end(lower.Token)
	f.mayChange(f.parent, "d/sub")
	f.mayNotChange(f.stranger, "d/sub", upper.Token)
}

// C4: the root is never locked.
func TestRootIsNeverLocked(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	f.refused(f.parent, ".", explicit, lockstate.ErrRoot, 0)
	f.refused(f.parent, ".", implicit, lockstate.ErrRoot, 0)
}

// A2: mkdir beneath a lock that the caller holds adds nothing.
func TestCoveredMkdir(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	l := f.take(f.parent, "d", implicit)
	for _, p := range []*procid.Process{f.parent, f.child} {
		g, err := f.Acquire(nil, f.request(p, "d/x", implicit))
		if err != nil || !g.Covered() {
			t.Fatalf("Acquire(d/x, implicit) = %v, want a covered grant", err)
		}
		if got, ok := g.Commit(); !ok || got.Token != 0 {
			t.Errorf("Commit() = token %d, %v, want 0, true", got.Token, ok)
		}
	}
	f.governs("d/x", l.Token)
	if f.Len() != 1 {
		t.Errorf("Len() = %d, want 1", f.Len())
	}
}

// A13, R5: what was changed under the implicit lock counts for the one that replaces
// it, also where that was somebody else's before.
func TestReplacedWithItsChanges(t *testing.T) {
	for _, changed := range []bool{false, true} {
		f := newFixture(t, lockstate.Options{})
		change := func() {
			if changed {
				f.mayChange(f.child, "d")
			}
		}
		wantPassed := func(p, heir *procid.Process, token uint64) {
			t.Helper()
			dead, _ := f.Exit(p.ID(), succeeded, alive(heir))
			if passed := f.owner(token) == heir.ID(); passed == changed || passed == (len(dead) > 0) {
				t.Errorf("changed: %t, handed over: %t, dead: %v", changed, passed, dead)
			}
		}
		f.take(f.child, "d", implicit)
		change()
		l := f.take(f.child, "d", explicit)
		wantPassed(f.child, f.parent, l.Token)
		f.end(l.Token)

		f.take(f.child, "d", implicit)
		change()
		l = f.take(f.grandchild, "d", explicit)
		if _, heirs := f.Exit(f.grandchild.ID(), succeeded, alive(f.child)); len(heirs) != 1 || f.Len() != 1 {
			t.Fatalf("the explicit lock passed to %v, and %d locks are there, want one", heirs, f.Len())
		}
		wantPassed(f.child, f.parent, l.Token)
	}
}

// A13, first half: the owner's explicit lock replaces the implicit one.
func TestExplicitReplacesImplicit(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	f.take(f.parent, "d", implicit)
	l := f.take(f.parent, "d", explicit)
	if on := f.On(f.dir("d")); len(on) != 1 || on[0].Token != l.Token {
		t.Errorf("On(d) = %v, want only token %d", on, l.Token)
	}
	if got, ok := f.ReleaseFile(f.dir("d"), "devserver"); !ok || got.Token != l.Token {
		t.Errorf("ReleaseFile = token %d, %v, want %d", got.Token, ok, l.Token)
	}
	f.governs("d", 0)
	f.mayChange(f.stranger, "d")
	if got := f.Stats().Ended; got[lockstate.Replaced] != 1 || got[lockstate.Unlinked] != 1 {
		t.Errorf("Stats().Ended = %v, want one replaced and one unlinked", got)
	}
}

// A13: until it is committed, the explicit lock replaces nothing.
func TestAbortedExplicitKeepsImplicit(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	l := f.take(f.parent, "d", implicit)
	g, err := f.Acquire(nil, f.request(f.parent, "d", explicit))
	if err != nil {
		t.Fatal(err)
	}
	g.Abort()
	f.governs("d", l.Token)
	f.mayNotChange(f.stranger, "d", l.Token)
}

// A5: nor does it end what the descriptor has that was to be converted.
func TestAbortedConversionKeepsKey(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	q := f.request(f.parent, "d", lockstate.Shared)
	q.Key = "key"
	g, err := f.Acquire(nil, q)
	if err != nil {
		t.Fatal(err)
	}
	l, _ := g.Commit()
	q.Kind = explicit
	if g, err = f.Acquire(nil, q); err != nil {
		t.Fatal(err)
	}
	g.Abort()
	f.governs("d", l.Token)
	if got, ended := f.ReleaseKey("key"); !ended || got.Token != l.Token {
		t.Errorf("ReleaseKey = token %d, %v, want %d", got.Token, ended, l.Token)
	}
	f.governs("d", 0)
}

// C3a: what a child shares is its parent's still, to a stranger: he does not share it,
// nor does he get it alone by converting what he shares because its owner let him.
func TestSharedInFront(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	a := f.take(f.parent, "d", implicit)
	b := f.take(f.child, "d", lockstate.Shared)
	f.refused(f.stranger, "d", lockstate.Shared, lockstate.ErrHeld, a.Token)
	c := f.take(f.grandchild, "d", lockstate.Shared)
	f.mayNotChange(f.parent, "d", c.Token)

	own := f.take(f.parent, "d", lockstate.Shared)
	theirs := f.take(f.stranger, "d", lockstate.Shared)
	for _, l := range []lockstate.Lock{b, c, own} {
		f.end(l.Token)
	}
	f.refused(f.stranger, "d", explicit, lockstate.ErrHeld, a.Token)
	f.refused(newProc(201, 21, f.init), "d", lockstate.Shared, lockstate.ErrHeld, a.Token)
	f.end(theirs.Token)
	f.mayChange(f.parent, "d")
}

// A5: what its owner locks alone by something else stands in front of what it shares by a
// descriptor, which counts again when that ends. What it converts is replaced.
func TestSharedBehind(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	q := f.request(f.parent, "d", lockstate.Shared)
	q.Key = "shared"
	g, err := f.Acquire(closed, q)
	if err != nil {
		t.Fatal(err)
	}
	shared, _ := g.Commit()
	own := f.take(f.parent, "d", explicit)
	f.mayChange(f.parent, "d")
	f.refused(f.stranger, "d", lockstate.Shared, lockstate.ErrHeld, own.Token)
	if l, ok := f.ReleaseFile(f.dir("d"), "devserver"); !ok || l.Token != own.Token {
		t.Errorf("ReleaseFile = token %d, %v, want %d", l.Token, ok, own.Token)
	}
	f.governs("d", shared.Token)
	f.mayNotChange(f.stranger, "d", shared.Token)
	f.mayNotChange(f.parent, "d", shared.Token)

	q.Kind = explicit
	if g, err = f.Acquire(closed, q); err != nil {
		t.Fatal(err)
	}
	g.Commit()
	f.mayChange(f.parent, "d")
	f.ReleaseKey("shared")
	f.governs("d", 0)
}

// A13, second half: a child's explicit lock stands in front of the row, which
// counts again when that ends; and a grandchild's in front of both.
func TestStackedRows(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	a := f.take(f.parent, "d", implicit)
	b := f.take(f.child, "d", explicit)
	c := f.take(f.grandchild, "d", explicit)
	if diff := cmp.Diff([]uint64{a.Token, b.Token, c.Token}, tokensOf(f.On(f.dir("d")))); diff != "" {
		t.Errorf("On(d) (-want +got):\n%s", diff)
	}
	f.mayNotChange(f.parent, "d", c.Token)
	f.mayNotChange(f.child, "d", c.Token)
	if l, ok := f.ReleaseFile(f.dir("d"), "devserver"); !ok || l.Token != c.Token {
		t.Errorf("ReleaseFile = token %d, want the one in front, %d", l.Token, c.Token)
	}
	f.mayChange(f.child, "d")
	c = f.take(f.grandchild, "d", explicit)
	f.end(b.Token) // from the middle
	f.mayNotChange(f.child, "d", c.Token)
	f.end(c.Token)
	f.governs("d", a.Token)
	f.mayChange(f.parent, "d")
	f.mayChange(f.child, "d")
	f.mayNotChange(f.stranger, "d", a.Token)
}

// R1: who takes its lock again by a second lock file keeps it until both are
// gone.
func TestSecondLockFile(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	l := f.take(f.parent, "d", explicit)
	for range 2 { // the same one twice counts once
		g, err := f.Acquire(nil, lockstate.Request{Process: f.parent, Dir: f.dir("d"), Kind: explicit, File: "devserver.lock"})
		if err != nil {
			t.Fatal(err)
		}
		if again, ok := g.Commit(); !ok || again.Token != l.Token {
			t.Errorf("second Commit() = token %d, %v, want the same, %d", again.Token, ok, l.Token)
		}
		g.Abort() // too late, and not its own
	}
	if _, ok := f.ReleaseFile(f.dir("d"), "other"); ok {
		t.Errorf("ReleaseFile of an unknown file = true, want false")
	}
	if _, ok := f.ReleaseFile(f.dir("d"), "devserver"); ok {
		t.Errorf("ReleaseFile of the first of two = true, want false")
	}
	f.mayNotChange(f.stranger, "d", l.Token)
	if got, ok := f.ReleaseFile(f.dir("d"), "devserver.lock"); !ok || got.Token != l.Token {
		t.Errorf("ReleaseFile of the last = token %d, %v, want %d", got.Token, ok, l.Token)
	}
	f.governs("d", 0)
}

// A6: each lock file that its owner made by opening it waits for the lock on its
// descriptor, whatever the lock was taken by; one made in another way keeps it.
func TestOpenedLockFiles(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	d := f.dir("d")
	take := func(protocol, file string, key any, k lockstate.Kind) lockstate.Lock {
		t.Helper()
		g, err := f.Acquire(nil, lockstate.Request{Process: f.parent, Dir: d, Kind: k, Protocol: protocol, File: file, Key: key})
		if err != nil {
			t.Fatal(err)
		}
		l, _ := g.Commit()
		return l
	}
	for _, k := range []lockstate.Kind{explicit, lockstate.Shared} {
		take("fcntl", "a", 1, k)
		take("open", "b", nil, explicit)
		take("fcntl", "b", 2, k)
		f.ReleaseKey(2)
		f.ReleaseKey(1)
		f.governs("d", 0)
	}
	take("open", "a", nil, explicit)
	l := take("create", "b", nil, explicit)
	take("fcntl", "b", 1, explicit)
	take("fcntl", "a", 2, explicit)
	f.ReleaseKey(2)
	f.ReleaseKey(1)
	f.governs("d", l.Token)
	f.ReleaseFile(d, "b")
	f.governs("d", 0)
}

// A6: a lock file that is made anew where one was, whose end was not told, is what it is made
// by now.
func TestOpenedLockFileAnew(t *testing.T) {
	for _, protocols := range [][2]string{{"open", "create"}, {"create", "open"}} {
		f := newFixture(t, lockstate.Options{})
		take := func(protocol string, key any) lockstate.Lock {
			t.Helper()
			return f.commit(lockstate.Request{Process: f.parent, Dir: f.dir("d"), Kind: explicit, Protocol: protocol, File: "a", Key: key})
		}
		take(protocols[0], nil)
		l := take(protocols[1], nil)
		take("flock", 1)
		f.ReleaseKey(1)
		if _, kept := f.Lock(l.Token); kept != (protocols[1] == "create") {
			t.Errorf("by %s, then by %s: it keeps the lock: %t", protocols[0], protocols[1], kept)
		}
	}
}

// A6: so does a scope's, for who made it; for whoever else of the scope locks a descriptor
// of that file it is none that waits.
func TestOpenedLockFileOfAnother(t *testing.T) {
	scope := lockstate.Scope{Kind: lockstate.GroupScope, ID: "7"}
	f := newFixture(t, lockstate.Options{Claims: func(_ *procid.Process, c lockstate.Claim) (bool, error) { return c.Scope == scope, nil }})
	d := f.dir("d")
	take := func(p *procid.Process, q lockstate.Request) lockstate.Lock {
		t.Helper()
		q.Process, q.Dir = p, d
		g, err := f.Acquire(nil, q)
		if err != nil {
			t.Fatal(err)
		}
		l, _ := g.Commit()
		return l
	}
	own := take(f.parent, lockstate.Request{Kind: explicit, Protocol: "open", File: "a"})
	shared := take(f.parent, lockstate.Request{Kind: lockstate.Shared, Protocol: "flock", File: "b", Key: 1, Scope: scope})
	take(f.parent, lockstate.Request{Kind: explicit, Protocol: "command", Command: true, Scope: scope})
	locks := func(p *procid.Process, key int) {
		t.Helper()
		if l := take(p, lockstate.Request{Kind: lockstate.Shared, Protocol: "flock", File: "a", Key: key, Scope: scope}); l.Token != shared.Token {
			t.Fatalf("token %d, want the scope's %d", l.Token, shared.Token)
		}
	}
	locks(f.stranger, 2)
	if l, ok := f.Lock(own.Token); !ok || !slices.Equal(l.Files, []string{"a"}) {
		t.Errorf("another one's lock: %+v, %v", l, ok)
	}
	locks(f.parent, 3)
	if l, ok := f.Lock(own.Token); ok {
		t.Errorf("its own: %+v, want none", l)
	}
}

// R1: the lock may end between the grant and the commit of a second file.
func TestSecondLockFileComesTooLate(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	f.take(f.parent, "d", explicit)
	g, err := f.Acquire(nil, lockstate.Request{Process: f.parent, Dir: f.dir("d"), Kind: explicit, File: "devserver.lock"})
	if err != nil {
		t.Fatal(err)
	}
	f.ReleaseFile(f.dir("d"), "devserver")
	if _, ok := g.Commit(); ok {
		t.Errorf("Commit() = true, want false")
	}
	f.governs("d", 0)
}

// R5: the chain of hand-overs goes from parent to parent as recorded at the
// acquisition, and ends at a reaper.
func TestHandOverAgainAndAgain(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	l := f.take(f.grandchild, "d", implicit)
	everyone := alive(f.parent, f.child, f.grandchild, f.init)
	for _, step := range []struct{ from, to *procid.Process }{{f.grandchild, f.child}, {f.child, f.parent}} {
		dead, heirs := f.Exit(step.from.ID(), succeeded, everyone)
		if len(dead) != 0 || !slices.Equal(heirs, []procid.ID{step.to.ID()}) {
			t.Fatalf("Exit(%v) = dead %v, heirs %v, want %v to inherit", step.from.ID(), dead, heirs, step.to.ID())
		}
		if got := f.owner(l.Token); got != step.to.ID() {
			t.Errorf("owner = %v, want %v", got, step.to.ID())
		}
		if f.Owns(step.from.ID()) || !f.Owns(step.to.ID()) {
			t.Errorf("Owns(%v), Owns(%v) = %v, %v, want false, true", step.from.ID(), step.to.ID(), f.Owns(step.from.ID()), f.Owns(step.to.ID()))
		}
	}
	f.mayNotChange(f.stranger, "d", l.Token)
	dead, heirs := f.Exit(f.parent.ID(), succeeded, everyone)
	if len(heirs) != 0 || len(dead) != 1 || dead[0].Token != l.Token {
		t.Errorf("Exit below init = dead %v, heirs %v, want the lock dead", dead, heirs)
	}
	f.mayNotChange(f.stranger, "d", l.Token) // until it is cleaned up (R4)
	f.end(l.Token)
	f.mayChange(f.stranger, "d")
	if got := f.Stats().HandedOver; got != 2 {
		t.Errorf("Stats().HandedOver = %d, want 2", got)
	}
}

// R4, R5: what passes to the parent and what does not.
func TestHandOver(t *testing.T) {
	for _, c := range []struct {
		name   string
		how    procid.Exit
		scene  func(*fixture) // after the child has its lock on d
		passes bool
	}{
		{"success", succeeded, nil, true},
		{"unknown status", procid.Exit{}, nil, true},
		{"unheard status", procid.Exit{Missed: true}, nil, false},
		{"failure", procid.Exit{Known: true, Code: 1}, nil, false},
		{"signal", procid.Exit{Known: true, Signal: 9}, nil, false},
		{"changed", succeeded, func(f *fixture) { f.mayChange(f.child, "d") }, false},
		{"changed beneath", succeeded, func(f *fixture) { f.mayChange(f.child, "d/x/y") }, false},
		{"changed by a child", succeeded, func(f *fixture) { f.mayChange(f.grandchild, "d") }, false},
		{"changed and status unknown", procid.Exit{}, func(f *fixture) { f.mayChange(f.child, "d") }, false},
		{"opened for writing", succeeded, func(f *fixture) { f.open(f.child, "d") }, false},
		{"changed beside", succeeded, func(f *fixture) { f.mayChange(f.child, "e") }, true},
		{"refused a stranger", succeeded, func(f *fixture) { f.mayNotChange(f.stranger, "d", 1) }, true},
		{"quiet change", succeeded, func(f *fixture) {
			op, err := f.Begin(lockstate.Change{Process: f.child, Dirs: []*lockstate.Dir{f.dir("d")}, Quiet: true})
			op.End()
			if err != nil {
				f.Fatal(err)
			}
		}, true},
		{"mkdir in it", succeeded, func(f *fixture) { f.take(f.child, "d/x", implicit) }, true},
		{"parent is gone", succeeded, func(f *fixture) { f.parent = newProc(100, 77, f.init) }, false}, // pid reused
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFixture(t, lockstate.Options{})
			heir := f.parent.ID()
			l := f.take(f.child, "d", implicit)
			if c.scene != nil {
				c.scene(f)
			}
			dead, heirs := f.Exit(f.child.ID(), c.how, alive(f.parent, f.init))
			if c.passes {
				if len(dead) != 0 || !slices.Equal(heirs, []procid.ID{heir}) || f.owner(l.Token) != heir {
					t.Errorf("Exit = dead %v, heirs %v, want %v to inherit", dead, heirs, heir)
				}
				return
			}
			if len(heirs) != 0 || len(dead) != 1 || dead[0].Token != l.Token {
				t.Errorf("Exit = dead %v, heirs %v, want the lock dead", dead, heirs)
			}
		})
	}
}

// R5: init and subreapers inherit nothing.
func TestReaperInheritsNothing(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	reaper := procid.FakeReaper(procid.ID{Pid: 50, Start: 5}, f.parent)
	p := newProc(51, 6, reaper)
	l := f.take(p, "d", implicit)
	dead, heirs := f.Exit(p.ID(), succeeded, alive(f.init, f.parent, reaper))
	if len(heirs) != 0 || len(dead) != 1 || dead[0].Token != l.Token {
		t.Errorf("Exit = dead %v, heirs %v, want the lock dead", dead, heirs)
	}
}

// R5: nor is inherited what its owner watches. What somebody else watches is.
func TestWatchedInheritsNobody(t *testing.T) {
	for _, owner := range []bool{true, false} {
		f := newFixture(t, lockstate.Options{})
		l, other := f.take(f.child, "d", explicit), f.take(f.child, "other", explicit)
		by := f.child
		if !owner {
			by = f.parent
		}
		f.WatchedBy(l.Token, by.ID())
		dead, heirs := f.Exit(f.child.ID(), succeeded, alive(f.init, f.parent))
		if ended := len(dead) == 1 && dead[0].Token == l.Token; ended != owner || len(heirs) != 1 || f.owner(other.Token) != f.parent.ID() {
			t.Errorf("watched by the owner: %v: Exit = dead %v, heirs %v", owner, dead, heirs)
		}
	}
}

// R4: an exit during an acquisition passes nothing on, and the commit that
// comes after the clean-up fails.
func TestExitDuringAcquisition(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	g, err := f.Acquire(nil, f.request(f.child, "d", explicit))
	if err != nil {
		t.Fatal(err)
	}
	dead, heirs := f.Exit(f.child.ID(), succeeded, alive(f.parent))
	if len(heirs) != 0 || len(dead) != 1 {
		t.Fatalf("Exit = dead %v, heirs %v, want the lock dead", dead, heirs)
	}
	f.end(dead[0].Token)
	if _, ok := g.Commit(); ok {
		t.Errorf("Commit() = true, want false")
	}
	g.Abort()
	f.governs("d", 0)
}

// R5: of several locks of one owner, each goes its own way.
func TestExitOfSeveralLocks(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	kept := f.take(f.child, "kept", implicit)
	changed := f.take(f.child, "changed", implicit)
	f.mayChange(f.child, "changed")
	other := f.take(f.stranger, "other", implicit)
	if diff := cmp.Diff([]uint64{kept.Token, changed.Token}, tokensOf(f.Owned(f.child.ID()))); diff != "" {
		t.Errorf("Owned (-want +got):\n%s", diff)
	}
	dead, heirs := f.Exit(f.child.ID(), succeeded, alive(f.parent))
	if diff := cmp.Diff([]uint64{changed.Token}, tokensOf(dead)); diff != "" {
		t.Errorf("dead locks (-want +got):\n%s", diff)
	}
	if !slices.Equal(heirs, []procid.ID{f.parent.ID()}) || f.owner(kept.Token) != f.parent.ID() || f.owner(other.Token) != f.stranger.ID() {
		t.Errorf("heirs %v, owners %v and %v", heirs, f.owner(kept.Token), f.owner(other.Token))
	}
}

// H2: a descendant that was seen stays a holder when its parents have died and
// nothing leads from it to the owner any more; one that was never seen does
// not become one.
func TestReparentedDescendants(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	l := f.take(f.parent, "d", explicit)
	f.mayChange(f.grandchild, "d")
	orphan := newProc(f.grandchild.ID().Pid, f.grandchild.ID().Start, f.init)
	f.mayChange(orphan, "d")
	f.mayChange(newProc(160, 16, orphan), "d")
	f.mayNotChange(newProc(161, 17, f.init), "d", l.Token)
	reused := newProc(f.grandchild.ID().Pid, 1234, f.init)
	f.mayNotChange(reused, "d", l.Token) // H1
}

// C3b: every lock above counts, not only the nearest. The re-parented process
// holds that one only.
func TestEveryLockAboveCounts(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	f.take(f.child, "d/sub", explicit)
	f.mayChange(f.grandchild, "d/sub")
	upper := f.take(f.parent, "d", explicit)
	orphan := newProc(f.grandchild.ID().Pid, f.grandchild.ID().Start, f.init)
	f.mayChange(orphan, "d/sub/x")
	f.refused(orphan, "d/sub/x", explicit, lockstate.ErrHeld, upper.Token)
}

// C1: every lock beneath what is renamed or removed counts, in whatever order they
// are come to.
func TestEveryLockBeneathCounts(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	others := f.take(f.stranger, "up/others", explicit)
	for i := range 16 {
		f.take(f.parent, fmt.Sprintf("up/own%d", i), explicit)
	}
	for range 8 {
		_, err := f.Begin(lockstate.Change{
			Process: f.parent, Dirs: []*lockstate.Dir{f.Root()}, Trees: []*lockstate.Dir{f.dir("up")},
		})
		f.wantError("Begin", "up", err, lockstate.ErrHeld, others.Token)
	}
}

// W3: nothing enters a locked directory that a process which does not hold it
// can still write to.
func TestEntering(t *testing.T) {
	type entry struct {
		files []*lockstate.Handle
		tree  string
	}
	for _, c := range []struct {
		name   string
		locked string
		scene  func(*fixture) entry
		ok     bool
	}{
		{"file, not open", "d", func(f *fixture) entry { return entry{} }, true},
		{"file, open by the mover", "d", func(f *fixture) entry { return entry{files: []*lockstate.Handle{f.open(f.parent, "out")}} }, true},
		{"file, open by a holder", "d", func(f *fixture) entry { return entry{files: []*lockstate.Handle{f.open(f.child, "out")}} }, true},
		{"file, open by a stranger", "d", func(f *fixture) entry {
			return entry{files: []*lockstate.Handle{f.open(f.parent, "out"), f.open(f.stranger, "out")}}
		}, false},
		{"file, into a free directory", "e", func(f *fixture) entry { return entry{files: []*lockstate.Handle{f.open(f.stranger, "out")}} }, true},
		{"file, lock further up", ".", func(f *fixture) entry { return entry{files: []*lockstate.Handle{f.open(f.stranger, "out")}} }, true},
		{"tree, nothing open", "d", func(f *fixture) entry { return entry{tree: "out/t"} }, true},
		{"tree, open by a holder", "d", func(f *fixture) entry { f.open(f.child, "out/t/x"); return entry{tree: "out/t"} }, true},
		{"tree, open by a stranger", "d", func(f *fixture) entry { f.open(f.stranger, "out/t/x"); return entry{tree: "out/t"} }, false},
		{"tree, open beside it", "d", func(f *fixture) entry { f.open(f.stranger, "out"); return entry{tree: "out/t"} }, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFixture(t, lockstate.Options{})
			e := c.scene(f)
			if c.locked != "." {
				f.take(f.parent, c.locked, explicit)
			}
			change := lockstate.Change{
				Process: f.parent, Dirs: []*lockstate.Dir{f.dir("out"), f.dir("d/in")},
				Into: f.dir("d/in"), Files: e.files,
			}
			if e.tree != "" {
				change.EnteringTree = f.dir(e.tree)
				change.Trees = []*lockstate.Dir{f.dir(e.tree)}
			}
			op, err := f.Begin(change)
			op.End()
			if c.ok && err != nil {
				t.Errorf("Begin = %v, want nil", err)
			} else if !c.ok {
				f.wantError("Begin", "d/in", err, lockstate.ErrOpen, 0)
			}
		})
	}
}

// W4: with DenyUnlocked, writing needs a lock; taking one does not.
func TestDenyUnlocked(t *testing.T) {
	f := newFixture(t, lockstate.Options{DenyUnlocked: true})
	d := []*lockstate.Dir{f.dir("d")}
	if _, err := f.Begin(lockstate.Change{Process: f.parent, Dirs: d}); !errors.Is(err, lockstate.ErrUnlocked) {
		t.Errorf("Begin without a lock = %v, want %v", err, lockstate.ErrUnlocked)
	}
	if _, err := f.OpenHandle(lockstate.Change{Process: f.parent, Dirs: d}, "f"); !errors.Is(err, lockstate.ErrUnlocked) {
		t.Errorf("OpenHandle without a lock = %v, want %v", err, lockstate.ErrUnlocked)
	}
	op, err := f.Begin(lockstate.Change{Process: f.parent, Dirs: d, Free: true})
	op.End()
	if err != nil {
		t.Errorf("Begin of a step of an acquisition = %v, want nil", err)
	}
	l := f.take(f.parent, "d", explicit)
	f.mayChange(f.parent, "d/x")
	f.mayNotChange(f.stranger, "d/x", 1)

	// C1: its own lock covers its name, as long as there is one.
	name := lockstate.Change{Dirs: []*lockstate.Dir{f.Root()}, Trees: d, Named: d[0]}
	for _, tt := range []struct {
		p    *procid.Process
		want error
	}{{f.child, nil}, {f.stranger, lockstate.ErrHeld}} {
		name.Process = tt.p
		op, err := f.Begin(name)
		op.End()
		if !errors.Is(err, tt.want) {
			t.Errorf("Begin of a rename by %v = %v, want %v", tt.p.ID(), err, tt.want)
		}
	}
	f.end(l.Token)
	if _, err := f.Begin(name); !errors.Is(err, lockstate.ErrUnlocked) {
		t.Errorf("Begin of a rename without a lock = %v, want %v", err, lockstate.ErrUnlocked)
	}
}

// R3: a removal ends the locks beneath; a rename carries them along.
func TestRemove(t *testing.T) {
	var ended []string
	f := newFixture(t, lockstate.Options{Notify: func(e lockstate.Event) {
		if e.Event == lockstate.EventReleased {
			ended = append(ended, fmt.Sprint(e.Dir, " ", e.Token))
		}
	}})
	f.Listen(1)
	kept := f.take(f.parent, "a/kept", explicit)
	f.take(f.parent, "a/d", implicit)
	f.take(f.child, "a/d", explicit)
	f.take(f.child, "a/d/x", explicit)
	f.take(f.grandchild, "a/d/x/y", explicit)
	h := f.open(f.grandchild, "a/d/x")
	f.Remove(f.dir("a/d"))
	slices.Sort(ended)
	if diff := cmp.Diff([]string{"a/d 2", "a/d 3", "a/d/x 4", "a/d/x/y 5"}, ended); diff != "" {
		t.Errorf("Remove(a/d): ended locks (-want +got):\n%s", diff)
	}
	if f.Len() != 1 {
		t.Errorf("Len() = %d, want 1", f.Len())
	}
	f.governs("a/d", 0) // a new directory of that name
	f.governs("a/kept", kept.Token)
	f.refused(f.stranger, "a", explicit, lockstate.ErrHeld, kept.Token)
	f.end(kept.Token)
	f.take(f.stranger, "a", explicit) // the handle is on a file without a name
	h.Close()
}

func TestMoveCarriesLocks(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	outer := f.take(f.parent, "a/d", explicit)
	inner := f.take(f.child, "a/d/x", explicit)
	h := f.open(f.child, "a/d/x/y")
	f.Move(f.dir("a/d"), f.dir("b/c"), "e")
	f.governs("a/d/x", 0)
	f.governs("b/c/e", outer.Token)
	f.governs("b/c/e/x/y", inner.Token)
	if l, _ := f.Table.Lock(inner.Token); l.Path != "b/c/e/x" {
		t.Errorf("path = %q, want b/c/e/x", l.Path)
	}
	f.take(f.stranger, "a", explicit)
	f.end(outer.Token)
	f.refused(f.stranger, "b", explicit, lockstate.ErrHeld, inner.Token)
	f.end(inner.Token)
	f.refused(f.stranger, "b", explicit, lockstate.ErrOpen, 0)
	h.Close()
	f.take(f.stranger, "b", explicit)
}

func TestExchange(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	l := f.take(f.parent, "a/d/x", explicit)
	f.Exchange(f.dir("a/d"), f.dir("b"))
	f.governs("a/d/x", 0)
	f.governs("b/x", l.Token)
}

// A rename onto a directory ends what was there.
func TestMoveOntoDirectory(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	f.take(f.parent, "old", explicit)
	l := f.take(f.parent, "new", explicit)
	f.Move(f.dir("new"), f.Root(), "old")
	f.governs("old", l.Token)
	if f.Len() != 1 {
		t.Errorf("Len() = %d, want 1", f.Len())
	}
}

// A12: the lock that a chain of mkdirs began with.
func TestChain(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	l := f.take(f.parent, "a", implicit)
	got, names, ok := f.Chain(f.parent, f.dir("a/b/c"))
	if !ok || got.Token != l.Token || !slices.Equal(names, []string{"b", "c"}) {
		t.Errorf("Chain(a/b/c) = token %d, %v, %v, want %d, [b c], true", got.Token, names, ok, l.Token)
	}
	for name, c := range map[string]struct {
		p    *procid.Process
		path string
	}{
		"another process": {f.child, "a/b/c"}, "the locked one itself": {f.parent, "a"}, "elsewhere": {f.parent, "x/y"}, "root": {f.parent, "."},
	} {
		if _, _, ok := f.Chain(c.p, f.dir(c.path)); ok {
			t.Errorf("Chain, %s = true, want false", name)
		}
	}
	f.take(f.parent, "a", explicit)
	if _, _, ok := f.Chain(f.parent, f.dir("a/b/c")); ok {
		t.Errorf("Chain below an explicit lock = true, want false")
	}
}

// A12: an implicit lock under which nothing was changed may still be narrowed.
func TestSettling(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	settling := func(want bool) {
		t.Helper()
		var held *lockstate.HeldError
		if err := f.change(f.stranger, "d/x"); !errors.As(err, &held) || held.Settling != want {
			t.Errorf("Begin = %+v, want Settling %v", held, want)
		}
	}
	l := f.take(f.parent, "d", implicit)
	settling(true)
	f.mayChange(f.parent, "d")
	settling(false)
	f.end(l.Token)
	f.take(f.parent, "d", explicit)
	settling(false)
}

// What listings show (R8, W6).
func TestListings(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	l := f.take(f.parent, "d", implicit)
	f.open(f.parent, "d/x")
	if left := f.LeftOpen(); len(left) != 0 {
		t.Errorf("LeftOpen() = %v, want none while the lock lives", left)
	}
	if locks := f.Locks(); len(locks) != 1 || len(locks[0].Blockers) != 0 {
		t.Errorf("Locks() = %+v, want one without blockers", locks)
	}
	c := f.take(f.child, "d", explicit) // delegated: the parent's handle stays
	locks := f.Locks()
	if len(locks) != 2 || len(locks[1].Blockers) != 1 {
		t.Errorf("Locks() = %+v, want the child's last, with one blocker", locks)
	}
	if foreign := f.Foreign(f.parent); len(foreign) != 1 || foreign[0].Token != c.Token {
		t.Errorf("Foreign(parent) = %v, want the child's lock", foreign)
	}
	if foreign := f.Foreign(nil); len(foreign) != 1 || foreign[0].Token != c.Token {
		t.Errorf("Foreign(nobody) = %v, want the one in force", foreign)
	}
	f.end(c.Token)
	f.end(l.Token)
	left := f.LeftOpen()
	if len(left) != 1 || left[0].Path != "d/x/f" || left[0].Owner != f.parent.ID() {
		t.Errorf("LeftOpen() = %+v, want d/x/f of the parent", left)
	}
	err := f.change(f.stranger, "d")
	if err != nil {
		t.Errorf("Begin = %v, want nil", err)
	}
	_, err = f.try(f.stranger, "d", explicit)
	if want := `"d/x/f" is open for writing by another process (pid 100)`; err == nil || err.Error() != want {
		t.Errorf("Acquire = %v, want %s", err, want)
	}
}

// A13, R8: a handle is no left-over when its opener holds the directory again
// by another lock.
func TestReplacedLockLeavesNothingOpen(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	f.take(f.parent, "d", implicit)
	f.open(f.child, "d")
	l := f.take(f.parent, "d", explicit)
	if left := f.LeftOpen(); len(left) != 0 {
		t.Errorf("LeftOpen() = %+v, want none: the opener still holds d", left)
	}
	f.end(l.Token)
	if left := f.LeftOpen(); len(left) != 1 {
		t.Errorf("LeftOpen() = %+v, want the handle", left)
	}
}
