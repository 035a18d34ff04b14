//go:build linux

package tests

import (
	"fmt"
	"strings"
	"testing"
)

// TestA12AttackMeanwhile attacks A12 and A2: what an owner's other process makes in
// the chain, while that is narrowed, is covered by one lock or another.
func TestA12AttackMeanwhile(t *testing.T) {
	m := mount(t)
	owner := agent(t)
	child := owner.Child()
	rounds := 2000
	if testing.Short() {
		rounds = 200
	}
	narrowed := 0
	for i := range rounds {
		top := fmt.Sprint("a", i)
		for _, dir := range []string{"", "/b", "/b/c"} {
			owner.must("mkdir", m.At(top+dir))
		}
		made := child.Start("mkdir", m.At(top+"/x"))
		locked := owner.Start("creat", m.At(top+"/b/c/devserver"), "wronly,creat,excl")
		if a, b := made(), locked(); a != "ok" || b != "ok" {
			t.Fatalf("round %d: mkdir %s, lock file %s", i, a, b)
		}
		got, by := owner.call([]string{"getxattr", m.At(top + "/x"), "user.stagefs.owner"})
		if got != "ok" {
			t.Fatalf("round %d: what was made beneath the lock has none: %s", i, got)
		}
		if strings.HasPrefix(by, fmt.Sprint(child.Pid, " ")) {
			narrowed++
		}
		owner.must("unlink", m.At(top+"/b/c/devserver"))
	}
	t.Logf("narrowed before in %d of %d rounds", narrowed, rounds)
}
