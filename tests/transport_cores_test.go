//go:build linux

package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
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
