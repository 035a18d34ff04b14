//go:build linux

package tests

import (
	"strings"
	"testing"
)

// A lock on a descriptor ends where it is unlocked or closed (R2), whatever has
// become of the file's name meanwhile.

// byTransport runs a test for each of the usual ways in which requests come.
func byTransport(t *testing.T, f func(t *testing.T, opts ...string)) {
	for _, transport := range []string{"threads", "uring"} {
		t.Run(transport, func(t *testing.T) {
			needTransport(t, transport)
			f(t, "--transport="+transport)
		})
	}
}

// TestR2NameGone: who unlinks or renames its lock file away and then unlocks it,
// or closes it, leaves nothing behind: those who wait get the directory, as
// everybody else, while the process lives on.
func TestR2NameGone(t *testing.T) {
	byTransport(t, func(t *testing.T, opts ...string) {
		m := mount(t, opts...)
		for _, call := range lockCalls() {
			for _, lose := range []string{"unlink", "rename"} {
				for _, end := range []string{"unlock", "close"} {
					t.Run(call.name+"/"+lose+"/"+end, func(t *testing.T) {
						m := m.on(t)
						dir := call.name + lose + end
						openDir(t, m.Back(dir))
						file := m.At(dir, "devserver")
						a, b, c := locker(t), locker(t), locker(t)
						a.must("open", "x", file, "rdwr,creat")
						a.must(call.tryExclusive("x")...)
						b.must("open", "x", file, "rdwr,creat")
						granted := b.Start(call.waitExclusive("x")...)
						m.awaitWaiters(dir, 1)
						if lose == "unlink" {
							a.must("unlink", file)
						} else {
							a.must("rename", file, file+".old")
						}
						m.wantOwner(dir, a.Pid)
						c.want("EEXIST", "open", "y", file, "rdwr,creat,excl")
						if end == "unlock" {
							a.must(call.unlock("x")...)
						} else {
							a.must("close", "x")
						}
						if got := granted(); got != "ok" {
							t.Errorf("who waits hears %s, want ok", got)
						}
						m.wantOwner(dir, b.Pid)
						c.want("EBUSY", "put", m.At(dir, "f"), "", "creat")
						b.must(call.unlock("x")...)
						m.awaitFree(dir)
						c.must("open", "y", file, "rdwr,creat,excl")
						m.wantOwner(dir, c.Pid)
					})
				}
			}
		}
	})
}

// TestR2NameGoneConverted: a flock lock that a conversion has lost keeps nothing,
// also where its file has no name any more.
func TestR2NameGoneConverted(t *testing.T) {
	m := mount(t)
	for _, how := range []string{"try", "wait"} {
		t.Run(how, func(t *testing.T) {
			m := m.on(t)
			openDir(t, m.Back(how))
			file := m.At(how, "devserver")
			a, b := locker(t), locker(t)
			a.must("open", "x", file, "rdwr,creat")
			a.must("flock", "x", "ex", "nb")
			b.must("open", "x", file, "rdwr")
			a.must("unlink", file)
			a.must("flock", "x", "sh", "nb")
			m.wantOwner(how, a.Pid)
			b.must("flock", "x", "sh", "nb")
			if how == "try" {
				a.want("EAGAIN", "flock", "x", "ex", "nb")
				m.wantFree(how)
				return
			}
			granted := a.Start("flock", "x", "ex")
			m.awaitFree(how)
			b.must("flock", "x", "un")
			if got := granted(); got != "ok" {
				t.Errorf("the conversion: %s, want ok", got)
			}
			m.awaitFree(how)
		})
	}
}

// TestR2NamedLater: a lock on a descriptor that was opened before its file got a
// lock file's name ends like any other.
func TestR2NamedLater(t *testing.T) {
	byTransport(t, func(t *testing.T, opts ...string) {
		m := mount(t, opts...)
		for _, call := range lockCalls() {
			for _, flags := range []string{"rdwr,creat", "rdonly"} {
				for _, how := range []string{"unlink-unlock", "unlink-close", "unlock-unlink", "close-unlink"} {
					if flags == "rdonly" && call.name != "flock" {
						continue // a record lock for writing needs a descriptor for it
					}
					t.Run(call.name+"/"+flags+"/"+how, func(t *testing.T) {
						m := m.on(t)
						dir := call.name + flags + how
						openDir(t, m.Back(dir))
						openFile(t, m.Back(dir, "tmp"), "")
						file := m.At(dir, "devserver")
						a, b := locker(t), locker(t)
						a.must("open", "x", m.At(dir, "tmp"), flags)
						a.must("rename", m.At(dir, "tmp"), file)
						a.must(call.tryExclusive("x")...)
						b.must("open", "x", file, "wronly")
						granted := b.Start(call.waitExclusive("x")...)
						m.awaitWaiters(dir, 1)
						for step := range strings.SplitSeq(how, "-") {
							m.wantOwner(dir, a.Pid)
							switch step {
							case "unlink":
								a.must("unlink", file)
							case "unlock":
								a.must(call.unlock("x")...)
							default:
								a.must("close", "x")
							}
						}
						if got := granted(); got != "ok" {
							t.Errorf("who waits hears %s, want ok", got)
						}
						m.wantOwner(dir, b.Pid)
						b.must("close", "x")
						m.awaitFree(dir)
					})
				}
			}
		}
	})
}

// TestR2NamedLaterOwner: the owner of a flock lock is who opened the description
// (A4), also if that was no lock file then.
func TestR2NamedLaterOwner(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	file := m.At("D", "devserver")
	a := locker(t)
	a.must("open", "x", m.At("D", "tmp"), "rdwr,creat")
	a.must("rename", m.At("D", "tmp"), file)
	child := forked(a)
	child.must("flock", "x", "ex", "nb")
	child.must("unlink", file)
	m.wantOwner("D", a.Pid)
	child.Exit(0)
	m.wantOwner("D", a.Pid)
	a.must("close", "x")
	m.awaitFree("D")
}

// TestS1NameGone: a lock on a descriptor whose file has lost its name goes on when
// the daemon is replaced or killed, and ends afterwards as it would have before.
func TestS1NameGone(t *testing.T) {
	byTransport(t, func(t *testing.T, opts ...string) {
		for _, call := range lockCalls() {
			for _, opened := range []string{"devserver", "tmp"} {
				t.Run(call.name+"/"+opened, func(t *testing.T) {
					m := mount(t, opts...)
					a, b, c := locker(t), locker(t), locker(t)
					take := func(how string) (dir, file string) {
						t.Helper()
						dir = call.name + opened + how
						openDir(t, m.Back(dir))
						file = m.At(dir, "devserver")
						a.must("open", how, m.At(dir, opened), "rdwr,creat")
						if opened != "devserver" {
							a.must("rename", m.At(dir, opened), file)
						}
						a.must(call.tryExclusive(how)...)
						return dir, file
					}
					dir, file := take("replaced")
					b.must("open", "x", file, "wronly")
					granted := b.Start(call.waitExclusive("x")...)
					m.awaitWaiters(dir, 1)
					m.replace()
					m.awaitWaiters(dir, 1)
					a.must("unlink", file)
					m.wantOwner(dir, a.Pid)
					a.must(call.unlock("replaced")...)
					if got := granted(); got != "ok" {
						t.Errorf("who waits hears %s, want ok", got)
					}
					b.must("close", "x")
					m.awaitFree(dir)

					dir, file = take("unlinked")
					a.must("unlink", file)
					m.replace()
					m.wantOwner(dir, a.Pid)
					a.must("close", "unlinked")
					m.awaitFree(dir)

					dir, file = take("killed")
					a.must("unlink", file)
					m.restart(nil, opts...)
					m.wantOwner(dir, a.Pid)
					c.want("EEXIST", "open", "x", file, "rdwr,creat,excl")
					a.want("ENOTCONN", "close", "killed")
					c.must("open", "x", file, "rdwr,creat,excl")
					m.wantOwner(dir, c.Pid)
				})
			}
		}
	})
}
