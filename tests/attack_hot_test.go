//go:build linux

package tests

import (
	"os"
	"testing"
	"time"
)

// TestS1AttackHotNames attacks W3 with descriptors that outlive the daemon. The
// next one must find their files wherever link(2), unlink(2), a rename onto them
// or the daemon itself has left them a name.
func TestS1AttackHotNames(t *testing.T) {
	// Each has an agent open a file in another directory than it is in at the end.
	cases := []struct {
		name    string
		renames bool
		open    func(a *Agent, m *Mount, from, to string)
	}{
		{"tmpfile", false, func(a *Agent, m *Mount, from, to string) {
			a.must("open", "h", m.At(from), "tmpfile,rdwr")
			a.must("linkfd", "h", m.At(to, "x"))
		}},
		{"linked", false, func(a *Agent, m *Mount, from, to string) {
			a.must("open", "h", m.At(from, "x"), "rdwr")
			a.must("link", m.At(from, "x"), m.At(to, "x"))
			a.must("unlink", m.At(from, "x"))
		}},
		{"linked twice", false, func(a *Agent, m *Mount, from, to string) {
			a.must("open", "h", m.At(from, "x"), "rdwr")
			a.must("link", m.At(from, "x"), m.At(from, "z"))
			a.must("link", m.At(from, "z"), m.At(to, "x"))
			a.must("unlink", m.At(from, "x"))
			a.must("unlink", m.At(from, "z"))
		}},
		{"never looked up", false, func(a *Agent, m *Mount, from, to string) {
			mustDo(t, os.Link(m.Back(from, "x"), m.Back(to, "x")))
			a.must("open", "h", m.At(from, "x"), "rdwr")
			a.must("unlink", m.At(from, "x"))
		}},
		{"renamed onto", true, func(a *Agent, m *Mount, from, to string) {
			a.must("open", "h", m.At(from, "x"), "rdwr")
			a.must("link", m.At(from, "x"), m.At(to, "x"))
			a.must("creat", m.At(from, "z"), "wronly,creat")
			a.must("rename", m.At(from, "z"), m.At(from, "x"))
		}},
		{"exchanged", true, func(a *Agent, m *Mount, from, to string) {
			a.must("open", "h", m.At(from, "x"), "rdwr")
			a.must("creat", m.At(to, "x"), "wronly,creat")
			a.must("rename", m.At(from, "x"), m.At(to, "x"), "exchange")
		}},
		{"lock directory", false, func(a *Agent, m *Mount, from, to string) {
			maker := agent(t)
			maker.must("mkdir", m.At(from, "devserver"))
			maker.must("put", m.At(from, "devserver/y"), "content", "creat")
			maker.Child().must("open", "h", m.At(from, "devserver/y"), "rdwr")
			maker.must("link", m.At(from, "devserver/y"), m.At(to, "x"))
			maker.Kill()
			eventually(t, "the lock directory is gone", func() bool { return !exists(m.Back(from, "devserver")) })
		}},
		{"destroyed", false, func(a *Agent, m *Mount, from, to string) {
			maker := agent(t)
			maker.must("mkdir", m.At(from, "devserver"))
			maker.must("mkdir", m.At(from, "sub"))
			maker.must("put", m.At(from, "sub/y"), "content", "creat")
			maker.Child().must("open", "h", m.At(from, "sub/y"), "rdwr")
			maker.must("link", m.At(from, "sub/y"), m.At(to, "x"))
			maker.Kill()
			eventually(t, "the content is gone", func() bool { return !exists(m.Back(from, "sub")) && !exists(m.Back(".stagefs")) })
		}},
	}
	// A rename has the daemon look where all that is open is: not together with the
	// others.
	for _, renames := range []bool{false, true} {
		m := mount(t, "--on-crash", "destroy")
		needPassthrough(m)
		holder := agent(t)
		to := func(i int) string { return "to" + itoa(i) }
		held := func(when string) {
			t.Helper()
			for i, c := range cases {
				if c.renames != renames {
					continue
				}
				if got := holder.Try("creat", m.At(to(i), "devserver"), "wronly,creat,excl"); got != "EEXIST" {
					t.Errorf("%s, %s: the lock although a file in there is open for writing: %s", c.name, when, got)
				}
			}
		}
		for i, c := range cases {
			from := "from" + itoa(i)
			openDir(t, m.Back(from))
			openDir(t, m.Back(to(i)))
			openFile(t, m.Back(from, "x"), "content")
			if c.renames == renames {
				c.open(agent(t), m, from, to(i))
			}
		}
		held("before")
		time.Sleep(2500 * time.Millisecond) // longer than a directory stays recorded after the last close
		m.restart(nil, "--on-crash", "destroy")
		held("after a restart")
	}
}

// TestS1AttackHotShared attacks W3 with a file that no lock covers, open when the
// daemon dies: it must not come under a lock afterwards by a rename.
func TestS1AttackHotShared(t *testing.T) {
	opts := []string{"--shared-name", "staged.timestamp"}
	m := mount(t, opts...)
	needPassthrough(m)
	holder := agent(t)
	for _, dir := range []string{"D", "E", "E/sub"} {
		openDir(t, m.Back(dir))
		openFile(t, m.Back(dir, "staged.timestamp"), "content")
	}
	stays, moves := agent(t), agent(t)
	holder.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	holder.must("creat", m.At("E/devserver"), "wronly,creat,excl")
	stays.must("open", "h", m.At("D/staged.timestamp"), "rdwr")
	moves.must("open", "h", m.At("E/sub/staged.timestamp"), "rdwr")
	moves.must("mmap", "p", "h")
	moves.must("close", "h")
	holder.must("rename", m.At("E"), m.At("F"))
	held := func() {
		t.Helper()
		holder.want("EBUSY", "rename", m.At("D/staged.timestamp"), m.At("D/art"))
		holder.want("EBUSY", "rename", m.At("F/sub/staged.timestamp"), m.At("F/art"))
	}
	held()
	time.Sleep(2500 * time.Millisecond)
	m.restart(nil, opts...)
	held()
	moves.must("munmap", "p")
	stays.Try("close", "h") // of the dead mount
	eventually(t, "both files can be had", func() bool {
		return holder.Try("rename", m.At("D/staged.timestamp"), m.At("D/art")) == "ok" || exists(m.Back("D/art"))
	})
	eventually(t, "both files can be had", func() bool {
		return holder.Try("rename", m.At("F/sub/staged.timestamp"), m.At("F/art")) == "ok"
	})
}

// TestS1AttackHotLater attacks W3 with a mapping that outlives its mount, and then a
// daemon that locks nothing, or one that ends in order: each later one must know.
func TestS1AttackHotLater(t *testing.T) {
	detached := func(m *Mount) {
		if r := run(t, stagefsBin(), "umount", "--lazy", m.Path); r.Status != 0 {
			t.Fatal(r)
		}
		<-m.gone
		m.start(nil)
		m.awaitReady()
	}
	for name, later := range map[string]func(m *Mount){
		"killed, unmounted": func(m *Mount) { m.restart(nil); m.unmounted(func() {}) },
		"killed, detached":  func(m *Mount) { m.kill(); detached(m) },
		"aborted": func(m *Mount) {
			m.aborter()()
			<-m.gone
			m.start(nil)
			m.awaitReady()
		},
		"without locks, unmounted": func(m *Mount) { m.restart(nil, "--disable-locking"); m.unmounted(func() {}) },
		"without locks, killed":    func(m *Mount) { m.restart(nil, "--disable-locking"); m.restart(nil) },
		"without locks, renamed": func(m *Mount) {
			m.restart(nil, "--disable-locking")
			agent(t).must("rename", m.At("D"), m.At("E"))
			openDir(t, m.At("D"))
			agent(t).must("rename", m.At("E/f"), m.At("D/f"))
			m.unmounted(func() {})
		},
		"without locks, replaced": func(m *Mount) {
			m.restart(nil, "--disable-locking")
			m.replace()
			m.unmounted(func() {})
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := mountOver(t)
			needPassthrough(m)
			openDir(t, m.At("D"))
			m.Ctl("release D")
			writer, holder := agent(t), agent(t)
			writer.must("open", "h", m.At("D/f"), "rdwr,creat")
			writer.must("mmap", "p", "h")
			later(m)
			if got := holder.Try("creat", m.At("D/devserver"), "wronly,creat,excl"); got != "EEXIST" {
				t.Errorf("the lock although a file in there is mapped for writing: %s", got)
			}
			writer.Kill()
			eventually(t, "it is free", func() bool { return holder.Try("creat", m.At("D/devserver"), "wronly,creat,excl") == "ok" })
		})
	}
}
