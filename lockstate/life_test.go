package lockstate_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// A life is one directory that processes lock by all means there are: descriptors, lock
// files and commands, each for itself, for its scope (H3) or its client (L1), alone or
// shared (A5), while they die, and their locks are given back, broken, and lost. All that
// is done in several steps is, with anything between them. What was told to somebody counts.
type life struct {
	table  *lockstate.Table
	dir    *lockstate.Dir
	now    time.Duration // on the clock of the leases
	procs  []*lifeProc
	rows   map[uint64]*lifeRow // all that were acquired, by token
	files  map[string]bool     // the lock files that are there
	opened map[string]bool     // which of them a plain open made (A6)
	made   map[lockstate.FileID][]uint64
	grants []*lifeGrant
	closes []string    // descriptors of the dead
	exits  []*lifeProc // whose death is not carried out
	ends   []*lifeEnd
	hows   []string       // by what locks are asked for
	began  map[uint64]int // what was told of a token,
	ended  map[uint64]int // and of its end
}

type lifeProc struct {
	proc   *procid.Process
	parent *lifeProc
	scope  lockstate.Scope
	client string // in its environment
	dead   bool
	files  map[string]string // that its descriptors are of
}

// A lifeOwner is whose a lock is: a process's alone, a scope's or a client's.
type lifeOwner struct {
	proc   *lifeProc
	scope  lockstate.Scope
	client string
}

type lifeRow struct {
	token    uint64
	kind     lockstate.Kind
	owner    lifeOwner
	joined   []*lifeProc
	ttl      time.Duration
	deadline time.Duration
	kept     map[string]*lifeProc // by what, as somebody was told: descriptors, "file NAME", "command", "mkdir"
	enders   int                  // how many are about to end it
	remains  bool
	sealed   bool
}

type lifeGrant struct {
	by    *lifeProc
	q     lockstate.Request
	keep  string
	token uint64 // that is made for it; 0: somebody has it already
	real  *lockstate.Grant
}

var lifeScope = lockstate.Scope{Kind: lockstate.CgroupScope, ID: "/x", Born: 1}

const (
	lifeTTL = 16 * time.Second
	lifeUID = 1000
)

func (r *lifeRow) doomed() bool { return r.enders > 0 }

func isFD(keep string) bool { return strings.HasPrefix(keep, "fd") }

// owner is whose a request's lock is going to be.
func (p *lifeProc) owner(q lockstate.Request) lifeOwner {
	switch {
	case q.Client != "":
		return lifeOwner{client: q.Client}
	case q.Scope.Kind != lockstate.ProcessScope:
		return lifeOwner{scope: q.Scope}
	}
	return lifeOwner{proc: p}
}

func (s *life) live() []*lifeProc {
	return slices.DeleteFunc(slices.Clone(s.procs), func(p *lifeProc) bool { return p.dead })
}

func (s *life) member(scope lockstate.Scope) *lifeProc {
	for _, p := range s.live() {
		if p.scope == scope {
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

func (s *life) expired(r *lifeRow) bool { return r.owner.client != "" && s.now >= r.deadline }

// isHad reports whether somebody was told that he has r, and has it still.
func (s *life) isHad(r *lifeRow) bool { return len(r.kept) > 0 && !r.doomed() && !s.expired(r) }

// lives reports whether r is somebody's, as far as is known, whoever was told.
func (s *life) lives(r *lifeRow) bool {
	switch {
	case r.doomed() || s.expired(r):
		return false
	case r.owner.scope.Kind != lockstate.ProcessScope:
		return s.isHad(r) || s.member(r.owner.scope) != nil
	}
	return s.isHad(r) || r.owner.client != ""
}

// has reports whether r is p's, too (H1 to H3, L2).
func (s *life) has(r *lifeRow, p *lifeProc) bool {
	if r.sealed || s.expired(r) {
		return false
	}
	for q := p; q != nil; q = q.parent {
		if q == r.owner.proc || r.owner.client != "" && q.client == r.owner.client || slices.Contains(r.joined, q) ||
			r.owner.scope.Kind != lockstate.ProcessScope && q.scope == r.owner.scope {
			return true
		}
	}
	return false
}

// stack is what is on the directory; the last one is in force.
func (s *life) stack(t *rapid.T) (all []*lifeRow) {
	for _, l := range s.table.On(s.dir) {
		r := s.rows[l.Token]
		if r == nil {
			t.Fatalf("token %d was never given to anybody", l.Token)
		}
		all = append(all, r)
	}
	return all
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

func oneIn(t *rapid.T, n int, what string) bool { return rapid.IntRange(1, n).Draw(t, what) == n }

func (s *life) start(parent *lifeProc, scope lockstate.Scope, client string) {
	n := len(s.procs) + 2
	p := &lifeProc{parent: parent, scope: scope, client: client, files: make(map[string]string)}
	if parent != nil {
		p.scope, p.client = parent.scope, parent.client
		p.proc = newProc(n, uint64(n), parent.proc)
	} else {
		p.proc = newProc(n, uint64(n), nil)
	}
	s.procs = append(s.procs, p)
}

// fork may be by anybody.
func (s *life) fork(t *rapid.T) {
	if len(s.live()) > 5 {
		t.Skip("enough")
	}
	if len(s.live()) > 0 && oneIn(t, 3, "child") {
		s.start(pick(t, s.live(), "parent"), lockstate.Scope{}, "")
		return
	}
	s.start(nil, rapid.SampledFrom([]lockstate.Scope{{}, lifeScope}).Draw(t, "scope"), rapid.SampledFrom([]string{"", "x", "y"}).Draw(t, "client"))
}

// enter is for a control group. What the process has is not the group's by that.
func (s *life) enter(t *rapid.T) {
	p := pick(t, s.live(), "who")
	if slices.ContainsFunc(s.procs, func(q *lifeProc) bool { return q.parent == p }) {
		t.Skip("its children don't")
	}
	p.scope = lifeScope
}

// ask draws what a process asks for, and by what it is to be kept.
func (s *life) ask(t *rapid.T, p *lifeProc) (q lockstate.Request, keep string) {
	q = lockstate.Request{Process: p.proc, Dir: s.dir, Kind: lockstate.Explicit, Scope: p.scope}
	there := slices.Sorted(maps.Keys(s.files))
	switch how := rapid.SampledFrom(s.hows).Draw(t, "how"); how {
	case "fd":
		fds := slices.Sorted(maps.Keys(p.files))
		if len(fds) == 0 || len(fds) < 3 && oneIn(t, 3, "opens") {
			keep = fmt.Sprintf("fd %d of %d", len(fds), p.proc.ID().Pid)
			p.files[keep] = pick(t, there, "file")
		} else {
			keep = pick(t, fds, "fd")
		}
		q.Protocol, q.Key, q.File = "flock", keep, p.files[keep]
		if oneIn(t, 3, "shared") {
			q.Kind = lockstate.Shared
		}
	case "file":
		q.Protocol = rapid.SampledFrom([]string{"create", "open"}).Draw(t, "protocol")
		q.File = rapid.SampledFrom([]string{"a", "b"}).Draw(t, "name")
		if s.files[q.File] || s.isMakingFile() {
			t.Skip("it is there, or the kernel has the directory locked")
		}
		keep = "file " + q.File
	default:
		keep, q.Protocol, q.Command = "command", "command", true
		q.OnCrash = rapid.SampledFrom([]string{"", "", lockstate.Keep, lockstate.Destroy, lockstate.Quarantine}).Draw(t, "on crash")
		q.New = oneIn(t, 4, "new")
		if how == "lease" {
			q.Scope, q.UID, q.TTL = lockstate.Scope{}, lifeUID, lifeTTL
			if q.Client = p.client; q.Client == "" {
				q.Client = "x"
			}
		} else if oneIn(t, 3, "alone") {
			q.Scope = lockstate.Scope{}
		}
		if oneIn(t, 4, "shared") {
			q.Kind = lockstate.Shared
		}
	}
	return q, keep
}

// isMakingFile reports whether somebody is making a lock file: until that is answered, the
// kernel lets nobody else make or remove a name in the directory.
func (s *life) isMakingFile() bool {
	return slices.ContainsFunc(s.grants, func(g *lifeGrant) bool { return strings.HasPrefix(g.keep, "file ") })
}

// forbids is C3a for what is not pending: it tells whose lock is in the way.
func (s *life) forbids(t *rapid.T, p *lifeProc, q lockstate.Request) *lifeRow {
	rows, owner := s.stack(t), p.owner(q)
	for _, r := range rows {
		if r.owner == owner && r.kind == q.Kind && s.expired(r) {
			return r
		}
		if q.Client != "" && r.owner.client != "" && r.owner != owner && (q.Kind != lockstate.Shared || r.kind != lockstate.Shared) {
			return r
		}
	}
	behind := rows
	for len(behind) > 0 && behind[len(behind)-1].kind == lockstate.Shared {
		behind = behind[:len(behind)-1]
	}
	sharers := rows[len(behind):]
	if len(sharers) > 0 && q.Kind != lockstate.Shared {
		for _, r := range rows {
			if r.kind == lockstate.Shared && r.owner != owner {
				return r
			}
		}
	}
	if len(behind) == 0 {
		return nil
	}
	r := behind[len(behind)-1]
	own := r.owner == owner && q.Client != "" && !r.sealed && !s.expired(r)
	letIn := q.Kind == lockstate.Shared && slices.ContainsFunc(sharers, func(o *lifeRow) bool { return o.owner == r.owner })
	if own || letIn || s.has(r, p) {
		return nil
	}
	return r
}

func (s *life) acquire(t *rapid.T) {
	p := pick(t, s.live(), "who")
	q, keep := s.ask(t, p)
	last := s.table.LastToken()
	g, err := s.table.Acquire(closed, q)
	made := s.table.LastToken()
	if made == last {
		made = 0
	}
	r := s.forbids(t, p, q)
	pending := slices.ContainsFunc(s.grants, func(g *lifeGrant) bool { return g.token != 0 })
	switch {
	case err == nil && made != 0 && r != nil:
		t.Fatalf("%v was granted what token %d is in the way of", p.proc.ID(), r.token)
	case err != nil && r == nil && !pending && !errors.Is(err, lockstate.ErrAlone):
		t.Fatalf("%v is refused what nobody else has: %v", p.proc.ID(), err)
	case err == nil:
		s.grants = append(s.grants, &lifeGrant{p, q, keep, made, g})
	case isFD(keep):
		s.dropOld(keep)
	}
}

// dropOld is what flock(2) does where a conversion fails.
func (s *life) dropOld(keep string) {
	s.drop(keep)
	s.table.ReleaseKey(keep)
}

// drop notes that something keeps nothing any more.
func (s *life) drop(keep string) {
	for _, r := range s.rows {
		delete(r.kept, keep)
	}
}

func (s *life) settle(t *rapid.T) {
	g := pickOut(t, &s.grants, "grant")
	isFile := strings.HasPrefix(g.keep, "file ")
	if isFile && s.files[g.q.File] || g.by.dead && !slices.Contains(s.exits, g.by) || oneIn(t, 4, "aborts") {
		g.real.Abort()
		if isFD(g.keep) {
			s.dropOld(g.keep)
		}
		return
	}
	l, ok := g.real.Commit()
	if !ok {
		return
	}
	if isFile {
		s.files[g.q.File] = true
	}
	s.told(t, g, l.Token)
}

// told notes that a process was told that it has a lock.
func (s *life) told(t *rapid.T, g *lifeGrant, token uint64) {
	r, p, q := s.rows[token], g.by, g.q
	switch {
	case (r == nil) != (g.token == token):
		t.Fatalf("%v got token %d, want %d", p.proc.ID(), token, g.token)
	case r == nil:
		r = &lifeRow{token: token, kind: q.Kind, owner: p.owner(q), ttl: q.TTL, kept: make(map[string]*lifeProc)}
		s.rows[token] = r
	case r.kind != q.Kind || r.doomed() || r.sealed || s.expired(r) || !s.has(r, p) && r.owner != p.owner(q):
		t.Fatalf("%v was told that it has %+v", p.proc.ID(), r)
	}
	if r.owner.client != "" {
		r.deadline, r.joined = s.now+r.ttl, append(r.joined, p)
	}
	if isFD(g.keep) {
		s.drop(g.keep)
		for _, o := range s.rows { // A6
			if s.opened[q.File] && (o == r || r.kind == lockstate.Shared && s.replaces(r, o, g)) {
				delete(o.kept, "file "+q.File)
			}
		}
	} else if q.File != "" {
		s.opened[q.File] = q.Protocol == "open"
	}
	r.remains = false
	if g.token != 0 {
		s.replace(r, g)
		s.merge(t)
	}
	switch {
	case !p.dead:
		r.kept[g.keep] = p
	case isFD(g.keep):
		s.closes = append(s.closes, g.keep)
	}
}

// replaces reports whether what is taken by r is in the place of o.
func (s *life) replaces(r, o *lifeRow, g *lifeGrant) bool {
	return o.owner == r.owner || o.owner == (lifeOwner{proc: g.by}) || g.q.New && o.kind == lockstate.Implicit
}

// replace is A13, and what becomes of what a process had by itself when its scope or its
// client takes the directory.
func (s *life) replace(r *lifeRow, g *lifeGrant) {
	for _, o := range s.rows {
		if o == r || !s.replaces(r, o, g) {
			continue
		}
		fds := slices.ContainsFunc(slices.Collect(maps.Keys(o.kept)), isFD)
		_, there := s.table.Lock(o.token)
		switch {
		case o.kind == lockstate.Implicit && (r.kind == lockstate.Explicit || g.q.New) && !there,
			o.kind == lockstate.Shared && r.kind == lockstate.Explicit && !fds && (o.kept["command"] == nil || g.q.Command):
			clear(o.kept)
			for id, of := range s.made {
				if slices.Contains(of, o.token) {
					s.made[id] = append(of, r.token)
				}
			}
		}
	}
}

// mkdir makes the directory, where there is none.
func (s *life) mkdir(t *rapid.T) {
	if len(s.grants)+len(s.ends)+s.table.Len() > 0 {
		t.Skip("it is there")
	}
	p := pick(t, s.live(), "who")
	clear(s.made)
	s.files = map[string]bool{"old": true}
	q := lockstate.Request{Process: p.proc, Dir: s.dir, Kind: lockstate.Implicit, Protocol: "mkdir", Scope: p.scope}
	g, err := s.table.Acquire(closed, q)
	if err != nil {
		t.Fatalf("mkdir: %v", err)
	}
	l, _ := g.Commit()
	s.told(t, &lifeGrant{p, q, "mkdir", l.Token, g}, l.Token)
}

func (s *life) unlock(t *rapid.T) {
	p := pick(t, s.live(), "who")
	fd := pick(t, slices.Sorted(maps.Keys(p.files)), "fd")
	s.drop(fd)
	s.table.ReleaseKey(fd)
}

// unlink is R1.
func (s *life) unlink(t *rapid.T) {
	p, name := pick(t, s.live(), "who"), rapid.SampledFrom([]string{"a", "b"}).Draw(t, "name")
	if !s.files[name] || s.isMakingFile() {
		t.Skip("not there, or the kernel has the directory locked")
	}
	op, err := s.table.Begin(lockstate.Change{Process: p.proc, Dirs: []*lockstate.Dir{s.dir}, Quiet: true})
	if err != nil {
		t.Skip("not its")
	}
	delete(s.files, name)
	s.drop("file " + name)
	s.table.ReleaseFile(s.dir, name)
	op.End()
}

// write makes a file.
func (s *life) write(t *rapid.T) {
	p := pick(t, s.live(), "who")
	op, err := s.table.Begin(lockstate.Change{Process: p.proc, Dirs: []*lockstate.Dir{s.dir}})
	if err != nil {
		t.Skip("not its")
	}
	id := lockstate.FileID{Ino: uint64(len(s.made) + 1)}
	s.made[id] = nil
	rows := s.stack(t)
	if len(rows) > 0 && s.isHad(rows[len(rows)-1]) { // else it is by what is to end
		for _, r := range rows {
			if s.lives(r) {
				s.made[id] = append(s.made[id], r.token)
			}
		}
		for _, g := range s.grants { // it may come to something
			s.made[id] = append(s.made[id], g.token)
		}
	}
	s.table.Made(s.dir, id)
	op.End()
}

func (s *life) kill(p *lifeProc) {
	p.dead = true
	s.exits = append(s.exits, p)
	for fd := range p.files {
		if s.table.HasKey(fd) || slices.ContainsFunc(slices.Collect(maps.Values(s.rows)), func(r *lifeRow) bool { return r.kept[fd] != nil }) {
			s.closes = append(s.closes, fd)
		}
		s.drop(fd)
	}
	slices.Sort(s.closes)
	for _, r := range s.rows {
		if r.owner.proc == p || r.owner.scope.Kind != lockstate.ProcessScope && s.member(r.owner.scope) == nil {
			clear(r.kept)
		}
	}
}

// close is what the FUSE layer does when the kernel has closed a dead process's descriptor.
func (s *life) close(t *rapid.T) {
	fd := pickOut(t, &s.closes, "descriptor")
	if s.table.HasKey(fd) && !s.table.LeaveToExit(fd, func(id procid.ID) bool { return s.find(id).dead }) {
		s.table.ReleaseKey(fd)
	}
}

func (s *life) tick(t *rapid.T) {
	s.now += time.Duration(rapid.IntRange(1, 12).Draw(t, "seconds")) * time.Second
}

// lease is what is had, or else about to end, of a client.
func (s *life) lease(t *rapid.T, client string) (found *lifeRow) {
	for _, r := range s.stack(t) {
		if r.owner.client == client && (found == nil || found.doomed()) {
			found = r
		}
	}
	return found
}

func (s *life) renew(t *rapid.T) {
	client := rapid.SampledFrom([]string{"x", "y"}).Draw(t, "client")
	r := s.lease(t, client)
	l, err := s.table.Renew(s.dir, client, lifeUID, 0)
	switch {
	case err == nil && (r == nil || s.expired(r)), err != nil && r != nil && s.isHad(r), err == nil && r != nil && l.Token != r.token:
		t.Fatalf("a renewal by %s of %+v = token %d, %v", client, r, l.Token, err)
	case err == nil:
		r.deadline = s.now + r.ttl
	}
}

func (s *life) touch(t *rapid.T) {
	p := pick(t, s.live(), "who")
	s.table.Touch(s.dir, p.proc)
	for _, r := range s.stack(t) {
		l, _ := s.table.Lock(r.token)
		switch again := s.now + r.ttl; {
		case r.owner.client == "":
		case l.Deadline != r.deadline && (l.Deadline != again || !s.has(r, p)), l.Deadline != again && slices.Contains(r.joined, p) && s.isHad(r):
			t.Fatalf("a touch by %v makes the deadline of %+v %v", p.proc.ID(), r, l.Deadline)
		default:
			r.deadline = l.Deadline
		}
	}
}

func (s *life) join(t *rapid.T) {
	p, client := pick(t, s.live(), "who"), rapid.SampledFrom([]string{"x", "y"}).Draw(t, "client")
	if l, err := s.table.Join(p.proc, s.dir, client, lifeUID, nil); err == nil {
		r := s.rows[l.Token]
		r.joined = append(r.joined, p)
	}
}

// check wants who has the directory to be able to change it, and nobody else.
func (s *life) check(t *rapid.T) {
	if err := s.table.Check(); err != nil {
		t.Fatal(err)
	}
	s.checkTold(t)
	var top *lifeRow
	var front []*lifeRow // what is in the way still, or its death not carried out
	for _, r := range s.stack(t) {
		if front = append(front, r); s.isHad(r) {
			top, front = r, nil
		}
	}
	for _, p := range s.live() {
		op, err := s.table.Begin(lockstate.Change{Process: p.proc, Dirs: []*lockstate.Dir{s.dir}, Quiet: true})
		op.End()
		holds := top != nil && top.kind != lockstate.Shared && s.has(top, p)
		left := slices.ContainsFunc(front, func(r *lifeRow) bool { return r.kind != lockstate.Shared && s.has(r, p) })
		var held *lockstate.HeldError
		switch {
		case top == nil:
		case err == nil && !holds && !left && !(top.kind == lockstate.Shared && s.isGetting(p)):
			t.Fatalf("%v may change what token %d is in the way of", p.proc.ID(), top.token)
		case holds && errors.As(err, &held) && held.Lock.Token <= top.token:
			t.Fatalf("%v has token %d; a change = %v", p.proc.ID(), top.token, err)
		}
	}
	if len(s.grants)+len(s.closes)+len(s.exits)+len(s.ends) == 0 {
		for _, r := range s.stack(t) {
			if !s.lives(r) && !s.expired(r) {
				t.Fatalf("nobody has %+v, and nothing is to end it", r)
			}
		}
	}
}

// isGetting reports whether p is about to have the directory to itself: what is shared then
// is its own.
func (s *life) isGetting(p *lifeProc) bool {
	return slices.ContainsFunc(s.grants, func(g *lifeGrant) bool {
		return g.token != 0 && g.q.Kind == lockstate.Explicit && s.has(&lifeRow{owner: g.by.owner(g.q), joined: []*lifeProc{g.by}, deadline: s.now + 1}, p)
	})
}

// checkTold wants all that somebody was told that he has to be there, and what ends to be
// told once.
func (s *life) checkTold(t *rapid.T) {
	for _, r := range s.rows {
		l, there := s.table.Lock(r.token)
		if want := 1; s.began[r.token] != want || s.ended[r.token] != 0 == there || s.ended[r.token] > want {
			t.Fatalf("token %d (there: %t) was told to begin %d times, to end %d times", r.token, there, s.began[r.token], s.ended[r.token])
		}
		if !s.isHad(r) {
			continue
		}
		if !there || l.Sealed {
			t.Fatalf("somebody has %+v; the table has %+v", r, l)
		}
		for keep := range r.kept {
			name, isFile := strings.CutPrefix(keep, "file ")
			if isFD(keep) && !slices.Contains(l.Keys, any(keep)) || isFile && !(slices.Contains(l.Files, name) && s.files[name]) || keep == "command" && !l.Command {
				t.Fatalf("%s keeps %+v no more; the table has %+v", keep, r, l)
			}
		}
	}
}

// TestLife: a lock that somebody was told he has is his until he gives it up or loses it, or
// it is broken, whatever ends beside it; what ends says so once; nothing is left of the dead,
// and nothing of the living is cleared away with what they left (R1 to R7, H3, L1).
func TestLife(t *testing.T) {
	for range 20 { // what takes three deaths at the right times is rare
		rapid.Check(t, testLife)
	}
}

func testLife(t *rapid.T) {
	s := &life{
		rows: make(map[uint64]*lifeRow), files: map[string]bool{"old": true}, opened: make(map[string]bool), made: make(map[lockstate.FileID][]uint64),
		began: make(map[uint64]int), ended: make(map[uint64]int),
	}
	s.table = lockstate.New(lockstate.Options{
		OnCrash: rapid.SampledFrom([]string{lockstate.Keep, lockstate.Quarantine}).Draw(t, "on crash"),
		Clock:   func() time.Duration { return s.now },
		Claims: func(p *procid.Process, c lockstate.Claim) (holds bool, unsure error) {
			q := s.find(p.ID())
			return c.Scope.Kind != lockstate.ProcessScope && q.scope == c.Scope || c.Client != "" && q.client == c.Client, nil
		},
		Notify: func(e lockstate.Event) {
			switch e.Event {
			case lockstate.EventAcquired:
				s.began[e.Token]++
			case lockstate.EventReleased, lockstate.EventBroken:
				s.ended[e.Token]++
			}
		},
	})
	s.table.Listen(1)
	s.dir = dirAt(s.table, "D")
	for _, client := range []string{"", "x"} {
		s.start(nil, lifeScope, client)
		s.start(nil, lockstate.Scope{}, client)
	}
	s.hows = rapid.SampledFrom([][]string{
		{"fd"}, {"fd", "command"}, {"fd", "file"}, {"fd", "command", "lease"}, {"fd", "fd", "fd", "file", "command", "lease"},
	}).Draw(t, "hows")
	steps := map[string]func(*rapid.T){
		"":        s.check,
		"acquire": s.acquire, "acquire more": s.acquire,
		"settle": s.settle, "settle more": s.settle,
		"write": s.write, "unlock": s.unlock,
		"end": s.end, "end more": s.end, "end again": s.end,
		"fork": s.fork, "enter": s.enter,
		"nothing": func(*rapid.T) {}, // all may be dead
	}
	for i := range 6 { // then little else can happen: rapid gives up if it draws what can't too often
		steps[fmt.Sprint("nobody ", i)] = func(t *rapid.T) {
			if len(s.live()) > 0 {
				t.Skip("somebody lives")
			}
		}
	}
	dying := map[string]func(*rapid.T){
		"kill": func(t *rapid.T) { s.kill(pick(t, s.live(), "who")) }, "close": s.close, "exit": s.exit,
	}
	broken := map[string]func(*rapid.T){"break": s.breakDir, "release": s.release}
	leased := map[string]func(*rapid.T){"expire": s.expire, "tick": s.tick, "renew": s.renew, "touch": s.touch, "join": s.join}
	made := map[string]func(*rapid.T){"mkdir": s.mkdir, "unlink": s.unlink}
	// Not all at once in most lives: what takes several of a kind would be rare.
	for _, some := range rapid.SampledFrom([][]map[string]func(*rapid.T){
		{dying}, {dying, broken}, {broken, leased}, {dying, made}, {dying, broken, leased, made},
	}).Draw(t, "what happens") {
		maps.Copy(steps, some)
	}
	for range 2 {
		t.Repeat(steps)
	}
	for _, p := range s.live() {
		s.kill(p)
	}
	for _, g := range s.grants {
		g.real.Abort()
	}
	s.grants = nil
	for s.now += time.Hour; len(s.closes)+len(s.exits)+len(s.ends)+len(s.table.Expired()) > 0; {
		switch {
		case len(s.ends) > 0:
			s.end(t)
		case len(s.closes) > 0:
			s.close(t)
		case len(s.exits) > 0:
			s.exit(t)
		default:
			s.expire(t)
		}
	}
	s.check(t)
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

// TestEndedTwice: who takes a directory again while two are ending his lock, of whom one
// gives up, has another one.
func TestEndedTwice(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	q := lockstate.Request{Process: f.parent, Dir: f.dir("D"), Kind: lockstate.Explicit, Protocol: "create", File: "a"}
	take := func(q lockstate.Request) lockstate.Lock {
		t.Helper()
		g, err := f.Acquire(closed, q)
		if err != nil {
			t.Fatal(err)
		}
		l, _ := g.Commit()
		return l
	}
	first := take(q)
	f.Doom(first.Token)
	f.Doom(first.Token)
	f.Remains(first.Token)
	q.Protocol, q.File, q.Key = "flock", "", "1"
	again := take(q)
	if again.Token == first.Token {
		t.Error("what is about to end was taken again")
	}
	f.end(first.Token)
	f.mayChange(f.parent, "D")
	if l, ended := f.ReleaseKey("1"); !ended || l.Token != again.Token {
		t.Errorf("ReleaseKey() = %+v, %t; want the end of the other one", l, ended)
	}
}

// TestFileAnew: a lock file that is made again while its lock is being ended is the new one's,
// also for whoever else is ending the first.
func TestFileAnew(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	take := func() lockstate.Lock {
		t.Helper()
		return f.commit(lockstate.Request{Process: f.parent, Dir: f.dir("D"), Kind: explicit, Protocol: "create", File: "a"})
	}
	first := take()
	if path, ok := f.KeptByFile(first.Token, "a"); path != "D" || !ok {
		t.Errorf("KeptByFile() = %q, %t; want D", path, ok)
	}
	f.Doom(first.Token)
	f.Doom(first.Token)
	again := take()
	for token, want := range map[uint64]bool{first.Token: false, again.Token: true} {
		if _, ok := f.KeptByFile(token, "a"); ok != want {
			t.Errorf("KeptByFile(%d) = %t, want %t", token, ok, want)
		}
	}
	f.end(first.Token)
	if l, ended := f.ReleaseFile(f.dir("D"), "a"); !ended || l.Token != again.Token {
		t.Errorf("ReleaseFile() = %+v, %t; want the end of the other one", l, ended)
	}
}
