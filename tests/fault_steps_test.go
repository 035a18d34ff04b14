//go:build linux

package tests

import (
	"encoding/binary"
	"fmt"
	"iter"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// stepCalls are those by which a daemon changes something that outlives it.
var stepCalls = []int{
	unix.SYS_OPENAT, unix.SYS_OPENAT2, unix.SYS_WRITE, unix.SYS_PWRITE64, unix.SYS_FTRUNCATE, unix.SYS_FALLOCATE,
	unix.SYS_MKDIRAT, unix.SYS_MKNODAT, unix.SYS_SYMLINKAT, unix.SYS_LINKAT, unix.SYS_UNLINKAT, unix.SYS_RENAMEAT, unix.SYS_RENAMEAT2,
	unix.SYS_FSETXATTR, unix.SYS_SETXATTR, unix.SYS_FCHMOD, unix.SYS_FCHMODAT, unix.SYS_FCHOWN, unix.SYS_FCHOWNAT, unix.SYS_UTIMENSAT,
	unix.SYS_MOUNT, unix.SYS_FSMOUNT, unix.SYS_MOVE_MOUNT, unix.SYS_UMOUNT2,
}

// A stepper stops the daemons of a mount before one of these calls.
type stepper struct {
	m              *Mount
	stranger, next *Agent // of all rounds, once they are needed

	mu      sync.Mutex
	armed   bool
	nth     int // of the calls since then
	calls   int
	at      string        // the call that it stopped before
	stopped chan struct{} // closed then
	forever chan struct{}
}

// stepper makes one for the daemons that are started from now on.
func (m *Mount) stepper() *stepper {
	s := &stepper{m: m, forever: make(chan struct{})}
	var all []*fault
	for _, call := range stepCalls {
		all = append(all, &fault{call: call, until: func(a asked) <-chan struct{} { return s.before(call, a) }})
	}
	m.inject(all...)
	m.t.Cleanup(func() { close(s.forever) })
	return s
}

func (s *stepper) before(call int, a asked) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.armed || !s.changes(call, a) {
		return nil
	}
	if s.calls++; s.calls < s.nth {
		return nil
	}
	if s.calls == s.nth {
		s.at = fmt.Sprintf("call %d, %s", s.nth, callName(call, a))
		close(s.stopped)
	}
	return s.forever
}

// changes reports whether a call changes the backing, the state or the mounts.
func (s *stepper) changes(call int, a asked) bool {
	const makes = unix.O_CREAT | unix.O_TRUNC | unix.O_TMPFILE&^unix.O_DIRECTORY
	switch call {
	case unix.SYS_OPENAT:
		return a.args[2]&makes != 0
	case unix.SYS_OPENAT2:
		var how [8]byte
		local := []unix.Iovec{{Base: &how[0], Len: 8}}
		_, err := unix.ProcessVMReadv(a.pid, local, []unix.RemoteIovec{{Base: uintptr(a.args[2]), Len: 8}}, 0)
		return err == nil && binary.NativeEndian.Uint64(how[:])&makes != 0
	case unix.SYS_WRITE, unix.SYS_PWRITE64:
		to, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", a.pid, a.args[0]))
		return strings.HasPrefix(to, s.m.Dir+"/") || strings.HasPrefix(to, s.m.State+"/")
	}
	return true
}

func callName(call int, a asked) string {
	return fmt.Sprintf("%d %q %q", call, a.path(0), a.path(1))
}

// arm has it stop before the nth call from now on.
func (s *stepper) arm(nth int) (stopped <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.armed, s.nth, s.calls, s.at, s.stopped = true, nth, 0, "", make(chan struct{})
	return s.stopped
}

func (s *stepper) disarm() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.armed = false
}

// A killRound is a round of [TestFaultKilledSteps].
type killRound struct {
	t     *testing.T
	m     *Mount
	steps *stepper
	opts  []string
	nth   int
	dead  bool // the daemon was killed
	acked int  // so many calls of during have succeeded
}

// path is one of this round's own.
func (k *killRound) path(name string) string { return name + itoa(k.nth) }
func (k *killRound) at(name string) string   { return k.m.At(k.path(name)) }
func (k *killRound) back(name string) string { return k.m.Back(k.path(name)) }
func (k *killRound) there(name string) bool  { return exists(k.back(name)) }

// row is that of a directory's lock; its token is 0 if there is none.
func (k *killRound) row(name string) lockRow { return k.m.Locks()[k.path(name)] }

func (k *killRound) errorf(format string, args ...any) {
	k.t.Helper()
	k.t.Errorf("%s: "+format, append([]any{k.steps.at}, args...)...)
}

// stranger is an ordinary user's, and gets nothing.
func (k *killRound) stranger() *Agent {
	if k.steps.stranger == nil {
		k.steps.stranger = stranger(k.t)
	}
	return k.steps.stranger
}

// next takes what is free, and gives it back.
func (k *killRound) next() *Agent {
	if k.steps.next == nil {
		k.steps.next = agent(k.t)
	}
	return k.steps.next
}

// free makes a directory that nobody holds.
func (k *killRound) free(name string) { openDir(k.t, k.back(name)) }

// during carries out calls one after the other, until one fails because the daemon was
// killed before its nth step. Then the next one serves.
func (k *killRound) during(calls ...func() string) {
	k.t.Helper()
	stopped := k.steps.arm(k.nth)
	done := make(chan string, 1)
	go func() {
		defer close(done)
		for _, call := range calls {
			if s := call(); s != "ok" {
				done <- s
				return
			}
			k.acked++
		}
		done <- "ok"
	}()
	select {
	case <-stopped:
		k.dead = true
	case s := <-done:
		// What the daemon does on its own afterwards is a step, too.
		select {
		case <-stopped:
			k.dead = true
		case <-time.After(50 * time.Millisecond):
		}
		if s != "ok" {
			k.errorf("%s", s)
		}
	}
	k.steps.disarm()
	if k.dead {
		k.m.kill()
		s := <-done // at once: the connection is gone
		k.m.start(k.opts)
		k.m.awaitReady()
		if s != "" && !oneOf(s, "ok|ENOTCONN|ECONNABORTED|ECANCELED|EIO|EINTR") {
			k.errorf("heard %s", s)
		}
	}
}

// by is a call of an agent.
func by(a *Agent, args ...string) func() string { return func() string { return a.Try(args...) } }

// wantHeld expects that the agent has the directory, by a token if that is not 0, goes on
// in it, and that a stranger is refused.
func (k *killRound) wantHeld(name string, a *Agent, token uint64) {
	k.t.Helper()
	if row := k.row(name); row.Pid != a.Pid || token != 0 && row.Token != token {
		k.errorf("%s: %+v, want a lock of pid %d, token %d", name, row, a.Pid, token)
		return
	}
	if s := k.stranger().Try("put", k.at(name)+"/x", "x", "creat"); s != "EBUSY" {
		k.errorf("a stranger in %s: %s", name, s)
	}
	if s := a.Try("put", k.at(name)+"/more", "more", "creat"); s != "ok" {
		k.errorf("its owner in %s: %s", name, s)
	}
}

// wantFree expects that nobody has the directory, that no lock file is there, and that
// somebody else can take it.
func (k *killRound) wantFree(name string) {
	k.t.Helper()
	if row := k.row(name); row.Token != 0 {
		k.errorf("%s: %+v, want no lock", name, row)
		return
	}
	if exists(k.back(name) + "/devserver") {
		k.errorf("a lock file is left in %s", name)
	}
	for _, call := range [][]string{{"creat", k.at(name) + "/devserver", "creat,excl"}, {"unlink", k.at(name) + "/devserver"}} {
		if s := k.next().Try(call...); s != "ok" {
			k.errorf("the next one in %s: %s: %s", name, call[0], s)
		}
	}
	k.m.awaitFree(k.path(name))
}

// wantByFile expects that the directory is held if its lock file is there, and free
// otherwise.
func (k *killRound) wantByFile(name string, a *Agent) {
	k.t.Helper()
	if exists(k.back(name) + "/devserver") {
		k.wantHeld(name, a, 0)
	} else {
		k.wantFree(name)
	}
}

// ends kills the owner, and expects that nothing of its locks is left, but its artifact.
func (k *killRound) ends(a *Agent, artifact string, dirs ...string) {
	k.t.Helper()
	a.Kill()
	for _, dir := range dirs {
		k.m.awaitFree(k.path(dir))
		eventually(k.t, "no lock file or candidate is left", func() bool {
			names, _ := filepath.Glob(k.back(dir) + "/*")
			return !slices.ContainsFunc(names, func(name string) bool {
				return strings.HasPrefix(filepath.Base(name), "devserver") || ofLockers(filepath.Base(name))
			})
		})
		if artifact != "" && exists(k.back(dir)) {
			if b, err := os.ReadFile(k.back(dir) + "/artifact"); string(b) != artifact {
				k.errorf("the artifact in %s: %q, %v", dir, b, err)
			}
		}
	}
}

// one is the directory of two that is there, and not the other.
func (k *killRound) one(a, b string) string {
	k.t.Helper()
	if k.there(a) == k.there(b) {
		k.t.Fatalf("%s: %s is there: %v; %s: %v", k.steps.at, a, k.there(a), b, k.there(b))
	}
	if k.there(a) {
		return a
	}
	return b
}

// made has an agent make a directory with an artifact.
func (k *killRound) made(name string) (a *Agent, token uint64) {
	a = agent(k.t)
	a.must("mkdir", k.at(name))
	a.must("put", k.at(name)+"/artifact", "A", "creat")
	return a, k.row(name).Token
}

var killedSteps = []struct {
	name  string
	opts  []string
	round func(k *killRound)
}{
	{name: "mkdir", round: func(k *killRound) {
		a := agent(k.t)
		k.during(by(a, "mkdir", k.at("D")))
		if row := k.row("D"); row.Token != 0 && !k.there("D") || k.acked == 1 && row.Pid != a.Pid {
			k.errorf("D: there: %v, %+v", k.there("D"), row)
		} else if row.Token != 0 {
			k.wantHeld("D", a, 0)
		}
		k.ends(a, "", "D")
	}},
	{name: "rename", round: func(k *killRound) {
		a, token := k.made("D")
		k.during(by(a, "rename", k.at("D"), k.at("E")))
		at := k.one("D", "E")
		k.wantHeld(at, a, token)
		k.ends(a, "A", at)
	}},
	{name: "rename onto another one that it holds", round: func(k *killRound) {
		a, token := k.made("D")
		a.must("mkdir", k.at("E"))
		k.during(by(a, "rename", k.at("D"), k.at("E")))
		at := "E"
		if k.there("D") {
			at = "D"
			k.wantHeld("E", a, 0)
			a.must("unlink", k.at("E")+"/more")
			a.must("rmdir", k.at("E"))
		}
		k.wantHeld(at, a, token)
		k.ends(a, "A", at)
	}},
	{name: "rename elsewhere", round: func(k *killRound) {
		k.free("P")
		k.free("Q")
		a := agent(k.t)
		a.must("mkdir", k.at("P")+"/D")
		a.must("put", k.at("P")+"/D/artifact", "A", "creat")
		k.during(by(a, "rename", k.at("P")+"/D", k.at("Q")+"/D"))
		if exists(k.back("P")+"/D") == exists(k.back("Q")+"/D") {
			k.errorf("it is there twice, or not at all")
		}
		rows := k.m.Locks()
		p, q := rows[k.path("P")+"/D"], rows[k.path("Q")+"/D"]
		if exists(k.back("P")+"/D") != (p.Pid == a.Pid) || exists(k.back("Q")+"/D") != (q.Pid == a.Pid) {
			k.errorf("P/D: %+v, Q/D: %+v", p, q)
		}
		a.Kill()
	}},
	{name: "rename of what it is in", round: func(k *killRound) {
		k.free("P")
		a := agent(k.t)
		a.must("mkdir", k.at("P")+"/D")
		k.during(by(a, "rename", k.at("P"), k.at("Q")))
		at := k.one("P", "Q")
		if row := k.m.Locks()[k.path(at)+"/D"]; row.Pid != a.Pid {
			k.errorf("%s/D: %+v", at, row)
		}
		if s := a.Try("put", k.at(at)+"/D/x", "x", "creat"); s != "ok" {
			k.errorf("its owner: %s", s)
		}
		a.Kill()
	}},
	{name: "lock file moved in", round: func(k *killRound) {
		k.free("D")
		a := agent(k.t)
		a.must("put", k.at("D")+"/tmp", "pid", "creat")
		k.during(by(a, "rename", k.at("D")+"/tmp", k.at("D")+"/devserver"))
		if k.acked == 1 && !exists(k.back("D")+"/devserver") {
			k.errorf("an acknowledged lock is gone")
		}
		k.wantByFile("D", a)
		k.ends(a, "", "D")
	}},
	{name: "lock file moved away", round: func(k *killRound) {
		k.free("D")
		a := agent(k.t)
		a.must("creat", k.at("D")+"/devserver", "creat,excl")
		a.must("put", k.at("D")+"/artifact", "A", "creat")
		k.during(by(a, "rename", k.at("D")+"/devserver", k.at("D")+"/done"))
		if exists(k.back("D")+"/devserver") == exists(k.back("D")+"/done") {
			k.errorf("it is there twice, or not at all")
		}
		k.wantByFile("D", a)
		k.ends(a, "A", "D")
	}},
	{name: "lock file moved to another directory", round: func(k *killRound) {
		k.free("D")
		k.free("E")
		a := agent(k.t)
		a.must("creat", k.at("D")+"/devserver", "creat,excl")
		k.during(by(a, "rename", k.at("D")+"/devserver", k.at("E")+"/devserver"))
		if exists(k.back("D")+"/devserver") == exists(k.back("E")+"/devserver") {
			k.errorf("it is there twice, or not at all")
		}
		k.wantByFile("D", a)
		k.wantByFile("E", a)
		k.ends(a, "", "D", "E")
	}},
	{name: "lock file replaced", round: func(k *killRound) {
		k.free("D")
		a := agent(k.t)
		a.must("creat", k.at("D")+"/devserver", "creat,excl")
		token := k.row("D").Token
		a.must("put", k.at("D")+"/tmp", "pid", "creat")
		k.during(by(a, "rename", k.at("D")+"/tmp", k.at("D")+"/devserver"))
		if !exists(k.back("D") + "/devserver") {
			k.errorf("no lock file is there")
		}
		k.wantHeld("D", a, token)
		k.ends(a, "", "D")
	}},
	{name: "lock file exchanged", round: func(k *killRound) {
		k.free("D")
		a := agent(k.t)
		a.must("creat", k.at("D")+"/devserver", "creat,excl")
		a.must("put", k.at("D")+"/tmp", "pid", "creat")
		k.during(by(a, "rename", k.at("D")+"/tmp", k.at("D")+"/devserver", "exchange"))
		k.wantHeld("D", a, 0)
		k.ends(a, "", "D")
	}},
	{name: "link protocol", round: func(k *killRound) {
		k.free("D")
		a := agent(k.t)
		u, l := k.at("D")+"/"+candidateName(k.t, a), k.at("D")+"/devserver"
		k.during(by(a, "put", u, "pid", "creat,excl"), by(a, "link", u, l), by(a, "unlink", u), by(a, "unlink", l))
		if k.acked >= 2 && k.acked < 3 && !exists(k.back("D")+"/devserver") {
			k.errorf("an acknowledged lock is gone")
		}
		if k.acked == 4 && exists(k.back("D")+"/devserver") {
			k.errorf("an acknowledged release is undone")
		}
		k.wantByFile("D", a)
		k.ends(a, "", "D")
	}},
	{name: "link protocol, contended", round: func(k *killRound) {
		k.free("D")
		a, b := agent(k.t), agent(k.t)
		u, l := k.at("D")+"/"+candidateName(k.t, a), k.at("D")+"/devserver"
		b.must("creat", l, "creat,excl")
		k.during(by(a, "put", u, "pid", "creat,excl"), by(b, "unlink", l), by(a, "link", u, l), by(a, "unlink", u))
		switch {
		case k.acked < 2 && exists(k.back("D")+"/devserver"):
			k.wantHeld("D", b, 0)
		case k.acked < 2:
			k.wantFree("D")
		default:
			k.wantByFile("D", a)
			if k.acked > 2 && !exists(k.back("D")+"/devserver") {
				k.errorf("an acknowledged lock is gone")
			}
		}
		b.Kill()
		k.ends(a, "", "D")
	}},
	{name: "rename protocol", round: func(k *killRound) {
		k.free("D")
		a := agent(k.t)
		u, l := k.at("D")+"/"+candidateName(k.t, a), k.at("D")+"/devserver"
		k.during(by(a, "put", u, "pid", "creat,excl"), by(a, "rename", u, l), by(a, "put", k.at("D")+"/f", "x", "creat"), by(a, "unlink", l))
		// With one or three it may be, as what comes next may have been done.
		if there := exists(k.back("D") + "/devserver"); k.acked%2 == 0 && there != (k.acked == 2) {
			k.errorf("the lock file is there: %v, after %d calls", there, k.acked)
		}
		k.wantByFile("D", a)
		k.ends(a, "", "D")
	}},
	{name: "excl", round: existence("creat", "", "creat,excl")},
	{name: "lock directory", round: existence("mkdir", "")},
	{name: "symlink", round: existence("symlink", "nowhere")},
	{name: "touch, then flock", round: func(k *killRound) {
		k.free("D")
		a := agent(k.t)
		l := k.at("D") + "/devserver"
		k.during(by(a, "open", "l", l, "rdwr,creat"), by(a, "flock", "l"), by(a, "flock", "l", "un"), by(a, "close", "l"))
		if k.acked == 1 || k.acked == 2 {
			if row := k.row("D"); row.Pid != a.Pid {
				k.errorf("D: %+v, want a lock of pid %d, after %d calls", row, a.Pid, k.acked)
			}
		}
		if row := k.row("D"); row.Token != 0 {
			k.wantHeld("D", a, 0)
		}
		a.Try("close", "l")
		a.Kill()
		k.m.awaitFree(k.path("D"))
	}},
	{name: "rmdir", round: func(k *killRound) {
		a := agent(k.t)
		a.must("mkdir", k.at("D"))
		token := k.row("D").Token
		k.during(by(a, "rmdir", k.at("D")))
		if k.there("D") {
			k.wantHeld("D", a, token)
		} else if row := k.row("D"); row.Token != 0 {
			k.errorf("a lock on nothing: %+v", row)
		}
		k.ends(a, "", "D")
	}},
	{name: "narrowing", round: func(k *killRound) {
		a := agent(k.t)
		k.during(by(a, "mkdir", k.at("D")), by(a, "mkdir", k.at("D")+"/sub"), by(a, "creat", k.at("D")+"/sub/devserver", "creat,excl"))
		rows := k.m.Locks()
		d, sub := rows[k.path("D")], rows[k.path("D")+"/sub"]
		if k.acked > 0 && d.Pid != a.Pid && sub.Pid != a.Pid || exists(k.back("D")+"/sub/devserver") && sub.Pid != a.Pid {
			k.errorf("after %d calls: D: %+v, D/sub: %+v", k.acked, d, sub)
		}
		a.Kill()
		k.m.awaitFree(k.path("D"))
		k.m.awaitFree(k.path("D") + "/sub")
		eventually(k.t, "its lock file is gone", func() bool { return !exists(k.back("D") + "/sub/devserver") })
	}},
	{name: "owner dies", round: func(k *killRound) {
		k.free("D")
		a, b := agent(k.t), agent(k.t)
		u := k.back("D") + "/" + candidateName(k.t, a)
		a.must("put", k.at("D")+"/"+filepath.Base(u), "pid", "creat,excl")
		a.must("link", k.at("D")+"/"+filepath.Base(u), k.at("D")+"/devserver")
		a.must("put", k.at("D")+"/artifact", "A", "creat")
		k.during(func() string {
			a.Kill()
			for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(time.Millisecond) {
				locks, err := os.ReadFile(k.m.control("locks.json"))
				if err != nil {
					return "ENOTCONN"
				}
				if !strings.Contains(string(locks), k.path("D")) && !exists(u) {
					return "ok"
				}
			}
			return "the lock does not end"
		})
		k.m.awaitFree(k.path("D"))
		eventually(k.t, "its lock file and candidate are gone", func() bool { return !exists(k.back("D")+"/devserver") && !exists(u) })
		wantContent(k.t, k.back("D")+"/artifact", "A")
		b.must("creat", k.at("D")+"/devserver", "creat,excl")
		b.Kill()
		k.m.awaitFree(k.path("D"))
	}},
	{name: "hand-over", round: func(k *killRound) {
		a := agent(k.t)
		child := a.Child()
		child.must("mkdir", k.at("D"))
		token := k.row("D").Token
		k.during(func() string {
			child.Exit(0)
			for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(time.Millisecond) {
				if s := a.Try("put", k.m.control("ctl"), "check "+k.path("D"), "wronly"); s != "EPERM" {
					return s
				}
			}
			return "it is not handed over"
		})
		if row := k.row("D"); row.Token != 0 { // else nobody knows how the child has ended
			k.wantHeld("D", a, token)
		} else if k.acked == 1 {
			k.errorf("an acknowledged hand-over is undone")
		}
		k.ends(a, "", "D")
	}},
	{name: "restore", opts: []string{"--on-crash", "quarantine"}, round: restored},
	{name: "discard", opts: []string{"--on-crash", "quarantine"}, round: func(k *killRound) {
		a, _ := k.made("D")
		a.must("mkdir", k.at("D")+"/sub")
		a.Kill()
		eventually(k.t, "it is put aside", func() bool { return len(k.m.quarantine()) == 1 })
		id := k.m.quarantine()[0].ID
		k.during(func() string { return k.ctl("discard . id=" + id) })
		if len(k.m.quarantine()) > 0 {
			if s := k.m.Ctl("discard . id=" + id); s != "ok" {
				k.errorf("discard again: %s", s)
			}
		}
		eventually(k.t, "it is gone", func() bool {
			left, _ := filepath.Glob(k.m.Back(".stagefs/*/*"))
			return len(left) == 0
		})
	}},
	{name: "lease", round: func(k *killRound) {
		k.free("D")
		a := agent(k.t)
		line := func(text string) func() string { return by(a, "put", k.m.control("ctl"), text, "wronly") }
		d := k.path("D")
		k.during(line("acquire "+d+" client=x ttl=1h"), line("renew "+d+" client=x ttl=2h"), line("release "+d+" client=x"))
		row := k.row("D")
		if k.acked == 1 && row.Token == 0 {
			k.errorf("an acknowledged lease is gone")
		}
		if k.acked == 3 && row.Token != 0 {
			k.errorf("an acknowledged release is undone: %+v", row)
		}
		if row.Token != 0 {
			if s := k.stranger().Try("put", k.at("D")+"/x", "x", "creat"); s != "EBUSY" {
				k.errorf("a stranger: %s", s)
			}
			a.mustCommand(k.m, "renew %s client=x", d)
			a.must("put", k.at("D")+"/more", "more", "creat")
			a.mustCommand(k.m, "release %s client=x", d)
		}
		k.wantFree("D")
		a.Kill()
	}},
}

// existence takes and releases a lock by a file of its own kind.
func existence(call, target string, how ...string) func(k *killRound) {
	return func(k *killRound) {
		k.free("D")
		a := agent(k.t)
		l := k.at("D") + "/devserver"
		args := []string{call}
		if target != "" {
			args = append(args, target)
		}
		remove := "unlink"
		if call == "mkdir" {
			remove = "rmdir"
		}
		k.during(by(a, append(append(args, l), how...)...), by(a, remove, l))
		if k.acked == 2 && exists(k.back("D")+"/devserver") {
			k.errorf("an acknowledged release is undone")
		}
		k.wantByFile("D", a)
		k.ends(a, "", "D")
	}
}

// ctl is a command of the test process's, which finds a dead mount perhaps.
func (k *killRound) ctl(line string) string {
	f, err := os.OpenFile(k.m.control("ctl"), os.O_WRONLY, 0)
	if err == nil {
		defer f.Close()
		_, err = f.Write([]byte(line))
	}
	return errnoName(err)
}

// restored puts back what a crashed owner has made.
func restored(k *killRound) {
	a, _ := k.made("D")
	a.must("mkdir", k.at("D")+"/sub")
	a.must("put", k.at("D")+"/sub/deep", "deep", "creat")
	a.Kill()
	eventually(k.t, "it is put aside", func() bool { return len(k.m.quarantine()) == 1 })
	line := fmt.Sprintf("restore %s id=%s", k.path("D"), k.m.quarantine()[0].ID)
	k.during(func() string { return k.ctl(line) })
	if len(k.m.quarantine()) > 0 {
		if k.acked == 1 {
			k.errorf("it is back, and in quarantine still: %+v", k.m.quarantine())
		}
		if s := k.m.Ctl(line); s != "ok" {
			k.errorf("restore again: %s", s)
		}
	}
	if got := tree(k.t, k.back("D")); !slices.Equal(got, []string{"artifact=A", "sub/", "sub/deep=deep"}) {
		k.errorf("in D: %q", got)
	}
	k.wantFree("D")
}

// someSteps are the first step and those after it; without -soak one of so many, beginning
// with any.
func someSteps(of int) iter.Seq[int] {
	return func(yield func(nth int) bool) {
		if *soakFlag > 0 {
			of = 1
		}
		for nth, next := 1, 2+rand.IntN(of); yield(nth); nth, next = next, next+of {
		}
	}
}

// each has rounds in which a daemon is stopped before one step after the other, until all
// have been.
func (s *stepper) each(t *testing.T, round func(nth int) *killRound) {
	t.Helper()
	nth := 1
	for nth = range someSteps(3) {
		if !round(nth).dead || t.Failed() {
			break
		}
	}
	if nth == 1 {
		t.Error("there is no step")
	}
	t.Logf("fewer than %d steps", nth)
}

// TestFaultKilledSteps: a daemon that is killed before any of the steps of what somebody
// does has done it, or has not. Who was told that he has a lock has it, nobody else does,
// and nothing that was made is lost.
func TestFaultKilledSteps(t *testing.T) {
	needInject(t)
	for _, c := range killedSteps {
		t.Run(c.name, func(t *testing.T) {
			m := newMount(t, staticDir(t), filepath.Join(tempDir(t), "mnt"))
			steps := m.stepper()
			m.serve(c.opts...)
			steps.each(t, func(nth int) *killRound {
				k := &killRound{t: t, m: m, steps: steps, opts: c.opts, nth: nth}
				c.round(k)
				return k
			})
		})
	}
}
