//go:build linux

package tests

import (
	"os"
	"path/filepath"
	"testing"
)

// walkBeneath looks at a lock on A/mid/D from its free ancestors: their names
// are the holder's (C1), their other content is everyone's, and nobody but the
// lock's owner may lock them (C3c).
func walkBeneath(t *testing.T, m *Mount, ref *reference, caller string) int {
	top := "beneath-" + caller
	acquire := op{name: "lock parent", steps: "creat {A}/mid/devserver wronly,creat,excl"}
	groups := map[string][]op{"name": ancestorOps(), "free": beneathFree(), "lock": {acquire}}
	owner := agent(t)
	var dirs []string
	for _, ops := range groups {
		for _, o := range ops {
			ancestors(t, m.Back(top, o.name))
			dirs = append(dirs, m.At(top, o.name, "A/mid/D"))
		}
	}
	who := beneathCaller(t, m, owner, caller, dirs)
	for _, dir := range dirs {
		owner.must("mkdir", dir)
	}
	for group, ops := range groups {
		for _, o := range ops {
			t.Run(o.name, func(t *testing.T) {
				m := m.on(t)
				cell := filepath.Join(top, o.name)
				want := plainBeneath(t, ref, o, caller)
				before := digest(t, m.Back(cell))
				who.t = t
				got := o.do(who, m.At(cell), "")
				holds := caller == "holder" || caller == "descendant"
				switch {
				case group == "lock" && caller != "holder":
					want = "EEXIST"
				case group == "name" && !holds && want != "ok":
					want += "|EBUSY" // the backing would have refused first (W2)
				case group == "name" && !holds:
					want = "EBUSY"
				}
				if !oneOf(got, want) {
					t.Errorf("= %s, want %s", got, want)
				}
				if after := digest(t, m.Back(cell)); got != "ok" && after != before {
					t.Errorf("refused with %s, but changed:\n%s", got, diff(before, after))
				}
				if _, held := m.Locks()[filepath.Join(cell, "A/mid/D")]; !held && got != "ok" {
					t.Errorf("the lock beneath is gone")
				}
			})
		}
	}
	return len(dirs)
}

func beneathCaller(t *testing.T, m *Mount, owner *Agent, caller string, dirs []string) *Agent {
	t.Helper()
	switch caller {
	case "holder":
		return owner
	case "descendant":
		return owner.Child()
	case "stranger":
		return stranger(t)
	case "orphan":
		parent := agent(t)
		child := parent.Child()
		for _, dir := range dirs {
			parent.must("mkdir", dir)
		}
		parent.Kill()
		m.awaitNothingOf(parent)
		for _, dir := range dirs {
			owner.must("rmdir", dir)
		}
		return child
	}
	return agent(t)
}

func ancestors(t *testing.T, cell string) {
	t.Helper()
	openDir(t, cell)
	openDir(t, filepath.Join(cell, "A"))
	openDir(t, filepath.Join(cell, "A/mid"))
	openDir(t, filepath.Join(cell, "F"))
	openDir(t, filepath.Join(cell, "F/dir"))
	mustDo(t, os.WriteFile(filepath.Join(cell, "A/mid/file"), nil, 0o666))
}

func plainBeneath(t *testing.T, ref *reference, o op, caller string) string {
	t.Helper()
	cell := filepath.Join(ref.dir, "beneath "+caller+" "+o.name)
	ancestors(t, cell)
	openDir(t, filepath.Join(cell, "A/mid/D"))
	a := ref.root
	if caller == "stranger" {
		a = ref.user
	}
	return o.do(a, cell, "")
}
