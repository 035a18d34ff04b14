//go:build linux

package main

import (
	"errors"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

// No name drives a terminal or forges a line.
func TestQuote(t *testing.T) {
	for name, want := range map[string]string{
		"a/b c":        "a/b c",
		"größe":        "größe",
		"":             `""`,
		"a\nb":         `"a\nb"`,
		"\x1b[2J":      `"\x1b[2J"`,
		"a\xffb":       `"a\xffb"`,
		"\u202eexe":    `"\u202eexe"`,
		"\u009b2J":     `"\u009b2J"`,
		`"quoted"`:     `"\"quoted\""`,
		"tab\there":    `"tab\there"`,
		"del\x7f":      `"del\x7f"`,
		"zero\u200bwd": `"zero\u200bwd"`,
	} {
		if got := quote(name); got != want {
			t.Errorf("quote(%q) = %s, want %s", name, got, want)
		}
	}
}

func TestCtlWord(t *testing.T) {
	for name, want := range map[string]string{
		"a/b":  "a/b",
		".":    ".",
		"a b":  `"a b"`,
		`a\b`:  `"a\\b"`,
		`a"b`:  `"a\"b"`,
		"a\nb": `"a\nb"`,
	} {
		if got := ctlWord(name); got != want {
			t.Errorf("ctlWord(%q) = %s, want %s", name, got, want)
		}
	}
}

// A shell reads what is suggested as the very name.
func TestShellWord(t *testing.T) {
	for name, want := range map[string]string{
		"/srv/größe_1.0": "/srv/größe_1.0",
		"/with space":    "'/with space'",
		"it's":           `'it'\''s'`,
		"$HOME":          "'$HOME'",
		"~":              "'~'",
		"":               "''",
		"-x":             "./-x",
		"a\nb'\\ \xff":   `$'a\012b\047\134 \377'`,
	} {
		got := shellWord(name)
		if got != want {
			t.Errorf("shellWord(%q) = %s, want %s", name, got, want)
		}
		out, err := exec.Command("bash", "-c", "printf %s "+got).Output()
		if errors.Is(err, exec.ErrNotFound) {
			continue
		}
		if err != nil || strings.TrimPrefix(string(out), "./") != name {
			t.Errorf("bash reads %s as %q, %v", got, out, err)
		}
	}
}

func FuzzQuote(f *testing.F) {
	f.Add("a\x1bb c")
	f.Fuzz(func(t *testing.T, name string) {
		for _, got := range []string{quote(name), ctlWord(name)} {
			if !utf8.ValidString(got) || strings.ContainsFunc(got, func(r rune) bool { return r < ' ' || r == 0x7f }) {
				t.Errorf("quoted %q as %q", name, got)
			}
			if back, err := strconv.Unquote(got); got != name && (err != nil || back != name) {
				t.Errorf("quoted %q as %s, which reads %q, %v", name, got, back, err)
			}
		}
	})
}

func TestHarmless(t *testing.T) {
	const text = "DIR\tPID\na b\t1\n\x1b]0;evil\x07\t2\n\nlast"
	const want = "DIR\tPID\na b\t1\n\\x1b]0;evil\\a\\t2\n\nlast"
	if got := harmless(text); got != want {
		t.Errorf("harmless(%q) = %q, want %q", text, got, want)
	}
}
