//go:build linux

package procid_test

import (
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/procid"
)

func TestLineage(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		h := start(t, "tree 3")
		pids := h.numbers(t)
		p := lookup(t, r, pids[3])
		lineage := p.Lineage()
		want := []int{pids[2], pids[1], pids[0], os.Getpid(), os.Getppid()}
		for i, pid := range want {
			if i >= len(lineage) || lineage[i].ID.Pid != pid {
				t.Fatalf("Lineage() = %v, want it to begin with pids %v", lineage, want)
			}
			a := lookup(t, r, pid)
			if lineage[i].ID != a.ID() {
				t.Errorf("ancestor %d = %v, want %v", i, lineage[i].ID, a.ID())
			}
			if !p.Descends(a.ID()) || a.Descends(p.ID()) {
				t.Errorf("%v and its ancestor %v: descent is wrong", p.ID(), a.ID())
			}
		}
		for i, a := range lineage[:4] {
			if a.Reaper {
				t.Errorf("ancestor %d, %v, is called a reaper", i, a.ID)
			}
		}
		if last := lineage[len(lineage)-1]; last.ID.Pid == 1 && !last.Reaper {
			t.Errorf("pid 1 is not called a reaper")
		}
		if p.Descends(p.ID()) || p.Descends(procid.ID{}) || p.Descends(procid.ID{Pid: pids[2], Start: 1}) {
			t.Errorf("%v descends from itself, nobody or another process with its parent's pid", p.ID())
		}
	})
}

// R5: a process that supervises others is no parent to inherit from.
func TestReaperByName(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		h := start(t, "tini")
		p := lookup(t, r, h.numbers(t)[0])
		if l := p.Lineage(); l[0].ID.Pid != h.pid() || !l[0].Reaper || l[1].Reaper {
			t.Errorf("Lineage() = %v, want only its parent, %d, a reaper so far", l, h.pid())
		}
	})
}

// A container's first process is its init, whatever it is called.
func TestReaperOfNamespace(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		h := startIn(t, &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}, "tree 1")
		h.numbers(t) // the pids that they see themselves
		children, err := os.ReadFile("/proc/" + strconv.Itoa(h.pid()) + "/task/" + strconv.Itoa(h.pid()) + "/children")
		if err != nil {
			t.Skip(err)
		}
		for _, f := range strings.Fields(string(children)) {
			pid, _ := strconv.Atoi(f)
			if l := lookup(t, r, pid).Lineage(); l[0].ID.Pid != h.pid() || !l[0].Reaper || l[1].Reaper {
				t.Errorf("Lineage() = %v, want only its parent, %d, a reaper so far", l, h.pid())
			}
		}
	})
}

// H2: descendants, also re-parented ones that were seen before, and those whom
// they start then.
func TestReparented(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		in, out, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer out.Close()
		owner := start(t, "abandon", in)
		in.Close()
		adopted := owner.numbers(t)[0]
		ownerID := lookup(t, r, owner.pid()).ID()
		p := lookup(t, r, adopted)
		if !p.Descends(ownerID) {
			t.Errorf("%v does not descend from its parent %v", p.ID(), ownerID)
		}
		owner.kill()
		zombie(t, owner.pid())
		if q := lookup(t, r, adopted); q != p || !q.Descends(ownerID) {
			t.Errorf("Lookup(%d) after its parent's end = %p, want %p, still a descendant", adopted, q, p)
		}
		io.WriteString(out, "\n")
		child := lookup(t, r, owner.numbers(t)[0])
		if !child.Descends(ownerID) || !child.Descends(p.ID()) {
			t.Errorf("Lineage() of a child of a re-parented process = %v, want %v and %v in it", child.Lineage(), p.ID(), ownerID)
		}
		out.Close()
		owner.Wait()
	})
}

// The other side of H2: where births are not followed, a process that was not seen
// before its parent's end is nobody's descendant but its new parent's.
func TestDoubleForkUnseen(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		in, out, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer out.Close()
		owner := start(t, "abandon", in)
		in.Close()
		adopted := owner.numbers(t)[0]
		ownerID := lookup(t, r, owner.pid()).ID()
		owner.kill()
		zombie(t, owner.pid())
		p := lookup(t, r, adopted)
		if p.Descends(ownerID) || p.Descends(procid.Self()) {
			t.Errorf("Lineage() = %v, want neither %v nor this process in it", p.Lineage(), ownerID)
		}
	})
}

func TestFake(t *testing.T) {
	root := procid.FakeReaper(procid.ID{Pid: 1, Start: 1}, nil)
	shell := procid.Fake(procid.ID{Pid: 10, Start: 5}, root)
	tool := procid.Fake(procid.ID{Pid: 11, Start: 6}, shell)
	if got := root.Lineage(); len(got) != 0 {
		t.Errorf("Lineage() of a fake without parent = %v, want none", got)
	}
	got := tool.Lineage()
	want := []procid.Ancestor{{ID: shell.ID()}, {ID: root.ID(), Reaper: true}}
	if len(got) != 2 || got[0] != want[0] || got[1] != want[1] {
		t.Errorf("Lineage() = %v, want %v", got, want)
	}
	if !tool.Descends(root.ID()) || !tool.Descends(shell.ID()) || shell.Descends(tool.ID()) {
		t.Errorf("descent of fakes is wrong")
	}
}

// A dead first thread hides neither the parent nor the descent.
func TestLineageOfDeadLeader(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		h := start(t, "deadleader 0")
		h.numbers(t)
		if p := lookup(t, r, h.pid()); !p.Descends(procid.Self()) {
			t.Errorf("Lineage() = %v, want this process first", p.Lineage())
		}
	})
}
