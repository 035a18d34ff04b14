//go:build linux

package tests

import (
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestM2UserMode: whom a file's mode keeps out keeps what it has open, also in an
// ordinary user's mount, whose daemon the mode keeps out as well.
func TestM2UserMode(t *testing.T) {
	m := mountUser(t)
	a := stranger(t)
	plain := filepath.Join(tempDir(t), "plain")
	openDir(t, plain)
	type step struct{ op, args string }
	made := []step{
		{"write", "f data"},
		{"pwrite", "f x 4 100"},
		{"ftruncate", "f 2"},
		{"fallocate", "f 0 0 8"},
		{"pread", "f 8 0"},
		{"seek", "f hole 0"},
		{"fsync", "f"},
		{"fstat", "f"},
		{"fchmod", "f 0"},
		{"write", "f more"},
		{"ftruncate", "f 5"},
		{"pread", "f 8 0"},
		{"fsync", "f"},
	}
	play := func(dir string) string {
		var log strings.Builder
		try := func(op string, args ...string) string {
			answer, out := a.call(append([]string{op}, args...))
			out = regexp.MustCompile(`(ino|mtime)=\S+`).ReplaceAllString(out, "")
			fmt.Fprintln(&log, strings.ReplaceAll(strings.Join(append([]string{op}, args...), " "), dir, ""), answer, strings.TrimSpace(out))
			return answer
		}
		for _, flags := range []string{"rdonly,creat,excl", "wronly,creat,excl", "rdwr,creat,excl", "rdwr,creat,excl,append", "wronly,creat,sync,trunc", "wronly,tmpfile", "rdwr,tmpfile"} {
			for _, mode := range []string{"0644", "0444", "0400", "0200", "0"} {
				path := filepath.Join(dir, "f"+mode+strings.ReplaceAll(flags, ",", ""))
				if strings.Contains(flags, "tmpfile") {
					path = dir
				}
				if try("open", "f", path, flags, mode) != "ok" {
					continue
				}
				if path != dir { // what another has open stays its own
					try("open", "g", path, "rdonly")
				}
				for _, s := range made {
					try(s.op, strings.Fields(s.args)...)
				}
				if path != dir {
					try("pread", "g", "8", "0")
					try("close", "g")
				}
				try("close", "f")
			}
		}
		late := filepath.Join(dir, "late")
		try("put", late, "content", "creat")
		try("open", "f", late, "rdonly")
		try("chmod", late, "0")
		try("pread", "f", "7", "0")
		try("open", "g", late, "rdonly")
		try("close", "f")
		sub := filepath.Join(dir, "sub")
		try("mkdir", sub)
		for i := range 9 {
			try("creat", filepath.Join(sub, itoa(i)), "wronly,creat,excl")
		}
		try("open", "d", sub, "rdonly,directory")
		try("chmod", sub, "0")
		for range 2 {
			_, names := a.call([]string{"freaddir", "d"})
			all := strings.Fields(names)
			slices.Sort(all)
			fmt.Fprintln(&log, "freaddir", all)
		}
		try("fsync", "d")
		try("open", "d2", sub, "rdonly,directory")
		try("close", "d")
		try("chmod", sub, "0444") // to list it, not to search it
		try("readdir", sub)
		try("chmod", sub, "0755")
		for _, lock := range []string{"rdwr,creat,excl", "wronly,creat"} {
			try("open", "l", filepath.Join(dir, "devserver"), lock, "0444")
			try("write", "l", "pid")
			try("ftruncate", "l", "2")
			try("fsync", "l")
			try("close", "l")
			try("unlink", filepath.Join(dir, "devserver"))
		}
		return log.String()
	}
	if want, got := play(plain), play(m.Path); want != got {
		t.Errorf("answers differ from a plain directory's:\n%s", diff(want, got))
	}
}

// TestM2UserTools: tools that make read-only files do in an ordinary user's mount as
// elsewhere.
func TestM2UserTools(t *testing.T) {
	m := mountUser(t)
	need(t, "git", "cp", "tar", "install")
	script := `
		set -e; exec 2>&1; umask 022; export HOME=/nonexistent GIT_CONFIG_NOSYSTEM=1
		cd '%s'; mkdir src; echo content >src/f; chmod 0444 src/f; echo second >src/g; chmod 0400 src/g
		cp -p src/f copy; cat copy
		tar cf a.tar src; mkdir out; tar xf a.tar -C out; cat out/src/f
		install -m 0444 src/g inst; cat inst
		git init -q repo; cd repo; cp ../src/g .; git add g
		git -c user.name=n -c user.email=e@e commit -q -m m; git gc -q; git fsck; git show HEAD:g; git clone -q . ../clone; cat ../clone/g`
	plain := filepath.Join(tempDir(t), "plain")
	openDir(t, plain)
	a := stranger(t)
	want, got := a.Get("sh", fmt.Sprintf(script, plain)), a.Get("sh", fmt.Sprintf(script, m.Path))
	if !strings.HasPrefix(want, "0 ") || want != got {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestM2UserModeReplaced: so does who opens a directory after the daemon was replaced, when
// one is closed that was opened before.
func TestM2UserModeReplaced(t *testing.T) {
	m := mountUser(t)
	a := stranger(t)
	a.must("mkdir", m.At("D"))
	a.must("put", m.At("D/file"), "x", "creat")
	a.must("open", "before", m.At("D"), "rdonly")
	before := m.goneOn()
	if got := a.Get("sh", stagefsBin()+" mount --replace "+m.Path); !strings.HasPrefix(got, "0 ") || m.goneOn() != before+1 {
		t.Fatalf("the daemon is not replaced: %s", got)
	}
	a.must("open", "after", m.At("D"), "rdonly")
	a.must("close", "before")
	a.must("chmod", m.At("D"), "0")
	if got := a.Get("freaddir", "after"); got != "file" {
		t.Errorf("in D is %q", got)
	}
	a.must("chmod", m.At("D"), "0755")
}
