//go:build linux

package main

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/client"
)

func TestLookPath(t *testing.T) {
	dir := t.TempDir()
	for name, mode := range map[string]os.FileMode{"a/tool": 0o755, "b/tool": 0o755, "a/data": 0o644, "b/only": 0o755} {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, nil, mode); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "a", "only"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+"/none:"+dir+"/a:"+dir+"/b")
	for name, want := range map[string]struct {
		path string
		err  error
	}{
		"tool":           {dir + "/a/tool", nil},
		"only":           {dir + "/b/only", nil}, // not the directory
		"data":           {"", unix.EACCES},
		"nothing":        {"", unix.ENOENT},
		dir + "/a/tool":  {dir + "/a/tool", nil},
		dir + "/a/data":  {dir + "/a/data", unix.EACCES},
		dir + "/nothing": {dir + "/nothing", unix.ENOENT},
	} {
		if path, err := lookPath(name); path != want.path || !errors.Is(err, want.err) {
			t.Errorf("lookPath(%s) = %q, %v, want %q, %v", name, path, err, want.path, want.err)
		}
	}
}

// What holders end themselves is no loss.
func TestIsLoss(t *testing.T) {
	there := t.TempDir()
	for _, tt := range []struct {
		err  error
		want bool
	}{
		{nil, false},
		{unix.EIO, false},
		{&client.LostError{Reason: "broken"}, true},
		{&client.LostError{Reason: "expired"}, true},
		{&client.LostError{Reason: "of another kind"}, true},
		{&client.LostError{Reason: "released"}, false},
		{&client.LostError{Reason: "removed"}, false},
		{&client.LostError{Reason: "unknown", Dir: there}, true},
		{&client.LostError{Reason: "unknown", Dir: filepath.Join(there, "gone")}, false},
	} {
		if got := isLoss(tt.err); got != tt.want {
			t.Errorf("isLoss(%+v) = %v", tt.err, got)
		}
	}
}

func TestRunUsage(t *testing.T) {
	m := newFakeMount(t, nil)
	m.check(t, []string{"run"}, 64, "", "which directory")
	m.check(t, []string{"run", m.dir}, 64, "", "which command")
	m.check(t, []string{"run", m.dir, "-x"}, 64, "", "come before DIR")
	m.check(t, []string{"run", "-n", "-w1", m.dir, "true"}, 64, "", "exclude")
	m.check(t, []string{"run", m.dir, "no-such-command"}, 127, "", "no such command")
	m.check(t, []string{"run", m.dir, "true"}, 69, "", "stagefs mount")
}
