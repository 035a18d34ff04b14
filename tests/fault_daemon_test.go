//go:build linux

package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestFaultDescriptors: a daemon that has no descriptors left says ENFILE; no
// lock is lost or given twice, what ends meanwhile ends, and it recovers.
func TestFaultDescriptors(t *testing.T) {
	for _, opts := range [][]string{nil, {"--no-passthrough"}} {
		t.Run(strings.Join(opts, ""), func(t *testing.T) {
			m := mount(t, opts...)
			const files = 200
			openDir(t, m.Back("free"))
			holder, dies, rival, late := agent(t), agent(t), stranger(t), agent(t)
			holder.must("mkdir", m.At("D"))
			dies.must("mkdir", m.At("E"))
			for i := range files {
				holder.must("mkdir", m.At("D", itoa(i)))
				holder.must("put", m.At("D", itoa(i), "f"), "before", "creat")
			}
			old := m.limitFiles(t, m.openFiles()+4)
			heard := map[string]int{}
			opened := 0
			for i := range files {
				got := holder.Try("open", itoa(i), m.At("D", itoa(i), "f"), "rdwr")
				heard[got]++
				if got == "ok" {
					opened++
				}
			}
			heard[late.Try("mkdir", m.At("F"))]++
			heard[late.Try("creat", m.At("free/devserver"), "wronly,creat,excl")]++
			if got := rival.Try("put", m.At("D/0/f"), "rival", ""); got == "ok" {
				t.Error("a rival wrote to what is held")
			}
			dies.Kill()
			t.Logf("%d of %d could be opened; heard: %v", opened, files, heard)
			for got := range heard {
				if !oneOf(got, "ok|ENFILE|EMFILE") {
					t.Errorf("somebody heard %s, want ENFILE at the worst", got)
				}
			}
			m.limitFiles(t, int(old.Cur))
			m.wantOwner("D", holder.Pid)
			m.awaitFree("E")
			for i := range files {
				holder.Try("close", itoa(i))
				holder.must("put", m.At("D", itoa(i), "f"), "after!", "")
			}
			eventually(t, "the dead one's directory is free", func() bool { return late.Try("mkdir", m.At("E/x")) == "ok" })
			for _, dir := range []string{"F", "free"} {
				if row, held := m.Locks()[dir]; held && row.Pid != late.Pid {
					t.Errorf("%s: %+v", dir, row)
				}
			}
			rival.want("EBUSY", "put", m.At("D/0/f"), "rival", "")
			rival.want("EBUSY", "mkdir", m.At("D/x"))
		})
	}
}

// TestFaultDescriptorsUnknown: who can't be told from a rival while the daemon has no
// descriptor left to look hears ENFILE: the answer to a rival would be false, and a
// directory made without its lock a trap. Whoever was seen first in between is known as
// the child that it is when there are descriptors again.
func TestFaultDescriptorsUnknown(t *testing.T) {
	for _, opt := range []string{"--enforce=all", "--enforce=observe", "--idmap"} {
		t.Run(opt, func(t *testing.T) {
			if opt == "--idmap" {
				needIDMap(t)
			}
			observes := opt == "--enforce=observe"
			m := mount(t, opt)
			holder, rival := agent(t), agent(t)
			holder.must("mkdir", m.At("D"))
			holder.must("put", m.At("D/f"), "before", "creat")
			child, other := holder.Child(), agent(t)
			old := m.limitFiles(t, 3)
			heard := map[string]string{
				"a thread of the holder": holder.Try("thread", "mkdir", m.At("D/thread")),
				"a child of the holder":  child.Try("mkdir", m.At("D/child")),
				"who would be a holder":  other.Try("mkdir", m.At("E")),
				"who asks for a lock":    other.Try("ctl", m.control("ctl"), "acquire F"),
			}
			m.limitFiles(t, int(old.Cur))
			t.Logf("heard: %v", heard)
			for who, got := range heard {
				if got != "ENFILE" && (!observes || got != "ok") {
					t.Errorf("%s hears %s", who, got)
				}
			}
			if observes {
				return
			}
			holder.must("thread", "put", m.At("D/f"), "thread", "")
			child.must("put", m.At("D/f"), "child", "")
			other.want("EBUSY", "put", m.At("D/f"), "other", "")
			other.must("mkdir", m.At("E"))
			rival.want("EBUSY", "mkdir", m.At("E/x"))
		})
	}
}

// TestFaultDescriptorsNone: a daemon that may have no descriptors at all takes nobody for
// dead.
func TestFaultDescriptorsNone(t *testing.T) {
	m := mount(t)
	owner, rival := agent(t), agent(t)
	owner.must("mkdir", m.At("D"))
	before := m.Locks()["D"]
	rival.want("EBUSY", "put", m.At("D/f"), "rival", "creat")
	old := m.limitFiles(t, 0)
	for range 3 {
		if got := rival.Try("put", m.At("D/f"), "rival", "creat"); got == "ok" {
			t.Error("a rival writes")
		}
	}
	m.limitFiles(t, int(old.Cur))
	m.wantStill("D", before)
	rival.want("EBUSY", "put", m.At("D/f"), "rival", "creat")
	m.limitFiles(t, 0)
	owner.Kill()
	m.limitFiles(t, int(old.Cur))
	m.awaitFree("D")
}

// TestFaultDescriptorsClaims: likewise who holds a lock by what it carries, a lease's client
// or its session, which the daemon can't look at.
func TestFaultDescriptorsClaims(t *testing.T) {
	m := mount(t)
	for _, dir := range []string{"lease", "session"} {
		openDir(t, m.Back(dir))
	}
	leader, member := agentOfSession(t), agentOfSession(t)
	rival := stranger(t)
	leader.mustCommand(m, "acquire lease client=x ttl=1m")
	member.Child().mustCommand(m, "acquire session owner=session")
	t.Setenv("STAGEFS_CLIENT", "x")
	client := agentOfSession(t)
	for _, a := range []*Agent{client, member, leader, rival} {
		a.must("put", m.At("seen"), "x", "creat")
	}
	old := m.limitFiles(t, 3)
	heard := map[string]string{
		"the client":              client.Try("chmod", m.At("lease"), "0777"),
		"the client that asks":    client.Try("ctl", m.control("ctl"), "check lease"),
		"a member":                member.Try("chmod", m.At("session"), "0777"),
		"a member that asks":      member.Try("ctl", m.control("ctl"), "check session"),
		"a member that gives up":  member.Try("ctl", m.control("ctl"), "release session"),
		"who wants one like that": leader.Try("ctl", m.control("ctl"), "acquire none owner=session"),
	}
	m.limitFiles(t, int(old.Cur))
	for who, got := range heard {
		if got != "ENFILE" {
			t.Errorf("%s hears %s, want ENFILE", who, got)
		}
	}
	client.must("chmod", m.At("lease"), "0777")
	member.must("chmod", m.At("session"), "0777")
	rival.want("EBUSY", "put", m.At("lease/f"), "x", "creat")
	leader.want("EBUSY", "put", m.At("session/f"), "x", "creat")
}

// TestFaultDescriptorsLine: whoever wants a lock may have its file open, also
// where the daemon has few descriptors left, and each can use what he opened.
func TestFaultDescriptorsLine(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	mustDo(t, os.WriteFile(m.Back("D/devserver"), []byte("before"), 0o666))
	const opens = 402
	many := agent(t)
	old := m.limitFiles(t, m.openFiles()+150)
	for i := range opens {
		many.must("open", itoa(i), m.At("D/devserver"), []string{"rdwr", "rdonly", "wronly"}[i%3])
	}
	m.limitFiles(t, int(old.Cur))
	many.must("flock", "0")
	use := func(text string) {
		t.Helper()
		for _, by := range []int{0, 2, opens - 3, opens - 1} {
			text = string(text[0] + 1)
			many.must("pwrite", itoa(by), string(text[0]), "6", "0")
			want := strings.Repeat(string(text[0]), 6)
			for _, reader := range []int{0, 1, opens - 3, opens - 2} {
				if got := many.Get("pread", itoa(reader), "6", "0"); got != want {
					t.Errorf("handle %d reads %q of %q, which %d wrote", reader, got, want, by)
				}
			}
		}
		many.want("EBADF", "pread", itoa(opens-1), "6", "0")
		many.want("EBADF", "pwrite", itoa(opens-2), "z", "6", "0")
		many.must("ftruncate", itoa(opens-1), "0")
	}
	use("a")
	m.replace()
	use("k")
	rival := agent(t)
	rival.must("open", "f", m.At("D/devserver"), "rdwr")
	rival.want("EBUSY", "pwrite", "f", "r", "6", "0")
	many.must("unlink", m.At("D/devserver"))
	use("t") // a file that has no name any more
}

// TestFaultDescriptorsUmask: what is made while the daemon has no descriptor left to look
// for a default ACL has no more rights than the umask allows, or is not made.
func TestFaultDescriptorsUmask(t *testing.T) {
	m := mount(t, "--compat", "--depth", "3")
	openDir(t, m.Back("known"))
	openDir(t, m.Back("D"))
	a := agent(t)
	a.must("umask", "077")
	a.must("mkdir", m.At("known/dir"))
	a.want("ENOENT", "stat", m.At("D/none"))
	old := m.limitFiles(t, 3)
	heard := []string{a.Try("mkdir", m.At("D/dir")), a.Try("mknod", m.At("D/fifo"), "fifo")}
	m.limitFiles(t, int(old.Cur))
	t.Logf("heard: %v", heard)
	for i, name := range []string{"dir", "fifo"} {
		if st, err := os.Lstat(m.Back("D", name)); err == nil && st.Mode().Perm()&0o77 != 0 {
			t.Errorf("%s was made with mode %v", name, st.Mode())
		}
		if !oneOf(heard[i], "ok|ENFILE") {
			t.Errorf("%s: %s", name, heard[i])
		}
	}
}

// TestFaultDescriptorsKept: what the daemon keeps open to save time, as somebody has
// very many files open, is not what others need.
func TestFaultDescriptorsKept(t *testing.T) {
	need(t, "root", "fuse", "setpriv")
	dir := staticDir(t)
	m := newMount(t, dir, dir)
	m.startedBy("ulimit -n 1000; exec setpriv --bounding-set -sys_resource " + stagefsBin() + ` "$@"`)
	eventually(t, "the daemon serves", func() bool { return strings.Contains(m.Log(), "serving") })
	many, other := agent(t), agent(t)
	many.must("mkdir", m.At("D"))
	for i := range 700 {
		many.must("open", itoa(i), m.At("D", itoa(i)), "wronly,creat")
	}
	other.must("mkdir", m.At("E"))
	for i := range 20 {
		file, reader, writer := m.At("E", itoa(i)), "r"+itoa(i), "w"+itoa(i)
		other.must("put", file, "before", "creat")
		other.must("open", reader, file, "rdonly")
		other.must("open", writer, file, "rdwr")
		other.must("pwrite", writer, "x", "6", "0")
		if got := other.Get("pread", reader, "6", "0"); got != "xxxxxx" {
			t.Errorf("reads %q", got)
		}
	}
	for i := range 700 {
		many.must("pwrite", itoa(i), "y", "6", "0")
	}
}

// TestFaultDescriptorsRemoval: the lock file of an owner who dies while the daemon
// has no descriptor left is removed when it has some again, and a file of its name
// that is made meanwhile is not. The lock ends at once.
func TestFaultDescriptorsRemoval(t *testing.T) {
	m := mount(t)
	rival := agent(t)
	dies := map[string]*Agent{}
	for i := range 20 {
		dir := "D" + itoa(i) + "/a/b"
		openDir(t, m.Back(dir))
		a := agent(t)
		a.must("creat", m.At(dir, "devserver"), "wronly,creat,excl")
		dies[dir] = a
	}
	old := m.limitFiles(t, 3) // what is open stays so
	for _, a := range dies {
		a.Kill()
	}
	for dir := range dies {
		m.awaitFree(dir)
	}
	left := 0
	for dir := range dies {
		if exists(m.Back(dir, "devserver")) {
			left++
		}
	}
	t.Logf("%d of %d lock files could not be removed", left, len(dies))
	const other = "D0/a/b"
	mustDo(t, os.RemoveAll(m.Back(other, "devserver")))
	time.Sleep(20 * time.Millisecond) // a file's time of birth may be a tick of the kernel's clock old
	mustDo(t, os.WriteFile(m.Back(other, "devserver"), []byte("another one"), 0o600))
	m.limitFiles(t, int(old.Cur))
	for dir := range dies {
		if dir == other {
			continue
		}
		eventually(t, "the lock file is removed", func() bool { return !exists(m.Back(dir, "devserver")) })
		rival.must("creat", m.At(dir, "devserver"), "wronly,creat,excl")
	}
	if got, _ := os.ReadFile(m.Back(other, "devserver")); left > 0 && string(got) != "another one" {
		t.Errorf("a file that was made later: %q", got)
	}
}

// TestFaultNoDescriptors: when the daemon has no descriptors left, those who wait for
// a lock get it all the same, and the listing is shown.
func TestFaultNoDescriptors(t *testing.T) {
	for _, transport := range transports {
		t.Run(transport, func(t *testing.T) {
			needTransport(t, transport)
			t.Setenv("STAGEFS_MOUNT_OPTS", "")
			m := mount(t, "--transport", transport)
			openDir(t, m.Back("D"))
			call := lockCalls()[0]
			holder, waiter := locker(t), locker(t)
			for _, a := range []*Agent{holder, waiter} {
				a.must("open", "x", m.At("D/devserver"), "rdwr,creat")
			}
			holder.must(call.tryExclusive("x")...)
			old := m.limitFiles(t, 3) // what is open stays so
			defer m.limitFiles(t, int(old.Cur))
			got := waiter.Start(call.waitExclusive("x")...)
			m.awaitWaiters("D", 1)
			holder.must(call.unlock("x")...)
			answer := inBackground(got)
			select {
			case s := <-answer:
				if s != "ok" {
					t.Errorf("the waiter: %s", s)
				}
			case <-time.After(patience):
				t.Error("the waiter gets no answer")
			}
			m.wantOwner("D", waiter.Pid)
		})
	}
}

// limitFiles sets how many descriptors the daemon may have.
func (m *Mount) limitFiles(t *testing.T, n int) (old unix.Rlimit) {
	t.Helper()
	pid := m.cmd.Process.Pid
	mustDo(t, unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &old))
	lim := unix.Rlimit{Cur: uint64(n), Max: old.Max}
	mustDo(t, unix.Prlimit(pid, unix.RLIMIT_NOFILE, &lim, nil))
	return old
}

// halt stops a process, and returns when none of its threads runs any more.
func halt(t *testing.T, pid int) {
	t.Helper()
	fd, err := unix.PidfdOpen(pid, 0)
	mustDo(t, err)
	t.Cleanup(func() { // or nobody who waits for it can be ended
		unix.PidfdSendSignal(fd, unix.SIGCONT, nil, 0)
		unix.Close(fd)
	})
	mustDo(t, syscall.Kill(pid, syscall.SIGSTOP))
	eventually(t, "the process stops", func() bool {
		tasks, err := filepath.Glob("/proc/" + itoa(pid) + "/task/*/status")
		mustDo(t, err)
		for _, task := range tasks {
			if b, err := os.ReadFile(task); err == nil && !strings.Contains(string(b), "\nState:\tT") {
				return false
			}
		}
		return len(tasks) > 0
	})
}

// TestFaultStopped: while the daemon is stopped, everybody waits; when it goes
// on, everything they asked for is done, what died is released, and a lease
// whose deadline has passed is over: a renewal that waited does not save it.
func TestFaultStopped(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("L"))
	holder, dies, waits, lessee, next := agent(t), agent(t), agent(t), agent(t), agent(t)
	holder.must("mkdir", m.At("D"))
	holder.must("open", "f", m.At("D/f"), "rdwr,creat")
	dies.must("mkdir", m.At("E"))
	dies.must("put", m.At("E/devserver"), "", "creat,excl")
	token := lessee.mustCommand(m, "acquire L client=x ttl=1h").Token
	writer := lessee.Child()
	writer.must("open", "w", m.At("L/f"), "wronly,creat")
	lessee.mustCommand(m, "renew L client=x ttl=250ms")
	halt(t, m.cmd.Process.Pid)
	stopped := time.Now()
	written := holder.Start("put", m.At("D/g"), "written while it was stopped", "creat")
	made := waits.Start("mkdir", m.At("F"))
	renewed := lessee.Start("ctl", m.control("ctl"), "renew L client=x")
	late := writer.Start("write", "w", "late")
	mustDo(t, syscall.Kill(dies.Pid, syscall.SIGKILL))
	dies.conn.Close()
	for time.Since(stopped) < 300*time.Millisecond { // the deadline goes by
		time.Sleep(10 * time.Millisecond)
	}
	mustDo(t, syscall.Kill(m.cmd.Process.Pid, syscall.SIGCONT))
	for what, got := range map[string]string{"write": written(), "mkdir": made()} {
		if got != "ok" {
			t.Errorf("the %s that waited = %s", what, got)
		}
	}
	if got := renewed(); got != "ENOENT" {
		t.Errorf("the renewal that came too late = %s, want ENOENT", got)
	}
	if got := late(); got != "EBUSY" {
		t.Errorf("the write that came too late = %s, want EBUSY", got)
	}
	if again := next.mustCommand(m, "acquire L client=y"); again.Token <= token {
		t.Errorf("token %d after %d", again.Token, token)
	}
	m.wantOwner("D", holder.Pid)
	m.wantOwner("F", waits.Pid)
	m.awaitFree("E")
	if _, err := os.Lstat(m.Back("E/devserver")); err == nil {
		t.Error("the dead owner's lock file is left")
	}
	if b, _ := os.ReadFile(m.Back("D/g")); string(b) != "written while it was stopped" {
		t.Errorf("D/g = %q", b)
	}
	stranger(t).want("EBUSY", "put", m.At("D/g"), "", "")
}

// TestFaultTerminated: SIGTERM at any moment of mounting and unmounting leaves
// no mount and no process, neither of the daemon nor of what started it; and
// the next daemon can start.
func TestFaultTerminated(t *testing.T) {
	need(t, "root", "fuse")
	for name, opts := range map[string][]string{"plain": nil, "supervised": {"--supervise"}, "background": {"-d"}, "both": {"-d", "--supervise"}} {
		t.Run(name, func(t *testing.T) {
			dir := staticDir(t)
			mustDo(t, os.WriteFile(filepath.Join(dir, "file"), []byte("content"), 0o644))
			state := filepath.Join(tempDir(t), "state")
			mark := "STAGEFS_FAULT=" + dir
			ends := map[string]int{}
			for ms := 0; ms < 60; ms += 2 {
				args := append(append([]string{"mount", "--state-dir", state}, opts...), dir)
				cmd := exec.Command(stagefsBin(), args...)
				cmd.Env = append(os.Environ(), mark)
				cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
				p := startCmd(t, cmd)
				select {
				case <-p.done:
				case <-time.After(time.Duration(ms) * time.Millisecond):
				}
				// In the background, all there is of it hears of it, but only
				// once: a second one would end it at once.
				told := map[int]bool{}
				tell := func() (left int) {
					for _, pid := range pidsWithEnv(mark) {
						if left++; !told[pid] {
							told[pid] = true
							syscall.Kill(pid, syscall.SIGTERM)
						}
					}
					return left
				}
				background := name == "background" || name == "both"
				if background {
					tell()
				} else {
					p.cmd.Process.Signal(syscall.SIGTERM)
				}
				r := p.Wait()
				ends[itoa(r.Status)]++
				eventually(t, "no process is left", func() bool {
					if background {
						return tell() == 0
					}
					return len(pidsWithEnv(mark)) == 0
				})
				if b, err := os.ReadFile(filepath.Join(dir, "file")); string(b) != "content" || err != nil {
					t.Fatalf("after SIGTERM at %d ms: read = %q, %v", ms, b, err)
				}
				if mountedAt(dir) {
					t.Fatalf("after SIGTERM at %d ms: still mounted: %v", ms, r)
				}
				if strings.Contains(r.Err, "panic") || strings.Contains(r.Err, "goroutine") {
					t.Fatalf("after SIGTERM at %d ms: %v", ms, r)
				}
			}
			t.Logf("exit statuses: %v", ends)
			m := newMount(t, dir, dir)
			m.State = state
			m.serve()
		})
	}
}

// TestFaultTerminatedTwice: two signals within a moment, which timeout(1) and
// service managers send to the process and to its group, are one: no dead mount
// is left.
func TestFaultTerminatedTwice(t *testing.T) {
	m := mountOver(t)
	a := agent(t)
	a.must("mkdir", m.At("D"))
	token := m.Locks()["D"].Token
	for ms := range 30 {
		mustDo(t, m.cmd.Process.Signal(syscall.SIGTERM))
		time.Sleep(time.Duration(ms) * 200 * time.Microsecond)
		m.cmd.Process.Signal(syscall.SIGTERM)
		eventually(t, "the daemon ends", m.dead)
		if status := m.cmd.ProcessState.ExitCode(); status != 0 || mountedAt(m.Path) {
			t.Fatalf("two signals within %v: status %d, mounted: %v; want 0, false", time.Duration(ms)*200*time.Microsecond, status, mountedAt(m.Path))
		}
		m.start(nil)
		m.awaitReady()
		if row := m.Locks()["D"]; row.Token != token || row.Pid != a.Pid {
			t.Fatalf("D: %+v, want token %d", row, token)
		}
	}
}
