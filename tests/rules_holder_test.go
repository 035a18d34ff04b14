//go:build linux

package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"
)

// TestH1: all threads of the owner hold; the listing names the process.
func TestH1(t *testing.T) {
	m := mount(t)
	a := agent(t)
	a.must("thread", "mkdir", m.At("D"))
	m.wantOwner("D", a.Pid)
	for _, by := range [][]string{nil, {"thread"}} {
		for i := range 3 {
			a.must(append(by, "put", m.At("D", strconv.Itoa(i)+"file"), "x", "creat")...)
		}
	}
	a.must("thread", "creat", m.At("D/devserver"), "wronly,creat,excl")
	a.must("unlink", m.At("D/devserver"))
	m.wantFree("D")
}

// TestH2: descendants hold, also those that lost their parents after they were
// seen.
func TestH2(t *testing.T) {
	m := mount(t)
	a := agent(t)
	child := a.Child("setsid")
	grandchild := child.Child("setsid")
	a.must("mkdir", m.At("D"))
	grandchild.must("creat", m.At("D/1"), "wronly,creat")
	child.Kill()
	grandchild.must("creat", m.At("D/2"), "wronly,creat")
	grandchild.must("thread", "creat", m.At("D/3"), "wronly,creat")
	a.Kill()
	m.awaitFree("D")
	b := agent(t)
	b.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	grandchild.want("EBUSY", "creat", m.At("D/5"), "wronly,creat")
}

// TestH2Deep: of processes each of which runs the next one those that are up to 500 below
// the owner hold. Further down one of those between has to have been at work: there is an
// end, so that many thousands do not take the daemon's memory.
func TestH2Deep(t *testing.T) {
	m := mount(t)
	a := agent(t)
	script := filepath.Join(tempDir(t), "nest.sh")
	// Every twentieth tries to write where it may not; the daemon sees it nevertheless, and
	// looks at all above it each time. With "between" one of them, 500 down, is at work.
	mustDo(t, os.WriteFile(script, []byte(`if [ $(($2 % 20)) = 0 ]; then (: >"$1/../other/x") 2>/dev/null; fi
if [ $3 = between ] && [ "$2" = 101 ]; then : >"$1/$2" || exit 1; fi
if [ "$2" -gt 1 ]; then sh "$0" "$1" $(($2 - 1)) "$3"; exit $?; fi
: >"$1/last"
`), 0o644))
	agent(t).must("mkdir", m.At("other"))
	a.must("mkdir", m.At("D"))
	const depth = 600
	for _, tt := range []struct {
		who   string
		holds bool
	}{{"nobody", false}, {"between", true}} {
		got := a.Get("sh", fmt.Sprintf("sh '%s' '%s' %d %s", script, m.At("D"), depth, tt.who))
		if holds := got == "0 "; holds != tt.holds {
			t.Errorf("%d deep, %s at work: %s, want %v", depth, tt.who, got, tt.holds)
		}
	}
}
