//go:build linux

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const fourEvents = `{"time":"2026-01-02T03:04:05Z","event":"acquired","dir":"board/v1","token":7,"pid":41,"kind":"explicit","protocol":"link"}
{"time":"2026-01-02T03:04:06Z","event":"refused","dir":"other","token":9,"pid":70,"reason":"EBUSY","by":42,"why":"\"other\" is held"}
{"time":"2026-01-02T03:04:07Z","event":"broken","dir":"board/v1","token":7,"client":"c\u001b[2J","reason":"broken","by":43,"why":"it hangs","later":1}
{"time":"2026-01-02T03:04:08Z","event":"lost-events","dir":"","count":12}
`

// Events of the directory, beneath it and above it are printed, and nothing that a
// name holds reaches the terminal.
func TestEvents(t *testing.T) {
	m := newFakeMount(t, map[string]string{"events": fourEvents})
	for _, dir := range []string{"board/v1/sub", "other"} {
		if err := os.MkdirAll(filepath.Join(m.dir, dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		path string
		want []string
		says string
	}{
		{".", []string{
			"acquired board/v1 token 7 process 41 explicit (link)", `refused other token 9 process 70: EBUSY by process 42: "other" is held`,
			`broken board/v1 token 7 client "c\x1b[2J": broken by process 43: it hangs`, "lost-events 12",
		}, ""},
		{"board", []string{"acquired", "broken", "lost-events"}, ""},
		{"board/v1/sub", []string{"acquired", "broken", "lost-events"}, ""},
		{"other", []string{"refused", "lost-events"}, ""},
		{"else", []string{"lost-events"}, "else is missing; its events follow when it is there"},
	} {
		m.check(t, []string{"events", filepath.Join(m.dir, tt.path)}, 0, tt.want[0], tt.says)
		lines := strings.Split(strings.TrimSpace(m.out.String()), "\n")
		if len(lines) != len(tt.want) {
			t.Errorf("events %s prints %q, want %q", tt.path, lines, tt.want)
			continue
		}
		for i, line := range lines {
			if !strings.Contains(line, tt.want[i]) {
				t.Errorf("events %s prints %q, want %q", tt.path, line, tt.want[i])
			}
		}
	}
	m.check(t, []string{"events", "--json", filepath.Join(m.dir, "board")}, 0, `"later":1`, "")
	m.check(t, []string{"events", "/"}, 69, "", "no stagefs mount")
	m.check(t, []string{"events"}, 64, "", "missing argument")
	m = newFakeMount(t, map[string]string{"events": "no json\n"})
	m.check(t, []string{"events", m.dir}, 70, "", "events")
}
