//go:build linux

package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// pause puts a process into a cgroup that is frozen, as docker pause does, until thaw,
// or for a minute. It returns the file that thaws it.
func pause(t *testing.T, pid int) (file string, thaw func()) {
	t.Helper()
	around := cgroup(t)
	file = filepath.Join(around, "cgroup.freeze")
	if _, err := os.Stat(file); err != nil {
		t.Skip(err) // cgroups of version 1
	}
	enter(t, pid, cgroupIn(t, around))
	thaw = func() { os.WriteFile(file, []byte("0"), 0) }
	late := time.AfterFunc(time.Minute, thaw)
	t.Cleanup(func() {
		late.Stop()
		thaw()
	})
	mustDo(t, os.WriteFile(file, []byte("1"), 0))
	return file, thaw
}

// TestFaultPaused: who asks a daemon whose cgroup is frozen does not wait for it without
// a word; all goes on when it is thawed.
func TestFaultPaused(t *testing.T) {
	m := mount(t)
	a := agent(t)
	a.must("mkdir", m.At("D"))
	file, thaw := pause(t, m.cmd.Process.Pid)
	frozen := "it is frozen, as with docker pause; thaw it with: echo 0 >" + file
	says := "process " + itoa(m.cmd.Process.Pid) + ", does not answer: " + frozen
	asked := map[string]*Proc{}
	for _, args := range []string{"locks", "check", "run -n"} {
		words := append(strings.Fields(args), m.At("D"))
		if words[0] == "run" {
			words = append(words, "true")
		}
		asked[args] = startCmd(t, exec.Command(stagefsBin(), words...))
	}
	for args, p := range asked {
		select {
		case <-p.done:
		case <-time.After(patience):
			t.Errorf("%s says nothing", args)
			continue
		}
		if r := p.Wait(); r.Status == 0 || !strings.Contains(r.Err, says) {
			t.Errorf("%s: %v, want %q", args, r, says)
		}
	}
	waits := a.Start("put", m.At("D/f"), "x", "creat")
	thaw()
	if got := waits(); got != "ok" {
		t.Errorf("the holder's write: %s", got)
	}
	m.wantOwner("D", a.Pid)

	inside := agent(t)
	inside.must("open", "inside", m.At(), "rdonly")
	mustDo(t, os.WriteFile(file, []byte("1"), 0))
	r := startCmd(t, exec.Command(stagefsBin(), "umount", m.Path)).Wait()
	if r.Status != 75 || !strings.Contains(r.Err, "process "+itoa(inside.Pid)) || !strings.Contains(r.Err, "does not answer: "+frozen) {
		t.Errorf("umount of what process %d is in: %v", inside.Pid, r)
	}
	inside.must("close", "inside")
	r = startCmd(t, exec.Command(stagefsBin(), "umount", m.Path)).Wait()
	want := "has not ended: " + frozen
	if r.Status == 75 { // who looks at all mounts is in this one, too, for a while
		want = "does not answer: " + frozen
	}
	if r.Status != 0 && r.Status != 75 || !strings.Contains(r.Err, want) {
		t.Errorf("umount: %v, want %q", r, want)
	}
}

// starve leaves a process some percent of a processor until the end of the test.
func starve(t *testing.T, pid, percent int) {
	t.Helper()
	root, file, quota := "/sys/fs/cgroup/cpu", "cpu.cfs_quota_us", itoa(percent*1000)
	if _, err := os.Stat(filepath.Join(root, "cgroup.procs")); err != nil {
		root, file, quota = cgroupRoot(t), "cpu.max", quota+" 100000"
	}
	group := cgroupIn(t, root)
	if err := os.WriteFile(filepath.Join(group, file), []byte(quota), 0); err != nil {
		t.Skip("no processor time can be kept from a process here: ", err)
	}
	enter(t, pid, group)
}

// TestFaultStarved: where the daemon hardly gets a processor, holders and those who are to
// hold are served, strangers refused, and the dead's locks end, with what was made under
// them; all of it late.
func TestFaultStarved(t *testing.T) {
	m := mount(t, "--on-crash=destroy")
	starve(t, m.cmd.Process.Pid, 3)
	for range 5 {
		a := agent(t)
		a.must("mkdir", m.At("D"))
		a.must("put", m.At("D/own"), "x", "creat")
		a.Child().must("put", m.At("D/child's"), "x", "creat")
		stranger(t).want("EBUSY", "creat", m.At("D/stranger's"), "wronly,creat")
		a.Kill()
		m.awaitFree("D")
		if _, err := os.Lstat(m.Back("D")); err == nil {
			t.Error("what was made under the lock is there yet")
		}
	}
	// The locks pass from mkdir(1) to the shell, and from that to nobody (R5).
	if r := sh(t, m.Path, `for i in 1 2 3 4 5; do mkdir E && (echo x >E/x) && sh -c 'echo y >E/y' && rm -r E || exit 1; done`); r.Status != 0 {
		t.Error(r)
	}
	m.wantFree("E")
}
