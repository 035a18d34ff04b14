//go:build linux

package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
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

	if r := run(t, helper, dir, dir, "-o", "rw,sync"); r.Status != 64 || mountedAt(dir) {
		t.Errorf("with an option that cannot be had: %v, mounted: %v; want status 64 and nothing", r, mountedAt(dir))
	}
	if r := run(t, helper, dir, dir, "-f", "-o", "rw"); r.Status != 0 || mountedAt(dir) {
		t.Errorf("-f: %v, mounted: %v; want nothing", r, mountedAt(dir))
	}
	if r := run(t, helper, "--help"); r.Status != 0 || !strings.HasPrefix(r.Out, "usage: mount -t fuse.stagefs") || r.Err != "" {
		t.Errorf("--help: %v", r)
	}
	// Without that name, mount(8) calls mount.fuse(8), and that one calls the program so.
	if r := run(t, stagefsBin(), dir, dir, "-o", "rw,dev,suid"); r.Status != 64 || !strings.Contains(r.Err, "ln -s "+stagefsBin()+" /sbin/mount.fuse.stagefs\n") {
		t.Errorf("without the link: %v, want it named", r)
	}
	r := run(t, helper, dir, dir+"/", "-n", "-o", "rw,nofail,allow_other,depth=2,lock-name=LOCK,state-dir="+state)
	t.Cleanup(func() { run(t, "umount", dir) })
	if mounts := mountsBelow(filepath.Dir(dir)); r.Status != 0 || r.Out != "" || r.Err != "" || len(mounts) != 1 {
		t.Fatalf("%v, mounted: %q; want one mount, and no word", r, mounts)
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

// TestMountHelperRemount: beside a line of fstab(5), whose options mount(8) adds in front,
// a remount changes the mount's flags. What it can't change is said.
func TestMountHelperRemount(t *testing.T) {
	need(t, "root", "fuse")
	helper := filepath.Join(tempDir(t), "mount.fuse.stagefs")
	mustDo(t, os.Symlink(stagefsBin(), helper))
	for _, by := range []string{"", ",supervise", "hand"} {
		dir, state := staticDir(t), filepath.Join(tempDir(t), "state")
		line := "depth=2" + by + ",state-dir=" + state
		start := []string{helper, dir, dir, "-o", "rw," + line}
		if by == "hand" {
			line = "depth=2,state-dir=" + state
			start = []string{stagefsBin(), "mount", "-d", "--depth", "2", "--state-dir", state, dir}
		}
		if r := run(t, start[0], start[1:]...); r.Status != 0 {
			t.Fatal(r)
		}
		t.Cleanup(func() { run(t, "umount", dir) })
		for _, c := range []struct {
			first, last string
			status      int
			says        string
		}{
			{"ro", "", 0, ""},
			{"rw", "", 0, ""},
			{"rw", ",depth=2", 0, ""},
			{"rw", ",depth=3", 64, "--depth: a mount keeps it"},
			{"rw", ",strict", 64, "--strict: a mount keeps it"},
		} {
			r := run(t, helper, dir, dir, "-o", c.first+",remount,"+line+c.last)
			if r.Status != c.status || !strings.Contains(r.Err, c.says) {
				t.Errorf("remount,%s: %v, want status %d, and %q said", c.first+c.last, r, c.status, c.says)
			}
		}
	}
}

// TestMountHelperUser: mount(8) lets an ordinary user mount what fstab(5) has with "user",
// and takes the environment away from its helper: fusermount3 is found without PATH, and
// the state is in the user's home directory without HOME.
func TestMountHelperUser(t *testing.T) {
	need(t, "root", "fuse", "unshare", "fusermount3")
	dir, home := staticDir(t), staticDir(t)
	const script = `set -e
		sed "s|^nobody:.*|nobody:x:65534:65534::$2:/bin/sh|" /etc/passwd >"$3/passwd"
		echo "$1 $1 fuse.stagefs noauto,user 0 0" >"$3/fstab"
		mount --bind "$3/passwd" /etc/passwd
		mount --bind "$3/fstab" /etc/fstab
		mount -t tmpfs -o mode=755 helpers /sbin
		ln -s "$0" /sbin/mount.fuse.stagefs
		chown nobody "$1" "$2"
		nobody() { setpriv --reuid=65534 --regid=65534 --clear-groups "$@"; }
		nobody mount "$1"
		nobody grep '^state' "$1/.stagefs/version"
		nobody umount "$1"`
	r := runCmd(t, exec.Command("unshare", "--mount", "--propagation=private", "sh", "-c", script, stagefsBin(), dir, home, tempDir(t)))
	if want := "state " + home + "/.local/state/stagefs\n"; r.Status != 0 || r.Out != want {
		t.Errorf("mount(8) by an ordinary user: %v, want %q", r, want)
	}
}
