//go:build linux

package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestL3RevokedAside: what a client has open still after its lease was taken away, and
// can't write to any more, keeps the next holder from nothing: to acquire, to rename, to
// link and to bring in, also a file with a name that nobody has looked up.
func TestL3RevokedAside(t *testing.T) {
	m := mount(t)
	for _, d := range []string{"L", "A", "T"} {
		openDir(t, m.Back(d))
	}
	openDir(t, m.Back("T/sub"))
	openFile(t, m.Back("A/f"), "linked")
	mustDo(t, os.Link(m.Back("A/f"), m.Back("L/alias")))
	openFile(t, m.Back("T/sub/f"), "tree")
	client, next := agent(t), agent(t)
	client.mustCommand(m, "acquire L client=x ttl=1h")
	client.mustCommand(m, "acquire T client=x ttl=1h")
	client.must("open", "tmp", m.At("L/out.tmp"), "wronly,creat")
	client.must("write", "tmp", "part")
	client.must("open", "alias", m.At("L/alias"), "wronly")
	client.must("open", "tree", m.At("T/sub/f"), "wronly")
	for _, d := range []string{"L", "T"} {
		if got := m.Ctl("break " + d + " enough"); got != "ok" {
			t.Fatalf("break %s = %s", d, got)
		}
	}
	for _, d := range []string{"A", "L"} {
		next.mustCommand(m, "acquire %s client=y ttl=1h", d)
	}
	next.must("rename", m.At("L/out.tmp"), m.At("L/out"))
	next.must("link", m.At("L/out"), m.At("L/too"))
	next.must("rename", m.At("L/alias"), m.At("L/f"))
	next.must("rename", m.At("T/sub"), m.At("L/sub"))
	before := digest(t, m.Back("L"))
	for _, name := range []string{"tmp", "alias", "tree"} {
		client.want("EBUSY", "write", name, "late")
		client.want("EBUSY", "ftruncate", name, "0")
	}
	if after := digest(t, m.Back("L")); after != before {
		t.Errorf("written after the break:\n%s", diff(before, after))
	}
}

// TestW6Revoked: what a client hears who comes too late is counted, and can be seen; a mount
// that only observes lets it through, and notes it as well.
func TestW6Revoked(t *testing.T) {
	for _, enforce := range []string{"all", "observe"} {
		t.Run(enforce, func(t *testing.T) {
			m := mount(t, "--enforce="+enforce)
			openDir(t, m.Back("D"))
			openFile(t, m.Back("from"), "copied")
			client := agent(t)
			client.mustCommand(m, "acquire D client=x ttl=1h")
			client.must("open", "w", m.At("D/f"), "wronly,creat")
			if got := m.Ctl("break D enough"); got != "ok" {
				t.Fatalf("break = %s", got)
			}
			hears := map[string]string{"all": "EBUSY", "observe": "ok"}[enforce]
			for i, op := range [][]string{
				{"write", "w", "late"}, {"fallocate", "w", "0", "0", "8192"}, {"ftruncate", "w", "2"}, {"copyrange", m.At("from"), "w"},
			} {
				client.want(hears, op...)
				all := m.Denials()
				if len(all) != i+1 || all[i].Path != "D/f" || all[i].Pid != client.Pid || !strings.Contains(all[i].Reason, "has ended") {
					t.Errorf("%v: refusals: %+v, want one more", op, all)
				}
			}
			if b, err := os.ReadFile(m.Back("D/f")); err != nil || (string(b) == "la\x00\x00copied") != (enforce == "observe") {
				t.Errorf("D/f = %q, %v", b, err)
			}
			if text := m.stagefs("why", m.At("D/f")).Out; !strings.Contains(text, "has ended") {
				t.Errorf("stagefs why: %q, want the refusals", text)
			}
		})
	}
}

// TestFaultRetakenRevoked: a lease that could not be broken, as one of its lock files can't
// be removed, and that its client took again meanwhile, goes on as the one lease that the
// client has then; to break that revokes what was opened under the first (L3).
func TestFaultRetakenRevoked(t *testing.T) {
	needInject(t)
	dir := staticDir(t)
	m := newMount(t, dir, dir)
	removing, retaken := make(chan struct{}), make(chan struct{})
	var first sync.Once
	m.inject(&fault{call: unix.SYS_UNLINKAT, until: func(a asked) <-chan struct{} {
		if !strings.HasPrefix(a.path(1), "more") {
			return nil
		}
		first.Do(func() { close(removing) })
		goOn := make(chan struct{})
		go func() {
			defer close(goOn)
			select {
			case <-retaken:
			case <-time.After(50 * time.Millisecond):
			}
		}()
		return goOn
	}}, &fault{call: unix.SYS_UNLINKAT, errno: unix.EIO, times: 1, is: func(a asked) bool { return a.path(1) == "devserver" }})
	m.serve("--lock-name", "devserver", "--lock-name", "more*")
	client, again, admin, next := agent(t), agent(t), agent(t), agent(t)
	openDir(t, m.At("D"))
	m.Ctl("release D")
	old := client.mustCommand(m, "acquire D client=x ttl=1h").Token
	for i := range 40 { // between any two of them the client can come
		client.must("creat", m.At("D", fmt.Sprint("more", i)), "wronly,creat,excl")
	}
	client.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	client.must("open", "w", m.At("D/file"), "wronly,creat")
	broken := admin.Start("ctl", m.control("ctl"), "break D enough")
	<-removing
	token := again.mustCommand(m, "acquire D client=x ttl=1h").Token
	close(retaken)
	if got := broken(); got != "EIO" {
		t.Fatalf("break = %s, want EIO", got)
	}
	if row := m.Locks()["D"]; token <= old || row.Token != token {
		t.Fatalf("the client has token %d after %d; the row: %+v", token, old, row)
	}
	client.must("write", "w", "before")
	if got := m.Ctl("break D enough"); got != "ok" {
		t.Fatalf("the second break = %s", got)
	}
	before := digest(t, m.Back("D"))
	next.mustCommand(m, "acquire D client=y ttl=1h")
	client.want("EBUSY", "write", "w", "late")
	client.want("EBUSY", "ftruncate", "w", "0")
	if after := digest(t, m.Back("D")); after != before {
		t.Errorf("written after the break:\n%s", diff(before, after))
	}
}

// TestFaultFrozenRevoked: a change under a lease that waits for a frozen backing when the
// lease is taken away keeps the next holder waiting, or he is refused, until it is over:
// nothing of it comes after he has acquired (W3).
func TestFaultFrozenRevoked(t *testing.T) {
	need(t, "root", "fuse")
	t.Run("open with O_TRUNC", func(t *testing.T) {
		m, thaw, stuck := frozenLease(t, "L", func(m *Mount, client *Agent) []string {
			return []string{"open", "f", m.At("L/f"), "wronly,trunc"}
		})
		waiting, next := m.waiting(), agent(t)
		done := make(chan string, 1)
		got := next.Start("ctl", m.control("ctl"), "acquire L client=y ttl=1h")
		go func() {
			status := "no answer"
			defer func() { done <- status }()
			status = got()
		}()
		eventually(t, "the next one waits, or has it", func() bool { return inCall(next.Pid, unix.SYS_WRITE) && waiting() >= 2 || len(done) > 0 })
		thaw()
		if s := <-done; s != "ok" {
			t.Errorf("the next acquisition = %s, want ok", s)
		}
		before := digest(t, m.Back("L"))
		t.Logf("the open: %s", stuck())
		if after := digest(t, m.Back("L")); after != before {
			t.Errorf("changed after the next acquisition:\n%s", diff(before, after))
		}
	})
	t.Run("write by a name that nobody knew", func(t *testing.T) {
		m, thaw, stuck := frozenLease(t, "L", func(m *Mount, client *Agent) []string {
			client.must("open", "f", m.At("L/alias"), "wronly")
			return []string{"write", "f", "late"}
		})
		next := agent(t)
		next.wantCommand(m, "EBUSY", "acquire A client=y ttl=1h")
		thaw()
		t.Logf("the write: %s", stuck())
		before := digest(t, m.Back("A"))
		next.mustCommand(m, "acquire A client=y ttl=1h")
		if after := digest(t, m.Back("A")); after != before {
			t.Errorf("changed after the next acquisition:\n%s", diff(before, after))
		}
	})
}

// frozenLease has a client's lease end while a call of it is stuck. A/f is L/alias, too.
func frozenLease(t *testing.T, dir string, call func(*Mount, *Agent) []string) (m *Mount, thaw func(), stuck func() string) {
	t.Helper()
	disk := newImage(t, 16)
	m = disk.mount()
	for _, d := range []string{"L", "A"} {
		openDir(t, m.Back(d))
		openFile(t, m.Back(d, "f"), "of before")
	}
	mustDo(t, os.Link(m.Back("A/f"), m.Back("L/alias")))
	for _, name := range []string{"L/f", "L/alias"} {
		_, err := os.Stat(m.At(name))
		mustDo(t, err)
	}
	client := agent(t)
	client.mustCommand(m, "acquire %s client=x ttl=1h", dir)
	argv := call(m, client)
	thaw = disk.freeze()
	t.Cleanup(thaw)
	stuck = client.Start(argv...)
	eventually(t, "the daemon is stuck in the backing", func() bool {
		return inCall(m.daemon(), unix.SYS_FTRUNCATE) || inCall(m.daemon(), unix.SYS_PWRITE64)
	})
	if got := m.Ctl("break " + dir + " enough"); got != "ok" {
		t.Fatalf("break = %s", got)
	}
	return m, thaw, stuck
}

// inCall reports whether a thread of a process is in a system call.
func inCall(pid, call int) bool {
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/syscall", pid))
	return slices.ContainsFunc(tasks, func(task string) bool {
		b, _ := os.ReadFile(task)
		return strings.HasPrefix(string(b), itoa(call)+" ")
	})
}
