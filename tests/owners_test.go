//go:build linux

package tests

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// TestH2Stagers: whatever a build is made of, its own writes go through, a
// rival is kept out in the middle of it, and afterwards the lock is gone (R4,
// R5), with the content as it came from the source.
func TestH2Stagers(t *testing.T) {
	need(t, "root", "fuse")
	stageWithRivals(t, mount(t), stagerShapes())
}

// TestCompat: what Linux 5.10 offers is enough to know who belongs to whom.
func TestCompat(t *testing.T) {
	need(t, "root", "fuse")
	var few []shapeOf
	for _, s := range stagerShapes() {
		if slices.Contains([]string{"shell script", "python", "double fork", "make -j", "rsync"}, s.name) {
			few = append(few, s)
		}
	}
	stageWithRivals(t, mount(t, "--compat"), few)
}

func stageWithRivals(t *testing.T, m *Mount, shapes []shapeOf) {
	t.Helper()
	src := sourceTree(t)
	for i, s := range shapes {
		t.Run(s.name, func(t *testing.T) {
			need(t, s.needs...)
			st, resume := startPaused(t, m.on(t), s, fmt.Sprintf("build%d", i), src)
			rivalry(t, st.m, st.name)
			resume()
			st.finish()
		})
	}
}

// TestR4KilledStagers kills each of them in the middle: the directory is free
// and a rival stages there at its first try.
func TestR4KilledStagers(t *testing.T) {
	need(t, "root", "fuse")
	m := mount(t)
	src := sourceTree(t)
	for i, s := range stagerShapes() {
		t.Run(s.name, func(t *testing.T) {
			need(t, s.needs...)
			st, _ := startPaused(t, m.on(t), s, fmt.Sprintf("build%d", i), src)
			owner := st.m.Locks()[st.name].Pid
			mustDo(t, syscall.Kill(owner, syscall.SIGKILL))
			st.m.awaitFree(st.name)
			st.abandon()
			rival := agent(t)
			rival.want("ok", "creat", m.At(st.name, "devserver.lock"), "wronly,creat,excl")
			st.m.wantOwner(st.name, rival.Pid)
		})
	}
}

// sourceTree is big enough that a tool which copies it can be stopped midway.
func sourceTree(t *testing.T) string {
	t.Helper()
	src := filepath.Join(tempDir(t), "src")
	for _, dir := range []string{"", "a", "b", "b/deep", "c"} {
		mustDo(t, os.MkdirAll(filepath.Join(src, dir), 0o755))
		for i := range 120 {
			content := strings.Repeat(fmt.Sprintf("%s %d\n", dir, i), 40*(i%10))
			mustDo(t, os.WriteFile(filepath.Join(src, dir, fmt.Sprintf("%c%03d", 'a'+i%6, i)), []byte(content), 0o644))
		}
	}
	mustDo(t, os.Chmod(filepath.Join(src, "a/a000"), 0o755))
	return src
}

// rivalry tries to get into a directory that is being staged, as an ordinary
// user and as root, and expects that nothing changes.
func rivalry(t *testing.T, m *Mount, dir string) {
	t.Helper()
	before := digest(t, m.Back(dir))
	staged := slices.Sorted(maps.Keys(contents(t, m.Back(dir))))
	if len(staged) == 0 {
		t.Fatalf("nothing is staged in %s yet", dir)
	}
	file := staged[0]
	root := agent(t)
	for _, try := range [][]string{
		{"creat", m.At(dir, "rival"), "wronly,creat,excl"},
		{"mkdir", m.At(dir, "rival")},
		{"put", m.At(dir, file), "rival", "trunc"},
		{"unlink", m.At(dir, file)},
		{"rename", m.At(dir, file), m.At(dir, "rival")},
		{"rename", m.At(dir), m.At("rival")},
		{"chmod", m.At(dir, file), "0"},
	} {
		root.want("EBUSY", try...)
	}
	user := stranger(t)
	for _, a := range []*Agent{root, user} {
		a.want("EEXIST|EACCES", "creat", m.At(dir, "devserver"), "wronly,creat,excl")
		a.want("EEXIST|EACCES", "mkdir", m.At(dir, "devserver.lock"))
	}
	root.want("ok", "read", m.At(dir, file)) // C5
	if after := digest(t, m.Back(dir)); after != before {
		t.Errorf("a rival changed, or the stager did not stand still:\n%s", diff(before, after))
	}
}
