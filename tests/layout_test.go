package tests

import (
	"os"
	"os/exec"
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
