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
