//go:build linux

package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
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
