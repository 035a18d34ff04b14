package lockstate_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
	"github.com/stagefs/stagefs/lockstate/storetest"
)

// leases is a fixture whose deadlines are on the bubble's clock, and whose
// processes carry what the test says.
type leases struct {
	*fixture
	mu      sync.Mutex
	carried map[procid.ID]lockstate.Claim
	asked   int
	busy    error // why it can't be said what anybody carries
}

func newLeases(t *testing.T) *leases {
	f := &leases{carried: make(map[procid.ID]lockstate.Claim)}
	start := time.Now()
	f.fixture = newFixture(t, lockstate.Options{
		Clock: func() time.Duration { return time.Since(start) },
		// The wall clock goes wild: no deadline depends on it (L4).
		Now: func() time.Time { return time.Unix(rand.Int64N(1<<32), 0) },
		Claims: func(p *procid.Process, c lockstate.Claim) (holds bool, unsure error) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.asked++
			has := f.carried[p.ID()]
			holds = c.Client != "" && has.Client == c.Client && (has.UID == c.UID || has.UID == 0) || c.Scope.Kind != 0 && has.Scope == c.Scope
			return holds && f.busy == nil, f.busy
		},
	})
	return f
}

func (f *leases) lease(p *procid.Process, path, client string, ttl time.Duration) (lockstate.Lock, error) {
	g, err := f.Acquire(closed, lockstate.Request{
		Process: p, Dir: f.dir(path), Kind: lockstate.Explicit, Protocol: "command", Command: true,
		Client: client, UID: 1000, TTL: ttl,
	})
	if err != nil {
		return lockstate.Lock{}, err
	}
	l, ok := g.Commit()
	if !ok {
		f.Errorf("Commit() = false, want true")
	}
	return l, nil
}

func (f *leases) mustLease(p *procid.Process, path, client string, ttl time.Duration) lockstate.Lock {
	f.Helper()
	l, err := f.lease(p, path, client, ttl)
	if err != nil {
		f.Fatalf("lease of %s for %q = %v, want a grant", path, client, err)
	}
	return l
}

// L1: the deadline ends a lease for everybody at once, carried out or not, and
// nothing brings it back.
func TestL1Deadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newLeases(t)
		l := f.mustLease(f.child, "a", "x", time.Second)
		h := f.open(f.child, "a")
		if at, ok := f.NextDeadline(); !ok || at != l.Deadline || l.TTL != time.Second {
			t.Errorf("NextDeadline() = %v, %v, want %v", at, ok, l.Deadline)
		}
		time.Sleep(time.Second - 1)
		f.mayChange(f.child, "a")
		if op, err := h.Begin(); err != nil {
			t.Errorf("a write before the deadline: %v", err)
		} else {
			op.End()
		}
		if len(f.Expired()) != 0 {
			t.Errorf("expired before its time: %v", f.Expired())
		}
		time.Sleep(time.Nanosecond)
		f.mayNotChange(f.child, "a", l.Token)
		if _, err := h.Begin(); !errors.Is(err, lockstate.ErrRevoked) {
			t.Errorf("a write at the deadline: %v, want ErrRevoked", err)
		}
		for name, err := range map[string]error{
			"Renew":    second(f.Renew(f.dir("a"), "x", 1000, time.Hour)),
			"Join":     second(f.Join(f.stranger, f.dir("a"), "x", 1000, nil)),
			"OfClient": second(f.OfClient(f.dir("a"), "x", 1000)),
		} {
			if !errors.Is(err, lockstate.ErrNoLock) {
				t.Errorf("%s at the deadline = %v, want ErrNoLock", name, err)
			}
		}
		f.Touch(f.dir("a"), f.child)
		if got := f.Expired(); len(got) != 1 || got[0].Token != l.Token {
			t.Errorf("Expired() = %v, want token %d", got, l.Token)
		}
		// Neither the same client nor another one gets it before it is
		// carried out; then both could.
		_, err := f.lease(f.child, "a", "x", 0)
		f.wantError("Acquire", "a", err, lockstate.ErrHeld, l.Token)
		f.Table.EndAs(l.Token, lockstate.Ending{Reason: lockstate.Expired})
		if !h.Revoked() {
			t.Error("the handle is not revoked")
		}
		next := f.mustLease(f.stranger, "a", "y", 0)
		if next.TTL != lockstate.DefaultTTL || next.Token <= l.Token {
			t.Errorf("the next lease: %+v", next)
		}
	})
}

func second[T any](_ T, err error) error { return err }

// L1: the same client re-enters, renews, and is alone with its lease.
func TestL1Reentry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newLeases(t)
		l := f.mustLease(f.child, "a", "x", time.Second)
		for range 64 {
			time.Sleep(900 * time.Millisecond)
			if _, err := f.Renew(f.dir("a"), "x", 1000, 0); err != nil {
				t.Fatalf("Renew() = %v", err)
			}
		}
		time.Sleep(900 * time.Millisecond)
		again := f.mustLease(f.stranger, "a", "x", 0)
		if again.Token != l.Token || again.TTL != time.Second || again.Deadline != f.Clock()+time.Second {
			t.Errorf("re-entry: %+v, want token %d and a second from now", again, l.Token)
		}
		f.mayChange(f.stranger, "a") // it has taken it, too
		for _, p := range []*procid.Process{f.parent, f.child, f.grandchild} {
			_, err := f.lease(p, "a", "y", 0)
			f.wantError("Acquire", "a", err, lockstate.ErrHeld, l.Token)
		}
		// Behind a child's lock it is still the one lease.
		own := f.request(f.grandchild, "a", lockstate.Explicit)
		own.Command, own.File = true, ""
		g, err := f.Acquire(closed, own)
		if err != nil {
			t.Fatal(err)
		}
		behind, _ := g.Commit()
		if again := f.mustLease(f.grandchild, "a", "x", 0); again.Token != l.Token {
			t.Errorf("re-entry behind another lock: token %d, want %d", again.Token, l.Token)
		}
		f.end(behind.Token)
		if _, err := f.Renew(f.dir("a"), "x", 1001, 0); !errors.Is(err, lockstate.ErrNotYours) {
			t.Errorf("Renew by another user = %v, want ErrNotYours", err)
		}
		// Root's request is for the client that is there.
		g, err = f.Acquire(closed, lockstate.Request{Process: f.stranger, Dir: f.dir("a"), Kind: lockstate.Explicit, Command: true, Client: "x"})
		if err != nil {
			t.Fatal(err)
		}
		if l2, _ := g.Commit(); l2.Token != l.Token || l2.UID != 1000 {
			t.Errorf("root's re-entry: %+v, want token %d of user 1000", l2, l.Token)
		}
		// A process is known by more than its pid (H1).
		late := newProc(f.stranger.ID().Pid, 99, f.init)
		f.mayNotChange(late, "a", l.Token)
		// The death of who took it ends nothing.
		if dead, _ := f.Exit(f.child.ID(), procid.Exit{}, alive()); len(dead) != 0 || f.Owns(f.child.ID()) {
			t.Errorf("Exit() = %v, want nothing", dead)
		}
		f.governs("a", l.Token)
	})
}

// TestL2Again: a descriptor that keeps a lease locks again. That renews it for a holder,
// but makes no holder of who has only the descriptor.
func TestL2Again(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newLeases(t)
		l := f.mustLease(f.parent, "a", "x", time.Second)
		again := func(p *procid.Process) lockstate.Lock {
			q := f.request(p, "a", lockstate.Explicit)
			q.Protocol, q.File, q.Key = "flock", "", "description"
			g, err := f.Acquire(closed, q)
			if err != nil {
				t.Fatalf("Acquire() = %v", err)
			}
			got, ok := g.Commit()
			if !ok || got.Token != l.Token {
				t.Errorf("Commit() = %+v, %v, want token %d", got, ok, l.Token)
			}
			return got
		}
		again(f.child)
		time.Sleep(time.Second / 2)
		if got := again(f.child); got.Deadline != f.Clock()+time.Second {
			t.Errorf("Deadline = %v at %v, want a second from then", got.Deadline, f.Clock())
		}
		time.Sleep(time.Second / 2)
		if got := again(f.stranger); got.Deadline != f.Clock()+time.Second/2 {
			t.Errorf("Deadline = %v at %v, want half a second from then", got.Deadline, f.Clock())
		}
		f.mayNotChange(f.stranger, "a", l.Token)
	})
}

// TestL1ReentryLate: who takes its lease again too late, as making the lock file took its
// time, does not renew what has ended for everybody already.
func TestL1ReentryLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newLeases(t)
		l := f.mustLease(f.parent, "d", "ci-1", time.Second)
		g, err := f.Acquire(closed, lockstate.Request{
			Process: f.parent, Dir: f.dir("d"), Kind: explicit, Protocol: "create", File: "devserver",
		})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		if expired := f.Expired(); len(expired) != 1 || expired[0].Token != l.Token {
			t.Fatalf("Expired() = %v, want token %d", expired, l.Token)
		}
		if got, ok := g.Commit(); ok {
			t.Errorf("Commit() after the deadline = token %d, true, want false", got.Token)
		}
		if err := f.EndAs(l.Token, lockstate.Ending{Reason: lockstate.Expired}); err != nil {
			t.Error(err)
		}
		if again := f.mustLease(f.parent, "d", "ci-1", time.Second); again.Token == l.Token {
			t.Errorf("the next lease has token %d as well", again.Token)
		}
	})
}

// A refusal says whether it may be for want of knowledge of what the process carries.
func TestL2Unsure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newLeases(t)
		f.mustLease(f.child, "a", "x", time.Minute)
		f.take(f.parent, "b", lockstate.Explicit)
		f.carried[f.stranger.ID()] = lockstate.Claim{Client: "x", UID: 1000}
		refusal := func(path string, want error) {
			t.Helper()
			in := []*lockstate.Dir{f.dir(path)}
			_, begin := f.Begin(lockstate.Change{Process: f.stranger, Dirs: in})
			_, open := f.OpenHandle(lockstate.Change{Process: f.stranger, Dirs: in}, "f")
			q := lockstate.Request{Process: f.stranger, Dir: in[0], Kind: lockstate.Explicit, Protocol: "create"}
			_, acquire := f.Acquire(closed, q)
			for what, err := range map[string]error{"Begin": begin, "OpenHandle": open, "Acquire": acquire, "Probe": f.Probe(q)} {
				var held *lockstate.HeldError
				if !errors.As(err, &held) || held.Unsure != want {
					t.Errorf("%s(%s) = %+v, want a refusal with Unsure %v", what, path, err, want)
				}
			}
		}
		f.busy = procid.ErrBusy
		refusal("a", f.busy)
		refusal("b", nil)
		f.busy = nil
		f.mayChange(f.stranger, "a")
	})
}

// L2: who carries the ID of a lease that is about to be granted does not hold what somebody
// else has until then, whatever asks; L3: and what is opened until then can be revoked by both.
func TestL2Pending(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newLeases(t)
		held := f.take(f.parent, "a", lockstate.Explicit)
		f.carried[f.stranger.ID()] = lockstate.Claim{Client: "x", UID: 1000}
		g, err := f.Acquire(closed, lockstate.Request{
			Process: f.child, Dir: f.dir("a"), Kind: lockstate.Explicit, Protocol: "command", Command: true, Client: "x", UID: 1000,
		})
		if err != nil {
			t.Fatal(err)
		}
		all := func(p *procid.Process) [3]bool {
			foreign := slices.ContainsFunc(f.Foreign(p), func(l lockstate.Lock) bool { return l.Token == held.Token })
			return [3]bool{f.Holds(p, f.dir("a")), f.HoldsAll(p, f.dir("a")), foreign}
		}
		if got, want := all(f.stranger), [3]bool{true, false, true}; got != want {
			t.Errorf("of the client, Holds, HoldsAll and whether the other lock is Foreign: %v, want %v", got, want)
		}
		if got, want := all(f.child), [3]bool{true, true, false}; got != want {
			t.Errorf("of a holder of both: %v, want %v", got, want)
		}
		g.Commit()
		if got, want := all(f.stranger), [3]bool{true, true, false}; got != want {
			t.Errorf("of the client, once it has the lease: %v, want %v", got, want)
		}

		l := f.mustLease(f.child, "b", "y", time.Minute)
		g, err = f.Acquire(closed, f.request(f.grandchild, "b", lockstate.Explicit))
		if err != nil {
			t.Fatal(err)
		}
		h := f.open(f.grandchild, "b")
		g.Abort()
		f.EndAs(l.Token, lockstate.Ending{Reason: lockstate.Broken})
		if !h.Revoked() {
			t.Error("what was opened under a lease is not revoked with it, since a lock was about to be granted in front of it")
		}
	})
}

// L2: claims are looked up only where a refusal depends on them, and who was
// found once is not asked again.
func TestL2Claims(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newLeases(t)
		l := f.mustLease(f.child, "a", "x", time.Minute)
		f.take(f.parent, "b", lockstate.Explicit)
		f.mayNotChange(f.stranger, "b", f.governing("b"))
		f.mayChange(f.child, "a")
		f.mayChange(f.grandchild, "a")
		if f.asked != 0 {
			t.Errorf("asked %d times, want never", f.asked)
		}
		f.mayNotChange(f.stranger, "a", l.Token)
		if f.asked != 1 {
			t.Errorf("asked %d times about a stranger, want once", f.asked)
		}
		f.carried[f.stranger.ID()] = lockstate.Claim{Client: "x", UID: 1001}
		f.mayNotChange(f.stranger, "a", l.Token)
		f.carried[f.stranger.ID()] = lockstate.Claim{Client: "x", UID: 1000}
		f.mayChange(f.stranger, "a/b/c")
		f.asked = 0
		f.mayChange(f.stranger, "a")
		h := f.open(f.stranger, "a")
		if f.asked != 0 || !h.Revocable() {
			t.Errorf("asked %d times about a known holder; revocable: %t", f.asked, h.Revocable())
		}
		heir := newProc(300, 30, f.stranger)
		f.mayChange(heir, "a")
		// What a holder makes beneath is covered (A2), and its lock file is
		// the lease's.
		if got := f.take(heir, "a/sub", lockstate.Implicit); got.Token != 0 {
			t.Errorf("mkdir beneath a lease made token %d", got.Token)
		}
		if got := f.take(heir, "a", lockstate.Explicit); got.Token != l.Token || !slices.Equal(got.Files, []string{"devserver"}) {
			t.Errorf("the holder's lock file: %+v, want one of the lease", got)
		}
		if _, ended := f.ReleaseFile(f.dir("a"), "devserver"); ended {
			t.Error("the lease ended with the lock file")
		}
	})
}

func (f *leases) governing(path string) uint64 {
	l, _ := f.Governing(f.dir(path))
	return l.Token
}

// C3d: what the client's processes have open already is no obstacle to its
// lease; what others have is.
func TestL2Openers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newLeases(t)
		h := f.open(f.stranger, "a")
		_, err := f.lease(f.child, "a", "x", 0)
		f.wantError("Acquire", "a", err, lockstate.ErrOpen, 0)
		f.carried[f.stranger.ID()] = lockstate.Claim{Client: "x", UID: 1000}
		f.mustLease(f.child, "a", "x", 0)
		h.Close()
	})
}

// What is in the way may be the client's own: the refusal says so if that can't be
// said, also where a file came in after the request was admitted.
func TestL2OpenersUnsure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newLeases(t)
		f.carried[f.stranger.ID()] = lockstate.Claim{Client: "x", UID: 1000}
		f.busy = procid.ErrBusy
		want := func(what string, err error, unsure error) {
			t.Helper()
			var held *lockstate.HeldError
			if !errors.As(err, &held) || held.Err != lockstate.ErrOpen || held.Unsure != unsure {
				t.Errorf("%s = %+v, want %v with Unsure %v", what, err, lockstate.ErrOpen, unsure)
			}
		}
		h := f.open(f.stranger, "a")
		_, err := f.lease(f.child, "a", "x", 0)
		want("Acquire", err, procid.ErrBusy)
		_, err = f.try(f.child, "a", lockstate.Explicit)
		want("Acquire for a process alone", err, nil)

		// It comes in while the request waits for what is under way, or later.
		q := lockstate.Request{Process: f.child, Kind: lockstate.Explicit, Protocol: "command", Command: true, Client: "x", UID: 1000}
		acquire := func(path string) (*lockstate.Grant, error) {
			op, err := f.Begin(lockstate.Change{Process: f.parent, Dirs: []*lockstate.Dir{f.dir(path)}})
			if err != nil {
				t.Fatal(err)
			}
			go func() {
				synctest.Wait()
				h.Moved("f", f.dir("a"), f.dir(path))
				op.End()
			}()
			q.Dir = f.dir(path)
			return f.Acquire(nil, q)
		}
		_, err = acquire("b")
		want("Acquire that waited", err, procid.ErrBusy)
		f.busy = nil
		h.Moved("f", f.dir("b"), f.dir("a"))
		g, err := acquire("c")
		if err != nil {
			t.Fatalf("Acquire where it is known = %v, want a grant", err)
		}
		g.Abort()
		h.Moved("f", f.dir("c"), f.dir("a"))
		q.Dir = f.dir("d")
		if g, err = f.Acquire(closed, q); err != nil {
			t.Fatal(err)
		}
		f.busy = procid.ErrBusy
		h.Moved("f", f.dir("a"), f.dir("d"))
		want("Confirm", g.Confirm(), procid.ErrBusy)
		f.busy = nil
		if err := g.Confirm(); err != nil {
			t.Errorf("Confirm where it is known = %v, want nil", err)
		}
		g.Abort()
		h.Close()
	})
}

// H3: a scope's lock passes from one that stands for it to the next, and all
// that were in it are one owner.
func TestH3Represent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newLeases(t)
		scope := lockstate.Scope{Kind: lockstate.GroupScope, ID: "100"}
		for _, p := range []*procid.Process{f.parent, f.stranger} {
			f.carried[p.ID()] = lockstate.Claim{Scope: scope}
		}
		q := f.request(f.parent, "a", lockstate.Implicit)
		q.Scope = scope
		g, err := f.Acquire(closed, q)
		if err != nil {
			t.Fatal(err)
		}
		l, _ := g.Commit()
		f.mayChange(f.stranger, "a")
		f.mayChange(f.child, "a")
		other := newProc(400, 40, f.init)
		f.mayNotChange(other, "a", l.Token)
		// The lock file of another member replaces the row (A13).
		q = f.request(f.stranger, "a", lockstate.Explicit)
		q.Scope = scope
		if g, err = f.Acquire(closed, q); err != nil {
			t.Fatal(err)
		}
		l, _ = g.Commit()
		if on := f.On(f.dir("a")); len(on) != 1 || on[0].Token != l.Token {
			t.Errorf("On() = %v, want token %d alone", on, l.Token)
		}
		dead, heirs := f.Exit(f.stranger.ID(), succeeded, alive(f.init, f.parent))
		if len(dead) != 1 || len(heirs) != 0 || dead[0].Scope != scope {
			t.Fatalf("Exit() = %v, %v, want the scope's lock", dead, heirs)
		}
		if ended, ok := f.Represent(l.Token, f.parent); ended != nil || !ok || f.owner(l.Token) != f.parent.ID() || f.Owns(f.stranger.ID()) {
			t.Errorf("the owner is %v, want %v", f.owner(l.Token), f.parent.ID())
		}
		f.mayChange(newProc(500, 50, f.stranger), "a") // a descendant of one that held
	})
}

// TestH3Bereft: who comes into a scope while the death of its last one is carried out, and
// takes the directory, has it: nothing of that ends with the dead one.
func TestH3Bereft(t *testing.T) {
	for name, doomed := range map[string]bool{"before it is doomed": false, "after it is": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newLeases(t)
				scope := lockstate.Scope{Kind: lockstate.CgroupScope, ID: "/x", Born: 1}
				take := func(p *procid.Process, key string) lockstate.Lock {
					t.Helper()
					f.carried[p.ID()] = lockstate.Claim{Scope: scope}
					q := f.request(p, "a", lockstate.Explicit)
					q.Scope, q.Key, q.OnCrash = scope, key, lockstate.Destroy
					g, err := f.Acquire(closed, q)
					if err != nil {
						t.Fatal(err)
					}
					l, ok := g.Commit()
					if !ok {
						t.Fatal("Commit() = false, want true")
					}
					return l
				}
				first := take(f.parent, "1")
				f.Exit(f.parent.ID(), procid.Exit{Known: true, Signal: 9}, alive())
				if doomed {
					if keys, ok := f.DoomOf(first.Token, f.parent.ID()); !ok || len(keys) != 1 || keys[0] != "1" {
						t.Errorf("DoomOf() = %v, %t, want its key", keys, ok)
					}
				}
				l := take(f.stranger, "2")
				if !doomed {
					if keys, ok := f.DoomOf(first.Token, f.parent.ID()); ok || keys != nil {
						t.Errorf("DoomOf() of what another process owns = %v, %t, want false", keys, ok)
					}
				}
				if doomed {
					if s, ok := f.Seal(first.Token); !ok || !s.InUse {
						t.Errorf("Seal() = %+v, %t, want it in use", s, ok)
					}
					f.end(first.Token)
				}
				if f.owner(l.Token) != f.stranger.ID() {
					t.Errorf("token %d is owned by %v, want %v", l.Token, f.owner(l.Token), f.stranger.ID())
				}
				f.mayChange(f.stranger, "a")
				f.mayNotChange(newProc(400, 40, f.init), "a", l.Token)
				if err := f.Check(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// Two requests of one client at once make one lease.
func TestL1Twins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newLeases(t)
		op, err := f.Begin(lockstate.Change{Process: f.parent, Dirs: []*lockstate.Dir{f.dir("a")}})
		if err != nil {
			t.Fatal(err)
		}
		tokens := make(chan uint64, 2)
		for _, p := range []*procid.Process{f.child, f.stranger} {
			go func() {
				g, err := f.Acquire(nil, lockstate.Request{Process: p, Dir: f.dir("a"), Kind: lockstate.Explicit, Command: true, Client: "x", UID: 1000})
				if err != nil {
					t.Errorf("Acquire() = %v", err)
					tokens <- 0
					return
				}
				l, _ := g.Commit()
				tokens <- l.Token
			}()
		}
		synctest.Wait()
		op.End()
		if a, b := <-tokens, <-tokens; a != b || a == 0 {
			t.Errorf("tokens %d and %d, want the same", a, b)
		}
	})
}

// TestL1Sealed: what is sealed before its end takes no other lease's deadline along.
func TestL1Sealed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newLeases(t)
		leases := []lockstate.Lock{
			f.mustLease(f.child, "a", "x", time.Second),
			f.mustLease(f.child, "b", "x", 2*time.Second),
			f.mustLease(f.child, "c", "x", 3*time.Second),
		}
		for i, l := range leases {
			if at, ok := f.NextDeadline(); !ok || at != l.Deadline {
				t.Errorf("%d ended: NextDeadline() = %v, %t, want %v", i, at, ok, l.Deadline)
			}
			if _, ok := f.Seal(l.Token); !ok {
				t.Errorf("Seal(%d) = false, want true", l.Token)
			}
			f.Table.EndAs(l.Token, lockstate.Ending{Reason: lockstate.Expired})
		}
	})
}

// TestL2Join: each process that joins a lease holds it, however many do.
func TestL2Join(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newLeases(t)
		f.mustLease(f.child, "a", "x", time.Second)
		var joined []*procid.Process
		for i := range 3 {
			p := newProc(400+i, 40, f.init)
			if _, err := f.Join(p, f.dir("a"), "x", 1000, nil); err != nil {
				t.Fatalf("Join() = %v, want nil", err)
			}
			joined = append(joined, p)
		}
		for _, p := range joined {
			f.mayChange(p, "a")
		}
	})
}

// TestL1Model drives leases against a model of them: a map of deadlines.
func TestL1Model(t *testing.T) {
	type held struct {
		client   string
		deadline time.Duration
		token    uint64
		ttl      time.Duration
	}
	for seed := range uint64(50) {
		synctest.Test(t, func(t *testing.T) {
			f := newLeases(t)
			r := rand.New(rand.NewPCG(seed, 5))
			model := make(map[string]*held)
			dirs, clients := []string{"a", "b", "c"}, []string{"x", "y", "z"}
			procs := map[string]*procid.Process{"x": f.child, "y": f.stranger, "z": newProc(300, 30, f.init)}
			delete(procs, "")
			for step := range 400 {
				d, c := dirs[r.IntN(3)], clients[r.IntN(3)]
				m := model[d]
				live := m != nil && f.Clock() < m.deadline
				mine := live && m.client == c
				switch what := r.IntN(6); what {
				case 0:
					time.Sleep(time.Duration(r.IntN(40)) * time.Millisecond)
				case 1:
					ttl := time.Duration(10+r.IntN(100)) * time.Millisecond
					l, err := f.lease(procs[c], d, c, ttl)
					switch {
					case err == nil && m != nil && !mine:
						t.Fatalf("step %d: %s got %s over %+v", step, c, d, m)
					case err != nil && (m == nil || mine):
						t.Fatalf("step %d: %s was refused %s: %v", step, c, d, err)
					case mine && l.Token != m.token:
						t.Fatalf("step %d: re-entry has token %d, want %d", step, l.Token, m.token)
					case err == nil:
						model[d] = &held{c, f.Clock() + ttl, l.Token, ttl}
					}
				case 2:
					_, err := f.Renew(f.dir(d), c, 1000, 0)
					if (err == nil) != mine {
						t.Fatalf("step %d: renewal by %s of %+v = %v", step, c, m, err)
					}
					if mine {
						m.deadline = f.Clock() + m.ttl
					}
				case 3:
					if err := f.change(procs[c], d); (err == nil) != (m == nil || mine) {
						t.Fatalf("step %d: a change by %s under %+v = %v", step, c, m, err)
					}
				case 4:
					var want []uint64
					for _, m := range model {
						if f.Clock() >= m.deadline {
							want = append(want, m.token)
						}
					}
					var got []uint64
					for _, l := range f.Expired() {
						got = append(got, l.Token)
						f.EndAs(l.Token, lockstate.Ending{Reason: lockstate.Expired})
						delete(model, l.Path)
					}
					slices.Sort(got)
					slices.Sort(want)
					if !slices.Equal(got, want) {
						t.Fatalf("step %d: expired %v, want %v", step, got, want)
					}
				case 5:
					if mine && r.IntN(3) == 0 {
						f.end(m.token)
						delete(model, d)
					}
				}
				if err := f.Check(); err != nil {
					t.Fatalf("step %d: %v", step, err)
				}
			}
		})
	}
}

// Events come in the order of what happened, and every lock that was acquired
// ends once.
func TestEvents(t *testing.T) {
	var all []string
	f := newFixture(t, lockstate.Options{Notify: func(e lockstate.Event) {
		all = append(all, fmt.Sprintf("%s %s %d %s", e.Event, e.Dir, e.Token, e.Reason))
	}})
	f.take(f.parent, "unheard", lockstate.Explicit)
	f.Listen(1)
	a := f.take(f.parent, "a", lockstate.Implicit)
	f.take(f.parent, "a", lockstate.Explicit)
	f.refused(f.stranger, "a", lockstate.Explicit, lockstate.ErrHeld, a.Token+1)
	f.Tell(f.dir("a/b"), lockstate.Event{Event: lockstate.EventWaiting})
	f.Table.End(a.Token+1, lockstate.Broken)
	b := f.take(f.grandchild, "b", lockstate.Explicit)
	f.Exit(f.grandchild.ID(), succeeded, alive(f.child))
	f.Remove(f.dir("b"))
	f.Listen(-1)
	f.take(f.parent, "c", lockstate.Explicit)
	want := []string{
		fmt.Sprintf("acquired a %d ", a.Token),
		fmt.Sprintf("acquired a %d ", a.Token+1),
		fmt.Sprintf("released a %d replaced", a.Token),
		"waiting a/b 0 ",
		fmt.Sprintf("broken a %d broken", a.Token+1),
		fmt.Sprintf("lost a %d broken", a.Token+1),
		fmt.Sprintf("acquired b %d ", b.Token),
		fmt.Sprintf("handed-over b %d ", b.Token),
		fmt.Sprintf("released b %d removed", b.Token),
	}
	if !slices.Equal(all, want) {
		t.Errorf("events:\n%q, want\n%q", all, want)
	}
}

// A syncing store counts what it was asked to bring to the disk.
type syncing struct {
	*storetest.Memory
	syncs int
}

func (s *syncing) Sync() error {
	s.syncs++
	return s.Memory.Sync()
}

// L1, S1: what a client was told of the time of its lease outlives a power cut;
// renewals, one a second, wait for no disk as long as that stays.
func TestL1RenewDurable(t *testing.T) {
	s := &syncing{Memory: storetest.NewMemory()}
	f := newFixture(t, lockstate.Options{Store: s, Reserve: s.Reserve})
	take := func(ttl time.Duration) {
		g, err := f.Acquire(nil, lockstate.Request{
			Process: f.child, Dir: f.dir("a"), Kind: lockstate.Explicit, Protocol: "command", Command: true, Client: "x", UID: 1000, TTL: ttl,
		})
		if err != nil {
			t.Fatal(err)
		}
		g.Commit()
	}
	for _, step := range []struct {
		what  string
		do    func()
		syncs int
	}{
		{"acquire", func() { take(20 * time.Second) }, 1},
		{"enter again", func() { take(20 * time.Second) }, 0},
		{"enter again with another time", func() { take(30 * time.Second) }, 1},
		{"renew", func() { f.Renew(f.dir("a"), "x", 1000, 0) }, 0},
		{"renew with the same time", func() { f.Renew(f.dir("a"), "x", 1000, 30*time.Second) }, 0},
		{"renew with another time", func() { f.Renew(f.dir("a"), "x", 1000, time.Hour) }, 1},
	} {
		before := s.syncs
		step.do()
		if got := s.syncs - before; got != step.syncs {
			t.Errorf("%s: %d times brought to the disk, want %d", step.what, got, step.syncs)
		}
	}
}

// retaken is a lease of D that is being ended, and the one that its client has taken instead.
func (f *leases) retaken() (old, again lockstate.Lock) {
	f.Helper()
	old = f.mustLease(f.parent, "D", "x", time.Minute)
	f.Doom(old.Token)
	again = f.mustLease(f.parent, "D", "x", time.Minute)
	if again.Token == old.Token {
		f.Fatalf("taken again: token %d, want another one", again.Token)
	}
	return old, again
}

// TestLeaseRetaken: a client that takes its lease again while it is ended has
// another one, and that is the one it renews.
func TestLeaseRetaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newLeases(t)
		_, again := f.retaken()
		if err := f.Check(); err != nil {
			t.Errorf("Check() = %v, want nil", err)
		}
		if l, err := f.Renew(f.dir("D"), "x", 1000, 0); err != nil || l.Token != again.Token {
			t.Errorf("Renew() = token %d, %v, want %d", l.Token, err, again.Token)
		}
	})
}

// TestLeaseRetakenRemains: a client has one lease when one that was to be ended was not,
// whenever it has taken it again meanwhile, and however often (I9).
func TestLeaseRetakenRemains(t *testing.T) {
	for name, scene := range map[string]func(f *leases, old, again lockstate.Lock){
		"half-way": func(f *leases, old, again lockstate.Lock) {
			f.Doom(again.Token)
			g, err := f.Acquire(closed, lockstate.Request{
				Process: f.parent, Dir: f.dir("D"), Kind: lockstate.Explicit, Protocol: "command", Command: true, Client: "x", UID: 1000,
			})
			if err != nil {
				f.Fatal(err)
			}
			f.Remains(again.Token)
			g.Commit()
			f.End(old.Token, lockstate.Given)
		},
		"twice": func(f *leases, old, again lockstate.Lock) {
			f.Doom(again.Token)
			if _, err := f.lease(f.parent, "D", "x", time.Minute); err != nil {
				f.Fatal(err)
			}
			f.End(again.Token, lockstate.Given)
			f.Remains(old.Token)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newLeases(t)
				old, again := f.retaken()
				scene(f, old, again)
				if all := f.Locks(); len(all) != 1 {
					t.Errorf("locks: %+v, want one", all)
				}
				if err := f.Check(); err != nil {
					t.Errorf("Check() = %v, want nil", err)
				}
			})
		})
	}
}

// TestL2Sealed: who carries the ID of a lease that holds for nobody any more, as what was made
// under it is cleared away, is refused at once (R7).
func TestL2Sealed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newLeases(t)
		l := f.mustLease(f.child, "a", "x", time.Minute)
		f.carried[f.stranger.ID()] = lockstate.Claim{Client: "x", UID: 1000}
		f.Seal(l.Token)
		f.mayNotChange(f.stranger, "a", l.Token)
		f.refused(f.stranger, "a", lockstate.Explicit, lockstate.ErrHeld, l.Token)
		if f.Holds(f.stranger, f.dir("a")) {
			t.Error("Holds() = true, want false")
		}
	})
}
