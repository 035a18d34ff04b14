//go:build linux

package tests

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// fewSpares are how many descriptors a daemon may open more: a look that takes several
// fails at each of them.
const fewSpares = 5

// withSpare calls do while the daemon may open so many descriptors more.
func (m *Mount) withSpare(n int, do func()) {
	m.t.Helper()
	fds, err := os.ReadDir("/proc/" + itoa(m.cmd.Process.Pid) + "/fd")
	mustDo(m.t, err)
	var open []int
	for _, fd := range fds {
		open = append(open, atoi(fd.Name()))
	}
	limit := 0
	for spare := n; spare > 0 || slices.Contains(open, limit); limit++ {
		if !slices.Contains(open, limit) {
			spare--
		}
	}
	old := m.limitFiles(m.t, limit)
	defer m.limitFiles(m.t, int(old.Cur))
	do()
}

// A failingLook has a daemon fail to open some files.
type failingLook struct {
	faults *faults
	is     func(path string) bool // protected by faults.mu
}

// failingLook makes one for the daemons that are started from now on.
func (m *Mount) failingLook() *failingLook {
	l := new(failingLook)
	l.faults = m.inject(&fault{call: unix.SYS_OPENAT, is: func(a asked) bool { return l.is(a.path(1)) }})
	return l
}

// during calls do while it fails so often to open what is said, and returns how often it did.
func (l *failingLook) during(errno unix.Errno, times int, is func(path string) bool, do func()) (did int) {
	set := func(times int) {
		l.faults.mu.Lock()
		defer l.faults.mu.Unlock()
		f := l.faults.all[0]
		did = f.did
		f.did, f.times, f.errno, l.is = 0, times, errno, is
	}
	set(times)
	do()
	set(0)
	return did
}

// once is during for one file, and once.
func (l *failingLook) once(path string, do func()) (did bool) {
	return l.during(unix.EMFILE, 1, func(p string) bool { return p == path }, do) == 1
}

// mountLooking serves a new static directory, whose mode everybody may change, by a daemon
// that fails to look when it is told to.
func mountLooking(t *testing.T, opts ...string) (*Mount, *failingLook) {
	needInject(t)
	dir := staticDir(t)
	m := newMount(t, dir, dir+".mnt")
	look := m.failingLook()
	m.serve(opts...)
	return m, look
}

// known has the daemon know a process.
func (m *Mount) known(a *Agent) { a.must("utimens", m.At()) }

// TestFaultShortHolder: who holds by what it carries, or by a scope that it is in, is not
// taken for a rival where the daemon is too short of descriptors to look: it hears ENFILE.
func TestFaultShortHolder(t *testing.T) {
	m, look := mountLooking(t)
	holds := func(t *testing.T, dir string, member *Agent, looks ...string) {
		m.known(member)
		for i, at := range looks {
			file, got := "f"+itoa(i), ""
			did := look.once("/proc/"+itoa(member.Pid)+"/"+at, func() { got = member.Try("put", m.At(dir, file), "x", "creat") })
			if !did || !oneOf(got, "ok|ENFILE") {
				t.Errorf("if its %s can't be read: %v, it hears %s", at, did, got)
			}
			member.must("put", m.At(dir, file), "x", "creat")
		}
	}
	for _, s := range scopeCases() {
		t.Run(s.name, func(t *testing.T) {
			openDir(t, m.Back(s.name))
			taker := s.leader(t)
			taker.mustCommand(m, "acquire %s owner=%s", s.name, s.name)
			switch {
			case s.peer == nil:
			case s.name == "cgroup":
				holds(t, s.name, s.peer(t, taker), "cgroup")
			default:
				holds(t, s.name, s.peer(t, taker), "status")
			}
		})
	}
	for _, at := range []string{"status", "environ"} {
		t.Run(at, func(t *testing.T) {
			m.lease(at)
			holds(t, at, awaitAgent(t, func(sock string) {
				cmd := agentCmd(sock)
				cmd.Env = append(cmd.Env, "STAGEFS_CLIENT=c")
				startCmd(t, cmd)
			}), at)
		})
	}
}

// TestFaultShortScope: a lock that is to be a scope's is not taken for a process alone,
// and one that a scope has lasts as long as that has members, also where the daemon is
// too short of descriptors to look at them.
func TestFaultShortScope(t *testing.T) {
	for _, s := range scopeCases() {
		t.Run(s.name, func(t *testing.T) {
			m, look := mountLooking(t, "--owner="+s.name)
			for n := range 3 {
				dir, got := "D"+itoa(n), ""
				taker := s.leader(t)
				m.known(taker)
				at := "status"
				if s.name == "cgroup" && n > 0 {
					at = "cgroup"
				}
				look.once("/proc/"+itoa(taker.Pid)+"/"+at, func() { got = taker.Try("mkdir", m.At(dir)) })
				if !oneOf(got, "ok|ENFILE") {
					t.Errorf("if its %s can't be read, it hears %s", at, got)
				}
				if got != "ok" {
					taker.must("mkdir", m.At(dir))
				}
				row := m.Locks()[dir]
				if row.Scope != s.name {
					t.Errorf("if its %s can't be read: %+v", at, row)
				}
				var peer *Agent
				if s.peer != nil {
					peer = s.peer(t, taker)
				} else {
					peer = taker.Child()
				}
				m.withSpare(n, func() { taker.Kill() })
				eventually(t, "somebody else stands for it", func() bool { return m.Locks()[dir].Pid != taker.Pid })
				if now := m.Locks()[dir]; now.Token != row.Token || now.Pid != peer.Pid {
					t.Errorf("after the owner's death with %d descriptors: %+v, want token %d of pid %d", n, now, row.Token, peer.Pid)
				}
				peer.Kill()
				m.awaitFree(dir)
			}
		})
	}
}

// TestFaultShortReaper: whether a parent is a reaper, which inherits nothing, is known when
// a lock is taken, or it is not taken.
func TestFaultShortReaper(t *testing.T) {
	m, look := mountLooking(t)
	reaper := agent(t)
	reaper.must("put", "/proc/self/comm", "tini", "")
	child, got := reaper.Child(), ""
	m.known(child)
	did := look.once("/proc/"+itoa(reaper.Pid)+"/status", func() { got = child.Try("mkdir", m.At("D")) })
	if !did || !oneOf(got, "ok|ENFILE") {
		t.Errorf("if it can't be looked at: %v, it hears %s", did, got)
	}
	if got != "ok" {
		child.must("mkdir", m.At("D"))
	}
	child.Exit(0)
	m.awaitFree("D")
}

// TestFaultShortLockDir: what becomes of a lock by a directory as its owner dies is the
// same where the daemon is too short of descriptors to look into it, if later.
func TestFaultShortLockDir(t *testing.T) {
	m := mount(t)
	parent := agent(t)
	lockDir := func(dir string, content int) (owner *Agent) {
		openDir(t, m.Back(dir))
		owner = parent.Child()
		owner.must("mkdir", m.At(dir, "devserver"))
		owner.must("put", m.At(dir, "devserver/host"), strings.Repeat("x", content), "creat")
		return owner
	}
	for n := range fewSpares {
		killed, passes, changed := "K"+itoa(n), "P"+itoa(n), "C"+itoa(n)
		dies, exits, leaves := lockDir(killed, 1), lockDir(passes, 1), lockDir(changed, 1000)
		m.withSpare(n, func() {
			dies.Kill()
			exits.Exit(0)
			leaves.Exit(0)
		})
		m.awaitFree(killed)
		eventually(t, "its lock directory is removed", func() bool { return !exists(m.Back(killed, "devserver")) })
		eventually(t, "a lock passes to the parent", func() bool { return m.Locks()[passes].Pid == parent.Pid })
		m.awaitFree(changed)
		if !exists(m.Back(changed, "devserver/host")) {
			t.Errorf("with %d descriptors, what a lock directory holds more is removed", n)
		}
	}
}

// TestFaultShortLockDirUsed: so is what a child who lives has staged in such a directory: it
// stays, also when the directory can be looked into again.
func TestFaultShortLockDirUsed(t *testing.T) {
	m := mount(t)
	owners := map[string]*Agent{}
	for _, dir := range []string{"used", "unused"} {
		openDir(t, m.Back(dir))
		owners[dir] = agent(t)
		owners[dir].must("mkdir", m.At(dir, "devserver"))
	}
	child := owners["used"].Child("setsid")
	child.must("put", m.At("used/devserver/artifact"), "precious", "creat")
	m.withSpare(0, func() {
		for _, dir := range []string{"used", "unused"} {
			owners[dir].Kill()
			m.awaitFree(dir)
		}
	})
	// What could not be removed is tried again in that order.
	eventually(t, "the lock directory that nobody uses is removed", func() bool { return !exists(m.Back("unused/devserver")) })
	wantContent(t, m.Back("used/devserver/artifact"), "precious")
	m.wantOrphan("used/devserver", true)
}

// TestFaultShortLost: a lock by a descriptor of a daemon that died lasts while that is open,
// also where this one is too short of descriptors to look, or may not look at all.
func TestFaultShortLost(t *testing.T) {
	needInject(t)
	m := mountOver(t)
	owner, other := agent(t), agent(t)
	errnos := []unix.Errno{unix.EMFILE, unix.ENOMEM, unix.EACCES}
	before := map[string]lockRow{}
	for _, errno := range errnos {
		dir := unix.ErrnoName(errno)
		openDir(t, m.At(dir))
		m.Ctl("release " + dir)
		owner.must("open", dir, m.At(dir, "devserver"), "rdwr,creat")
		owner.must("flock", dir)
		before[dir] = m.Locks()[dir]
	}
	look := m.failingLook()
	m.restart(nil)
	fds := "/proc/" + itoa(owner.Pid) + "/fd"
	for _, is := range []func(string) bool{
		func(path string) bool { return path == fds }, // before it was seen which it is
		func(path string) bool { return strings.HasPrefix(path, fds+"/") },
	} {
		for _, errno := range errnos {
			dir := unix.ErrnoName(errno)
			if look.during(errno, 1000, is, func() {
				other.want("EEXIST|ENFILE", "creat", m.At(dir, "devserver.lock"), "wronly,creat,excl")
			}) == 0 {
				t.Errorf("%s: nothing failed", dir)
			}
		}
	}
	for _, errno := range errnos {
		dir := unix.ErrnoName(errno)
		m.wantStill(dir, before[dir])
		owner.Try("close", dir) // ENOTCONN: it is closed
		other.must("creat", m.At(dir, "devserver.lock"), "wronly,creat,excl")
	}
}

// TestFaultShortStrict: with --strict no daemon starts that can't look for ways under the mount.
func TestFaultShortStrict(t *testing.T) {
	needInject(t)
	other := agent(t)
	for _, path := range []string{"/proc", "/proc/" + itoa(other.Pid) + "/fd", "/proc/" + itoa(other.Pid) + "/maps"} {
		t.Run(path, func(t *testing.T) {
			m := mountOver(t)
			m.stop()
			look := m.failingLook()
			look.during(unix.EMFILE, 1000, func(p string) bool { return p == path }, func() {
				m.start([]string{"--strict"})
				eventually(t, "it ends, or serves", func() bool { return m.dead() || mountedAt(m.Path) })
			})
			if !m.dead() {
				t.Errorf("it serves:\n%s", m.Log())
			}
		})
	}
}

// TestFaultShortInside: nor does one in a directory that another daemon serves, if it can't look
// who says so.
func TestFaultShortInside(t *testing.T) {
	needInject(t)
	m := mount(t)
	openDir(t, m.Back("in"))
	inner := newMount(t, m.Back("in"), m.Dir+".in")
	look := inner.failingLook()
	for _, path := range []string{"/proc/" + itoa(m.cmd.Process.Pid) + "/fdinfo", "/proc/locks"} {
		look.during(unix.EMFILE, 1000, func(p string) bool { return p == path }, func() {
			inner.start(nil)
			eventually(t, "it ends, or serves", func() bool { return inner.dead() || mountedAt(inner.Path) })
		})
		if !inner.dead() {
			t.Errorf("it serves, though %s can't be read", path)
		}
		inner.stop()
	}
}

// TestFaultShortAdopt: nor does one serve that can't look which files an earlier one has left
// open for writing: another one finds them (W3).
func TestFaultShortAdopt(t *testing.T) {
	needInject(t)
	for name, fails := range map[string]func(m *Mount) *fault{
		"open": func(m *Mount) *fault {
			return &fault{call: unix.SYS_OPENAT, errno: unix.EMFILE, times: 1, is: func(a asked) bool { return a.path(1) == "D" }}
		},
		"list": func(m *Mount) *fault {
			return &fault{call: unix.SYS_GETDENTS64, errno: unix.ENOMEM, times: 1, is: func(a asked) bool {
				at, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", a.pid, a.args[0]))
				return strings.HasSuffix(at, "/D") // the rest is as in the daemon's own copy of the mount
			}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := mountOver(t)
			needPassthrough(m)
			a, b := agent(t), agent(t)
			mustDo(t, os.Mkdir(m.At("keep"), 0o777)) // the test's own lock: D stays free
			openDir(t, m.At("D"))
			a.must("open", "h", m.At("D/file"), "rdwr,creat")
			a.must("write", "h", "content")
			a.must("mmap", "map", "h")
			m.kill()
			short := m.inject(fails(m))
			m.start(nil)
			eventually(t, "it ends, or serves", func() bool { _, err := m.version(); return m.dead() || err == nil })
			if !m.dead() || short.did()[0] != 1 {
				t.Errorf("%d calls failed; it serves: %v", short.did()[0], !m.dead())
			} else {
				m.start(nil)
				m.awaitReady()
			}
			a.must("poke", "map", "CONTENT")
			b.want("EEXIST", lockIt(m)...)
			a.Try("close", "h")
			a.must("munmap", "map")
			b.must(lockIt(m)...)
		})
	}
}
