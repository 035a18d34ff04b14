//go:build linux

package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// TestM2XFSFlags: on XFS, who changes a file's flags or its project without CAP_FSETID
// takes its suid and sgid bits away.
func TestM2XFSFlags(t *testing.T) {
	need(t, "root", "fuse", "mkfs.xfs", "losetup")
	base := tempDir(t)
	file, top := filepath.Join(base, "image"), filepath.Join(base, "fs")
	mustDo(t, os.WriteFile(file, nil, 0o600))
	mustDo(t, os.Truncate(file, 512<<20))
	mustDo(t, os.Mkdir(top, 0o755))
	if out, err := exec.Command("mkfs.xfs", "-q", file).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if out, err := exec.Command("mount", "-o", "loop", file, top).CombinedOutput(); err != nil {
		t.Skipf("it cannot be mounted here: %v: %s", err, out)
	}
	t.Cleanup(func() { unix.Unmount(top, unix.MNT_DETACH) })
	plain, dir := filepath.Join(top, "plain"), filepath.Join(top, "static")
	openDir(t, plain)
	openDir(t, dir)
	m := mountDir(t, dir, filepath.Join(tempDir(t), "mnt"))
	sideBySide(t, m, plain, "flags of suid files")
}
