//go:build linux

package tests

import (
	"path/filepath"
	"strings"
	"testing"
)

// A walk performs every operation in one state of the lock, as one caller.
type walk struct {
	t       *testing.T
	m       *Mount
	ref     *reference
	state   string
	caller  string
	agent   *Agent // the caller
	subject string // {D}, relative to the cell of an operation
}

var callers = []string{"holder", "descendant", "stranger", "root", "orphan"}

// states are those of D, with who calls in them. Where it is shared nobody writes,
// the sharers neither (A5); and nobody where writing needs a lock (W4).
var states = []struct {
	name    string
	callers []string
}{
	{"free", callers},
	{"implicit", callers},
	{"explicit", callers},
	{"above", callers},
	{"flock", callers[:4]},
	{"lease", callers[:4]},
	{"shared", callers[2:4]},
	{"denied", callers[2:4]},
}

// TestW1 walks every mutating operation × caller × state of the lock. Who holds
// hears and does what a plain directory answers and becomes; who does not hears
// EBUSY, or EEXIST for the lock name (W2, A8), and nothing at all changes in the
// backing.
func TestW1(t *testing.T) {
	need(t, "root", "fuse")
	m, deny := mount(t), mount(t, "--unlocked=deny")
	ref := newReference(t)
	total := 0
	for _, state := range states {
		for _, caller := range state.callers {
			m := m
			if state.name == "denied" {
				m = deny
			}
			t.Run(state.name+"/"+caller, func(t *testing.T) {
				total += (&walk{t: t, m: m, ref: ref, state: state.name, caller: caller}).run()
			})
			if m.dead() {
				t.Fatal("the daemon died")
			}
		}
	}
	for _, caller := range callers {
		t.Run("beneath/"+caller, func(t *testing.T) { total += walkBeneath(t, m, ref, caller) })
	}
	t.Logf("%d combinations of operation, caller and state", total)
}

func (w *walk) run() (cells int) {
	w.subject = "D"
	if w.state == "above" {
		w.subject = "D/sub"
	}
	var ops []op
	for _, o := range mutations() {
		takes := o.refused != "" || o.name == "mkdir"
		if o.only == "" && !(w.state == "denied" && takes) || o.only == w.state {
			ops = append(ops, o)
		}
	}
	w.setUp(ops)
	for _, o := range ops {
		w.t.Run(o.name, func(t *testing.T) { w.check(t, o) })
	}
	return len(ops)
}

// base is the cell of an operation: a free directory with D and F in it.
func (w *walk) base(o op) string { return filepath.Join(w.state+"-"+w.caller, o.name) }

// setUp makes all cells, brings their D's into the state, and the caller to life.
func (w *walk) setUp(ops []op) {
	owner := agent(w.t)
	switch w.caller {
	case "holder":
		w.agent = owner
	case "descendant":
		w.agent = owner.Child().Child()
	case "stranger":
		w.agent = stranger(w.t)
	case "root":
		w.agent = agent(w.t)
	}
	for _, o := range ops {
		openDir(w.t, w.m.Back(w.base(o)))
		o.neighbour(w.t, w.m.Back(w.base(o), "F"), w.subject)
	}
	if w.caller == "orphan" {
		w.agent = w.bereave(ops)
	} else {
		for _, o := range ops {
			openDir(w.t, w.m.Back(w.base(o), "D"))
		}
	}
	for _, o := range ops {
		w.lock(owner, o)
		openDir(w.t, w.m.Back(w.base(o), w.subject))
		o.fixtures(w.t, w.m.Back(w.base(o), w.subject))
	}
}

// bereave makes a process whose parent held every D, and died.
func (w *walk) bereave(ops []op) *Agent {
	parent := agent(w.t)
	child := parent.Child()
	for _, o := range ops {
		parent.must("mkdir", w.m.At(w.base(o), "D"))
	}
	child.must("creat", w.m.At(w.base(ops[0]), "D", "as-holder"), "wronly,creat")
	child.must("unlink", w.m.At(w.base(ops[0]), "D", "as-holder"))
	parent.Kill()
	w.m.awaitNothingOf(parent)
	return child
}

// awaitNothingOf waits until a dead process has no locks any more.
func (m *Mount) awaitNothingOf(a *Agent) {
	m.t.Helper()
	eventually(m.t, "the dead owner's locks are gone", func() bool {
		for _, row := range m.Listing().Locks {
			if row.Pid == a.Pid {
				return false
			}
		}
		return true
	})
}

func (w *walk) lock(owner *Agent, o op) {
	dir := w.m.At(w.base(o), "D")
	switch w.state {
	case "implicit", "above":
		owner.must("rmdir", dir)
		owner.must("mkdir", dir)
	case "explicit":
		owner.must("creat", filepath.Join(dir, "devserver"), "wronly,creat,excl")
	case "flock":
		owner.must("open", o.name, filepath.Join(dir, "devserver"), "rdwr,creat")
		owner.must("flock", o.name)
	case "lease":
		owner.mustCommand(w.m, "acquire %q client=x ttl=1h", filepath.Join(w.base(o), "D"))
	case "shared":
		owner.mustCommand(w.m, "acquire %q shared", filepath.Join(w.base(o), "D"))
	}
}

func (w *walk) check(t *testing.T, o op) {
	uid := uint32(0)
	if w.caller == "stranger" {
		uid = nobody
	}
	want := w.ref.measure(t, o, uid, w.subject, w.state == "explicit" || w.state == "flock")
	cell := w.m.Back(w.base(o))
	before := digest(t, cell)
	w.agent.t = t
	got := o.do(w.agent, w.m.At(w.base(o)), w.subject)

	if w.state == "free" || w.caller == "holder" || w.caller == "descendant" {
		if got != want.answer && !oneOf(got, o.also) {
			t.Errorf("= %s, want %s as on a plain directory", got, want.answer)
		}
		if got == want.answer && shape(t, cell) != want.shape {
			t.Errorf("left another tree than on a plain directory:\n%s", diff(want.shape, shape(t, cell)))
		}
		return
	}
	wants := o.refused
	if wants == "" {
		wants = "EBUSY"
	}
	if want.answer != "ok" {
		wants += "|" + want.answer // the backing would have refused first (W2)
	}
	if !oneOf(got, wants) {
		t.Errorf("= %s, want %s", got, wants)
	}
	if after := digest(t, cell); after != before {
		t.Errorf("refused with %s, but changed:\n%s", got, diff(before, after))
	}
}

// A reference knows what operations do on a plain directory.
type reference struct {
	dir  string
	root *Agent
	user *Agent
	seen map[string]measured
}

type measured struct{ answer, shape string }

func newReference(t *testing.T) *reference {
	return &reference{dir: tempDir(t), root: agent(t), user: stranger(t), seen: map[string]measured{}}
}

// measure runs an operation of a user on the same fixtures in a plain directory.
func (r *reference) measure(t *testing.T, o op, uid uint32, subject string, lockFile bool) measured {
	t.Helper()
	key := strings.Join([]string{o.name, subject, map[bool]string{true: "user"}[uid != 0], map[bool]string{true: "locked"}[lockFile]}, "/")
	if m, ok := r.seen[key]; ok {
		return m
	}
	cell := filepath.Join(r.dir, strings.ReplaceAll(key, "/", "_"))
	openDir(t, cell)
	o.neighbour(t, filepath.Join(cell, "F"), subject)
	openDir(t, filepath.Join(cell, "D"))
	if lockFile {
		r.root.must("creat", filepath.Join(cell, "D", "devserver"), "wronly,creat,excl")
	}
	openDir(t, filepath.Join(cell, subject))
	o.fixtures(t, filepath.Join(cell, subject))
	a := r.root
	if uid != 0 {
		a = r.user
	}
	m := measured{answer: o.do(a, cell, subject), shape: shape(t, cell)}
	r.seen[key] = m
	return m
}

// diff shows the lines that only one of two texts has.
func diff(a, b string) string {
	var out strings.Builder
	for line := range strings.Lines(a) {
		if !strings.Contains(b, line) {
			out.WriteString("- " + line)
		}
	}
	for line := range strings.Lines(b) {
		if !strings.Contains(a, line) {
			out.WriteString("+ " + line)
		}
	}
	return out.String()
}
