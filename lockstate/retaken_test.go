package lockstate_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// grant acquires a directory and does not commit.
func (f *fixture) grant(q lockstate.Request) *lockstate.Grant {
	f.Helper()
	g, err := f.Acquire(closed, q)
	if err != nil {
		f.Fatalf("Acquire(%v, %v) = %v, want a grant", q.Process.ID(), q.Kind, err)
	}
	return g
}

// keyed asks for D, kept by a lock on a descriptor.
func (f *fixture) keyed(p *procid.Process, k lockstate.Kind, key string) lockstate.Request {
	q := f.request(p, "D", k)
	q.Protocol, q.File, q.Key = "flock", "", key
	return q
}

// commit is grant that is acquired.
func (f *fixture) commit(q lockstate.Request) lockstate.Lock {
	f.Helper()
	l, ok := f.grant(q).Commit()
	if !ok {
		f.Fatal("Commit() = false, want true")
	}
	return l
}

// TestA5Converting: as long as who shares a directory is only about to have it alone, it is
// shared: his child does not get it in front of that.
func TestA5Converting(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	shared := f.commit(f.keyed(f.parent, lockstate.Shared, "1"))
	alone := f.grant(f.keyed(f.parent, lockstate.Explicit, "1"))
	f.refused(f.child, "D", lockstate.Explicit, lockstate.ErrHeld, shared.Token)
	alone.Abort()
	f.mayNotChange(f.child, "D", shared.Token)
}

// TestA7Remains: a lock that a command keeps is kept by it too when it was to end and did not,
// if its owner has taken it again meanwhile.
func TestA7Remains(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	q := f.request(f.parent, "D", lockstate.Explicit)
	f.commit(q)
	q.Protocol, q.File, q.Command, q.Why, q.OnCrash = "command", "", true, "build", lockstate.Destroy
	first := f.commit(q)
	f.Doom(first.Token)
	again := f.commit(f.keyed(f.parent, lockstate.Explicit, "1"))
	f.Remains(first.Token)
	f.ReleaseFile(f.dir("D"), "devserver")
	f.ReleaseKey("1")
	if l, ok := f.Lock(again.Token); !ok || !l.Command || l.Why != "build" || l.OnCrash != lockstate.Destroy {
		t.Errorf("without its file and its descriptor: %+v, %t, want it kept by the command", l, ok)
	}
}

// doomedByTwo is a lock on D that two lock files keep, and that is about to end.
func doomedByTwo(t *testing.T) (*fixture, lockstate.Lock) {
	f := newFixture(t, lockstate.Options{})
	q := f.request(f.parent, "D", lockstate.Explicit)
	f.commit(q)
	q.File = "devserver.lock"
	l := f.commit(q)
	f.Doom(l.Token)
	return f, l
}

// TestR1Remains: of a lock that was to end, and did not, the lock files that were removed
// before that failed keep nothing: it ends with the last one (R1).
func TestR1Remains(t *testing.T) {
	f, l := doomedByTwo(t)
	f.Remains(l.Token, "devserver")
	if now, ok := f.Lock(l.Token); !ok || len(now.Files) != 1 || now.Files[0] != "devserver.lock" {
		t.Errorf("after Remains: %+v, %t, want it kept by devserver.lock", now, ok)
	}
	if now, ok := f.ReleaseFile(f.dir("D"), "devserver.lock"); !ok || now.Token != l.Token {
		t.Errorf("ReleaseFile() = %+v, %t, want the end of token %d", now, ok, l.Token)
	}
}

// TestR1RemainsNothing: so it does where its owner removes the last one before that is known.
func TestR1RemainsNothing(t *testing.T) {
	f, l := doomedByTwo(t)
	f.ReleaseFile(f.dir("D"), "devserver.lock")
	f.Remains(l.Token, "devserver")
	if now, ok := f.Lock(l.Token); ok {
		t.Errorf("after Remains: %+v, want none", now)
	}
}

// TestLeaseRemains: a lease that was to end and did not is its client's still, whatever a
// process of that has taken meanwhile for itself (L1).
func TestLeaseRemains(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newLeases(t)
		l := f.mustLease(f.parent, "D", "x", time.Minute)
		f.Doom(l.Token)
		own := f.commit(f.keyed(f.parent, lockstate.Explicit, "1"))
		f.Remains(l.Token)
		f.ReleaseKey("1")
		if now, err := f.Renew(f.dir("D"), "x", 1000, 0); err != nil || now.Token != l.Token || own.Token == l.Token {
			t.Errorf("Renew() = token %d, %v, want %d", now.Token, err, l.Token)
		}
	})
}

// TestLeaseSharedLate: a client that shares a directory again after its deadline waits until
// the end of its lease is carried out, and has one lease then (I9).
func TestLeaseSharedLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newLeases(t)
		q := lockstate.Request{
			Process: f.parent, Dir: f.dir("D"), Kind: lockstate.Shared, Protocol: "command", Command: true,
			Client: "x", UID: 1000, TTL: time.Second,
		}
		first := f.commit(q)
		time.Sleep(time.Second)
		_, err := f.Acquire(closed, q)
		f.wantError("Acquire", "D", err, lockstate.ErrHeld, first.Token)
		f.EndAs(first.Token, lockstate.Ending{Reason: lockstate.Expired})
		again := f.commit(q)
		if l, err := f.Renew(f.dir("D"), "x", 1000, 0); err != nil || l.Token != again.Token {
			t.Errorf("Renew() = token %d, %v, want %d", l.Token, err, again.Token)
		}
	})
}

// TestLeaseHalfWay: a lease that was to end and did not is one beside the one that its client
// is about to have instead (I9): Check knows that.
func TestLeaseHalfWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newLeases(t)
		l := f.mustLease(f.parent, "D", "x", time.Minute)
		f.Doom(l.Token)
		g := f.grant(lockstate.Request{
			Process: f.parent, Dir: f.dir("D"), Kind: lockstate.Explicit, Protocol: "command", Command: true, Client: "x", UID: 1000,
		})
		f.Remains(l.Token)
		if err := f.Check(); err != nil {
			t.Errorf("Check() = %v, want nil", err)
		}
		g.Abort()
	})
}

// TestR7Retaken: what an owner makes under a lock that it takes while another one of it is
// ended is not cleared away with what was made under that.
func TestR7Retaken(t *testing.T) {
	scope := lockstate.Scope{Kind: lockstate.CgroupScope, ID: "/x", Born: 1}
	type asks = func(*procid.Process, lockstate.Kind, string) lockstate.Request
	crash := procid.Exit{Known: true, Signal: 9}
	for name, scene := range map[string]func(f *leases, ask asks) (ends uint64){
		"behind what it shares": func(f *leases, ask asks) (ends uint64) {
			first := f.commit(ask(f.parent, lockstate.Explicit, "1"))
			f.Doom(first.Token)
			f.commit(ask(f.parent, lockstate.Shared, "2"))
			f.commit(ask(f.parent, lockstate.Explicit, "3"))
			return first.Token
		},
		"asked for before": func(f *leases, ask asks) (ends uint64) {
			first, second := f.grant(ask(f.parent, lockstate.Explicit, "1")), f.grant(ask(f.parent, lockstate.Explicit, "2"))
			l, _ := first.Commit()
			f.Doom(l.Token)
			second.Commit()
			return l.Token
		},
		"the other one of two": func(f *leases, ask asks) (ends uint64) {
			first, second := f.grant(ask(f.parent, lockstate.Explicit, "1")), f.grant(ask(f.child, lockstate.Explicit, "2"))
			l, _ := first.Commit()
			second.Commit()
			f.Exit(f.parent.ID(), crash, alive())
			f.commit(ask(f.stranger, lockstate.Explicit, "3"))
			f.DoomOf(l.Token, f.parent.ID())
			return l.Token
		},
		"about to be acquired": func(f *leases, ask asks) (ends uint64) {
			q := ask(f.parent, lockstate.Implicit, "")
			q.Key = nil
			first := f.commit(q)
			f.Exit(f.parent.ID(), crash, alive())
			f.grant(ask(f.stranger, lockstate.Explicit, "2"))
			f.DoomOf(first.Token, f.parent.ID())
			return first.Token
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newLeases(t)
				ends := scene(f, func(p *procid.Process, k lockstate.Kind, key string) lockstate.Request {
					f.carried[p.ID()] = lockstate.Claim{Scope: scope}
					q := f.keyed(p, k, key)
					q.Scope, q.OnCrash = scope, lockstate.Destroy
					return q
				})
				f.Made(f.dir("D"), lockstate.FileID{Ino: 1})
				if s, ok := f.Seal(ends); !ok || !s.InUse {
					t.Errorf("Seal() = %+v, %t, want it in use", s, ok)
				}
			})
		})
	}
}

// TestH3Ended: a lock of a scope that ends after the death of its owner is told of has no
// keys left to take away: who is left in the scope may have another lock by them.
func TestH3Ended(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	q := f.keyed(f.parent, lockstate.Explicit, "1")
	q.Scope = lockstate.Scope{Kind: lockstate.CgroupScope, ID: "/x", Born: 1}
	l := f.commit(q)
	f.Exit(f.parent.ID(), procid.Exit{Known: true, Signal: 9}, alive())
	f.ReleaseKey("1")
	if _, ok := f.Represent(l.Token, f.child); ok {
		t.Error("Represent() of a lock that has ended = true, want false")
	}
	if _, ok := f.DoomOf(l.Token, f.parent.ID()); ok {
		t.Error("DoomOf() of a lock that has ended = true, want false")
	}
}

// TestH3RemainsLeft: a scope's lock that a dead member's descriptor kept goes on if what keeps
// another one, which was to end and did not, keeps it by then.
func TestH3RemainsLeft(t *testing.T) {
	f := newFixture(t, lockstate.Options{OnCrash: lockstate.Quarantine})
	q := f.request(f.parent, "D", lockstate.Explicit)
	q.Scope = lifeScope
	first := f.commit(q)
	f.Doom(first.Token)
	q = f.keyed(f.parent, lockstate.Explicit, "1")
	q.Scope = lifeScope
	again := f.commit(q)
	if !f.LeaveToExit("1", func(procid.ID) bool { return true }) {
		t.Fatal("LeaveToExit() = false")
	}
	f.Remains(first.Token)
	f.Exit(f.parent.ID(), procid.Exit{Known: true, Signal: 9}, alive())
	if ended, ok := f.Represent(again.Token, f.stranger); ended != nil || !ok {
		t.Errorf("Represent() = %+v, %t, want it to go on", ended, ok)
	}
	if l, ok := f.ReleaseFile(f.dir("D"), "devserver"); !ok || l.Token != again.Token {
		t.Errorf("ReleaseFile() = %+v, %t, want the end of token %d", l, ok, again.Token)
	}
}

// TestR7Beside: what was made under a lock is not cleared away while its owner has the directory
// by another one in front of it, but is when that owner is dead.
func TestR7Beside(t *testing.T) {
	for _, dies := range []bool{false, true} {
		f := newFixture(t, lockstate.Options{OnCrash: lockstate.Quarantine})
		first := f.commit(f.keyed(f.parent, lockstate.Explicit, "1"))
		f.commit(f.keyed(f.parent, lockstate.Shared, "2"))
		front := f.commit(f.request(f.parent, "D", lockstate.Explicit))
		if front.Token == first.Token {
			t.Fatal("it is the same lock")
		}
		if dies {
			f.Exit(f.parent.ID(), procid.Exit{Known: true, Signal: 9}, alive())
		}
		f.Doom(first.Token)
		if s, ok := f.Seal(first.Token); !ok || s.InUse == dies {
			t.Errorf("dies: %t; Seal() = in use: %t, %t", dies, s.InUse, ok)
		}
	}
}
