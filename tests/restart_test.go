//go:build linux

package tests

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// TestS1NoGap: a new daemon takes the place of a dead mount, and there is no
// moment in which the backing can be written past the two. Where writing needs
// a lock (W4), a single file of somebody without one would show it.
func TestS1NoGap(t *testing.T) {
	m := mountOver(t, "--unlocked", "deny")
	out := tempDir(t) + "/wrote"
	// Each turn goes through the path anew, and finds what is there then.
	loop := exec.Command("sh", "-c", `while :; do { echo x >"$0"/naked; } 2>/dev/null && echo wrote >>"$1"; done`, m.Path, out)
	startCmd(t, loop)
	for range 20 {
		m.kill()
		m.start([]string{"--unlocked", "deny"})
		m.awaitReady()
	}
	if wrote, err := os.ReadFile(out); err == nil {
		t.Errorf("the stranger wrote %d times", len(wrote)/len("wrote\n"))
	}
	if _, err := os.Lstat(m.At("naked")); !os.IsNotExist(err) {
		t.Errorf("the stranger's file in the backing: %v", err)
	}
	table, err := os.ReadFile("/proc/self/mountinfo")
	mustDo(t, err)
	if n := strings.Count(string(table), " / "+m.Path+" "); n != 1 {
		t.Errorf("%d mounts at the path, want 1", n)
	}
}

// TestS1Descriptors: what is open on the dead mount reaches nothing and is no
// reason for --strict to refuse (M5).
func TestS1Descriptors(t *testing.T) {
	m := mountOver(t)
	a := agent(t)
	a.must("open", "w", m.At("file"), "rdwr,creat")
	m.kill()
	m.start([]string{"--strict"})
	m.awaitReady()
	a.want("ENOTCONN", "write", "w", "x")
	a.want("ENOTCONN", "close", "w") // what close(2) says is no reason to try again
}
