//go:build linux

package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// memoryCgroup makes a cgroup that may have so many bytes.
func memoryCgroup(t *testing.T, bytes int) (dir string) {
	t.Helper()
	root, file := "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
	if !exists(filepath.Join(root, file)) {
		root, file = "/sys/fs/cgroup", "memory.max"
		if b, _ := os.ReadFile(filepath.Join(root, "cgroup.subtree_control")); !strings.Contains(string(b), "memory") {
			t.Skip("no cgroup can be given memory here")
		}
	}
	dir = cgroupIn(t, root)
	mustDo(t, os.WriteFile(filepath.Join(dir, file), []byte(itoa(bytes)), 0))
	return dir
}

// TestFaultMemoryLimit: a daemon is not killed because what it no longer needs fills the
// memory of its control group.
func TestFaultMemoryLimit(t *testing.T) {
	need(t, "root", "fuse")
	dir := staticDir(t)
	m := newMount(t, dir, dir+".mnt")
	m.cmdBin = filepath.Join(tempDir(t), "stagefs")
	script := fmt.Sprintf("#!/bin/sh\necho $$ >%s/cgroup.procs && exec %s \"$@\"\n", memoryCgroup(t, 128<<20), stagefsBin())
	mustDo(t, os.WriteFile(m.cmdBin, []byte(script), 0o755))
	m.serve()
	pid := m.cmd.Process.Pid
	a := agent(t)
	for i := range 20 { // few locks, with long names
		dir := m.At("D" + itoa(i))
		for range 15 {
			a.must("mkdir", dir)
			dir += "/" + strings.Repeat("\x01", 250)
		}
		a.must("mkdir", dir)
		a.must("creat", dir+"/devserver", "wronly,creat,excl")
	}
	// What is shown takes a quarter of it, and is made again and again.
	for i := 0; i < 120 && !m.dead(); i++ {
		a.Try("open", itoa(i%40), m.control("locks.json"), "rdonly")
		if i >= 39 {
			a.Try("close", itoa((i+1)%40))
		}
	}
	if b, _ := m.version(); m.dead() || !strings.Contains(string(b), "\npid "+itoa(pid)+"\n") {
		t.Errorf("the daemon was ended: %v", m.cmd.ProcessState)
	}
}
