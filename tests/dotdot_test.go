//go:build linux

package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestDotDot: a ".." in a path is what it is to the kernel, and so to every other
// program: the parent of where a symlink before it leads, also if that is only in the
// name that the shell has for the working directory.
func TestDotDot(t *testing.T) {
	need(t, "root", "fuse")
	top := tempDir(t)
	for _, dir := range []string{"a/static", "b/c", "b/static"} {
		mustDo(t, os.MkdirAll(filepath.Join(top, dir), 0o755))
	}
	mustDo(t, os.Symlink("../b/c", filepath.Join(top, "a/link")))
	// in runs stagefs as a shell does that went to dir by that name.
	in := func(dir string, args ...string) {
		t.Helper()
		cmd := exec.Command("sh", append([]string{"-c", `cd "$0" && exec "$@"`, filepath.Join(top, dir), stagefsBin()}, args...)...)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("in %s: stagefs %q: %v\n%s", dir, args, err, out)
		}
	}
	for where, path := range map[string]string{"a": "link/../static", "a/link": "../static"} {
		in(where, "mount", "-d", "--state-dir", filepath.Join(tempDir(t), "state"), path)
		table, err := os.ReadFile("/proc/self/mounts")
		mustDo(t, err)
		for dir, want := range map[string]bool{"a/static": false, "b/static": true} {
			if got := strings.Contains(string(table), " "+filepath.Join(top, dir)+" fuse.stagefs"); got != want {
				t.Errorf("mount %s in %s: served: %s: %v, want %v", path, where, dir, got, want)
			}
		}
		for _, d := range []string{"x", "y/z"} {
			mustDo(t, os.MkdirAll(filepath.Join(top, "b/static", d), 0o755))
		}
		mustDo(t, os.RemoveAll(filepath.Join(top, "b/static/link")))
		mustDo(t, os.Symlink("y/z", filepath.Join(top, "b/static/link")))
		in(where, "run", "-n", path+"/link/../v", "sh", "-c", `test "$STAGEFS_LOCK" = "$0"`, filepath.Join(top, "b/static/y/v"))
		in(where, "why", path+"/link/../v")
		in(where, "locks", path+"/link/..")
		in(where, "umount", path)
	}
}
