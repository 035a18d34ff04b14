//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// settledPair returns two agents with the same lock file open as h: first made it,
// with some mode, and second opened a private one before (A10), and has got the
// directory by it, and given it back.
func settledPair(t *testing.T, m *Mount, mode string, flags string) (first, second *Agent) {
	t.Helper()
	first, second = agent(t), agent(t)
	lock := m.At("D/devserver")
	first.must("mkdir", m.At("D"))
	second.must("open", "h", lock, "creat,"+flags)
	first.must("open", "h", lock, "rdwr,creat", mode)
	first.must("flock", "h")
	got := second.Start("flockw", "h")
	m.awaitWaiters("D", 1)
	unlock(t, first)
	if s := got(); s != "ok" {
		t.Fatalf("flock of the private one = %s", s)
	}
	m.wantOwner("D", second.Pid)
	return first, second
}

// unlock gives up an agent's flock lock through h.
func unlock(t *testing.T, a *Agent) {
	t.Helper()
	fd, closeIt := copyFD(t, a, "h")
	defer closeIt()
	mustDo(t, unix.Flock(fd, unix.LOCK_UN))
}

// asItIs runs f as the daemon is, and after it was replaced.
func asItIs(t *testing.T, f func(t *testing.T, m *Mount, then func())) {
	replaceWays(t, func(t *testing.T, opts []string) {
		for name, then := range map[string]func(*Mount){"same": func(*Mount) {}, "replaced": (*Mount).replace} {
			t.Run(name, func(t *testing.T) {
				m := mount(t, opts...)
				openDir(t, m.Back("E"))
				f(t, m, func() { then(m) })
			})
		}
	})
}

// TestAttackPrivateAncestors attacks A8: a child that holds the directory is not told that
// the lock file is there by what its parent waits with.
func TestAttackPrivateAncestors(t *testing.T) {
	asItIs(t, func(t *testing.T, m *Mount, then func()) {
		parent := agent(t)
		holder, other := parent.Child(), parent.Child()
		lock := m.At("D/devserver")
		holder.must("mkdir", m.At("D"))
		parent.must("open", "h", lock, "rdwr,creat")
		got := parent.Start("flockw", "h")
		m.awaitWaiters("D", 1)
		then()
		holder.want("ENOENT", "stat", lock)
		other.must("stat", lock) // it is its parent's
		holder.must("creat", lock, "wronly,creat,excl")
		m.wantOwner("D", holder.Pid)
		holder.must("rename", lock, lock+".lock")
		holder.must("unlink", lock+".lock")
		if s := got(); s != "ok" {
			t.Errorf("flock by the parent = %s", s)
		}
		m.wantOwner("D", parent.Pid)
	})
}

// TestAttackPrivateMoved attacks W3 with a private lock file that has become the
// real one, which is content somewhere else by now.
func TestAttackPrivateMoved(t *testing.T) {
	asItIs(t, func(t *testing.T, m *Mount, then func()) {
		_, b := settledPair(t, m, "0666", "rdwr")
		unlock(t, b)
		b.must("rename", m.At("D/devserver"), m.At("E/data"))
		then()
		openFile(t, m.Back("mine"), "evil")
		holder := agent(t)
		holder.must("creat", m.At("E/devserver"), "wronly,creat,excl")
		holder.must("put", m.At("E/data"), "precious", "trunc")
		if got := b.Get("pread", "h", "20", "0"); got != "precious" {
			t.Errorf("read %q through the descriptor", got)
		}
		before := digest(t, m.Back("E"))
		self := fmt.Sprintf("/proc/self/fd/%s", b.Get("fd", "h"))
		for _, c := range [][]string{
			{"pwrite", "h", "e", "4", "0"},
			{"write", "h", "evil"},
			{"ftruncate", "h", "1"},
			{"fallocate", "h", "0", "0", "4096"},
			{"fchmod", "h", "0600"},
			{"copyrange", m.At("mine"), "h"},
			{"sh", "echo evil >" + self},
			{"linkfd", "h", m.At("other")},
		} {
			got := b.Try(c...)
			if after := digest(t, m.Back("E")); after != before {
				t.Fatalf("%v = %s, and changed beneath E:\n%s", c, got, diff(before, after))
			}
			if got == "ok" && c[0] != "sh" {
				t.Errorf("%v = ok", c)
			}
		}
		fd, _ := copyFD(t, b, "h")
		for what, do := range map[string]func() error{
			"fsetxattr": func() error { return unix.Fsetxattr(fd, "user.evil", []byte("1"), 0) },
			"fchown":    func() error { return unix.Fchown(fd, nobody, nobody) },
			"futimens":  func() error { return unix.Futimes(fd, []unix.Timeval{{}, {}}) },
		} {
			// The test's own process holds nothing either.
			if err := do(); err != unix.EBUSY {
				t.Errorf("%s = %v, want EBUSY", what, err)
			}
			if after := digest(t, m.Back("E")); after != before {
				t.Fatalf("%s changed beneath E:\n%s", what, diff(before, after))
			}
		}
		b.must("stat", m.At("E/data"))
		holder.must("unlink", m.At("E/data"))
		var st unix.Stat_t
		mustDo(t, unix.Fstat(fd, &st))
		if st.Nlink != 0 {
			t.Errorf("it has %d names after unlink(2)", st.Nlink)
		}
		if got := b.Get("pread", "h", "20", "0"); got != "precious" {
			t.Errorf("read %q of the unlinked file", got)
		}
	})
}

// TestAttackPrivateSame attacks M2 likewise: both descriptors are of one file.
func TestAttackPrivateSame(t *testing.T) {
	asItIs(t, func(t *testing.T, m *Mount, then func()) {
		a, b := settledPair(t, m, "0666", "rdwr,append")
		unlock(t, b)
		b.must("rename", m.At("D/devserver"), m.At("E/data"))
		data := m.At("E/data")
		then()
		same := func(what, want string) {
			t.Helper()
			var byName unix.Stat_t
			mustDo(t, unix.Stat(data, &byName))
			for who, agent := range map[string]*Agent{"by the first descriptor": a, "by the second": b} {
				fd, closeIt := copyFD(t, agent, "h")
				var st unix.Stat_t
				mustDo(t, unix.Fstat(fd, &st))
				closeIt()
				if st.Atim = byName.Atim; st != byName { // what is read meanwhile
					t.Errorf("%s, %s: %+v, want %+v", what, who, st, byName)
				}
				if got := agent.Get("pread", "h", "100", "0"); got != want {
					t.Errorf("%s, %s: read %q, want %q", what, who, got, want)
				}
			}
			if got := a.Get("read", data); got != want || byName.Size != int64(len(want)) {
				t.Errorf("%s, by name: read %q of %d bytes, want %q", what, got, byName.Size, want)
			}
		}
		same("at first", "")
		a.must("pwrite", "h", "a", "5", "0")
		same("the first wrote", "aaaaa")
		b.must("write", "h", "bb")
		same("the second appended", "aaaaabb")
		a.must("put", data, "long content", "")
		same("somebody wrote by name", "long content")
		b.must("write", "h", "!")
		same("the second appended again", "long content!")
		b.must("ftruncate", "h", "4")
		same("the second cut it off", "long")
		b.must("fchmod", "h", "0600")
		same("the second set its mode", "long")
		a.must("chmod", data, "0640")
		same("somebody set its mode", "long")
		a.must("link", data, m.At("E/more"))
		same("it got another name", "long")
		a.must("unlink", m.At("E/more"))
		same("it lost it", "long")
		b.must("linkfd", "h", m.At("E/third"))
		same("it got one by the second", "long")
		a.must("truncate", data, "0")
		same("somebody emptied it", "")
	})
}

// TestAttackPrivateTwice attacks A4 and M2: one file has one set of locks.
func TestAttackPrivateTwice(t *testing.T) {
	asItIs(t, func(t *testing.T, m *Mount, then func()) {
		a, b := settledPair(t, m, "0666", "rdwr")
		lock := m.At("D/devserver")
		b.must("setlk", "h", "wr")
		then()
		b.must("open", "again", lock, "rdwr")
		b.want("EAGAIN", "flock", "again")
		b.want("ok", "flock", "h")
		child := b.Child()
		child.must("open", "h", lock, "rdwr")
		child.want("EAGAIN", "flock", "h")
		child.want("EAGAIN", "setlk", "h", "wr")
		if got := child.Get("getlk", "h", "wr"); got != itoa(unix.F_WRLCK) {
			t.Errorf("F_GETLK tells of %s", got)
		}
		a.want("EAGAIN", "flock", "h")
		waiter := a.Start("flockw", "h")
		m.awaitWaiters("D", 1)
		then()
		b.must("close", "again") // which drops its record locks: fcntl(2)
		child.must("setlk", "h", "wr")
		child.must("setlk", "h", "un")
		m.wantOwner("D", b.Pid)
		b.must("close", "h")
		if s := waiter(); s != "ok" {
			t.Errorf("who waited by the other descriptor = %s", s)
		}
		m.wantOwner("D", a.Pid)
		a.must("close", "h")
		m.awaitFree("D")
	})
}

// TestAttackPrivateRights attacks M2: who may not open the lock file does not get
// at it by one that was private, whoever locks it for him.
func TestAttackPrivateRights(t *testing.T) {
	const other = 12345
	grouped := func(t *testing.T) *Agent {
		return awaitAgent(t, func(sock string) {
			cmd := agentCmd(sock)
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody, Groups: []uint32{other}}}
			startCmd(t, cmd)
		})
	}
	replaceWays(t, func(t *testing.T, opts []string) {
		for _, c := range []struct {
			who             func(*testing.T) *Agent
			mode, flags     string
			want            string
			byRoot, replace bool
		}{
			{stranger, "0600", "rdwr", "EACCES", false, false},
			{stranger, "0600", "rdonly", "EACCES", false, true},
			{stranger, "0600", "rdwr", "EACCES", true, false},
			{stranger, "0640", "rdonly", "EACCES", false, false},
			{stranger, "0644", "rdwr", "EACCES", false, false},
			{stranger, "0644", "rdonly", "ok", false, false},
			{stranger, "0666", "rdwr", "ok", true, true},
			{grouped, "0640", "rdonly", "ok", false, true},
			{grouped, "0660", "rdwr", "ok", true, false},
			{grouped, "0640", "rdwr", "EACCES", false, false},
		} {
			t.Run(fmt.Sprintf("%s %s %v %s", c.mode, c.flags, c.byRoot, c.want), func(t *testing.T) {
				m := mount(t, opts...)
				a, b := agent(t), c.who(t)
				lock := m.At("D/devserver")
				a.must("mkdir", m.At("D"))
				a.must("chmod", m.At("D"), "0777")
				b.must("open", "h", lock, "creat,"+c.flags)
				a.must("open", "h", lock, "rdwr,creat", c.mode)
				a.must("chown", lock, "0", itoa(other))
				a.must("write", "h", "secret")
				a.must("flock", "h")
				if c.replace {
					m.replace()
				}
				done, closeIt := make(chan string, 1), func() {}
				if c.byRoot {
					var fd int
					fd, closeIt = copyFD(t, b, "h")
					go func() { done <- errnoName(goingOn(func() error { return unix.Flock(fd, unix.LOCK_EX) })) }()
				} else {
					got := b.Start("flockw", "h")
					go func() { done <- got() }()
				}
				m.awaitWaiters("D", 1)
				unlock(t, a)
				if got := <-done; got != c.want {
					t.Errorf("flock = %s, want %s", got, c.want)
				}
				if got := b.Get("pread", "h", "10", "0"); (got == "secret") != (c.want == "ok") {
					t.Errorf("%s, and it reads %q", c.want, got)
				}
				wrote := b.Try("pwrite", "h", "e", "4", "0")
				if got, _ := os.ReadFile(m.Back("D/devserver")); strings.HasPrefix(string(got), "eeee") != (c.want == "ok" && c.flags == "rdwr") {
					t.Errorf("write = %s, and the lock file has %q", wrote, got)
				}
				closeIt()
				b.must("close", "h")
				m.awaitFree("D")
				if c.want != "ok" {
					eventually(t, "it hears the same by name", func() bool { return b.Try("creat", lock, "creat,"+c.flags) == c.want })
				}
			})
		}
	})
}

// TestAttackPrivateSpecial attacks A10 and S3: the lock file that is there when a
// waiter's turn comes is none that it could open by name.
func TestAttackPrivateSpecial(t *testing.T) {
	for kind, want := range map[string]string{"symlink": "ELOOP", "fifo": "ENXIO", "dir": "EISDIR"} {
		t.Run(kind, func(t *testing.T) {
			m := mount(t)
			a, b := agent(t), agent(t)
			lock := m.At("D/devserver")
			openDir(t, m.Back("D"))
			a.must("ctl", m.control("ctl"), "acquire D")
			b.must("open", "h", lock, "rdwr,creat")
			switch kind {
			case "symlink":
				mustDo(t, os.Symlink("nowhere", m.Back("D/devserver")))
			case "fifo":
				mustDo(t, syscall.Mkfifo(m.Back("D/devserver"), 0o666))
			case "dir":
				mustDo(t, os.Mkdir(m.Back("D/devserver"), 0o777))
			}
			got := b.Start("flockw", "h")
			m.awaitWaiters("D", 1)
			a.must("ctl", m.control("ctl"), "release D")
			if s := got(); s != want {
				t.Errorf("flock = %s, want %s", s, want)
			}
			m.wantFree("D")
		})
	}
}

// TestAttackPrivateCrowd attacks A8 and A10: of many who wait with private ones,
// and others with the lock file itself, each gets it once, one at a time.
func TestAttackPrivateCrowd(t *testing.T) {
	need(t, "root", "fuse", "flock")
	m := mount(t)
	openDir(t, m.Back("D"))
	a := agent(t)
	a.must("ctl", m.control("ctl"), "acquire D")
	witness := tempDir(t) + "/held"
	var all []*Proc
	for i := range 24 {
		if i == 12 {
			openFile(t, m.Back("D/devserver"), "")
		}
		all = append(all, startCmd(t, exec.Command("flock", m.At("D/devserver"), "sh", "-c", `mkdir "$0" && sleep 0.01 && rmdir "$0"`, witness)))
		eventually(t, "it waits", func() bool { return len(m.Listing().Waiters) == i+1 })
	}
	a.must("ctl", m.control("ctl"), "release D")
	for i, p := range all {
		if r := p.Wait(); r.Status != 0 {
			t.Errorf("waiter %d: %v", i, r)
		}
	}
	m.awaitFree("D")
}

// TestAttackCandidateLease attacks L3: what is written through a candidate that
// has won under a lease ends with it.
func TestAttackCandidateLease(t *testing.T) {
	asItIs(t, func(t *testing.T, m *Mount, then func()) {
		openDir(t, m.Back("D"))
		a, b, holder := agent(t), agent(t), agent(t)
		ctl, u := m.control("ctl"), m.At("D", candidateName(t, b))
		a.must("ctl", ctl, "acquire D")
		b.must("open", "h", u, "rdwr,creat,excl")
		b.must("write", "h", "hello")
		a.must("ctl", ctl, "release D")
		b.must("ctl", ctl, "acquire D client=c ttl=1h")
		b.must("link", u, m.At("D/devserver"))
		then()
		b.must("pwrite", "h", "H", "1", "0")
		b.must("ctl", ctl, "renew D client=c ttl=20ms")
		eventually(t, "the lease runs out", func() bool { return holder.Try("ctl", ctl, "acquire D") == "ok" })
		before := digest(t, m.Back("D"))
		for _, c := range [][]string{{"pwrite", "h", "e", "4", "0"}, {"write", "h", "evil"}, {"ftruncate", "h", "1"}, {"fallocate", "h", "0", "0", "9"}, {"fchmod", "h", "0600"}} {
			got := b.Try(c...)
			unheard := c[0] == "fchmod" // of who made a candidate it succeeds, and changes nothing (A9)
			if after := digest(t, m.Back("D")); after != before || got == "ok" && !unheard {
				t.Fatalf("%v = %s after the lease has run out:\n%s", c, got, diff(before, after))
			}
		}
		if got := b.Get("pread", "h", "9", "0"); got != "Hello" {
			t.Errorf("read %q", got)
		}
	})
}

// TestAttackCandidateMoved attacks W3 with a candidate that won and was renamed,
// while strangers look for it at that very moment.
func TestAttackCandidateMoved(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	openDir(t, m.Back("E"))
	a, b, c := agent(t), agent(t), stranger(t)
	u, lock, data := m.At("D", candidateName(t, b)), m.At("D/devserver"), m.At("E/data")
	s := c.storm([]string{"stat", u}, []string{"stat", lock}, []string{"readdir", m.At("D")})
	for end := seconds(1); time.Now().Before(end); {
		a.must("ctl", m.control("ctl"), "acquire D")
		b.must("open", "h", u, "rdwr,creat,excl")
		a.must("ctl", m.control("ctl"), "release D")
		b.must("link", u, lock)
		b.must("rename", u, data)
		b.must("unlink", lock)
		if got := a.Try("creat", m.At("E/devserver"), "wronly,creat,excl"); got == "ok" {
			before := digest(t, m.Back("E"))
			b.want("EBUSY", "write", "h", "evil")
			b.want("EBUSY", "ftruncate", "h", "9")
			if after := digest(t, m.Back("E")); after != before {
				t.Fatalf("changed beneath E:\n%s", diff(before, after))
			}
			a.must("unlink", m.At("E/devserver"))
		}
		b.must("close", "h")
		b.must("unlink", data)
	}
	s.over()
}
