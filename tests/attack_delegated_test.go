//go:build linux

package tests

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// TestC3dAttackPending: who is about to get a directory lets nobody keep what he has open
// in it: it may come to nothing, and then he would write beneath somebody else's lock.
func TestC3dAttackPending(t *testing.T) {
	need(t, "root", "fuse")
	m := mount(t)
	openDir(t, m.Back("D"))
	openDir(t, m.Back("D/sub"))
	for _, f := range []string{"slow", "sub/f", "sub/devserver"} {
		openFile(t, m.Back("D", f), "of before")
	}
	taker, member, other, looks := carrier(t, 0, "x"), carrier(t, 0, "x"), agent(t), agent(t)
	taker.must("open", "h", m.At("D/sub/f"), "wronly")
	member.must("open", "l", m.At("D/sub/devserver"), "rdonly")

	answer, stands := awaitedOpen(t, m.Back("D/slow"))
	defer answer()
	stuck := other.Start("truncate", m.At("D/slow"), "1")
	eventually(t, "the truncation is stuck", stands)
	got := taker.Start("ctl", m.control("ctl"), "acquire D client=x wait=10ms")
	eventually(t, "the lease is on its way", func() bool { return looks.Try("getxattr", m.At("D"), "user.stagefs.token") == "ok" })
	if s := member.Try("flock", "l"); s == "ok" {
		signalThreads(taker.Pid, unix.SIGURG)
		t.Logf("the lease: %s", got())
		if s := taker.Try("write", "h", "evil"); s == "ok" {
			t.Error("written beneath somebody else's lock")
		}
	} else if s != "EAGAIN" {
		t.Errorf("flock = %s, want ok or EAGAIN", s)
	}
	answer()
	stuck()
}

// pend has taker ask for dir, whose lock is of a kind then, and keeps that waiting for other,
// who truncates the file slow there, until end is called: then it comes to nothing.
func (m *Mount) pend(taker, other *Agent, dir, as, kind string) (end func()) {
	m.t.Helper()
	answer, stands := awaitedOpen(m.t, m.Back(dir, "slow"))
	m.t.Cleanup(answer)
	stuck := other.Start("truncate", m.At(dir, "slow"), "1")
	eventually(m.t, "the truncation is stuck", stands)
	taker.Start("ctl", m.control("ctl"), "acquire "+dir+" "+as+" wait=10ms")
	looks := agent(m.t)
	eventually(m.t, "the request is on its way", func() bool {
		return looks.Get("getxattr", m.At(dir), "user.stagefs.kind") == kind
	})
	return func() {
		taker.Kill()
		answer()
		stuck()
	}
}

// TestL2AttackPending: nor does it let those who will hold by it in where somebody else holds
// still.
func TestL2AttackPending(t *testing.T) {
	need(t, "root", "fuse")
	for _, c := range []struct{ what, held string }{{"open", "D"}, {"open", "D/sub"}, {"flock", "D/sub"}, {"acquire", "D/sub"}} {
		t.Run(c.what+" in "+c.held, func(t *testing.T) {
			what := c.what
			m := mount(t)
			for _, d := range []string{"D", "D/sub", "D/sub/in"} {
				openDir(t, m.Back(d))
			}
			for _, f := range []string{"slow", "f", "in/devserver"} {
				openFile(t, m.Back("D/sub", f), "of before")
			}
			holder, member := agent(t), carrier(t, 0, "x")
			member.must("open", "l", m.At("D/sub/in/devserver"), "rdonly")
			holder.must("creat", m.At(c.held, "devserver"), "wronly,creat,excl")
			taker, other := holder.Child(), holder.Child()

			end := m.pend(taker, other, "D/sub", "client=x", "lease")
			got := "EBUSY"
			switch what {
			case "open":
				got = member.Try("open", "h", m.At("D/sub/f"), "wronly")
			case "flock":
				got = member.Try("flock", "l")
			case "acquire":
				got, _ = member.command(m, "acquire D/sub/in client=x")
			}
			end()
			if what == "open" && got == "ok" {
				if got = member.Try("write", "h", "evil"); got == "ok" {
					t.Error("written beneath somebody else's lock")
				}
			}
			if row, there := m.Locks()["D/sub/in"]; there {
				t.Errorf("locked beneath somebody else's lock: %+v", row)
			}
			if !oneOf(got, "EBUSY|EAGAIN") {
				t.Errorf("%s = %s, want it refused", what, got)
			}
		})
	}
}

// TestL2AttackPendingBoth: nor where that one is about to be had, too: the one in front of it
// may come to nothing, and it to something.
func TestL2AttackPendingBoth(t *testing.T) {
	needInject(t)
	for _, c := range []struct{ what, front, refused string }{
		{"open", "D", "EBUSY"}, {"open", "D/sub", "EBUSY"}, {"rename", "D", "EBUSY"}, {"flock", "D", "EAGAIN"}, {"acquire", "D", "EBUSY"},
	} {
		t.Run(c.what+" in "+c.front, func(t *testing.T) {
			m := newMount(t, staticDir(t), tempDir(t))
			making, goesOn := make(chan struct{}), make(chan struct{})
			m.inject(&fault{call: unix.SYS_MKDIRAT, until: func(a asked) <-chan struct{} {
				if a.path(1) != "devserver" {
					return nil
				}
				close(making)
				return goesOn
			}})
			m.serve()
			for _, d := range []string{"D", "D/sub", "D/sub/in"} {
				openDir(t, m.Back(d))
			}
			for _, f := range []string{"slow", "sub/slow", "sub/f", "sub/in/devserver"} {
				openFile(t, m.Back("D", f), "of before")
			}
			holder, member := agent(t), carrier(t, 0, "x")
			taker, other := holder.Child(), holder.Child()
			member.must("open", "l", m.At("D/sub/in/devserver"), "rdonly")
			// The kernel looks up no name in a directory in which it has one made.
			for _, path := range []string{m.At("D/sub/f"), m.At(c.front, "slow")} {
				other.must("stat", path)
			}

			lock := holder.Start("mkdir", m.At("D/devserver"))
			<-making
			end := m.pend(taker, other, c.front, "client=x", "lease")
			got := ""
			switch c.what {
			case "open":
				got = member.Try("open", "h", m.At("D/sub/f"), "wronly")
			case "rename":
				got = member.Try("rename", m.At("D/sub/f"), m.At("D/sub/g"))
			case "flock":
				got = member.Try("flock", "l")
			case "acquire":
				got, _ = member.command(m, "acquire D/sub/in client=x")
			}
			close(goesOn)
			if s := lock(); s != "ok" {
				t.Fatalf("mkdir of the lock file = %s", s)
			}
			end()
			m.wantOwner("D", holder.Pid)
			if got != c.refused {
				t.Errorf("%s = %s, want %s", c.what, got, c.refused)
			}
			if c.what == "open" && got == "ok" {
				if got = member.Try("write", "h", "evil"); got == "ok" {
					t.Error("written beneath somebody else's lock")
				}
			}
			if row, there := m.Locks()["D/sub/in"]; there {
				t.Errorf("locked beneath somebody else's lock: %+v", row)
			}
		})
	}
}

// TestC3dAttackPendingAlias: who is about to get a lock in front of one that is about to be had
// keeps nothing open there either, by a name that nobody has looked up.
func TestC3dAttackPendingAlias(t *testing.T) {
	need(t, "root", "fuse")
	m := mount(t)
	for _, d := range []string{"D", "out"} {
		openDir(t, m.Back(d))
	}
	for _, f := range []string{"first", "slow", "f"} {
		openFile(t, m.Back("D", f), "of before")
	}
	mustDo(t, os.Link(m.Back("D/f"), m.Back("out/f")))
	holder, member := agent(t), carrier(t, 0, "x")
	first, taker, other := holder.Child(), holder.Child(), holder.Child()
	member.must("open", "h", m.At("out/f"), "wronly")

	answer, stands := awaitedOpen(t, m.Back("D/first"))
	t.Cleanup(answer)
	stuck := first.Start("truncate", m.At("D/first"), "1")
	eventually(t, "the truncation is stuck", stands)
	lock := holder.Start("ctl", m.control("ctl"), "acquire D")
	eventually(t, "the lock is on its way", func() bool { return member.Try("getxattr", m.At("D"), "user.stagefs.kind") == "ok" })
	end := m.pend(taker, other, "D", "client=x", "lease")
	answer()
	got := lock()
	stuck()
	end()
	if got != "EBUSY" {
		t.Errorf("acquire = %s, want EBUSY", got)
	}
	if s := member.Try("write", "h", "evil"); got == "ok" && s == "ok" {
		t.Error("written beneath somebody else's lock")
	}
}

// TestW3AttackPending: nor is what somebody else holds there changed through a name elsewhere
// that nobody has looked up.
func TestW3AttackPending(t *testing.T) {
	need(t, "root", "fuse")
	m := mount(t)
	for _, d := range []string{"D", "out"} {
		openDir(t, m.Back(d))
	}
	for _, f := range []string{"slow", "f", "other"} {
		openFile(t, m.Back("D", f), "of before")
	}
	mustDo(t, os.Link(m.Back("D/f"), m.Back("out/f")))
	holder, member := agent(t), carrier(t, 0, "x")
	holder.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	taker, other := holder.Child(), holder.Child()

	end := m.pend(taker, other, "D", "client=x", "lease")
	member.want("EBUSY", "open", "h", m.At("D/other"), "wronly") // it is known as one of the client's now
	if got := member.Try("open", "h", m.At("out/f"), "wronly"); got != "EBUSY" {
		t.Errorf("open = %s, want EBUSY", got)
	}
	end()
	m.wantOwner("D", holder.Pid)
	if got := member.Try("write", "h", "evil"); got == "ok" {
		t.Error("written beneath somebody else's lock")
	}
}

// TestL3AttackPending: what is opened under a lease while somebody is about to get a lock in
// front of it is revoked with the lease.
func TestL3AttackPending(t *testing.T) {
	need(t, "root", "fuse")
	m := mount(t)
	openDir(t, m.Back("D"))
	for _, f := range []string{"slow", "f"} {
		openFile(t, m.Back("D", f), "of before")
	}
	holder := carrier(t, 0, "x")
	holder.mustCommand(m, "acquire D client=x ttl=1h")
	taker, other := holder.Child(), holder.Child()
	member := taker.Child()

	end := m.pend(taker, other, "D", "", "explicit")
	member.must("open", "h", m.At("D/f"), "wronly")
	end()
	eventually(t, "the lock has come to nothing", func() bool {
		return member.Get("getxattr", m.At("D"), "user.stagefs.kind") == "lease"
	})
	member.must("write", "h", "mine")
	if got := m.Ctl("break D over"); got != "ok" {
		t.Fatalf("break = %s", got)
	}
	member.want("EBUSY", "write", "h", "evil")
}
