//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// mountUser serves a directory of the user nobody, by a daemon of that user.
func mountUser(t *testing.T, opts ...string) *Mount {
	t.Helper()
	need(t, "root", "fuse", "fusermount3")
	dir := staticDir(t)
	m := newMount(t, dir, dir)
	m.serveUser(opts...)
	return m
}

func (m *Mount) serveUser(opts ...string) {
	t := m.t
	t.Helper()
	mustDo(t, os.Chown(m.Dir, nobody, nobody))
	mustDo(t, os.Chown(filepath.Dir(m.State), nobody, nobody))
	m.user = nobody
	m.start(opts)
	t.Cleanup(m.stop)
	eventually(t, "the daemon says that it serves", func() bool {
		if m.dead() {
			t.Fatalf("stagefs mount ended: %v\n%s", m.cmd.ProcessState, m.Log())
		}
		return strings.Contains(m.Log(), "stagefs: serving")
	})
}

// TestM1User: an ordinary user mounts for its own processes, and is told what
// is missing; locks work as ever.
func TestM1User(t *testing.T) {
	m := mountUser(t)
	if log := m.Log(); !strings.Contains(log, "warning") {
		t.Errorf("said %q, want what an ordinary user's mount lacks", log)
	}
	a, b := stranger(t), stranger(t)
	a.must("mkdir", m.At("D"))
	a.must("put", m.At("D/file"), "content", "creat")
	b.want("EBUSY", "put", m.At("D/file"), "rival", "")
	b.want("EBUSY", "mkdir", m.At("D/new"))
	b.want("EEXIST", "creat", m.At("D/devserver"), "wronly,creat,excl")
	b.want("ok", "read", m.At("D/file"))
	if got := b.Get("read", m.control("locks")); !strings.Contains(got, itoa(a.Pid)) {
		t.Errorf("locks: %s, want pid %d", got, a.Pid)
	}
	if got := runCmdAs(t, b, "break", "--why", "mine to break", m.At("D")); got != "0 " {
		t.Errorf("stagefs break by who mounted: %q", got)
	}
	b.must("mkdir", m.At("D/new"))
	a.must("mkdir", m.At("E"))
	a.Kill()
	eventually(t, "the dead owner's lock is gone", func() bool { return b.Try("mkdir", m.At("E/new")) == "ok" })
	// Others are kept out by the kernel.
	if allowed, _ := os.ReadFile("/etc/fuse.conf"); !strings.Contains("\n"+string(allowed), "\nuser_allow_other") {
		agent(t).want("EACCES", "readdir", m.Path)
	}
}

// TestM1UserListed: beside another user's mount, which is for that user alone, all others
// are listed, and that one is named; who asks for it is refused.
func TestM1UserListed(t *testing.T) {
	if allowed, _ := os.ReadFile("/etc/fuse.conf"); strings.Contains("\n"+string(allowed), "\nuser_allow_other") {
		t.Skip("/etc/fuse.conf lets others use it")
	}
	m, private := mount(t), mountUser(t)
	a := agent(t)
	a.must("mkdir", m.At("D"))
	refusal := "stagefs: " + private.Path + ": not allowed; an ordinary user's mount is for that user alone\n"
	// What else is mounted on this machine is not for this test.
	const alone = `awk '$3 == "fuse.stagefs" { print $2 }' /proc/mounts | grep -vxF -e "$1" -e "$2" | xargs -r umount -l; exec timeout 1 "$0" locks $3`
	for _, option := range []string{"", "--json", "--watch"} {
		cmd := exec.Command("/bin/sh", "-c", alone, stagefsBin(), m.Path, private.Path, option)
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
		if r := runCmd(t, cmd); !strings.Contains(r.Out, itoa(a.Pid)) || r.Err != refusal || r.Status != 0 && option != "--watch" {
			t.Errorf("stagefs locks %s: %v, want the lock of %d, and %q", option, r, a.Pid, refusal)
		}
	}
	for _, args := range [][]string{{"locks"}, {"why"}, {"events"}, {"acquire"}, {"check"}, {"wait"}, {"release"}, {"break", "--why", "x"}, {"quarantine"}} {
		if r := run(t, stagefsBin(), append(args, private.At("D"))...); r.Status != 77 || r.Err != refusal {
			t.Errorf("stagefs %q: %v, want status 77, and %q", args, r, refusal)
		}
	}
}

// TestM1UserNoRights: a directory that the user may not write to, or a
// mountpoint that is not the user's, is refused with a clear error.
func TestM1UserNoRights(t *testing.T) {
	need(t, "root", "fuse", "fusermount3")
	dir := filepath.Join(tempDir(t), "roots")
	mustDo(t, os.Mkdir(dir, 0o755))
	cmd := exec.Command(stagefsBin(), "mount", "--state-dir", filepath.Join(tempDir(t), "state"), dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	if r := runCmd(t, cmd); r.Status == 0 || r.Err == "" || mountedAt(dir) {
		t.Errorf("mount over root's directory by a user: %v, mounted: %v", r, mountedAt(dir))
	}
}

// TestM1UserHelperKilled: a fusermount3 that is killed, also when it has mounted already, is
// said to be what failed, and leaves nothing behind.
func TestM1UserHelperKilled(t *testing.T) {
	need(t, "root", "fuse", "fusermount3")
	helper, err := exec.LookPath("fusermount3")
	mustDo(t, err)
	bin := tempDir(t)
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	dir := staticDir(t)
	mustDo(t, os.Chown(dir, nobody, nobody))
	state := tempDir(t)
	mustDo(t, os.Chown(state, nobody, nobody))
	for when, before := range map[string]string{"before it has mounted": "", "when it has mounted": helper + ` "$@"`} {
		script := fmt.Sprintf("#!/bin/sh\ncase $1 in -u) exec %s \"$@\"; esac\n%s\nkill -9 $$\n", helper, before)
		writeProgram(t, filepath.Join(bin, "fusermount3"), []byte(script))
		cmd := exec.Command(stagefsBin(), "mount", "--state-dir", filepath.Join(state, "state"), dir)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
		if r := runCmd(t, cmd); r.Status != 71 || !strings.Contains(r.Err, "fusermount3 was killed") || mountedAt(dir) {
			t.Errorf("killed %s: %v, mounted: %v; want status 71, and that it was killed", when, r, mountedAt(dir))
		}
	}
}

// TestM4UserInterrupted: a second Ctrl-C does not end the fusermount3 that the first one
// called, which would leave the mount; of one that fails without a word, it is said how.
func TestM4UserInterrupted(t *testing.T) {
	need(t, "root", "fuse", "fusermount3")
	helper, err := exec.LookPath("fusermount3")
	mustDo(t, err)
	bin := tempDir(t)
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	slow, called, fail := filepath.Join(bin, "slow"), filepath.Join(bin, "called"), filepath.Join(bin, "fail")
	mustDo(t, os.Chmod(bin, 0o777))
	writeProgram(t, filepath.Join(bin, "fusermount3"), fmt.Appendf(nil, `#!/bin/sh
[ -e %[1]s ] && kill -9 $$
if [ -e %[2]s ]; then
	mv %[2]s %[3]s
	sleep 0.1
	rm %[3]s
fi
exec %[4]s "$@"
`, fail, slow, called, helper))
	dir := staticDir(t)
	m := newMount(t, dir, dir)
	m.serveUser()
	umount := exec.Command(stagefsBin(), "umount", dir)
	umount.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	mustDo(t, os.WriteFile(fail, nil, 0o644))
	if r := runCmd(t, umount); !strings.Contains(r.Err, "killed") {
		t.Errorf("umount by a fusermount3 that is killed: %v; want that it was", r)
	}
	mustDo(t, os.Rename(fail, slow))
	mustDo(t, m.cmd.Process.Signal(syscall.SIGINT))
	isCalled := func() bool { _, err := os.Stat(called); return err == nil }
	eventually(t, "fusermount3 is called", isCalled)
	mustDo(t, syscall.Kill(-m.cmd.Process.Pid, syscall.SIGINT)) // as the terminal, to the whole group
	eventually(t, "the mount is gone", func() bool { return !mountedAt(dir) && !isCalled() })
}

// TestS1UserUmask: the state is its user's to read again, whatever the umask was.
func TestS1UserUmask(t *testing.T) {
	need(t, "root", "fuse", "fusermount3")
	dir := staticDir(t)
	m := newMount(t, dir, dir)
	mustDo(t, os.Chown(m.Dir, nobody, nobody))
	mustDo(t, os.Chown(filepath.Dir(m.State), nobody, nobody))
	m.user = nobody
	m.startedBy("umask 777")
	serves := func(times int) {
		t.Helper()
		eventually(t, "the daemon says that it serves", func() bool {
			if m.dead() {
				t.Fatalf("stagefs mount ended: %v\n%s", m.cmd.ProcessState, m.Log())
			}
			return strings.Count(m.Log(), "stagefs: serving") == times
		})
	}
	serves(1)
	m.kill()
	m.start(nil)
	serves(2)
}

// TestR4UserReadOnly: who makes its tree read-only in the end, and is killed then,
// leaves no more behind than others, though an ordinary user's daemon may not write
// there either (R4, R7).
func TestR4UserReadOnly(t *testing.T) {
	shut := "chmod 2555 %[1]s/sub; chmod -R a-w %[1]s"
	stage := func(m *Mount) (dead *Agent) {
		a := stranger(t)
		stranger(t).must("sh", "mkdir '"+m.At("D")+"' && "+stagefsBin()+" release '"+m.At("D")+"'")
		a.must("creat", m.At("D/devserver"), "wronly,creat,excl")
		a.must("mkdir", m.At("N")) // its own, whole
		a.must("creat", m.At("N/devserver"), "wronly,creat,excl")
		for _, dir := range []string{"D", "N"} {
			a.must("mkdir", m.At(dir, "sub"))
			a.must("mkdir", m.At(dir, "sub/deep"))
			a.must("put", m.At(dir, "sub/deep/file"), "content", "creat")
			if got := a.Get("sh", fmt.Sprintf(shut, m.At(dir))); got != "0 " {
				t.Fatal(got)
			}
		}
		a.Kill()
		return a
	}
	wantMode := func(m *Mount, b *Agent, name, mode string) {
		t.Helper()
		if got := b.Get("stat", m.At(name)); !strings.HasPrefix(got, "mode=4"+mode+" ") {
			t.Errorf("%s: %s, want mode %s", name, got, mode)
		}
	}
	gone := func(m *Mount, b *Agent, names ...string) {
		t.Helper()
		for _, name := range names {
			eventually(t, name+" is gone", func() bool { return b.Try("stat", m.At(name)) == "ENOENT" })
		}
	}
	t.Run("keep", func(t *testing.T) {
		m := mountUser(t)
		stage(m)
		b := stranger(t)
		gone(m, b, "D/devserver", "N/devserver")
		wantMode(m, b, "D", "0555")
		wantMode(m, b, "N", "0555")
		wantMode(m, b, "N/sub", "2555")
	})
	t.Run("destroy", func(t *testing.T) {
		m := mountUser(t, "--on-crash", "destroy")
		stage(m)
		b := stranger(t)
		gone(m, b, "D/devserver", "D/sub", "N")
		wantMode(m, b, "D", "0555")
	})
}
