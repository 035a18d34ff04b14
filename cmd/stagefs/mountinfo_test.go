//go:build linux

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stagefs/stagefs/fs"
)

const mountTable = `22 1 0:21 / / rw,relatime - ext4 /dev/vda rw
90 22 0:40 / /srv/static rw,nosuid - fuse.stagefs /srv/static rw,user_id=0
91 22 0:41 / /srv/a\040b\012c ro shared:1 master:2 - tmpfs none rw
92 90 0:42 / /srv/static rw - tmpfs over rw
broken line
`

func TestMountTable(t *testing.T) {
	all := fs.ParseMounts(mountTable)
	if len(all) != 4 {
		t.Fatalf("ParseMounts has %d entries, want 4: %+v", len(all), all)
	}
	if got := fs.TopMount(all, "/srv/static"); got == nil || got.ID != 92 {
		t.Errorf("fs.TopMount(/srv/static) = %+v, want the latest, 92", got)
	}
	if got := fs.MountOf(all, "/srv/a b\nc/d"); got.ID != 91 || got.FSType != "tmpfs" {
		t.Errorf("fs.MountOf = %+v, want 91", got)
	}
	if got := fs.MountOf(all, "/srv/statics"); got.Path != "/" {
		t.Errorf("fs.MountOf(/srv/statics) = %+v, want the root", got)
	}
	if got := fs.TopMount(all, "/srv"); got != nil {
		t.Errorf("fs.TopMount(/srv) = %+v, want none", got)
	}
}

// TestMountTableBeneath: a mount that was made beneath another is the younger one, and does not
// cover it.
func TestMountTableBeneath(t *testing.T) {
	all := fs.ParseMounts(`54 55 0:50 / /srv/static rw - fuse.stagefs above rw
55 56 0:49 / /srv/static rw - fuse.stagefs below rw
57 54 0:51 / /srv/static/within rw - tmpfs none rw
56 22 0:40 / /srv rw - tmpfs none rw
22 1 0:21 / / rw - ext4 /dev/vda rw
23 23 0:22 / /loop rw - tmpfs none rw
`)
	var ids []int
	for _, m := range all {
		ids = append(ids, m.ID)
	}
	if want := []int{22, 56, 55, 54, 57, 23}; !slices.Equal(ids, want) {
		t.Errorf("fs.ParseMounts has them in the order %v, want %v", ids, want)
	}
	if got := fs.TopMount(all, "/srv/static"); got == nil || got.ID != 54 {
		t.Errorf("fs.TopMount = %+v, want 54", got)
	}
	if got := fs.MountOf(all, "/srv/static/x"); got.ID != 54 {
		t.Errorf("fs.MountOf = %+v, want 54", got)
	}
}

// TestMountUsers looks for users of the mount that the temporary directory is
// on, as if its mountpoint were that directory.
func TestMountUsers(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	mounts, err := fs.ReadMounts()
	if err != nil {
		t.Fatal(err)
	}
	entry := &fs.MountEntry{ID: fs.MountOf(mounts, dir).ID, Path: dir}
	seen := func() []mountUser { // others' processes may be in execve(2)
		return slices.DeleteFunc(mountUsers(entry), func(u mountUser) bool { return !u.seen })
	}
	if got := seen(); len(got) != 0 {
		t.Errorf("mountUsers = %v in an empty directory", got)
	}
	f, err := os.Create(filepath.Join(dir, "open\nfile"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	cmd := exec.Command("sleep", "60")
	cmd.Dir = dir
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { cmd.Process.Kill(); cmd.Wait() }()

	got := map[int]mountUser{}
	for _, u := range seen() {
		got[u.pid] = u
	}
	if u := got[os.Getpid()]; u.what != "it has open" || u.path != f.Name() {
		t.Errorf("this process: %q, want the open file", u)
	}
	if u := got[cmd.Process.Pid]; u.what != "its working directory is" || u.comm != "sleep" {
		t.Errorf("sleep: %q, want its working directory", u)
	}
	entry.ID++
	if got := seen(); len(got) != 0 {
		t.Errorf("mountUsers = %v for another mount at the same path", got)
	}
}

func TestUmountNoMount(t *testing.T) {
	m := newFakeMount(t, nil)
	m.check(t, []string{"umount", m.dir}, 69, "", "no stagefs mount")
	m.check(t, []string{"umount", "/"}, 69, "", "no stagefs mount")
}
