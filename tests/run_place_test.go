//go:build linux

package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestA7RunPlaces: wherever DIR is, and whatever it is called, it is locked, or
// the error says why not.
func TestA7RunPlaces(t *testing.T) {
	m := mount(t)
	for _, name := range []string{
		"plain", "a b", " a", "a ", "a\nb", "new\n", "tab\t", "latin\xe9", "bytes\xff\xfe", `quo"te`, "quo'te", `back\slash`, "-n", "--", "=", "client=x", "ttl", "é", "\x1b[2J",
		strings.Repeat("x", 255), "deep/er/and/deeper", ".hidden", "...", "shared", "$HOME", "*",
	} {
		dir := m.At(name)
		r := m.stagefs("run", dir, "sh", "-c", `test "$STAGEFS_LOCK" = "$1" && : >"$1/x"`, "sh", dir)
		if info, err := os.Stat(m.Back(name, "x")); r.Status != 0 || err != nil || !info.Mode().IsRegular() {
			t.Errorf("run %q: %v, %v", name, r, err)
		}
	}
	if rows := m.Locks(); len(rows) > 0 {
		t.Errorf("left over: %v", rows)
	}
	// From within, relative.
	mustDo(t, os.MkdirAll(m.Back("deep"), 0o755))
	for _, at := range []struct{ cwd, dir, want string }{
		{m.At("deep"), "er", "deep/er"},
		{m.At("deep"), ".", "deep"},
		{m.At("deep"), "er/../er/and/", "deep/er/and"},
		{m.At("deep/er"), "..", "deep"},
		{m.Path, "-n/../plain", "plain"},
	} {
		cmd := exec.Command(stagefsBin(), "run", "--", at.dir, "sh", "-c", `echo "$STAGEFS_LOCK"; pwd`)
		cmd.Dir = at.cwd
		if r := runCmd(t, cmd); r.Status != 0 || r.Out != m.At(at.want)+"\n"+at.cwd+"\n" {
			t.Errorf("run %s in %s: %v, want lock %s", at.dir, at.cwd, r, at.want)
		}
	}
	// Symlinks lead to what is locked.
	elsewhere := tempDir(t)
	mustDo(t, os.Symlink(m.At("plain"), filepath.Join(elsewhere, "link")))
	for _, dir := range []string{filepath.Join(elsewhere, "link"), filepath.Join(elsewhere, "link", "new")} {
		want := m.At("plain", strings.TrimPrefix(dir, filepath.Join(elsewhere, "link")))
		if r := m.stagefs("run", dir, "sh", "-c", `echo "$STAGEFS_LOCK"`); r.Status != 0 || r.Out != want+"\n" {
			t.Errorf("run %s: %v, want lock %s", dir, r, want)
		}
	}

	mustDo(t, os.WriteFile(m.Back("file"), nil, 0o644))
	mustDo(t, os.Symlink("nothing", m.Back("dangling")))
	mustDo(t, os.Symlink("loop", m.Back("loop")))
	for _, tt := range []struct {
		dir    string
		status int
		says   string
	}{
		{elsewhere, 69, "stagefs mount"},
		{filepath.Join(elsewhere, "a", "b"), 69, "stagefs mount"},
		{"/", 69, "stagefs mount"},
		{m.At("file"), 66, "not a directory"},
		{m.At("file/x"), 66, "not a directory"},
		{m.At("dangling"), 66, ""},
		{m.At("dangling/x"), 66, ""},
		{m.At("loop"), 66, ""},
		{m.Path, 64, "root"},
		{m.At(".stagefs"), 66, ""},
		{m.At(".stagefs/x"), 77, ""},
		{m.At(strings.Repeat("x", 256)), 66, "too long"},
		{"", 64, "which directory"},
	} {
		if r := m.stagefs("run", "-n", tt.dir, "true"); r.Status != tt.status || !strings.Contains(r.Err, tt.says) || r.Err == "" {
			t.Errorf("run %.80q: %v; want status %d, and %q said", tt.dir, r, tt.status, tt.says)
		}
	}
	if entries, _ := os.ReadDir(elsewhere); len(entries) != 1 {
		t.Errorf("what failed left %v in %s", entries, elsewhere)
	}
}

// TestA7RunRights: who may not write to a directory can't lock it.
func TestA7RunRights(t *testing.T) {
	m := mount(t)
	mustDo(t, os.Mkdir(m.Back("roots"), 0o755))
	mustDo(t, os.Mkdir(m.Back("open"), 0o777))
	mustDo(t, os.Chmod(m.Back("open"), 0o777))
	for dir, status := range map[string]int{"roots": 77, "roots/new": 77, "open": 0, "open/new": 0} {
		cmd := exec.Command(stagefsBin(), "run", m.At(dir), "true")
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
		if r := runCmd(t, cmd); r.Status != status {
			t.Errorf("run %s by nobody: %v, want %d", dir, r, status)
		}
	}
}

// TestA7RunParents: missing parents are made; held ones are waited for, or said
// to be held.
func TestA7RunParents(t *testing.T) {
	m := mount(t)
	a := agent(t)
	a.must("mkdir", m.At("board"))
	m.wantStatus(75, "", "run", "-n", m.At("board/v1/x"), "true")
	m.wantStatus(75, "", "run", "-w", "0.1", m.At("board/v1/x"), "true")
	p := m.runner(m.At("board/v1/x"), "true")
	eventually(t, "run waits for the parent's holder", func() bool { return len(m.Listing().Waiters) > 0 })
	a.must("sh", stagefsBin()+" release "+m.At("board"))
	if r := p.Wait(); r.Status != 0 {
		t.Errorf("run after the release: %v", r)
	}
	if _, err := os.Stat(m.Back("board/v1/x")); err != nil {
		t.Error(err)
	}
	// Siblings that others hold are no obstacle.
	other, q := m.runAgent(m.At("board/v2"))
	m.wantStatus(0, "", "run", "-n", m.At("board/v3"), "true")
	other.Exit(0)
	q.Wait()

	// The chain that is made is locked at its end alone (A12).
	holder, q := m.runAgent(m.At("new/er/est"))
	if rows := m.Locks(); len(rows) != 1 || rows["new/er/est"].Pid != q.Pid() {
		t.Errorf("locks: %v, want one, on new/er/est", rows)
	}
	m.wantStatus(0, "", "run", "-n", m.At("new/er/other"), "true")
	holder.Exit(0)
	q.Wait()
	if rows := m.Locks(); len(rows) != 0 {
		t.Errorf("left over: %v", rows)
	}
}

// TestA7RunNested: a holder's command may lock beneath, and again what it has.
func TestA7RunNested(t *testing.T) {
	m := mount(t)
	a, p := m.runAgent(m.At("D"))
	if got := a.Get("sh", stagefsBin()+" run -n "+m.At("D/sub")+" touch "+m.At("D/sub/x")); got != "0 " {
		t.Errorf("run beneath: %q", got)
	}
	if got := a.Get("sh", stagefsBin()+" run -n "+m.At("D")+" touch "+m.At("D/y")); got != "0 " {
		t.Errorf("run again: %q", got)
	}
	m.wantOwner("D", p.Pid())
	a.must("put", m.At("D/sub/z"), "", "creat")
	a.Exit(0)
	p.Wait()
	m.wantFree("D")
}

// TestA7RunBehind: the lock of run ends with its command, also behind one that the command
// leaves in front of it (C2), and does not pass to who called run.
func TestA7RunBehind(t *testing.T) {
	m := mount(t)
	s := m.script(`"$0" run "$1" "$0" acquire --client c "$1"; echo $?; read end`, m.At("D"))
	s.line() // the token
	status := s.line()
	rows := m.Listing().Locks
	if status != "0" || len(rows) != 1 || rows[0].Kind != "lease" {
		t.Errorf("after stagefs run … stagefs acquire --client c: status %s, locks %+v, want 0, and the lease", status, rows)
	}
	s.Kill()
}

// TestA7RunBytes: who is refused is told the name of the lock's directory, and of a file
// that is open, also where they are not UTF-8.
func TestA7RunBytes(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("open\xff"))
	a, b := agent(t), agent(t)
	a.must("mkdir", m.At("D\xff"))
	b.must("open", "f", m.At("open\xff/f\xfe"), "wronly,creat")
	m.wantStatus(75, `through the lock on "D\xff"`, "run", "-n", m.At("D\xff/sub"), "true")
	if r := run(t, stagefsBin(), "run", "-n", m.At("D\xff"), "true"); r.Status != 75 || strings.Contains(r.Err, "through") {
		t.Errorf("run in a directory that somebody else holds: %v; want 75, and it named once", r)
	}
	m.wantStatus(75, `has "open\xff/f\xfe" open for writing`, "run", "-n", m.At("open\xff"), "true")
}

// TestA7RunUsage: a bad command line is refused before anything happens.
func TestA7RunUsage(t *testing.T) {
	m := mount(t)
	for _, tt := range []struct {
		args   string
		status int
		says   string
	}{
		{"", 64, "which directory"},
		{"D", 64, "which command"},
		{"D --", 64, "which command"},
		{"D -n true", 64, "come before DIR"},
		{"--frob D true", 64, "unknown option"},
		{"-w D D true", 64, "want seconds"},
		{"-w -1 D true", 64, "want seconds"},
		{"-E 256 D true", 64, "0 to 255"},
		{"-E x D true", 64, "want 0 to 255"},
		{"--owner=nobody D true", 64, "want process"},
		{"--owner= D true", 64, "--owner is empty"},
		{"--on-crash= D true", 64, "--on-crash is empty"},
		{"--on-crash=burn D true", 64, "want keep"},
		{"--on-crash=keep --destroy-on-failure D true", 64, "exclude"},
		{"--ttl 5s D true", 64, "--client"},
		{"--client= D true", 64, "empty"},
		{"--client a --client-file b D true", 64, "exclude"},
		{"--client a --owner group D true", 64, "client's"},
		{"--client-file /no/such/file D true", 66, "/no/such/file is missing; make it with"},
		{"D no-such-command", 127, "no such command"},
	} {
		args := append([]string{"run"}, strings.Fields(tt.args)...)
		for i, arg := range args {
			if arg == "D" {
				args[i] = m.At("D")
			}
		}
		m.wantStatus(tt.status, tt.says, args...)
	}
	cmd := exec.Command(stagefsBin(), "run", m.At("D"), "true")
	cmd.Env = append(os.Environ(), "STAGEFS_CLIENT=")
	if r := runCmd(t, cmd); r.Status != 64 || !strings.Contains(r.Err, "STAGEFS_CLIENT") {
		t.Errorf("with an empty STAGEFS_CLIENT: %v", r)
	}
	if _, err := os.Stat(m.Back("D")); err == nil {
		t.Error("D was made")
	}
}
