//go:build linux

package tests

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// cpuset puts a process into a cgroup of its own that may use all cores, until it is told which.
func cpuset(t *testing.T, pid int) (use func(cores string)) {
	t.Helper()
	root := "/sys/fs/cgroup/cpuset"
	if !exists(filepath.Join(root, "cpuset.cpus")) {
		root = "/sys/fs/cgroup"
		if b, _ := os.ReadFile(filepath.Join(root, "cgroup.subtree_control")); !strings.Contains(string(b), "cpuset") {
			t.Skip("no cgroup can be given cores here")
		}
	}
	dir := cgroupIn(t, root)
	use = func(cores string) {
		t.Helper()
		mustDo(t, os.WriteFile(filepath.Join(dir, "cpuset.cpus"), []byte(cores), 0))
	}
	use("0-1")
	mems, err := os.ReadFile(filepath.Join(dir, "cpuset.mems"))
	mustDo(t, err)
	if len(strings.TrimSpace(string(mems))) == 0 && root != "/sys/fs/cgroup" {
		mems, err = os.ReadFile(filepath.Join(root, "cpuset.mems"))
		mustDo(t, err)
		mustDo(t, os.WriteFile(filepath.Join(dir, "cpuset.mems"), mems, 0))
	}
	enter(t, pid, dir)
	return use
}

// TestTransportCores: a daemon that loses a core serves who runs there, and says at once why it
// cannot be replaced; when it has the core again, it can be.
func TestTransportCores(t *testing.T) {
	need(t, "root", "fuse", "taskset")
	if exec.Command("taskset", "-c", "0,1", "true").Run() != nil || exec.Command("taskset", "-c", "1", "true").Run() != nil {
		t.Skip("a single core")
	}
	m := mountBy(t, "uring")
	use := cpuset(t, m.daemon())
	use("0")
	for _, core := range []string{"0", "1"} {
		wantServed(t, m.Path, 5, "taskset -pc "+core+" $$ >/dev/null && mkdir d$i && echo x >d$i/f && cat d$i/f && rm -r d$i")
	}
	wantRefusal(t, "69", []string{"core 1", "serves on"}, "mount", "--replace", m.Path)
	use("0-1")
	m.replace()
	wantServed(t, m.Path, 5, "taskset -pc 1 $$ >/dev/null && mkdir d$i && echo x >d$i/f && cat d$i/f && rm -r d$i")
}

// TestTransportTied: once somebody has tied the daemon's threads to one core, those who wait
// for a lock on another one keep nobody there waiting.
func TestTransportTied(t *testing.T) {
	need(t, "root", "fuse", "taskset", "flock")
	if exec.Command("taskset", "-c", "0,1", "true").Run() != nil || exec.Command("taskset", "-c", "1", "true").Run() != nil {
		t.Skip("a single core")
	}
	m := mountBy(t, "uring")
	openFile(t, m.Back("file"), "")
	f, err := os.Open(m.At("file"))
	mustDo(t, err)
	mustDo(t, unix.Flock(int(f.Fd()), unix.LOCK_EX))
	t.Cleanup(func() { f.Close() })
	daemon := m.daemon()
	if out, err := exec.Command("taskset", "-apc", "0", itoa(daemon)).CombinedOutput(); err != nil {
		t.Fatalf("taskset: %v: %s", err, out)
	}
	// They have the file open, so that they ask for nothing but the lock.
	var all []*Proc
	var begin []io.Closer
	prepare := func(script string) {
		cmd := exec.Command("taskset", "-c", "1", "sh", "-c", script, "sh", m.Path)
		in, err := cmd.StdinPipe()
		mustDo(t, err)
		all, begin = append(all, startCmd(t, cmd)), append(begin, in)
	}
	for range 8 {
		prepare(`exec 9<"$1"/file; read -r line; exec flock 9`)
	}
	for _, p := range all {
		eventually(t, "the file is open", func() bool { return exists("/proc/" + itoa(p.Pid()) + "/fd/9") })
	}
	prepare(`read -r line; exec mkdir "$1"/dir`)
	halt(t, daemon)
	for i, p := range all {
		begin[i].Close()
		eventually(t, "it waits", func() bool { return waitsInFuse(p.Pid()) })
	}
	mustDo(t, unix.Kill(daemon, unix.SIGCONT))
	last := all[len(all)-1]
	eventually(t, "a directory is made", last.over)
	f.Close()
	for _, p := range all {
		if r := p.Wait(); r.Status != 0 {
			t.Errorf("%v", r)
		}
	}
}
