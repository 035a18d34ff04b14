//go:build linux

package tests

import (
	"os"
	"testing"
)

// A lock file that is renamed with RENAME_EXCHANGE or RENAME_WHITEOUT leaves
// something with its name behind.

// TestR1Exchange: what is called like a lock file afterwards is its owner's lock as
// before, and goes with the owner, or when a holder removes it.
func TestR1Exchange(t *testing.T) {
	byTransport(t, func(t *testing.T, opts ...string) {
		for _, flag := range []string{"exchange", "whiteout"} {
			for _, by := range []string{"owner", "child"} {
				for _, end := range []string{"killed", "unlinked", "renamed", "broken", "killed after a restart", "unlinked after a restart", "killed after a replacement"} {
					t.Run(flag+"/"+by+"/"+end, func(t *testing.T) {
						m := mount(t, opts...)
						openDir(t, m.Back("D"))
						a, other := agent(t), agent(t)
						if flag == "exchange" {
							openFile(t, m.Back("D", "other"), "other")
						}
						file := m.At("D", "devserver")
						a.must("creat", file, "wronly,creat,excl")
						who := a
						if by == "child" {
							who = a.Child()
						}
						who.must("rename", file, m.At("D", "other"), flag)
						held := func() {
							t.Helper()
							m.wantOwner("D", a.Pid)
							other.want("EEXIST", "creat", file, "wronly,creat,excl")
							other.want("EBUSY", "put", m.At("D", "f"), "x", "wronly,creat")
							other.want("EBUSY", "unlink", file)
						}
						held()
						switch end {
						case "killed after a restart", "unlinked after a restart":
							m.restart(nil, opts...)
							held()
						case "killed after a replacement":
							m.replace()
							held()
						}
						switch end {
						case "unlinked", "unlinked after a restart":
							who.must("unlink", file)
						case "renamed":
							who.must("rename", file, m.At("D", "away"))
						case "broken":
							if s := m.Ctl("break D attack"); s != "ok" {
								t.Errorf("break = %s", s)
							}
						default:
							a.Kill()
						}
						m.awaitFree("D")
						if _, err := os.Lstat(m.Back("D", "devserver")); !os.IsNotExist(err) {
							t.Errorf("the lock file's name afterwards: %v, want nothing there", err)
						}
						if _, err := os.Lstat(m.Back("D", "other")); err != nil {
							t.Error(err)
						}
						other.must("creat", file, "wronly,creat,excl")
						m.wantOwner("D", other.Pid)
					})
				}
			}
		}
	})
}

// TestA3Exchange: who exchanges something with a lock file that nobody's lock keeps
// has renamed something onto its name.
func TestA3Exchange(t *testing.T) {
	byTransport(t, func(t *testing.T, opts ...string) {
		for _, flag := range []string{"exchange", "whiteout"} {
			t.Run(flag, func(t *testing.T) {
				m := mount(t, opts...)
				file := m.lockFile("D")
				if flag == "exchange" {
					openFile(t, m.Back("D", "other"), "other")
				}
				a, other, writer := agent(t), agent(t), agent(t)
				writer.must("open", "f", m.At("D", "f"), "wronly,creat")
				a.want("EBUSY", "rename", file, m.At("D", "other"), flag) // C3d
				m.wantFree("D")
				writer.must("close", "f")
				eventually(t, "it goes", func() bool { return a.Try("rename", file, m.At("D", "other"), flag) == "ok" })
				m.wantOwner("D", a.Pid)
				other.want("EBUSY|EEXIST", "rename", file, m.At("D", "other"), flag)
				other.want("EBUSY", "put", m.At("D", "f"), "x", "wronly,creat")
				a.Kill()
				m.awaitFree("D")
				other.must("creat", file, "wronly,creat,excl")
			})
		}
		t.Run("both", func(t *testing.T) {
			m := mount(t, opts...)
			files := []string{m.lockFile("D"), m.lockFile("E")}
			a, other := agent(t), agent(t)
			a.must("rename", files[0], files[1], "exchange")
			m.wantOwner("D", a.Pid)
			m.wantOwner("E", a.Pid)
			a.must("rename", files[0], files[1], "exchange")
			a.must("unlink", files[0])
			m.wantFree("D")
			other.must("creat", files[0], "wronly,creat,excl")
			a.want("EBUSY|EEXIST", "rename", files[0], files[1], "exchange")
			a.want("EBUSY|EEXIST", "rename", files[1], files[0], "exchange")
			m.wantOwner("D", other.Pid)
			m.wantOwner("E", a.Pid)
			a.Kill()
			m.awaitFree("E")
			other.must("creat", files[1], "wronly,creat,excl")
		})
		t.Run("locked", func(t *testing.T) {
			m := mount(t, opts...)
			file := m.lockFile("D")
			openFile(t, m.Back("D", "other"), "other")
			a, other := agent(t), agent(t)
			a.must("open", "l", file, "wronly")
			a.must("flock", "l")
			a.must("rename", file, m.At("D", "other"), "exchange")
			a.must("close", "l")
			m.wantOwner("D", a.Pid) // A3
			other.want("EEXIST", "creat", file, "wronly,creat,excl")
			a.must("unlink", file)
			m.awaitFree("D")
			other.must("creat", file, "wronly,creat,excl")
		})
	})
}

// TestM2ExchangeGone: to exchange with what is gone since the kernel looked is ENOENT,
// and all others go on.
func TestM2ExchangeGone(t *testing.T) {
	byTransport(t, func(t *testing.T, opts ...string) {
		for how, remove := range map[string]func(m *Mount, owner *Agent){
			"beneath": func(m *Mount, owner *Agent) { mustDo(m.t, os.Remove(m.Back("D", "y"))) },
			"swept":   func(m *Mount, owner *Agent) { owner.Kill(); m.awaitFree("D") },
		} {
			t.Run(how, func(t *testing.T) {
				m := mount(t, append(opts, "--on-crash=destroy")...)
				for _, dir := range []string{"D", "E"} {
					openDir(t, m.Back(dir))
				}
				owner, a, other := agent(t), agent(t), agent(t)
				owner.must("creat", m.At("D", "devserver"), "wronly,creat,excl")
				owner.must("put", m.At("D", "y"), "y", "wronly,creat")
				if how == "beneath" {
					a = owner.Child()
				}
				a.must("mkdir", m.At("S"))
				a.must("put", m.At("S", "x"), "x", "wronly,creat")
				a.must("stat", m.At("D", "y"))
				remove(m, owner)
				a.want("ENOENT", "rename", m.At("S", "x"), m.At("D", "y"), "exchange")
				if _, err := os.Lstat(m.Back("S", "x")); err != nil {
					t.Error(err)
				}
				a.must("creat", m.At("S", "devserver"), "wronly,creat,excl")
				if how == "swept" {
					other.must("creat", m.At("D", "devserver"), "wronly,creat,excl")
				}
				other.must("rename", m.At("E"), m.At("F"))
			})
		}
	})
}

// TestM2AttackExchangeGone: nor does it stop anybody where that is a lock file, which
// goes with its owner.
func TestM2AttackExchangeGone(t *testing.T) {
	for _, policy := range []string{"destroy", "quarantine"} {
		t.Run(policy, func(t *testing.T) {
			m := mount(t, "--on-crash="+policy)
			openDir(t, m.Back("D"))
			a, other := agent(t), agent(t)
			a.must("mkdir", m.At("S"))
			a.must("put", m.At("S", "x"), "x", "wronly,creat")
			from, file := m.At("S", "x"), m.At("D", "devserver")
			for range 40 {
				owner := agent(t)
				owner.must("creat", file, "wronly,creat,excl")
				s := a.storm([]string{"rename", from, file, "exchange"})
				owner.Kill()
				eventually(t, "its lock ends", func() bool { return !m.ownsAny(owner.Pid) })
				if counts := s.over(); counts["rename EIO"] > 0 {
					t.Fatalf("exchanged: %v", counts)
				}
				a.must("put", from, "x", "wronly,creat")
				a.Try("unlink", file)
			}
			m.awaitFree("D")
			other.must("creat", file, "wronly,creat,excl")
			other.must("unlink", file)
			a.must("mkdir", m.At("T"))
			a.must("rename", m.At("T"), m.At("U"))
		})
	}
}
