package fs

import (
	"strings"
	"testing"
	"unicode"
)

// TestPlain: no file name can forge a row of a listing, or drive a terminal.
func TestPlain(t *testing.T) {
	for in, want := range map[string]string{
		"board/v1":    "board/v1",
		"straße":      "straße",
		"":            `""`,
		"a b":         `"a b"`,
		"a\nb":        `"a\nb"`,
		"a\x1b[31mb":  `"a\x1b[31mb"`,
		"caf\xe9":     `"caf\xe9"`,
		`say "hi"`:    `"say \"hi\""`,
		`back\slash`:  `"back\\slash"`,
		"\u202egnp.x": `"\u202egnp.x"`,
	} {
		if got := plain(in); got != want {
			t.Errorf("plain(%q) = %s, want %s", in, got, want)
		}
	}
}

func FuzzPlain(f *testing.F) {
	f.Add("a\nb")
	f.Fuzz(func(t *testing.T, in string) {
		got := plain(in)
		if strings.ContainsFunc(got, func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Errorf("plain(%q) = %q, which is not plain", in, got)
		}
	})
}

// TestBrief: a command line is cut between two characters, whatever they are, and before it
// is quoted.
func TestBrief(t *testing.T) {
	for in, want := range map[string]string{
		"make":                             "make",
		strings.Repeat("x", 121):           strings.Repeat("x", 117) + "...",
		strings.Repeat("\u00e9", 61):       strings.Repeat("\u00e9", 58) + "...",
		"make " + strings.Repeat("x", 112): `"make ` + strings.Repeat("x", 112) + `"`,
		"make " + strings.Repeat("x", 114): `"make ` + strings.Repeat("x", 110) + `..."`,
		strings.Repeat("\n", 61):           `"` + strings.Repeat(`\n`, 57) + `..."`,
		strings.Repeat("\xff", 30):         `"` + strings.Repeat(`\xff`, 28) + `..."`,
		"":                                 `""`,
	} {
		if got := brief(in); got != want {
			t.Errorf("brief(%q) = %q, want %q", in, got, want)
		}
	}
}
