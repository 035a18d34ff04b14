//go:build linux

package tests

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestMountKernelFS: what belongs to the kernel, or to the whole system, is
// neither served nor covered. All of it happens in a mount namespace of its own.
func TestMountKernelFS(t *testing.T) {
	need(t, "root", "fuse", "unshare")
	dir := staticDir(t)
	state := filepath.Join(tempDir(t), "state")
	for _, tt := range []struct {
		args   []string
		status int
		says   string
	}{
		{[]string{"/proc"}, 66, "(proc)"},
		{[]string{"/proc/sys"}, 66, "(proc)"},
		{[]string{"/sys"}, 66, "(sysfs)"},
		{[]string{"/sys/kernel", dir}, 66, "(sysfs)"},
		{[]string{"/dev/pts"}, 66, "(devpts)"},
		{[]string{dir, "/proc"}, 73, "it is on proc"},
		{[]string{dir, "/proc/1"}, 73, "it is on proc"},
		{[]string{dir, "/sys"}, 73, "it is on sysfs"},
		{[]string{dir, "/"}, 73, "root of all processes"},
		{[]string{dir, "/run"}, 73, "services"},
		{[]string{dir, "/../run/."}, 73, "services"},
	} {
		if _, err := exec.Command("mountpoint", "-q", "/dev/pts").Output(); err != nil && tt.args[0] == "/dev/pts" {
			continue
		}
		r := run(t, "unshare", append([]string{
			"-m", "--propagation", "private", "timeout", "-s", "KILL", "10",
			stagefsBin(), "mount", "--state-dir", state,
		}, tt.args...)...)
		if r.Status != tt.status || !strings.Contains(r.Err, tt.says) {
			t.Errorf("stagefs mount %q: %v; want status %d, and %q said", tt.args, r, tt.status, tt.says)
		}
	}
}

// TestUmountOverProc: a dead mount is cleared though it hides /proc, where mounts
// are listed.
func TestUmountOverProc(t *testing.T) {
	need(t, "root", "fuse", "unshare", "python3")
	dir := staticDir(t)
	mnt, state := tempDir(t), filepath.Join(tempDir(t), "state")
	r := run(t, "unshare", "-m", "--propagation", "private", "sh", "-c", `
		pid=$("$1" mount -d --state-dir "$4" "$2" "$3" 2>&1 | sed -n 's/.*(pid \([0-9]*\)).*/\1/p')
		kill -9 $pid; while kill -0 $pid 2>&-; do sleep 0.05; done
		python3 -c '
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(sys.argv[1].encode(), b"/proc", None, 8192, None): # MS_MOVE
    sys.exit("mount: errno %d" % ctypes.get_errno())
' "$3" || exit 1
		cat /proc/self/mountinfo >/dev/null 2>&1 && exit 2
		"$1" umount /proc || exit 3
		cat /proc/self/mountinfo >/dev/null`, "sh", stagefsBin(), dir, mnt, state)
	if r.Status != 0 {
		t.Errorf("%v; want status 0", r)
	}
}
