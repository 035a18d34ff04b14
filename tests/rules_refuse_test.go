//go:build linux

package tests

import (
	"bytes"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestW4Allow: free paths are written by anyone, as their modes allow.
func TestW4Allow(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("open"))
	mustDo(t, os.Mkdir(m.Back("shut"), 0o755))
	user := stranger(t)
	user.must("creat", m.At("open/new"), "wronly,creat,excl")
	user.want("EACCES", "creat", m.At("shut/new"), "wronly,creat,excl")
	agent(t).must("creat", m.At("shut/new"), "wronly,creat,excl")
}

// TestW4Deny: with --unlocked=deny, writing needs a lock; taking one does not.
func TestW4Deny(t *testing.T) {
	dir := staticDir(t)
	for _, sub := range []string{"old", "old/dir"} {
		openDir(t, dir+"/"+sub)
	}
	mustDo(t, os.WriteFile(dir+"/old/file", []byte("content"), 0o666))
	mustDo(t, os.Chmod(dir+"/old/file", 0o666))
	m := mountDir(t, dir, dir+".mnt", "--unlocked=deny")
	before := digest(t, m.Dir)
	for _, a := range []*Agent{agent(t), stranger(t)} {
		for _, call := range [][]string{
			{"creat", m.At("old/new"), "wronly,creat"},
			{"creat", m.At("old/file"), "wronly"},
			{"creat", m.At("old/file"), "wronly,trunc"},
			{"creat", m.At("new"), "wronly,creat"},
			{"mknod", m.At("old/new"), "fifo"},
			{"symlink", "x", m.At("old/new")},
			{"link", m.At("old/file"), m.At("old/new")},
			{"rename", m.At("old/file"), m.At("old/new")},
			{"rename", m.At("old"), m.At("new")},
			{"unlink", m.At("old/file")},
			{"rmdir", m.At("old/dir")},
			{"truncate", m.At("old/file"), "0"},
			{"setxattr", m.At("old/file"), "user.k", "v"},
			{"open", "x", m.At("old"), "tmpfile,rdwr"},
		} {
			a.want("EBUSY", call...)
		}
	}
	agent(t).want("EBUSY", "chmod", m.At("old/file"), "0600")
	if after := digest(t, m.Dir); after != before {
		t.Errorf("refused, but changed:\n%s", diff(before, after))
	}

	a := stranger(t)
	a.want("ok", "read", m.At("old/file"))
	a.must("mkdir", m.At("mine"))
	a.must("put", m.At("mine/file"), "data", "creat")
	a.must("creat", m.At("old/devserver"), "wronly,creat,excl")
	a.must("put", m.At("old/new"), "data", "creat")
	a.must("unlink", m.At("old/devserver"))
	a.want("EBUSY", "unlink", m.At("old/new"))

	// A lock on D covers its name too (C1).
	a.must("mkdir", m.At("short"))
	a.want("ok", "rename", m.At("short"), m.At("shorter"))
	a.want("ok", "rmdir", m.At("shorter"))
	a.must("mkdir", m.At("short2"))
	a.want("ok", "rmdir", m.At("short2"))
	a.must("mkdir", m.At("short"))
	a.Child().want("ok", "rmdir", m.At("short"))
	if got := a.Get("sh", "mkdir "+m.At("short3")+" && rmdir "+m.At("short3")); got != "0 " {
		t.Errorf("mkdir and rmdir by two children: %q", got)
	}
}

// TestW6: each refusal is counted and told: who, what, where, whose lock.
func TestW6(t *testing.T) {
	m := mount(t)
	a, b := agent(t), stranger(t)
	a.must("mkdir", m.At("D"))
	a.must("put", m.At("D/file"), "x", "creat")
	calls := [][]string{
		{"creat", m.At("D/new"), "wronly,creat"},
		{"mkdir", m.At("D/new")},
		{"unlink", m.At("D/file")},
		{"rename", m.At("D/file"), m.At("D/new")},
		{"creat", m.At("D/file"), "wronly"},
	}
	for _, call := range calls {
		b.want("EBUSY", call...)
	}
	b.want("EEXIST", "creat", m.At("D/devserver"), "wronly,creat,excl")
	denials := m.Denials()
	if len(denials) != len(calls)+1 {
		t.Fatalf("%d denials, want %d: %+v", len(denials), len(calls)+1, denials)
	}
	for i, d := range denials {
		if d.Pid != b.Pid || d.UID != nobody || d.Lock != "D" || d.LockPid != a.Pid || d.Op == "" || d.Reason == "" || d.Cmd == "" || d.Time.IsZero() {
			t.Errorf("denial %d: %+v, want one of pid %d by the lock of pid %d on D", i, d, b.Pid, a.Pid)
		}
	}
	for i, path := range []string{"D/new", "D/new", "D/file"} {
		if denials[i].Path != path || denials[i].Errno != "EBUSY" {
			t.Errorf("denial %d: %s of %s, want EBUSY of %s", i, denials[i].Errno, denials[i].Path, path)
		}
	}
	if last := denials[len(denials)-1]; last.Errno != "EEXIST" || last.Path != "D/devserver" {
		t.Errorf("denial of the lock name: %+v, want EEXIST", last)
	}
	if counted := m.metric("denials_total"); counted != len(denials) {
		t.Errorf("denials counted in metrics: %d, want %d", counted, len(denials))
	}
	openDir(t, m.Back("G"))
	a.must("open", "h", m.At("G/file"), "wronly,creat")
	b.want("EEXIST", "creat", m.At("G/devserver"), "wronly,creat,excl")
	denials = m.Denials()
	if last := denials[len(denials)-1]; last.Lock != "G/file" || last.LockPid != a.Pid {
		t.Errorf("denial by what is open: %+v, want G/file, and pid %d", last, a.Pid)
	}
	why := run(t, stagefsBin(), "why", m.At("D/file"))
	if why.Status != 0 || !strings.Contains(why.Out, "D") || !strings.Contains(why.Out, itoa(a.Pid)) || !strings.Contains(why.Out, itoa(b.Pid)) {
		t.Errorf("stagefs why: %v, want it to name owner %d and the refused %d", why, a.Pid, b.Pid)
	}
}

// TestW6Crowd: of very many refusals the log has a few a second, and says how many
// it has left out; all are counted.
func TestW6Crowd(t *testing.T) {
	m := mount(t)
	a, b := agent(t), agent(t)
	a.must("mkdir", m.At("D"))
	total := 0
	refuse := func() {
		t.Helper()
		total++
		if got := b.Try("mkdir", m.At("D/sub"+itoa(total))); got != "EBUSY" {
			t.Fatalf("mkdir = %s, want EBUSY", got)
		}
	}
	began := time.Now()
	for range 500 {
		refuse()
	}
	seconds := int(time.Since(began)/time.Second) + 2
	if lines := strings.Count(m.Log(), "msg=refused"); lines == 0 || lines > 5*seconds {
		t.Errorf("%d lines in the log in %d seconds", lines, seconds)
	}
	eventually(t, "a line that tells of the others", func() bool {
		refuse()
		return strings.Contains(m.Log(), "unlogged=")
	})
	if strings.Contains(m.Log(), "unlogged=0") {
		t.Error("a line in the log tells of no others")
	}
	if counted := m.metric("denials_total"); counted != total {
		t.Errorf("%d refusals are counted, want %d", counted, total)
	}
}

// TestW6Again: who tries again and again drives no other refusal out, neither from what is
// kept nor from the log; all are counted, also with the one that is kept.
func TestW6Again(t *testing.T) {
	m := mount(t)
	a, once, poller := agent(t), agent(t), agent(t)
	a.must("mkdir", m.At("D"))
	once.want("EBUSY", "mkdir", m.At("D/once"))
	const many = 600 // more than are kept
	for range many {
		poller.want("EBUSY", "mkdir", m.At("D/sub"))
	}
	once.want("EBUSY", "mkdir", m.At("D/twice"))
	want := []string{"D/once", "D/sub", "D/twice"}
	var kept []string
	for _, d := range m.Denials() {
		kept = append(kept, d.Path)
		if times := map[string]int{"D/once": 1, "D/sub": many, "D/twice": 1}[d.Path]; d.Times != times {
			t.Errorf("%s has come %d times, want %d", d.Path, d.Times, times)
		}
	}
	if !slices.Equal(kept, want) {
		t.Errorf("kept are %d refusals, the last ones of %q; want those of %q", len(kept), kept[max(0, len(kept)-3):], want)
	}
	for _, path := range want {
		if n := strings.Count(m.Log(), "op=mkdir path="+path+" "); n != 1 {
			t.Errorf("the log has %d lines of %s, want one", n, path)
		}
	}
	if counted := m.metric("denials_total"); counted != many+2 {
		t.Errorf("%d refusals are counted, want %d", counted, many+2)
	}
}

// TestW6Bytes: names that are no UTF-8 are told as the bytes they are, so that
// `why` finds their refusals; also after a replacement.
func TestW6Bytes(t *testing.T) {
	m := mountOver(t)
	const dir, file = "D\xff", "D\xff/f\xfe"
	a, b := agent(t), stranger(t)
	a.must("mkdir", m.At(dir))
	b.want("EBUSY", "creat", m.At(file), "wronly,creat")
	waits := m.runner("-w", "60", m.At(dir), "true")
	var waiter struct {
		Waiters []struct {
			DirBytes []byte `json:"dir_bytes"`
		}
	}
	eventually(t, "a waiter", func() bool {
		list, err := os.ReadFile(m.control("locks.json"))
		return err == nil && json.Unmarshal(list, &waiter) == nil && len(waiter.Waiters) == 1
	})
	if got := string(waiter.Waiters[0].DirBytes); got != dir {
		t.Errorf("the waiter waits for %q, want %q", got, dir)
	}
	for range 2 {
		data, err := os.ReadFile(m.control("denials"))
		mustDo(t, err)
		var d struct {
			PathBytes []byte `json:"path_bytes"`
			LockBytes []byte `json:"lock_bytes"`
		}
		mustDo(t, json.NewDecoder(bytes.NewReader(data)).Decode(&d))
		if string(d.PathBytes) != file || string(d.LockBytes) != dir {
			t.Errorf("the refusal of %q by the lock on %q is told as of %q by %q: %s", file, dir, d.PathBytes, d.LockBytes, data)
		}
		for _, path := range []string{dir, file} {
			r := run(t, stagefsBin(), "why", m.At(path))
			if _, refusals, _ := strings.Cut(r.Out, "last refusals:\n"); !strings.Contains(refusals, `"D\xff/f\xfe" by process `+itoa(b.Pid)) {
				t.Errorf("why %q: %v, want the refusal", path, r)
			}
		}
		m.replace()
	}
	waits.Kill()
}
