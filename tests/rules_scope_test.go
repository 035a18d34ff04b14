//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// A scopeCase is one kind of scope, with ways to get processes into the same
// one, and out of it.
type scopeCase struct {
	name   string
	leader func(t *testing.T) *Agent
	peer   func(t *testing.T, leader *Agent) *Agent // in the leader's scope, no descendant of it
	apart  func(t *testing.T, leader *Agent) *Agent // a child of the leader outside
}

func scopeCases() []scopeCase {
	return []scopeCase{
		{
			"group",
			func(t *testing.T) *Agent { return agentBy(t, &syscall.SysProcAttr{Setpgid: true}) },
			func(t *testing.T, l *Agent) *Agent {
				return agentBy(t, &syscall.SysProcAttr{Setpgid: true, Pgid: l.Pid})
			},
			func(t *testing.T, l *Agent) *Agent { return l.Child("setsid") },
		},
		{
			// Two children of one that led the session and is gone.
			"session",
			func(t *testing.T) *Agent {
				first := agentOfSession(t)
				l := first.Child()
				first.Kill()
				return l
			},
			nil,
			func(t *testing.T, l *Agent) *Agent { return l.Child("setsid") },
		},
		{
			"cgroup",
			func(t *testing.T) *Agent { a := agent(t); enter(t, a.Pid, cgroup(t)); return a },
			func(t *testing.T, l *Agent) *Agent { a := agent(t); enter(t, a.Pid, cgroupDirOf(t, l.Pid)); return a },
			func(t *testing.T, l *Agent) *Agent { a := l.Child(); enter(t, a.Pid, cgroupRoot(t)); return a },
		},
	}
}

// cgroupRoot is a hierarchy in which cgroups can be made: that of version 2, or
// the one that counts processes.
func cgroupRoot(t *testing.T) string {
	t.Helper()
	for _, dir := range []string{"/sys/fs/cgroup/unified", "/sys/fs/cgroup/pids", "/sys/fs/cgroup"} {
		if _, err := os.Stat(filepath.Join(dir, "cgroup.procs")); err != nil {
			continue
		}
		probe, err := os.MkdirTemp(dir, "stagefs-test-")
		if err == nil {
			os.Remove(probe)
			return dir
		}
	}
	t.Skip("no cgroup can be made here")
	return ""
}

// cgroup makes one for the time of the test.
func cgroup(t *testing.T) string {
	t.Helper()
	return cgroupIn(t, cgroupRoot(t))
}

// cgroupIn makes it in a hierarchy.
func cgroupIn(t *testing.T, root string) string {
	t.Helper()
	dir, err := os.MkdirTemp(root, "stagefs-test-")
	mustDo(t, err)
	t.Cleanup(func() {
		for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(5 * time.Millisecond) { // what is left in it goes home
			procs, _ := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
			for pid := range strings.FieldsSeq(string(procs)) {
				os.WriteFile(filepath.Join(root, "cgroup.procs"), []byte(pid), 0)
			}
			if os.Remove(dir) == nil {
				return
			}
		}
		t.Errorf("%s cannot be removed", dir)
	})
	return dir
}

func enter(t *testing.T, pid int, dir string) {
	t.Helper()
	mustDo(t, os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(itoa(pid)), 0))
}

func cgroupDirOf(t *testing.T, pid int) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	mustDo(t, err)
	root := cgroupRoot(t)
	for line := range strings.Lines(string(b)) {
		_, path, _ := strings.Cut(strings.TrimSpace(line), "/stagefs-test-")
		if path != "" {
			return root + "/stagefs-test-" + path
		}
	}
	t.Fatalf("process %d is in no cgroup of the test:\n%s", pid, b)
	return ""
}

// TestH3Scopes: every process in the scope holds, the taker's descendants too,
// and nobody else; the lock lasts until the scope is empty.
func TestH3Scopes(t *testing.T) {
	for _, how := range []string{"by command", "by mount"} {
		for _, s := range scopeCases() {
			t.Run(s.name+" "+how, func(t *testing.T) {
				taker := s.leader(t)
				var m *Mount
				if how == "by mount" {
					m = mount(t, "--owner="+s.name)
					taker.must("mkdir", m.At("D"))
					mustDo(t, os.Chmod(m.Back("D"), 0o777))
				} else {
					m = mount(t)
					openDir(t, m.Back("D"))
					taker.mustCommand(m, "acquire D owner=%s", s.name)
				}
				row := m.Locks()["D"]
				if row.Scope != s.name || row.Pid != taker.Pid {
					t.Errorf("the row: %+v, want scope %s and pid %d", row, s.name, taker.Pid)
				}
				put := []string{"put", m.At("D/f"), "x", "creat"}
				taker.must(put...)
				child := taker.Child()
				child.must(put...)
				apart := s.apart(t, taker)
				apart.must(put...) // a descendant (H2)
				other := agent(t)
				other.want("EBUSY", put...)
				other.wantCommand(m, "EBUSY", "acquire D")
				var peer *Agent
				if s.peer != nil {
					peer = s.peer(t, taker)
					peer.must(put...)
					peer.mustCommand(m, "check D")
					if how == "by mount" {
						// Its lock file is the scope's lock: the same owner.
						peer.must("creat", m.At("D/devserver"), "wronly,creat,excl")
						if rows := m.Listing().Locks; len(rows) != 1 || rows[0].Kind != "explicit" {
							t.Errorf("rows after a peer made the lock file: %+v", rows)
						}
					}
				} else {
					peer = child.Child()
				}
				// The taker is gone, and so is who comes next.
				taker.Exit(0)
				token := m.Locks()["D"].Token
				other.want("EBUSY", put...)
				peer.must(put...)
				child.Kill()
				other.want("EBUSY", put...)
				peer.must(put...)
				if row := m.Locks()["D"]; row.Pid != peer.Pid || row.Token != token || row.Token == 0 {
					t.Errorf("the row: %+v, want pid %d and token %d", row, peer.Pid, token)
				}
				peer.Kill()
				m.awaitFree("D")
				other.must(put...)
			})
		}
	}
}

// TestH3Leaves: a process that leaves the scope, and never was seen to hold,
// holds nothing; one that comes in holds.
func TestH3Leaves(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	dir := cgroup(t)
	taker, guest := agent(t), agent(t)
	put := []string{"put", m.At("D/f"), "x", "creat"}
	taker.wantCommand(m, "ENOTSUP", "acquire D owner=cgroup")
	enter(t, taker.Pid, dir)
	taker.mustCommand(m, "acquire D owner=cgroup")
	guest.want("EBUSY", put...)
	inner := filepath.Join(dir, "inner")
	mustDo(t, os.Mkdir(inner, 0o755))
	t.Cleanup(func() { os.Remove(inner) })
	enter(t, guest.Pid, inner)
	guest.must(put...)
	enter(t, guest.Pid, cgroupRoot(t))
	stay := agent(t)
	enter(t, stay.Pid, dir)
	enter(t, stay.Pid, cgroupRoot(t))
	stay.want("EBUSY", put...)
	taker.mustCommand(m, "release D")
	m.wantFree("D")
}

// TestH3Reborn: a cgroup that is removed and made again under its path is another
// one: what the first one owned is not its.
func TestH3Reborn(t *testing.T) {
	m := mountOver(t)
	for _, d := range []string{"D", "E"} {
		openDir(t, m.At(d))
		m.Ctl("release " + d)
	}
	gone, same := cgroup(t), cgroup(t)
	taker, next, stays := agent(t), agent(t), agent(t)
	enter(t, taker.Pid, gone)
	taker.mustCommand(m, "acquire D owner=cgroup")
	leaver := agent(t)
	enter(t, leaver.Pid, same)
	enter(t, stays.Pid, same)
	leaver.mustCommand(m, "acquire E owner=cgroup")
	token := m.Locks()["E"].Token
	m.restart(func() {
		taker.Kill()
		leaver.Kill()
		eventually(t, "the cgroup is empty", func() bool { return os.Remove(gone) == nil })
		mustDo(t, os.Mkdir(gone, 0o755))
		enter(t, next.Pid, gone)
	})
	m.awaitFree("D")
	if row := m.Locks()["E"]; row.Token != token || row.Pid != stays.Pid {
		t.Errorf("E, whose cgroup is the same: %+v, want token %d of pid %d", row, token, stays.Pid)
	}
	stranger(t).must("creat", m.At("D", "x"), "wronly,creat")
}

// TestH3Step: a step of a CI run: a script in a session of its own takes a
// directory and ends, while what it left in the background goes on staging.
func TestH3Step(t *testing.T) {
	need(t, "root", "fuse", "setsid")
	m := mount(t, "--owner=session")
	mustDo(t, os.Mkdir(m.Back("board"), 0o755))
	fifo := filepath.Join(tempDir(t), "go")
	mustDo(t, syscall.Mkfifo(fifo, 0o600))
	mustDo(t, syscall.Mkfifo(fifo+".end", 0o600)) // one for both could be read while its first writer still has it
	cmd := exec.Command("setsid", "-w", "/bin/sh", "-c", `
		mkdir "$1/board/v1" && echo begun >"$1/board/v1/a" || exit
		(read x <"$2"; echo more >"$1/board/v1/b" && cat "$1/board/v1/b" >"$1/board/v1/c"; read x <"$2.end") >/dev/null 2>&1 &
		exit 0`, "sh", m.Path, fifo)
	if r := runCmd(t, cmd); r.Status != 0 {
		t.Fatalf("the step: %v", r)
	}
	other := agent(t)
	other.want("EBUSY", "put", m.At("board/v1/x"), "", "creat")
	token := m.Locks()["board/v1"].Token
	mustDo(t, os.WriteFile(fifo, []byte("go\n"), 0))
	eventually(t, "the rest is staged", func() bool {
		b, _ := os.ReadFile(m.Back("board/v1/c"))
		return string(b) == "more\n"
	})
	if row := m.Locks()["board/v1"]; row.Token != token || row.Scope != "session" {
		t.Errorf("the row: %+v, want token %d still", row, token)
	}
	mustDo(t, os.WriteFile(fifo+".end", []byte("end\n"), 0))
	m.awaitFree("board/v1")
	other.must("put", m.At("board/v1/x"), "", "creat")
}

// TestH3Background: a program that puts itself into the background, as daemon(3)
// does it: in a session of its own, with a parent that is gone before it comes to
// the mount.
func TestH3Background(t *testing.T) {
	need(t, "root", "fuse", "setsid")
	m := mount(t, "--owner=cgroup")
	fifo := filepath.Join(tempDir(t), "go")
	mustDo(t, syscall.Mkfifo(fifo, 0o600))
	mustDo(t, syscall.Mkfifo(fifo+".end", 0o600)) // one for both could be read while its first writer still has it
	cmd := exec.Command("/bin/sh", "-c", `
		echo $$ >"$3/cgroup.procs" && mkdir "$1/D" || exit
		(setsid sh -c 'read x <"$2"; echo more >"$1/D/f"; read x <"$2.end"' sh "$1" "$2" >/dev/null 2>&1 &)`,
		"sh", m.Path, fifo, cgroup(t))
	if r := runCmd(t, cmd); r.Status != 0 {
		t.Fatalf("the script: %v", r)
	}
	mustDo(t, os.WriteFile(fifo, []byte("go\n"), 0))
	eventually(t, "it has written", func() bool {
		b, _ := os.ReadFile(m.Back("D/f"))
		return string(b) == "more\n"
	})
	agent(t).want("EBUSY", "put", m.At("D/x"), "", "creat")
	mustDo(t, os.WriteFile(fifo+".end", []byte("end\n"), 0))
	m.awaitFree("D")
}

// TestH3RootCgroup: processes in no cgroup of their own hold alone, where the mount
// has the cgroup by default; the log says so once.
func TestH3RootCgroup(t *testing.T) {
	m := mount(t, "--owner=cgroup")
	root := cgroupRoot(t)
	a, b := agent(t), agent(t)
	enter(t, a.Pid, root)
	enter(t, b.Pid, root)
	openDir(t, m.Back("D"))
	a.must("mkdir", m.At("D/sub"))
	b.want("EEXIST", "creat", m.At("D/devserver"), "wronly,creat,excl")
	b.want("EBUSY", "put", m.At("D/sub/f"), "x", "creat")
	a.must("put", m.At("D/sub/f"), "x", "creat")
	if scope := m.Locks()["D/sub"].Scope; scope != "" && scope != "process" {
		t.Errorf("D/sub is locked for the %s", scope)
	}
	a.must("mkdir", m.At("E"))
	if n := strings.Count(m.Log(), "as with --owner=process"); n != 1 {
		t.Errorf("the log has %d warnings, want 1:\n%s", n, m.Log())
	}
}

// TestA7RunScope: what stagefs run makes for a lock is free when its command has ended,
// also where the mount gives a directory to the whole session of who makes it.
func TestA7RunScope(t *testing.T) {
	m := mount(t, "--owner=session")
	a := agent(t).Child("setsid")
	for _, owner := range []string{"owner=process", "owner=group", "owner=session", "client=c"} {
		if out := a.Get("sh", stagefsBin()+" run --"+owner+" "+m.At(owner)+" true"); out != "0 " {
			t.Errorf("--%s: %q", owner, out)
		}
		m.wantFree(owner)
	}
}
