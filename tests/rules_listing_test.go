//go:build linux

package tests

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// listingOf returns the names in a directory of the backing as an agent's
// readdir shows them.
func listingOf(t *testing.T, dir string) string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	mustDo(t, err)
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return strings.Join(names, " ")
}

// wantListed makes sure that a directory is listed as the backing has it, to
// each of the agents, twice: the second time the kernel has kept it.
func (m *Mount) wantListed(dir, after string, agents ...*Agent) {
	m.t.Helper()
	for range 2 {
		for i, a := range agents {
			if got, want := a.Get("readdir", m.At(dir)), listingOf(m.t, m.Back(dir)); got != want {
				m.t.Errorf("%s: agent %d lists %q, want %q", after, i, got, want)
			}
		}
	}
}

// TestM2Listing: a listing that was shown before shows each change.
func TestM2Listing(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	openDir(t, m.Back("E"))
	a, b := agent(t), stranger(t)
	m.wantListed("D", "at first", a, b)
	at := func(name string) string { return m.At("D", name) }
	for _, step := range [][]string{
		{"creat", at("file"), "wronly,creat,excl"},
		{"mkdir", at("dir")},
		{"symlink", "x", at("sym")},
		{"mknod", at("fifo"), "fifo"},
		{"link", at("file"), at("alias")},
		{"rename", at("file"), at("renamed")},
		{"rename", at("alias"), m.At("E/alias")},
		{"rename", at("dir"), at("sym"), "exchange"},
		{"rename", m.At("E/alias"), at("alias")},
		{"unlink", at("fifo")},
		{"rmdir", at("sym")},
		{"creat", at("devserver"), "wronly,creat,excl"},
		{"unlink", at("devserver")},
		{"open", "t", m.At("D"), "tmpfile,rdwr"},
		{"linkfd", "t", at("tmp")},
	} {
		a.must(step...)
		m.wantListed("D", strings.Join(step, " "), a, b)
		m.wantListed("E", strings.Join(step, " "), a, b)
	}
}

// TestM2ListingRemoved: a directory that was removed while it is open is empty.
func TestM2ListingRemoved(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	mustDo(t, os.Mkdir(m.Back("D/sub"), 0o777))
	d, err := os.Open(m.At("D/sub"))
	mustDo(t, err)
	defer d.Close()
	mustDo(t, os.Remove(m.At("D/sub")))
	if names, err := d.Readdirnames(-1); len(names) > 0 || err != nil && !os.IsNotExist(err) {
		t.Errorf("a removed directory lists %q, %v", names, err)
	}
}

// TestM2ListingGoesOn: who reads a directory while it changes misses nothing
// and sees nothing twice of what stays, and can go back to where he was.
func TestM2ListingGoesOn(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	const files = 3000
	for i := range files {
		mustDo(t, os.WriteFile(m.Back("D", "stays"+strconv.Itoa(i)), nil, 0o666))
		mustDo(t, os.WriteFile(m.Back("D", "goes"+strconv.Itoa(i)), nil, 0o666))
	}
	seen := make(map[string]int)
	d, err := os.Open(m.At("D"))
	mustDo(t, err)
	defer d.Close()
	first := readSome(t, int(d.Fd()))
	var middle int64
	for names := first; len(names) > 0; names = readSome(t, int(d.Fd())) {
		for _, name := range names {
			seen[name]++
			if strings.HasPrefix(name, "goes") {
				mustDo(t, os.Remove(m.At("D", name)))
			}
		}
		if middle == 0 {
			middle, err = unix.Seek(int(d.Fd()), 0, unix.SEEK_CUR)
			mustDo(t, err)
			// Another reader comes and goes meanwhile.
			agent(t).must("readdir", m.At("D"))
		}
	}
	for i := range files {
		if n := seen["stays"+strconv.Itoa(i)]; n != 1 {
			t.Fatalf("stays%d was listed %d times", i, n)
		}
	}
	if n := len(seen); n != 2*files+2 {
		t.Errorf("%d names were listed, want %d", n, 2*files+2)
	}
	_, err = unix.Seek(int(d.Fd()), middle, unix.SEEK_SET)
	mustDo(t, err)
	again := make(map[string]bool)
	for names := readSome(t, int(d.Fd())); len(names) > 0; names = readSome(t, int(d.Fd())) {
		for _, name := range names {
			again[name] = true
		}
	}
	for _, name := range first {
		delete(seen, name)
	}
	for name := range seen {
		if strings.HasPrefix(name, "stays") && !again[name] {
			t.Fatalf("%s is not listed from the middle on", name)
		}
	}
	m.wantListed("D", "afterwards", agent(t))
}

// readSome returns the names that one getdents(2) tells.
func readSome(t *testing.T, fd int) []string {
	t.Helper()
	buf := make([]byte, 8<<10)
	n, err := unix.Getdents(fd, buf)
	mustDo(t, err)
	var names []string
	for b := buf[:n]; len(b) > 0; {
		size := int(b[16]) | int(b[17])<<8
		name, _, _ := strings.Cut(string(b[19:size]), "\x00")
		names = append(names, name)
		b = b[size:]
	}
	return names
}

// TestA9Listing: a private candidate is in nobody's listing, before and after
// it won.
func TestA9Listing(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	a, b, c := agent(t), stranger(t), agent(t)
	a.must("creat", m.At("D/devserver.lock"), "wronly,creat,excl")
	m.wantListed("D", "held", a, b, c)
	u := m.At("D", candidateNames(t, b.Pid)["lockfile"])
	b.must("put", u, "mine", "creat,excl")
	m.wantListed("D", "with a candidate", a, b, c)
	b.want("EEXIST", "link", u, m.At("D/devserver.lock"))
	m.wantListed("D", "after it lost", a, b, c)
	a.must("unlink", m.At("D/devserver.lock"))
	m.wantListed("D", "after the release", a, b, c)
	b.must("link", u, m.At("D/devserver.lock"))
	m.wantListed("D", "after it won", a, b, c)
	b.must("unlink", u)
	m.wantListed("D", "after it went", a, b, c)
}

// TestA10Listing: a private lock file is listed from when it won.
func TestA10Listing(t *testing.T) {
	m := mount(t)
	a, b, c, d := locker(t), locker(t), agent(t), stranger(t)
	a.must("mkdir", m.At("D"))
	file := m.At("D/devserver")
	b.must("open", "x", file, "rdwr,creat")
	m.wantListed("D", "before it wins", c, d)
	got := b.Start(lockCalls()[0].waitExclusive("x")...)
	m.awaitWaiters("D", 1)
	a.Kill()
	if status := got(); status != "ok" {
		t.Fatalf("the wait = %s, want ok", status)
	}
	m.wantListed("D", "after it won", c, d)
}

// TestR4Listing: what the daemon removes for the dead is in no listing that
// the kernel kept.
func TestR4Listing(t *testing.T) {
	m := mount(t)
	for _, how := range []string{"creat", "mkdir"} {
		t.Run(how, func(t *testing.T) {
			m := m.on(t)
			openDir(t, m.Back(how))
			a, b := agent(t), stranger(t)
			u, lock := m.At(how, candidateNames(t, a.Pid)["lockfile"]), m.At(how, "devserver.lock")
			if how == "creat" {
				a.must("creat", u, "wronly,creat,excl")
				a.must("link", u, lock)
			} else {
				a.must("mkdir", lock)
				a.must("creat", filepath.Join(lock, "pid"), "wronly,creat,excl")
			}
			m.wantListed(how, "held", b)
			a.Kill()
			m.awaitFree(how)
			eventually(t, "the backing is clean", func() bool { return listingOf(t, m.Back(how)) == "" })
			eventually(t, "the listing is clean", func() bool { return b.Get("readdir", m.At(how)) == "" })
		})
	}
}
