//go:build linux

package tests

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
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
