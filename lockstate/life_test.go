package lockstate_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// A life is one directory that processes of a scope (H3) and others lock by descriptors,
// while they die, enter the scope, and have their locks broken. All that is done in
// several steps is, with anything between them. What a process was told it has counts.
type life struct {
	table  *lockstate.Table
	dir    *lockstate.Dir
	procs  []*lifeProc
	keys   int
	grants []*lifeGrant
	closes []lifeClose // descriptors of the dead
	exits  []*lifeProc // whose death is not carried out
	ends   []*lifeEnd
}

type lifeProc struct {
	proc  *procid.Process
	scope lockstate.Scope
	dead  bool
	keys  map[string]uint64 // the tokens of what it has, by descriptors and commands
}

type lifeGrant struct {
	by   *lifeProc
	key  string
	real *lockstate.Grant
}

type lifeClose struct {
	by  *lifeProc
	key string
}

// A lifeEnd is a lock that is being ended, as far as it has come.
type lifeEnd struct {
	lock  lockstate.Lock
	of    procid.ID // who is dead; the zero ID: it was broken
	stage int
}

// command begins the keys of those locks that a command keeps instead (A7).
const command = "command "

var lifeScope = lockstate.Scope{Kind: lockstate.CgroupScope, ID: "/x", Born: 1}

// same reports whether what one has locked is the other's too.
func (p *lifeProc) same(q *lifeProc) bool {
	return p == q || p.scope == q.scope && p.scope.Kind != lockstate.ProcessScope
}

func (s *life) live() []*lifeProc {
	return slices.DeleteFunc(slices.Clone(s.procs), func(p *lifeProc) bool { return p.dead })
}

// holder is somebody who has a lock, nil if nobody does.
func (s *life) holder() *lifeProc {
	for _, p := range s.live() {
		if len(p.keys) > 0 {
			return p
		}
	}
	return nil
}

func (s *life) find(id procid.ID) *lifeProc {
	for _, p := range s.procs {
		if p.proc.ID() == id {
			return p
		}
	}
	return nil
}

// pickOut is pick for what is taken out.
func pickOut[T any](t *rapid.T, all *[]T, what string) T {
	if len(*all) == 0 {
		t.Skip("no " + what)
	}
	i := rapid.IntRange(0, len(*all)-1).Draw(t, what)
	one := (*all)[i]
	*all = slices.Delete(*all, i, i+1)
	return one
}

func (s *life) start(scope lockstate.Scope) {
	n := len(s.procs) + 2
	s.procs = append(s.procs, &lifeProc{proc: newProc(n, uint64(n), nil), scope: scope, keys: make(map[string]uint64)})
}

func (s *life) acquire(t *rapid.T) {
	p := pick(t, s.live(), "who")
	s.keys++
	key := fmt.Sprint("key", s.keys)
	q := lockstate.Request{Process: p.proc, Dir: s.dir, Kind: lockstate.Explicit, Protocol: "flock", Key: key, Scope: p.scope, OnCrash: lockstate.Quarantine}
	if rapid.IntRange(0, 3).Draw(t, "by a command") == 0 {
		key, q.Protocol, q.Key, q.Command = command+key, "command", nil, true
	}
	g, err := s.table.Acquire(closed, q)
	switch h := s.holder(); {
	case err == nil && h != nil && !p.same(h):
		t.Fatalf("%v was granted what %v has", p.proc.ID(), h.proc.ID())
	case err != nil && h != nil && p.same(h):
		t.Fatalf("%v is refused what is its own: %v", p.proc.ID(), err)
	case err == nil:
		s.grants = append(s.grants, &lifeGrant{p, key, g})
	}
}

func (s *life) settle(t *rapid.T) {
	g := pickOut(t, &s.grants, "grant")
	if g.by.dead || rapid.IntRange(0, 3).Draw(t, "aborts") == 0 {
		g.real.Abort()
		return
	}
	if l, ok := g.real.Commit(); ok {
		g.by.keys[g.key] = l.Token
	}
}

func (s *life) unlock(t *rapid.T) {
	p := pick(t, s.live(), "who")
	key := pick(t, slices.Sorted(maps.Keys(p.keys)), "key")
	if strings.HasPrefix(key, command) {
		t.Skip("it goes by being broken")
	}
	delete(p.keys, key)
	s.table.ReleaseKey(key)
}

func (s *life) kill(p *lifeProc) {
	p.dead = true
	for _, key := range slices.Sorted(maps.Keys(p.keys)) {
		if !strings.HasPrefix(key, command) {
			s.closes = append(s.closes, lifeClose{p, key})
		}
	}
	clear(p.keys)
	s.exits = append(s.exits, p)
}

// close is what the FUSE layer does when the kernel has closed a dead process's descriptor.
func (s *life) close(t *rapid.T) {
	c := pickOut(t, &s.closes, "descriptor")
	if s.table.HasKey(c.key) && !s.table.LeaveToExit(c.key, func(id procid.ID) bool { return s.find(id).dead }) {
		s.table.ReleaseKey(c.key)
	}
}

func (s *life) exit(t *rapid.T) {
	if slices.ContainsFunc(s.ends, func(e *lifeEnd) bool { return e.of != procid.ID{} }) {
		t.Skip("one at a time")
	}
	p := pickOut(t, &s.exits, "dead")
	dead, _ := s.table.Exit(p.proc.ID(), procid.Exit{Known: true, Signal: 9}, alive())
	for _, l := range dead {
		s.ends = append(s.ends, &lifeEnd{lock: l, of: p.proc.ID()})
	}
}

func (s *life) breakLock(t *rapid.T) {
	l := pick(t, s.table.Locks(), "lock").Lock
	if l.Pending || slices.ContainsFunc(s.ends, func(e *lifeEnd) bool { return e.lock.Token == l.Token }) {
		t.Skip("it is being ended")
	}
	s.doom(l.Token)
	s.ends = append(s.ends, &lifeEnd{lock: l, stage: 2})
}

// doom takes away what the owners of a lock had.
func (s *life) doom(token uint64) {
	s.table.Doom(token)
	for _, p := range s.procs {
		maps.DeleteFunc(p.keys, func(_ string, of uint64) bool { return of == token })
	}
}

// end takes one lock a step further towards its end.
func (s *life) end(t *rapid.T) {
	e := pick(t, s.ends, "end")
	over := false
	switch e.stage {
	case 0:
		for _, p := range s.live() {
			if e.lock.Scope == p.scope && p.scope.Kind != lockstate.ProcessScope && !over {
				s.table.Represent(e.lock.Token, p.proc)
				over = true
			}
		}
	case 1:
		_, ok := s.table.DoomOf(e.lock.Token, e.of)
		if over = !ok; over {
			break
		}
		for _, p := range s.live() {
			if slices.Contains(slices.Collect(maps.Values(p.keys)), e.lock.Token) {
				t.Fatalf("what %v has ends with %v, which is dead", p.proc.ID(), e.of)
			}
		}
	case 2:
		if over = true; e.lock.Command && e.of == (procid.ID{}) && rapid.Bool().Draw(t, "its file can't be removed") {
			s.table.Remains(e.lock.Token)
			break
		}
		if err := s.table.End(e.lock.Token, lockstate.Exited); err != nil && !errors.Is(err, lockstate.ErrNoLock) {
			t.Fatalf("End(%d) = %v", e.lock.Token, err)
		}
	}
	if e.stage++; over {
		s.ends = slices.DeleteFunc(s.ends, func(o *lifeEnd) bool { return o == e })
	}
}

// check wants who has the directory to be able to change it, and nobody else.
func (s *life) check(t *rapid.T) {
	h := s.holder()
	for _, p := range s.live() {
		if h != nil && len(p.keys) > 0 && !p.same(h) {
			t.Fatalf("%v and %v both have it", p.proc.ID(), h.proc.ID())
		}
		op, err := s.table.Begin(lockstate.Change{Process: p.proc, Dirs: []*lockstate.Dir{s.dir}})
		op.End()
		if h != nil && (err == nil) != p.same(h) {
			t.Fatalf("%v has it; a change by %v = %v", h.proc.ID(), p.proc.ID(), err)
		}
	}
	if err := s.table.Check(); err != nil {
		t.Fatal(err)
	}
}

// TestLife: a lock that somebody was told he has is his until he gives it up, or it is
// broken, whatever ends beside it; and nothing is left of the dead (R2, R4, H3).
func TestLife(t *testing.T) {
	for range 10 { // what takes three deaths at the right times is rare
		rapid.Check(t, testLife)
	}
}

func testLife(t *rapid.T) {
	s := &life{}
	s.table = lockstate.New(lockstate.Options{Claims: func(p *procid.Process, c lockstate.Claim) (holds, known bool) {
		q := s.find(p.ID())
		return c.Scope.Kind != lockstate.ProcessScope && q.scope == c.Scope, true
	}})
	s.dir = dirAt(s.table, "D")
	for range 2 {
		s.start(lifeScope)
		s.start(lockstate.Scope{})
	}
	t.Repeat(map[string]func(*rapid.T){
		"":        s.check,
		"acquire": s.acquire, "acquire more": s.acquire,
		"settle": s.settle, "settle more": s.settle,
		"unlock": s.unlock,
		"kill":   func(t *rapid.T) { s.kill(pick(t, s.live(), "who")) },
		"close":  s.close,
		"exit":   s.exit,
		"break":  s.breakLock,
		"end":    s.end, "end more": s.end,
		"start": func(t *rapid.T) {
			if len(s.live()) > 4 {
				t.Skip("enough")
			}
			s.start(rapid.SampledFrom([]lockstate.Scope{{}, lifeScope}).Draw(t, "scope"))
		},
		"enter": func(t *rapid.T) {
			p := pick(t, s.live(), "who")
			if len(p.keys) > 0 || slices.ContainsFunc(s.grants, func(g *lifeGrant) bool { return g.by == p }) {
				t.Skip("it is busy")
			}
			p.scope = lifeScope
		},
	})
	for _, p := range s.live() {
		s.kill(p)
	}
	for _, g := range s.grants {
		g.real.Abort()
	}
	s.grants = nil
	for len(s.closes)+len(s.exits)+len(s.ends) > 0 {
		switch {
		case len(s.ends) > 0:
			s.end(t)
		case len(s.closes) > 0:
			s.close(t)
		default:
			s.exit(t)
		}
	}
	if left := s.table.Locks(); len(left) > 0 {
		t.Fatalf("left of the dead: %+v", left)
	}
}

// TestRetakenBeside: who takes a directory again while that is being taken from him keeps
// what else he has of it.
func TestRetakenBeside(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	ask := func(q lockstate.Request) *lockstate.Grant {
		t.Helper()
		q.Process, q.Dir, q.Kind = f.parent, f.dir("D"), lockstate.Explicit
		g, err := f.Acquire(closed, q)
		if err != nil {
			t.Fatal(err)
		}
		return g
	}
	commit := func(g *lockstate.Grant) lockstate.Lock {
		t.Helper()
		l, ok := g.Commit()
		if !ok {
			t.Fatal("Commit() = false, want true")
		}
		return l
	}
	byCommand := ask(lockstate.Request{Protocol: "command", Command: true})
	first := commit(ask(lockstate.Request{Protocol: "flock", Key: "1"}))
	f.Doom(first.Token)
	again := ask(lockstate.Request{Protocol: "flock", Key: "2"})
	kept := commit(byCommand)
	commit(again)
	f.end(first.Token)
	if _, ended := f.ReleaseKey("2"); !ended {
		t.Error("ReleaseKey() = false, want that lock's end")
	}
	f.mayChange(f.parent, "D")
	f.mayNotChange(f.stranger, "D", kept.Token)
}
