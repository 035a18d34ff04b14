//go:build linux

package main

import (
	"os"
	"path/filepath"
	"testing"
)

func TestAcquireUsage(t *testing.T) {
	m := newFakeMount(t, nil)
	file := filepath.Join(t.TempDir(), "id")
	m.check(t, []string{"acquire"}, 64, "", "missing argument")
	m.check(t, []string{"acquire", "--client=", m.dir}, 64, "", "empty")
	m.check(t, []string{"acquire", "--client=", "--client-file", file, m.dir}, 64, "", "empty")
	m.check(t, []string{"acquire", "--ttl=5s", m.dir}, 64, "", "--client")
	m.check(t, []string{"acquire", "--ttl=0", "--client=c", m.dir}, 64, "", "want 10ms to 24h")
	m.check(t, []string{"acquire", "--why", "a\nb", m.dir}, 64, "", "control characters")
	m.check(t, []string{"acquire", "--client-file", file, m.dir}, 69, "", "stagefs mount")
	if _, err := os.Stat(file); err == nil {
		t.Error("the client's file is left")
	}
}

// The client's file is for its owner alone, and none that exists is changed.
func TestWriteClientFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "id")
	if err := writeClientFile(file, "job 7"); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(file)
	if err != nil || info.Mode() != 0o600 {
		t.Errorf("mode %v, %v, want 0600", info.Mode(), err)
	}
	if err := writeClientFile(file, "other"); err == nil {
		t.Error("a file that exists was overwritten")
	}
	if id, err := readClientFile(file); id != "job 7" || err != nil {
		t.Errorf("readClientFile = %q, %v", id, err)
	}
	if err := os.WriteFile(file, []byte("\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readClientFile(file); err == nil {
		t.Error("an empty file gives an ID")
	}
}
