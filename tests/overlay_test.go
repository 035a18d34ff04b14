//go:build linux

package tests

import (
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// overlay mounts an overlay of its own, on whose lower layer make has made
// something in a directory "static".
func overlay(t *testing.T, opts string, make func(static string)) (dir string) {
	t.Helper()
	return overlayOn(t, opts, make, "layers")
}

// overlayOn is overlay with the lower layer in one of two file systems, which may be the same.
func overlayOn(t *testing.T, opts string, make func(static string), below string) (dir string) {
	t.Helper()
	need(t, "root", "fuse")
	base := tempDir(t)
	at := func(name string) string { return filepath.Join(base, name) }
	// On a tmpfs, since an overlay cannot have an overlay as its upper layer.
	for _, name := range slices.Compact([]string{below, "layers"}) {
		mustDo(t, os.Mkdir(at(name), 0o755))
		mustDo(t, unix.Mount("tmpfs", at(name), "tmpfs", 0, "size=32m"))
		t.Cleanup(func() { unix.Unmount(at(name), unix.MNT_DETACH) })
	}
	for _, name := range []string{below + "/lower", "layers/upper", "layers/work", "merged"} {
		mustDo(t, os.Mkdir(at(name), 0o755))
	}
	openDir(t, at(below+"/lower/static"))
	make(at(below + "/lower/static"))
	data := "lowerdir=" + at(below+"/lower") + ",upperdir=" + at("layers/upper") + ",workdir=" + at("layers/work") + opts
	if err := unix.Mount("overlay", at("merged"), "overlay", 0, data); err != nil {
		t.Skipf("no overlay can be mounted here: %v", err)
	}
	t.Cleanup(func() { unix.Unmount(at("merged"), unix.MNT_DETACH) })
	return at("merged/static")
}

// TestM2Overlay: what is open, or somebody's working directory, stays so when the
// first change has an overlay copy it.
func TestM2Overlay(t *testing.T) {
	dir := overlay(t, "", func(static string) {
		for _, name := range []string{"deep", "deep/sub"} {
			openDir(t, filepath.Join(static, name))
		}
		for _, name := range []string{"read", "appended", "deep/file", "deep/sub/file"} {
			mustDo(t, os.WriteFile(filepath.Join(static, name), []byte("content"), 0o644))
		}
	})
	m := mountDir(t, dir, filepath.Join(tempDir(t), "mnt"))
	a, b := agent(t), agent(t)
	a.must("open", "read", m.At("read"), "rdonly")
	a.must("open", "appended", m.At("appended"), "rdonly")
	a.must("chdir", m.At("deep/sub"))
	b.must("chmod", m.At("read"), "0600")
	b.must("put", m.At("appended"), " more", "append")
	b.must("creat", m.At("deep/sub/new"), "wronly,creat,excl")
	b.must("chmod", m.At("deep/sub"), "0750")
	for _, name := range []string{"read", "appended"} {
		// An overlay goes on reading the file of before, or the copy; the mount as well.
		if answer, got := a.call([]string{"pread", name, "7", "0"}); answer != "ok" || got != "content" {
			t.Errorf("%s through a descriptor from before: %s, read %q, want %q", name, answer, got, "content")
		}
	}
	// A listing looks at all names again.
	b.must("creat", m.At("deep/new"), "wronly,creat,excl")
	b.Get("sh", "ls -l "+m.At("deep"))
	if got := strings.TrimSpace(a.Get("sh", "/bin/pwd && ls")); got != "0 "+m.At("deep/sub")+"\nfile\nnew" {
		t.Errorf("in a directory that was copied: %q", got)
	}
	if answer := a.Try("put", "there", "x", "creat"); answer != "ok" {
		t.Errorf("put there: %s", answer)
	}
	if out, err := exec.Command("rm", "-r", m.At("deep")).CombinedOutput(); err != nil {
		t.Errorf("rm -r: %v %s", err, out)
	}
}

// TestM2OverlayLinks: where the first change of a file parts its names, each is a
// file of its own. The open that is that change may fail.
func TestM2OverlayLinks(t *testing.T) {
	for _, index := range []string{"off", "on"} {
		t.Run(index, func(t *testing.T) {
			lower := func(static string) {
				mustDo(t, os.WriteFile(filepath.Join(static, "f"), []byte("content"), 0o644))
				for _, name := range []string{"g", "h"} {
					mustDo(t, os.Link(filepath.Join(static, "f"), filepath.Join(static, name)))
				}
			}
			play := func(at string) string {
				r := sh(t, at, `
					exec 2>&1; stat -c '%n %a %h' f g h; exec 5<g
					chmod 600 f; cat f; stat -c '%n %a %h' f g h; cat g; cat h; cat <&5
					echo more >>f; cat f g h; (echo "at h" >>h) 2>/dev/null || echo "at h" >>h; cat h; exec 6<>g; echo to-g >&6; cat g f h
					rm f; cat g h; mv h i; cat i g; ls`)
				return r.String()
			}
			opts := ",index=" + index
			want := play(overlay(t, opts, lower))
			m := mountDir(t, overlay(t, opts, lower), filepath.Join(tempDir(t), "mnt"))
			if got := play(m.Path); got != want {
				t.Errorf("got %s\nwant as without the mount %s", got, want)
			}
		})
	}
}

// TestM2OverlayForgotten: an overlay that has its layers in the mount shows the files that
// it has copied up also when the kernel has forgotten both, as for want of memory. It drops
// what all of the machine has in its cache.
func TestM2OverlayForgotten(t *testing.T) {
	need(t, "root", "fuse")
	for _, opts := range []string{"index=off", "index=on", "index=on,nfs_export=on"} {
		t.Run(opts, func(t *testing.T) {
			m := mount(t)
			merged := tempDir(t)
			openDir(t, merged)
			for _, name := range []string{"D", "D/lower", "D/upper", "D/work"} {
				openDir(t, m.At(name))
			}
			r := sh(t, m.At("D"), `
				cd lower && echo first >f && ln f g && ln f h && cp f i && cd .. &&
				mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work,`+opts+` `+merged)
			if r.Status != 0 {
				t.Skipf("no such overlay can be mounted here: %v", r)
			}
			t.Cleanup(func() { unix.Unmount(merged, unix.MNT_DETACH) })
			forget := func() { mustDo(t, os.WriteFile("/proc/sys/vm/drop_caches", []byte("2"), 0o200)) }
			mustDo(t, os.WriteFile(filepath.Join(merged, "f"), []byte("second"), 0o644))
			mustDo(t, os.WriteFile(filepath.Join(merged, "i"), []byte("second"), 0o644))
			mustDo(t, os.Remove(filepath.Join(merged, "f")))
			forget()
			want := map[string]string{"g": "first\n", "h": "first\n", "i": "second"}
			if strings.HasPrefix(opts, "index=on") {
				want["g"], want["h"] = "second", "second" // the index has the names for one file still
			}
			for range 3 {
				for name, content := range want {
					for range 2 { // the first look finds it, the second has to agree
						got, err := os.ReadFile(filepath.Join(merged, name))
						if err != nil || string(got) != content {
							t.Errorf("%s: %q, %v, want %q", name, got, err, content)
						}
					}
				}
				forget()
			}
		})
	}
}

// TestS1Overlay: locks outlive the daemon where directories have other inode numbers
// afterwards. It drops what all of the machine has in its cache.
func TestS1Overlay(t *testing.T) {
	dir := overlayOn(t, "", func(static string) { openDir(t, filepath.Join(static, "below")) }, "lower")
	m := mountDir(t, dir, dir)
	a, dies, rival := agent(t), agent(t), agent(t)
	a.must("mkdir", m.At("made"))
	a.must("creat", m.At("below/devserver"), "wronly,creat,excl")
	dies.must("mkdir", m.At("left"))
	dies.must("creat", m.At("left/devserver"), "wronly,creat,excl")
	before := m.Locks()
	number := func(name string) (ino uint64) {
		var st unix.Stat_t
		mustDo(t, unix.Stat(m.At(name), &st))
		return st.Ino
	}
	was := number("below")
	m.restart(func() {
		dies.Kill()
		mustDo(t, os.WriteFile("/proc/sys/vm/drop_caches", []byte("2"), 0o200))
	})
	if number("below") == was {
		t.Log("the kernel has not forgotten the directory")
	}
	after := m.Locks()
	for _, name := range []string{"made", "below"} {
		if after[name].Token != before[name].Token {
			t.Errorf("the lock of %s has token %d, want %d", name, after[name].Token, before[name].Token)
		}
		if got := rival.Try("creat", m.At(name, "rival"), "wronly,creat"); got != "EBUSY" {
			t.Errorf("somebody else makes a file in %s: %s", name, got)
		}
	}
	if got := rival.Try("creat", m.At("left/devserver"), "wronly,creat,excl"); got != "ok" {
		t.Errorf("the lock file of a dead owner is made anew: %s", got)
	}
}

// TestM2OverlayPrivileges: a program that an overlay in the mount copies up keeps its suid
// and sgid bits and its capabilities; chown(2) and truncate(2) take them away, as ever.
func TestM2OverlayPrivileges(t *testing.T) {
	need(t, "root", "fuse")
	const capabilities = "security.capability"
	may := []byte("\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00") // cap_net_raw=ep
	type file struct {
		mode, uid, gid uint32
		capable        bool
	}
	look := func(path string) file {
		var st unix.Stat_t
		mustDo(t, unix.Stat(path, &st))
		_, err := unix.Getxattr(path, capabilities, nil)
		return file{st.Mode & 0o7777, st.Uid, st.Gid, err == nil}
	}
	runtime.LockOSThread() // the daemon knows threads
	defer runtime.UnlockOSThread()
	m := mount(t)
	files := map[string]file{"suid": {mode: 0o4755}, "sgid": {0o2755, 0, 42, false}, "user": {0o6755, 33, 42, false}, "caps": {0o755, 0, 0, true}, "both": {0o4755, 33, 0, true}}
	make := func(path string, f file) {
		mustDo(t, os.WriteFile(path, []byte("program"), 0o755))
		mustDo(t, unix.Chown(path, int(f.uid), int(f.gid)))
		mustDo(t, unix.Chmod(path, f.mode))
		if f.capable {
			mustDo(t, unix.Setxattr(path, capabilities, may, 0))
		}
	}
	openDir(t, m.At("D"))
	for name, f := range files {
		make(m.At("D/"+name), f)
		mustDo(t, unix.Truncate(m.At("D/"+name), 3))
		if f.capable = false; look(m.At("D/"+name)) != f {
			t.Errorf("%s after truncate(2): %+v, want %+v", name, look(m.At("D/"+name)), f)
		}
		mustDo(t, unix.Unlink(m.At("D/"+name)))
		make(m.At("D/"+name), f)
		mustDo(t, unix.Chown(m.At("D/"+name), 7, 7))
		if got, want := look(m.At("D/"+name)), (file{0o755, 7, 7, false}); got != want {
			t.Errorf("%s after chown(2): %+v, want %+v", name, got, want)
		}
	}
	for i, opts := range []string{"", ",metacopy=on"} {
		merged, dir := tempDir(t), m.At(strconv.Itoa(i))
		for _, name := range []string{"", "lower", "upper", "work"} {
			openDir(t, filepath.Join(dir, name))
		}
		for name, f := range files {
			make(filepath.Join(dir, "lower", name), f)
		}
		err := unix.Mount("overlay", merged, "overlay", 0, "lowerdir="+dir+"/lower,upperdir="+dir+"/upper,workdir="+dir+"/work"+opts)
		if err != nil {
			t.Skipf("no overlay can be mounted here: %v", err)
		}
		t.Cleanup(func() { unix.Unmount(merged, unix.MNT_DETACH) })
		for name, want := range files {
			path := filepath.Join(merged, name)
			mustDo(t, unix.Rename(path, path+".new"))
			mustDo(t, unix.Rename(path+".new", path))
			if got := look(path); got != want {
				t.Errorf("%s by an overlay%s: copied up it is %+v, want %+v", name, opts, got, want)
			}
			if content, err := os.ReadFile(path); string(content) != "program" {
				t.Errorf("%s by an overlay%s: copied up, %q, %v", name, opts, content, err)
			}
			mustDo(t, unix.Chown(path, 7, 7))
			if got, want := look(path), (file{0o755, 7, 7, false}); got != want {
				t.Errorf("%s by an overlay%s: after chown(2) it is %+v, want %+v", name, opts, got, want)
			}
			mustDo(t, unix.Unlink(path))
		}
		for name, f := range files { // one call that copies up and takes away
			path := filepath.Join(dir, "lower", name)
			make(path+"-2", f)
			mustDo(t, unix.Chown(filepath.Join(merged, name+"-2"), 7, 7))
			if got, want := look(filepath.Join(merged, name+"-2")), (file{0o755, 7, 7, false}); got != want {
				t.Errorf("%s by an overlay%s: copied up by chown(2) it is %+v, want %+v", name, opts, got, want)
			}
		}
	}
}

// TestM2OverlayUser: what somebody without CAP_FSETID does by an overlay in the mount takes
// suid and sgid bits away as in the bare directory, whoever mounted the overlay.
func TestM2OverlayUser(t *testing.T) {
	need(t, "root", "fuse")
	acl := binary.LittleEndian.AppendUint32(nil, 2)
	for _, e := range [][3]uint32{{1, 7, ^uint32(0)}, {2, 1, 5}, {4, 1, ^uint32(0)}, {0x10, 1, ^uint32(0)}, {0x20, 1, ^uint32(0)}} {
		acl = binary.LittleEndian.AppendUint16(acl, uint16(e[0]))
		acl = binary.LittleEndian.AppendUint16(acl, uint16(e[1]))
		acl = binary.LittleEndian.AppendUint32(acl, e[2])
	}
	changes := map[string]func(fd int) error{
		"ftruncate": func(fd int) error { return unix.Ftruncate(fd, 2) },
		"write":     func(fd int) error { _, err := unix.Write(fd, []byte("x")); return err },
		"acl":       func(fd int) error { return unix.Fsetxattr(fd, "system.posix_acl_access", acl, 0) },
		"fchown":    func(fd int) error { return unix.Fchown(fd, 33, -1) },
	}
	runtime.LockOSThread() // whose user is changed; it ends with the test
	play := func(base string) string {
		merged := tempDir(t)
		for _, name := range []string{"", "lower", "upper", "work"} {
			openDir(t, filepath.Join(base, name))
		}
		var names []string
		for change := range changes {
			for _, gid := range []int{0, 33, 42} {
				for _, mode := range []uint32{0o6711, 0o2644} {
					name := fmt.Sprintf("%s-%d-%o", change, gid, mode)
					file := filepath.Join(base, "lower", name)
					mustDo(t, os.WriteFile(file, []byte("content"), 0o644))
					mustDo(t, unix.Chown(file, 33, gid))
					mustDo(t, unix.Chmod(file, mode))
					names = append(names, name)
				}
			}
		}
		if err := unix.Mount("overlay", merged, "overlay", 0, "lowerdir="+base+"/lower,upperdir="+base+"/upper,workdir="+base+"/work"); err != nil {
			t.Skipf("no overlay can be mounted here: %v", err)
		}
		defer unix.Unmount(merged, unix.MNT_DETACH)
		dir, err := unix.Open(merged, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		mustDo(t, err)
		defer unix.Close(dir)
		slices.Sort(names)
		var out strings.Builder
		for _, name := range names {
			var st unix.Stat_t
			mustDo(t, unix.Setfsgid(33))
			mustDo(t, unix.Setfsuid(33))
			fd, err := unix.Openat(dir, name, unix.O_RDWR|unix.O_CLOEXEC, 0)
			if err == nil {
				err = changes[strings.Split(name, "-")[0]](fd)
			}
			mustDo(t, unix.Setfsuid(0))
			mustDo(t, unix.Setfsgid(0))
			mustDo(t, unix.Fstat(fd, &st))
			unix.Close(fd)
			fmt.Fprintf(&out, "%s: %v %o\n", name, err, st.Mode)
		}
		return out.String()
	}
	want := play(filepath.Join(staticDir(t), "D"))
	if got := play(mount(t).At("D")); got != want {
		t.Errorf("not as in the bare directory:\n%s", diff(want, got))
	}
}
