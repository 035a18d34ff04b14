//go:build linux

package tests

import (
	"os"
	"os/exec"
	"path/filepath"
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
					// Nobody tells of that, and a busy machine may not show it at the first look.
					eventually(t, "the lock ends", func() bool { return c.Try("open", "x", file, "rdwr,creat,excl") == "ok" })
					m.wantOwner(dir, c.Pid)
				})
			}
		}
	})
}

// TestA10Prepare: who has a lock file open to lock it may prepare it as programs
// do. Where it is not his, that succeeds and changes nothing, and he hears of the
// lock when he tries it. What would change it for good is refused.
func TestA10Prepare(t *testing.T) {
	byTransport(t, func(t *testing.T, opts ...string) {
		m := mount(t, opts...)
		for _, held := range []string{"by the lock file", "by another", "by its creation", "shared"} {
			t.Run(held, func(t *testing.T) {
				m := m.on(t)
				dir := strings.ReplaceAll(held, " ", "-")
				openDir(t, m.Back(dir))
				file, back := m.At(dir, "devserver"), m.Back(dir, "devserver")
				openFile(t, back, "content")
				a, b, c := locker(t), locker(t), agent(t)
				switch held {
				case "by the lock file":
					a.must("open", "x", file, "rdwr")
					a.must("flock", "x", "ex")
				case "shared":
					a.must("open", "x", file, "rdwr")
					a.must("flock", "x", "sh")
				case "by another":
					a.must("open", "x", m.At(dir, "devserver.lock"), "rdwr,creat")
				default:
					mustDo(t, os.Remove(back))
					a.must("put", file, "content", "creat,excl")
				}
				before := digest(t, m.Back(dir))
				b.must("open", "x", file, "rdwr,creat,trunc")
				b.must("fchmod", "x", "600")
				b.must("fchown", "x", "65534")
				b.want("EBUSY", "ftruncate", "x", "0")
				b.want("EBUSY", "futimens", "x")
				b.want("EBUSY", "write", "x", "text")
				c.want("EBUSY", "chmod", file, "0600")
				c.want("EBUSY", "chown", file, "65534", "0")
				c.want("EBUSY", "truncate", file, "0")
				if after := digest(t, m.Back(dir)); after != before {
					t.Errorf("changed by who does not hold it:\n%s", diff(before, after))
				}
				if st, err := os.Stat(file); err != nil || st.Mode().Perm() == 0o600 {
					t.Errorf("the lock file shows mode %v, %v", st.Mode(), err)
				}
				b.want("EAGAIN", "flock", "x", "ex", "nb")
				if held == "by its creation" {
					a.must("unlink", file)
					return
				}
				if held != "by another" {
					a.must("flock", "x", "un")
				}
				if held == "by another" {
					a.must("unlink", m.At(dir, "devserver.lock"))
				}
				b.must("flock", "x", "ex", "nb")
				b.must("fchmod", "x", "600")
				b.must("ftruncate", "x", "0")
				if st, err := os.Stat(back); err != nil || st.Mode().Perm() != 0o600 || st.Size() != 0 {
					t.Errorf("its holder's lock file has mode %v, %v", st.Mode(), err)
				}
			})
		}
	})
}

// TestA10PreparePrivate: the same for who opens a lock file that is not there. If
// it is made for him, it has the mode that he gave it.
func TestA10PreparePrivate(t *testing.T) {
	byTransport(t, func(t *testing.T, opts ...string) {
		m := mount(t, opts...)
		openDir(t, m.Back("D"))
		file := m.At("D", "devserver")
		a, b := agent(t), locker(t)
		a.mustCommand(m, "acquire D")
		b.must("open", "x", file, "rdwr,creat,trunc")
		b.must("fchmod", "x", "604")
		b.must("fchown", "x", "0")
		b.must("ftruncate", "x", "0")
		b.want("EBUSY", "ftruncate", "x", "3")
		b.want("EBUSY", "futimens", "x")
		b.want("EBUSY", "write", "x", "text")
		b.want("EAGAIN", "flock", "x", "ex", "nb")
		wantTree(t, m.Back("D"), nil)
		m.replace()
		a.mustCommand(m, "release D")
		b.must("flock", "x", "ex", "nb")
		if st, err := os.Stat(m.Back("D", "devserver")); err != nil || st.Mode().Perm() != 0o604 {
			t.Errorf("the lock file that was made: %v, %v, want mode 604", st, err)
		}
	})
}

// TestA10PrepareDeny: the same where writing needs a lock and nobody has one.
func TestA10PrepareDeny(t *testing.T) {
	m := mount(t, "--unlocked", "deny")
	file := m.lockFile("D")
	b, c := locker(t), agent(t)
	b.must("open", "x", file, "rdwr,creat,trunc")
	b.must("fchmod", "x", "600")
	c.want("EBUSY", "chmod", file, "0600")
	if st, err := os.Stat(m.Back("D", "devserver")); err != nil || st.Mode().Perm() != 0o666 {
		t.Errorf("the lock file: %v, %v, want mode 666", st, err)
	}
	b.must("flock", "x", "ex", "nb")
	b.must("fchmod", "x", "600")
	b.must("unlink", file)
	b.must("flock", "x", "un")
	m.awaitFree("D")
}

// TestA8FilelockCrowd: many who take turns as filelock's later versions do: each
// gets its turn, alone, and nobody hears anything but that somebody has it.
func TestA8FilelockCrowd(t *testing.T) {
	need(t, debianPython)
	byTransport(t, func(t *testing.T, opts ...string) {
		m := mount(t, opts...)
		openDir(t, m.Back("D"))
		program := filepath.Join(tempDir(t), "locks.py")
		before, _, ok := strings.Cut(locksPy, "\ntry:\n    release = take()")
		if !ok {
			t.Fatal("locksPy has changed")
		}
		mustDo(t, os.WriteFile(program, []byte(before+`
for _ in range(30):
    release = take()
    os.close(os.open(d + "/mine", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    with open(d + "/turns", "a") as f:
        f.write("x")
    os.unlink(d + "/mine")
    release()
`), 0o644))
		var crowd []*Proc
		for range 4 {
			crowd = append(crowd, startCmd(t, exec.Command(debianPython, "-ESs", program, "newfilelock", "wait", m.At("D"))))
		}
		for _, p := range crowd {
			if r := p.Wait(); r.Status != 0 {
				t.Error(r)
			}
		}
		wantTree(t, m.Back("D"), []string{"turns=" + strings.Repeat("x", 120)})
		m.awaitFree("D")
	})
}
