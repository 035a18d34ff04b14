//go:build linux

package tests

import (
	"os/exec"
	"strings"
	"testing"
	"time"
)

// wantWhy checks that `why` says all of want about a path.
func (m *Mount) wantWhy(path string, want ...string) {
	m.t.Helper()
	r := run(m.t, stagefsBin(), "why", m.At(path))
	for _, w := range want {
		if r.Status != 0 || !strings.Contains(r.Out, w) {
			m.t.Errorf("why %s: %v, want %q in it", path, r, w)
		}
	}
}

// TestWhyReason: `why` tells a lock's reason, and names the clients of leases.
func TestWhyReason(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("board"))
	openDir(t, m.Back("board/v2"))
	agent(t).mustCommand(m, `acquire board/v2 client=ci/42 why="nightly build"`)
	since := m.Locks()["board/v2"].Since.UTC().Format(time.RFC3339)
	m.wantWhy("board/v2", ", since "+since+"\n", "\n  reason: nightly build\n")
	m.wantWhy("board", "board: free\n", "locks beneath:\n  board/v2: client ci/42, uid 0\n")
}

// TestWhyOwner: a refusal names the client of a lease, not the process that took it
// and has ended; and says so where the lock is a shared one, perhaps the caller's own.
func TestWhyOwner(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	openDir(t, m.Back("E"))
	taker := agent(t)
	token := taker.mustCommand(m, "acquire D client=ci/42 ttl=1h").Token
	taker.Kill()
	b := agent(t)
	b.want("EBUSY", "mkdir", m.At("D/x"))
	m.wantWhy("D", `"D" is held by a client's lease (client "ci/42", token `+itoa(int(token))+")")
	mustShow(t, m, "locks", "  -    0    client ci/42 for ")

	b.mustCommand(m, "acquire E shared")
	b.want("EBUSY", "mkdir", m.At("E/x"))
	m.wantWhy("E", `"E" is held by a shared lock: nobody writes while it lasts (pid `+itoa(b.Pid))
}

// TestWhyMode: `why` says where a lock is needed to write, and where nothing is
// enforced.
func TestWhyMode(t *testing.T) {
	mount(t, "--unlocked=deny").wantWhy("D", "D: free, but writing needs a lock (--unlocked=deny)\n")
	mount(t, "--disable-locking").wantWhy("D", "locking is disabled: nothing is enforced\nD: free\n")

	m := mount(t)
	m.wantWhy(".stagefs/locks", ".stagefs/locks: a control file; nobody writes there but by command\n")
	m.wantWhy("misspelt", "misspelt: free\nmisspelt is missing\n")

	m = mount(t, "--enforce=observe")
	openDir(t, m.Back("D"))
	agent(t).must("creat", m.At("D/devserver"), "wronly,creat,excl")
	stranger(t).must("mkdir", m.At("D/x"))
	m.wantWhy("D", "observing only: refusals are noted, not enforced\nD: held by", "last refusals, only noted:\n")
}

// TestWhyBlocker: `why` names what keeps a free directory from being acquired, also while
// somebody waits for that, and is no refusal itself.
func TestWhyBlocker(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	a := agent(t)
	a.must("open", "h", m.At("D/f"), "wronly,creat")
	want := "D: free\nopen for writing, in the way of the next lock:\n  D/f: process " + itoa(a.Pid)
	m.wantWhy("D", want)
	if r := run(t, stagefsBin(), "acquire", "-n", m.At("D")); r.Status != 75 || !strings.Contains(r.Err, "why") {
		t.Errorf("acquire: %v, want 75 that leads to why", r)
	}
	waits := startCmd(t, exec.Command("flock", m.At("D/devserver"), "true"))
	m.awaitWaiters("D", 1)
	m.wantWhy("D", want)
	if r := run(t, stagefsBin(), "why", m.At("D")); strings.Count(r.Out, "\n  20") != 1 {
		t.Errorf("why: %v, want one refusal, of acquire", r)
	}
	a.must("close", "h")
	waits.Wait()
	m.wantWhy("D", "D: free\nlast refusals:")
}
