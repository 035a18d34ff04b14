//go:build linux

package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// richTree is what tools copy: links, holes, attributes, odd names, a big
// directory and a deep one.
func richTree(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(tempDir(t), "rich")
	openDir(t, dir)
	fixtures(t, dir)
	r := sh(t, dir, `set -e
		ln file full/alias; ln -s /nowhere dangling; ln -s full linkdir
		truncate -s 10M holes; printf x | dd of=holes bs=1 seek=5M conv=notrunc status=none
		setfacl -d -m u:1000:rwx dir; setfacl -m g:1001:r file2
		chmod 4755 file2; chmod 1777 dir; chown -h 12:34 sym; chown 56:78 acl
		touch -d '2001-02-03 04:05:06.789' file; touch -h -d '2002-02-02' dangling
		mkdir big; i=0; while [ $i -lt 400 ]; do : >big/$i; i=$((i+1)); done
		d=.; i=0; while [ $i -lt 30 ]; do d=$d/deeper-and-deeper-$i; mkdir $d; i=$((i+1)); done; echo bottom >$d/file`)
	if r.Status != 0 {
		t.Fatal(r)
	}
	for i, name := range oddNames() {
		mustDo(t, os.WriteFile(filepath.Join(dir, "full", name), []byte{byte(i)}, 0o644))
	}
	return dir
}

// TestM2Trees: what tools make of whole trees on a mount is what they make of
// them on a plain directory.
func TestM2Trees(t *testing.T) {
	need(t, "rsync", "tar", "setfacl")
	rich := richTree(t)
	for _, c := range []struct{ name, script string }{
		{"cp -a", `cp -a "$1" copy`},
		{"rsync", `rsync -aHAXS "$1"/ copy/ && rsync -aHAXS --delete "$1"/full/ copy/`},
		{"tar", `mkdir copy && tar --xattrs --acls -C "$1" -cf - . | tar --xattrs --acls -C copy -xpf -`},
		{"cp --reflink, sparse", `cp -r --reflink=auto --sparse=always "$1" copy`},
		{"mv", `cp -a "$1" copy && mv copy copy2 && mkdir copy && mv copy2 copy/in`},
		{"rm -rf", `cp -a "$1" copy && rm -rf copy/big copy/deeper* copy/full && ls -lR copy | wc -l`},
		{"chmod -R", `cp -a "$1" copy && chmod -R g+w copy && chown -R 1:1 copy && chmod -R u-s copy`},
		{"find", `cp -a "$1" copy && find copy/big -name '*5*' -delete && find copy -type f -size +0 | sort | md5sum && du -a --apparent-size copy | sort | md5sum`},
		{"sed -i", `cp -a "$1" copy && sed -i s/old/new/ copy/file copy/file2 copy/full/file && cat copy/file copy/file2`},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := mount(t)
			plain := tempDir(t)
			want := sh(t, plain, c.script, rich)
			got := runIn(t, agent(t), m.Path, c.script, rich)
			if want.Status != 0 {
				t.Fatalf("on a plain directory: %v", want)
			}
			if got != "0 "+want.Out {
				t.Errorf("= %q, want %q", got, "0 "+want.Out)
			}
			plainShape, mountShape := shape(t, filepath.Join(plain, "copy")), shape(t, m.Back("copy"))
			if plainShape != mountShape {
				t.Errorf("another tree than on a plain directory:\n%s", diff(plainShape, mountShape))
			}
			if front := shape(t, m.At("copy")); front != mountShape {
				t.Errorf("the mount shows another tree than the backing:\n%s", diff(mountShape, front))
			}
		})
	}
}

// runIn runs a script as a child of an agent: "STATUS OUTPUT".
func runIn(t *testing.T, a *Agent, dir, script, arg string) string {
	t.Helper()
	return a.Get("sh", fmt.Sprintf("umask 022; cd '%s' && set -- '%s' && (%s)", dir, arg, script))
}

// TestDescriptors: the daemon needs no descriptor a file, and forgets what the
// kernel forgets.
func TestDescriptors(t *testing.T) {
	m := mount(t)
	a := agent(t)
	if got := runIn(t, a, m.Path, `mkdir D && cd D && i=0; while [ $i -lt 3000 ]; do : >$i; i=$((i+1)); done; ls -l | wc -l`, ""); got != "0 3001\n" {
		t.Fatalf("making files: %q", got)
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", m.cmd.Process.Pid))
	mustDo(t, err)
	if len(fds) > 300 {
		t.Errorf("the daemon has %d descriptors open for 3000 files", len(fds))
	}
	if nodes := m.metric("nodes"); nodes < 3000 {
		t.Errorf("nodes: %d, want the 3000 that were just listed", nodes)
	}
	runIn(t, a, m.Path, `rm -rf D`, "")
	eventually(t, "the nodes are forgotten", func() bool { return m.metric("nodes") < 100 })
}

// TestOddMountpoint: a path with blanks, newlines and escapes can be served,
// found and unmounted.
func TestOddMountpoint(t *testing.T) {
	for _, name := range []string{"two words", "new\nline", `back\134slash`, "esc\x1b[2J", "not\xffutf8", "#hash", "-dash", "comma,colon:"} {
		t.Run(strings.ToValidUTF8(name, "?"), func(t *testing.T) {
			dir := filepath.Join(tempDir(t), name)
			openDir(t, dir)
			m := mountDir(t, dir, dir)
			a := agent(t)
			a.must("mkdir", dir+"/D")
			agent(t).want("EBUSY", "mkdir", dir+"/D/x")
			for _, args := range [][]string{{"locks", dir}, {"why", dir + "/D"}} {
				if r := run(t, stagefsBin(), args...); r.Status != 0 || !strings.Contains(r.Out, itoa(a.Pid)) {
					t.Errorf("stagefs %q: %v, want pid %d", args, r, a.Pid)
				}
			}
			wantTame(t, "the log", m.Log(), -1)
			if r := run(t, stagefsBin(), "umount", dir); r.Status != 0 {
				t.Errorf("stagefs umount: %v", r)
			}
			eventually(t, "the daemon ends", m.dead)
		})
	}
}
