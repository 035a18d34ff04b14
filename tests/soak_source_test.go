//go:build linux

package tests

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// A source is the tree that is staged.
type source struct {
	dir   string
	files int
	tree  map[string]string // see contentOf
}

// prepare makes everything that the stagers and rivals start from.
func (s *soak) prepare() {
	t := s.t
	t.Helper()
	for _, dir := range []string{"live", "done"} {
		mustDo(t, os.Mkdir(s.path(dir), 0o755))
	}
	goroot, err := s.command(patience, "go", "env", "GOROOT")
	mustDo(t, err)
	all := filepath.Join(strings.TrimSpace(string(goroot)), "src")
	s.src.dir = all
	if !s.whole {
		s.src.dir = s.path("src")
		mustDo(t, os.Mkdir(s.src.dir, 0o755))
		s.mustRun("cp", "-a", filepath.Join(all, "net"), s.src.dir)
	}
	s.src.tree, err = contentOf(s.src.dir)
	mustDo(t, err)
	for _, line := range s.src.tree {
		if strings.HasPrefix(line, "file") {
			s.src.files++
		}
	}
	for name, content := range soakFiles(s.src) {
		mustDo(t, os.WriteFile(s.path(name), []byte(content), 0o755))
	}
	s.mustRun("sh", "-c", `cd "$1" && zip -qr1 "$2/src.zip" .`, "sh", s.src.dir, s.dir)
	// Without gc.auto=0 git goes on packing in the background, and takes
	// objects away from the clones that copy them.
	s.mustRun("sh", "-c", `export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null
		git init -q --bare "$2/repo" && cd "$2/repo" && git config core.bare false && git config core.compression 1 && git config gc.auto 0 &&
		git --git-dir=. --work-tree="$1" add -Af . &&
		git --git-dir=. -c user.name=soak -c user.email=soak@localhost commit -qm src &&
		git config --unset core.worktree; git config core.bare true`, "sh", s.src.dir, s.dir)
}

func (s *soak) mustRun(name string, args ...string) {
	s.t.Helper()
	if out, err := s.command(40*patience, name, args...); err != nil {
		s.t.Fatalf("%s %q: %v\n%s", name, args, err, out)
	}
}

// contentOf describes each entry beneath dir as all tools carry it over: kind,
// whether it may be executed, and content. The clone's own .git is no content.
func contentOf(dir string) (map[string]string, error) {
	tree := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, path)
		if rel == ".git" {
			return fs.SkipDir
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		switch {
		case d.IsDir():
			tree[rel] = "directory"
		case d.Type() == fs.ModeSymlink:
			target, err := os.Readlink(path)
			tree[rel] = "symlink to " + target
			return err
		case d.Type().IsRegular():
			content, err := os.ReadFile(path)
			tree[rel] = fmt.Sprintf("file, executable %v, sha256 %x", info.Mode()&0o100 != 0, sha256.Sum256(content))
			return err
		default:
			tree[rel] = d.Type().String()
		}
		return nil
	})
	return tree, err
}

// verify compares a finished build with its source, through the backing.
func (s *soak) verify(b build, when string) {
	got, err := contentOf(s.m.Back(b.dir))
	if err != nil {
		s.violate("%s (%s), %s: %v", b.dir, b.kind, when, err)
		return
	}
	if diff := difference(got, s.src.tree); len(diff) > 0 {
		s.violate("%s (%s), %s: %d entries differ from the source:\n\t%s", b.dir, b.kind, when, len(diff), strings.Join(diff[:min(len(diff), 8)], "\n\t"))
	}
	if b.kind != "git clone" {
		return
	}
	out, err := s.command(10*patience, "git", "-c", "safe.directory=*", "--git-dir", s.m.Back(b.dir, ".git"), "fsck", "--no-dangling", "--no-progress")
	if err != nil {
		s.violate("%s, %s: git fsck: %v\n%s", b.dir, when, err, out)
	}
}

func difference(got, want map[string]string) []string {
	var diff []string
	for name, line := range got {
		if want[name] != line {
			diff = append(diff, fmt.Sprintf("%q: %q, want %q", name, line, want[name]))
		}
	}
	for name, line := range want {
		if got[name] == "" {
			diff = append(diff, fmt.Sprintf("%q: missing, want %q", name, line))
		}
	}
	return diff
}
