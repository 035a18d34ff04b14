//go:build linux

package tests

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestSystemsTable: the table in systems/README.md names each test of the
// systems, and no other.
func TestSystemsTable(t *testing.T) {
	table, named := namedIn(t, "systems/README.md")
	there := testsIn(t, "systems_*_test.go")
	wantAll(t, named, there)
	wantAll(t, there, named)
	programs, err := filepath.Glob("systems/*")
	mustDo(t, err)
	for _, p := range programs {
		if name := filepath.Base(p); name != "README.md" && !strings.Contains(table, "`"+name) {
			t.Errorf("the table lacks the program %s", name)
		}
	}
}

// TestFaultTable: the table in faults.md names each test that injects a fault,
// and none that is not there.
func TestFaultTable(t *testing.T) {
	_, named := namedIn(t, "faults.md")
	wantAll(t, named, testsIn(t, "*_test.go"))
	faults := testsIn(t, "fault_*_test.go")
	if len(faults) < 20 {
		t.Errorf("only %d tests of faults: %v", len(faults), faults)
	}
	wantAll(t, faults, named)
}

// namedIn is a file's text, and the tests that it names.
func namedIn(t *testing.T, file string) (text string, named map[string]bool) {
	t.Helper()
	b, err := os.ReadFile(file)
	mustDo(t, err)
	named = map[string]bool{}
	for _, name := range regexp.MustCompile(`\bTest[A-Z]\w+`).FindAllString(string(b), -1) {
		named[name] = true
	}
	return string(b), named
}

// testsIn is the tests in some files of this package.
func testsIn(t *testing.T, pattern string) map[string]bool {
	t.Helper()
	files, err := filepath.Glob(pattern)
	mustDo(t, err)
	there := map[string]bool{}
	for _, file := range files {
		code, err := os.ReadFile(file)
		mustDo(t, err)
		for _, m := range regexp.MustCompile(`(?m)^func (Test\w+)\(`).FindAllStringSubmatch(string(code), -1) {
			there[m[1]] = true
		}
	}
	return there
}

func wantAll(t *testing.T, names, among map[string]bool) {
	t.Helper()
	for name := range names {
		if !among[name] {
			t.Errorf("%s is named or defined, but not both", name)
		}
	}
}
