//go:build linux

package tests

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestM2 does everything on a mount and on a plain directory, and expects the
// same answers and the same tree.
func TestM2(t *testing.T) {
	m := mount(t)
	plain := tempDir(t)
	for _, c := range asBacking() {
		t.Run(c.name, func(t *testing.T) {
			name := strings.ReplaceAll(c.name, " ", "-")
			ground(t, filepath.Join(plain, name))
			ground(t, m.Back(name))
			want := c.play(t, filepath.Join(plain, name))
			got := c.play(t, m.At(name))
			if want != got {
				t.Errorf("answers differ from a plain directory's:\n%s", diff(want, got))
			}
			want, got = shape(t, filepath.Join(plain, name)), shape(t, m.Back(name))
			if want != got {
				t.Errorf("tree differs from the plain directory's:\n%s", diff(want, got))
			}
		})
	}
}

// play runs the script and notes each command with its answer.
func (c scriptCase) play(t *testing.T, dir string) string {
	t.Helper()
	agents := []*Agent{agentAs(t, c.uid), agentAs(t, c.uid)}
	var log strings.Builder
	for line := range strings.Lines(strings.TrimSpace(c.lines)) {
		a := agents[0]
		line, second := strings.CutPrefix(strings.TrimSpace(line), "2:")
		if second {
			a = agents[1]
		}
		answer, out := a.call(strings.Fields(strings.ReplaceAll(line, "{}", dir)))
		// Inode numbers and times differ anyway.
		out = regexp.MustCompile(`(ino|mtime)=\S+`).ReplaceAllString(out, "")
		log.WriteString(line + ": " + answer + " " + strings.TrimSpace(out) + "\n")
	}
	for _, a := range agents {
		a.Exit(1)
	}
	return log.String()
}

// ground is what the scripts stand on.
func ground(t *testing.T, dir string) {
	t.Helper()
	at := func(name string) string { return filepath.Join(dir, name) }
	for name, mode := range map[string]uint32{"": 0o777, "open": 0o777, "shut": 0o755, "setgid": 0o2777, "acl": 0o777, "sticky": 0o1777, "unlistable": 0o711} {
		mustDo(t, os.MkdirAll(at(name), 0o777))
		mustDo(t, unix.Chmod(at(name), mode))
	}
	mustDo(t, os.Chown(at("setgid"), 0, 1234))
	mustDo(t, unix.Chmod(at("setgid"), 0o2777))
	mustDo(t, unix.Setxattr(at("acl"), "system.posix_acl_default", accessACL(), 0))
	for name, mode := range map[string]uint32{
		"secret": 0o600, "readable": 0o644, "suid": 0o6777, "suid2": 0o6777, "suid3": 0o6777,
		"shut/file": 0o666, "sticky/file": 0o666, "unlistable/file": 0o644,
	} {
		mustDo(t, os.WriteFile(at(name), []byte("content of "+name), 0o600))
		mustDo(t, unix.Chmod(at(name), mode))
	}
}

// TestM2Numbers: inode numbers and link counts, statfs and the times are the
// backing's.
func TestM2Numbers(t *testing.T) {
	dir := staticDir(t)
	fixtures(t, dir)
	mustDo(t, os.Link(dir+"/file", dir+"/full/alias"))
	m := mountDir(t, dir, dir+".mnt")
	if want, got := digest(t, m.Dir), digest(t, m.Path); want != got {
		t.Errorf("shown differently:\n%s", diff(want, got))
	}
	mustDo(t, filepath.WalkDir(m.Dir, func(path string, _ os.DirEntry, err error) error {
		mustDo(t, err)
		rel, _ := filepath.Rel(m.Dir, path)
		var back, front unix.Stat_t
		mustDo(t, unix.Lstat(path, &back))
		mustDo(t, unix.Lstat(m.At(rel), &front))
		if back.Ino != front.Ino || back.Nlink != front.Nlink || back.Blocks != front.Blocks || back.Mtim != front.Mtim || back.Ctim != front.Ctim {
			t.Errorf("stat of %s = %+v, want %+v", rel, front, back)
		}
		return nil
	}))
	var back, front unix.Statfs_t
	mustDo(t, unix.Statfs(m.Dir, &back))
	mustDo(t, unix.Statfs(m.Path, &front))
	if back.Blocks != front.Blocks || back.Files != front.Files || back.Namelen != front.Namelen || back.Bsize != front.Bsize {
		t.Errorf("statfs = %+v, want %+v", front, back)
	}
}
