//go:build linux

package tests

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestControlHidden: the control directory can be used, is not listed, and its
// name and files are nobody's to change.
func TestControlHidden(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	mustDo(t, os.WriteFile(m.Back("D/file"), nil, 0o666))
	entries, err := os.ReadDir(m.Path)
	mustDo(t, err)
	for _, e := range entries {
		if e.Name() == ".stagefs" {
			t.Error("the root lists .stagefs")
		}
	}
	entries, err = os.ReadDir(m.control(""))
	mustDo(t, err)
	names := map[string]bool{}
	for _, e := range entries {
		names[e.Name()] = true
	}
	for want, mode := range map[string]string{
		"locks": "444", "locks.json": "444", "events": "444", "denials": "444", "metrics": "444", "version": "444", "quarantine": "444", "ctl": "666",
	} {
		if got := stranger(t).Get("stat", m.control(want)); !names[want] || !strings.HasPrefix(got, "mode=100"+mode+" ") {
			t.Errorf("%s in .stagefs (listed: %v): %s, want mode %s", want, names[want], got, mode)
		}
	}
	before := digest(t, m.Dir)
	for _, a := range []*Agent{agent(t), stranger(t)} {
		for _, call := range [][]string{
			{"mkdir", m.control("")},
			{"rmdir", m.control("")},
			{"rename", m.control(""), m.At("new")},
			{"rename", m.At("D"), m.control("")},
			{"rename", m.At("D"), m.control(""), "exchange"},
			{"creat", m.control("new"), "wronly,creat"},
			{"mkdir", m.control("new")},
			{"symlink", "x", m.control("new")},
			{"unlink", m.control("locks")},
			{"unlink", m.control("ctl")},
			{"rename", m.control("locks"), m.At("new")},
			{"link", m.control("locks"), m.At("new")},
			{"creat", m.control("locks"), "wronly"},
			{"creat", m.control("locks.json"), "wronly,trunc"},
			{"truncate", m.control("locks"), "0"},
			{"utimens", m.control("locks")},
			{"chmod", m.control("locks"), "0"},
			{"setxattr", m.control("locks"), "user.k", "v"},
		} {
			if got := a.Try(call...); got == "ok" {
				t.Errorf("%q = ok, want a refusal", call)
			}
		}
		a.want("EPERM", "link", m.At("D/file"), m.control("new"))
		for _, name := range []string{"locks", "locks.json", "denials", "metrics", "version"} {
			a.want("ok", "read", m.control(name))
		}
	}
	if after := digest(t, m.Dir); after != before {
		t.Errorf("refused, but changed:\n%s", diff(before, after))
	}
}

// TestControlNameInBacking: an entry of that name in the backing stays unseen
// and untouched; elsewhere than in the root the name is like any other.
func TestControlNameInBacking(t *testing.T) {
	dir := staticDir(t)
	mustDo(t, os.Mkdir(dir+"/.stagefs", 0o755))
	mustDo(t, os.WriteFile(dir+"/.stagefs/locks.json", []byte("from before"), 0o644))
	m := mountDir(t, dir, dir+".mnt")
	m.Listing()
	if b, _ := os.ReadFile(m.Back(".stagefs/locks.json")); string(b) != "from before" {
		t.Errorf("the backing's own file: %q", b)
	}
	a := agent(t)
	a.must("mkdir", m.At("D"))
	a.must("mkdir", m.At("D/.stagefs"))
	a.must("put", m.At("D/.stagefs/locks.json"), "mine", "creat")
	if got := a.Get("readdir", m.At("D")); got != ".stagefs" {
		t.Errorf("readdir of D = %q", got)
	}
}

// TestControlNameTaken: nor does a command reach what has the name below the mount, once
// something is in quarantine there.
func TestControlNameTaken(t *testing.T) {
	m := mount(t)
	m.wantStatus(3, "", "run", "--on-crash=quarantine", m.At("D"), "sh", "-c", `touch "$STAGEFS_LOCK/file"; exit 3`)
	all := m.quarantine()
	if len(all) != 1 {
		t.Fatalf("in quarantine: %+v, want one", all)
	}
	id, before := all[0].ID, digest(t, m.Back(".stagefs"))
	for _, dir := range []string{".stagefs", ".stagefs/quarantine", ".stagefs/quarantine/" + id, ".stagefs/new"} {
		for _, line := range []string{"acquire %s", "acquire %s client=c", "acquire %s wait=5s", "wait %s", "restore %s id=" + id} {
			line = fmt.Sprintf(line, dir)
			if got := m.Ctl(line); got != "ENOENT" {
				t.Errorf("%s: %s, want ENOENT", line, got)
			}
		}
	}
	for _, args := range []string{"acquire", "acquire --client c", "wait", "quarantine --restore " + id} {
		m.wantStatus(66, ".stagefs is a reserved name", append(strings.Fields(args), m.At(".stagefs"))...)
	}
	if after := digest(t, m.Back(".stagefs")); after != before {
		t.Errorf("changed by what was refused:\n%s", diff(before, after))
	}
	if rows := m.Locks(); len(rows) > 0 {
		t.Errorf("locked: %v", rows)
	}
	m.wantStatus(0, "", "quarantine", "--restore", id, m.Path)
	if _, err := os.Stat(m.Back("D/file")); err != nil {
		t.Errorf("restored: %v", err)
	}
}

// TestControlJSON: what is JSON there has names as they are, for people read it, too.
func TestControlJSON(t *testing.T) {
	const name = "a&b<c>"
	m := mount(t)
	agent(t).must("mkdir", m.At(name))
	agent(t).want("EBUSY", "creat", m.At(name+"/file"), "wronly,creat,excl")
	for _, file := range []string{"locks.json", "denials"} {
		if b, err := os.ReadFile(m.control(file)); err != nil || !bytes.Contains(b, []byte(name)) {
			t.Errorf("%s: %q, %v; want it to name %s", file, b, err, name)
		}
	}
}

// TestControlRelease: a holder releases its own lock, nobody else's (R6).
func TestControlRelease(t *testing.T) {
	m := mount(t)
	a, b := stranger(t), agent(t)
	ctl := m.control("ctl")
	put := func(line string) []string { return []string{"put", ctl, line, ""} }
	a.must("mkdir", m.At("D"))
	b.want("EPERM", put("release D\n")...)
	stranger(t).want("EPERM", put("release D\n")...)
	b.want("ENOENT", put("release E\n")...)
	m.wantOwner("D", a.Pid)
	a.Child().must(put("release D\n")...)
	m.wantFree("D")
	b.must("creat", m.At("D/new"), "wronly,creat")
	a.want("ENOENT", put("release D")...)

	openDir(t, m.Back("E"))
	a.must("creat", m.At("E/devserver"), "wronly,creat,excl")
	a.must(put("release E")...)
	m.wantFree("E")
	b.must("creat", m.At("E/devserver.lock"), "wronly,creat,excl")
	m.wantOwner("E", b.Pid)

	if r := runCmdAs(t, a, "release", m.At("E")); !strings.HasPrefix(r, "77 ") {
		t.Errorf("stagefs release of another's lock: %q, want status 77", r)
	}
	if r := runCmdAs(t, b, "release", m.At("E")); r != "0 " {
		t.Errorf("stagefs release by the holder's child: %q, want status 0", r)
	}
	m.wantFree("E")
}

// runCmdAs runs stagefs as a child of an agent: "STATUS OUTPUT".
func runCmdAs(t *testing.T, a *Agent, args ...string) string {
	t.Helper()
	return a.Get("sh", stagefsBin()+" '"+strings.Join(args, "' '")+"' 2>&1")
}

// TestControlBreak: root and who mounted end any lock; what its former owner
// still does there is refused like anyone's.
func TestControlBreak(t *testing.T) {
	m := mount(t)
	a, user, b := agent(t), stranger(t), agent(t)
	openDir(t, m.Back("E"))
	a.must("mkdir", m.At("D"))
	a.must("creat", m.At("E/devserver"), "wronly,creat,excl")
	user.want("EPERM", "put", m.control("ctl"), "break D because\n", "")
	for _, args := range [][]string{{"break", "--why", "impatient", m.At("D")}, {"mount", "--replace", m.Path}} {
		if r := runCmdAs(t, user, args...); !strings.HasPrefix(r, "77 ") || !strings.Contains(r, "only root and who mounted") || strings.Contains(r, "not permitted") {
			t.Errorf("stagefs %q by an ordinary user: %q, want status 77, and who may", args, r)
		}
	}
	m.wantOwner("D", a.Pid)
	b.want("ok", "put", m.control("ctl"), "break D it hangs since noon\n", "")
	m.wantFree("D")
	if r := runCmdAs(t, b, "break", m.At("E"), "--why", "it hangs"); r != "0 " {
		t.Errorf("stagefs break: %q, want status 0", r)
	}
	m.wantFree("E")
	b.must("creat", m.At("E/devserver"), "wronly,creat,excl")
	b.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	a.want("EBUSY", "creat", m.At("D/late"), "wronly,creat")
	a.want("EBUSY", "creat", m.At("E/late"), "wronly,creat")
	if log := m.Log(); !strings.Contains(log, "it hangs since noon") {
		t.Error("the log does not tell the reason")
	}
}

// TestControlBreakEnding: a lock that ends by itself while others on the directory are
// broken is no reason to leave the rest of them, or to say that there was none.
func TestControlBreakEnding(t *testing.T) {
	needInject(t)
	m := newMount(t, staticDir(t), filepath.Join(tempDir(t), "mnt"))
	stop, goesOn := make(chan struct{}), make(chan struct{})
	m.inject(&fault{call: unix.SYS_UNLINKAT, until: func(a asked) <-chan struct{} {
		if a.path(1) != "devserver" {
			return nil
		}
		close(stop)
		return goesOn
	}})
	m.serve()
	openDir(t, m.Back("D"))
	owner := agent(t)
	owner.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	second := owner.Child()
	second.mustCommand(m, "acquire D")
	third := second.Child()
	third.mustCommand(m, "acquire D")
	broken := agent(t).Start("put", m.control("ctl"), "break D enough\n", "")
	<-stop
	second.Kill()
	eventually(t, "the second lock ends", func() bool { return m.metric("locks") == 2 })
	close(goesOn)
	if status := broken(); status != "ok" {
		t.Errorf("break = %s, want ok", status)
	}
	m.wantFree("D")
}

// TestControlBadLines: each bad line gets a clear errno and changes nothing.
func TestControlBadLines(t *testing.T) {
	m := mount(t)
	a := agent(t)
	a.must("mkdir", m.At("D"))
	for line, want := range map[string]string{
		"D":                                      "EINVAL",
		"release":                                "EINVAL",
		"release ":                               "EINVAL",
		"frobnicate D":                           "EINVAL",
		"release D and more":                     "EINVAL",
		"release \x00":                           "EINVAL",
		"release D\x00":                          "EINVAL",
		"release \x1b[2J":                        "EINVAL",
		"break D \x1b[2J":                        "EINVAL",
		"break D":                                "EINVAL",
		"break D ":                               "EINVAL",
		"break D\tbecause":                       "EINVAL",
		"release /etc":                           "EINVAL",
		"release ../x":                           "EINVAL",
		"release D/../..":                        "EINVAL",
		"release \"unterminated":                 "EINVAL",
		"release \"a\\qb\"":                      "EINVAL",
		"release nothing":                        "ENOENT",
		"release D/sub":                          "ENOENT",
		"break .stagefs":                         "ENOENT|EINVAL",
		"break .":                                "ENOENT|EINVAL",
		"release " + longName(33<<10):            "E2BIG",
		longName(10 << 20):                       "E2BIG",
		"release D\nrelease " + longName(33<<10): "E2BIG|EPERM",
	} {
		if got := m.Ctl(line); !oneOf(got, want) {
			t.Errorf("ctl %.40q (%d bytes) = %s, want %s", line, len(line), got, want)
		}
	}
	m.wantOwner("D", a.Pid)
	if got := m.Ctl("break D at last"); got != "ok" {
		t.Errorf("a good line after the bad ones = %s", got)
	}
}

func longName(n int) string { return strings.Repeat("x", n) }

// TestControlXattrs: extended attributes on any path tell its governing lock,
// and can't be set.
func TestControlXattrs(t *testing.T) {
	m := mount(t)
	a, b := agent(t), stranger(t)
	openDir(t, m.Back("free"))
	a.must("mkdir", m.At("D"))
	a.must("mkdir", m.At("D/sub"))
	a.must("put", m.At("D/sub/file"), "x", "creat")
	row := m.Locks()["D"]
	for _, path := range []string{"D", "D/sub", "D/sub/file"} {
		for name, want := range map[string]string{
			"owner": itoa(row.Pid) + " " + itoa(int(row.Start)), "kind": "implicit", "token": itoa(int(row.Token)),
		} {
			if got := b.Get("getxattr", m.At(path), "user.stagefs."+name); got != want {
				t.Errorf("user.stagefs.%s of %s = %q, want %q", name, path, got, want)
			}
		}
		since, err := time.Parse(time.RFC3339, b.Get("getxattr", m.At(path), "user.stagefs.since"))
		if err != nil || !since.Truncate(time.Second).Equal(row.Since.Truncate(time.Second)) {
			t.Errorf("user.stagefs.since of %s = %v, %v, want %v", path, since, err, row.Since)
		}
		if n, err := unix.Getxattr(m.At(path), "user.stagefs.owner", nil); err != nil || n == 0 {
			t.Errorf("size of user.stagefs.owner = %d, %v", n, err)
		}
	}
	for _, path := range []string{"free", ""} {
		b.want("ENODATA", "getxattr", m.At(path), "user.stagefs.owner")
	}
	b.want("ENODATA", "getxattr", m.At("D"), "user.stagefs.nonsense")
	for _, call := range [][]string{{"setxattr", m.At("D"), "user.stagefs.owner", "1 1"}, {"removexattr", m.At("D"), "user.stagefs.owner"}} {
		if got := a.Try(call...); got == "ok" {
			t.Errorf("%q = ok, want a refusal", call)
		}
	}
}

// TestControlThreads: the threads of one process, which take, ask for and release the
// same lock at once, hear of no other process, nor that the daemon would be ending.
func TestControlThreads(t *testing.T) {
	need(t, debianPython)
	m := mount(t)
	openDir(t, m.Back("D"))
	r := run(t, debianPython, "-c", `
import errno, os, sys, threading
odd = set()
def ask(line):
    fd = os.open(sys.argv[1], os.O_RDWR)
    try:
        os.write(fd, line)
    except OSError as e:
        if e.errno != errno.ENOENT:
            said = os.pread(fd, 65536, 0).decode()
            if e.errno != errno.EBUSY or "shutting down" in said or "another process" in said:
                odd.add(said)
    os.close(fd)
for _ in range(6):
    lines = [b"check D\n", b"acquire D\n", b"release D\n", b"acquire D wait=60\n"] * 150
    threads = [threading.Thread(target=ask, args=(l,)) for l in lines]
    for t in threads: t.start()
    for t in threads: t.join()
print(*odd, sep="")
`, m.control("ctl"))
	if r.Status != 0 || strings.TrimSpace(r.Out) != "" {
		t.Errorf("answers to the threads of one process: %v", r)
	}
}
