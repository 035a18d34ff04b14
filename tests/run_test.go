//go:build linux

package tests

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// stagefs runs the program to its end, as a child of the test process: for what
// leaves no lock behind.
func (m *Mount) stagefs(args ...string) Result {
	m.t.Helper()
	return run(m.t, stagefsBin(), args...)
}

// wantStatus runs the program and compares its status, and what it says.
func (m *Mount) wantStatus(status int, says string, args ...string) Result {
	m.t.Helper()
	r := m.stagefs(args...)
	if r.Status != status || !strings.Contains(r.Err, says) {
		m.t.Errorf("stagefs %q: %v; want status %d, and %q said", args, r, status, says)
	}
	return r
}

// runner starts `stagefs run`, in a session of its own: no terminal is in it.
func (m *Mount) runner(args ...string) *Proc {
	m.t.Helper()
	cmd := exec.Command(stagefsBin(), append([]string{"run"}, args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return startCmd(m.t, cmd)
}

// runAgent starts an agent under `stagefs run`.
func (m *Mount) runAgent(args ...string) (*Agent, *Proc) {
	m.t.Helper()
	var p *Proc
	a := awaitAgent(m.t, func(sock string) {
		cmd := exec.Command(stagefsBin(), append(append([]string{"run"}, args...), agentBin())...)
		cmd.Env = append(os.Environ(), envAgent+"="+sock)
		p = startCmd(m.t, cmd)
	})
	return a, p
}

// says waits until a program has printed something; it must not be waited for
// at the same time.
func says(t *testing.T, out *os.File, want string) {
	t.Helper()
	buf, got := make([]byte, 1024), ""
	for !strings.Contains(got, want) {
		out.SetReadDeadline(time.Now().Add(patience))
		n, err := out.Read(buf)
		if got += string(buf[:n]); err != nil {
			t.Fatalf("printed %q, then %v; want %q", got, err, want)
		}
	}
}

// A patientReader is a pipe that a read waits for no longer than [patience].
type patientReader struct{ *os.File }

func (r patientReader) Read(b []byte) (int, error) {
	r.SetReadDeadline(time.Now().Add(patience))
	return r.File.Read(b)
}

// linesOf gives cmd a pipe for its standard output, too, to read line by line.
func linesOf(t *testing.T, cmd *exec.Cmd) (start func() *Proc, out *bufio.Reader) {
	t.Helper()
	start, r := outputOf(t, cmd)
	return start, bufio.NewReader(patientReader{r})
}

// outputOf gives cmd a pipe for its standard output.
func outputOf(t *testing.T, cmd *exec.Cmd) (start func() *Proc, out *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	mustDo(t, err)
	t.Cleanup(func() { r.Close() })
	cmd.Stdout = w
	return func() *Proc {
		p := startCmd(t, cmd)
		w.Close()
		return p
	}, r
}

// TestA7RunAsEnv: what a command gets, and what becomes of it, is the same under
// `stagefs run` as under env(1): arguments, descriptors, status, signals.
func TestA7RunAsEnv(t *testing.T) {
	m := mount(t)
	dir := tempDir(t)
	mustDo(t, os.WriteFile(filepath.Join(dir, "noexec"), []byte("#!/bin/sh\necho no\n"), 0o644))
	writeProgram(t, filepath.Join(dir, "nointerpreter"), []byte("echo \"as sh: $1\"; exit 4\n"))
	writeProgram(t, filepath.Join(dir, "badinterpreter"), []byte("#!/no/such/interpreter\n"))
	for name, tt := range map[string]struct {
		cmd   []string
		stdin string
		how   string // of the shell that starts it
	}{
		"success":          {cmd: []string{"true"}},
		"failure":          {cmd: []string{"false"}},
		"exit 7":           {cmd: []string{"sh", "-c", "exit 7"}},
		"exit 75":          {cmd: []string{"sh", "-c", "exit 75"}},
		"exit 255":         {cmd: []string{"sh", "-c", "exit 255"}},
		"SIGTERM":          {cmd: []string{"sh", "-c", "kill -TERM $$"}},
		"SIGKILL":          {cmd: []string{"sh", "-c", "kill -KILL $$"}},
		"SIGINT":           {cmd: []string{"sh", "-c", "kill -INT $$"}},
		"SIGHUP":           {cmd: []string{"sh", "-c", "kill -HUP $$"}},
		"SIGSEGV":          {cmd: []string{"sh", "-c", "kill -SEGV $$"}},
		"SIGQUIT":          {cmd: []string{"sh", "-c", "kill -QUIT $$"}},
		"SIGPIPE":          {cmd: []string{"sh", "-c", "kill -PIPE $$"}},
		"real-time signal": {cmd: []string{"sh", "-c", "kill -40 $$"}},
		"not found":        {cmd: []string{"no-such-command"}},
		"no such path":     {cmd: []string{"./no/such/command"}},
		"not executable":   {cmd: []string{"./noexec"}},
		"a directory":      {cmd: []string{"/"}},
		"no interpreter":   {cmd: []string{"./nointerpreter", "a b"}},
		"bad interpreter":  {cmd: []string{"./badinterpreter"}},
		"arguments":        {cmd: []string{"printf", "<%s>", "", "a b", "-n", "--", "\xff\n", "$HOME"}},
		"standard input":   {cmd: []string{"cat", "-n"}, stdin: "one\ntwo\n"},
		"a descriptor":     {cmd: []string{"sh", "-c", "echo three >&3"}, how: "3>&1"},
		"closed input":     {cmd: []string{"sh", "-c", "cat; echo $?"}, how: "</dev/null"},
		"umask":            {cmd: []string{"sh", "-c", "umask"}, how: "umask 027;"},
		"file limit":       {cmd: []string{"sh", "-c", "ulimit -Sn"}, how: "ulimit -Sn 77;"},
		"ignored SIGHUP":   {cmd: []string{"sh", "-c", "kill -HUP $$; echo alive"}, how: "trap '' HUP;"},
		"ignored SIGINT":   {cmd: []string{"sh", "-c", "kill -INT $$; echo alive"}, how: "trap '' INT;"},
		"working dir":      {cmd: []string{"pwd"}},
		"name":             {cmd: []string{"sh", "-c", "echo $0"}},
		"big output":       {cmd: []string{"seq", "100000"}},
	} {
		t.Run(name, func(t *testing.T) {
			m := m.on(t)
			try := func(prefix ...string) (syscall.WaitStatus, string) {
				before, redirect := tt.how, ""
				if !strings.HasSuffix(before, ";") {
					before, redirect = "", tt.how
				}
				cmd := exec.Command("/bin/sh", append([]string{"-c", before + ` exec "$@" ` + redirect, "sh"}, append(prefix, tt.cmd...)...)...)
				cmd.Dir, cmd.Stdin = dir, strings.NewReader(tt.stdin)
				p := startCmd(t, cmd)
				out := p.Wait().Out
				return p.cmd.ProcessState.Sys().(syscall.WaitStatus), out
			}
			want, wantOut := try("env")
			got, gotOut := try(stagefsBin(), "run", m.At("D"))
			// A core dump would be made once, by the command.
			if got&^0x80 != want&^0x80 || gotOut != wantOut {
				t.Errorf("status %#x, printed %.200q; with env: %#x, %.200q", got, gotOut, want, wantOut)
			}
			m.wantFree("D")
		})
	}
}

// TestA7RunHolds: the command is a holder, with its children, and nobody else;
// its environment tells what it holds.
func TestA7RunHolds(t *testing.T) {
	m := mount(t)
	b := agent(t)
	a, p := m.runAgent("--why", "testing it", m.At("D"))
	row := m.Locks()["D"]
	if row.Pid != p.Pid() || row.Why != "testing it" || row.Kind != "explicit" {
		t.Errorf("the lock: %+v, want process %d", row, p.Pid())
	}
	a.must("put", m.At("D/x"), "mine", "creat")
	a.Child("setsid").must("put", m.At("D/y"), "mine", "creat")
	b.want("EBUSY", "put", m.At("D/z"), "", "creat")
	want := fmt.Sprintf("0 %s %d\n", m.At("D"), row.Token)
	if got := a.Get("sh", "echo $STAGEFS_LOCK $STAGEFS_TOKEN"); got != want {
		t.Errorf("the environment: %q, want %q", got, want)
	}
	if r := m.stagefs("run", "-n", m.At("D"), "true"); r.Status != 75 || !strings.Contains(r.Err, itoa(p.Pid())) || !strings.Contains(r.Err, "testing it") {
		t.Errorf("run -n where it is held: %v, want 75 with the holder", r)
	}
	a.Exit(0)
	if r := p.Wait(); r.Status != 0 {
		t.Errorf("run: %v", r)
	}
	m.wantFree("D")
	b.must("put", m.At("D/z"), "", "creat")
	if b, _ := os.ReadFile(m.Back("D/x")); string(b) != "mine" {
		t.Errorf("D/x = %q after a success", b)
	}
}

// TestA7RunWaiting: a command that may wait for ever says for whom, once: that may be the
// script that runs it.
func TestA7RunWaiting(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D/sub"))
	script := agent(t)
	script.must("creat", m.At("D/sub/devserver"), "wronly,creat,excl")
	said := t.TempDir()
	commands := []string{"run D true", "run -s D true", "acquire D && $0 release D", "run -w 1m D true"}
	var ends []func() string
	for i, command := range commands {
		line := strings.ReplaceAll("cd "+m.Path+" && exec 2>"+said+"/"+itoa(i)+"; $0 "+command, "$0", stagefsBin())
		ends = append(ends, script.Child().StartGet("sh", line))
	}
	want := fmt.Sprintf("stagefs: waiting: %q is held by process %d (", m.At("D"), script.Pid)
	text := func(i int) string { b, _ := os.ReadFile(said + "/" + itoa(i)); return string(b) }
	for i, command := range commands[:3] {
		eventually(t, command+" says for whom it waits", func() bool { return strings.HasPrefix(text(i), want) })
	}
	script.must("unlink", m.At("D/sub/devserver"))
	for i, end := range ends {
		out := end()
		if lines, limited := strings.Count(text(i), "\n"), i == 3; !strings.HasPrefix(out, "0 ") || lines != 1 && !limited || lines != 0 && limited {
			t.Errorf("%s: %s, and says %q", commands[i], out, text(i))
		}
	}
}

// TestA7RunConflict: -n, -w and -E, as for flock(1).
func TestA7RunConflict(t *testing.T) {
	m := mount(t)
	a := agent(t)
	a.must("mkdir", m.At("D"))
	a.must("mkdir", m.At("S"))
	held := fmt.Sprintf("process %d", a.Pid)
	m.wantStatus(75, held, "run", "-n", m.At("D"), "true")
	m.wantStatus(75, held, "run", "--nonblock", m.At("D"), "true")
	m.wantStatus(9, held, "run", "-n", "-E", "9", m.At("D"), "true")
	m.wantStatus(0, held, "run", "-n", "-E0", m.At("D"), "true")
	m.wantStatus(75, held, "run", "-w", "0", m.At("D"), "true")
	m.wantStatus(75, held, "run", "-w", "0.05", m.At("D"), "true")
	m.wantStatus(75, held, "run", "-w", "1ns", m.At("D"), "true")
	m.wantStatus(75, held, "run", "-w", "1ns", m.At("D/sub/sub"), "true")
	m.wantStatus(75, held, "run", "--wait=50ms", m.At("D"), "true")
	m.wantStatus(75, held, "run", "-n", m.At("D/sub"), "true")
	m.wantStatus(75, held, "run", "-w", "0.05", m.At("D/sub/sub"), "true")
	m.wantStatus(75, "", "run", "-n", "-s", m.At("D"), "true")
	m.wantStatus(64, "exclude", "run", "-n", "-w", "1", m.At("D"), "true")
	m.wantStatus(64, "want seconds", "run", "-w", "soon", m.At("D"), "true")
	if _, err := os.Lstat(m.Back("D/sub")); err == nil {
		t.Error("what was refused made D/sub")
	}

	// Without an option it waits.
	p := m.runner(m.At("D"), "true")
	m.awaitWaiters("D", 1)
	a.must("sh", stagefsBin()+" release "+m.At("D"))
	if r := p.Wait(); r.Status != 0 {
		t.Errorf("run after the release: %v", r)
	}

	// A holder of something beneath is in the way (C3c).
	a.must("mkdir", m.At("E"))
	a.must("sh", stagefsBin()+" release "+m.At("E"))
	a.must("mkdir", m.At("E/sub"))
	a.must("creat", m.At("E/sub/devserver"), "wronly,creat,excl")
	m.wantStatus(75, held, "run", "-n", m.At("E"), "true")
	m.wantStatus(75, held, "run", "-n", m.At("E/sub/x"), "true")
	m.wantStatus(0, "", "run", "-n", m.At("E/other"), "true")

	// And what is open there (C3d).
	openDir(t, m.Back("F"))
	a.must("open", "x", m.At("F/x"), "wronly,creat")
	m.wantStatus(75, "F/x", "run", "-n", m.At("F"), "true")
	p = m.runner("-w", "30", m.At("F"), "true")
	m.awaitWaiters("F", 1)
	a.must("close", "x")
	if r := p.Wait(); r.Status != 0 {
		t.Errorf("run after the close: %v", r)
	}
}

// TestA7RunShared: -s lets others share, and nobody write.
func TestA7RunShared(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	a, p := m.runAgent("-s", m.At("D"))
	a.want("EBUSY", "put", m.At("D/x"), "", "creat")
	agent(t).want("EBUSY", "put", m.At("D/x"), "", "creat")
	m.wantStatus(0, "", "run", "-n", "-s", m.At("D"), "true")
	m.wantStatus(75, "", "run", "-n", m.At("D"), "true")
	a.Exit(0)
	p.Wait()
	m.wantStatus(0, "", "run", "-n", m.At("D"), "true")
}

// TestA7RunOrder: 20 that wait get the directory in the order in which they
// came; one that is killed leaves the line.
func TestA7RunOrder(t *testing.T) {
	m := mount(t)
	a := agent(t)
	a.must("mkdir", m.At("D"))
	var procs []*Proc
	var want strings.Builder
	for i := range 20 {
		procs = append(procs, m.runner("-w", "50s", m.At("D"), "sh", "-c", fmt.Sprintf("echo %d >>%s", i, m.At("D/order"))))
		m.awaitWaiters("D", i+1)
		if i != 7 {
			fmt.Fprintln(&want, i)
		}
	}
	procs[7].Kill()
	m.awaitWaiters("D", 19)
	a.must("sh", stagefsBin()+" release "+m.At("D"))
	for i, p := range procs {
		if r := p.Wait(); i != 7 && r.Status != 0 {
			t.Errorf("waiter %d: %v", i, r)
		}
	}
	if got, _ := os.ReadFile(m.Back("D/order")); string(got) != want.String() {
		t.Errorf("the order:\n%swant\n%s", got, want.String())
	}
	m.wantFree("D")
}

// TestA7RunExclusive: read, add one, write: nothing is lost under the lock.
func TestA7RunExclusive(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	mustDo(t, os.WriteFile(m.Back("D/n"), []byte("0\n"), 0o666))
	const racers, rounds = 12, 5
	script := `for i in 1 2 3 4 5; do "$0" run "$1" sh -c 'read n <"$1/n"; echo $((n+1)) >"$1/n"' sh "$1" || exit; done`
	var procs []*Proc
	for range racers {
		procs = append(procs, startCmd(t, exec.Command("/bin/sh", "-c", script, stagefsBin(), m.At("D"))))
	}
	for _, p := range procs {
		if r := p.Wait(); r.Status != 0 {
			t.Error(r)
		}
	}
	if got, _ := os.ReadFile(m.Back("D/n")); strings.TrimSpace(string(got)) != itoa(racers*rounds) {
		t.Errorf("counted to %s, want %d", got, racers*rounds)
	}
}

// TestA7RunCreateOnce: of 50 that race to make a directory, one wins, and the
// others find it there.
func TestA7RunCreateOnce(t *testing.T) {
	m := mount(t)
	var procs []*Proc
	for range 50 {
		procs = append(procs, m.runner("--create-once", m.At("a/b/c"), "sh", "-c", "echo won >"+m.At("a/b/c/by")+"$$"))
	}
	won := 0
	for _, p := range procs {
		switch r := p.Wait(); r.Status {
		case 0:
			won++
		case 73:
		default:
			t.Error(r)
		}
	}
	if files, _ := filepath.Glob(m.Back("a/b/c/by*")); won != 1 || len(files) != 1 {
		t.Errorf("%d won, and left %q; want one", won, files)
	}
	m.wantStatus(73, "exists already", "run", "--create-once", m.At("a/b/c"), "true")
	for _, dir := range []string{"a", "a/b", "a/b/c"} {
		m.wantFree(dir)
	}
}
