//go:build linux

package tests

import (
	"os"
	"strings"
	"testing"
)

// TestRunRemoved: where nothing can be made, because the static directory was
// removed, run says so, and does not try for ever. Nor does wait say that all is well.
func TestRunRemoved(t *testing.T) {
	m := mount(t)
	want := func(status int, says string, args ...string) {
		t.Helper()
		r := run(t, "timeout", append([]string{"20", stagefsBin()}, args...)...)
		if r.Status != status || !strings.Contains(r.Err, says) || strings.Count(r.Err, "\n") != 1 {
			t.Errorf("stagefs %q: status %d, %.300q; want status %d, and %q said", args, r.Status, r.Err, status, says)
		}
	}
	openDir(t, m.Back("seen"))
	want(0, "run could make", "wait", m.At("a/b"))
	m.wantStatus(0, "", "wait", m.At("seen"))
	mustDo(t, os.RemoveAll(m.Dir))
	want(66, "was removed", "wait", m.At("a/b"))
	want(66, "was removed", "wait", m.At("seen"))
	for _, args := range [][]string{
		{"-n", m.At("c")}, {"-n", m.At("a/b")}, {"-w", "1", m.At("a/b/c")}, {"--create-once", m.At("a")}, {m.At("a")},
	} {
		want(66, "was removed", append(append([]string{"run"}, args...), "true")...)
	}
}

// TestRunLockName: what is missing is not made under a lock file's name, which would
// lock the directory above it (A3), whoever has that. One that is there is a
// directory like any other: it alone is locked, and released.
func TestRunLockName(t *testing.T) {
	m := mount(t, "--lock-name=devserver", "--lock-name=*.lock")
	openDir(t, m.Back("D"))
	refused := func(a *Agent) {
		t.Helper()
		for _, args := range []string{
			"run D/devserver", "run -n D/devserver/x", "run -n -s D/x.lock", "run --create-once D/devserver", "run -n D/sub/devserver", "acquire -n D/devserver",
		} {
			i := strings.LastIndex(args, " ")
			cmd, dir := args[:i], args[i+1:]
			line := "cd " + m.Path + " && timeout 20 " + stagefsBin() + " " + cmd + " " + dir
			if cmd[0] == 'r' {
				line += " true"
			}
			got := a.Get("sh", line+" 2>&1")
			if !strings.HasPrefix(got, "64 ") || !strings.Contains(got, "is a lock file's name here") || !strings.Contains(got, "name that directory itself") {
				t.Errorf("%s: %s", args, got)
			}
		}
	}
	a, other := agent(t), agent(t)
	refused(a)
	if rows := m.Listing().Locks; len(rows) > 0 {
		t.Errorf("left over: %+v", rows)
	}
	a.must("mkdir", m.At("D/own"))
	refused(other)
	a.must("rmdir", m.At("D/own"))
	m.wantFree("D/own")
	if left, err := os.ReadDir(m.Back("D")); err != nil || len(left) > 0 {
		t.Errorf("made were %v, %v", left, err)
	}

	for _, dir := range []string{"D/devserver", "D/y.lock"} {
		openDir(t, m.Back(dir))
		for _, line := range []string{"run -n " + m.At(dir) + " touch " + m.At(dir, "f"), "run -n " + m.At(dir, "sub") + " true"} {
			if got := a.Get("sh", stagefsBin()+" "+line+" 2>&1"); got != "0 " {
				t.Errorf("%s: %s", line, got)
			}
		}
		if _, err := os.Stat(m.Back(dir, "f")); err != nil {
			t.Error(err)
		}
		if rows := m.Listing().Locks; len(rows) > 0 {
			t.Errorf("left over: %+v", rows)
		}
		other.must("mkdir", m.At("D/other"))
		other.must("rmdir", m.At("D/other"))
	}
	m.wantStatus(0, "", "run", "-n", m.At("devserver"), "true") // none in the root
}

// TestRunShared: nothing stays locked exclusively that `run -s` has made, while
// whoever called it lives on.
func TestRunShared(t *testing.T) {
	m := mount(t)
	a, stranger := agent(t), agent(t)
	succeeds := func(who *Agent, command string) {
		t.Helper()
		if got := who.Get("sh", stagefsBin()+" "+command+" 2>&1"); got[0] != '0' {
			t.Errorf("stagefs %s: %s", command, got)
		}
	}
	for _, line := range []string{m.At("new"), m.At("deep/er/new"), "--create-once " + m.At("once")} {
		succeeds(a, "run -s "+line+" true")
	}
	if rows := m.Listing().Locks; len(rows) > 0 {
		t.Errorf("locks: %+v, want none", rows)
	}
	for _, dir := range []string{"new", "deep/er/new", "once"} {
		succeeds(stranger, "run -n -s "+m.At(dir)+" true")
		succeeds(stranger, "run -n "+m.At(dir)+" true")
	}

	// While it runs, it is shared.
	b, p := m.runAgent("-s", m.At("while"))
	if rows := m.Listing().Locks; len(rows) != 1 || rows[0].Kind != "shared" {
		t.Errorf("locks: %+v, want one shared", rows)
	}
	succeeds(stranger, "run -n -s "+m.At("while")+" true")
	b.want("EBUSY", "creat", m.At("while/f"), "wronly,creat")
	b.Exit(0)
	p.Wait()
	m.wantFree("while")
}
