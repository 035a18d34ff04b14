//go:build linux

package tests

import (
	"os"
	"strings"
	"testing"
)

// TestW3Kept: once a release has returned, nothing done under the lock is lost,
// nor hidden from the next: not what was written through a mapping, nor what
// was written by a process that was killed right after.
func TestW3Kept(t *testing.T) {
	m := mount(t)
	page := os.Getpagesize()
	for _, how := range []string{"unlink", "release", "kill", "exit"} {
		t.Run(how, func(t *testing.T) {
			m := m.on(t)
			dir := how
			openDir(t, m.Back(dir))
			a, b := agent(t), agent(t)
			// Others have looked before, and may have it in their cache.
			mustDo(t, os.WriteFile(m.Back(dir, "old"), []byte("before"), 0o666))
			b.must("read", m.At(dir, "old"))
			a.must("creat", m.At(dir, "devserver"), "wronly,creat,excl")
			a.must("put", m.At(dir, "old"), "after!", "")
			a.must("open", "m", m.At(dir, "mapped"), "rdwr,creat")
			a.must("ftruncate", "m", itoa(page))
			a.must("mmap", "map", "m")
			a.must("poke", "map", "through a mapping", "unsynced")
			a.must("open", "w", m.At(dir, "written"), "wronly,creat")
			a.must("write", "w", "through a handle")
			switch how {
			case "unlink":
				a.must("unlink", m.At(dir, "devserver"))
			case "release":
				a.must("put", m.control("ctl"), "release "+dir, "")
			case "kill":
				a.Kill()
			case "exit":
				a.Exit(0)
			}
			m.awaitFree(dir)
			wantContent := func(where string, read func(name string) string) {
				t.Helper()
				for name, want := range map[string]string{"old": "after!", "mapped": "through a mapping", "written": "through a handle"} {
					if got := strings.TrimRight(read(name), "\x00"); got != want {
						t.Errorf("%s in the %s after the release = %q, want %q", name, where, got, want)
					}
				}
			}
			wantContent("mount", func(name string) string { return b.Get("read", m.At(dir, name)) })
			if how == "unlink" || how == "release" {
				// What a mapping changes reaches the backing when it is closed; until
				// then it is in the next owner's way (R8).
				a.must("munmap", "map")
				a.must("close", "m")
			}
			wantContent("backing", func(name string) string { s, _ := os.ReadFile(m.Back(dir, name)); return string(s) })
		})
	}
}

// TestCoherence: what one process has written, another reads at once, with its
// size and time, also through handles and names that it had before.
func TestCoherence(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	a, b := agent(t), agent(t)
	a.must("put", m.At("D/f"), "one", "creat")
	b.must("open", "r", m.At("D/f"), "rdonly")
	b.must("stat", m.At("D/f"))
	b.want("ENOENT", "stat", m.At("D/g"))
	a.must("open", "w", m.At("D/f"), "wronly,append")
	for i, more := range []string{"two", "three", "four"} {
		a.must("write", "w", more)
		want := []string{"onetwo", "onetwothree", "onetwothreefour"}[i]
		if got := b.Get("pread", "r", "100", "0"); got != want {
			t.Errorf("read through an older handle = %q, want %q", got, want)
		}
		if got := b.Get("read", m.At("D/f")); got != want {
			t.Errorf("read = %q, want %q", got, want)
		}
	}
	a.must("rename", m.At("D/f"), m.At("D/g"))
	b.want("ENOENT", "stat", m.At("D/f"))
	b.want("ok", "stat", m.At("D/g"))
	if got := b.Get("readdir", m.At("D")); got != "g" {
		t.Errorf("readdir = %q, want g", got)
	}
	a.must("truncate", m.At("D/g"), "3")
	if got := b.Get("read", m.At("D/g")); got != "one" {
		t.Errorf("read after truncate = %q, want one", got)
	}
	a.must("unlink", m.At("D/g"))
	if got := b.Get("pread", "r", "100", "0"); got != "one" {
		t.Errorf("read of the unlinked file = %q, want one", got)
	}
}
