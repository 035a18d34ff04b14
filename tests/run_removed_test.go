//go:build linux

package tests

import (
	"os"
	"strings"
	"testing"
)

// TestRunRemoved: where nothing can be made, because the static directory was
// removed, run says so, and does not try for ever; nor where the name is a lock
// file's and somebody else has the directory (A8).
func TestRunRemoved(t *testing.T) {
	m := mount(t)
	want := func(status int, says string, args ...string) {
		t.Helper()
		r := run(t, "timeout", append([]string{"20", stagefsBin(), "run"}, args...)...)
		if r.Status != status || !strings.Contains(r.Err, says) || strings.Count(r.Err, "\n") != 1 {
			t.Errorf("stagefs run %q: status %d, %.300q; want status %d, and %q said", args, r.Status, r.Err, status, says)
		}
	}
	a := agent(t)
	a.must("mkdir", m.At("D"))
	for _, dir := range []string{"D/devserver", "D/devserver/x"} {
		want(75, "is held by process "+itoa(a.Pid), "-n", m.At(dir), "true")
		want(75, "is held by process "+itoa(a.Pid), "-w", "0.5", m.At(dir), "true")
	}
	a.Exit(1)
	m.wantFree("D")

	mustDo(t, os.RemoveAll(m.Dir))
	for _, args := range [][]string{
		{"-n", m.At("c")}, {"-n", m.At("a/b")}, {"-w", "1", m.At("a/b/c")}, {"--create-once", m.At("a")}, {m.At("a")},
	} {
		want(66, "was removed", append(args, "true")...)
	}
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
