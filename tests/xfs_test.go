//go:build linux

package tests

import (
	"path/filepath"
	"testing"
)

// TestM2XFSFlags: on XFS, who changes a file's flags or its project without CAP_FSETID
// takes its suid and sgid bits away.
func TestM2XFSFlags(t *testing.T) {
	need(t, "root", "fuse", "mkfs.xfs", "losetup")
	disk, err := imageBy(t, 512, "loop", "mkfs.xfs", "-q")
	if err != nil {
		t.Skip(err)
	}
	plain := filepath.Join(disk.Dir, "plain")
	openDir(t, plain)
	sideBySide(t, disk.mount(), plain, "flags of suid files")
}
