//go:build linux

package tests

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// oddNames are names that tempt a listing to show something else.
func oddNames() []string {
	return []string{
		"two words",
		"-rf",
		"new\nline",
		"tab\there",
		"return\rback",
		`quote"double`,
		"quote'single",
		`back\slash`,
		"esc\x1b[2J\x1b[1;1H",
		"bell\a",
		"del\x7f",
		"csi\u009b2J\u009b1;1H",
		"tag\U000e0041hidden",
		"not\xffutf8\xc3",
		"\xe2\x80\xae" + "right to left",
		"x\nD  explicit  create  1  2026-01-01T00:00:00Z  1  0  forged",
		"$(touch pwned)",
		"*",
		strings.Repeat("n", 255),
		strings.Repeat("\xff", 255),
		strings.Repeat("ä", 127),
	}
}

// TestNames: whatever the name of a locked directory, its row is one row, says
// the name, and moves no cursor; commands reach it.
func TestNames(t *testing.T) {
	m := mount(t)
	a, b := agent(t), agent(t)
	// A command line is shown too, and as untrusted.
	a.must("sh", "exec -a x true 2>/dev/null; true")
	names := oddNames()
	for _, name := range names {
		a.must("mkdir", m.Path+"/"+name)
		a.must("put", m.Path+"/"+name+"/file", "x", "creat")
		b.want("EBUSY", "put", m.Path+"/"+name+"/file", "y", "")
		b.want("EBUSY", "creat", m.Path+"/"+name+"/"+name, "wronly,creat")
		b.want("EEXIST", "creat", m.Path+"/"+name+"/devserver", "wronly,creat,excl")
	}

	found := map[string]bool{}
	for _, row := range m.Listing().Locks {
		dir := row.Dir
		if row.DirBytes != nil {
			dir = string(row.DirBytes)
		}
		found[dir] = true
	}
	for _, name := range names {
		if !found[name] {
			t.Errorf("locks.json has no row for %q", name)
		}
	}
	if len(found) != len(names) {
		t.Errorf("locks.json has %d directories, want %d", len(found), len(names))
	}

	file, err := os.ReadFile(m.control("locks"))
	mustDo(t, err)
	denials, err := os.ReadFile(m.control("denials"))
	mustDo(t, err)
	wantTame(t, ".stagefs/locks", string(file), len(names)+1)
	if n := strings.Count(string(denials), "\n"); n != len(m.Denials()) {
		t.Errorf("denials are no JSON lines: %q", denials)
	}
	wantTame(t, ".stagefs/denials", string(denials), -1)
	table, err := os.ReadFile(m.control("locks.json"))
	mustDo(t, err)
	wantTame(t, ".stagefs/locks.json", string(table), -1)
	list := run(t, stagefsBin(), "locks", m.Path)
	wantTame(t, "stagefs locks", list.Out, len(names)+1)
	for _, name := range names {
		why := run(t, stagefsBin(), "why", m.Path+"/"+name+"/file")
		if why.Status != 0 || !strings.Contains(why.Out, itoa(a.Pid)) {
			t.Errorf("stagefs why %q: %v", name, why)
		}
		wantTame(t, "stagefs why", why.Out+why.Err, -1)
	}
	for i, name := range names {
		if i%2 == 0 {
			if got := m.Ctl("break " + strconv.Quote(name) + " test"); got != "ok" {
				t.Errorf("ctl break %q = %s", name, got)
			}
			continue
		}
		if r := run(t, stagefsBin(), "break", "--why", "test", "--", filepath.Join(m.Path, name)); r.Status != 0 {
			t.Errorf("stagefs break %q: %v", name, r)
		}
	}
	if rows := m.Listing().Locks; len(rows) != 0 {
		t.Errorf("rows after breaking all: %+v", rows)
	}
	// DEL does nothing on a terminal, and slog lets it through.
	wantTame(t, "the log", strings.ReplaceAll(m.Log(), "\x7f", ""), -1)
}

// wantTame reports text that has another number of lines than expected (-1:
// any), or characters that mean something to a terminal.
func wantTame(t *testing.T, what, text string, lines int) {
	t.Helper()
	if n := strings.Count(text, "\n"); lines >= 0 && n != lines {
		t.Errorf("%s has %d lines, want %d:\n%q", what, n, lines, text)
	}
	for i, r := range text {
		if r != '\n' && !unicode.IsPrint(r) || r == utf8.RuneError {
			t.Errorf("%s has %q in %.80q", what, r, text[max(0, i-40):])
			return
		}
	}
}

// TestNamesEverywhere: odd names of files do what they do on a plain directory.
func TestNamesEverywhere(t *testing.T) {
	m := mount(t)
	plain := tempDir(t)
	a := agent(t)
	for _, base := range []string{plain, m.Path} {
		a.must("mkdir", base+"/D")
		for i, name := range oddNames() {
			n := strconv.Itoa(i)
			a.must("put", base+"/D/"+name, name, "creat,excl")
			a.must("link", base+"/D/"+name, base+"/D/link"+n)
			a.must("symlink", name, base+"/D/sym"+n)
			a.must("rename", base+"/D/link"+n, base+"/D/renamed"+n)
			if got := a.Get("read", base+"/D/sym"+n); got != name {
				t.Errorf("read through a symlink to %q = %q", name, got)
			}
		}
		a.want("ENAMETOOLONG", "mkdir", base+"/D/"+strings.Repeat("n", 256))
		a.want("ENAMETOOLONG", "creat", base+"/D/"+strings.Repeat("n", 256), "wronly,creat")
	}
	want, got := shape(t, plain+"/D"), shape(t, m.Back("D"))
	if want != got {
		t.Errorf("another tree than on a plain directory:\n%s", diff(want, got))
	}
	if want, got := a.Get("readdir", plain+"/D"), a.Get("readdir", m.At("D")); want != got {
		t.Errorf("readdir = %q, want %q", got, want)
	}
}

// TestNamesInRoot: a name that go-fuse keeps for itself is one like any other.
// Its own server cannot tell.
func TestNamesInRoot(t *testing.T) {
	for _, transport := range transports[:2] {
		t.Run(transport, func(t *testing.T) {
			m := mountBy(t, transport)
			plain := tempDir(t)
			odd := scriptCase{lines: `
				put {}/file x creat
				mknod {}/NAME fifo
				unlink {}/NAME
				mknod {}/NAME file
				stat {}/NAME
				rename {}/NAME {}/other
				symlink target {}/NAME
				link {}/NAME {}/alias
				unlink {}/NAME
				link {}/file {}/NAME
				read {}/NAME
				truncate {}/NAME 0
				unlink {}/NAME
				mkdir {}/NAME
				rename {}/NAME {}/dir
				rename {}/file {}/NAME
				link {}/NAME {}/file
				link {}/file {}/NAME
				symlink x {}/NAME
				rmdir {}/NAME`}
			odd.lines = strings.ReplaceAll(odd.lines, "NAME", ".go-fuse-epoll-hack")
			want, got := odd.play(t, plain), odd.play(t, m.Path)
			if want, got := strings.ReplaceAll(want, plain, ""), strings.ReplaceAll(got, m.Path, ""); want != got {
				t.Errorf("answers differ from a plain directory's:\n%s", diff(want, got))
			}
			if want, got := shape(t, plain), shape(t, m.Dir); want != got {
				t.Errorf("another tree than in a plain directory:\n%s", diff(want, got))
			}
		})
	}
}

// TestNamesSuggested: a command that a message suggests is one that a shell reads.
func TestNamesSuggested(t *testing.T) {
	need(t, "root", "fuse", "bash")
	for _, name := range []string{"with space", "it's", "a\nb'\\\xff"} {
		dir := filepath.Join(tempDir(t), name)
		mustDo(t, os.Mkdir(dir, 0o755))
		m := newMount(t, dir, dir)
		said := m.startBackground().Err
		_, line, _ := strings.Cut(said, "unmount with: stagefs ")
		r := run(t, "bash", "-c", "exec \"$0\" "+strings.TrimSpace(line), stagefsBin())
		if r.Status != 0 || mountedAt(dir) {
			t.Errorf("%q: it said %q, which does: %v", name, said, r)
		}
	}
}

// TestNamesLong: the longest path can be asked about, locked, released and broken by
// command, also if each of its bytes has to be escaped.
func TestNamesLong(t *testing.T) {
	m := mount(t)
	rel := "D"
	for len(m.At(rel))+256 < unix.PathMax {
		rel += "/" + strings.Repeat("\xff", 255)
	}
	mustDo(t, os.MkdirAll(m.Back(rel), 0o777))
	dir := m.At(rel)
	m.wantStatus(1, "", "check", dir)
	m.wantStatus(0, "", "run", "--why", strings.Repeat("y", 1024), dir, "true")
	m.wantStatus(64, "too long", "run", "--why", strings.Repeat("y", 64<<10), dir, "true")
	m.wantStatus(66, "no lock", "release", dir)
	a := agent(t)
	a.must("put", dir+"/devserver", "", "creat,excl")
	wantHeld := func(want bool) {
		t.Helper()
		if held := slices.ContainsFunc(m.Listing().Locks, func(l lockRow) bool { return string(l.DirBytes) == rel }); held != want {
			t.Errorf("it is held: %v, want %v", held, want)
		}
	}
	wantHeld(true)
	m.wantStatus(75, "held by", "acquire", "-n", dir)
	if why := m.wantStatus(0, "", "why", dir); !strings.Contains(why.Out, "held by process "+itoa(a.Pid)) {
		t.Error(why)
	}
	m.wantStatus(0, "", "break", "--why", "test", dir)
	wantHeld(false)
}

// TestNamesJSON: acquire --json has the bytes of a directory that is no UTF-8.
func TestNamesJSON(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("a\xff"))
	var lock struct {
		Dir      string
		DirBytes []byte `json:"dir_bytes"`
	}
	r := run(t, stagefsBin(), "acquire", "--json", "--client=x", m.At("a\xff"))
	if err := json.Unmarshal([]byte(r.Out), &lock); err != nil || string(lock.DirBytes) != m.At("a\xff") {
		t.Errorf("acquire --json: %v, %+v, %v", r, lock, err)
	}
}

// TestNamesListed: locks --json has those of a mountpoint and of a lock file, and why shows
// the latter.
func TestNamesListed(t *testing.T) {
	dir := filepath.Join(tempDir(t), "m\xff")
	mustDo(t, os.MkdirAll(dir+"/D", 0o755))
	m := newMount(t, dir, dir)
	m.serve("--lock-name", "l*")
	agent(t).must("put", m.At("D/l\xfe"), "", "creat,excl")
	var listed struct {
		Mountpoint []byte `json:"mountpoint_bytes"`
		Locks      []struct {
			File []byte `json:"file_bytes"`
		}
	}
	r := m.stagefs("locks", "--json", m.Path)
	if err := json.Unmarshal([]byte(r.Out), &listed); err != nil || string(listed.Mountpoint) != dir || len(listed.Locks) != 1 || string(listed.Locks[0].File) != "l\xfe" {
		t.Errorf("locks --json: %v, %q, %v", r, listed, err)
	}
	m.wantWhy("D", `lock file: "l\xfe"`)
}
