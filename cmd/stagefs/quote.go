//go:build linux

package main

import (
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// quote makes a name safe for a terminal: one that could move the cursor, forge
// a line or hide what it says is shown as a Go string literal, others as they are.
func quote(name string) string {
	if name == "" || !printable(name) || strings.HasPrefix(name, `"`) {
		return strconv.Quote(name)
	}
	return name
}

// printable tells whether s shows exactly what it holds. Beside control
// characters and bytes that are no UTF-8, that excludes the invisible
// characters that change the direction of text.
func printable(s string) bool {
	return utf8.ValidString(s) && strings.IndexFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) < 0
}

// shellWord is name as one word of a command that is to be typed: a shell reads
// it as it is meant, and no option.
func shellWord(name string) string {
	if strings.HasPrefix(name, "-") {
		name = "./" + name
	}
	plain := func(r rune) bool {
		return unicode.IsLetter(r) || unicode.IsDigit(r) || strings.ContainsRune("/._-+,:@%", r)
	}
	if name != "" && utf8.ValidString(name) && strings.IndexFunc(name, func(r rune) bool { return !plain(r) }) < 0 {
		return name
	}
	if printable(name) {
		return "'" + strings.ReplaceAll(name, "'", `'\''`) + "'"
	}
	var b strings.Builder
	b.WriteString("$'")
	for i := 0; i < len(name); i++ {
		if c := name[i]; c >= ' ' && c < 0x7f && c != '\'' && c != '\\' {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, `\%03o`, c)
		}
	}
	b.WriteString("'")
	return b.String()
}

// ctlWord is name as one word of a control line. The quotes are needed for
// a blank too, which ends a word.
func ctlWord(name string) string {
	if quoted := quote(name); quoted != name || !strings.ContainsAny(name, " \\'\"") {
		return quoted
	}
	return strconv.Quote(name)
}

// harmless replaces in text of many lines what only a line break may do. The
// daemon has quoted all names; this holds whatever it is that serves the mount.
func harmless(text string) string {
	lines := strings.SplitAfter(text, "\n")
	for i, line := range lines {
		body := strings.TrimSuffix(line, "\n")
		if !printable(strings.ReplaceAll(body, "\t", "")) {
			quoted := strconv.Quote(body)
			lines[i] = quoted[1:len(quoted)-1] + line[len(body):]
		}
	}
	return strings.Join(lines, "")
}
