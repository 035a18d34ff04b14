//go:build linux

package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestMountSilent: a daemon that is stopped hangs no command; all say who it is,
// and how it goes on, to ordinary users, too.
func TestMountSilent(t *testing.T) {
	for _, transport := range []string{"auto", "threads"} {
		t.Run(transport, func(t *testing.T) {
			m, other := mount(t, "--transport", transport), mount(t)
			agent(t).must("mkdir", other.At("seen"))
			openDir(t, m.Back("x"))
			mustDo(t, os.Symlink(m.At("x"), other.Back("link")))
			halt(t, m.cmd.Process.Pid)
			defer m.cmd.Process.Signal(syscall.SIGCONT)
			who, dir := "process "+itoa(m.cmd.Process.Pid)+", does not answer: it is stopped", tempDir(t)
			type try struct {
				args   string
				status int
				says   string
			}
			tries := []try{
				{"locks", 69, who},
				{"locks " + m.At("x"), 69, who},
				{"why " + m.At("x"), 69, who},
				{"doctor", 0, who},
				{"doctor " + m.Path, 0, who},
				{"doctor " + m.At("x"), 0, who},
				{"doctor " + m.At("x") + "/..", 0, who},
				{"doctor --state-dir " + m.At("x/state"), 69, who},
				{"locks " + other.At("link"), 69, who},
				{"check " + other.At("link"), 69, who},
				{"umount " + other.At("link"), 69, who},
				{"acquire --client-file " + m.At("x/id") + " " + other.At("seen"), 69, who},
				{"check --client-file " + m.At("x/id") + " " + other.At("seen"), 69, who},
				{"run " + m.At("x") + " " + m.At("x/script"), 69, who},
				{"mount --state-dir " + m.At("x/state") + " " + dir, 69, who},
				{"mount -d --state-dir " + m.State + ".x --log " + m.At("x/log") + " " + dir, 69, who},
				{"run -w 1 " + m.At("x") + " true", 69, who},
				{"acquire -w 1 " + m.At("x"), 69, who},
				{"wait -w 1 " + m.At("x"), 69, who},
			}
			for _, args := range []string{
				"run -n x true", "run x true", "run --client c x true", "acquire x", "acquire -n x", "release x", "break --why w x", "events x", "check x",
				"check --client c x", "wait x", "renew --client c x", "quarantine .", "mount --replace .", "mount .", "mount x",
				"umount x", "umount -l x", "mount --replace x", "mount -o remount,ro x",
			} {
				at := strings.LastIndexAny(strings.TrimSuffix(args, " true"), " ") + 1
				tries = append(tries, try{args[:at] + m.At(args[at:]), 69, who})
			}
			started := make([]*Proc, len(tries))
			for i, tt := range tries {
				cmd := exec.Command(stagefsBin(), strings.Fields(tt.args)...)
				if tt.args == "check "+m.At("x") || i == 0 {
					cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
				}
				started[i] = startCmd(t, cmd)
			}
			for i, tt := range tries {
				p := started[i]
				select {
				case <-p.done:
				case <-time.After(patience):
					m.cmd.Process.Signal(syscall.SIGCONT)
					t.Fatalf("stagefs %s: hangs", tt.args)
				}
				r := p.Wait()
				if r.Status != tt.status || !strings.Contains(r.Out+r.Err, tt.says) {
					t.Errorf("stagefs %s: %v; want status %d, and %q said", tt.args, r, tt.status, tt.says)
				}
				if tt.args == "locks" && (!strings.Contains(r.Out, "seen") || !strings.Contains(r.Out, other.Path+":\n")) {
					t.Errorf("stagefs locks: %v; want the locks of the other mount, and its name", r)
				}
			}
			// Unless nobody is left inside.
			if r := m.stagefs("umount", m.Path); r.Status != 0 && (r.Status != 75 || !strings.Contains(r.Err, who)) {
				t.Errorf("stagefs umount: %v; want 75, and %q said", r, who)
			}
		})
	}
}

// TestDoctorUserNamespace: root of a user namespace cannot mount where the mounts are not
// that namespace's, and has no passthrough; doctor says so before it is tried.
func TestDoctorUserNamespace(t *testing.T) {
	need(t, "root")
	const why = "root of a user namespace, to which the mounts here do not belong"
	dir := staticDir(t)
	for _, c := range []struct {
		flags uintptr
		says  bool
	}{{syscall.CLONE_NEWUSER, true}, {syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS, false}} {
		cmd := exec.Command(stagefsBin(), "doctor", "--state-dir", tempDir(t), dir)
		root := []syscall.SysProcIDMap{{Size: 1}}
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: c.flags, UidMappings: root, GidMappings: root}
		r := runCmd(t, cmd)
		if strings.Contains(r.Out, why) != c.says || c.says && r.Status != 69 {
			t.Errorf("doctor, in namespaces %#x: %v; want %q: %v", c.flags, r, why, c.says)
		}
		if strings.Contains(r.Out, "ok    passthrough") {
			t.Errorf("doctor, in namespaces %#x: %v; the kernel gives it to the machine's root alone", c.flags, r)
		}
	}
}

// TestDoctorOldKernel: of a kernel without passthrough, doctor does not say that it was
// tried.
func TestDoctorOldKernel(t *testing.T) {
	need(t, "root", "unshare")
	release := filepath.Join(tempDir(t), "osrelease")
	mustDo(t, os.WriteFile(release, []byte("6.1.0-9-amd64\n"), 0o644))
	const as = `mount --bind "$0" /proc/sys/kernel/osrelease && exec "$@"`
	r := run(t, "unshare", "-m", "sh", "-c", as, release, stagefsBin(), "doctor", "--state-dir", tempDir(t), staticDir(t))
	if !strings.Contains(r.Out, "passthrough     not in this kernel") || strings.Contains(r.Out, "tried") {
		t.Errorf("doctor, on Linux 6.1: %v", r)
	}
}

// TestDoctorModule: where FUSE is a module that nobody has loaded yet, doctor opens the
// device, which loads it as for a mount, before it looks whether the kernel has FUSE.
func TestDoctorModule(t *testing.T) {
	need(t, "root", "strace")
	r := run(t, "strace", "-f", "-qq", "-e", "trace=openat", stagefsBin(), "doctor")
	device, known := strings.Index(r.Err, `"/dev/fuse"`), strings.Index(r.Err, `"/proc/filesystems"`)
	if device < 0 || known < 0 || known < device {
		t.Errorf("doctor opens %s", r.Err)
	}
}

// TestDoctorServed: a directory that is served is no fault, nor is one whose
// daemon is dead: the next one takes its place.
func TestDoctorServed(t *testing.T) {
	m := mountOver(t)
	r := m.wantStatus(0, "", "doctor", m.Path)
	for _, dir := range []string{m.Path, m.At("below")} {
		r = m.wantStatus(0, "", "doctor", dir)
		// Others' dead mounts are told of, too, and their fix: to unmount them.
		_, about, _ := strings.Cut(r.Out, "\nok    directory ")
		if want := "is served by process " + itoa(m.cmd.Process.Pid); !strings.Contains(about, want) || strings.Contains(about, "umount") || strings.Contains(r.Out, "umount "+m.Path) {
			t.Errorf("doctor: %v; want %q", r, want)
		}
		if !strings.Contains(r.Out, "ok    state           "+m.State+"\n") {
			t.Errorf("doctor: %v; want the mount's state directory, %s", r, m.State)
		}
	}
	// Unless a symlink leads out of it.
	mustDo(t, os.Symlink(staticDir(t), m.Back("out")))
	if r = m.wantStatus(0, "", "doctor", m.At("out")); strings.Contains(r.Out, m.At("out")+" is served") || !strings.Contains(r.Out, m.At("out")+" is on ") {
		t.Errorf("doctor of a symlink that leads out of the mount: %v; want what it leads to", r)
	}
	// Nobody else could write to it, nor has to.
	other := exec.Command(stagefsBin(), "doctor", m.Path)
	other.Env = append(os.Environ(), "XDG_STATE_HOME="+tempDir(t))
	other.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	if r := runCmd(t, other); r.Status != 0 || strings.Contains(r.Out, m.State) {
		t.Errorf("doctor, as nobody: %v; want status 0", r)
	}
	m.kill()
	for _, args := range [][]string{{"doctor", m.Path}, {"doctor"}} {
		r = m.wantStatus(0, "", args...)
		if want := "stagefs mount " + m.Dir; !strings.Contains(r.Out, want) || !strings.Contains(r.Out, "is dead") {
			t.Errorf("doctor: %v; want %q", r, want)
		}
	}
	for _, args := range [][]string{{"locks", m.Path}, {"run", m.At("x"), "true"}} {
		m.wantStatus(69, "start it", args...)
	}
	m.start(nil)
	m.awaitReady()
}

// TestMountSilentTwo: of two daemons that are stopped each is told from the other,
// though both serve a directory of the same name.
func TestMountSilentTwo(t *testing.T) {
	ms := []*Mount{mount(t), mount(t)}
	for _, m := range ms {
		openDir(t, m.Back("x"))
	}
	for _, m := range ms {
		halt(t, m.cmd.Process.Pid)
	}
	for _, m := range ms {
		check := exec.Command(stagefsBin(), "check", m.At("x"))
		check.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
		who := "process " + itoa(m.cmd.Process.Pid) + ", does not answer"
		if r := runCmd(t, check); r.Status != 69 || !strings.Contains(r.Err, who) {
			t.Errorf("stagefs check, as nobody: %v; want 69, and %q said", r, who)
		}
	}
}

// TestMountSilentNumber: a daemon that is stopped, and whose mount is gone, is not taken for
// that of the next mount to which the kernel gives the same number.
func TestMountSilentNumber(t *testing.T) {
	old := mount(t)
	number := deviceOf(t, old.Path)
	halt(t, old.cmd.Process.Pid)
	mustDo(t, unix.Unmount(old.Path, unix.MNT_DETACH))
	m := mount(t)
	if deviceOf(t, m.Path) != number {
		t.Skip("the next mount has another number")
	}
	r := run(t, stagefsBin(), "umount", m.Path)
	if r.Status != 0 || strings.Contains(r.Err, "process "+itoa(old.cmd.Process.Pid)) {
		t.Errorf("stagefs umount: %v; want status 0, and nothing said of process %d", r, old.cmd.Process.Pid)
	}
}

// TestMountSilentGoesOn: a daemon that is only slow is waited for.
func TestMountSilentGoesOn(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("x"))
	halt(t, m.cmd.Process.Pid)
	p := startCmd(t, exec.Command(stagefsBin(), "run", "-n", m.At("x"), "true"))
	time.Sleep(time.Second)
	mustDo(t, m.cmd.Process.Signal(syscall.SIGCONT))
	if r := p.Wait(); r.Status != 0 {
		t.Errorf("stagefs run -n, while the daemon stands still for a second: %v", r)
	}
}

// TestMountStale: what is said of a dead mount whose place no daemon can take tells
// how to go on: one of another file system, or one above the directory.
func TestMountStale(t *testing.T) {
	need(t, "root", "fuse", "bindfs")
	dir, state := tempDir(t), filepath.Join(tempDir(t), "state")
	at := filepath.Join(dir, "at")
	mustDo(t, os.MkdirAll(at, 0o777))
	other := startCmd(t, exec.Command("bindfs", "-f", tempDir(t), at))
	t.Cleanup(func() { unix.Unmount(at, unix.MNT_DETACH) })
	eventually(t, "bindfs serves", func() bool { return mountedAt(at) })
	other.Kill()
	refused := func(says string, args ...string) {
		t.Helper()
		r := run(t, stagefsBin(), append([]string{"mount", "--state-dir", state}, args...)...)
		if r.Status != 73 || !strings.Contains(r.Err, says) || strings.Contains(r.Err, "stagefs umount MOUNTPOINT") {
			t.Errorf("mount %q: %v; want 73, and %q said", args, r, says)
		}
	}
	refused("umount -l "+at, at)
	refused("umount -l "+at, staticDir(t), at)

	m := mountOver(t)
	openDir(t, m.At("sub"))
	m.kill()
	refused("stagefs mount "+m.Dir, m.At("sub"))
	refused("stagefs mount "+m.Dir, staticDir(t), m.At("sub"))
	ordinary := exec.Command(stagefsBin(), "mount", "--state-dir", state+".nobody", m.Dir)
	ordinary.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	if r := runCmd(t, ordinary); r.Status != 77 || !strings.Contains(r.Err, "is the user 0's") {
		t.Errorf("mount by an ordinary user: %v; want 77, and whose the dead mount is", r)
	}
	m.start(nil)
	m.awaitReady()
}

// TestClientSilent: nor does it hang a program that uses the Go client longer than its
// context lasts, or its lease.
func TestClientSilent(t *testing.T) {
	m := mount(t)
	for _, d := range []string{"D", "E"} {
		openDir(t, m.Back(d))
	}
	holder, other := agent(t), agent(t)
	holder.client("", "", "acquire", "renewed", m.At("D"), "A", "1s")
	other.client("", "", "acquire", "l", m.At("E"), "B", "1h")
	halt(t, m.daemon())
	other.client("deadline ", "does not answer", "acquire", "x", m.At("D"), "B", "", "soon")
	other.client("deadline ", "", "acquire", "x", m.At("E"), "", "", "wait soon")
	holder.client("lost ", "expired", "await", "renewed")
	holder.client("lost ", "expired", "release", "renewed")
}
