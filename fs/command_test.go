package fs

import (
	"strconv"
	"strings"
	"testing"
)

func TestCutDir(t *testing.T) {
	for in, want := range map[string]struct{ dir, rest string }{
		"board/v1":              {"board/v1", ""},
		"board/v1/":             {"board/v1", ""},
		"board/v1 it is stuck":  {"board/v1", "it is stuck"},
		`"board/new\nline" why`: {"board/new\nline", "why"},
		`"caf\xe9" why not`:     {"caf\xe9", "why not"},
		`"with space/v2"`:       {"with space/v2", ""},
		".":                     {".", ""},
		"a/..b":                 {"a/..b", ""},
		"caf\xe9":               {"caf\xe9", ""},
	} {
		dir, rest, err := cutDir(in)
		if dir != want.dir || rest != want.rest || err != nil {
			t.Errorf("cutDir(%q) = %q, %q, %v, want %q, %q", in, dir, rest, err, want.dir, want.rest)
		}
	}
	for _, in := range []string{
		"", " ", "/", "/etc", "..", "../x", "a/../b", "a//b", "./a", "a/./b", "a\tb", "a\x00b", "a\x1b[31m",
		`"unfinished`, `""`, `"a\x00b"`, `"../x"`, strings.Repeat("a", 256), "a\x7f", "dir why\r",
	} {
		if dir, rest, err := cutDir(in); err == nil {
			t.Errorf("cutDir(%q) = %q, %q, want an error", in, dir, rest)
		}
	}
}

// What is accepted names a place beneath the mount, and survives quoting.
func FuzzCutDir(f *testing.F) {
	for _, s := range []string{"a/b why", `"a\nb" c`, "..", `"\xff"`, "a b"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, in string) {
		dir, _, err := cutDir(in)
		if err != nil {
			return
		}
		for _, name := range split(dir) {
			if name == "" || name == ".." || name == "." || strings.ContainsAny(name, "/\x00") {
				t.Errorf("cutDir(%q) = %q, which leads elsewhere", in, dir)
			}
		}
		again, _, err := cutDir(strconv.Quote(dir))
		if again != dir || err != nil {
			t.Errorf("cutDir(Quote(%q)) = %q, %v", dir, again, err)
		}
	})
}
