package lockstate_test

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/anishathalye/porcupine"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// The tree of the histories, by index. parents leads up; -1 is the root.
var (
	linearPaths   = [...]string{"a", "a/b", "a/b/c", "a/d", "e"}
	linearParents = [...]int{-1, 0, 1, 0, -1}
)

const (
	linearDirs    = len(linearPaths)
	linearClients = 8 // 0 to 3 are a family, each the parent of the next
)

// related reports whether client p is c or an ancestor of it.
func related(p, c int) bool { return p == c || p < c && c < 4 }

type linearOp uint8

const (
	opAcquire linearOp = iota // explicit lock on dir
	opRelease                 // of the client's own lock on dir
	opWrite                   // value into dir
	opRead                    // what is in dir
)

type linearInput struct {
	op          linearOp
	client, dir int
	value       int
}

type linearOutput struct {
	ok    bool
	value int
}

// linearState is the table as the rules know it, if everything happens one
// after the other: the owners of each directory, the one in force last, and
// what was last written.
type linearState struct {
	owners [linearDirs][4]int // client+1; 0: none
	value  [linearDirs]int
}

// top returns the owner in force on d itself, as client+1.
func (s *linearState) top(d int) (owner int) {
	for _, o := range s.owners[d] {
		if o > 0 {
			owner = o
		}
	}
	return owner
}

// put adds an owner in front; drop takes one out. They report whether that
// was possible.
func (s *linearState) put(d, client int) bool {
	i := slices.Index(s.owners[d][:], 0)
	if i >= 0 {
		s.owners[d][i] = client + 1
	}
	return i >= 0
}

func (s *linearState) drop(d, client int) bool {
	i := slices.Index(s.owners[d][:], client+1)
	if i >= 0 {
		copy(s.owners[d][i:], s.owners[d][i+1:])
		s.owners[d][len(s.owners[d])-1] = 0
	}
	return i >= 0
}

// beneath reports whether d is top or below it.
func beneath(d, top int) bool {
	for ; d >= 0; d = linearParents[d] {
		if d == top {
			return true
		}
	}
	return false
}

// mayAcquire is C3, (a) to (c).
func (s *linearState) mayAcquire(c, dir int) bool {
	for d := range linearDirs {
		if o := s.top(d); o > 0 && beneath(dir, d) && !related(o-1, c) {
			return false
		}
		for _, o := range s.owners[d] {
			if o > 0 && d != dir && beneath(d, dir) && !related(c, o-1) {
				return false
			}
		}
	}
	return true
}

func (s *linearState) mayWrite(c, dir int) bool {
	for d := dir; d >= 0; d = linearParents[d] {
		if o := s.top(d); o > 0 {
			return related(o-1, c)
		}
	}
	return true
}

// step is the sequential model. strict: a refusal must have its reason at that
// very point. That cannot be asked of histories with writes: a write that was
// admitted counts from when it is done, and until then an acquisition waits
// although it refuses others already.
func step(strict bool) func(state, input, output any) (bool, any) {
	return func(state, input, output any) (bool, any) {
		s, in, out := state.(linearState), input.(linearInput), output.(linearOutput)
		switch in.op {
		case opAcquire:
			may := s.mayAcquire(in.client, in.dir)
			if !out.ok {
				return !may || !strict, s
			}
			return may && s.put(in.dir, in.client), s
		case opRelease:
			return s.drop(in.dir, in.client) && out.ok, s
		case opWrite:
			may := s.mayWrite(in.client, in.dir)
			if !out.ok {
				return !may || !strict, s
			}
			s.value[in.dir] = in.value
			return may, s
		default:
			return s.value[in.dir] == out.value, s
		}
	}
}

// linearRun is one history in the making.
type linearRun struct {
	table  *lockstate.Table
	dirs   [linearDirs]*lockstate.Dir
	cells  [linearDirs]atomic.Int64 // what the directories contain
	clock  atomic.Int64
	writes bool // whether changes take their time, and are read back

	mu      sync.Mutex
	history []porcupine.Operation
}

func (r *linearRun) record(in linearInput, do func() linearOutput) linearOutput {
	call := r.clock.Add(1)
	out := do()
	ret := r.clock.Add(1)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.history = append(r.history, porcupine.Operation{ClientId: in.client, Input: in, Call: call, Output: out, Return: ret})
	return out
}

// client runs a few random operations.
func (r *linearRun) client(c int, p *procid.Process, rnd *rand.Rand) {
	tokens := make(map[int]uint64)
	for n := range 5 {
		dir := rnd.IntN(linearDirs)
		in := linearInput{client: c, dir: dir, value: 100*c + n + 1}
		switch token := tokens[dir]; {
		case rnd.IntN(2) == 0:
			in.op = opWrite
			r.record(in, func() linearOutput { return r.write(p, in) })
			if r.writes {
				in.op = opRead
				r.record(in, func() linearOutput { return linearOutput{value: int(r.cells[dir].Load())} })
			}
		case token != 0:
			in.op = opRelease
			r.record(in, func() linearOutput {
				err := r.table.End(token, lockstate.Given)
				return linearOutput{ok: err == nil}
			})
			delete(tokens, dir)
		default:
			in.op = opAcquire
			r.record(in, func() linearOutput {
				token := r.acquire(p, in.dir)
				if token != 0 {
					tokens[dir] = token
				}
				return linearOutput{ok: token != 0}
			})
		}
	}
}

func (r *linearRun) acquire(p *procid.Process, dir int) uint64 {
	g, err := r.table.Acquire(nil, lockstate.Request{Process: p, Dir: r.dirs[dir], Kind: explicit, Protocol: "test"})
	if err != nil {
		return 0
	}
	l, _ := g.Commit()
	return l.Token
}

func (r *linearRun) write(p *procid.Process, in linearInput) linearOutput {
	op, err := r.table.Begin(lockstate.Change{Process: p, Dirs: []*lockstate.Dir{r.dirs[in.dir]}})
	if err != nil {
		return linearOutput{}
	}
	if r.writes {
		runtime.Gosched()
		r.cells[in.dir].Store(int64(in.value))
		runtime.Gosched()
	}
	op.End()
	return linearOutput{ok: true}
}

// TestLinearizable records short concurrent histories and looks for an order
// in which one after the other gives the same answers.
func TestLinearizable(t *testing.T) {
	var procs [linearClients]*procid.Process
	init := procid.FakeReaper(procid.ID{Pid: 1}, nil)
	for i := range procs {
		up := init
		if i > 0 && i < 4 {
			up = procs[i-1]
		}
		procs[i] = newProc(100+i, 1, up)
	}
	for name, writes := range map[string]bool{"decisions": false, "contents": true} {
		t.Run(name, func(t *testing.T) {
			model := porcupine.Model{Init: func() any { return linearState{} }, Step: step(!writes)}
			granted := 0
			for round := range 300 {
				r := &linearRun{table: lockstate.New(lockstate.Options{}), writes: writes}
				for i, path := range linearPaths {
					r.dirs[i] = dirAt(r.table, path)
				}
				var wg sync.WaitGroup
				for c, p := range procs {
					wg.Go(func() { r.client(c, p, rand.New(rand.NewPCG(uint64(round), uint64(c)))) })
				}
				wg.Wait()
				if !porcupine.CheckOperations(model, r.history) {
					t.Fatalf("round %d is not linearizable:\n%s", round, printHistory(r.history))
				}
				if err := r.table.Check(); err != nil {
					t.Fatalf("Check() = %v, want nil", err)
				}
				for _, op := range r.history {
					if op.Input.(linearInput).op == opAcquire && op.Output.(linearOutput).ok {
						granted++
					}
				}
			}
			if granted == 0 {
				t.Errorf("nothing was ever acquired: the histories prove nothing")
			}
		})
	}
}

func printHistory(history []porcupine.Operation) (s string) {
	slices.SortFunc(history, func(a, b porcupine.Operation) int { return int(a.Call - b.Call) })
	for _, op := range history {
		s += fmt.Sprintf("%3d-%3d %+v = %+v\n", op.Call, op.Return, op.Input, op.Output)
	}
	return s
}
