//go:build linux

package tests

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// An endedWay is a way to lock a directory, as TestR6Ends uses it.
type endedWay struct {
	fresh bool // the directory is made
	lock  func(m *Mount, a *Agent, dir string)
	files []string // of what it makes, that which stays with what was staged
}

// endedWays are the protocols (A1 to A9).
var endedWays = map[string]endedWay{
	"mkdir": {fresh: true, lock: func(m *Mount, a *Agent, dir string) { a.must("mkdir", m.At(dir)) }},
	"mkdir+creat": {fresh: true, lock: func(m *Mount, a *Agent, dir string) {
		a.must("mkdir", m.At(dir))
		a.must("creat", m.At(dir, "devserver"), "wronly,creat,excl")
	}},
	"mkdir+flock": {fresh: true, files: []string{"devserver="}, lock: func(m *Mount, a *Agent, dir string) {
		a.must("mkdir", m.At(dir))
		a.must("open", "l", m.At(dir, "devserver"), "rdwr,creat")
		a.must("flock", "l")
	}},
	"creat":    {lock: func(m *Mount, a *Agent, dir string) { a.must("creat", m.At(dir, "devserver"), "wronly,creat,excl") }},
	"lock dir": {lock: func(m *Mount, a *Agent, dir string) { a.must("mkdir", m.At(dir, "devserver.lock")) }},
	"link": {lock: func(m *Mount, a *Agent, dir string) {
		u := m.At(dir, candidateName(a.t, a))
		a.must("put", u, "pid", "creat,excl")
		a.must("link", u, m.At(dir, "devserver.lock"))
		a.must("unlink", u)
	}},
	"flock": {files: []string{"devserver="}, lock: func(m *Mount, a *Agent, dir string) {
		openFile(a.t, m.Back(dir, "devserver"), "")
		a.must("open", "l", m.At(dir, "devserver"), "rdwr")
		a.must("flock", "l")
	}},
	"setlk": {files: []string{"devserver="}, lock: func(m *Mount, a *Agent, dir string) {
		openFile(a.t, m.Back(dir, "devserver"), "")
		a.must("open", "l", m.At(dir, "devserver"), "rdwr")
		a.must("setlk", "l", "wr")
	}},
	"both": {files: []string{"devserver="}, lock: func(m *Mount, a *Agent, dir string) {
		openFile(a.t, m.Back(dir, "devserver"), "")
		a.must("open", "l", m.At(dir, "devserver"), "rdwr")
		a.must("flock", "l")
		a.must("creat", m.At(dir, "devserver.lock"), "wronly,creat,excl")
	}},
	"command": {lock: func(m *Mount, a *Agent, dir string) { a.mustCommand(m, "acquire %s", dir) }},
	"command+flock": {files: []string{"devserver="}, lock: func(m *Mount, a *Agent, dir string) {
		openFile(a.t, m.Back(dir, "devserver"), "")
		a.mustCommand(m, "acquire %s", dir)
		a.must("open", "l", m.At(dir, "devserver"), "rdwr")
		a.must("flock", "l")
	}},
	"session": {lock: func(m *Mount, a *Agent, dir string) { a.mustCommand(m, "acquire %s owner=session", dir) }},
}

// TestR6Ends: every lock ends in every way, with the reason of that way and what is
// then to become of the content (R7), nothing left in the way of the next one; also
// after an upgrade of the daemon, and its crash.
func TestR6Ends(t *testing.T) {
	type endOf struct {
		reason string
		keeps  bool
		end    func(m *Mount, a *Agent, dir string)
	}
	ends := map[string]endOf{
		"killed":    {"exited", false, func(_ *Mount, a *Agent, _ string) { a.Kill() }},
		"exit 1":    {"exited", false, func(_ *Mount, a *Agent, _ string) { a.Exit(1) }},
		"exit 0":    {"exited", true, func(_ *Mount, a *Agent, _ string) { a.Exit(0) }},
		"released":  {"released", true, func(m *Mount, a *Agent, dir string) { a.mustCommand(m, "release %s", dir) }},
		"failed":    {"failed", false, func(m *Mount, a *Agent, dir string) { a.mustCommand(m, "release %s failed", dir) }},
		"destroyed": {"released", false, func(m *Mount, a *Agent, dir string) { a.mustCommand(m, "release %s destroy", dir) }},
		"broken":    {"broken", true, func(m *Mount, a *Agent, dir string) { a.mustCommand(m, "break %s test", dir) }},
	}
	before := map[string]func(m *Mount){
		"plain":    func(m *Mount) {},
		"replaced": func(m *Mount) { m.replace() },
		"crashed": func(m *Mount) {
			old := m.daemon()
			mustDo(m.t, syscall.Kill(old, syscall.SIGKILL))
			eventually(m.t, "another daemon serves", func() bool { now := m.daemon(); return now != old && now != 0 })
		},
	}
	for _, c := range []struct{ when, policy, scope string }{
		{"plain", "keep", "process"},
		{"plain", "destroy", "process"},
		{"plain", "quarantine", "process"},
		{"replaced", "destroy", "process"},
		{"crashed", "destroy", "process"},
		{"plain", "destroy", "session"},
	} {
		t.Run(c.when+", "+c.policy+", "+c.scope, func(t *testing.T) {
			m := mount(t, "--on-crash", c.policy, "--supervise", "--owner", c.scope)
			dirOf := func(way, end string) string {
				return strings.NewReplacer(" ", "-", "+", "-").Replace(way + "." + end)
			}
			ends := maps.Clone(ends)
			if c.when != "plain" || c.scope != "process" { // each of these has its like among the others
				maps.DeleteFunc(ends, func(end string, _ endOf) bool { return oneOf(end, "exit 1|broken") })
			} else if c.policy != "destroy" {
				delete(ends, "exit 1") // which is no other one than to be killed
			}
			owners, next := make(map[string]*Agent), agent(t)
			alive := agentOfSession(t) // of all locks that it outlives
			for way, w := range endedWays {
				for end, e := range ends {
					dir := dirOf(way, end)
					if !w.fresh {
						openDir(t, m.Back(dir))
						openFile(t, m.Back(dir, "was"), "")
					}
					a := alive
					if e.reason == "exited" {
						a = agentOfSession(t)
					}
					w.lock(m, a, dir)
					a.must("put", m.At(dir, "f"), "1", "wronly,creat")
					owners[dir] = a
				}
			}
			before[c.when](m)
			for way, w := range endedWays {
				for end, e := range ends {
					t.Run(way+", "+end, func(t *testing.T) {
						m := m.on(t)
						dir := dirOf(way, end)
						a := owners[dir]
						a.t = t
						s := m.events(t)
						e.end(m, a, dir)
						m.awaitFree(dir)
						dies := e.reason == "exited" && c.policy == "keep" // its descriptors may be closed first
						if l := ending(s, dir); l.Reason != e.reason && !(dies && l.Reason == "unlocked") {
							t.Errorf("it ended: %+v, want %q", l, e.reason)
						}
						// What was in the directory when a daemon died is not told apart.
						keeps := e.keeps || c.policy == "keep" || c.when == "crashed" && !w.fresh
						w.wantAfter(t, m, next, dir, end == "destroyed", keeps)
					})
				}
			}
		})
	}
}

// TestR7Scope: a session owns what one of its processes has locked by a descriptor,
// so it has not crashed if only that one did; the lock ends nevertheless (R2).
func TestR7Scope(t *testing.T) {
	m := mount(t, "--on-crash", "destroy", "--owner", "session")
	for lock, args := range map[string][]string{"flock": {"l"}, "setlk": {"l", "wr"}} {
		for _, last := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, last %v", lock, last), func(t *testing.T) {
				m := m.on(t)
				dir := fmt.Sprintf("%s-%v", lock, last)
				openDir(t, m.Back(dir))
				openFile(t, m.Back(dir, "devserver"), "")
				leader := agent(t).Child("setsid")
				a := leader.Child()
				a.must("open", "l", m.At(dir, "devserver"), "rdwr")
				a.must(append([]string{lock}, args...)...)
				leader.must("put", m.At(dir, "f"), "1", "wronly,creat")
				left, reason := []string{"devserver=", "f=1"}, "unlocked"
				if last {
					leader.Kill()
					left, reason = []string{"devserver="}, "exited"
				}
				s := m.events(t)
				a.Kill()
				m.awaitFree(dir)
				if l := ending(s, dir); l.Reason != reason {
					t.Errorf("it ended: %+v, want %q", l, reason)
				}
				wantTree(t, m.Back(dir), left)
			})
		}
	}
}

// TestL1Ends: so does a lease, which a process's end is nothing to.
func TestL1Ends(t *testing.T) {
	m := mount(t, "--on-crash", "destroy")
	next := agent(t)
	ends := map[string]struct {
		reason string
		keeps  bool
		line   string
	}{
		"released":  {"released", true, "release %s client=x"},
		"failed":    {"failed", false, "release %s client=x failed"},
		"destroyed": {"released", false, "release %s client=x destroy"},
		"expired":   {"expired", false, "renew %s client=x ttl=10ms"},
		"broken":    {"broken", true, "break %s test"},
	}
	for way, w := range map[string]endedWay{
		"lease":       {lock: func(*Mount, *Agent, string) {}},
		"lease+creat": endedWays["creat"],
		"lease+dir":   endedWays["lock dir"],
		"lease+link":  endedWays["link"],
		"lease+flock": endedWays["flock"],
		"lease+setlk": endedWays["setlk"],
	} {
		for end, e := range ends {
			t.Run(way+", "+end, func(t *testing.T) {
				m := m.on(t)
				dir := way + "." + end
				openDir(t, m.Back(dir))
				openFile(t, m.Back(dir, "was"), "")
				a := agent(t)
				a.mustCommand(m, "acquire %s client=x ttl=1h", dir)
				w.lock(m, a, dir)
				a.must("put", m.At(dir, "f"), "1", "wronly,creat")
				a.Kill()
				a = agent(t)
				s := m.events(t)
				a.mustCommand(m, e.line, dir)
				m.awaitFree(dir)
				if l := ending(s, dir); l.Reason != e.reason {
					t.Errorf("it ended: %+v, want %q", l, e.reason)
				}
				w.wantAfter(t, m, next, dir, end == "destroyed", e.keeps)
			})
		}
	}
}

// wantAfter expects what is to become of the content (R7), and that the next one can
// lock the directory.
func (w *endedWay) wantAfter(t *testing.T, m *Mount, next *Agent, dir string, destroyed, keeps bool) {
	t.Helper()
	switch {
	case destroyed, !keeps && w.fresh:
		wantGone(t, m, dir)
		return
	case keeps:
		wantTree(t, m.Back(dir), w.left("f=1"))
	default:
		wantTree(t, m.Back(dir), w.left())
	}
	next.t = t
	next.must("creat", m.At(dir, "devserver.lock"), "wronly,creat,excl")
	next.must("put", m.At(dir, "f"), "2", "wronly,creat")
	next.must("unlink", m.At(dir, "devserver.lock"))
}

// left is what is in the directory afterwards, and more.
func (w *endedWay) left(more ...string) []string {
	all := append(slices.Clone(w.files), more...)
	if !w.fresh {
		all = append(all, "was=")
	}
	return all
}

// ending returns the event that tells how the lock on dir ended.
func ending(s *eventStream, dir string) lockstate.Event {
	for {
		if e := s.next(); e.Dir == dir && (e.Event == "released" || e.Event == "broken") {
			return e
		}
	}
}

// TestS3Locked: a lock file from before the mount that somebody has locked by its
// descriptor is no orphan meanwhile: a break ends the lock and leaves it.
func TestS3Locked(t *testing.T) {
	for lock, args := range map[string][]string{"flock": {"l"}, "setlk": {"l", "wr"}} {
		t.Run(lock, func(t *testing.T) {
			dir := staticDir(t)
			openDir(t, dir+"/D")
			openFile(t, dir+"/D/devserver", "")
			m := mountDir(t, dir, dir+".mnt")
			orphans := func() int { return len(m.Listing().Orphans) }
			eventually(t, "it is listed", func() bool { return orphans() == 1 })
			for _, end := range []string{"unlock", "break"} {
				a := agent(t)
				a.must("open", "l", m.At("D/devserver"), "rdwr")
				a.must(append([]string{lock}, args...)...)
				if orphans() != 0 {
					t.Error("the file is listed while it is locked")
				}
				if end == "break" {
					m.wantStatus(0, "", "break", "--why", "test", m.At("D"))
				} else {
					a.must(lock, "l", "un")
				}
				m.awaitFree("D")
				if orphans() != 1 || !exists(m.Back("D/devserver")) {
					t.Errorf("after the %s: %d listed, want that it is there, and listed", end, orphans())
				}
			}
			m.wantStatus(0, "", "break", "--why", "test", m.At("D"))
			if orphans() != 0 || exists(m.Back("D/devserver")) {
				t.Error("a break of the orphan leaves it")
			}
		})
	}
}

// TestS3Taken: a break removes no lock file by which somebody has acquired the directory
// meanwhile (W3).
func TestS3Taken(t *testing.T) {
	dir := staticDir(t)
	openDir(t, dir+"/D")
	openFile(t, dir+"/D/devserver", "")
	m := newMount(t, dir, dir+".mnt")
	var breaking atomic.Bool
	reached, goOn := make(chan struct{}), make(chan struct{})
	// The last call before nobody else changes names.
	m.inject(&fault{call: unix.SYS_FSETXATTR, until: func(asked) <-chan struct{} {
		if !breaking.CompareAndSwap(true, false) {
			return nil
		}
		close(reached)
		return goOn
	}})
	m.serve()
	eventually(t, "it is listed", func() bool { return len(m.Listing().Orphans) == 1 })
	a, b := agent(t), agent(t)
	b.must("open", "l", m.At("D/devserver"), "rdwr")
	breaking.Store(true)
	broken := make(chan string)
	go func() { broken <- a.Try("put", m.control("ctl"), "break D test", "wronly") }()
	<-reached
	b.must("flock", "l")
	close(goOn)
	if got := <-broken; got != "ok" {
		t.Errorf("break: %s", got)
	}
	m.wantOwner("D", b.Pid)
	if !exists(m.Back("D/devserver")) {
		t.Error("the break removed the lock file of the one who has the directory now")
	}
}
