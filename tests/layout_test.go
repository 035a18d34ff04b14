package tests

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/stagefs/stagefs/"

// mayImport are the arrows between the packages: who may import what of the
// project, and go-fuse.
var mayImport = map[string][]string{
	"lockstate/procid":      {},
	"lockstate/advisory":    {},
	"lockstate/prefetch":    {},
	"lockstate/filestore":   {"lockstate", "lockstate/prefetch"},
	"lockstate/storetest":   {"lockstate"},
	"lockstate":             {"lockstate/procid"},
	"lockstate/client":      {},
	"fs/transport":          {"lockstate/procid", "go-fuse"},
	"fs":                    {"fs/transport", "lockstate", "lockstate/procid", "lockstate/advisory", "lockstate/prefetch", "lockstate/filestore", "go-fuse"},
	"cmd/stagefs":           {"fs", "lockstate/client", "lockstate", "lockstate/procid", "lockstate/filestore"},
	"tests":                 {"lockstate", "lockstate/client"},
	"tests/bench":           {},
	"tests/bench/floor":     {"fs/transport", "go-fuse"},
	"tests/systems/ttllock": {"lockstate/client"},
}

func TestImports(t *testing.T) {
	cmd := exec.Command("go", "list", "-f", `{{.ImportPath}} {{join .Imports " "}}`, "./...")
	cmd.Dir = ".."
	out, err := cmd.Output()
	mustDo(t, err)
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		name := strings.TrimPrefix(f[0], module)
		allowed, known := mayImport[name]
		if !known {
			t.Errorf("package %s has no place in the layout", name)
		}
		for _, imp := range f[1:] {
			what, ours := strings.CutPrefix(imp, module)
			if strings.HasPrefix(imp, "github.com/hanwen/go-fuse/") {
				what, ours = "go-fuse", true
			}
			if ours && !slices.Contains(allowed, what) {
				t.Errorf("%s imports %s", name, what)
			}
		}
	}
}

// TestElsewhere: on other systems there is a program that says that it is of no use there.
func TestElsewhere(t *testing.T) {
	cmd := exec.Command("go", "list", "-deps", "./cmd/stagefs") // which fails if what is for Linux only is a part of it
	cmd.Dir, cmd.Env = "..", append(os.Environ(), "GOOS=darwin")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// TestRules: the rules and invariants that comments and the names of tests refer to are
// listed: rules in package lockstate's documentation, invariants in that of the package
// itself. Each rule that is listed is referred to.
func TestRules(t *testing.T) {
	const listed = "lockstate"
	type reference struct{ dir, name string } // dir is "" for a rule
	lists, found := make(map[reference]bool), make(map[reference]string)
	item := regexp.MustCompile(`^(?:\t|  - )([A-Z]\d+[a-z]?)[: ]`)
	named := regexp.MustCompile(`\b([ACHILMRSW]\d+[a-z]?)\b`)
	tested := regexp.MustCompile(`^Test([ACHLMRSW]\d+[a-z]?)([A-Z]|$)`)
	err := filepath.WalkDir("..", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".go") {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		dir, err := filepath.Rel("..", filepath.Dir(path))
		if err != nil {
			return err
		}
		add := func(names [][]string) {
			for _, m := range names {
				r := reference{name: m[1]}
				if strings.HasPrefix(r.name, "I") {
					r.dir = dir
				}
				found[r] = path
			}
		}
		for _, c := range file.Comments {
			if c != file.Doc {
				add(named.FindAllStringSubmatch(c.Text(), -1))
				continue
			}
			for line := range strings.Lines(c.Text()) {
				m := item.FindStringSubmatch(line)
				switch {
				case m == nil:
					add(named.FindAllStringSubmatch(line, -1))
				case strings.HasPrefix(m[1], "I"):
					lists[reference{dir, m[1]}] = true
				case dir == listed:
					lists[reference{name: m[1]}] = true
				}
			}
		}
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok {
				add(tested.FindAllStringSubmatch(f.Name.Name, -1))
			}
		}
		return nil
	})
	mustDo(t, err)
	for r, path := range found {
		if !lists[r] {
			t.Errorf("%s refers to %s, which is not listed", path, r.name)
		}
	}
	for r := range lists {
		if r.dir == "" && found[r] == "" {
			t.Errorf("nothing refers to %s, which is listed", r.name)
		}
	}
}
