//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestA12Narrowing: makedirs locks the topmost new directory; the lock file in
// the leaf narrows that to the leaf.
func TestA12Narrowing(t *testing.T) {
	m := mount(t)
	a, b := agent(t), agent(t)
	for _, dir := range []string{"a", "a/b", "a/b/c"} {
		a.must("mkdir", m.At(dir))
	}
	m.wantOwner("a", a.Pid)
	a.must("creat", m.At("a/b/c/devserver"), "wronly,creat,excl")
	m.wantFree("a")
	m.wantOwner("a/b/c", a.Pid)
	b.must("mkdir", m.At("a/b/d"))
	m.wantOwner("a/b/d", b.Pid)
	b.want("EBUSY", "creat", m.At("a/b/c/new"), "wronly,creat")
}

// TestA12NotNarrowed: where the chain holds anything else, the lock on its top
// stands, and the leaf's lies beneath it.
func TestA12NotNarrowed(t *testing.T) {
	m := mount(t)
	a, b := agent(t), agent(t)
	for _, dir := range []string{"a", "a/b", "a/b/c"} {
		a.must("mkdir", m.At(dir))
	}
	a.must("put", m.At("a/readme"), "kept under the lock", "creat")
	a.must("creat", m.At("a/b/c/devserver"), "wronly,creat,excl")
	m.wantOwner("a", a.Pid)
	m.wantOwner("a/b/c", a.Pid)
	b.want("EBUSY", "put", m.At("a/readme"), "rival", "trunc")
	b.want("EBUSY", "mkdir", m.At("a/b/d"))
}

// TestA12Child: a child's lock file narrows nothing: the lock is its parent's.
func TestA12Child(t *testing.T) {
	m := mount(t)
	a := agent(t)
	a.must("mkdir", m.At("a"))
	a.must("mkdir", m.At("a/b"))
	a.Child().must("creat", m.At("a/b/devserver"), "wronly,creat,excl")
	m.wantOwner("a", a.Pid)
	agent(t).want("EBUSY", "mkdir", m.At("a/new"))
}

// TestA12HandedOver: what two programs of a script have made, the directories and the lock
// file, is the script's, and narrows.
func TestA12HandedOver(t *testing.T) {
	m := mount(t)
	a, b := agent(t), agent(t)
	for _, program := range []string{"mkdir -p " + m.At("a/b/c"), "mkdir " + m.At("a/b/c/devserver")} {
		if got := a.Get("sh", program+"; exit $?"); got != "0 " {
			t.Fatalf("%s: %q", program, got)
		}
	}
	eventually(t, "the script has the leaf", func() bool { return m.Locks()["a/b/c"].Pid == a.Pid })
	m.wantFree("a")
	b.must("mkdir", m.At("a/b/d"))
}

// TestA12NotHeldBack: nobody is held back where the owner may still have to make its next
// directory, which the kernel would have wait for that.
func TestA12NotHeldBack(t *testing.T) {
	m := mount(t)
	a, b := agent(t), agent(t)
	tries := 0
	eventually(t, "who makes a directory beside is refused at once", func() bool {
		tries++
		dir := "a" + itoa(tries)
		a.must("mkdir", m.At(dir))
		began := time.Now()
		b.want("EBUSY", "mkdir", m.At(dir, "b"))
		return time.Since(began) < 900*time.Millisecond // else it takes a second, each time
	})
}

const boardPy = `
import os, sys
from lockfile import FileLock
top, version = sys.argv[1:]
path = os.path.join(top, version)
sys.stdin.readline()
os.makedirs(path, exist_ok=True)
lock = FileLock(os.path.join(path, "devserver"))
lock.acquire(timeout=-1)
with open(os.path.join(path, "image"), "w") as f:
    f.write(version)
lock.release()
print("staged", version)
`

// TestA12Board: sixteen unmodified clients that stage different versions of a
// brand-new board at once all succeed, always.
func TestA12Board(t *testing.T) {
	need(t, "/usr/bin/python3")
	const clients, rounds = 16, 5
	m := mount(t, "--depth", "2")
	script := filepath.Join(tempDir(t), "board.py")
	mustDo(t, os.WriteFile(script, []byte(boardPy), 0o644))
	for round := range rounds {
		stageBoard(t, m, script, fmt.Sprintf("board%d", round), clients)
	}
	if rows := m.Listing().Locks; len(rows) != 0 {
		t.Errorf("left over: %+v", rows)
	}
}

func stageBoard(t *testing.T, m *Mount, script, board string, clients int) {
	t.Helper()
	// All wait for one pipe to close, so that they start at once.
	r, w, err := os.Pipe()
	mustDo(t, err)
	defer r.Close()
	var procs []*Proc
	for i := range clients {
		cmd := exec.Command("/usr/bin/python3", script, m.At(board), fmt.Sprintf("v%d", i))
		cmd.Stdin = r
		procs = append(procs, startCmd(t, cmd))
	}
	w.Close()
	for i, p := range procs {
		if res := p.Wait(); res.Status != 0 || !strings.HasPrefix(res.Out, "staged") {
			t.Errorf("client %d of %s: %v", i, board, res)
		}
		version := fmt.Sprintf("v%d", i)
		if image, _ := os.ReadFile(m.Back(board, version, "image")); string(image) != version {
			t.Errorf("%s/%s/image = %q", board, version, image)
		}
	}
}
