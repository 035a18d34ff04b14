//go:build linux

package tests

import (
	"fmt"
	"os"
	"slices"
	"testing"
	"time"
)

// A lock file that something else is renamed onto, as by mv(1), sed -i or
// os.replace, is its owner's as before, whoever of the holders did it.

// wantOneRow reports an error unless the owner has the only row on dir and in it.
func (m *Mount) wantOneRow(dir string, owner *Agent) {
	m.t.Helper()
	rows := slices.DeleteFunc(m.Listing().Locks, func(l lockRow) bool { return !within(l.Dir, dir) })
	if len(rows) != 1 || rows[0].Dir != dir || rows[0].Pid != owner.Pid {
		m.t.Errorf("rows: %+v, want one on %s of pid %d", rows, dir, owner.Pid)
	}
}

// A replacing has somebody replace a lock file, and its owner's lock end afterwards.
type replacing struct {
	dir, made, by, end string
	owner              *Agent
}

// TestR1Replaced: a child that replaces its parent's lock file acquires nothing: the
// file outlives the child, goes with the owner, and its removal ends the lock.
func TestR1Replaced(t *testing.T) {
	byTransport(t, func(t *testing.T, opts ...string) {
		for when, ends := range map[string][]string{
			"":                    {"killed", "unlinked", "renamed"},
			"after a restart":     {"killed", "unlinked"},
			"after a replacement": {"killed"},
		} {
			t.Run(when, func(t *testing.T) {
				m := mount(t, opts...)
				other := agent(t)
				var all []replacing
				for _, end := range ends {
					for _, by := range []string{"owner", "child", "child that works on", "child that is killed"} {
						all = append(all, replacing{dir: "D" + itoa(len(all)), made: "created", by: by, end: end})
					}
					for _, by := range []string{"owner", "child"} {
						all = append(all, replacing{dir: "D" + itoa(len(all)), made: "renamed", by: by, end: end})
					}
				}
				for i := range all {
					all[i].replace(m, other)
				}
				switch when {
				case "after a restart":
					m.restart(nil, opts...)
				case "after a replacement":
					m.replace()
				}
				for _, r := range all {
					t.Run(r.made+"/"+r.by+"/"+r.end, func(t *testing.T) {
						m := m.on(t)
						if when != "" {
							r.held(m, other)
						}
						switch file := m.At(r.dir, "devserver"); r.end {
						case "unlinked":
							r.owner.must("unlink", file)
							m.wantFree(r.dir)
						case "renamed":
							r.owner.must("rename", file, m.At(r.dir, "away"))
							m.wantFree(r.dir)
						default:
							r.owner.Kill()
							m.awaitFree(r.dir)
						}
						if _, err := os.Lstat(m.Back(r.dir, "devserver")); !os.IsNotExist(err) {
							t.Errorf("the lock file afterwards: %v, want nothing there", err)
						}
						other.must("creat", m.At(r.dir, "devserver"), "wronly,creat,excl")
						m.wantOneRow(r.dir, other)
					})
				}
			})
		}
	})
}

// replace makes the lock file and has it replaced.
func (r *replacing) replace(m *Mount, other *Agent) {
	m.t.Helper()
	openDir(m.t, m.Back(r.dir))
	r.owner = agent(m.t)
	file, temp := m.At(r.dir, "devserver"), m.At(r.dir, "temp")
	if r.made == "created" {
		r.owner.must("creat", file, "wronly,creat,excl")
	} else {
		r.owner.must("put", temp, "1", "wronly,creat")
		r.owner.must("rename", temp, file)
	}
	who := r.owner
	if r.by != "owner" {
		who = r.owner.Child()
	}
	who.must("put", temp, "2", "wronly,creat,excl")
	who.must("utimens", temp, "1000000000")
	who.must("rename", temp, file)
	r.held(m, other)
	switch r.by {
	case "child that works on":
		who.must("put", m.At(r.dir, "out"), "x", "wronly,creat")
		fallthrough
	case "child":
		who.Exit(0)
		r.held(m, other)
	case "child that is killed":
		who.must("put", m.At(r.dir, "out"), "x", "wronly,creat")
		who.Kill()
		r.held(m, other)
	}
}

// held expects that the owner has the directory, and the lock file what replaced it.
func (r *replacing) held(m *Mount, other *Agent) {
	m.t.Helper()
	file := m.At(r.dir, "devserver")
	m.wantOneRow(r.dir, r.owner)
	other.want("EEXIST", "creat", file, "wronly,creat,excl")
	other.want("EBUSY", "put", m.At(r.dir, "f"), "x", "wronly,creat")
	other.want("EBUSY", "unlink", file)
	other.must("put", m.At("mine"), "x", "wronly,creat")
	other.want("EBUSY|EEXIST", "rename", m.At("mine"), file)
	if got, err := os.ReadFile(m.Back(r.dir, "devserver")); string(got) != "2" {
		m.t.Errorf("the lock file has %q (%v), want 2", got, err)
	}
	st, err := os.Lstat(file)
	mustDo(m.t, err)
	if age := time.Since(st.ModTime()); age > time.Hour { // A11
		m.t.Errorf("to a stranger the lock file is %v old, want new", age)
	}
}

// TestR1ReplacedByTool: nor does a script that has its lock file replaced by a tool, and
// removes it then, hold anything any more.
func TestR1ReplacedByTool(t *testing.T) {
	need(t, debianPython)
	for how, text := range map[string]string{
		"mv":      `echo 1 >D/t1; mv D/t1 D/devserver; echo 2 >D/t2; mv D/t2 D/devserver`,
		"mv -f":   `echo 1 >t1; mv t1 D/devserver; echo 2 >t2; mv -f t2 D/devserver`,
		"sed -i":  `set -C; echo 1 >D/devserver; sed -i s/1/2/ D/devserver`,
		"replace": `set -C; echo 1 >D/devserver; /usr/bin/python3 -c 'import os; open("D/t", "w").write("2\n"); os.replace("D/t", "D/devserver"); open("D/out", "w")'`,
	} {
		t.Run(how, func(t *testing.T) {
			m := mount(t)
			openDir(t, m.Back("D"))
			s := m.script(fmt.Sprintf(`cd "$1" || exit; %s; echo done; read x; rm D/devserver; echo gone; read x`, text), m.At())
			if got := s.line(); got != "done" {
				t.Fatalf("the script printed %q", got)
			}
			other := agent(t)
			other.want("EBUSY", "put", m.At("D", "f"), "x", "wronly,creat")
			eventually(t, "the script is the owner", func() bool { return m.Locks()["D"].Pid == s.Pid() })
			if rows := m.Listing().Locks; len(rows) != 1 {
				t.Errorf("rows: %+v, want one", rows)
			}
			if got, err := os.ReadFile(m.Back("D", "devserver")); string(got) != "2\n" {
				t.Errorf("the lock file has %q (%v), want 2", got, err)
			}
			s.goOn()
			if got := s.line(); got != "gone" {
				t.Fatalf("the script printed %q", got)
			}
			m.wantFree("D")
			other.must("creat", m.At("D", "devserver"), "wronly,creat,excl")
			m.wantOneRow("D", other)
			s.in.Close()
			s.Wait()
			m.wantOneRow("D", other)
		})
	}
}

// TestR4Renamed: a lock file that got its name by rename(2) is gone for everybody when
// its owner is dead, though the kernel knew it by another name, and goes by that for
// some time.
func TestR4Renamed(t *testing.T) {
	// Over the last of them the kernel can't be told, as before Linux 6.16.
	for _, transport := range []string{"threads", "uring", "fuse"} {
		for _, made := range []string{"renamed", "replaced", "exchanged", "exchanged from it"} {
			for _, replaced := range []bool{false, true} {
				if replaced && transport == "fuse" {
					continue
				}
				t.Run(fmt.Sprintf("%s/%s/replaced=%v", transport, made, replaced), func(t *testing.T) {
					needTransport(t, transport)
					m := mount(t, "--transport="+transport)
					openDir(t, m.Back("D"))
					a, other := agent(t), agent(t)
					file, temp := m.At("D", "devserver"), m.At("D", "temp")
					if made != "renamed" {
						a.must("put", file, "1", "wronly,creat,excl")
					}
					a.must("put", temp, "2", "wronly,creat,excl")
					switch made {
					case "exchanged":
						a.must("rename", temp, file, "exchange")
					case "exchanged from it":
						a.must("rename", file, temp, "exchange")
					default:
						a.must("rename", temp, file)
					}
					m.wantOneRow("D", a)
					other.must("stat", file)
					if replaced {
						m.replace()
					}
					a.Kill()
					m.awaitFree("D")
					other.want("ENOENT", "stat", file)
					other.must("creat", file, "wronly,creat")
					m.wantOneRow("D", other)
					if _, err := os.Lstat(m.Back("D", "devserver")); err != nil {
						t.Errorf("the next one's lock file: %v", err)
					}
				})
			}
		}
	}
}

// TestL2Replaced: to replace the lock file of a lease renews that, like any touch of it.
func TestL2Replaced(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	a := agent(t)
	a.mustCommand(m, "acquire D client=x ttl=1h")
	a.must("creat", m.At("D", "devserver"), "wronly,creat,excl")
	a.must("put", m.At("D", "temp"), "x", "wronly,creat")
	last := m.Locks()["D"].Deadline
	eventually(t, "some of its time is over", func() bool { return m.Locks()["D"].Deadline < last-0.5 })
	last = m.Locks()["D"].Deadline
	eventually(t, "it is renewed", func() bool {
		a.must("rename", m.At("D", "temp"), m.At("D", "devserver"))
		renewed := m.Locks()["D"].Deadline > last
		a.must("put", m.At("D", "temp"), "x", "wronly,creat")
		return renewed
	})
	if rows := m.Listing().Locks; len(rows) != 1 || rows[0].Client != "x" {
		t.Errorf("rows: %+v, want the lease", rows)
	}
	a.must("unlink", m.At("D", "devserver"))
}
