//go:build linux

package tests

import (
	"bufio"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// A shellScript is one of sh that runs beside the test, and is told when to go on.
type shellScript struct {
	*Proc
	in  io.WriteCloser
	out *bufio.Reader
}

// script starts a script; $0 is the program under test.
func (m *Mount) script(text string, args ...string) *shellScript {
	m.t.Helper()
	cmd := exec.Command("/bin/sh", append([]string{"-c", text, stagefsBin()}, args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	in, err := cmd.StdinPipe()
	mustDo(m.t, err)
	start, out := linesOf(m.t, cmd)
	return &shellScript{start(), in, out}
}

// line is the next line that it prints.
func (s *shellScript) line() string {
	s.t.Helper()
	line, err := s.out.ReadString('\n')
	if err != nil {
		s.t.Fatalf("the script printed %q, then %v (%s)", line, err, s.err.String())
	}
	return strings.TrimSuffix(line, "\n")
}

func (s *shellScript) goOn() {
	s.t.Helper()
	_, err := io.WriteString(s.in, "\n")
	mustDo(s.t, err)
}

// TestR5AcquireInScript: after `stagefs acquire` the directory belongs to the
// script that called it, with all that it starts, until it ends or releases it.
func TestR5AcquireInScript(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	rival := agent(t)
	for name, acquire := range map[string]string{
		"plain":         `"$0" acquire "$1" || exit`,
		"substitution":  `echo $("$0" acquire "$1") || exit`,
		"subshell":      `("$0" acquire "$1") || exit`,
		"function":      `f() { "$0" acquire "$1"; }; f "$1" || exit`,
		"nested script": `sh -c '"$0" acquire "$1"' "$0" "$1" || exit`,
	} {
		t.Run(name, func(t *testing.T) {
			m := m.on(t)
			s := m.script(acquire+`; "$0" check "$1"; touch "$1/x"; read go; rm "$1/x"; "$0" release "$1"; echo $?; read go; touch "$1/y"; exit 0`, m.At("D"))
			token := s.line()
			if checked := s.line(); checked != token || atoi(token) == 0 {
				t.Errorf("acquire prints %q, check %q", token, checked)
			}
			eventually(t, "the script has made x", func() bool { return exists(m.Back("D/x")) })
			if row := m.Locks()["D"]; row.Pid != s.Pid() || itoa(int(row.Token)) != token {
				t.Errorf("the lock: %+v, want process %d and token %s", row, s.Pid(), token)
			}
			rival.want("EBUSY", "put", m.At("D/z"), "", "creat")
			s.goOn()
			if status := s.line(); status != "0" {
				t.Errorf("release = %s", status)
			}
			m.wantFree("D")
			rival.must("put", m.At("D/z"), "", "creat")
			s.goOn()
			s.Wait()
			m.wantFree("D")
		})
	}
	t.Run("the script's end", func(t *testing.T) {
		s := m.on(t).script(`"$0" acquire "$1"; touch "$1/x"`, m.At("D"))
		s.Wait()
		m.on(t).awaitFree("D")
	})
	t.Run("the script is killed", func(t *testing.T) {
		s := m.on(t).script(`"$0" acquire "$1"; read go`, m.At("D"))
		s.line()
		eventually(t, "it is the script's", func() bool { return m.Locks()["D"].Pid == s.Pid() })
		s.Kill()
		m.on(t).awaitFree("D")
	})
}

// TestA7AcquireCommands: what the acquiring commands print, and their statuses.
func TestA7AcquireCommands(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	a, b := agent(t), agent(t)
	as := func(who *Agent, wants int, says string, args ...string) string {
		t.Helper()
		got := runCmdAs(t, who, args...)
		status, out, _ := strings.Cut(got, " ")
		if status != itoa(wants) || !strings.Contains(out, says) {
			t.Errorf("stagefs %q: %q, want %d with %q", args, got, wants, says)
		}
		return strings.TrimSpace(out)
	}
	as(a, 1, "", "check", m.At("D"))
	as(a, 66, "no lock", "release", m.At("D"))
	as(a, 66, "make it first", "acquire", m.At("nothing"))
	as(a, 69, "stagefs mount", "acquire", "/")
	as(a, 69, "stagefs mount", "check", "/")
	as(a, 69, "stagefs mount", "wait", "/")
	as(a, 69, "stagefs mount", "renew", "--client", "c", "/")

	a.must("mkdir", m.At("E"))
	token := as(a, 0, "", "check", m.At("E"))
	if token != itoa(int(m.Locks()["E"].Token)) {
		t.Errorf("check prints %q", token)
	}
	as(a.Child(), 0, token, "check", m.At("E/sub/and/below"))
	as(b, 1, "", "check", m.At("E"))
	as(b, 75, "process "+itoa(a.Pid), "acquire", "-n", m.At("E"))
	as(b, 75, "process "+itoa(a.Pid), "acquire", "-w", "0.02", m.At("E"))
	as(b, 75, "still held after 20ms: "+strconv.Quote(m.At("E"))+" is held by process "+itoa(a.Pid), "wait", "-w", "0.02", m.At("E"))
	as(b, 77, "", "release", m.At("E"))

	waited := b.StartGet("sh", stagefsBin()+" wait "+m.At("E"))
	m.awaitWaiters("E", 1)
	as(a, 0, "", "release", m.At("E"))
	if got := waited(); got != "0 " {
		t.Errorf("wait = %q", got)
	}
	m.wantFree("E")

	var lock struct {
		Dir, Kind string
		Token     uint64
	}
	r := sh(t, "/", `"$1" acquire --json --why "to see" "$2"; exit 1`, stagefsBin(), m.At("E"))
	if err := json.Unmarshal([]byte(r.Out), &lock); err != nil || lock.Dir != m.At("E") || lock.Token == 0 || lock.Kind != "explicit" {
		t.Errorf("acquire --json: %v, %+v, %v", r, lock, err)
	}
	m.awaitFree("E")

	for _, tt := range [][]string{{"acquire"}, {"acquire", "a", "b"}, {"check"}, {"wait", "-w", "x", m.At("D")}, {"renew", m.At("D")}, {"release", "--destroy", "--failed", m.At("D")}, {"acquire", "--create-once", m.At("D")}} {
		if r := m.stagefs(tt...); r.Status != 64 || r.Err == "" {
			t.Errorf("stagefs %q: %v, want 64", tt, r)
		}
	}
}

// TestR7KeptSaid: who gives content up as failed hears that it is kept all the same.
func TestR7KeptSaid(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	r := sh(t, "/", `"$1" acquire --shared --on-crash=destroy "$2" && "$1" release --failed "$2"`, stagefsBin(), m.At("D"))
	if r.Status != 0 || !strings.Contains(r.Err, "released, but the content is kept") {
		t.Errorf("acquire --shared, release --failed: %v, want 0 and that the content is kept", r)
	}
	m.wantFree("D")
}

// TestA7StillHeld: each lock that a script has acquired wants a release of its own, and
// who has one left hears of it, whatever the directory is called.
func TestA7StillHeld(t *testing.T) {
	m := mount(t)
	for _, name := range []string{"D", "latin\xe9"} {
		openDir(t, m.Back(name))
		r := sh(t, "/", `for n in 1 2; do "$1" acquire "$2"; done; for n in 1 2; do "$1" release "$2"; done`, stagefsBin(), m.At(name))
		first, _, _ := strings.Cut(r.Out, "\n")
		if r.Status != 0 || strings.Count(r.Err, "still held") != 1 || !strings.Contains(r.Err, "token "+first+"\n") {
			t.Errorf("%q acquired and released twice: %v, want the first lock named once", name, r)
		}
	}
}

// TestL2Commands: a lease is taken, handed over by environment or file, renewed,
// checked and released by commands of processes that have nothing in common.
func TestL2Commands(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	dir := m.At("D")
	token := strings.TrimSpace(m.wantStatus(0, "", "acquire", "--client", "job 7", "--ttl", "1h", dir).Out)
	row := m.Locks()["D"]
	if row.Client != "job 7" || itoa(int(row.Token)) != token || row.TTL != 3600 {
		t.Errorf("the lease: %+v, printed %q", row, token)
	}
	b := agent(t)
	b.want("EBUSY", "put", m.At("D/x"), "", "creat")
	m.wantStatus(75, "job 7", "run", "-n", dir, "true")
	m.wantStatus(75, "job 7", "acquire", "-n", "--client", "other", dir)
	m.wantStatus(1, "", "check", dir)
	m.wantStatus(1, "", "check", "--client", "other", dir)
	m.wantStatus(76, "no lease", "renew", "--client", "other", m.At("nothing"))

	env := func(id, script string) Result {
		cmd := exec.Command("/bin/sh", "-c", script, stagefsBin(), dir)
		cmd.Env = append(os.Environ(), "STAGEFS_CLIENT="+id)
		return runCmd(t, cmd)
	}
	for _, script := range []string{`echo x >"$1/x"`, `sh -c 'echo y >"$0/y"' "$1"`, `"$0" check "$1"`, `"$0" check "$1/sub/and/below"`, `"$0" renew --ttl 2h "$1"`, `"$0" acquire -n "$1"`, `"$0" run -n "$1" touch "$1/z"`} {
		if r := env("job 7", script); r.Status != 0 || r.Out != "" && r.Out != token+"\n" {
			t.Errorf("%s with the ID: %v", script, r)
		}
		if r := env("other", script); r.Status == 0 {
			t.Errorf("%s with another ID: %v", script, r)
		}
	}
	// run does not release what the client had before.
	if row := m.Locks()["D"]; itoa(int(row.Token)) != token {
		t.Errorf("after run under the lease: %+v", row)
	}
	m.wantStatus(66, "no lock", "release", "--client", "other", dir)
	m.wantStatus(0, "", "release", "--client", "job 7", dir)
	m.wantFree("D")
	m.wantStatus(76, "no lease on it (any more); take it again with: stagefs acquire --client ID "+dir, "renew", "--client", "job 7", dir)
	m.wantStatus(66, "no lock", "release", "--client", "job 7", dir)

	// By file: the ID is random, and its owner's alone to know.
	file := filepath.Join(tempDir(t), "id")
	m.wantStatus(0, "", "acquire", "--client-file", file, "--ttl=1h", dir)
	id, err := os.ReadFile(file)
	mustDo(t, err)
	if info, _ := os.Stat(file); info.Mode() != 0o600 || m.Locks()["D"].Client+"\n" != string(id) || len(id) < 20 {
		t.Errorf("the file: %q, %v; the lease: %+v", id, info.Mode(), m.Locks()["D"])
	}
	m.wantStatus(73, "exists", "acquire", "--client-file", file, dir)
	m.wantStatus(0, "", "check", "--client-file", file, dir)
	m.wantStatus(0, "", "renew", "--client-file", file, "--json", dir)
	cmd := exec.Command(stagefsBin(), "run", "-n", dir, "sh", "-c", `touch "$STAGEFS_LOCK/f" && echo "$STAGEFS_CLIENT"`)
	cmd.Env = append(os.Environ(), "STAGEFS_CLIENT_FILE="+file)
	if r := runCmd(t, cmd); r.Status != 0 || r.Out != string(id) {
		t.Errorf("run with STAGEFS_CLIENT_FILE: %v, want the ID printed", r)
	}
	// The same client has another directory by the variable, as the refusal says.
	openDir(t, m.Back("E"))
	m.wantStatus(73, "set STAGEFS_CLIENT_FILE to it", "acquire", "--client-file", file, m.At("E"))
	cmd = exec.Command(stagefsBin(), "acquire", "--ttl=1h", m.At("E"))
	cmd.Env = append(os.Environ(), "STAGEFS_CLIENT_FILE="+file)
	if r := runCmd(t, cmd); r.Status != 0 || m.Locks()["E"].Client+"\n" != string(id) {
		t.Errorf("acquire with STAGEFS_CLIENT_FILE: %v, and the lock %+v; want the client's", r, m.Locks()["E"])
	}
	m.wantStatus(0, "", "release", "--client-file", file, m.At("E"))
	cmd = exec.Command(stagefsBin(), "acquire", dir)
	cmd.Env = append(os.Environ(), "STAGEFS_CLIENT_FILE="+file+".missing")
	if r := runCmd(t, cmd); r.Status != 66 || !strings.Contains(r.Err, "acquire --client-file") {
		t.Errorf("acquire with STAGEFS_CLIENT_FILE of a missing file: %v, want 66 and how it is made", r)
	}
	m.wantStatus(66, "make it with: stagefs acquire --client-file "+file+".missing DIR", "release", "--client-file", file+".missing", dir)
	other := filepath.Join(tempDir(t), "id")
	m.wantStatus(75, "", "acquire", "-n", "--client-file", other, dir)
	if _, err := os.Stat(other); err == nil {
		t.Error("a failed acquisition leaves the client's file")
	}
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT} {
		p := startCmd(t, exec.Command(stagefsBin(), "acquire", "--client-file", other, dir))
		m.awaitWaiters("D", 1)
		mustDo(t, syscall.Kill(p.Pid(), sig))
		p.Wait()
		if status := p.cmd.ProcessState.Sys().(syscall.WaitStatus); !status.Signaled() || status.Signal() != sig {
			t.Errorf("acquire after %v = %v, want the signal", sig, status)
		}
		if _, err := os.Stat(other); err == nil {
			t.Errorf("an acquisition that %v has ended leaves the client's file", sig)
		}
		m.awaitWaiters("D", 0)
	}
	m.wantStatus(0, "", "release", "--client-file", file, dir)
	m.wantFree("D")
}

// TestL1RunLease: run renews its lease, ends with it, and is ended when it is
// over.
func TestL1RunLease(t *testing.T) {
	m := mount(t)
	b := agent(t)
	a, p := m.runAgent("--client", "c", "--ttl", "2s", m.At("D"))
	row := m.Locks()["D"]
	if row.Client != "c" || row.TTL != 2 {
		t.Errorf("the lease: %+v", row)
	}
	renewals := 0
	for last := row.Deadline; renewals < 7; {
		now, held := m.Locks()["D"]
		if !held {
			t.Fatalf("lost after %d renewals", renewals)
		}
		if now.Deadline > last {
			renewals++
		}
		last = now.Deadline
	}
	a.must("put", m.At("D/x"), "", "creat")
	b.want("EBUSY", "put", m.At("D/y"), "", "creat")
	a.Exit(0)
	if r := p.Wait(); r.Status != 0 {
		t.Errorf("run: %v", r)
	}
	m.wantFree("D")

	// Stopped, run renews nothing; continued, it finds the lease over.
	a, p = m.runAgent("--client", "c", "--ttl", "2s", m.At("D"))
	a.must("open", "x", m.At("D/late"), "wronly,creat")
	halt(t, p.Pid())
	m.awaitFree("D")
	b.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	a.want("EBUSY", "write", "x", "late")
	a.want("EBUSY", "put", m.At("D/z"), "", "creat")
	mustDo(t, syscall.Kill(p.Pid(), syscall.SIGCONT))
	if r := p.Wait(); r.Status != 76 || !strings.Contains(r.Err, "expired") {
		t.Errorf("run after its lease: %v, want 76", r)
	}
	awaitEnd(t, "the command ends", a.Pid)
	m.wantOwner("D", b.Pid)
}

// TestH3RunWithin: run does not end the lock that its group, or session, has already.
func TestH3RunWithin(t *testing.T) {
	m := mount(t)
	for _, scope := range []string{"group", "session"} {
		for _, script := range []string{
			`"$0" run "$1" "$2" "$0" run "$1" "$2" true`, // each within the one before
			`"$0" acquire "$1" "$2" && "$0" run "$1" "$2" true && "$0" check "$2" && "$0" release "$2"`,
			`"$0" run "$1" "$2" sh -c '"$0" run "$1" "$2" true && "$0" check "$2"' "$0" "$1" "$2"`,
		} {
			cmd := exec.Command("sh", "-c", script, stagefsBin(), "--owner="+scope, m.At("D"))
			cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
			openDir(t, m.Back("D"))
			if r := runCmd(t, cmd); r.Status != 0 || r.Err != "" {
				t.Errorf("%s: %s: %v, want 0 and nothing said", scope, script, r)
			}
			m.wantFree("D")
		}
	}
}

// TestL1RunWithin: run leaves a lease as it was that its client has already, with its
// time and what is to become of the content, and does not wait for it to share it.
func TestL1RunWithin(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	m.wantStatus(0, "", "acquire", "--client", "c", "--ttl", "1h", m.At("D"))
	was := m.Locks()["D"]
	m.wantStatus(0, "", "run", "--client", "c", "--ttl", "2s", m.At("D"), "true")
	if now := m.Locks()["D"]; now.Token != was.Token || now.TTL != was.TTL {
		t.Errorf("after run --ttl: token %d for %v s, want %d for %v s", now.Token, now.TTL, was.Token, was.TTL)
	}
	m.wantStatus(75, "for itself alone", "run", "--client", "c", "--shared", m.At("D"), "true")
	if rows := m.Listing().Locks; len(rows) != 1 || rows[0].Token != was.Token {
		t.Errorf("after run --shared: %+v, want the lease alone", rows)
	}
	m.wantStatus(1, "counts for nothing", "run", "--client", "d", m.At("E"), "sh", "-c",
		`"$0" run --destroy-on-failure "$STAGEFS_LOCK" true; touch "$STAGEFS_LOCK/x"; exit 1`, stagefsBin())
	if _, err := os.Stat(m.At("E/x")); err != nil {
		t.Errorf("after run --destroy-on-failure within a run that failed: %v", err)
	}
}

// TestH3Run: with a wider scope, the lock outlives run and belongs to all in
// the scope.
func TestH3Run(t *testing.T) {
	m := mount(t)
	s := m.script(`"$0" acquire --owner=session "$1" && touch "$1/x" && echo made; read go; sh -c 'touch "$0/y"' "$1"; echo $?; read go`, func() string { openDir(t, m.Back("D")); return m.At("D") }())
	s.line() // the token
	if got := s.line(); got != "made" {
		t.Errorf("the script prints %q", got)
	}
	if row := m.Locks()["D"]; row.Scope != "session" {
		t.Errorf("the lock: %+v", row)
	}
	agent(t).want("EBUSY", "put", m.At("D/z"), "", "creat")
	s.goOn()
	if got := s.line(); got != "0" {
		t.Errorf("touch in the session = %s", got)
	}
	s.goOn()
	s.Wait()
	m.awaitFree("D")
	if r := m.runner("--owner=group", m.At("D"), "touch", m.At("D/g")).Wait(); r.Status != 0 {
		t.Errorf("run --owner=group: %v", r)
	}
	m.awaitFree("D")
}
