//go:build linux

package tests

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// TestR7AttackSameDirectory: a child's own lock stands in front of the row of an
// owner that crashes, on the same directory. What is in it is the child's.
func TestR7AttackSameDirectory(t *testing.T) {
	for _, policy := range []string{"destroy", "quarantine"} {
		t.Run(policy, func(t *testing.T) {
			m := mount(t, "--on-crash", policy)
			a := agent(t)
			a.must("mkdir", m.At("D"))
			child := a.Child("setsid")
			child.must("creat", m.At("D", "devserver"), "wronly,creat,excl")
			child.must("put", m.At("D", "theirs"), "1", "wronly,creat")
			a.Kill()
			eventually(t, "the dead owner's lock ends", func() bool { return !m.ownsAny(a.Pid) })
			wantTree(t, m.Back("D"), []string{"devserver=", "theirs=1"})
			m.wantOwner("D", child.Pid)
			child.must("put", m.At("D", "theirs"), "2", "wronly,append")
		})
	}
}

// ownsAny reports whether a process is listed as the owner of a lock.
func (m *Mount) ownsAny(pid int) bool {
	for _, l := range m.Listing().Locks {
		if l.Pid == pid {
			return true
		}
	}
	return false
}

// TestR7AttackLease: a lease beneath is its client's, also if the process that
// took it for him is the owner that crashes.
func TestR7AttackLease(t *testing.T) {
	m := mount(t, "--on-crash", "destroy")
	a, other := agent(t), agent(t)
	a.must("mkdir", m.At("D"))
	a.must("put", m.At("D", "made"), "1", "wronly,creat") // no narrowing (A12)
	a.must("mkdir", m.At("D", "sub"))
	token := a.mustCommand(m, "acquire D/sub client=x ttl=1h").Token
	other.mustCommand(m, "join D/sub client=x")
	other.must("put", m.At("D", "sub", "theirs"), "1", "wronly,creat")
	a.Kill()
	m.awaitFree("D")
	if got := m.Locks()["D/sub"]; got.Token != token {
		t.Errorf("the lock on D/sub is %+v, want token %d", got, token)
	}
	other.must("put", m.At("D", "sub", "theirs"), "2", "wronly,append")
	wantTree(t, m.Back("D"), []string{"sub/", "sub/theirs=12"})
}

// TestR7AttackRights: the daemon destroys for nobody what that one could not
// remove himself.
func TestR7AttackRights(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	mustDo(t, os.Mkdir(m.Back("D", "roots"), 0o755))
	mustDo(t, os.WriteFile(m.Back("D", "roots", "file"), []byte("1"), 0o644))
	other := stranger(t)
	other.must("put", m.control("ctl"), "acquire D\n", "wronly")
	other.must("put", m.At("D", "own"), "1", "wronly,creat")
	if s := other.Try("put", m.control("ctl"), "release D destroy\n", "wronly"); s == "ok" {
		t.Errorf("release D destroy = ok, want a refusal")
	}
	if b, err := os.ReadFile(m.Back("D", "roots", "file")); string(b) != "1" {
		t.Errorf("root's file: %q, %v", b, err)
	}
}

// TestR7AttackRestart: an owner that ended while no daemon was there may have
// succeeded. Its content is kept.
func TestR7AttackRestart(t *testing.T) {
	for _, policy := range []string{"destroy", "quarantine"} {
		t.Run(policy, func(t *testing.T) {
			m := mountOver(t, "--on-crash", policy)
			a := agent(t)
			a.must("mkdir", m.At("D"))
			a.must("put", m.At("D", "artifact"), "1", "wronly,creat")
			m.restart(func() { a.Exit(0) }, "--on-crash", policy)
			m.awaitFree("D")
			wantTree(t, m.At("D"), []string{"artifact=1"})
		})
	}
}

// TestR7AttackFlattened: what was there before the lock stays what it is,
// however often it is renamed within the directory that it came into.
func TestR7AttackFlattened(t *testing.T) {
	m := mount(t, "--on-crash", "destroy")
	openDir(t, m.Back("out"))
	mustDo(t, os.MkdirAll(m.Back("out", "pkg", "deep"), 0o777))
	for _, f := range []string{"one", "two", "deep/three"} {
		mustDo(t, os.WriteFile(m.Back("out", "pkg", f), []byte("old"), 0o666))
	}
	a := agent(t)
	a.must("mkdir", m.At("D"))
	a.must("put", m.At("D", "made"), "1", "wronly,creat")
	a.must("rename", m.At("out", "pkg"), m.At("D", "pkg"))
	a.must("rename", m.At("D", "pkg", "one"), m.At("D", "one"))
	a.must("link", m.At("D", "pkg", "two"), m.At("D", "two"))
	a.must("unlink", m.At("D", "pkg", "two"))
	a.must("rename", m.At("D", "pkg", "deep"), m.At("D", "deep"))
	a.must("rename", m.At("D", "deep", "three"), m.At("D", "three"))
	a.Kill()
	m.awaitFree("D")
	wantTree(t, m.Back("D"), []string{"deep/", "one=old", "pkg/", "three=old", "two=old"})
}

// TestR7AttackBroken: who breaks a lock whose content is being swept away stops
// that: what the next owner makes is not swept with it.
func TestR7AttackBroken(t *testing.T) {
	m := mount(t, "--on-crash", "destroy")
	for i := range 10 {
		dir := "D" + itoa(i)
		openDir(t, m.Back(dir))
		mustDo(t, os.WriteFile(m.Back(dir, "old"), nil, 0o666))
		a := agent(t)
		a.must("creat", m.At(dir, "devserver"), "wronly,creat,excl")
		if out := a.Get("sh", "cd "+m.At(dir)+" && seq -f %05g 3000 | xargs touch"); !strings.HasPrefix(out, "0") {
			t.Fatal(out)
		}
		next := agent(t)
		a.Kill()
		for m.Ctl("break "+dir+" attack") == "ok" {
		}
		next.must("creat", m.At(dir, "devserver"), "wronly,creat,excl")
		out := next.Get("sh", "cd "+m.At(dir)+" && for f in $(seq -f %05g 3000); do echo new >$f; done; sleep 0.1; cat 0* | sort | uniq -c")
		if strings.TrimSpace(out) != "0    3000 new" {
			t.Errorf("what the next owner wrote: %q", out)
		}
		next.Exit(0)
		m.awaitFree(dir)
	}
}

// TestR7AttackRestored: what comes back from quarantine is in nobody's hands: a
// descriptor from before stands in the way of the next owner, or of the restore.
func TestR7AttackRestored(t *testing.T) {
	m := mount(t, "--on-crash", "quarantine")
	a := agent(t)
	a.must("mkdir", m.At("D"))
	a.must("mkdir", m.At("D", "sub"))
	child := a.Child("setsid")
	child.must("open", "w", m.At("D", "sub", "f"), "rdwr,creat")
	child.must("ftruncate", "w", "4096")
	child.must("mmap", "p", "w")
	child.must("chdir", m.At("D", "sub"))
	a.Kill()
	m.awaitFree("D")
	id := m.quarantine()[0].ID
	r := run(t, stagefsBin(), "quarantine", "--restore", id, m.At("D"))
	if r.Status == 0 {
		next := agent(t)
		s := next.Try("put", m.control("ctl"), "acquire D\n", "wronly")
		if s == "ok" {
			before := digest(t, m.Back("D"))
			child.Try("pwrite", "w", "x", "4", "0")
			child.Try("poke", "p", "evil")
			child.Try("put", "new", "1", "wronly,creat")
			if after := digest(t, m.Back("D")); after != before {
				t.Errorf("changed by a stranger to the lock:\n%s", diff(before, after))
			}
		}
		return
	}
	if !strings.Contains(r.Err, "sub/f") || !strings.Contains(r.Err, "open") {
		t.Errorf("the refusal: %v", r)
	}
	child.must("close", "w")
	child.must("munmap", "p")
	r = run(t, stagefsBin(), "quarantine", "--restore", id, m.At("D"))
	if r.Status != 0 {
		t.Fatalf("nobody has it open any more: %v", r)
	}
	next := agent(t)
	next.must("creat", m.At("D", "devserver"), "wronly,creat,excl")
	before := digest(t, m.Back("D"))
	child.Try("put", "new", "1", "wronly,creat")
	if after := digest(t, m.Back("D")); after != before {
		t.Errorf("changed from a working directory:\n%s", diff(before, after))
	}
}

// TestR7AttackDeep: a tree that is deeper than the daemon has descriptors is
// deleted all the same, and in nobody's way.
func TestR7AttackDeep(t *testing.T) {
	m := mount(t, "--on-crash", "destroy")
	a := agent(t)
	a.must("mkdir", m.At("D"))
	fd, err := unix.Open(m.Back("D"), unix.O_PATH|unix.O_CLOEXEC, 0)
	mustDo(t, err)
	for range 3000 {
		mustDo(t, unix.Mkdirat(fd, "d", 0o777))
		next, err := unix.Openat(fd, "d", unix.O_PATH|unix.O_CLOEXEC, 0)
		mustDo(t, err)
		mustDo(t, unix.Close(fd))
		fd = next
	}
	mustDo(t, unix.Close(fd))
	few := unix.Rlimit{Cur: 1000, Max: 1000}
	mustDo(t, unix.Prlimit(m.daemon(), unix.RLIMIT_NOFILE, &few, nil))
	a.Kill()
	m.awaitFree("D")
	eventually(t, "the trash is empty", func() bool {
		left, _ := filepath.Glob(m.Back(".stagefs", "trash", "*"))
		return len(left) == 0
	})
}

// TestS9AttackSetuid: a program with root's rights that a stranger starts, and
// that writes to a ctl file that the stranger has opened, gives him none.
func TestS9AttackSetuid(t *testing.T) {
	m := mount(t)
	a := agent(t)
	a.must("mkdir", m.At("D"))
	a.mustCommand(m, "acquire D client=x ttl=1h")
	dir := tempDir(t)
	mustDo(t, os.Chmod(dir, 0o755))
	echo := filepath.Join(dir, "echo")
	mustDo(t, copyFile("/bin/echo", echo, 0o755))
	mustDo(t, os.Chmod(echo, 0o755|os.ModeSetuid))
	var st syscall.Statfs_t
	mustDo(t, syscall.Statfs(dir, &st))
	if st.Flags&syscall.MS_NOSUID != 0 {
		t.Skip("no setuid programs here")
	}
	other := stranger(t)
	for _, line := range []string{"break D mine", "release D client=x", "discard . older=0s", "check", "renew D client=x"} {
		if out := other.Get("sh", echo+" '"+line+"' >"+m.control("ctl")); strings.HasPrefix(out, "0") {
			t.Errorf("%s, written by a setuid program: %q, want a refusal", line, out)
		}
	}
	m.wantOwner("D", a.Pid)
}
