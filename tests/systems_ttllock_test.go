//go:build linux

package tests

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// ttlSite is a mount with the directory "D", for programs that lock it for a
// time.
type ttlSite struct {
	*site
	bin string
}

func newTTLSite(t *testing.T) *ttlSite {
	t.Helper()
	need(t, "go")
	s := &ttlSite{mountSite(t), filepath.Join(testRoot(), "ttllock")}
	openDir(t, s.under("D"))
	if _, err := os.Stat(s.bin); err != nil {
		if r := runHere(t, "go", "build", "-trimpath", "-o", s.bin, "./systems/ttllock"); r.Status != 0 {
			t.Fatal(r)
		}
	}
	return s
}

// start runs a worker of a client.
func (s *ttlSite) start(id string, options ...string) *program {
	s.t.Helper()
	return startLines(s.t, nil, append(append([]string{s.bin}, options...), id, s.at("D"))...)
}

// locked starts one that gets the lock.
func (s *ttlSite) locked(id string, options ...string) *program {
	s.t.Helper()
	p := s.start(id, options...)
	p.hear("locked")
	return p
}

// wantClient expects that a client has the directory, and others are kept out.
func (s *ttlSite) wantClient(id string) {
	s.t.Helper()
	if row := s.m.Locks()["D"]; row.Client != id {
		s.t.Errorf("the listing names client %q (%+v), want %q", row.Client, row, id)
	}
	before := digest(s.t, s.under("D"))
	for _, rival := range []*Agent{agent(s.t), stranger(s.t)} {
		rival.want("EBUSY", "put", s.at("D/of-a-rival"), "x", "creat")
		rival.want("EBUSY", "utimens", s.at("D"))
		rival.want("EEXIST", "creat", s.at("D", s.lock), "wronly,creat,excl")
	}
	if after := digest(s.t, s.under("D")); after != before {
		s.t.Errorf("refused, but changed:\n%s", diff(before, after))
	}
}

// over ends a worker with a command, and wants what it says at last.
func (p *program) over(command, want string) {
	p.t.Helper()
	p.tell("%s", command)
	if got := p.end(); !strings.HasPrefix(got, want) {
		p.t.Errorf("at its end: %q, want %q", got, want)
	}
}

// TestTTLLock: a client has the lock while its function runs, and no other ID
// gets it; it gives it up at once, long before its time.
func TestTTLLock(t *testing.T) {
	s := newTTLSite(t)
	a := s.locked("a")
	s.wantClient("a")
	a.ask("put content 1", "put")
	if got := s.start("b").end(); !strings.HasPrefix(got, "exit 1: over ") || !strings.Contains(got, "failed to lock") || !strings.Contains(got, `client "a"`) {
		t.Errorf("another ID: %q, want that it failed to lock what client \"a\" has", got)
	}
	s.wantClient("a")
	a.over("end", "exit 0: over <nil>")
	s.wantFree()
	b := s.locked("b")
	s.wantClient("b")
	b.ask("put content 2", "put")
	b.over("end disk full", "exit 1: over disk full") // its own error comes back
	s.wantFree()
	s.wantNames("D", "content")
}

// TestTTLLockBad: an empty ID is an error, and so is a directory that is on no
// mount.
func TestTTLLockBad(t *testing.T) {
	s := newTTLSite(t)
	for _, options := range [][]string{nil, {"-ttl", "1s"}} {
		if got := s.start("", options...).end(); !strings.HasPrefix(got, "exit 1: over ") || !strings.Contains(got, "client ID is empty") {
			t.Errorf("without an ID: %q", got)
		}
		p := startLines(t, nil, append(append([]string{s.bin}, options...), "a", tempDir(t))...)
		if got := p.end(); !strings.HasPrefix(got, "exit 1: over ") || !strings.Contains(got, "stagefs mount") {
			t.Errorf("on a plain directory: %q", got)
		}
	}
	s.wantFree()
}

// TestTTLLockAgain: the same ID has the same lock in another process, also when
// the first one was killed.
func TestTTLLockAgain(t *testing.T) {
	s := newTTLSite(t)
	a := s.locked("a")
	token := s.m.Locks()["D"].Token
	b := s.locked("a")
	for _, p := range []*program{a, b} {
		p.ask("put content x", "put")
	}
	a.Kill()
	b.ask("put content y", "put")
	c := s.locked("a")
	if got := s.m.Locks()["D"].Token; got != token {
		t.Errorf("token %d, want the first one's %d", got, token)
	}
	s.wantClient("a")
	c.over("end", "exit 0: over <nil>")
	b.hear("lost")
	b.over("end", "exit 1: over ")
	s.wantFree()
}

// TestTTLLockEvicted: an admin ends the lease; the worker hears so, and cannot
// write when the next one has the directory.
func TestTTLLockEvicted(t *testing.T) {
	s := newTTLSite(t)
	a := s.locked("a")
	if r := run(t, stagefsBin(), "break", "--why", "evicted", s.at("D")); r.Status != 0 {
		t.Fatal(r)
	}
	if got := a.hear("lost"); !strings.Contains(got, "broken") || !strings.Contains(got, "evicted") {
		t.Errorf("said %q, want that it was broken and why", got)
	}
	b := s.locked("b")
	s.wantClient("b")
	a.ask("put content x", "refused content")
	a.over("end", "exit 1: over ")
	s.wantClient("b") // whose lease is not released with a's
	b.over("end", "exit 0: over <nil>")
	s.wantNames("D", "")
	s.wantFree()
}

// TestTTLLockUnrenewed: renewals fail until the deadline, because the daemon does
// not answer; the worker hears so without it.
func TestTTLLockUnrenewed(t *testing.T) {
	s := newTTLSite(t)
	a := s.locked("a", "-ttl", "2s", "-every", "100ms")
	mustDo(t, syscall.Kill(s.m.cmd.Process.Pid, syscall.SIGSTOP))
	defer syscall.Kill(s.m.cmd.Process.Pid, syscall.SIGCONT)
	if got := a.hear("lost"); !strings.Contains(got, "expired") {
		t.Errorf("said %q, want that it expired", got)
	}
	mustDo(t, syscall.Kill(s.m.cmd.Process.Pid, syscall.SIGCONT))
	s.m.awaitFree("D") // a renewal that was under way may be carried out yet
	b := s.locked("b")
	a.ask("put content x", "refused content")
	a.over("end", "exit 1: over ")
	s.wantClient("b")
	b.over("end", "exit 0: over <nil>")
	s.wantFree()
}

// TestTTLLockRenewalFails: a renewal that fails loses nothing, if a later one is in
// time; here the daemon is dead meanwhile.
func TestTTLLockRenewalFails(t *testing.T) {
	s := newTTLSite(t)
	a := s.locked("a", "-ttl", "2m", "-every", "-1s")
	token := s.m.Locks()["D"].Token
	s.m.kill()
	a.ask("renew 1", "refused")
	s.m.start(nil)
	s.m.awaitReady()
	a.ask("renew 1", "renewed 1")
	a.ask("put content x", "put")
	s.wantClient("a")
	if got := s.m.Locks()["D"].Token; got != token {
		t.Errorf("token %d, want still %d", got, token)
	}
	a.over("end", "exit 0: over <nil>")
	s.wantFree()
}

// TestTTLLockStolen: the worker was stopped and missed its deadline; another one
// has the directory when it goes on, hears so, and can write nothing.
func TestTTLLockStolen(t *testing.T) {
	s := newTTLSite(t)
	a := s.locked("a", "-ttl", "1s", "-every", "50ms")
	a.ask("put content 1", "put")
	mustDo(t, syscall.Kill(a.Pid(), syscall.SIGSTOP))
	s.m.awaitFree("D")
	b := s.locked("b")
	b.ask("put content 2", "put")
	before := digest(t, s.under("D"))
	a.tell("put content late")
	mustDo(t, syscall.Kill(a.Pid(), syscall.SIGCONT))
	for range 2 {
		if line := a.line(); !strings.HasPrefix(line, "refused content") && !strings.HasPrefix(line, "lost") {
			t.Errorf("said %q", line)
		}
	}
	if after := digest(t, s.under("D")); after != before {
		t.Errorf("refused, but changed:\n%s", diff(before, after))
	}
	a.over("end", "exit 1: over ")
	s.wantClient("b")
	b.over("end", "exit 0: over <nil>")
	s.wantFree()
}

// TestTTLLockReleased: somebody of the same client releases early.
func TestTTLLockReleased(t *testing.T) {
	s := newTTLSite(t)
	a := s.locked("a")
	if got := s.m.Ctl("release D client=b\n"); got != "ENOENT" {
		t.Errorf("release by another ID = %s, want ENOENT", got)
	}
	s.wantClient("a")
	if got := s.m.Ctl("release D client=a\n"); got != "ok" {
		t.Errorf("release by the ID = %s, want ok", got)
	}
	if got := a.hear("lost"); !strings.Contains(got, "released") {
		t.Errorf("said %q, want that it was released", got)
	}
	a.over("end", "exit 1: over ")
	s.wantFree()
}

// TestTTLLockRenewed: 64 renewals in a row keep it beyond its time.
func TestTTLLockRenewed(t *testing.T) {
	s := newTTLSite(t)
	a := s.locked("a", "-ttl", "6s", "-every", "-1s")
	token := s.m.Locks()["D"].Token
	a.ask("renew 64", "renewed 64") // 64/48 of its time
	s.wantClient("a")
	if got := s.m.Locks()["D"].Token; got != token {
		t.Errorf("token %d, want still %d", got, token)
	}
	a.ask("put content x", "put")
	a.over("end", "exit 0: over <nil>")
	s.wantFree()
}

// TestTTLLockKilled: nobody renews the lease of a killed worker; it ends by
// itself, with nothing left.
func TestTTLLockKilled(t *testing.T) {
	s := newTTLSite(t)
	a := s.locked("a", "-ttl", "1s")
	a.ask("put content x", "put")
	a.Kill()
	s.m.awaitFree("D")
	b := s.locked("b")
	s.wantClient("b")
	b.over("end", "exit 0: over <nil>")
	s.wantNames("D", "content")
	s.wantFree()
}
