//go:build linux

package tests

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// TestM2Bounded: a walk over more directories than the daemon may have
// descriptors leaves it with a bounded number of them, and what the kernel
// forgets the daemon forgets.
func TestM2Bounded(t *testing.T) {
	dir := staticDir(t)
	const dirs, files = 6000, 4
	for i := range dirs {
		d := filepath.Join(dir, "D"+strconv.Itoa(i))
		mustDo(t, os.Mkdir(d, 0o777))
		for f := range files {
			mustDo(t, os.WriteFile(filepath.Join(d, fmt.Sprintf("file %d", f)), nil, 0o666))
		}
	}
	m := mountDir(t, dir, dir+".mnt")
	idle := m.openFiles()
	seen := 0
	mustDo(t, filepath.WalkDir(m.Path, func(path string, e fs.DirEntry, err error) error {
		if err == nil {
			seen++
			_, err = e.Info()
		}
		return err
	}))
	if want := 1 + dirs*(1+files); seen != want {
		t.Errorf("walked over %d files, want %d", seen, want)
	}
	if got := m.openFiles() - idle; got > 4096+64 {
		t.Errorf("the walk left %d descriptors open", got)
	}
	if got := m.metric("nodes"); got < dirs {
		t.Errorf("stagefs_nodes = %d after the walk, want %d at least", got, dirs)
	}
	for i := range dirs {
		mustDo(t, os.RemoveAll(m.At("D"+strconv.Itoa(i))))
	}
	eventually(t, "what is gone is forgotten", func() bool { return m.metric("nodes") < 100 && m.openFiles() < idle+100 })
}

// openFiles returns how many descriptors the daemon has.
func (m *Mount) openFiles() int {
	m.t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", m.cmd.Process.Pid))
	mustDo(m.t, err)
	return len(entries)
}

// lockLongNames takes few locks, with long names, of which JSON makes six times as much.
func (m *Mount) lockLongNames(a *Agent) {
	m.t.Helper()
	for i := range 20 {
		dir := m.At("D" + itoa(i))
		for range 15 {
			a.must("mkdir", dir)
			dir += "/" + strings.Repeat("\x01", 250)
		}
		a.must("mkdir", dir)
		a.must("creat", dir+"/devserver", "wronly,creat,excl")
	}
}

// TestFaultTexts: what open control files show takes a bounded part of the daemon's
// memory, whoever opens them how often, and root is told all the same.
func TestFaultTexts(t *testing.T) {
	m := mount(t)
	a := stranger(t)
	m.lockLongNames(a)
	list, err := os.ReadFile(m.control("locks.json"))
	mustDo(t, err)
	const most = 64 << 20
	opened, got := 0, ""
	for ; got != "ENFILE"; opened++ {
		if got = a.Try("open", itoa(opened), m.control("locks.json"), "rdonly"); got != "ok" && got != "ENFILE" || opened*len(list) > most+most/4 {
			t.Fatalf("the %d-th open of %d bytes: %s, want ENFILE in the end", opened, len(list), got)
		}
	}
	if opened*len(list) < most/2 {
		t.Errorf("%d opens of %d bytes are refused", opened, len(list))
	}
	agentAs(t, 12345).must("creat", m.control("locks.json"), "rdonly")
	m.Listing() // for root
	m.replace()
	a.want("ENFILE", "creat", m.control("locks.json"), "rdonly")
	a.must("close", "0")
	a.must("close", "1")
	eventually(t, "there is room again", func() bool { return a.Try("creat", m.control("locks.json"), "rdonly") == "ok" })
}
