package lockstate_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// The reference: lists and path strings, searched from end to end, straight
// from the rules. Paths begin at "." so that a prefix test finds what is
// beneath: "./a/b" is beneath "./a" and ".".

type modelRow struct {
	Path    string
	Kind    lockstate.Kind
	Owner   procid.ID
	Token   uint64
	Files   []string
	Keys    []string
	Changed bool

	pending bool
	heirs   []procid.Ancestor
}

type modelHandle struct {
	proc  *procid.Process
	paths []string
	real  *lockstate.Handle

	closing bool
	closed  time.Duration // when it was
}

type modelOp struct {
	proc         *procid.Process
	paths, trees []string
	real         *lockstate.Op
}

type modelGrant struct {
	token   uint64 // 0: covered (A2)
	made    bool
	file    string
	key     string
	covered *modelOp // counts as an operation
	real    *lockstate.Grant
}

type model struct {
	table *lockstate.Table
	refs  map[string]*lockstate.Dir // references that the test owns

	paths   []string // the directories that exist; "." is the root
	live    []*procid.Process
	dead    []*procid.Process
	rows    []*modelRow // by token: on one path the last is in force (A13)
	handles []*modelHandle
	ops     []*modelOp
	grants  []*modelGrant
	token   uint64
	start   uint64
	clock   time.Duration
}

// at reports whether path is top or beneath it.
func at(path, top string) bool { return path == top || strings.HasPrefix(path, top+"/") }

func parentOf(path string) string { return path[:strings.LastIndexByte(path, '/')] }

func nameOf(path string) string { return path[strings.LastIndexByte(path, '/')+1:] }

// upward returns path and what is above it, nearest first.
func upward(path string) []string {
	var all []string
	for {
		all = append(all, path)
		if path == "." {
			return all
		}
		path = parentOf(path)
	}
}

// top is the row in force on path itself.
func (m *model) top(path string) *modelRow {
	for _, r := range slices.Backward(m.rows) {
		if r.Path == path {
			return r
		}
	}
	return nil
}

// governing is the governing lock: that on the nearest directory at or above path.
func (m *model) governing(path string) *modelRow {
	for _, p := range upward(path) {
		if r := m.top(p); r != nil {
			return r
		}
	}
	return nil
}

// holder is H1 and H2. Under a shared lock nobody is one (A5).
func (r *modelRow) holder(p *procid.Process) bool {
	return p != nil && r.Kind != lockstate.Shared && (p.ID() == r.Owner || descends(p, r.Owner))
}

func descends(p *procid.Process, id procid.ID) bool {
	return slices.ContainsFunc(p.Lineage(), func(a procid.Ancestor) bool { return a.ID == id })
}

func (m *model) process(id procid.ID) *procid.Process {
	for _, p := range slices.Concat(m.live, m.dead) {
		if p.ID() == id {
			return p
		}
	}
	return nil
}

func (m *model) row(token uint64) *modelRow {
	for _, r := range m.rows {
		if r.Token == token {
			return r
		}
	}
	return nil
}

// keyed is the row that a descriptor lock keeps.
func (m *model) keyed(key string) *modelRow {
	for _, r := range m.rows {
		if !r.pending && slices.Contains(r.Keys, key) {
			return r
		}
	}
	return nil
}

// drop ends a row that lost its keeper, if that was the last one.
func (m *model) drop(r *modelRow) (ended bool) {
	if ended = len(r.Files)+len(r.Keys) == 0; ended {
		m.end(r.Token)
	}
	return ended
}

// rekey has a descriptor lock keep r, and no other row.
func (m *model) rekey(r *modelRow, key string) {
	if old := m.keyed(key); old != nil && old != r {
		old.Keys = slices.DeleteFunc(old.Keys, func(k string) bool { return k == key })
		m.drop(old)
	}
	if !slices.Contains(r.Keys, key) {
		r.Keys = append(r.Keys, key)
	}
}

func (m *model) end(token uint64) {
	m.rows = slices.DeleteFunc(m.rows, func(r *modelRow) bool { return r.Token == token })
}

// A verdict is what the rules say: yes, or no because of one of these locks or
// of all these handles.
type verdict struct {
	err     error
	tokens  []uint64
	handles []*modelHandle
}

func heldBy(r *modelRow) verdict {
	return verdict{err: lockstate.ErrHeld, tokens: []uint64{r.Token}}
}

// granted is the last row on a directory that is neither pending nor shared.
func (m *model) granted(path string) *modelRow {
	for _, r := range slices.Backward(m.rows) {
		if r.Path == path && !r.pending && r.Kind != lockstate.Shared {
			return r
		}
	}
	return nil
}

// inForce is what has to be held to change something in path: the last row of the nearest
// directory and, since one that is pending may come to nothing, those behind it down to one
// that is not. What is shared keeps nobody out then.
func (m *model) inForce(path string) (all []*modelRow) {
	for _, q := range upward(path) {
		for _, r := range slices.Backward(m.rows) {
			if r.Path != q || len(all) > 0 && r.Kind == lockstate.Shared {
				continue
			}
			if all = append(all, r); !r.pending {
				return all
			}
		}
	}
	return all
}

// mayAcquire is C3, and A5.
func (m *model) mayAcquire(p *procid.Process, path string, kind lockstate.Kind) verdict {
	var sharers []*modelRow // those in front, and what they share
	var gov *modelRow
	var delegates *modelRow // whose holders keep what they have open
	for _, r := range slices.Backward(m.rows) {
		if r.Path == path && r.Kind != lockstate.Shared {
			gov = r
			break
		}
		if r.Path == path {
			sharers = append(sharers, r)
		}
	}
	shared := false // also behind what its owner is about to have instead
	for _, r := range m.rows {
		if r.Path == path && (r.Kind == lockstate.Shared || !r.pending) {
			shared = r.Kind == lockstate.Shared
		}
	}
	if shared && kind != lockstate.Shared {
		var others verdict
		for _, r := range m.rows {
			if r.Path == path && r.Kind == lockstate.Shared && r.Owner != p.ID() {
				others.err, others.tokens = lockstate.ErrHeld, append(others.tokens, r.Token)
			}
		}
		if others.err != nil {
			return others
		}
	}
	// One who shares what is his lets others do so, when he has got both.
	letsIn := func(r *modelRow) bool {
		return kind == lockstate.Shared && slices.ContainsFunc(sharers, func(s *modelRow) bool { return !s.pending && s.Owner == r.Owner })
	}
	for _, r := range slices.Backward(m.rows) {
		if gov == nil || r.Path != path || r.Kind == lockstate.Shared {
			continue
		}
		if !letsIn(r) && !r.holder(p) {
			return heldBy(r)
		}
		if !r.pending {
			break
		}
	}
	if gov != nil && !letsIn(gov) { // else it is none of p's
		delegates = m.granted(path)
	}
	for _, q := range upward(path)[1:] { // (a), (b)
		r, behind := m.top(q), m.granted(q)
		if r != nil && !r.holder(p) {
			return heldBy(r)
		}
		if r != nil && r.pending && behind != nil && !behind.holder(p) {
			return heldBy(behind)
		}
		if delegates == nil {
			delegates = behind
		}
	}
	var below verdict // (c)
	for _, r := range m.rows {
		if r.Path != path && at(r.Path, path) && r.Owner != p.ID() && !descends(m.process(r.Owner), p.ID()) {
			below.err = lockstate.ErrHeld
			below.tokens = append(below.tokens, r.Token)
		}
	}
	if below.err != nil {
		return below
	}
	for _, h := range m.handles { // (d)
		beneath := slices.ContainsFunc(h.paths, func(q string) bool { return at(q, path) })
		related := h.proc.ID() == p.ID() || descends(h.proc, p.ID())
		if beneath && !related && (delegates == nil || !delegates.holder(h.proc)) {
			below.err = lockstate.ErrOpen
			below.handles = append(below.handles, h)
		}
	}
	return below
}

// mayChange is C1, C2, W1 and, for what enters by rename, W3.
func (m *model) mayChange(p *procid.Process, paths, trees []string, into, entering string) verdict {
	for _, q := range paths {
		for _, r := range m.inForce(q) {
			if !r.holder(p) {
				return heldBy(r)
			}
		}
	}
	for _, tree := range trees {
		v := verdict{}
		for _, r := range m.rows {
			if at(r.Path, tree) && slices.Contains(m.inForce(r.Path), r) && !r.holder(p) {
				v.err = lockstate.ErrHeld
				v.tokens = append(v.tokens, r.Token)
			}
		}
		if v.err != nil {
			return v
		}
	}
	if into == "" {
		return verdict{}
	}
	held := m.inForce(into)
	v := verdict{}
	for _, h := range m.handles {
		stranger := slices.ContainsFunc(held, func(r *modelRow) bool { return !r.holder(h.proc) })
		if slices.ContainsFunc(h.paths, func(q string) bool { return at(q, entering) }) && stranger {
			v.err = lockstate.ErrOpen
			v.handles = append(v.handles, h)
		}
	}
	return v
}

// touch is R5: what the locks remember of a change.
func (m *model) touch(paths []string) {
	for _, r := range m.rows {
		if slices.ContainsFunc(paths, func(q string) bool { return at(q, r.Path) }) {
			r.Changed = true
		}
	}
}

// rename carries everything along (R3). move says where a path is now.
func (m *model) rename(move func(string) string) {
	each := func(paths []string) {
		for i := range paths {
			paths[i] = move(paths[i])
		}
	}
	each(m.paths)
	for _, r := range m.rows {
		r.Path = move(r.Path)
	}
	for _, h := range m.handles {
		each(h.paths)
	}
	for _, o := range m.ops {
		each(o.paths)
		each(o.trees)
	}
	refs := make(map[string]*lockstate.Dir)
	for p, d := range m.refs {
		refs[move(p)] = d
	}
	m.refs = refs
}

// remove forgets everything at and beneath path (R3).
func (m *model) remove(path string) {
	beneath := func(q string) bool { return at(q, path) }
	m.rows = slices.DeleteFunc(m.rows, func(r *modelRow) bool { return beneath(r.Path) })
	m.paths = slices.DeleteFunc(m.paths, beneath)
	for _, h := range m.handles {
		h.paths = slices.DeleteFunc(h.paths, beneath)
	}
	for _, o := range m.ops {
		o.paths = slices.DeleteFunc(o.paths, beneath)
		o.trees = slices.DeleteFunc(o.trees, beneath)
	}
	maps.DeleteFunc(m.refs, func(q string, _ *lockstate.Dir) bool { return beneath(q) })
}

// busy reports whether an operation or an acquisition is under way at or
// beneath path: then no caller of the table may rename or remove it.
func (m *model) busy(path string) bool {
	for _, o := range m.ops {
		if slices.ContainsFunc(slices.Concat(o.paths, o.trees), func(q string) bool { return at(q, path) }) {
			return true
		}
	}
	return slices.ContainsFunc(m.grants, func(g *modelGrant) bool {
		r := m.row(g.token)
		return r != nil && at(r.Path, path)
	})
}

// awaited reports whether an acquisition of path has operations to wait for:
// those that change something beneath, and those that move or remove path or
// what it is in (W3, C1).
func (m *model) awaited(path string) bool {
	return slices.ContainsFunc(m.ops, func(o *modelOp) bool {
		beneath := func(q string) bool { return at(q, path) }
		return slices.ContainsFunc(o.paths, beneath) ||
			slices.ContainsFunc(o.trees, func(q string) bool { return beneath(q) || at(path, q) })
	})
}

// dir returns the table's directory for path.
func (m *model) dir(path string) *lockstate.Dir {
	if path == "." {
		return m.table.Root()
	}
	d := m.refs[path]
	if d == nil {
		d = m.table.Dir(m.dir(parentOf(path)), nameOf(path))
		m.refs[path] = d
	}
	return d
}

func (m *model) dirs(paths []string) []*lockstate.Dir {
	var all []*lockstate.Dir
	for _, p := range paths {
		all = append(all, m.dir(p))
	}
	return all
}

// compare fails unless the table decided as v says.
func (m *model) compare(t *rapid.T, call string, err error, v verdict) {
	t.Helper()
	if (err == nil) != (v.err == nil) || err != nil && !errors.Is(err, v.err) {
		t.Fatalf("%s = %v, want %v because of %v", call, err, v.err, v.tokens)
	}
	var held *lockstate.HeldError
	if !errors.As(err, &held) {
		return
	}
	if v.err == lockstate.ErrHeld && !slices.Contains(v.tokens, held.Lock.Token) {
		t.Fatalf("%s was refused because of token %d, want one of %v", call, held.Lock.Token, v.tokens)
	}
	for _, s := range held.Handles {
		if !slices.ContainsFunc(v.handles, func(h *modelHandle) bool { return h.real == s.Handle }) {
			t.Fatalf("%s was refused because of a handle in %s, which is not in the way", call, s.Path)
		}
	}
	if v.err == lockstate.ErrOpen && len(held.Handles) == 0 {
		t.Fatalf("%s names no handle, want one", call)
	}
}

// pick draws one of all, or skips the step.
func pick[T any](t *rapid.T, all []T, label string) T {
	if len(all) == 0 {
		t.Skip("no " + label)
	}
	return all[rapid.IntRange(0, len(all)-1).Draw(t, label)]
}

func (m *model) pickProcess(t *rapid.T) *procid.Process {
	return pick(t, m.live, "process")
}

// pickPaths draws one or two directories.
func (m *model) pickPaths(t *rapid.T) []string {
	paths := []string{pick(t, m.paths, "path")}
	if rapid.IntRange(0, 3).Draw(t, "two") == 0 {
		paths = append(paths, pick(t, m.paths, "path"))
	}
	return paths
}

func (m *model) Spawn(t *rapid.T) {
	if len(m.live) > 8 {
		t.Skip("enough processes")
	}
	m.start++
	// Few pids: those of the dead come back (H1).
	id := procid.ID{Pid: rapid.IntRange(2, 12).Draw(t, "pid"), Start: m.start}
	fake := procid.Fake
	if rapid.IntRange(0, 9).Draw(t, "reaper") == 0 {
		fake = procid.FakeReaper
	}
	m.live = append(m.live, fake(id, m.pickProcess(t)))
}

func (m *model) Mkdir(t *rapid.T) {
	if len(m.paths) > 12 {
		t.Skip("enough directories")
	}
	path := pick(t, m.paths, "parent") + "/" + rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "name")
	if slices.Contains(m.paths, path) || strings.Count(path, "/") > 5 {
		t.Skip("exists")
	}
	m.paths = append(m.paths, path)
}

func (m *model) Begin(t *rapid.T) {
	p, paths := m.pickProcess(t), m.pickPaths(t)
	quiet := rapid.Bool().Draw(t, "quiet")
	var trees []string
	if rapid.IntRange(0, 3).Draw(t, "tree") == 0 {
		trees = []string{pick(t, m.paths, "tree")}
	}
	v := m.mayChange(p, paths, trees, "", "")
	op, err := m.table.Begin(lockstate.Change{Process: p, Dirs: m.dirs(paths), Trees: m.dirs(trees), Quiet: quiet})
	m.compare(t, fmt.Sprintf("Begin(%v, %v, trees %v)", p.ID(), paths, trees), err, v)
	if err != nil {
		return
	}
	if !quiet {
		m.touch(paths)
	}
	m.ops = append(m.ops, &modelOp{proc: p, paths: paths, trees: trees, real: op})
}

func (m *model) EndOp(t *rapid.T) {
	o := pick(t, m.ops, "operation")
	if slices.ContainsFunc(m.grants, func(g *modelGrant) bool { return g.covered == o }) {
		t.Skip("a grant's")
	}
	o.real.End()
	m.dropOp(o)
}

// Change begins and ends at once.
func (m *model) Change(t *rapid.T) {
	before := len(m.ops)
	m.Begin(t)
	if len(m.ops) > before {
		m.ops[before].real.End()
		m.dropOp(m.ops[before])
	}
}

func (m *model) dropOp(o *modelOp) {
	m.ops = slices.DeleteFunc(m.ops, func(e *modelOp) bool { return e == o })
}

func (m *model) AcquireImplicit(t *rapid.T) { m.acquire(t, lockstate.Implicit, "", "") }

func (m *model) AcquireExplicit(t *rapid.T) {
	m.acquire(t, lockstate.Explicit, rapid.SampledFrom([]string{"", "devserver", "devserver.lock"}).Draw(t, "file"), "")
}

// AcquireKey is for a lock on a descriptor, that may have one already.
func (m *model) AcquireKey(t *rapid.T) {
	kind := rapid.SampledFrom([]lockstate.Kind{lockstate.Explicit, lockstate.Shared}).Draw(t, "kind")
	m.acquire(t, kind, "", drawKey(t))
}

func drawKey(t *rapid.T) string {
	return rapid.SampledFrom([]string{"k", "l", "m", "n"}).Draw(t, "key")
}

func (m *model) acquire(t *rapid.T, kind lockstate.Kind, file, key string) {
	p, path := m.pickProcess(t), pick(t, m.paths, "path")
	call := fmt.Sprintf("Acquire(%v, %s, %v, %q, %q)", p.ID(), path, kind, file, key)
	q := lockstate.Request{Process: p, Dir: m.dir(path), Kind: kind, Protocol: "test", File: file}
	if key != "" {
		q.Key = key
	}
	// The cancel channel is closed: what would wait is refused.
	real, err := m.table.Acquire(closed, q)
	if path == "." {
		m.compare(t, call, err, verdict{err: lockstate.ErrRoot}) // C4
		return
	}
	v := m.mayAcquire(p, path, kind)
	g := m.governing(path)
	covered := kind == lockstate.Implicit && g != nil && g.holder(p) // A2, whatever is above or beneath
	kept := m.keyed(key)
	keeps := kept != nil && kept.Path == path && kept.Kind == kind // whoever asks again
	if v.err != nil && !covered && !keeps {
		m.compare(t, call, err, v)
		return
	}
	own := m.top(path)
	if kind == lockstate.Shared {
		own = nil
		for _, r := range m.rows {
			if own == nil && r.Path == path && r.Kind == kind && r.Owner == p.ID() && !r.pending {
				own = r
			}
		}
	}
	switch {
	case keeps:
		m.compare(t, call, err, verdict{})
		m.grants = append(m.grants, &modelGrant{token: kept.Token, key: key, real: real})
	case covered && g.pending:
		m.compare(t, call, err, verdict{err: lockstate.ErrCancelled}) // it waits for that to be decided
	case covered:
		m.compare(t, call, err, verdict{})
		o := &modelOp{proc: p, paths: []string{path}}
		m.ops = append(m.ops, o)
		m.grants = append(m.grants, &modelGrant{covered: o, real: real})
	case kind != lockstate.Implicit && own != nil && own.Kind == kind && own.Owner == p.ID() && !own.pending:
		m.compare(t, call, err, verdict{})
		m.grants = append(m.grants, &modelGrant{token: own.Token, file: file, key: key, real: real})
	case m.awaited(path):
		m.compare(t, call, err, verdict{err: lockstate.ErrCancelled})
		m.token++
	default:
		m.compare(t, call, err, verdict{})
		m.token++
		r := &modelRow{Path: path, Kind: kind, Owner: p.ID(), Token: m.token, pending: true, heirs: p.Lineage()}
		if file != "" {
			r.Files = []string{file}
		}
		if key != "" {
			r.Keys = []string{key}
		}
		m.touchOpen(r)
		m.rows = append(m.rows, r)
		m.grants = append(m.grants, &modelGrant{token: r.Token, made: true, real: real})
	}
}

// touchOpen marks a lock whose holders have something open for writing already (R5).
func (m *model) touchOpen(r *modelRow) {
	for _, h := range m.handles {
		closing := h.closing && m.clock-h.closed < time.Second
		r.Changed = r.Changed || !closing && h.changes(r)
	}
}

// changes reports whether what is written through h is a change under a lock, by one of
// its holders.
func (h *modelHandle) changes(r *modelRow) bool {
	beneath := slices.ContainsFunc(h.paths, func(path string) bool { return at(path, r.Path) })
	return beneath && r.holder(h.proc)
}

func (m *model) pickGrant(t *rapid.T) *modelGrant {
	g := pick(t, m.grants, "grant")
	m.dropGrant(g)
	return g
}

func (m *model) dropGrant(g *modelGrant) {
	m.grants = slices.DeleteFunc(m.grants, func(e *modelGrant) bool { return e == g })
	m.dropOp(g.covered)
}

func (m *model) Commit(t *rapid.T) { m.commit(t, m.pickGrant(t)) }

// Take acquires and commits at once.
func (m *model) Take(t *rapid.T) {
	before := len(m.grants)
	rapid.SampledFrom([]func(*rapid.T){m.AcquireExplicit, m.AcquireImplicit, m.AcquireKey}).Draw(t, "how")(t)
	if len(m.grants) > before {
		g := m.grants[before]
		m.dropGrant(g)
		m.commit(t, g)
	}
}

func (m *model) commit(t *rapid.T, g *modelGrant) {
	lock, ok := g.real.Commit()
	r := m.row(g.token)
	if want := g.covered != nil || r != nil; ok != want || lock.Token != g.token {
		t.Fatalf("Commit() of token %d = token %d, %v, want %v", g.token, lock.Token, ok, want)
	}
	switch {
	case r == nil:
	case !g.made && g.key != "":
		m.rekey(r, g.key)
	case !g.made:
		if g.file != "" && !slices.Contains(r.Files, g.file) {
			r.Files = append(r.Files, g.file)
		}
	default:
		for _, k := range r.Keys {
			m.rekey(r, k)
		}
		r.pending = false
		if r.Kind == lockstate.Explicit { // A13
			m.supersede(r, func(e *modelRow) bool {
				return e.Kind == lockstate.Implicit || e.Kind == lockstate.Shared && len(e.Keys) == 0
			})
		}
	}
}

// supersede ends those locks of the owner of an explicit one that this one replaces (A13).
func (m *model) supersede(r *modelRow, replaced func(*modelRow) bool) {
	m.rows = slices.DeleteFunc(m.rows, func(e *modelRow) bool {
		ends := e != r && e.Path == r.Path && e.Owner == r.Owner && replaced(e)
		r.Changed = r.Changed || ends && e.Changed // what was changed before counts for R5
		return ends
	})
}

func (m *model) Abort(t *rapid.T) {
	g := m.pickGrant(t)
	g.real.Abort()
	if g.made {
		m.end(g.token)
	}
}

func (m *model) Open(t *rapid.T) {
	p, paths := m.pickProcess(t), m.pickPaths(t)
	v := m.mayChange(p, paths, nil, "", "")
	h, err := m.table.OpenHandle(lockstate.Change{Process: p, Dirs: m.dirs(paths)}, "f")
	m.compare(t, fmt.Sprintf("OpenHandle(%v, %v)", p.ID(), paths), err, v)
	if err == nil {
		m.touch(paths)
		m.handles = append(m.handles, &modelHandle{proc: p, paths: paths, real: h})
	}
}

func (m *model) Close(t *rapid.T) {
	h := pick(t, m.handles, "handle")
	h.real.Close()
	m.handles = slices.DeleteFunc(m.handles, func(e *modelHandle) bool { return e == h })
}

// Closing is for a descriptor that may not be the last.
func (m *model) Closing(t *rapid.T) {
	h := pick(t, m.handles, "handle")
	h.real.Closing()
	for _, r := range m.rows {
		r.Changed = r.Changed || h.closing && h.changes(r)
	}
	h.closing, h.closed = true, m.clock
}

// Later is for a descriptor that was closed some time ago, and was not the last.
func (m *model) Later(*rapid.T) { m.clock += time.Second }

func (m *model) Moved(t *rapid.T) {
	h := pick(t, m.handles, "handle")
	h.paths = nil
	if rapid.IntRange(0, 4).Draw(t, "unlinked") > 0 {
		h.paths = m.pickPaths(t)
	}
	h.real.Moved("g", m.dirs(h.paths)...)
}

// ReleaseFile is R1.
func (m *model) ReleaseFile(t *rapid.T) {
	path := pick(t, m.paths, "path")
	name := rapid.SampledFrom([]string{"devserver", "devserver.lock"}).Draw(t, "file")
	want := uint64(0)
	for _, r := range slices.Backward(m.rows) {
		if i := slices.Index(r.Files, name); r.Path == path && i >= 0 {
			if r.Files = slices.Delete(r.Files, i, i+1); m.drop(r) {
				want = r.Token
			}
			break
		}
	}
	l, ok := m.table.ReleaseFile(m.dir(path), name)
	if l.Token != want || ok != (want != 0) {
		t.Fatalf("ReleaseFile(%s, %s) = token %d, %v, want token %d", path, name, l.Token, ok, want)
	}
}

// ReleaseKey is R2.
func (m *model) ReleaseKey(t *rapid.T) {
	key, want := drawKey(t), uint64(0)
	if r := m.keyed(key); r != nil {
		r.Keys = slices.DeleteFunc(r.Keys, func(k string) bool { return k == key })
		if m.drop(r) {
			want = r.Token
		}
	}
	if l, ok := m.table.ReleaseKey(key); ok != (want != 0) || ok && l.Token != want {
		t.Fatalf("ReleaseKey(%s) = token %d, %v, want token %d", key, l.Token, ok, want)
	}
}

func (m *model) EndLock(t *rapid.T) {
	r := pick(t, m.rows, "row")
	if err := m.table.End(r.Token, lockstate.Broken); err != nil {
		t.Fatalf("End(%d) = %v, want nil", r.Token, err)
	}
	m.end(r.Token)
	if err := m.table.End(r.Token, lockstate.Broken); err != lockstate.ErrNoLock {
		t.Fatalf("second End(%d) = %v, want %v", r.Token, err, lockstate.ErrNoLock)
	}
}

// Exit is R4 and R5.
func (m *model) Exit(t *rapid.T) {
	p := m.pickProcess(t)
	if p == m.live[0] {
		t.Skip("init lives")
	}
	m.live = slices.DeleteFunc(m.live, func(e *procid.Process) bool { return e == p })
	m.dead = append(m.dead, p)
	how := rapid.SampledFrom([]procid.Exit{{Known: true}, {}, {Missed: true}, {Known: true, Code: 1}, {Known: true, Signal: 9}}).Draw(t, "status")

	var wantDead []uint64
	var wantHeirs []procid.ID
	var passed []*modelRow
	for _, r := range m.rows {
		if r.Owner != p.ID() {
			continue
		}
		m.touchOpen(r)
		passes := !how.Missed && (!how.Known || how.Code == 0 && how.Signal == 0) && !r.pending && !r.Changed &&
			len(r.heirs) > 0 && !r.heirs[0].Reaper &&
			slices.ContainsFunc(m.live, func(e *procid.Process) bool { return e.ID() == r.heirs[0].ID })
		if !passes {
			wantDead = append(wantDead, r.Token)
			continue
		}
		r.Owner, r.heirs = r.heirs[0].ID, r.heirs[1:]
		m.touchOpen(r)
		if !slices.Contains(wantHeirs, r.Owner) {
			wantHeirs = append(wantHeirs, r.Owner)
		}
		passed = append(passed, r)
	}
	for _, r := range passed {
		if r.Kind == lockstate.Explicit {
			m.supersede(r, func(e *modelRow) bool { return e.Kind == lockstate.Implicit })
		}
	}
	locks, heirs := m.table.Exit(p.ID(), how, alive(m.live...))
	if diff := cmp.Diff(wantDead, tokensOf(locks)); diff != "" {
		t.Fatalf("Exit(%v, %+v): dead locks (-want +got):\n%s", p.ID(), how, diff)
	}
	if len(heirs) != len(wantHeirs) || slices.ContainsFunc(heirs, func(id procid.ID) bool { return !slices.Contains(wantHeirs, id) }) {
		t.Fatalf("Exit(%v, %+v): heirs %v, want %v", p.ID(), how, heirs, wantHeirs)
	}
	if rapid.Bool().Draw(t, "clean up") {
		for _, token := range wantDead {
			if err := m.table.End(token, lockstate.Exited); err != nil {
				t.Fatalf("End(%d) = %v, want nil", token, err)
			}
			m.end(token)
		}
	}
}

func tokensOf(locks []lockstate.Lock) (tokens []uint64) {
	for _, l := range locks {
		tokens = append(tokens, l.Token)
	}
	slices.Sort(tokens)
	return tokens
}

// Move is rename(2) of a directory, by a process that asks first.
func (m *model) Move(t *rapid.T) {
	p, from, parent := m.pickProcess(t), pick(t, m.paths, "from"), pick(t, m.paths, "into")
	to := parent + "/" + rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "name")
	if from == "." || at(parent, from) || to == from || m.busy(from) || slices.Contains(m.paths, to) {
		t.Skip("not a rename")
	}
	v := m.mayChange(p, []string{parentOf(from), parent}, []string{from}, parent, from)
	op, err := m.table.Begin(lockstate.Change{
		Process: p, Dirs: m.dirs([]string{parentOf(from), parent}), Trees: m.dirs([]string{from}),
		Into: m.dir(parent), EnteringTree: m.dir(from),
	})
	m.compare(t, fmt.Sprintf("Begin(%v, rename %s to %s)", p.ID(), from, to), err, v)
	if err != nil {
		return
	}
	m.touch([]string{parentOf(from), parent})
	m.table.Move(m.dir(from), m.dir(parent), nameOf(to))
	op.End()
	m.rename(func(q string) string {
		if at(q, from) {
			return to + q[len(from):]
		}
		return q
	})
}

// Exchange is renameat2(2) with RENAME_EXCHANGE.
func (m *model) Exchange(t *rapid.T) {
	p, a, b := m.pickProcess(t), pick(t, m.paths, "a"), pick(t, m.paths, "b")
	if at(a, b) || at(b, a) || m.busy(a) || m.busy(b) {
		t.Skip("not an exchange")
	}
	paths := []string{parentOf(a), parentOf(b)}
	v := m.mayChange(p, paths, []string{a, b}, "", "")
	op, err := m.table.Begin(lockstate.Change{Process: p, Dirs: m.dirs(paths), Trees: m.dirs([]string{a, b})})
	m.compare(t, fmt.Sprintf("Begin(%v, exchange %s and %s)", p.ID(), a, b), err, v)
	if err != nil {
		return
	}
	m.touch(paths)
	m.table.Exchange(m.dir(a), m.dir(b))
	op.End()
	m.rename(func(q string) string {
		switch {
		case at(q, a):
			return b + q[len(a):]
		case at(q, b):
			return a + q[len(b):]
		}
		return q
	})
}

// Remove is rmdir(2), of a tree at once.
func (m *model) Remove(t *rapid.T) {
	p, path := m.pickProcess(t), pick(t, m.paths, "path")
	if path == "." || m.busy(path) {
		t.Skip("not removable")
	}
	v := m.mayChange(p, []string{parentOf(path)}, []string{path}, "", "")
	op, err := m.table.Begin(lockstate.Change{Process: p, Dirs: m.dirs([]string{parentOf(path)}), Trees: m.dirs([]string{path})})
	m.compare(t, fmt.Sprintf("Begin(%v, rmdir %s)", p.ID(), path), err, v)
	if err != nil {
		return
	}
	m.touch([]string{parentOf(path)})
	m.table.Remove(m.dir(path))
	op.End()
	m.remove(path)
}

// Forget gives a reference back that nothing under way needs.
func (m *model) Forget(t *rapid.T) {
	path := pick(t, slices.Sorted(maps.Keys(m.refs)), "reference")
	if m.busy(path) {
		t.Skip("needed")
	}
	m.table.Forget(m.refs[path])
	delete(m.refs, path)
}

// known reports whether something keeps path in the table.
func (m *model) known(path string) bool {
	for q := range m.refs {
		if at(q, path) {
			return true
		}
	}
	return path == "." ||
		slices.ContainsFunc(m.rows, func(r *modelRow) bool { return at(r.Path, path) }) ||
		slices.ContainsFunc(m.handles, func(h *modelHandle) bool {
			return slices.ContainsFunc(h.paths, func(q string) bool { return at(q, path) })
		})
}

// check compares everything that can be seen.
func (m *model) check(t *rapid.T) {
	if err := m.table.Check(); err != nil {
		t.Fatalf("Check() = %v, want nil", err)
	}
	if m.table.Len() != len(m.rows) {
		t.Fatalf("Len() = %d, want %d", m.table.Len(), len(m.rows))
	}
	for _, path := range m.paths {
		names := strings.Split(path, "/")[1:]
		d, ok := m.table.Find(names...)
		if ok != m.known(path) {
			t.Fatalf("Find(%s) = %v, want %v", path, ok, m.known(path))
		}
		if !ok {
			continue
		}
		m.checkDir(t, path, d)
		if path != "." {
			m.table.Forget(d)
		}
	}
}

func (m *model) checkDir(t *rapid.T, path string, d *lockstate.Dir) {
	if got := "./" + m.table.Path(d); path != "." && got != path {
		t.Fatalf("Path(%s) = %s", path, got)
	}
	if got := m.table.Level(d); got != strings.Count(path, "/") {
		t.Fatalf("Level(%s) = %d, want %d", path, got, strings.Count(path, "/"))
	}
	on := m.table.On(d)
	for _, r := range m.rows {
		if r.Path != path || r.pending {
			continue
		}
		if len(on) == 0 || !r.shows(on[0]) {
			t.Fatalf("On(%s) = … %+v, want next %+v", path, on, r)
		}
		on = on[1:]
	}
	if len(on) > 0 {
		t.Fatalf("On(%s) = … %+v, want no more", path, on)
	}
	gov := m.governing(path)
	if l, ok := m.table.Governing(d); ok != (gov != nil) || ok && !gov.shows(l) {
		t.Fatalf("Governing(%s) = %+v, %v, want %+v", path, l, ok, gov)
	}
	for _, p := range m.live {
		if want, got := gov == nil || gov.holder(p), m.table.Holds(p, d); got != want {
			t.Fatalf("Holds(%v, %s) = %v, want %v", p.ID(), path, got, want)
		}
	}
}

// shows reports whether l is what can be seen of r.
func (r *modelRow) shows(l lockstate.Lock) bool {
	return "./"+l.Path == r.Path && l.Kind == r.Kind && l.Owner == r.Owner && l.Token == r.Token &&
		l.Changed == r.Changed && slices.Equal(l.Files, r.Files) && len(l.Keys) == len(r.Keys) &&
		!slices.ContainsFunc(r.Keys, func(k string) bool { return !slices.Contains(l.Keys, any(k)) })
}

// drain ends everything; the table must be empty then.
func (m *model) drain(t *rapid.T) {
	for len(m.grants) > 0 {
		g := m.grants[0]
		g.real.Abort()
		m.dropOp(g.covered)
		m.grants = m.grants[1:]
		if g.made {
			m.end(g.token)
		}
	}
	for _, o := range m.ops {
		o.real.End()
	}
	for _, r := range m.rows {
		if err := m.table.End(r.Token, lockstate.Given); err != nil {
			t.Fatalf("End(%d) = %v, want nil", r.Token, err)
		}
	}
	for _, h := range m.handles {
		h.real.Close()
	}
	for _, d := range m.refs {
		m.table.Forget(d)
	}
	m.rows, m.handles, m.ops, m.refs = nil, nil, nil, nil
	m.check(t) // nothing is known any more: nothing leaks
}

// TestModel drives the table and the reference with the same random steps. The
// flags of rapid work; its default, one hundred short runs, would leave rare
// meetings out.
func TestModel(t *testing.T) {
	for range 20 {
		rapid.Check(t, testModel)
	}
}

func testModel(t *rapid.T) {
	m := &model{
		refs:  make(map[string]*lockstate.Dir),
		paths: []string{".", "./a", "./a/a", "./a/b", "./b"},
		live:  []*procid.Process{procid.FakeReaper(procid.ID{Pid: 1, Start: 1}, nil)},
		start: 1, clock: time.Hour,
	}
	m.table = lockstate.New(lockstate.Options{Clock: func() time.Duration { return m.clock }})
	for range 2 { // two families to begin with
		m.start += 2
		parent := newProc(10, m.start, m.live[0])
		m.live = append(m.live, parent, newProc(11, m.start+1, parent))
	}
	m.start++
	steps := map[string]func(*rapid.T){
		"": m.check, "Spawn": m.Spawn, "Mkdir": m.Mkdir, "Exit": m.Exit,
		"Begin": m.Begin, "EndOp": m.EndOp, "EndOp2": m.EndOp, "Change": m.Change,
		"AcquireImplicit": m.AcquireImplicit, "AcquireExplicit": m.AcquireExplicit,
		"Commit": m.Commit, "Abort": m.Abort, "Take": m.Take, "Take2": m.Take, "Take3": m.Take,
		"Open": m.Open, "Closing": m.Closing, "Later": m.Later, "Close": m.Close, "Moved": m.Moved,
		"AcquireKey": m.AcquireKey, "ReleaseKey": m.ReleaseKey, "ReleaseFile": m.ReleaseFile, "EndLock": m.EndLock,
		"Move": m.Move, "Exchange": m.Exchange, "Remove": m.Remove, "Forget": m.Forget,
	}
	for range 2 {
		t.Repeat(steps)
	}
	m.drain(t)
}
