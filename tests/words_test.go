//go:build linux

package tests

import (
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// TestCommandWords: what is refused is told in the words of the command line,
// with the status that is promised, and nothing of the daemon's protocol.
func TestCommandWords(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	mustDo(t, os.Mkdir(m.Back("shut"), 0o755))
	mustDo(t, os.Symlink("none", m.Back("dangling")))
	long, far := m.At(strings.Repeat("n", 256)), m.At(strings.Repeat("/nnn", 1024))
	file := tempDir(t) + "/client"
	mustDo(t, os.WriteFile(file, []byte(strings.Repeat("n", 300)+"\n"), 0o600))
	for _, tt := range []struct {
		env    string
		args   []string
		status int
		says   string
	}{
		{"", []string{"quarantine", "--delete", "../../etc", m.Path}, 66, "../../etc: nothing in quarantine has this ID"},
		{"", []string{"quarantine", "--delete", "1 older=0s", m.Path}, 66, "1 older=0s: nothing in quarantine has this ID"},
		{"", []string{"quarantine", "--delete", "", m.Path}, 66, "nothing in quarantine has this ID"},
		{"x\xff", []string{"release", m.At("D")}, 64, `the client ID "x\xff" holds what is no UTF-8`},
		{"x\xff", []string{"acquire", m.At("D")}, 64, `the client ID "x\xff" holds what is no UTF-8`},
		{"x\xff", []string{"run", m.At("D"), "true"}, 64, `the client ID "x\xff" holds what is no UTF-8`},
		{" x", []string{"release", m.At("D")}, 64, `the client ID " x" begins or ends with a blank`},
		{"", []string{"release", "--client", strings.Repeat("n", 257), m.At("D")}, 64, "257 bytes"},
		{"", []string{"run", "--client-file", file, m.At("D"), "true"}, 64, "the client ID in " + file + " has 300 bytes"},
		{"", []string{"acquire", "--client", "x", "--ttl", "1000h", m.At("D")}, 64, "acquire: --ttl 1000h: want 10ms to 24h\n"},
		{"", []string{"run", "--client", "x", "--ttl", "1ms", m.At("D"), "true"}, 64, "run: --ttl 1ms: want 10ms to 24h\n"},
		{"", []string{"acquire", long}, 66, "file name too long"},
		{"", []string{"run", long, "true"}, 66, "file name too long"},
		{"", []string{"check", long}, 66, "file name too long"},
		{"", []string{"wait", long}, 66, "file name too long"},
		{"", []string{"release", long}, 66, "file name too long"},
		{"", []string{"break", "--why", "x", long}, 66, "file name too long"},
		{"", []string{"acquire", far}, 66, "file name too long"},
		{"", []string{"run", far, "true"}, 66, "file name too long"},
		{"", []string{"check", far}, 66, "file name too long"},
		{"", []string{"wait", far}, 66, "file name too long"},
		{"", []string{"release", far}, 66, "file name too long"},
		{"", []string{"break", "--why", "x", far}, 66, "file name too long"},
		{"", []string{"acquire", m.At("none")}, 66, m.At("none") + ": no such directory; make it first"},
		{"", []string{"acquire", m.At(".stagefs")}, 66, ".stagefs is a reserved name"},
		{"", []string{"run", m.At(".stagefs"), "true"}, 66, ".stagefs is a reserved name"},
		{"", []string{"acquire", m.At("dangling")}, 66, m.At("dangling") + ": a symlink to nothing; make what it names first: none"},
		{"", []string{"wait", m.At("dangling")}, 66, m.At("dangling") + ": a symlink to nothing; make what it names first: none"},
		{"", []string{"wait", m.At("none")}, 0, m.At("none") + " is missing"},
		{"", []string{"wait", m.At(".stagefs")}, 66, ".stagefs is a reserved name"},
		{"", []string{"wait", m.At(".stagefs/x/y")}, 66, ".stagefs is a reserved name"},
		{"", []string{"check", m.At("none")}, 1, m.At("none") + " is missing"},
		{"", []string{"release", m.At("none")}, 66, m.At("none") + " is missing: there is no lock on it"},
		{"", []string{"break", "--why", "x", m.At("none")}, 66, m.At("none") + " is missing: there is no lock on it"},
		{"", []string{"quarantine", m.At("none")}, 0, m.At("none") + " is missing, and nothing was put aside there"},
		{"", []string{"release", m.Path}, 66, m.Path + ": there is no lock on it"},
		{"", []string{"break", "--why", "x", m.Path}, 66, m.Path + ": there is no lock on it"},
	} {
		cmd := exec.Command(stagefsBin(), tt.args...)
		if tt.env != "" {
			cmd.Env = append(os.Environ(), "STAGEFS_CLIENT="+tt.env)
		}
		r := runCmd(t, cmd)
		if r.Status != tt.status || !strings.Contains(r.Err, tt.says) || strings.Contains(r.Err, "invalid argument") || strings.Contains(r.Err, "understand") {
			t.Errorf("%q stagefs %.80q: %v; want status %d, and %q said", tt.env, tt.args, r, tt.status, tt.says)
		}
	}
	asNobody := func(args ...string) Result {
		cmd := exec.Command(stagefsBin(), args...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
		return runCmd(t, cmd)
	}
	if r := asNobody("mount", "-o", "remount,ro", m.Path); r.Status != 77 || !strings.Contains(r.Err, m.Path+": only root may remount it") {
		t.Errorf("a remount by an ordinary user: %v; want 77, and who may", r)
	}
	for _, args := range [][]string{{"acquire", m.At("shut")}, {"run", m.At("shut"), "true"}} {
		r := asNobody(args...)
		if r.Status != 77 || strings.Count(r.Err, "permission denied") != 1 || !strings.Contains(r.Err, "may lock it") {
			t.Errorf("stagefs %q of somebody else's directory: %v; want 77, and why", args, r)
		}
	}
}
