//go:build linux

package tests

import (
	"os"
	"path/filepath"
	"testing"
)

// TestMountHelper: called as mount(8) calls it, for a line of fstab(5), the program mounts
// in the background and says nothing but what is wrong.
func TestMountHelper(t *testing.T) {
	need(t, "root", "fuse")
	helper := filepath.Join(tempDir(t), "mount.fuse.stagefs")
	mustDo(t, os.Symlink(stagefsBin(), helper))
	dir := staticDir(t)
	state := filepath.Join(tempDir(t), "state")

	if r := run(t, helper, dir, dir, "-o", "rw,nosuid"); r.Status != 64 || len(mountsBelow(filepath.Dir(dir))) > 0 {
		t.Errorf("with an option that cannot be had: %v, mounted: %q; want status 64 and nothing", r, mountsBelow(filepath.Dir(dir)))
	}
	if r := run(t, helper, dir, dir, "-f", "-o", "rw"); r.Status != 0 || len(mountsBelow(filepath.Dir(dir))) > 0 {
		t.Errorf("-f: %v, mounted: %q; want nothing", r, mountsBelow(filepath.Dir(dir)))
	}
	r := run(t, helper, dir, dir+"/", "-n", "-o", "rw,nofail,depth=2,lock-name=LOCK,state-dir="+state)
	t.Cleanup(func() { run(t, "umount", dir) })
	if r.Status != 0 || r.Out != "" || r.Err != "" || len(mountsBelow(filepath.Dir(dir))) != 1 {
		t.Fatalf("%v, mounted: %q; want one mount, and no word", r, mountsBelow(filepath.Dir(dir)))
	}
	a, b := agent(t), stranger(t)
	a.must("mkdir", filepath.Join(dir, "board")) // a container
	a.must("mkdir", filepath.Join(dir, "board/v1"))
	a.must("chmod", filepath.Join(dir, "board"), "0777")
	a.must("chmod", filepath.Join(dir, "board/v1"), "0777")
	b.must("mkdir", filepath.Join(dir, "board/v2"))
	b.want("EBUSY", "creat", filepath.Join(dir, "board/v1/file"), "wronly,creat")
	b.want("EEXIST", "creat", filepath.Join(dir, "board/v1/LOCK"), "wronly,creat,excl")
}
