//go:build linux

package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stagefs/stagefs/fs"
)

// What is written to the ctl file, and what its errno values mean to a user.
func TestControl(t *testing.T) {
	for _, tt := range []struct {
		verb string
		dir  string
		args []string
		want string
	}{
		{"release", "board/v1", nil, "release board/v1\n"},
		{"release", ".", nil, "release .\n"},
		{"release", "a b", nil, "release \"a b\"\n"},
		{"release", "a\nrelease b", nil, "release \"a\\nrelease b\"\n"},
		{"release", "a\xffb", nil, "release \"a\\xffb\"\n"},
		{"break", "board/v1", []string{"--why", "its owner left"}, "break board/v1 its owner left\n"},
	} {
		m := newFakeMount(t, map[string]string{"ctl": ""})
		m.check(t, append([]string{tt.verb, filepath.Join(m.dir, tt.dir)}, tt.args...), 0, "", "")
		got, err := os.ReadFile(filepath.Join(m.dir, fs.ControlDir, "ctl"))
		if err != nil || string(got) != tt.want {
			t.Errorf("%s %q %q writes %q, want %q", tt.verb, tt.dir, tt.args, got, tt.want)
		}
	}
}

func TestControlRefuses(t *testing.T) {
	m := newFakeMount(t, nil)
	m.check(t, []string{"break", m.dir}, 64, "", "--why")
	m.check(t, []string{"break", "--why", "a\nbreak b", m.dir}, 64, "", "control characters")
	m.check(t, []string{"release", m.dir}, 69, "", "no control directory")
	m.check(t, []string{"release", "/"}, 69, "", "no stagefs mount")

	// /dev/full refuses every write, as a control file may.
	if err := os.Symlink("/dev/full", filepath.Join(m.dir, fs.ControlDir, "ctl")); err != nil {
		t.Fatal(err)
	}
	m.check(t, []string{"release", m.dir}, 71, "", "no space")
}
