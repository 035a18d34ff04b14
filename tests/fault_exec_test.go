//go:build linux

package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// An elsewhere is another file system whose server does not answer for a while.
// What the kernel shows of a process that closes a file there in execve(2) can
// mostly not be read until then, not even its start time.
type elsewhere struct {
	t *testing.T
	m *Mount
}

func newElsewhere(t *testing.T, opts ...string) *elsewhere {
	t.Helper()
	e := &elsewhere{t, mount(t, opts...)}
	openFile(t, e.m.Back("f"), "x")
	return e
}

// stick has the agent become a sleep(1) that does not get out of execve(2)
// before [elsewhere.answer]. env goes to that program.
func (e *elsewhere) stick(a *Agent, env ...string) {
	e.t.Helper()
	e.stickAll([]*Agent{a}, env...)
}

// stickAll is stick for several.
func (e *elsewhere) stickAll(agents []*Agent, env ...string) {
	e.t.Helper()
	for _, a := range agents {
		a.must("open", "elsewhere", e.m.At("f"), "rdwr")
	}
	waiting := e.m.waiting()
	e.t.Cleanup(func() { // before the agents are waited for
		e.answer()
		for _, a := range agents {
			unix.PidfdSendSignal(a.ends, unix.SIGKILL, nil, 0)
		}
	})
	halt(e.t, e.m.cmd.Process.Pid)
	for _, a := range agents {
		before := waiting()
		a.send(append([]string{"exec", "sleep 1000"}, env...))
		eventually(e.t, "the process waits in execve(2)", func() bool { return waiting() != before })
	}
}

// answer lets everything go on.
func (e *elsewhere) answer() { syscall.Kill(e.m.cmd.Process.Pid, syscall.SIGCONT) }

// othersGoOn expects that a mount serves who has nothing to do with it.
func othersGoOn(t *testing.T, m *Mount, other *Agent) {
	t.Helper()
	other.must("mkdir", m.At("other"))
	other.must("put", m.At("other/f"), "x", "creat")
	other.must("rename", m.At("other/f"), m.At("other/g"))
	other.must("unlink", m.At("other/g"))
	other.must("rmdir", m.At("other"))
	other.must("read", m.control("locks.json"))
}

// stays waits for a while in which an answer would come that must not.
func stays(t *testing.T, done <-chan string, what string) {
	t.Helper()
	select {
	case got := <-done:
		t.Errorf("%s: %s, want no answer yet", what, got)
	case <-time.After(100 * time.Millisecond):
	}
}

// stuckThreads counts the threads of a process that wait where only a kill ends it.
func stuckThreads(pid int) (n int) { return strings.Count(threadStates(pid), "D") }

// inBackground has "" for whoever asks again, or where the test failed meanwhile.
func inBackground(answer func() string) <-chan string {
	c := make(chan string, 1)
	go func() {
		defer close(c)
		c <- answer()
	}()
	return c
}

// TestFaultExecUnder: a process in execve(2) may have what reaches the files past the
// mount (M5): it is named, and --strict refuses until it can be looked at.
func TestFaultExecUnder(t *testing.T) {
	e, dir := newElsewhere(t), staticDir(t)
	stuck := agent(t)
	e.stick(stuck)
	says := "pid " + itoa(stuck.Pid) + " ("
	m := mountOver(t)
	eventually(t, "the log names the process", func() bool {
		return strings.Contains(m.Log(), says) && strings.Contains(m.Log(), "can't be looked at")
	})
	strict := []string{"mount", "-d", "--strict", "--state-dir", filepath.Join(tempDir(t), "state"), dir}
	wantRefusal(t, "75", []string{says, "can't be looked at"}, strict...)
	e.answer()
	defer syscall.Unmount(dir, 2) // MNT_DETACH
	eventually(t, "a strict mount", func() bool { return run(t, stagefsBin(), strict...).Status == 0 })
	if r := run(t, stagefsBin(), "umount", dir); r.Status != 0 {
		t.Errorf("umount: %v", r)
	}
}

// TestFaultExecChild: who is not known yet, and descends from a process in
// execve(2), waits for that one. Nobody else does, however many they are, and the
// lock is its own.
func TestFaultExecChild(t *testing.T) {
	for _, step := range []struct{ name, lock string }{{"mkdir", "devserver.lock"}, {"creat", "devserver"}} {
		t.Run(step.name, func(t *testing.T) {
			e, m := newElsewhere(t), mount(t)
			openDir(t, m.Back("D"))
			openDir(t, m.Back("free"))
			parent, other := agent(t), agent(t)
			child := parent.Child()
			e.stick(parent)
			ask := []string{"mkdir", m.At("D", step.lock)}
			if step.name == "creat" {
				ask = []string{"creat", m.At("D", step.lock), "wronly,creat,excl"}
			}
			began := time.Now()
			done := inBackground(child.Start(ask...))
			stays(t, done, "a child of a process in execve(2)")
			e.answer()
			soon := time.Since(began) < 900*time.Millisecond // a second later it is nobody (H4)
			if got := <-done; got != "ok" {
				if !soon {
					t.Logf("too slow a machine to tell: %s after %v", got, time.Since(began))
					return
				}
				t.Fatalf("afterwards: %s, want ok", got)
			}
			if l := m.Locks()["D"]; l.Pid != child.Pid {
				t.Errorf("D is locked by %d, want %d", l.Pid, child.Pid)
			}
			other.want("EBUSY", "put", m.At("D/f"), "x", "creat")
		})
	}
}

// TestFaultExecMkdir: who is not known in time makes no directory that then is not its
// own: it hears EBUSY.
func TestFaultExecMkdir(t *testing.T) {
	e, m := newElsewhere(t), mount(t)
	parent, other := agent(t), agent(t)
	child := parent.Child()
	e.stick(parent)
	child.want("EBUSY", "mkdir", m.At("D"))
	if exists(m.Back("D")) {
		t.Error("D was made")
	}
	e.answer()
	eventually(t, "who can be known makes the directory", func() bool { return child.Try("mkdir", m.At("D")) == "ok" })
	m.wantOwner("D", child.Pid)
	other.want("EBUSY", "put", m.At("D/f"), "x", "creat")
}

// TestFaultExecStopped: the time for which the daemon is stopped does not count for one
// who waits to be known.
func TestFaultExecStopped(t *testing.T) {
	e, m := newElsewhere(t), mount(t)
	openDir(t, m.Back("D"))
	parent := agent(t)
	child := parent.Child()
	e.stick(parent)
	done := inBackground(child.Start("creat", m.At("D/devserver"), "wronly,creat,excl"))
	stays(t, done, "a child of a process in execve(2)")
	began, resumed := time.Now(), make(chan struct{})
	time.AfterFunc(1200*time.Millisecond, func() {
		syscall.Kill(m.cmd.Process.Pid, syscall.SIGCONT)
		close(resumed)
	})
	mustDo(t, syscall.Kill(m.cmd.Process.Pid, syscall.SIGSTOP))
	<-resumed
	time.Sleep(100 * time.Millisecond) // for a tick of the daemon's
	e.answer()
	soon := time.Since(began) < 1900*time.Millisecond // with what it waited before, less than a second without that
	if got := <-done; got != "ok" && soon {
		t.Errorf("afterwards: %s, want ok", got)
	}
}

// TestFaultExecChildren: many of them at once do all kinds of things to a directory
// that somebody holds, and wait for each other, as the kernel has one at a time
// change a directory. Killed, they end; and nobody waits for ever.
func TestFaultExecChildren(t *testing.T) {
	e, m := newElsewhere(t), mount(t)
	for _, f := range []string{"D/f", "D/old", "D/gone", "D/data"} {
		openDir(t, filepath.Dir(m.Back(f)))
		openFile(t, m.Back(f), "x")
	}
	openDir(t, m.Back("D/empty"))
	parent, holder, other := agent(t), agent(t), agent(t)
	holder.must("creat", m.At("D/devserver"), "rdwr,creat,excl")
	asks := [][]string{
		{"mkdir", m.At("D/new")},
		{"rmdir", m.At("D/empty")},
		{"unlink", m.At("D/gone")},
		{"rename", m.At("D/old"), m.At("D/renamed")},
		{"link", m.At("D/f"), m.At("D/linked")},
		{"symlink", "f", m.At("D/symlink")},
		{"put", m.At("D/data"), "y", ""},
		{"creat", m.At("D/made"), "wronly,creat"},
		{"truncate", m.At("D/f"), "0"},
		{"chmod", m.At("D/f"), "600"},
		{"put", m.control("ctl"), "acquire D", ""},
	}
	var children []*Agent
	for range 2 * len(asks) {
		children = append(children, parent.Child())
	}
	e.stick(parent)
	var answers []func() string
	for i, c := range children {
		answers = append(answers, c.Start(asks[i%len(asks)]...))
	}
	othersGoOn(t, m, other)
	for i, c := range children[:len(asks)] {
		mustDo(t, syscall.Kill(c.Pid, syscall.SIGKILL))
		eventually(t, fmt.Sprintf("kill -9 ends %q", asks[i]), func() bool {
			b, err := os.ReadFile("/proc/" + itoa(c.Pid) + "/status")
			return err != nil || strings.Contains(string(b), "\nState:\tZ")
		})
	}
	holder.must("put", m.At("D/mine"), "x", "creat") // when those have been refused
	if n := stuckThreads(m.cmd.Process.Pid); n > 4 {
		t.Errorf("%d threads of the daemon wait for one process", n)
	}
	othersGoOn(t, m, other)
	e.answer()
	for i, answer := range answers[len(asks):] {
		if got := answer(); got != "EBUSY" {
			t.Errorf("%q, afterwards: %s, want EBUSY", asks[i], got)
		}
	}
	if got := m.Locks()["D"].Pid; got != holder.Pid {
		t.Errorf("D is locked by %d, want %d", got, holder.Pid)
	}
}

// TestFaultExecMany: more processes hang in execve(2) than the daemon looks at at a
// time, and all are looked at, for the sake of their children. Nobody else waits for
// them, whether he is known yet or not.
func TestFaultExecMany(t *testing.T) {
	e, m := newElsewhere(t), mount(t)
	openDir(t, m.Back("D"))
	holder, other := agent(t), agent(t)
	holder.must("creat", m.At("D/devserver"), "rdwr,creat,excl")
	parents := make([]*Agent, 4*runtime.NumCPU()+8)
	for i := range parents {
		parents[i] = agent(t)
	}
	var children []*Agent
	for _, p := range parents {
		children = append(children, p.Child(), p.Child())
	}
	e.stickAll(parents)
	var answers []func() string
	for i, c := range children {
		dir := "D/" + itoa(i) // the kernel has one at a time change a directory
		openDir(t, m.Back(dir))
		ask := []string{"mkdir", m.At(dir, "new")}
		switch i / 2 % 3 {
		case 1:
			ask = []string{"put", m.At(dir, "f"), "x", "wronly,creat"}
		case 2:
			ask = []string{"put", m.control("ctl"), "acquire D", ""}
		}
		answers = append(answers, c.Start(ask...))
	}
	othersGoOn(t, m, other)
	othersGoOn(t, m, other.Child())
	for i, c := range children {
		if i%2 == 0 {
			mustDo(t, syscall.Kill(c.Pid, syscall.SIGKILL))
		}
	}
	othersGoOn(t, m, agent(t))
	holder.must("put", m.At("D/mine"), "x", "creat")
	if n := stuckThreads(m.cmd.Process.Pid); n > len(children) {
		t.Errorf("%d threads of the daemon wait for %d processes", n, len(parents))
	}
	e.answer()
	for i, answer := range answers {
		if i%2 == 1 {
			if got := answer(); got != "EBUSY" {
				t.Errorf("child %d, afterwards: %s, want EBUSY", i, got)
			}
		}
	}
	othersGoOn(t, m, agent(t))
	if got := m.Locks()["D"].Pid; got != holder.Pid {
		t.Errorf("D is locked by %d, want %d", got, holder.Pid)
	}
}

// TestFaultExecScope: the leader of a session is in execve(2), and not known yet:
// who wants a lock for the session waits for it. Nobody else does.
func TestFaultExecScope(t *testing.T) {
	e, m := newElsewhere(t), mount(t)
	openDir(t, m.Back("D"))
	leader, other := agentOfSession(t), agent(t)
	between := leader.Child()
	member := between.Child()
	between.Kill()
	e.stick(leader)
	began := time.Now()
	done := inBackground(member.Start("put", m.control("ctl"), "acquire D owner=session", ""))
	stays(t, done, "a lock for a session whose leader is in execve(2)")
	e.answer()
	soon := time.Since(began) < 900*time.Millisecond // a second later nobody waits for it
	if got := <-done; got != "ok" {
		if !soon {
			t.Logf("too slow a machine to tell: %s after %v", got, time.Since(began))
			return
		}
		t.Fatalf("afterwards: %s, want ok", got)
	}
	if l := m.Locks()["D"]; l.Scope != "session" {
		t.Errorf("D is locked for the %s, want session", l.Scope)
	}
	other.want("EBUSY", "put", m.At("D/f"), "x", "creat")
}

// TestFaultExecScopeMkdir: nor does who waits for it in vain get a lock for its process alone,
// where the mount gives such as are the session's.
func TestFaultExecScopeMkdir(t *testing.T) {
	e, m := newElsewhere(t), mount(t, "--owner=session")
	leader := agentOfSession(t)
	between := leader.Child()
	member := between.Child()
	between.Kill()
	e.stick(leader)
	member.want("EBUSY", "mkdir", m.At("D"))
	if exists(m.Back("D")) {
		t.Error("D was made")
	}
	e.answer()
	eventually(t, "the session can be known", func() bool { return member.Try("mkdir", m.At("D")) == "ok" })
	if l := m.Locks()["D"]; l.Scope != "session" {
		t.Errorf("D is locked for the %s, want session", l.Scope)
	}
}

// TestFaultExecScopeMember: who may be in the group that has a lock is known to be
// when its leader can be looked at: it is waited for.
func TestFaultExecScopeMember(t *testing.T) {
	e, m := newElsewhere(t), mount(t)
	openDir(t, m.Back("D"))
	leader, other := agentBy(t, &syscall.SysProcAttr{Setpgid: true}), agent(t)
	in := &syscall.SysProcAttr{Setpgid: true, Pgid: leader.Pid}
	first, member := agentBy(t, in), agentBy(t, in)
	first.mustCommand(m, "acquire D owner=group")
	e.stick(leader)
	began := time.Now()
	done := inBackground(member.Start("put", m.At("D/f"), "x", "creat"))
	stays(t, done, "a change by a member of a group whose leader is in execve(2)")
	othersGoOn(t, m, other)
	e.answer()
	soon := time.Since(began) < 900*time.Millisecond // a second later it is a stranger
	if got := <-done; got != "ok" && soon {
		t.Errorf("afterwards: %s, want ok", got)
	}
	member.must("put", m.At("D/g"), "x", "creat")
	other.want("EBUSY", "put", m.At("D/h"), "x", "creat")
}

// TestFaultExecOwner: an owner that dies is noticed, whoever is in execve(2).
func TestFaultExecOwner(t *testing.T) {
	e, m := newElsewhere(t), mount(t)
	openDir(t, m.Back("E"))
	alone, stuck, other := agent(t), agent(t), agent(t)
	empty := agentBy(t, &syscall.SysProcAttr{Setpgid: true})
	empty.mustCommand(m, "acquire E owner=group")
	alone.must("mkdir", m.At("A"))
	e.stick(stuck)
	empty.Kill()
	alone.Kill()
	for _, dir := range []string{"A", "E"} {
		eventually(t, dir+" is free", func() bool { return other.Try("put", m.At(dir, "f"), "x", "creat") == "ok" })
	}
}

// TestFaultExecMember: the locks of a group last while its last member is in
// execve(2), also beyond an upgrade, and keep nobody from being released. Then it
// stands for the group.
func TestFaultExecMember(t *testing.T) {
	e, m := newElsewhere(t), mount(t)
	first, other, alone := agentBy(t, &syscall.SysProcAttr{Setpgid: true}), agent(t), agent(t)
	last := agentBy(t, &syscall.SysProcAttr{Setpgid: true, Pgid: first.Pid})
	var dirs []string
	for i := range 50 {
		dirs = append(dirs, "D"+itoa(i))
		openDir(t, m.Back(dirs[i]))
		first.mustCommand(m, "acquire %s owner=group", dirs[i])
	}
	alone.must("mkdir", m.At("A"))
	e.stick(last)
	first.Kill()
	lasts := func() {
		t.Helper()
		for _, dir := range dirs {
			other.want("EBUSY", "put", m.At(dir, "f"), "x", "creat")
		}
		othersGoOn(t, m, other)
	}
	lasts()
	alone.Kill()
	eventually(t, "A is free", func() bool { return other.Try("put", m.At("A/f"), "x", "creat") == "ok" })
	m.replace()
	lasts()
	e.answer()
	for _, dir := range dirs {
		eventually(t, "the last member stands for the group", func() bool { return m.Locks()[dir].Pid == last.Pid })
	}
	lasts()
	mustDo(t, syscall.Kill(last.Pid, syscall.SIGKILL))
	for _, dir := range dirs {
		eventually(t, dir+" is free", func() bool { return other.Try("put", m.At(dir, "f"), "x", "creat") == "ok" })
	}
}

// TestFaultExecLease: whether a process in execve(2) is one of a client's is not
// known; a file that it has open beneath a directory stands in the client's way
// until it is.
func TestFaultExecLease(t *testing.T) {
	e, m := newElsewhere(t), mount(t)
	openDir(t, m.Back("D"))
	writer, client, other := agent(t), agent(t), agent(t)
	writer.must("open", "f", m.At("D/f"), "rdwr,creat")
	_, letGo := copyFD(t, writer, "f")
	e.stick(writer, "STAGEFS_CLIENT=x")
	client.wantCommand(m, "EBUSY", "acquire D client=x")
	othersGoOn(t, m, other)
	client.wantCommand(m, "EBUSY", "acquire D client=x")
	e.answer()
	letGo()
	eventually(t, "the client has it", func() bool { return client.Try("put", m.control("ctl"), "acquire D client=x", "") == "ok" })
}

// TestFaultExecCommands: what looks through all processes comes to its end.
func TestFaultExecCommands(t *testing.T) {
	e, m := newElsewhere(t), mount(t)
	inside := agent(t)
	inside.must("open", "inside", m.At(), "rdonly")
	stuck := agent(t)
	e.stick(stuck)
	if r := run(t, stagefsBin(), "umount", m.Path); r.Status == 0 || !strings.Contains(r.Err, itoa(inside.Pid)) {
		t.Errorf("umount of what process %d is in: %v", inside.Pid, r)
	}
	if r := run(t, stagefsBin(), "umount", e.m.Path); r.Status == 0 || !strings.Contains(r.Err, itoa(stuck.Pid)) {
		t.Errorf("umount of what process %d is about to leave: %v", stuck.Pid, r)
	}
	othersGoOn(t, mountOver(t), agent(t))
	dir := staticDir(t)
	if r := run(t, stagefsBin(), "mount", "--strict", "--state-dir", filepath.Join(tempDir(t), "state"), dir); r.Status == 0 || !strings.Contains(r.Err, itoa(stuck.Pid)) {
		t.Errorf("mount --strict, which must know what process %d has open: %v", stuck.Pid, r)
	}
	if r := run(t, stagefsBin(), "mount", "--replace", m.Path); r.Status != 0 {
		t.Errorf("mount --replace: %v", r)
	}
	othersGoOn(t, m, agent(t))
}

// TestFaultExecRestart: a daemon that starts while some process hangs in
// execve(2) serves everybody. Whether a descriptor that keeps a lock is in that
// one's hands can't be known then: the lock lasts until it is.
func TestFaultExecRestart(t *testing.T) {
	e, m := newElsewhere(t), mountOver(t)
	openDir(t, m.At("E"))
	m.Ctl("release E")
	keeper, other, stuck := agent(t), agent(t), agent(t)
	keeper.must("open", "lock", m.At("E/devserver"), "rdwr,creat")
	keeper.must("flock", "lock")
	e.stick(stuck)
	m.restart(nil)
	othersGoOn(t, m, other)
	other.want("EEXIST", "creat", m.At("E/devserver.lock"), "wronly,creat,excl")
	keeper.Try("close", "lock")
	other.want("EEXIST", "creat", m.At("E/devserver.lock"), "wronly,creat,excl")
	othersGoOn(t, m, other)
	e.answer()
	eventually(t, "E is free", func() bool { return other.Try("creat", m.At("E/devserver.lock"), "wronly,creat,excl") == "ok" })
}

// TestFaultExecRestartOwner: a daemon that starts while an owner is in execve(2)
// leaves him what is his.
func TestFaultExecRestartOwner(t *testing.T) {
	e, m := newElsewhere(t), mountOver(t)
	owner, other := agent(t), agent(t)
	owner.must("mkdir", m.At("D"))
	token := m.Locks()["D"].Token
	e.stick(owner)
	m.restart(nil)
	other.want("EBUSY", "put", m.At("D/f"), "x", "creat")
	if l := m.Locks()["D"]; l.Token != token || l.Pid != owner.Pid {
		t.Errorf("D has the lock %d of %d, want %d of %d", l.Token, l.Pid, token, owner.Pid)
	}
	othersGoOn(t, m, other)
	e.answer()
	mustDo(t, syscall.Kill(owner.Pid, syscall.SIGKILL))
	eventually(t, "D is free", func() bool { return other.Try("put", m.At("D/f"), "x", "creat") == "ok" })
}

// TestFaultExecRestartChild: an owner whose parent is in execve(2) while a daemon
// starts keeps his lock as long as he lives, and no longer.
func TestFaultExecRestartChild(t *testing.T) {
	e, m := newElsewhere(t), mountOver(t)
	parent, other, waits := agent(t), agent(t), agent(t)
	owner := parent.Child()
	owner.must("mkdir", m.At("D"))
	e.stick(parent)
	m.restart(nil)
	other.want("EBUSY", "put", m.At("D/f"), "x", "creat")
	waits.must("open", "l", m.At("D/devserver"), "rdwr,creat")
	done := inBackground(waits.Start("flockw", "l"))
	othersGoOn(t, m, other)
	mustDo(t, syscall.Kill(owner.Pid, syscall.SIGKILL))
	if got := <-done; got != "ok" { // without anybody else's asking
		t.Errorf("who waits for D has %s", got)
	}
	other.want("EBUSY", "put", m.At("D/f"), "x", "creat")
}

// TestFaultExecMemberCandidate: nor does the candidate that such a lock's file was linked
// from go with its maker, also beyond an upgrade or a restart: whoever stands for the group
// then may look at it and remove it. It goes with the lock.
func TestFaultExecMemberCandidate(t *testing.T) {
	for name, next := range map[string]func(m *Mount){
		"upgraded":  (*Mount).replace,
		"restarted": func(m *Mount) { m.restart(nil, "--owner", "group") },
		"broken":    func(m *Mount) { agent(m.t).mustCommand(m, "break D stuck") },
	} {
		t.Run(name, func(t *testing.T) {
			e, m := newElsewhere(t), mountOver(t, "--owner", "group")
			first := agentBy(t, &syscall.SysProcAttr{Setpgid: true})
			last := agentBy(t, &syscall.SysProcAttr{Setpgid: true, Pgid: first.Pid})
			u := candidateName(t, first)
			openDir(t, m.At("D"))
			m.Ctl("release D")
			first.must("creat", m.At("D", u), "wronly,creat,excl")
			first.must("link", m.At("D", u), m.At("D/devserver.lock"))
			wantBoth := func() {
				t.Helper()
				if got, want := slices.Sorted(slices.Values(readNames(t, m.At("D")))), []string{"devserver.lock", u}; !slices.Equal(got, want) {
					t.Errorf("left in D: %q, want %q", got, want)
				}
			}
			e.stick(last)
			first.Kill()
			wantBoth()
			next(m)
			if name != "broken" {
				time.Sleep(200 * time.Millisecond) // the members are looked at again
				m.wantOwner("D", first.Pid)
				wantBoth()
				e.answer()
				eventually(t, "the last member stands for the group", func() bool { return m.Locks()["D"].Pid == last.Pid })
				wantBoth()
				mustDo(t, syscall.Kill(last.Pid, syscall.SIGKILL))
				m.awaitFree("D")
			}
			eventually(t, "nothing is left", func() bool { return len(readNames(t, m.At("D"))) == 0 })
		})
	}
}
