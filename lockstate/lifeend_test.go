package lockstate_test

import (
	"errors"
	"maps"
	"slices"
	"strings"

	"pgregory.net/rapid"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// A lifeEnd is what the FUSE layer does to end some locks, one after the other, as far as
// it has come.
type lifeEnd struct {
	locks  []lockstate.Lock
	how    lockstate.Reason
	of     *lifeProc // who is dead, if that is the reason
	clears bool      // what is left is cleared away, if it is to be (R7)
	looked bool      // for the scopes of the locks;
	member *lifeProc // who was found
	stage  lifeStage
	sweeps bool // and clears away, on its own
}

type lifeStage int

const (
	lookStage lifeStage = iota
	doomStage
	filesStage
	sealStage
	endStage
)

// reaps reports whether an end excludes others that do.
func (e *lifeEnd) reaps() bool {
	return !e.sweeps && (e.how == lockstate.Exited || e.how == lockstate.Expired)
}

// begin notes an end that is about to be carried out.
func (s *life) begin(e *lifeEnd) {
	if len(e.locks) > 0 {
		s.ends = append(s.ends, e)
	}
}

// reap makes sure that one dead owner or lease is dealt with at a time.
func (s *life) reap(t *rapid.T) {
	if slices.ContainsFunc(s.ends, (*lifeEnd).reaps) {
		t.Skip("one at a time")
	}
}

// exit is R4.
func (s *life) exit(t *rapid.T) {
	s.reap(t)
	p := pickOut(t, &s.exits, "dead")
	how := rapid.SampledFrom([]procid.Exit{{Known: true, Signal: 9}, {Known: true, Code: 1}, {Missed: true}}).Draw(t, "status")
	dead, _ := s.table.Exit(p.proc.ID(), how, alive())
	s.begin(&lifeEnd{locks: dead, how: lockstate.Exited, of: p, clears: how.Known})
}

// expire ends leases that have run out (L1).
func (s *life) expire(t *rapid.T) {
	s.reap(t)
	s.begin(&lifeEnd{locks: s.table.Expired(), how: lockstate.Expired, clears: true, stage: doomStage})
}

// release is by a holder (R6).
func (s *life) release(t *rapid.T) {
	p := pick(t, s.live(), "who")
	l, ok, _ := s.table.HeldOn(p.proc, s.dir, 0)
	if r := s.rows[l.Token]; !ok {
		t.Skip("not its")
	} else if !s.has(r, p) {
		t.Fatalf("%v may release %+v", p.proc.ID(), r)
	}
	failed := rapid.Bool().Draw(t, "failed")
	how := lockstate.Given
	if failed {
		how = lockstate.Failed
	}
	s.begin(&lifeEnd{locks: []lockstate.Lock{l}, how: how, clears: failed, stage: doomStage})
}

// breakDir is by an admin (R6).
func (s *life) breakDir(t *rapid.T) {
	s.begin(&lifeEnd{locks: s.table.On(s.dir), how: lockstate.Broken, stage: doomStage})
}

// end takes one of the ends a step further.
func (s *life) end(t *rapid.T) {
	e := pick(t, s.ends, "end")
	if s.step(t, e) {
		e.locks, e.stage = e.locks[1:], doomStage
		if e.of != nil {
			e.stage = lookStage
		}
	}
	if len(e.locks) == 0 {
		s.ends = slices.DeleteFunc(s.ends, func(o *lifeEnd) bool { return o == e })
	}
}

// step reports whether the first lock of e is dealt with.
func (s *life) step(t *rapid.T, e *lifeEnd) (over bool) {
	l := &e.locks[0]
	_, there := s.table.Lock(l.Token)
	policy := s.table.Policy(*l)
	clears := e.clears && policy != lockstate.Keep && l.Kind != lockstate.Shared
	switch e.stage {
	case lookStage:
		if s.represented(e, l) || l.Sealed || clears && !there {
			return true
		}
	case doomStage:
		switch now, _ := s.table.Lock(l.Token); {
		case e.how == lockstate.Expired && (!there || now.Sealed || s.now < now.Deadline):
			return true
		case e.how == lockstate.Expired:
			*l = now
		}
		if !s.doom(t, e, l.Token) {
			return true
		}
	case filesStage:
		if len(l.Files) > 0 {
			return s.discard(t, e, l)
		}
	case sealStage:
		if clears && s.clear(t, e, *l) {
			return true
		}
	case endStage:
		if r := s.rows[l.Token]; r != nil && s.isHad(r) && e.reaps() {
			t.Fatalf("what somebody has ends: %+v", r)
		}
		if err := s.table.End(l.Token, e.how); err != nil && !errors.Is(err, lockstate.ErrNoLock) {
			t.Fatalf("End(%d) = %v", l.Token, err)
		}
		if r := s.rows[l.Token]; r != nil {
			clear(r.kept)
		}
		return true
	}
	e.stage++
	return false
}

// represented has somebody stand for the scope of a dead owner's lock.
func (s *life) represented(e *lifeEnd, l *lockstate.Lock) bool {
	if l.Scope.Kind == lockstate.ProcessScope {
		return false
	}
	if !e.looked {
		e.looked, e.member = true, s.member(l.Scope)
	}
	if e.member == nil {
		return false
	}
	_, ok := s.table.Represent(l.Token, e.member.proc)
	if ok && e.member.dead && !slices.Contains(s.exits, e.member) {
		s.exits = append(s.exits, e.member)
	}
	return ok
}

// doom takes away what the owners of a lock have. It reports false where a dead one's lock
// has ended, or is another one's by now.
func (s *life) doom(t *rapid.T, e *lifeEnd, token uint64) bool {
	var keys []any
	if e.of == nil {
		keys = s.table.Doom(token)
	} else {
		var ok bool
		if keys, ok = s.table.DoomOf(token, e.of.proc.ID()); !ok {
			return false
		}
	}
	for _, k := range keys {
		s.table.ReleaseKey(k)
	}
	r := s.rows[token]
	if r == nil {
		return true
	}
	if e.of != nil && s.isHad(r) {
		t.Fatalf("what somebody has ends with %v, which is dead: %+v", e.of.proc.ID(), r)
	}
	r.enders++
	maps.DeleteFunc(r.kept, func(keep string, _ *lifeProc) bool { return isFD(keep) })
	return true
}

// discard removes a lock file of a lock. It reports whether the lock does not end
// since that failed.
func (s *life) discard(t *rapid.T, e *lifeEnd, l *lockstate.Lock) (over bool) {
	name := l.Files[0]
	l.Files = l.Files[1:]
	if _, keeps := s.table.KeptByFile(l.Token, name); !keeps || !s.files[name] {
		return false
	}
	for _, r := range s.rows {
		if r.token != l.Token && r.kept["file "+name] != nil {
			t.Fatalf("what somebody has by %s, %+v, loses it with token %d", name, r, l.Token)
		}
	}
	if oneIn(t, 3, "it can't be removed") {
		if e.reaps() {
			return false
		}
		s.remains(t, l.Token)
		return true
	}
	delete(s.files, name)
	s.drop("file " + name)
	return false
}

func (s *life) remains(t *rapid.T, token uint64) {
	s.table.Remains(token)
	r := s.rows[token]
	if r.enders--; !r.doomed() {
		r.remains = true
		s.merge(t)
	}
}

// merge notes that another one of its owner has what kept a lock that was to end before that
// was taken, and did not.
func (s *life) merge(t *rapid.T) {
	for _, o := range s.rows {
		if _, there := s.table.Lock(o.token); !o.remains || there {
			continue
		}
		for keep, p := range o.kept {
			for _, r := range s.stack(t) {
				l, _ := s.table.Lock(r.token)
				if r.owner == o.owner && r.kind == o.kind && (keep == "command" && l.Command || slices.Contains(l.Files, strings.TrimPrefix(keep, "file "))) {
					delete(o.kept, keep)
					r.kept[keep] = p
					break
				}
			}
		}
	}
}

// clear reports whether what was left is cleared away: then the lock ends when it is.
func (s *life) clear(t *rapid.T, e *lifeEnd, l lockstate.Lock) bool {
	spoils, ok := s.table.Seal(l.Token)
	if !ok {
		return true
	}
	r := s.rows[l.Token]
	if r == nil {
		return false
	}
	r.sealed = true
	if spoils.InUse || spoils.Unknown {
		return false
	}
	for id, of := range s.made {
		others := slices.ContainsFunc(of, func(token uint64) bool {
			o := s.rows[token]
			return o != nil && o.kind != lockstate.Shared && s.isHad(o)
		})
		if spoils.Made(id) && others && !slices.Contains(of, l.Token) {
			t.Fatalf("what was made under tokens %v is cleared away with %+v", of, r)
		}
	}
	for _, o := range s.stack(t) {
		if o != r && o.token > r.token && s.isHad(o) && (o.kind != lockstate.Shared || o.owner != r.owner) {
			t.Fatalf("what is in a directory that somebody has by %+v is cleared away with %+v", o, r)
		}
	}
	s.ends = append(s.ends, &lifeEnd{locks: []lockstate.Lock{l}, how: e.how, stage: endStage, sweeps: true})
	return true
}
