//go:build linux

package tests

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
)

// TestM2Reserve: what ext4 keeps back for root, root gets and nobody else.
func TestM2Reserve(t *testing.T) {
	need(t, "root", "fuse")
	bare := newImage(t, 32, "-m", "20")
	want := spendReserve(t, bare.static(), func() {})
	for _, opts := range [][]string{nil, {"--no-passthrough"}} {
		m := newImage(t, 32, "-m", "20").mount(opts...)
		if got := spendReserve(t, m.Path, m.replace); got != want {
			t.Errorf("with options %q:\n%s", opts, diff(want, got))
		}
	}
}

// spendReserve fills a file system up and tells how far who came; replace has the
// next daemon take over meanwhile.
func spendReserve(t *testing.T, dir string, replace func()) string {
	t.Helper()
	const block = 64 << 10
	at := func(name string) string { return filepath.Join(dir, name) }
	a, root := stranger(t), agent(t)
	var log strings.Builder
	fill := func(who *Agent, fd string) int {
		for written := 0; ; written += block {
			if got := who.Try("pwrite", fd, "x", itoa(block), itoa(written)); got != "ok" {
				fmt.Fprintf(&log, "%s is full after %d MiB: %s\n", fd, written>>20, got)
				return written
			}
		}
	}
	a.must("open", "copy", at("copy"), "rdwr,creat")
	a.must("open", "file", at("file"), "rdwr,creat")
	for _, name := range []string{"files", "names", "moved"} {
		a.must("mkdir", at(name))
	}
	for i := range 400 {
		a.must("creat", at("files/"+itoa(i)), "wronly,creat")
	}
	last := itoa(fill(a, "file") + block)
	fmt.Fprintln(&log, "fallocate:", a.Try("fallocate", "copy", "0", "0", itoa(block)))
	fmt.Fprintln(&log, "copy_file_range:", a.Try("copyrange", at("file"), "copy"))
	replace()
	fmt.Fprintln(&log, "later:", a.Try("pwrite", "file", "x", itoa(block), last))
	// What holds names and attributes takes room as well.
	end := func(what string, call func(i int) []string) {
		for i := range 400 {
			if got := a.Try(call(i)...); got != "ok" {
				fmt.Fprintf(&log, "%s: %s\n", what, got)
				return
			}
		}
		fmt.Fprintf(&log, "%s: without end\n", what)
	}
	long := func(dir string, i int) string { return at(filepath.Join(dir, fmt.Sprintf("%0250d", i))) }
	end("setxattr", func(i int) []string {
		return []string{"setxattr", at("files/" + itoa(i)), "user.x", fmt.Sprintf("%0700d", i)} // ext4 keeps equal ones in one block
	})
	end("link", func(i int) []string { return []string{"link", at("copy"), long("names", i)} })
	end("rename", func(i int) []string { return []string{"rename", at("files/" + itoa(i)), long("moved", i)} })
	a.must("close", "file")
	root.must("open", "reading", at("file"), "rdonly")
	a.must("open", "file", at("file"), "wronly")
	fmt.Fprintln(&log, "while root reads it:", a.Try("pwrite", "file", "x", itoa(block), last))
	root.must("open", "root", at("root"), "rdwr,creat")
	if fill(root, "root") == 0 {
		t.Error("root has no reserve")
	}
	return log.String()
}

// TestM2HalfAllocated: where fallocate(2) fails for want of room, the file is as long
// as the backing has made it.
func TestM2HalfAllocated(t *testing.T) {
	need(t, "root", "fuse")
	for _, opts := range [][]string{nil, {"--no-passthrough"}} {
		m := newImage(t, 32).mount(opts...)
		a := stranger(t)
		a.must("open", "file", m.At("file"), "rdwr,creat")
		a.want("ENOSPC", "fallocate", "file", "0", "0", itoa(64<<20))
		want, err := describe(m.Back("file"))
		mustDo(t, err)
		if got := a.Get("stat", m.At("file")); got != want {
			t.Errorf("with options %q: stat = %s, want %s", opts, got, want)
		}
	}
}
