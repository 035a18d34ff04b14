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
	table, err := os.ReadFile("systems/README.md")
	mustDo(t, err)
	named, there := map[string]bool{}, map[string]bool{}
	for _, name := range regexp.MustCompile(`\bTest[A-Z]\w+`).FindAllString(string(table), -1) {
		named[name] = true
	}
	files, err := filepath.Glob("systems_*_test.go")
	mustDo(t, err)
	for _, file := range files {
		code, err := os.ReadFile(file)
		mustDo(t, err)
		for _, m := range regexp.MustCompile(`(?m)^func (Test\w+)\(`).FindAllStringSubmatch(string(code), -1) {
			if there[m[1]] = true; !named[m[1]] && m[1] != t.Name() {
				t.Errorf("the table lacks %s", m[1])
			}
		}
	}
	for name := range named {
		if !there[name] {
			t.Errorf("the table names %s, which is not there", name)
		}
	}
	programs, err := filepath.Glob("systems/*")
	mustDo(t, err)
	for _, p := range programs {
		if name := filepath.Base(p); name != "README.md" && !strings.Contains(string(table), "`"+name) {
			t.Errorf("the table lacks the program %s", name)
		}
	}
}
