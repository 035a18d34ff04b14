//go:build linux

package main

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagefs/stagefs/lockstate"
)

const threeDenials = `{"time":"2026-01-02T03:04:05Z","op":"unlink","path":"board/v1/x","pid":70,"start":1,"uid":5,"cmd":"rm\u001b[2J","errno":"EBUSY","lock":"board/v1","lock_pid":41,"reason":"held"}
{"time":"2026-01-02T03:04:06Z","op":"mkdir","path":"other/y","pid":71,"start":1,"uid":5,"cmd":"mkdir","errno":"EBUSY","lock":"other","lock_pid":1,"reason":""}
not json
{"time":"2026-01-02T03:04:07Z","op":"rename","path":"board","pid":72,"start":1,"uid":5,"cmd":"mv","errno":"EBUSY","lock":"board/v1","lock_pid":41,"reason":""}
`

func TestWhy(t *testing.T) {
	m := newFakeMount(t, map[string]string{"locks.json": twoLocks, "denials": threeDenials})
	for _, tt := range []struct {
		path string
		want []string
		not  []string
	}{
		{"board/v1/image", []string{"board/v1/image: held by process 41 (tar xf x)", "token 7", "devserver.lock", "board/v1/log: process 50"}, []string{"rm", "free"}},
		{"board/v1", []string{"held by process 41", `process 70 ("rm\x1b[2J"), uid 5: EBUSY, held`, "rename board by process 72 (mv), uid 5: EBUSY, lock on board/v1 of process 41"}, []string{"other/y"}},
		{"board/v1x", []string{"board/v1x: free"}, []string{"held", "refusals"}},
		{"board/v2", []string{"free", "orphan: board/v2/devserver", "board/v2/x: process 60"}, nil},
		{"board", []string{"board: free", "locks beneath:\n  board/v1: process 41", "unlink board/v1/x"}, []string{"other/y"}},
		{"odd\xff/x", []string{`"odd\xff/x": held by process 42 ("evil\x1b[2J")`}, nil},
		{".", []string{".: free", "locks beneath", "other/y"}, nil},
	} {
		m.check(t, []string{"why", filepath.Join(m.dir, tt.path)}, 0, tt.want[0], "")
		for _, want := range tt.want {
			if !strings.Contains(m.out.String(), want) {
				t.Errorf("why %q prints\n%s\nwant %q in it", tt.path, m.out.String(), want)
			}
		}
		for _, not := range tt.not {
			if strings.Contains(m.out.String(), not) {
				t.Errorf("why %q prints\n%s\nwant no %q in it", tt.path, m.out.String(), not)
			}
		}
		if strings.ContainsRune(m.out.String(), '\x1b') {
			t.Errorf("why %q prints an escape: %q", tt.path, m.out.String())
		}
	}
	m.check(t, []string{"why", "/"}, 69, "", "no stagefs mount")
}

// Who has a file open is not known of what an earlier daemon served.
func TestWhyUnknown(t *testing.T) {
	const listing = `{"locks": [], "waiters": [], "orphans": [], "blockers": [{"pid": 0, "start": 0, "cmd": "", "path": "D/x"}]}`
	m := newFakeMount(t, map[string]string{"locks.json": listing, "denials": ""})
	m.check(t, []string{"why", filepath.Join(m.dir, "D")}, 0, "D/x: a process that is not known: from before", "")
}

// The nearest lock governs (C2); of several on one directory, the last (A13).
func TestGoverning(t *testing.T) {
	rows := []lockstate.Row{
		{Dir: "a", Token: 1}, {Dir: "a/b", Token: 2}, {Dir: "a/b", Token: 5}, {Dir: "a/bc", Token: 3},
	}
	for rel, want := range map[string][]uint64{
		"a": {1}, "a/x": {1}, "a/b": {2, 5}, "a/b/c/d": {2, 5}, "a/bc": {3}, "a/bcd": {1}, "x": nil, ".": nil,
	} {
		var got []uint64
		for _, row := range governing(rows, rel) {
			got = append(got, row.Token)
		}
		if len(got) != len(want) || len(got) > 0 && (got[0] != want[0] || got[len(got)-1] != want[len(want)-1]) {
			t.Errorf("governing(%q) = %v, want %v", rel, got, want)
		}
	}
}
