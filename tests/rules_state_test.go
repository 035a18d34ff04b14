//go:build linux

package tests

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestTokens: a token is greater than all that were given before, by earlier
// daemons too, however they ended.
func TestTokens(t *testing.T) {
	m := mount(t)
	last := uint64(0)
	for _, end := range []string{"umount", "kill", "SIGTERM", ""} {
		a := agent(t)
		for range 3 {
			a.must("mkdir", m.At("D"))
			token := m.Locks()["D"].Token
			if token <= last {
				t.Errorf("token %d after %d", token, last)
			}
			last = token
			a.must("rmdir", m.At("D"))
		}
		switch end {
		case "umount":
			run(t, stagefsBin(), "umount", m.Path)
		case "kill":
			m.kill()
			unix.Unmount(m.Path, unix.MNT_DETACH)
		case "SIGTERM":
			mustDo(t, m.cmd.Process.Signal(unix.SIGTERM))
		case "":
			return
		}
		eventually(t, "the daemon ends", m.dead)
		m.start(nil)
		m.awaitReady()
	}
}

// TestS3: a lock file from before the mount is an orphan: listed, holding
// nothing, in the way of who wants to make it, but not of who locks it, and removed
// by break.
func TestS3(t *testing.T) {
	dir := staticDir(t)
	for _, sub := range []string{"D", "E", "F"} {
		openDir(t, dir+"/"+sub)
	}
	mustDo(t, os.WriteFile(dir+"/D/devserver", nil, 0o666))
	mustDo(t, os.WriteFile(dir+"/devserver", nil, 0o666)) // which is none: the root is never locked
	mustDo(t, os.Symlink("gone", dir+"/E/devserver.lock"))
	mustDo(t, os.Mkdir(dir+"/F/devserver.lock", 0o777))
	m := mountDir(t, dir, dir+".mnt")
	a := agent(t)
	a.must("readdir", m.At("D"))
	for _, path := range []string{"D/devserver", "E/devserver.lock", "F/devserver.lock"} {
		a.must("stat", m.At(path))
	}
	orphans := map[string]bool{}
	for _, o := range m.Listing().Orphans {
		orphans[o.Path] = true
	}
	for _, path := range []string{"D/devserver", "E/devserver.lock", "F/devserver.lock"} {
		if !orphans[path] {
			t.Errorf("%s is not listed: %v", path, orphans)
		}
		m.wantLine(path + " +orphan *$")
	}
	if orphans["devserver"] {
		t.Error("a file in the root is listed")
	}
	a.want("EEXIST", "creat", m.At("D/devserver"), "wronly,creat,excl")
	a.must("creat", m.At("D/file"), "wronly,creat")
	m.wantFree("D")
	l := locker(t)
	l.must("open", "x", m.At("D/devserver"), "rdwr")
	for _, call := range lockCalls() {
		l.must(call.tryExclusive("x")...)
		m.wantOwner("D", l.Pid)
		l.must(call.unlock("x")...)
		m.wantFree("D")
	}
	l.must("close", "x")
	for _, sub := range []string{"D", "E", "F"} {
		if r := run(t, stagefsBin(), "break", "--why", "orphan", m.At(sub)); r.Status != 0 {
			t.Errorf("stagefs break %s: %v", sub, r)
		}
		entries, _ := os.ReadDir(m.Back(sub))
		for _, e := range entries {
			if strings.HasPrefix(e.Name(), "devserver") {
				t.Errorf("%s/%s is left after the break", sub, e.Name())
			}
		}
		a.must("creat", m.At(sub, "devserver"), "wronly,creat,excl")
		m.wantOwner(sub, a.Pid)
	}
	if left := m.Listing().Orphans; len(left) != 0 {
		t.Errorf("orphans left: %v", left)
	}
}

// awaitOrphans waits until these are listed, and no others.
func (m *Mount) awaitOrphans(paths ...string) {
	m.t.Helper()
	eventually(m.t, "the orphans are "+strings.Join(paths, ", "), func() bool {
		var listed []string
		for _, o := range m.Listing().Orphans {
			listed = append(listed, o.Path)
		}
		return slices.Equal(listed, paths)
	})
}

// TestS3Renamed: an orphan is listed, and can be removed by break, where it is after a rename
// of the directory that it is in, or of one above, or an exchange of two.
func TestS3Renamed(t *testing.T) {
	dir := staticDir(t)
	for _, sub := range []string{"board", "board/v1", "v2"} {
		openDir(t, dir+"/"+sub)
	}
	openFile(t, dir+"/board/v1/devserver", "")
	openFile(t, dir+"/v2/devserver", "")
	m := mountDir(t, dir, dir+".mnt")
	m.awaitOrphans("board/v1/devserver", "v2/devserver")
	a := agent(t)
	a.must("rename", m.At("board"), m.At("other"))
	m.awaitOrphans("other/v1/devserver", "v2/devserver")
	a.must("rename", m.At("v2"), m.At("moved"))
	a.must("rename", m.At("moved"), m.At("other"), "exchange")
	m.awaitOrphans("moved/v1/devserver", "other/devserver")
	m.replace()
	m.awaitOrphans("moved/v1/devserver", "other/devserver")
	for _, sub := range []string{"moved/v1", "other"} {
		m.wantStatus(0, "", "break", "--why", "orphan", m.At(sub))
		a.must("creat", m.At(sub, "devserver"), "wronly,creat,excl")
	}
	m.awaitOrphans()
}

// TestS3Quarantined: what is in quarantine is no orphan to a daemon that looks for some, but
// one when it is back.
func TestS3Quarantined(t *testing.T) {
	m := mount(t, "--on-crash", "quarantine")
	a := agent(t)
	a.must("mkdir", m.At("D"))
	a.must("mkdir", m.At("D/sub"))
	a.must("put", m.At("D/file"), "x", "creat")
	a.must("open", "l", m.At("D/sub/devserver"), "rdwr,creat")
	a.must("flock", "l")
	a.must("flock", "l", "un")
	a.Kill()
	m.awaitFree("D")
	openDir(t, m.Back("E"))
	m.unmounted(func() { openFile(t, m.Back("E/devserver"), "") }, "--on-crash", "quarantine")
	m.awaitOrphans("E/devserver")
	m.wantStatus(0, "", "quarantine", "--restore", m.quarantine()[0].ID, m.At("D"))
	m.awaitOrphans("D/sub/devserver", "E/devserver")
}

// TestS3Untyped: an orphan is found in a file system that has no types in its directories.
func TestS3Untyped(t *testing.T) {
	m := newImage(t, 64, "-O", "^filetype").mount()
	openDir(t, m.Back("D"))
	m.unmounted(func() { openFile(t, m.Back("D/devserver"), "") })
	m.awaitOrphans("D/devserver")
}

// TestS1Place: where the state is, if nobody says so.
func TestS1Place(t *testing.T) {
	need(t, "root", "fuse", "unshare", "fusermount3")
	// In a mount namespace of its own, for /var/lib is the machine's.
	serve := func(become, env, where string) {
		t.Helper()
		dir, home := staticDir(t), staticDir(t)
		script := `mount -t tmpfs -o mode=755 state /var/lib && chown "$3" "$1" && cd / &&
			` + become + ` env -u XDG_STATE_HOME HOME="$2" ` + env + ` "$0" mount -d "$1" 2>/dev/null
			` + become + ` mkdir "$1/D"; find ` + where + ` -type f | grep -c . ; ` + become + ` "$0" umount "$1"; ls -A "$1"`
		cmd := exec.Command("unshare", "--mount", "--propagation=private", "sh", "-c", script, stagefsBin(), dir, home, map[bool]string{true: "0", false: "65534"}[become == ""])
		if r := runCmd(t, cmd); r.Status != 0 || strings.HasPrefix(r.Out, "0") || !strings.HasSuffix(r.Out, "\nD\n") {
			t.Errorf("state in %s: %v", where, r)
		}
	}
	const user = "setpriv --reuid=65534 --regid=65534 --clear-groups"
	serve("", "", "/var/lib/stagefs")
	serve(user, `XDG_STATE_HOME="$2/xdg"`, `"$2/xdg/stagefs"`)
	serve(user, "", `"$2/.local/state/stagefs"`)
}

// TestMetrics: what is counted adds up, in Prometheus' text format.
func TestMetrics(t *testing.T) {
	m := mount(t)
	a, b := agent(t), agent(t)
	openDir(t, m.Back("E"))
	a.must("mkdir", m.At("D"))
	a.must("creat", m.At("E/devserver"), "wronly,creat,excl")
	b.want("EBUSY", "mkdir", m.At("D/x"))
	b.want("EEXIST", "mkdir", m.At("E/devserver.lock"))
	a.must("unlink", m.At("E/devserver"))
	for name, want := range map[string]int{"locks": 1, "acquisitions_total": 2, "releases_total": 1, "denials_total": 2, "handovers_total": 0} {
		if got := m.metric(name); got != want {
			t.Errorf("stagefs_%s = %d, want %d", name, got, want)
		}
	}
	got := b.Start("ctl", m.control("ctl"), "acquire D wait=forever")
	eventually(t, "a waiter is counted", func() bool { return m.metric("waiters") == 1 })
	a.mustCommand(m, "release D")
	if s := got(); s != "ok" {
		t.Errorf("the waiter gets %s, want ok", s)
	}
	if n := m.metric("waiters"); n != 0 {
		t.Errorf("stagefs_waiters = %d, want 0", n)
	}
	child := a.Child()
	child.must("mkdir", m.At("H"))
	child.Exit(0)
	eventually(t, "a hand-over is counted", func() bool { return m.metric("handovers_total") == 1 })
}

// metric is the sum of a metric over all its labels.
func (m *Mount) metric(name string) int {
	m.t.Helper()
	text, err := os.ReadFile(m.control("metrics"))
	mustDo(m.t, err)
	sum, declared := 0, false
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) == 4 && f[1] == "TYPE" && f[2] == "stagefs_"+name {
			declared = true
		}
		if base, _, _ := strings.Cut(f[0], "{"); base == "stagefs_"+name {
			sum += atoi(f[len(f)-1])
		}
	}
	if !declared {
		m.t.Errorf("metrics have no TYPE of stagefs_%s", name)
	}
	return sum
}
