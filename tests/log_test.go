//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// background serves a new static directory with -d, and ends that at the end of
// the test.
func background(t *testing.T, opts ...string) (m *Mount, r Result) {
	t.Helper()
	need(t, "root", "fuse")
	dir := staticDir(t)
	m = newMount(t, dir, dir)
	return m, m.startBackground(opts...)
}

func (m *Mount) startBackground(opts ...string) Result {
	m.t.Helper()
	args := append([]string{"mount", "-d", "--state-dir", m.State}, opts...)
	r := run(m.t, stagefsBin(), append(args, m.Dir)...)
	if r.Status != 0 {
		m.t.Fatal(r)
	}
	m.t.Cleanup(func() {
		if mountedAt(m.Path) {
			if r := run(m.t, stagefsBin(), "umount", m.Path); r.Status != 0 {
				m.t.Error(r)
			}
		}
	})
	return r
}

// TestLogJournal: in systemd's journal, what is said and logged has its priority.
func TestLogJournal(t *testing.T) {
	need(t, "root", "fuse")
	dir := staticDir(t)
	m := newMount(t, dir, dir)
	mustDo(t, os.WriteFile(m.log, nil, 0o644))
	var st syscall.Stat_t
	mustDo(t, syscall.Stat(m.log, &st))
	t.Setenv("JOURNAL_STREAM", fmt.Sprintf("%d:%d", st.Dev, st.Ino))
	m.serve()
	a := agent(t)
	a.must("mkdir", m.At("D"))
	m.wantStatus(0, "", "break", "--why", "it hangs", m.At("D"))
	again := newMount(t, dir, dir)
	again.log = m.log
	again.start(nil)
	eventually(t, "a second daemon is refused", again.dead)
	for _, want := range []string{`(?m)^<6>time=\S+ level=INFO msg=serving `, `(?m)^<6>stagefs: serving `, `(?m)^<4>time=\S+ level=WARN msg="lock broken" `, `(?m)^<3>stagefs: .* is served already`} {
		if !regexp.MustCompile(want).MatchString(m.Log()) {
			t.Errorf("no line is like %s", want)
		}
	}
	if bad := regexp.MustCompile(`(?m)^[^<].*`).FindString(m.Log()); bad != "" {
		t.Errorf("without a priority: %s", bad)
	}
	if r := run(t, stagefsBin(), "locks", m.At("missing", "x")); strings.Contains(r.Err, "<") {
		t.Errorf("in no journal: %v", r)
	}
}

// TestLog: every line of a daemon's log has a time, whoever wrote it: the daemon,
// its supervisor, or the next program. It tells which daemon served with what,
// and who broke or released a lock, or let its lease run out (R6).
func TestLog(t *testing.T) {
	file := filepath.Join(tempDir(t), "log")
	m, _ := background(t, "--supervise", "--log", file, "--depth", "2")
	m.log = file
	openDir(t, m.At("board", "v1"))
	first := m.daemon()
	m.wantLog("serving", "dir="+m.Dir, "pid="+itoa(first), "version=", "transport=", "--depth=2")
	a := agent(t)
	a.must("put", m.At("board", "v1", "devserver"), "", "creat,excl")
	breaker := startCmd(t, exec.Command(stagefsBin(), "break", "--why", "it hangs", m.At("board", "v1")))
	if r := breaker.Wait(); r.Status != 0 {
		t.Fatal(r)
	}
	m.wantLog("lock broken", "pid="+itoa(a.Pid), "by="+itoa(breaker.Pid()), "uid=0", "it hangs")
	token := a.mustCommand(m, "acquire board/v1").Token
	a.mustCommand(m, "release board/v1")
	m.wantLog("lock released", "pid="+itoa(a.Pid), "by="+itoa(a.Pid), "token="+itoa(int(token)), "reason=released")
	token = a.mustCommand(m, "acquire board/v1 client=x ttl=10ms").Token
	m.wantLog("lease expired", "client=x", "token="+itoa(int(token)))
	mustDo(t, syscall.Kill(first, syscall.SIGKILL))
	m.wantLog("the daemon ended: signal: killed; starting another one")
	m.awaitNext(first)
	m.wantLog("serving", "pid="+itoa(m.daemon()))
	m.wantLog("(pid " + itoa(m.daemon()) + "); unmount with: stagefs umount " + m.Path) // it has no terminal
	m.replace()
	m.wantLog("goes on", "pid="+itoa(m.daemon()), "version=")
	if r := run(t, stagefsBin(), "umount", m.Path); r.Status != 0 {
		t.Fatal(r)
	}
	m.wantLog(m.Path + " was unmounted")
	timed := regexp.MustCompile(`^time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\S* level=[A-Z]+ msg=`)
	for line := range strings.Lines(m.Log()) {
		if !timed.MatchString(line) {
			t.Errorf("a line of the log without a time: %q", line)
		}
	}
}

// wantLog waits for a line of the log that holds all words.
func (m *Mount) wantLog(words ...string) {
	m.t.Helper()
	eventually(m.t, "a line of the log with "+strings.Join(words, ", "), func() bool {
		return slices.ContainsFunc(strings.Split(m.Log(), "\n"), func(line string) bool {
			return !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(line, w) })
		})
	})
}

// TestFaultLogInside: a log file, a state directory or a static directory that the
// mount would cover is refused, however it is named: no daemon could be started again.
func TestFaultLogInside(t *testing.T) {
	need(t, "root", "fuse")
	base := tempDir(t)
	at := func(name string) string { return filepath.Join(base, name) }
	for _, dir := range []string{"dir/sub", "mnt", "cwd"} {
		mustDo(t, os.MkdirAll(at(dir), 0o755))
	}
	for name, to := range map[string]string{
		"link": at("dir/log"), "chain": "link", "up": "cwd/../dir/log", "parent": at("dir/sub"), "same": at("dir"),
	} {
		mustDo(t, os.Symlink(to, at(name)))
	}
	state := "--state-dir=" + at("state")
	for _, exists := range []bool{false, true} {
		if exists {
			mustDo(t, os.WriteFile(at("dir/log"), nil, 0o644))
		}
		for _, log := range []string{at("dir/log"), at("dir/sub/new"), at("dir/none/new"), at("link"), at("chain"), at("up"), at("parent/new"), at("cwd/../dir/log"), "." + at("dir/log")} {
			wantRefusal(t, "64", []string{"log file", at("dir"), "--log"}, "mount", state, "--log", log, at("dir"))
		}
		wantRefusal(t, "64", []string{"log file", at("dir"), "--log"}, "mount", state, "-d", "--supervise", "--log", at("dir/log"), at("same"))
		wantRefusal(t, "64", []string{"log file", at("dir"), "--log"}, "mount", state, "--log", at("dir/log"), at("dir"), at("mnt"))
		wantRefusal(t, "64", []string{"log file", at("mnt"), "--log"}, "mount", state, "--log", at("mnt/log"), at("dir"), at("mnt"))
	}
	wantRefusal(t, "64", []string{"state directory", at("mnt"), "--state-dir"}, "mount", "--state-dir", at("mnt/state"), at("dir"), at("mnt"))
	wantRefusal(t, "64", []string{at("dir/sub"), "mountpoint"}, "mount", state, at("dir/sub"), at("dir"))
	m := newMount(t, at("dir"), at("dir"))
	m.startBackground("--log", at("dir.log"))
	m.log = at("dir.log")
	m.wantLog("serving")
}

// TestLogQuiet: in the background, without a log, the terminal hears what is
// wrong, and not of each lock that goes on.
func TestLogQuiet(t *testing.T) {
	m, _ := background(t)
	a := agent(t)
	a.must("mkdir", m.At("D"))
	pid := m.daemon()
	mustDo(t, syscall.Kill(pid, syscall.SIGKILL))
	awaitEnd(t, "the daemon is dead", pid)
	r := m.startBackground()
	if strings.Contains(r.Err, "restored") || strings.Contains(r.Err, "level=INFO") {
		t.Errorf("mount -d prints its log: %v", r)
	}
	m.wantOwner("D", a.Pid)
}

// TestLogDebug: what is only traced is on no level that warns.
func TestLogDebug(t *testing.T) {
	m := mount(t, "--debug", "--transport", "threads")
	if _, err := os.ReadDir(m.Path); err != nil {
		t.Fatal(err)
	}
	m.wantLog("level=DEBUG", "rx ", "OPENDIR")
	for line := range strings.Lines(m.Log()) {
		if strings.Contains(line, "level=WARN") && (strings.Contains(line, `"rx `) || strings.Contains(line, `"tx `)) {
			t.Fatalf("a trace is a warning: %s", line)
		}
	}
}

// TestLogBurst: the end of an owner with many locks is told of in a bounded number
// of lines.
func TestLogBurst(t *testing.T) {
	const locks, alone = 250, 100
	file := filepath.Join(tempDir(t), "log")
	m, _ := background(t, "--log", file, "--on-crash", "destroy")
	m.log = file
	a := agent(t)
	for i := range locks {
		a.must("mkdir", m.At("D"+itoa(i)))
	}
	a.Kill()
	m.wantLog("content cleared", "more="+itoa(locks-alone))
	if n := strings.Count(m.Log(), "content cleared"); n != alone+1 {
		t.Errorf("%d lines tell what became of %d directories, want %d", n, locks, alone+1)
	}
	if left, _ := os.ReadDir(m.Dir); len(left) > 0 {
		t.Errorf("%d directories are left", len(left))
	}
}
