//go:build linux

package tests

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// memoryCgroup makes a cgroup that may have so many bytes.
func memoryCgroup(t *testing.T, bytes int) (dir string) {
	t.Helper()
	root := "/sys/fs/cgroup/memory"
	if !exists(filepath.Join(root, memoryFile1)) {
		root = "/sys/fs/cgroup"
		if b, _ := os.ReadFile(filepath.Join(root, "cgroup.subtree_control")); !strings.Contains(string(b), "memory") {
			t.Skip("no cgroup can be given memory here")
		}
	}
	dir = cgroupIn(t, root)
	limitMemory(t, dir, bytes)
	return dir
}

// memoryFile1 has the limit of a cgroup of version 1.
const memoryFile1 = "memory.limit_in_bytes"

// limitMemory lets a cgroup have so many bytes.
func limitMemory(t *testing.T, cgroup string, bytes int) {
	t.Helper()
	file := filepath.Join(cgroup, memoryFile1)
	if !exists(file) {
		file = filepath.Join(cgroup, "memory.max")
	}
	mustDo(t, os.WriteFile(file, []byte(itoa(bytes)), 0))
}

// mountIn serves in a cgroup.
func mountIn(t *testing.T, cgroup string, opts ...string) *Mount {
	need(t, "root", "fuse")
	dir := staticDir(t)
	m := newMount(t, dir, dir+".mnt")
	m.startedBy("echo $$ >"+cgroup+"/cgroup.procs || exit", opts...)
	m.awaitReady()
	return m
}

// mountLimited serves with so many bytes of memory, and with twenty locks on long names.
func mountLimited(t *testing.T, bytes int, opts ...string) *Mount {
	m := mountIn(t, memoryCgroup(t, bytes), opts...)
	m.lockLongNames(agent(t))
	return m
}

// TestFaultMemoryLimit: a daemon is not killed because what it no longer needs fills the
// memory of its control group.
func TestFaultMemoryLimit(t *testing.T) {
	m := mountLimited(t, 128<<20)
	a, pid := agent(t), m.daemon()
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

// TestFaultMemoryLimitSupervised: where it needs more than that, its supervisor says why it
// was killed; the locks are there with the next one.
func TestFaultMemoryLimitSupervised(t *testing.T) {
	m := mountLimited(t, 32<<20, "--supervise")
	a, pid := agent(t), m.daemon()
	held := m.Listing()
	for i := 0; i < 200 && running(pid); i++ {
		a.Try("open", itoa(i), m.control("locks.json"), "rdonly")
	}
	m.awaitNext(pid)
	if want := "killed, for want of memory: its control group may have 32 MiB; starting another one"; !strings.Contains(m.Log(), want) {
		t.Errorf("the log has no %q", want)
	}
	if now := m.Listing(); len(now.Locks) != len(held.Locks) {
		t.Errorf("%d locks are there, of %d", len(now.Locks), len(held.Locks))
	}
}

// TestFaultMemoryLocks: nobody makes so many locks that no daemon could take them over any more.
func TestFaultMemoryLocks(t *testing.T) {
	const limit = 40 << 20
	need(t, "root", "fuse")
	cgroup := memoryCgroup(t, limit)
	m := mountIn(t, cgroup, "--supervise")
	a := agent(t)
	name := func(i int) string { return m.At(strings.Repeat("\x01", 245) + itoa(i)) }
	n, got := 0, "ok"
	for ; n < 2000; n++ {
		if got = a.Try("mkdir", name(n)); got != "ok" {
			break
		}
	}
	if got != "ENOLCK" || exists(name(n)) {
		t.Fatalf("mkdir of the %d-th: %s, want ENOLCK, and no directory", n, got)
	}
	a.must("mkdir", name(0)+"/in") // what is covered takes nothing
	m.wantLog("no more locks can be had")
	for range 2 {
		pid := m.daemon()
		mustDo(t, syscall.Kill(pid, syscall.SIGKILL))
		m.awaitSupervised(pid)
		if now := len(m.Listing().Locks); now != n {
			t.Fatalf("%d locks are there, of %d", now, n)
		}
	}
	if got := a.Try("mkdir", name(n)); got != "ENOLCK" {
		t.Errorf("mkdir of the next daemon: %s, want ENOLCK", got)
	}
	a.must("rmdir", name(1))
	a.must("mkdir", name(1))
	limitMemory(t, cgroup, 2*limit)
	a.must("mkdir", name(n))
}

// TestFaultMemoryTexts: nor if they take most of it by what they are for, which may be told
// later, or by their lock files' names.
func TestFaultMemoryTexts(t *testing.T) {
	const limit = 40 << 20
	need(t, "root", "fuse")
	long := strings.Repeat("\x01", 250)
	for name, take := range map[string]func(m *Mount, a *Agent, dir string) (errno string){
		"reasons": func(m *Mount, a *Agent, dir string) string {
			a.Try("mkdir", m.At(dir)) // while there is room
			a.command(m, "acquire %s", dir)
			errno, _ := a.command(m, `acquire %s why="%s"`, dir, strings.Repeat(`\x01`, 1000))
			return errno
		},
		"lock files": func(m *Mount, a *Agent, dir string) string {
			mustDo(t, os.Mkdir(m.Back(dir), 0o755))
			return a.Try("creat", m.At(dir, long), "wronly,creat,excl")
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := mountIn(t, memoryCgroup(t, limit), "--supervise", "--lock-name", long)
			a := agent(t)
			n, got := 0, "ok"
			for ; n < 4000 && got == "ok"; n++ {
				got = take(m, a, "d"+itoa(n))
			}
			if got != "ENOLCK" {
				t.Fatalf("the %d-th: %s, want ENOLCK", n, got)
			}
			locks := len(m.Listing().Locks)
			pid := m.daemon()
			mustDo(t, syscall.Kill(pid, syscall.SIGKILL))
			m.awaitSupervised(pid)
			if now := len(m.Listing().Locks); now != locks {
				t.Errorf("%d locks are there, of %d", now, locks)
			}
		})
	}
}
