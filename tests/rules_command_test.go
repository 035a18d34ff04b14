//go:build linux

package tests

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// command has the agent write one command to the ctl file. The errno is that
// of the write, the answer what a read of the same descriptor tells.
func (a *Agent) command(m *Mount, line string, args ...any) (errno string, answer lockstate.Answer) {
	a.t.Helper()
	status, out := a.call([]string{"ctl", m.control("ctl"), fmt.Sprintf(line, args...)})
	return status, readAnswer(a.t, out)
}

func readAnswer(t *testing.T, out string) (answer lockstate.Answer) {
	t.Helper()
	if strings.Count(out, "\n") != 1 {
		t.Fatalf("the answer is not one line: %q", out)
	}
	if err := json.Unmarshal([]byte(out), &answer); err != nil {
		t.Fatalf("the answer is no JSON: %v in %q", err, out)
	}
	return answer
}

// TestCtlFailed: what is read after a write that failed before its command was looked at
// is that failure, and not the success of the command before.
func TestCtlFailed(t *testing.T) {
	m := mount(t)
	ctl, err := os.OpenFile(m.control("ctl"), os.O_RDWR, 0)
	mustDo(t, err)
	defer ctl.Close()
	read := func() lockstate.Answer {
		t.Helper()
		buf := make([]byte, 4096)
		n, err := unix.Pread(int(ctl.Fd()), buf, 0)
		mustDo(t, err)
		return readAnswer(t, string(buf[:n]))
	}
	for _, tt := range []struct {
		errno string
		write func() error
	}{
		{"E2BIG", func() error {
			_, err := ctl.WriteString("acquire D why=" + strings.Repeat("x", 33<<10))
			return err
		}},
		{"E2BIG", func() error { _, err := ctl.WriteString(strings.Repeat("check D\n", 9000)); return err }},
		{"EPERM", func() error {
			cmd := exec.Command("sh", "-c", "echo check >&3")
			cmd.ExtraFiles = []*os.File{ctl}
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
			if r := runCmd(t, cmd); r.Status == 0 {
				return nil
			}
			return unix.EPERM
		}},
	} {
		if _, err := ctl.WriteString("check\n"); err != nil {
			t.Fatal(err)
		}
		if got := read(); got.Error != "" {
			t.Fatalf("check: %+v", got)
		}
		if err := tt.write(); errnoName(err) != tt.errno {
			t.Errorf("the write: %v, want %s", err, tt.errno)
		}
		if got := read(); got.Error != tt.errno || got.Message == "" {
			t.Errorf("after %s, a read tells of %+v", tt.errno, got)
		}
	}
}

// TestCtlLent: a program with root's rights, whose output somebody has sent there, lends them
// to nobody.
func TestCtlLent(t *testing.T) {
	m := mount(t)
	a := agent(t)
	a.must("mkdir", m.At("D"))
	cat := filepath.Join(tempDir(t), "cat")
	mustDo(t, copyFile("/bin/cat", cat, 0o755))
	mustDo(t, os.Chmod(cat, 0o755|os.ModeSetuid))
	got := stranger(t).Get("sh", "echo 'break D enough' | "+cat+" >"+m.control("ctl")+" 2>/dev/null || echo refused")
	if !strings.Contains(got, "refused") {
		t.Errorf("the break: %q, want it to be refused", got)
	}
	m.wantOwner("D", a.Pid)
}

// mustCommand is command for one that has to succeed.
func (a *Agent) mustCommand(m *Mount, line string, args ...any) lockstate.Answer {
	a.t.Helper()
	errno, answer := a.command(m, line, args...)
	if errno != "ok" || answer.Error != "" {
		a.t.Fatalf("%s = %s, %+v, want ok", fmt.Sprintf(line, args...), errno, answer)
	}
	return answer
}

// wantCommand reports an error unless the write fails with an errno, and the
// answer says so too.
func (a *Agent) wantCommand(m *Mount, errno, line string, args ...any) lockstate.Answer {
	a.t.Helper()
	got, answer := a.command(m, line, args...)
	said := answer.Error
	if said == "" {
		said = "ok"
	}
	if got != errno || said != errno {
		a.t.Errorf("%s = %s, answer %+v, want %s", fmt.Sprintf(line, args...), got, answer, errno)
	}
	return answer
}

// TestA7Acquire: a directory is taken by command, kept until it is released,
// and refused to others with the holder's name.
func TestA7Acquire(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("board/v1"))
	a, b := agent(t), stranger(t)
	got := a.mustCommand(m, `acquire board/v1 why="trying things"`)
	row := m.Locks()["board/v1"]
	if got.Token == 0 || got.Token != row.Token || got.Dir != "board/v1" || got.Kind != "explicit" || got.Protocol != "command" || got.Since.IsZero() {
		t.Errorf("the answer: %+v, the row: %+v", got, row)
	}
	if row.Pid != a.Pid || row.Why != "trying things" || row.Scope != "process" {
		t.Errorf("the row: %+v, want pid %d, the reason and the scope", row, a.Pid)
	}
	b.want("EBUSY", "put", m.At("board/v1/f"), "", "creat")
	b.want("EEXIST", "creat", m.At("board/v1/devserver"), "wronly,creat,excl")
	a.must("put", m.At("board/v1/f"), "mine", "creat")
	no := b.wantCommand(m, "EBUSY", "acquire board/v1")
	if no.Held == nil || no.Held.Pid != a.Pid || no.Held.Token != got.Token || no.Held.Why != "trying things" {
		t.Errorf("the refusal does not tell whose lock it is: %+v", no)
	}
	if d := m.Denials(); len(d) == 0 || d[len(d)-1].Op != "acquire" || d[len(d)-1].Pid != b.Pid || d[len(d)-1].LockPid != a.Pid {
		t.Errorf("denials: %+v", d)
	}
	// Taken twice it is the same lock.
	if again := a.mustCommand(m, "acquire board/v1"); again.Token != got.Token {
		t.Errorf("the second acquisition has token %d, want %d", again.Token, got.Token)
	}
	// A lock file comes and goes.
	a.must("creat", m.At("board/v1/devserver"), "wronly,creat,excl")
	a.must("unlink", m.At("board/v1/devserver"))
	a.must("open", "x", m.At("board/v1/devserver.lock"), "rdwr,creat")
	a.must("flock", "x")
	a.must("close", "x")
	if row := m.Locks()["board/v1"]; row.Token != got.Token {
		t.Errorf("after a lock file came and went: %+v, want token %d still", row, got.Token)
	}
	b.wantCommand(m, "EPERM", "release board/v1")
	b.wantCommand(m, "EPERM", "check board/v1")
	if c := a.Child().mustCommand(m, "check board/v1/"); c.Token != got.Token {
		t.Errorf("check by a child: %+v, want token %d", c, got.Token)
	}
	a.wantCommand(m, "ENOENT", "release board/v1 token=%d", got.Token+1)
	a.mustCommand(m, "release board/v1 token=%d", got.Token)
	m.wantFree("board/v1")
	a.wantCommand(m, "ENOENT", "check board/v1")
	a.wantCommand(m, "ENOENT", "release board/v1")
	if next := b.mustCommand(m, "acquire board/v1"); next.Token <= got.Token {
		t.Errorf("token %d after %d: tokens grow", next.Token, got.Token)
	}
}

// TestA7Tree: above and beneath a lock, in the root and where something is
// open, it goes as by any other protocol (C1 to C4).
func TestA7Tree(t *testing.T) {
	m := mount(t)
	for _, d := range []string{"a/b/c", "d/e"} {
		openDir(t, m.Back(d))
	}
	a, b := agent(t), agent(t)
	a.mustCommand(m, "acquire a/b")
	b.wantCommand(m, "EBUSY", "acquire a")
	b.wantCommand(m, "EBUSY", "acquire a/b/c")
	c := a.Child()
	c.mustCommand(m, "acquire a/b/c")
	a.want("EBUSY", "put", m.At("a/b/c/f"), "", "creat") // delegated (C2)
	c.mustCommand(m, "release a/b/c")
	a.must("put", m.At("a/b/c/f"), "", "creat")
	a.wantCommand(m, "EBUSY", "acquire .")
	a.wantCommand(m, "ENOENT", "acquire nothing")
	a.wantCommand(m, "ENOTDIR", "acquire a/b/c/f")
	mustDo(t, os.Symlink("b", m.Back("a/link")))
	a.wantCommand(m, "ENOTDIR", "acquire a/link")

	b.must("open", "w", m.At("d/e/w"), "wronly,creat")
	no := a.wantCommand(m, "EBUSY", "acquire d")
	if len(no.Blockers) != 1 || no.Blockers[0].Pid != b.Pid || no.Blockers[0].Path != "d/e/w" {
		t.Errorf("what is open is not told: %+v", no)
	}
	b.must("close", "w")
	a.mustCommand(m, "acquire d wait=10s") // the RELEASE may come late

	// The lock goes with its directory (R3).
	a.must("rename", m.At("d"), m.At("d2"))
	m.wantOwner("d2", a.Pid)
	b.want("EBUSY", "put", m.At("d2/f"), "", "creat")
	a.wantCommand(m, "ENOENT", "acquire d")
}

// TestA7Shared: many share, nobody writes, and a sharer who is alone may turn
// it into an exclusive lock.
func TestA7Shared(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	a, b := agent(t), agent(t)
	a.mustCommand(m, "acquire D shared")
	b.mustCommand(m, "acquire D shared")
	if rows := m.Listing().Locks; len(rows) != 2 || rows[0].Kind != "shared" || rows[1].Kind != "shared" {
		t.Errorf("rows: %+v, want two shared ones", rows)
	}
	a.want("EBUSY", "put", m.At("D/f"), "", "creat")
	b.wantCommand(m, "EBUSY", "acquire D")
	for _, x := range []*Agent{a, b} {
		x.mustCommand(m, "release D")
	}
	m.wantFree("D")
	a.mustCommand(m, "acquire D shared")
	a.mustCommand(m, "acquire D")
	if rows := m.Listing().Locks; len(rows) != 1 || rows[0].Kind != "explicit" {
		t.Errorf("rows: %+v, want one explicit", rows)
	}
}

// TestA7Rights: who could not make an entry in a directory cannot lock it
// either; it does not matter that the daemon could.
func TestA7Rights(t *testing.T) {
	m := mount(t)
	mustDo(t, os.MkdirAll(m.Back("locked/open"), 0o777))
	openDir(t, m.Back("locked/open"))
	mustDo(t, os.Mkdir(m.Back("roots"), 0o755))
	mustDo(t, os.Mkdir(m.Back("team"), 0o700))
	mustDo(t, os.Chown(m.Back("team"), 0, 4711))
	mustDo(t, os.Chmod(m.Back("team"), 0o770))
	mustDo(t, os.Chmod(m.Back("locked"), 0o700))
	b := stranger(t)
	for _, d := range []string{"roots", "team", "locked/open", "locked", "locked/none"} {
		b.wantCommand(m, "EACCES", "acquire %s", d)
		b.wantCommand(m, "EACCES", "acquire %s wait=1ms", d)
	}
	if rows := m.Listing().Locks; len(rows) != 0 {
		t.Errorf("rows: %+v, want none", rows)
	}
	member := awaitAgent(t, func(sock string) {
		cmd := agentCmd(sock)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody, Groups: []uint32{12, 4711}}}
		startCmd(t, cmd)
	})
	member.mustCommand(m, "acquire team")
	mustDo(t, exec.Command("setfacl", "-m", "u:nobody:rwx", m.Back("roots")).Run())
	b.mustCommand(m, "acquire roots")
	agent(t).mustCommand(m, "acquire locked")
}

// TestA7Wait: those who wait by command and with a lock file stand in one
// line, and the ctl file stays everybody's meanwhile.
func TestA7Wait(t *testing.T) {
	m := mount(t)
	m.lockFile("D")
	openDir(t, m.Back("other"))
	holder := agent(t)
	holder.mustCommand(m, "acquire D")
	var turns []func() string
	var waiters []*Agent
	for i := range 8 {
		w := agent(t)
		if i%2 == 0 {
			turns = append(turns, w.Start("ctl", m.control("ctl"), "acquire D wait=forever"))
		} else {
			w = locker(t)
			w.must("open", "x", m.At("D/devserver"), "rdwr")
			turns = append(turns, w.Start(lockCalls()[i%3].waitExclusive("x")...))
		}
		waiters = append(waiters, w)
		m.awaitWaiters("D", i+1)
	}
	// Nobody else is held up, however he opens the file.
	other := agent(t)
	other.mustCommand(m, "acquire other")
	if got := other.Get("sh", "echo release other > "+m.control("ctl")); got != "0 " {
		t.Errorf("echo release > ctl: %q", got)
	}
	other.wantCommand(m, "EBUSY", "acquire D")
	for i, w := range waiters {
		if i == 0 {
			holder.mustCommand(m, "release D")
		}
		if got := turns[i](); got != "ok" {
			t.Fatalf("waiter %d = %s, want ok", i, got)
		}
		m.wantOwner("D", w.Pid)
		if i%2 == 0 {
			w.mustCommand(m, "release D")
		} else {
			w.must("close", "x")
		}
	}
	m.wantFree("D")
}

// TestA7WaitEnds: a wait ends with its time, with a signal, with the death of
// who waits, and with the directory.
func TestA7WaitEnds(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	holder, w := agent(t), agent(t)
	holder.mustCommand(m, "acquire D")
	no := w.wantCommand(m, "ETIMEDOUT", "acquire D wait=20ms")
	if no.Held == nil || no.Held.Pid != holder.Pid {
		t.Errorf("the answer after the time was over: %+v", no)
	}
	w.wantCommand(m, "ETIMEDOUT", "wait D wait=20ms")
	w.wantCommand(m, "EBUSY", "wait D wait=0s")
	m.awaitWaiters("D", 0)

	doomed := agent(t)
	doomed.Start("ctl", m.control("ctl"), "acquire D wait=forever")
	m.awaitWaiters("D", 1)
	doomed.Kill()
	m.awaitWaiters("D", 0)

	stopped := startCmd(t, exec.Command("/usr/bin/python3", "-c", `if True:
		import os, signal, sys
		signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
		os.write(os.open(sys.argv[1], os.O_WRONLY), b"acquire D wait=forever")`, m.control("ctl")))
	m.awaitWaiters("D", 1)
	syscall.Kill(stopped.Pid(), syscall.SIGTERM)
	if r := stopped.Wait(); r.Status != 9 {
		t.Errorf("the interrupted shell: %v", r)
	}
	m.awaitWaiters("D", 0)

	got := w.Start("ctl", m.control("ctl"), "wait D")
	m.awaitWaiters("D", 1)
	holder.mustCommand(m, "release D")
	if status := got(); status != "ok" {
		t.Errorf("wait = %s, want ok", status)
	}
	m.wantFree("D")

	// What is not there is waited for until it could be made.
	w.mustCommand(m, "wait new/one")
	holder.mustCommand(m, "acquire D")
	w.wantCommand(m, "ETIMEDOUT", "wait D/new/one wait=20ms")
	got = w.Start("ctl", m.control("ctl"), "wait D/new/one")
	m.awaitWaiters("D", 1)
	holder.mustCommand(m, "release D")
	if status := got(); status != "ok" {
		t.Errorf("wait for what is not there = %s, want ok", status)
	}

	holder.mustCommand(m, "acquire D")
	got = w.Start("ctl", m.control("ctl"), "acquire D wait=forever")
	m.awaitWaiters("D", 1)
	holder.must("rmdir", m.At("D"))
	if status := got(); status != "ENOENT" {
		t.Errorf("acquire of what was removed = %s, want ENOENT", status)
	}
}

// TestA7WaitCrowd: a great many wait by command, take no thread each, and all
// have their turn, one at a time.
func TestA7WaitCrowd(t *testing.T) {
	const waiters = 200
	m := mount(t)
	openDir(t, m.Back("D"))
	holder := agent(t)
	holder.mustCommand(m, "acquire D")
	var all []*Proc
	for range waiters {
		all = append(all, startCmd(t, exec.Command("sh", "-c",
			`echo acquire D wait=forever > "$1/ctl" && mkdir "$2/D/one" && rmdir "$2/D/one" && echo release D > "$1/ctl"`, "sh", m.control(""), m.Path)))
	}
	m.awaitWaiters("D", waiters)
	t.Logf("%d wait, the daemon has %d threads", waiters, threadsOf(t, m.cmd.Process.Pid))
	holder.mustCommand(m, "release D")
	for _, p := range all {
		if r := p.Wait(); r.Status != 0 {
			t.Errorf("a waiter: %v", r)
		}
	}
	m.wantFree("D")
}

// TestA7Watch: a read waits for the end of a lock and tells how it came.
func TestA7Watch(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	a, w := agent(t), stranger(t)
	for how, want := range map[string]struct {
		end    func()
		reason lockstate.Reason
		why    string
	}{
		"released": {func() { a.mustCommand(m, "release D") }, lockstate.Given, ""},
		"failed":   {func() { a.mustCommand(m, "release D failed") }, lockstate.Failed, ""},
		"broken":   {func() { m.Ctl("break D it is stuck") }, lockstate.Broken, "it is stuck"},
	} {
		token := a.mustCommand(m, "acquire D").Token
		w.must("open", "c", m.control("ctl"), "rdwr")
		w.must("write", "c", fmt.Sprintf("watch D token=%d", token))
		got := w.StartGet("pread", "c", "4096", "0")
		time.Sleep(10 * time.Millisecond)
		how, want := how, want
		want.end()
		x := readAnswer(t, got())
		if x.Ended != want.reason || x.Token != token || x.Dir != "D" || x.Why != want.why {
			t.Errorf("%s: the watch tells %+v", how, x)
		}
		if again := readAnswer(t, w.Get("pread", "c", "4096", "0")); !reflect.DeepEqual(again, x) {
			t.Errorf("%s: a second read tells %+v, want %+v", how, again, x)
		}
		w.wantCommand(m, "ENOENT", "watch D token=%d", token)
		w.must("close", "c")
	}
	token := a.mustCommand(m, "acquire D").Token
	w.wantCommand(m, "ENOENT", "watch E token=%d", token)
	w.must("open", "c", m.control("ctl"), "rdwr")
	w.must("write", "c", fmt.Sprintf("watch D token=%d", token))
	got := w.StartGet("pread", "c", "4096", "0")
	a.Kill()
	if x := readAnswer(t, got()); x.Ended != lockstate.Exited {
		t.Errorf("the owner died: the watch tells %+v", x)
	}
	w.must("close", "c")
}

// TestA7Script: what acquires and exits leaves the lock to the script that
// started it (R5), which gives it back by command.
func TestA7Script(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	script := `set -e
		sh -c 'echo acquire D > "$0"' "$1/ctl"
		echo text > "$2/D/file"
		grep -q '"D"' "$1/locks.json"
		sh -c 'echo release D > "$0"' "$1/ctl"`
	if r := run(t, "sh", "-c", script, "sh", m.control(""), m.Path); r.Status != 0 {
		t.Errorf("the script: %v", r)
	}
	m.wantFree("D")
}

// TestA7Lines: what is no command is refused, torn ones and joined ones too,
// and nothing comes of it.
func TestA7Lines(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	openDir(t, m.Back("two words"))
	a := agent(t)
	for _, line := range []string{
		"acquire", "acquire ", "acquire D D", "acquire D wait", "acquire D wait=", "acquire D wait=-1s", "acquire D wait=soon",
		"acquire D shared=yes", "acquire D shared shared", "acquire D token=3", "acquire D owner=all", "acquire D on-crash=burn",
		"acquire D why=\"open", "acquire D why=\"a\"b", "acquire D ttl=1s", "acquire D client=", `acquire D client=""`,
		"acquire D client=x ttl=1ms", "acquire D client=x ttl=25h", `acquire D client=" x"`, `acquire D client="a\tb"`, `acquire D client="\xff"`,
		"acquire D client=" + strings.Repeat("x", 257), "acquire D client=x owner=group", "acquire ../D", "acquire /D", "acquire D/../D",
		"renew D", "join D", "watch D", "watch D token=0", "watch D token=x", "watch D token=-1", "acquire \"D", `acquire "\q"`, "release D shared", "check D wait=1s",
		"acqu", "acquireD", "ACQUIRE D", "acquire D\r", "acquire\tD", "acquire D\x00", " acquire D",
	} {
		if got := a.wantCommand(m, "EINVAL", "%s", line); got.Message == "" || strings.Contains(got.Message, "syntax") {
			t.Errorf("%q: no message that helps: %q", line, got.Message)
		}
	}
	if rows := m.Listing().Locks; len(rows) != 0 {
		t.Fatalf("rows: %+v, want none", rows)
	}
	a.want("E2BIG", "ctl", m.control("ctl"), "acquire D why="+strings.Repeat("x", 33<<10))
	a.want("E2BIG", "ctl", m.control("ctl"), strings.Repeat("check D\n", 9000))
	// Several lines are as many commands, up to the first that fails.
	a.want("EINVAL", "ctl", m.control("ctl"), "acquire D\n\n  \nnonsense\nrelease D\n")
	m.wantOwner("D", a.Pid)
	got := a.mustCommand(m, "release D\nacquire \"two words\"   shared  why=\"a \\\"reason\\\"\"\n")
	if got.Dir != "two words" || got.Kind != "shared" {
		t.Errorf("the answer to the last line: %+v", got)
	}
	if why := m.Locks()["two words"].Why; why != `a "reason"` {
		t.Errorf("the reason: %q", why)
	}
	m.wantFree("D")
}

// TestA7Frozen: a mount that is about to end grants nothing, and lets nobody
// wait in it (M4).
func TestA7Frozen(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	a, b, c := agent(t), agent(t), agent(t)
	token := a.mustCommand(m, "acquire D").Token
	waits := b.Start("ctl", m.control("ctl"), "acquire D wait=forever")
	m.awaitWaiters("D", 1)
	c.must("open", "c", m.control("ctl"), "rdwr")
	c.must("write", "c", fmt.Sprintf("watch D token=%d", token))
	watches := c.Start("pread", "c", "4096", "0")
	m.cmd.Process.Signal(syscall.SIGTERM)
	if got := waits(); got != "EBUSY" {
		t.Errorf("who waited = %s, want EBUSY", got)
	}
	if got := watches(); got != "ESHUTDOWN" {
		t.Errorf("who watched = %s, want ESHUTDOWN", got)
	}
	c.must("close", "c")
	<-m.gone
}

// TestA7Off: with locking off every command succeeds and locks nothing; where
// the mount only observes, a refusal is noted.
func TestA7Off(t *testing.T) {
	for _, mode := range []string{"--disable-locking", "--enforce=observe"} {
		t.Run(mode, func(t *testing.T) {
			m := mount(t, mode)
			openDir(t, m.Back("D"))
			a, b := agent(t), agent(t)
			first := a.mustCommand(m, "acquire D")
			second := b.mustCommand(m, "acquire D")
			if second.Token != 0 || second.Kind != "off" {
				t.Errorf("the second acquisition: %+v, want token 0 and kind off", second)
			}
			if noted := slices.ContainsFunc(m.Denials(), func(d denial) bool { return d.Op == "acquire" }); noted != (first.Token != 0) {
				t.Errorf("the refusal is noted: %t, locks are kept: %t", noted, first.Token != 0)
			}
			b.mustCommand(m, "acquire D client=x")
			for _, c := range []string{"release D", "release E", "release D client=x"} {
				if got := b.mustCommand(m, "%s", c); got.Token != 0 || got.Kind != "off" {
					t.Errorf("%s by who was refused: %+v, want token 0 and kind off", c, got)
				}
			}
			if first.Token != 0 {
				m.wantOwner("D", a.Pid)
			}
		})
	}
}
