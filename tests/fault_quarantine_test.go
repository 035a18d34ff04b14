//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// aside has an owner die in a new directory, so that what it made is put in
// quarantine as 1: the number of the state's first token.
func aside(t *testing.T, m *Mount, dir string) {
	t.Helper()
	a := agent(t)
	a.must("mkdir", m.At(dir))
	a.must("put", m.At(dir, "f"), "valuable", "wronly,creat")
	if token := m.Locks()[dir].Token; token != 1 {
		t.Fatalf("token %d, want the first one", token)
	}
	a.Kill()
	m.awaitFree(dir)
	wantAside(t, m, dir)
}

// wantAside expects that, and nothing else, in quarantine.
func wantAside(t *testing.T, m *Mount, dir string) {
	t.Helper()
	if all := m.quarantine(); len(all) != 1 || all[0].ID != "1" || string(all[0].Dir) != dir {
		t.Errorf("quarantine: %+v, want 1, of %s", all, dir)
	}
	wantTree(t, m.Back(".stagefs", "quarantine", "1", "content"), []string{"f=valuable"})
}

// at tells whether an argument is a descriptor of a file of the backing.
func (a asked) at(arg int, path string) bool {
	at, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", a.pid, a.args[arg]))
	return at == path
}

// TestFaultQuarantineStart: an error in a look at what is in quarantine when a
// daemon starts costs nothing of it (R7).
func TestFaultQuarantineStart(t *testing.T) {
	needInject(t)
	for name, fault := range map[string]func(m *Mount) *fault{
		"statx of the content": func(*Mount) *fault {
			return &fault{call: unix.SYS_STATX, is: func(a asked) bool { return a.path(1) == "content" }, errno: unix.EIO, times: 1}
		},
		"open": func(*Mount) *fault {
			return &fault{call: unix.SYS_OPENAT, is: func(a asked) bool { return a.path(1) == "1" }, errno: unix.EIO, times: 1}
		},
		"no descriptor": func(*Mount) *fault {
			return &fault{call: unix.SYS_OPENAT, is: func(a asked) bool { return a.path(1) == "1" }, errno: unix.EMFILE, times: 1}
		},
		"read": func(m *Mount) *fault {
			return &fault{call: unix.SYS_GETDENTS64, is: func(a asked) bool { return a.at(0, m.Back(".stagefs/quarantine/1")) }, errno: unix.EIO, times: 1}
		},
		"read all": func(m *Mount) *fault {
			return &fault{call: unix.SYS_GETDENTS64, is: func(a asked) bool { return a.at(0, m.Back(".stagefs/quarantine")) }, errno: unix.EIO, times: 1}
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := mount(t, "--on-crash", "quarantine")
			aside(t, m, "D")
			failing := m.inject(fault(m))
			m.restart(nil, "--on-crash", "quarantine")
			failed := failing.did()[0] == 1
			if got := strings.Contains(m.Log(), "cannot look at all that is in quarantine"); got != failed {
				t.Errorf("the log tells of an error: %v, want %v", got, failed)
			}
			m.quarantine() // may be what fails now
			wantAside(t, m, "D")
			if failing.did()[0] == 0 && name != "statx of the content" {
				t.Error("nothing has failed")
			}
			if r := run(t, stagefsBin(), "quarantine", "--restore", "1", m.Path); r.Status != 0 {
				t.Errorf("restore: %v", r)
			}
			wantTree(t, m.Back("D"), []string{"f=valuable"})
		})
	}
}

// TestFaultQuarantineList: what cannot be looked at is listed all the same, so
// that it can be restored or deleted.
func TestFaultQuarantineList(t *testing.T) {
	needInject(t)
	m := mount(t, "--on-crash", "quarantine")
	aside(t, m, "D")
	m.inject(&fault{call: unix.SYS_STATX, is: func(a asked) bool { return a.path(1) == "content" }, errno: unix.EIO, times: 1})
	m.restart(nil, "--on-crash", "quarantine")
	wantAside(t, m, "D")
}

// stopClearing has content be put aside only when goesOn is closed, once that is under way.
func (m *Mount) stopClearing() (clearing, goesOn chan struct{}) {
	clearing, goesOn = make(chan struct{}), make(chan struct{})
	var first atomic.Bool
	m.inject(&fault{call: unix.SYS_MKDIRAT, until: func(a asked) <-chan struct{} {
		if a.path(1) != "1" || first.Swap(true) {
			return nil
		}
		close(clearing)
		return goesOn
	}})
	return clearing, goesOn
}

// TestFaultQuarantineReplace: an upgrade while a crashed owner's content is put aside, which
// takes long, says why it cannot be, and can be as soon as that is done.
func TestFaultQuarantineReplace(t *testing.T) {
	needInject(t)
	for _, transport := range []string{"auto", "threads"} {
		t.Run(transport, func(t *testing.T) {
			dir := staticDir(t)
			mustDo(t, os.Mkdir(filepath.Join(dir, "D"), 0o755))
			m := newMount(t, dir, tempDir(t))
			clearing, goesOn := m.stopClearing()
			m.serve("--on-crash", "quarantine", "--transport", transport)
			m.healthy()
			a := agent(t)
			a.mustCommand(m, "acquire D client=x ttl=500ms")
			run(t, "env", "STAGEFS_CLIENT=x", "sh", "-c", "printf valuable >"+m.At("D/f"))
			<-clearing
			wantRefusal(t, "75", []string{"being cleared away", "try again", "serves on"}, "mount", "--replace", m.Path)
			close(goesOn)
			eventually(t, "it is put aside", func() bool { return len(m.quarantine()) > 0 })
			wantAside(t, m, "D")
			if r := run(t, stagefsBin(), "mount", "--replace", m.Path); r.Status != 0 {
				t.Errorf("replace afterwards: %v", r)
			}
			wantAside(t, m, "D")
		})
	}
}

// TestFaultQuarantineBroken: the content of a lock that an admin breaks while it is about to
// be put aside stays, and nobody is told otherwise (R6).
func TestFaultQuarantineBroken(t *testing.T) {
	needInject(t)
	for _, policy := range []string{"quarantine", "destroy"} {
		t.Run(policy, func(t *testing.T) {
			dir := staticDir(t)
			m := newMount(t, dir, tempDir(t))
			clearing, goesOn := m.stopClearing()
			m.serve("--on-crash", policy)
			a, admin := agent(t), agent(t)
			a.must("mkdir", m.At("D"))
			a.must("put", m.At("D/f"), "kept", "wronly,creat")
			a.Kill()
			<-clearing
			admin.mustCommand(m, "break D stuck")
			close(goesOn)
			eventually(t, "it is said that the content is kept", func() bool { return strings.Contains(m.Log(), "the lock was broken meanwhile") })
			if strings.Contains(m.Log(), "content cleared") {
				t.Errorf("the log says that the content is cleared")
			}
			wantTree(t, m.Back("D"), []string{"f=kept"})
		})
	}
}

// TestFaultQuarantineForeign: what an admin has put into the quarantine, or taken
// apart there, is not removed by the next daemon.
func TestFaultQuarantineForeign(t *testing.T) {
	m := mount(t, "--on-crash", "quarantine")
	aside(t, m, "D")
	place := m.Back(".stagefs", "quarantine")
	m.restart(func() {
		mustDo(t, os.Rename(place+"/1/content", place+"/1/looked-at"))
		mustDo(t, os.Mkdir(place+"/notes", 0o700))
		mustDo(t, os.WriteFile(place+"/notes/text", []byte("x"), 0o600))
		mustDo(t, os.WriteFile(place+"/file", []byte("x"), 0o600))
		mustDo(t, os.Mkdir(place+"/2", 0o700)) // of a daemon that was killed
		mustDo(t, os.WriteFile(place+"/2/about.json", []byte("{}"), 0o600))
	}, "--on-crash", "quarantine")
	wantTree(t, place+"/1/looked-at", []string{"f=valuable"})
	wantTree(t, place+"/notes", []string{"text=x"})
	if _, err := os.Stat(place + "/1/about.json"); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(place + "/file"); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(place + "/2"); !os.IsNotExist(err) {
		t.Errorf("a place that nothing was put to: %v", err)
	}
}

// TestFaultDestroyFails: where content cannot be destroyed, it is kept, and so is
// what an earlier lock of the same number, of a state that is lost, left in
// quarantine (R7).
func TestFaultDestroyFails(t *testing.T) {
	needInject(t)
	m := mount(t, "--on-crash", "quarantine")
	aside(t, m, "D")
	var failing *faults
	m.unmounted(func() {
		m.State = tempDir(t) + "/new"
		failing = m.inject(&fault{call: unix.SYS_RENAMEAT2, is: func(a asked) bool { return a.path(3) == "content" }, errno: unix.EIO, times: 1})
	}, "--on-crash", "destroy")
	a := agent(t)
	a.must("mkdir", m.At("E"))
	a.must("put", m.At("E", "g"), "kept", "wronly,creat")
	if token := m.Locks()["E"].Token; token != 1 {
		t.Fatalf("token %d, want 1 again", token)
	}
	a.Kill()
	m.awaitFree("E")
	if failing.did()[0] != 1 {
		t.Fatal("nothing has failed")
	}
	wantTree(t, m.Back("E"), []string{"g=kept"})
	wantAside(t, m, "D")
	eventually(t, "the trash is gone", func() bool { return !exists(m.Back(".stagefs", "trash")) })
}

// TestFaultQuarantineFull: where there is no room to tell what would be put in
// quarantine, the content is kept, and nothing else is left: neither in the
// backing nor open in the daemon.
func TestFaultQuarantineFull(t *testing.T) {
	needInject(t)
	const crashes = 20
	for name, fault := range map[string]*fault{
		"made":    {call: unix.SYS_OPENAT, is: func(a asked) bool { return a.path(1) == "about.json" && a.args[2]&syscall.O_CREAT != 0 }, errno: unix.ENOSPC, times: crashes},
		"written": {call: unix.SYS_WRITE, is: func(a asked) bool { return strings.HasPrefix(a.path(1), `{"id"`) }, errno: unix.ENOSPC, times: crashes},
		"opened":  {call: unix.SYS_OPENAT, is: func(a asked) bool { return oneOf(a.path(1), "1|2|3|4|5|6|7|8|9|10|11|12|13|14|15|16|17|18|19|20") }, errno: unix.EMFILE, times: crashes},
	} {
		t.Run(name, func(t *testing.T) {
			m := mount(t, "--on-crash", "quarantine")
			failing := m.inject(fault)
			m.restart(nil, "--on-crash", "quarantine")
			for i := range crashes {
				a := agent(t)
				a.must("mkdir", m.At("D"+itoa(i)))
				a.must("put", m.At("D"+itoa(i), "f"), "kept", "wronly,creat")
				a.Kill()
				m.awaitFree("D" + itoa(i))
				wantTree(t, m.Back("D"+itoa(i)), []string{"f=kept"})
				if exists(m.Back(".stagefs")) {
					t.Fatalf("after %d crashes there is a hidden directory: %q", i+1, tree(t, m.Back(".stagefs")))
				}
			}
			if n := failing.did()[0]; n != crashes {
				t.Errorf("%d faults, want %d", n, crashes)
			}
			for _, at := range m.openHidden() {
				t.Errorf("the daemon keeps %s open", at)
			}
			a := agent(t)
			a.must("mkdir", m.At("E"))
			a.Kill()
			m.awaitFree("E")
			if exists(m.Back("E")) {
				t.Error("there is room, and the content is still kept")
			}
		})
	}
}

// TestFaultQuarantinePower: after a power cut there is no content in quarantine
// of which it is not known whose it was.
func TestFaultQuarantinePower(t *testing.T) {
	t.Run("at once", func(t *testing.T) {
		disk := newImage(t, 32)
		m := disk.mount("--on-crash", "quarantine")
		wantAsideAfterPowerCut(t, disk, m, func() {})
	})
	t.Run("without extended attributes", func(t *testing.T) {
		needInject(t)
		disk := newImage(t, 32)
		m := disk.mount("--on-crash", "quarantine")
		failing := m.inject(&fault{call: unix.SYS_FSETXATTR, errno: unix.EOPNOTSUPP, times: 1})
		m.restart(nil, "--on-crash", "quarantine")
		wantAsideAfterPowerCut(t, disk, m, func() {
			if failing.did()[0] != 1 {
				t.Error("nothing has failed")
			}
			eventually(t, "it is on the disk", func() bool {
				return !slices.ContainsFunc(m.openHidden(), func(at string) bool { return strings.HasSuffix(at, "/about.json") })
			})
		})
	})
}

// openHidden is what the daemon has open of its hidden directories.
func (m *Mount) openHidden() (open []string) {
	m.t.Helper()
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", m.cmd.Process.Pid))
	mustDo(m.t, err)
	for _, fd := range fds {
		if at, _ := os.Readlink(fd); strings.Contains(at, "/.stagefs/") {
			open = append(open, at)
		}
	}
	return open
}

func wantAsideAfterPowerCut(t *testing.T, disk *image, m *Mount, before func()) {
	t.Helper()
	aside(t, m, "D")
	about := m.quarantine()[0]
	before()
	disk.powerCut()
	m.kill()
	mustDo(t, unix.Unmount(m.Path, unix.MNT_DETACH))
	mustDo(t, unix.Unmount(disk.Dir, 0))
	if r := run(t, "mount", "-o", "loop", disk.file, disk.Dir); r.Status != 0 {
		t.Fatal(r)
	}
	if !exists(m.Back(".stagefs", "quarantine", "1", "content")) {
		t.Fatal("the content is not in quarantine any more")
	}
	m.healthy()
	m.start([]string{"--on-crash", "quarantine"})
	m.awaitReady()
	if all := m.quarantine(); len(all) != 1 || all[0] != about {
		t.Errorf("quarantine: %+v, want %+v", all, about)
	}
	if r := run(t, stagefsBin(), "quarantine", "--restore", "1", m.Path); r.Status != 0 {
		t.Errorf("restore: %v", r)
	}
	if !exists(m.Back("D", "f")) {
		t.Error("it is not back")
	}
}

// TestFaultQuarantineAge: what nobody knows the age of, because its descriptions
// are damaged, is as old as it has been in quarantine.
func TestFaultQuarantineAge(t *testing.T) {
	for name, about := range map[string]string{"empty": "", "torn": `{"id":"","dir":"D","tok`, "without a time": `{"dir":"D","token":1}`} {
		t.Run(name, func(t *testing.T) {
			m := mount(t, "--on-crash", "quarantine")
			aside(t, m, "D")
			was := m.quarantine()[0]
			mustDo(t, os.WriteFile(m.Back(".stagefs/quarantine/1/about.json"), []byte(about), 0o600))
			if all := m.quarantine(); len(all) != 1 || all[0] != was {
				t.Errorf("quarantine: %+v, want %+v: it is written down twice", all, was)
			}
			unix.Removexattr(m.Back(".stagefs/quarantine/1"), "user.stagefs.about")
			older := func(age string) {
				t.Helper()
				if r := run(t, stagefsBin(), "quarantine", "--delete-older", age, m.Path); r.Status != 0 {
					t.Errorf("--delete-older %s: %v", age, r)
				}
			}
			older("720h")
			all := m.quarantine()
			if len(all) != 1 || time.Since(all[0].Time).Abs() > time.Hour {
				t.Errorf("quarantine: %+v, want 1, of now", all)
			}
			wantTree(t, m.Back(".stagefs/quarantine/1/content"), []string{"f=valuable"})
			older("0s")
			if all := m.quarantine(); len(all) != 0 {
				t.Errorf("quarantine: %+v, want nothing", all)
			}
		})
	}
}

// TestFaultQuarantineClock: everything is older than 0s, also what came into quarantine before
// the clock was set back; and nothing of that is older than anything else.
func TestFaultQuarantineClock(t *testing.T) {
	m := mount(t, "--on-crash", "quarantine")
	aside(t, m, "D")
	about := fmt.Sprintf(`{"dir":"D","token":1,"time":%q}`, time.Now().Add(time.Hour).UTC().Format(time.RFC3339Nano))
	mustDo(t, os.WriteFile(m.Back(".stagefs/quarantine/1/about.json"), []byte(about), 0o600))
	for _, c := range []struct {
		age  string
		left int
	}{{"1ns", 1}, {"2h", 1}, {"0s", 0}} {
		if r := run(t, stagefsBin(), "quarantine", "--delete-older", c.age, m.Path); r.Status != 0 {
			t.Errorf("--delete-older %s: %v", c.age, r)
		}
		if all := m.quarantine(); len(all) != c.left {
			t.Errorf("after --delete-older %s: %+v, want %d", c.age, all, c.left)
		}
	}
}

// TestFaultClearImmutable: what of a dead owner's content may not be moved, or not be deleted
// (chattr +i), is kept, and nothing else is.
func TestFaultClearImmutable(t *testing.T) {
	need(t, "chattr", "root", "fuse")
	for _, policy := range []string{"destroy", "quarantine"} {
		t.Run(policy, func(t *testing.T) {
			m := mount(t, "--on-crash", policy)
			openDir(t, m.Back("old"))
			openFile(t, m.Back("old/was"), "1")
			a := agent(t)
			a.must("creat", m.At("old/devserver"), "wronly,creat,excl")
			a.must("mkdir", m.At("made"))
			var fixed []string
			for _, dir := range []string{"old", "made"} {
				for _, sub := range []string{"a", "b", "c"} {
					a.must("mkdir", m.At(dir, sub))
					for _, f := range []string{"a", "b", "c"} {
						a.must("put", m.At(dir, sub, f), "1", "wronly,creat")
						a.must("put", m.At(dir, f+sub), "1", "wronly,creat")
					}
				}
				fixed = append(fixed, m.Back(dir, "b/b"), m.Back(dir, "bb"))
			}
			flag := func(f string, files ...string) {
				if r := startCmd(t, exec.Command("chattr", append([]string{f}, files...)...)).Wait(); r.Status != 0 {
					t.Skipf("chattr %s: %v", f, r)
				}
			}
			flag("+i", fixed...)
			t.Cleanup(func() { exec.Command("chattr", "-R", "-f", "-i", m.Back()).Run() })
			a.Kill()
			m.awaitFree("old")
			m.awaitFree("made")
			wantTree(t, m.Back("old"), []string{"bb=1", "was=1"})
			if exists(m.Back("made")) {
				t.Error("made is there")
			}
			if policy == "quarantine" {
				return
			}
			eventually(t, "the rest is deleted", func() bool {
				var left []string
				for _, f := range []string{"a/a", "b/a", "b/b", "b/c", "c", "aa", "bb", "cc"} {
					found, _ := filepath.Glob(m.Back(".stagefs/trash/*/content", f))
					in, _ := filepath.Glob(m.Back(".stagefs/trash/*/content/content", f))
					if len(found)+len(in) > 0 {
						left = append(left, f)
					}
				}
				return slices.Equal(left, []string{"b/b", "bb"})
			})
			if !strings.Contains(m.Log(), "bb: operation not permitted") {
				t.Errorf("the log does not say what is kept: %s", m.Log())
			}
		})
	}
}
