//go:build linux

package tests

import (
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// TestM4Accounting: the kernel writes no process accounting to the mount. The end of a
// killed daemon would wait for itself, and all processes that end then wait for it.
func TestM4Accounting(t *testing.T) {
	need(t, "root", "fuse", "python3")
	m := mount(t)
	mustDo(t, os.WriteFile(m.At("file"), nil, 0o644))
	// Accounting is that of a PID namespace, so the test's own processes are not written.
	cmd := exec.Command("python3", "-c", `import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
print(libc.acct(sys.argv[1].encode()), ctypes.get_errno())
libc.acct(None)
open(sys.argv[1], "a").write("x")`, m.At("file"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
	out, err := cmd.CombinedOutput()
	if got := strings.TrimSpace(string(out)); err != nil || got != "-1 22" {
		t.Errorf("acct(2) and an ordinary append: %q, %v, want -1 and EINVAL", got, err)
	}
}
