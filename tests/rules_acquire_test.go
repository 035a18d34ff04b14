//go:build linux

package tests

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestA1: mkdir of a directory that is no container, not beneath a lock of the
// caller, takes an implicit lock on it.
func TestA1(t *testing.T) {
	m := mount(t)
	a, b := agent(t), stranger(t)
	a.must("mkdir", m.At("D"))
	b.must("mkdir", m.At("E"))
	locks := m.Locks()
	for dir, owner := range map[string]*Agent{"D": a, "E": b} {
		row := locks[dir]
		if row.Kind != "implicit" || row.Pid != owner.Pid || row.Token == 0 || row.Since.IsZero() || row.Cmd == "" || row.Start == 0 {
			t.Errorf("row of %s: %+v, want an implicit one of pid %d with everything told", dir, row, owner.Pid)
		}
	}
	if locks["E"].UID != nobody {
		t.Errorf("uid of E's owner: %d, want %d", locks["E"].UID, nobody)
	}
	b.want("EEXIST", "mkdir", m.At("D"))
	openDir(t, m.Back("old"))
	a.want("EEXIST", "mkdir", m.At("old"))
	a.must("mkdir", m.At("old/new"))
	m.wantOwner("old/new", a.Pid)
	if n := len(m.Locks()); n != 3 {
		t.Errorf("%d locks, want 3", n)
	}
}

// TestA2: beneath a lock that the caller holds, mkdir takes nothing new.
func TestA2(t *testing.T) {
	m := mount(t)
	a := agent(t)
	a.must("mkdir", m.At("D"))
	a.must("mkdir", m.At("D/sub"))
	a.Child().must("mkdir", m.At("D/sub/deep"))
	if n := len(m.Locks()); n != 1 {
		t.Errorf("%d locks, want 1", n)
	}
}

// TestA1Jobs: of two jobs of one program, what one makes is that one's alone while it
// lives, unless the program has the directory that both work in.
func TestA1Jobs(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	program := agent(t)
	one, other := program.Child(), program.Child()
	one.must("mkdir", m.At("D/out"))
	other.want("EBUSY", "mkdir", m.At("D/out/other"))
	one.Kill()
	m.awaitFree("D/out")

	program.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	one = program.Child()
	one.must("mkdir", m.At("D/made"))
	other.must("mkdir", m.At("D/made/other"))
	one.must("mkdir", m.At("D/made/other/one"))
}

// lockWays are the ways of A3 to make the lock file at path, given that the
// file path.tmp is there; each with the call that removes it again.
func lockWays(path string) map[string][2][]string {
	return map[string][2][]string{
		"O_EXCL":  {{"creat", path, "wronly,creat,excl"}, {"unlink", path}},
		"mknod":   {{"mknod", path, "file"}, {"unlink", path}},
		"mkfifo":  {{"mknod", path, "fifo"}, {"unlink", path}},
		"mkdir":   {{"mkdir", path}, {"rmdir", path}},
		"symlink": {{"symlink", "123@host", path}, {"unlink", path}},
		"link":    {{"link", path + ".tmp", path}, {"unlink", path}},
		"rename":  {{"rename", path + ".tmp", path}, {"rename", path, path + ".tmp"}},
	}
}

// TestA3: each way to make the lock file locks its directory; while it stands,
// each way is refused to others with EEXIST (A8); its removal ends the lock (R1).
func TestA3(t *testing.T) {
	m := mount(t, "--lock-name", "devserver", "--lock-name", "*.lck")
	for _, file := range []string{"devserver", "any.lck"} {
		for way := range lockWays("") {
			t.Run(file+"/"+way, func(t *testing.T) {
				m := m.on(t)
				dir := filepath.Join(strings.TrimSuffix(file, ".lck"), way)
				openDir(t, m.Back(filepath.Dir(dir)))
				openDir(t, m.Back(dir))
				a, b := agent(t), agent(t)
				a.must("creat", m.At(dir, file+".tmp"), "wronly,creat")
				calls := lockWays(m.At(dir, file))[way]
				a.must(calls[0]...)
				row := m.Locks()[dir]
				if row.Kind != "explicit" || row.Pid != a.Pid || row.File != file || row.Protocol == "" {
					t.Errorf("row: %+v, want an explicit one of pid %d by file %s", row, a.Pid, file)
				}
				before := digest(t, m.Back(dir))
				for rivalWay, rival := range lockWays(m.At(dir, file)) {
					want := "EEXIST"
					switch { // what the kernel answers by itself
					case way == "rename" && (rivalWay == "rename" || rivalWay == "link"):
						want = "ENOENT" // the source is gone
					case way == "link" && rivalWay == "rename":
						want += "|ok" // both names are one file: rename(2) does nothing
					case way == "mkdir" && rivalWay == "rename":
						want += "|EISDIR"
					}
					b.want(want, rival[0]...)
				}
				b.want("EBUSY", calls[1]...)
				if after := digest(t, m.Back(dir)); after != before {
					t.Errorf("refused, but changed:\n%s", diff(before, after))
				}
				a.must(calls[1]...)
				m.wantFree(dir)
				b.must("creat", m.At(dir, file+".tmp"), "wronly,creat")
				b.must(calls[0]...)
				m.wantOwner(dir, b.Pid)
			})
		}
	}
}

// TestA6: open(O_CREAT) without O_EXCL locks when it makes the lock file, and
// only then.
func TestA6(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	openDir(t, m.Back("E"))
	mustDo(t, os.WriteFile(m.Back("E/devserver"), nil, 0o666))
	a, b := agent(t), agent(t)
	a.must("creat", m.At("D/devserver"), "wronly,creat")
	a.must("creat", m.At("E/devserver"), "wronly,creat")
	if row := m.Locks()["D"]; row.Kind != "explicit" || row.Pid != a.Pid {
		t.Errorf("row of D: %+v, want an explicit one of pid %d", row, a.Pid)
	}
	m.wantFree("E")
	b.want("EBUSY", "creat", m.At("D/file"), "wronly,creat")
	a.must("creat", m.At("D/devserver"), "wronly,creat") // there already: no second lock
	a.must("unlink", m.At("D/devserver"))
	m.wantFree("D")
}

// TestA8: the lock name is refused with EEXIST where D is held without that file, by
// whatever lock, by a lock above (C3b), by a lock beneath (C3c), and where somebody
// has a file open for writing (C3d); other names are refused with EBUSY.
func TestA8(t *testing.T) {
	m := mount(t)
	a, b := agent(t), agent(t)
	a.must("mkdir", m.At("D"))
	a.must("mkdir", m.At("D/sub"))
	for _, dir := range []string{"P", "other", "command", "shared", "lease", "flock", "open"} {
		openDir(t, m.Back(dir))
	}
	a.must("mkdir", m.At("P/held"))
	a.must("creat", m.At("other/devserver"), "wronly,creat,excl")
	a.mustCommand(m, "acquire command")
	a.mustCommand(m, "acquire shared shared")
	a.mustCommand(m, "acquire lease client=x ttl=1h")
	a.must("open", "x", m.At("flock/devserver"), "rdwr,creat")
	a.must("flock", "x")
	a.must("open", "w", m.At("open/file"), "wronly,creat")
	b.must("creat", m.At("mine"), "wronly,creat")
	before := digest(t, m.Dir)
	for _, dir := range []string{"D", "D/sub", "P", "other", "command", "shared", "lease", "flock", "open"} {
		for _, call := range [][]string{
			{"creat", "wronly,creat,excl"}, {"mknod", "file"}, {"mknod", "fifo"}, {"mkdir"}, {"symlink"}, {"link"}, {"rename"},
		} {
			path := m.At(dir, "devserver.lock")
			switch call[0] {
			case "symlink", "link", "rename":
				b.want("EEXIST", call[0], m.At("mine"), path)
			default:
				b.want("EEXIST", append([]string{call[0], path}, call[1:]...)...)
			}
		}
	}
	for _, dir := range []string{"D", "D/sub", "other", "command", "shared", "lease", "flock"} {
		b.want("EBUSY", "creat", m.At(dir, "devserver2"), "wronly,creat,excl")
	}
	if after := digest(t, m.Dir); after != before {
		t.Errorf("refused, but changed:\n%s", diff(before, after))
	}
}

// TestA11: while a lock lives others see its file's mtime as now, its holders
// the real one; and only a holder removes it.
func TestA11(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	a, b := agent(t), agent(t)
	lock := m.At("D/devserver.lock")
	a.must("creat", lock, "wronly,creat,excl")
	a.must("utimens", lock, "1000000000")
	for range 2 {
		if got := mtimeOf(t, a, lock); got.Unix() != 1000000000 {
			t.Errorf("mtime for the owner: %v, want the real one", got)
		}
		if got := mtimeOf(t, a.Child(), lock); got.Unix() != 1000000000 {
			t.Errorf("mtime for a descendant: %v, want the real one", got)
		}
		if got := mtimeOf(t, b, lock); time.Since(got).Abs() > time.Minute {
			t.Errorf("mtime for others: %v, want now", got)
		}
		// So is the ctime, by which some look: that of the file is when the mtime was set.
		if got := strings.Fields(b.Get("sh", "stat -c '%.9Y %.9Z' "+lock)); len(got) != 3 || got[1] != got[2] {
			t.Errorf("mtime and ctime for others: %q, want them the same", got)
		}
	}
	b.want("EBUSY", "unlink", lock)
	b.want("EBUSY", "rename", lock, lock+".old")
	a.must("unlink", lock)
	m.wantFree("D")
}

// TestA11Race: what some see of a lock file is never what others are to see, in whatever
// order they look.
func TestA11Race(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	a, b := agent(t), agent(t)
	lock, stays := m.At("D/devserver"), m.lockFile("E")
	a.must("open", "x", stays, "rdwr")
	b.must("open", "y", stays, "rdonly") // which the kernel looks up no more
	for i := range 50 {
		a.must("creat", lock, "wronly,creat,excl")
		mtimeOf(t, a, lock) // what is new looks the same to all
		set := time.Unix(int64(1e9+i), 0)
		a.must("utimens", lock, strconv.Itoa(1e9+i))
		for range 3 {
			if got := mtimeOf(t, b, lock); time.Since(got).Abs() > time.Minute {
				t.Fatalf("mtime for others: %v, want now", got)
			}
			if got := mtimeOf(t, a, lock); !got.Equal(set) {
				t.Fatalf("mtime for the owner: %v, want %v", got, set)
			}
		}
		a.must("unlink", lock)

		a.must("utimens", stays, strconv.Itoa(1e9+i))
		if got := mtimeOf(t, b, stays); !got.Equal(set) {
			t.Fatalf("mtime for others while it is free: %v, want %v", got, set)
		}
		if got := mtimeBy(t, b, "fstat", "y"); !got.Equal(set) {
			t.Fatalf("mtime of what others have open while it is free: %v, want %v", got, set)
		}
		a.must("flock", "x", "ex", "nb")
		if got := mtimeBy(t, b, "fstat", "y"); time.Since(got).Abs() > time.Minute {
			t.Fatalf("mtime of what others have open while it is locked: %v, want now", got)
		}
		if got := mtimeOf(t, b, stays); time.Since(got).Abs() > time.Minute {
			t.Fatalf("mtime for others while it is locked: %v, want now", got)
		}
		a.must("flock", "x", "un")
	}
}

// TestA11Ways: whatever the lock file is, and however it is looked at, others see it
// as new while it is a lock's, and as it is when it is nobody's any more.
func TestA11Ways(t *testing.T) {
	m := mount(t)
	others := []*Agent{agent(t), stranger(t)}
	wantNew := func(t *testing.T, file string, want bool) {
		t.Helper()
		for _, look := range []string{
			`stat -c '%Y %W' "$f"`, `find "$f" -prune -printf '%T@\n'`, `[ ! -f "$f" ] || [ -h "$f" ] || stat -c %Y - <"$f"`,
		} {
			for _, o := range others {
				seen := strings.FieldsFunc(o.Get("sh", "f='"+file+"'; "+look), func(r rune) bool { return strings.ContainsRune(" .\n", r) })
				if len(seen) == 1 && seen[0] == "0" {
					continue // nothing to be opened
				}
				if isNew := time.Since(time.Unix(int64(atoi(seen[1])), 0)).Abs() < time.Hour; seen[0] != "0" || isNew != want {
					t.Errorf("%s shows %s: %v, want it new: %v", look, file, seen, want)
				}
			}
		}
	}
	for way := range lockWays("") {
		t.Run(way, func(t *testing.T) {
			openDir(t, m.Back(way))
			a := agent(t)
			file := m.At(way, "devserver")
			a.must("creat", file+".tmp", "wronly,creat")
			a.must(lockWays(file)[way][0]...)
			a.must("utimens", file, "1000000000")
			wantNew(t, file, true)
			if got := mtimeOf(t, a, file); got.Unix() != 1e9 {
				t.Errorf("mtime for the owner: %v, want the real one", got)
			}
		})
	}
	for _, call := range lockCalls() {
		t.Run(call.name, func(t *testing.T) {
			file := m.on(t).lockFile(call.name)
			mustDo(t, os.Chtimes(m.Back(call.name, "devserver"), time.Unix(1e9, 0), time.Unix(1e9, 0)))
			a := locker(t)
			a.must("open", "x", file, "rdwr")
			wantNew(t, file, false)
			a.must(call.tryShared("x")...)
			wantNew(t, file, true)
			a.must(call.tryExclusive("x")...)
			wantNew(t, file, true)
			a.must(call.unlock("x")...)
			wantNew(t, file, false)
		})
	}
}

func mtimeOf(t *testing.T, a *Agent, path string) time.Time {
	t.Helper()
	return mtimeBy(t, a, "stat", path)
}

func mtimeBy(t *testing.T, a *Agent, call ...string) time.Time {
	t.Helper()
	_, mtime, _ := strings.Cut(a.Get(call...), "mtime=")
	at, err := time.Parse(time.RFC3339Nano, mtime)
	mustDo(t, err)
	return at
}

// TestA13: an explicit lock of the same owner replaces its implicit one, and
// frees the directory when it ends. One of a child stands in front of it.
func TestA13(t *testing.T) {
	m := mount(t)
	a, b := agent(t), agent(t)
	child := a.Child()
	lock := m.At("D/devserver")

	a.must("mkdir", m.At("D"))
	a.must("creat", lock, "wronly,creat,excl")
	if rows := m.Listing().Locks; len(rows) != 1 || rows[0].Kind != "explicit" {
		t.Errorf("rows: %+v, want one explicit", rows)
	}
	a.must("unlink", lock)
	m.wantFree("D")
	b.must("creat", m.At("D/of-b"), "wronly,creat")

	a.must("mkdir", m.At("E"))
	child.must("creat", m.At("E/devserver"), "wronly,creat,excl")
	child.must("creat", m.At("E/of-child"), "wronly,creat")
	a.want("EBUSY", "creat", m.At("E/of-a"), "wronly,creat")
	b.want("EBUSY", "creat", m.At("E/of-b"), "wronly,creat")
	child.must("unlink", m.At("E/devserver"))
	a.must("creat", m.At("E/of-a"), "wronly,creat")
	b.want("EBUSY", "creat", m.At("E/of-b"), "wronly,creat")
	if row := m.Locks()["E"]; row.Kind != "implicit" || row.Pid != a.Pid {
		t.Errorf("row after the child's lock: %+v, want the implicit one of pid %d", row, a.Pid)
	}
}

// TestA13HandedOver: so does an explicit lock that was made by a child, once it is
// the owner's own: `stagefs release` frees a directory that its script has made
// and acquired.
func TestA13HandedOver(t *testing.T) {
	m := mount(t)
	a, b := agent(t), agent(t)
	succeeds := func(command string) (said string) {
		t.Helper()
		got := a.Get("sh", command+" 2>&1")
		if got[0] != '0' {
			t.Errorf("%s: %s", command, got)
		}
		return got
	}
	for _, dir := range []string{"D", "E", "F"} {
		a.must("mkdir", m.At(dir))
	}
	succeeds(stagefsBin() + " acquire " + m.At("D"))
	a.must("creat", m.At("D/of-a"), "wronly,creat")
	succeeds(stagefsBin() + " release " + m.At("D"))
	m.wantFree("D")
	b.must("creat", m.At("D/of-b"), "wronly,creat")

	succeeds("mkdir " + m.At("E/devserver"))
	succeeds("rmdir " + m.At("E/devserver"))
	m.wantFree("E")

	// Two acquisitions are two locks, and the first release tells of the other.
	succeeds(stagefsBin() + " acquire " + m.At("F") + "; exit 0")
	succeeds(stagefsBin() + " acquire " + m.At("F") + "; exit 0")
	if got := succeeds(stagefsBin() + " release " + m.At("F")); !strings.Contains(got, "still held") {
		t.Errorf("the first release says %q", got)
	}
	succeeds(stagefsBin() + " release " + m.At("F"))
	m.wantFree("F")
}
