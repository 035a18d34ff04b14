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

// TestCommandOutput: output that is lost is an error, whatever the command, and
// a lock whose token was not told is not kept.
func TestCommandOutput(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	for _, args := range []string{"locks", "locks --json", "why D", "quarantine .", "doctor", "doctor --json", "version", "version --handover", "--help", "mount --help", "help run", "acquire D", "acquire --json D"} {
		full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
		mustDo(t, err)
		cmd := exec.Command(stagefsBin(), strings.Fields(args)...)
		cmd.Dir, cmd.Stdout = m.Path, full
		r := runCmd(t, cmd)
		full.Close()
		if r.Status != 74 || !strings.Contains(r.Err, "no space left on device") {
			t.Errorf("stagefs %s >/dev/full: %v, want 74", args, r)
		}
		m.awaitFree("D")
	}
}

// TestCommandOutputLease: nor is a lease kept, or a session's lock, whose token
// nobody was told, also where nobody reads any more; but one that the client had is.
func TestCommandOutputLease(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	for _, tt := range []struct{ args, to string }{
		{"acquire --client c D", "/dev/full"},
		{"acquire --client c --json D", "/dev/full"},
		{"acquire --client-file F D", "/dev/full"},
		{"acquire --owner session D", "/dev/full"},
		{"acquire --client c D", "pipe"},
		{"acquire --owner session D", "pipe"},
	} {
		file := filepath.Join(tempDir(t), "client")
		r := runCmd(t, m.lostOutput(tt.to, strings.Fields(strings.Replace(tt.args, "F", file, 1))...))
		if r.Status != 74 {
			t.Errorf("stagefs %s, to %s: %v, want 74", tt.args, tt.to, r)
		}
		if !strings.Contains(r.Err, "locks:\n") || len(m.Locks()) != 0 {
			t.Errorf("stagefs %s, to %s: %v; want that no lock is left", tt.args, tt.to, r)
			m.Ctl("break D left over")
		}
	}
	m.wantStatus(0, "", "acquire", "--client", "c", m.At("D"))
	r := runCmd(t, m.lostOutput("/dev/full", "acquire", "--client", "c", "D"))
	if r.Status != 74 || len(m.Locks()) != 1 {
		t.Errorf("acquire by a client that had it: %v; %d locks, want 74, and its own", r, len(m.Locks()))
	}
	m.wantStatus(0, "", "release", "--client", "c", m.At("D"))

	// Nor does a session lose what it had.
	s := m.script(`"$0" acquire --owner session "$1"; "$0" acquire --owner session "$1" >/dev/full 2>&1; echo $?; "$0" check "$1"; echo $?`, m.At("D"))
	first := s.line()
	if lost, token, held := s.line(), s.line(), s.line(); lost != "74" || token != first || held != "0" {
		t.Errorf("acquire by a session that had it with token %s: status %s; then check: %s, status %s", first, lost, token, held)
	}
	s.Wait()
	m.awaitFree("D")
}

// TestCommandOutputClosed: who has closed the output wants none, as with /dev/null: no
// token goes anywhere else, and a lease is the client's, who has its ID.
func TestCommandOutputClosed(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	const script = `exec <&- >&-; "$0" "$@"`
	for _, args := range []string{"acquire --client c D", "acquire --client c --json D", "acquire --client-file F D"} {
		file := filepath.Join(tempDir(t), "client")
		cmd := exec.Command("/bin/sh", append([]string{"-c", script, stagefsBin()}, strings.Fields(strings.Replace(args, "F", file, 1))...)...)
		cmd.Dir = m.Path
		if r := runCmd(t, cmd); r.Status != 0 || r.Err != "" || len(m.Locks()) != 1 {
			t.Errorf("stagefs %s, output closed: %v; %d locks, want 1", args, r, len(m.Locks()))
		}
		who := []string{"--client", "c"}
		if strings.Contains(args, "F") {
			who = []string{"--client-file", file}
		}
		m.wantStatus(0, "", append(append([]string{"release"}, who...), m.At("D"))...)
		if names := tree(t, m.Dir); len(names) != 1 {
			t.Errorf("stagefs %s left %q", args, names)
		}
	}
	cmd := exec.Command("/bin/sh", "-c", script, stagefsBin(), "run", "--client", "c", m.At("D"), "--", "sh", "-c", "echo out; exit 7")
	if r := runCmd(t, cmd); r.Status != 7 || len(m.Locks()) != 0 {
		t.Errorf("stagefs run, output closed: %v; %d locks, want its status, and none", r, len(m.Locks()))
	}
}

// lostOutput is a run of the program in the root of the mount whose output goes to
// a file, or to a pipe that nobody reads. Its session outlives it, and tells of the
// locks then.
func (m *Mount) lostOutput(to string, args ...string) *exec.Cmd {
	m.t.Helper()
	const script = `"$0" "$@"; s=$?; echo "locks:$("$0" locks . | tail -n +2)" >&2; exit $s`
	cmd := exec.Command("/bin/sh", append([]string{"-c", script, stagefsBin()}, args...)...)
	cmd.Dir, cmd.SysProcAttr = m.Path, &syscall.SysProcAttr{Setsid: true}
	var w *os.File
	var err error
	if to == "pipe" {
		var r *os.File
		r, w, err = os.Pipe()
		mustDo(m.t, err)
		r.Close()
	} else {
		w, err = os.OpenFile(to, os.O_WRONLY, 0)
		mustDo(m.t, err)
	}
	m.t.Cleanup(func() { w.Close() })
	cmd.Stdout = w
	return cmd
}
