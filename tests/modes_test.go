package tests

import (
	"bytes"
	"os"
	"strings"
	"testing"
)

// --disable-locking: everything passes through, nothing is enforced, and the
// listing says so.
func TestDisableLocking(t *testing.T) {
	m := mount(t, "--disable-locking")
	holder, other := agent(t), stranger(t)
	holder.must("mkdir", m.At("D"))
	holder.must("chmod", m.At("D"), "0777")
	holder.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	other.must("creat", m.At("D/other"), "wronly,creat")
	other.must("mkdir", m.At("D/devserver.lock"))
	other.want("EEXIST", "creat", m.At("D/devserver"), "wronly,creat,excl")
	if l := m.Locks(); len(l) != 0 {
		t.Errorf("locks: %+v, want none", l)
	}
	mustShow(t, m, "locks", "locking is disabled")

	// Advisory locks are what they are on any file, and kept by the kernel.
	holder.must("open", "h", m.At("D/devserver"), "rdwr")
	holder.must("flock", "h")
	if r := sh(t, m.Path, "flock -n D/devserver true"); r.Status != 1 {
		t.Errorf("flock(1) beside a flock: %v, want status 1", r)
	}
	other.must("creat", m.At("D/while-flocked"), "wronly,creat")

	// A killed holder's lock file stays, as without stagefs.
	holder.Kill()
	if _, err := os.Stat(m.Back("D/devserver")); err != nil {
		t.Error(err)
	}
}

// --enforce=observe: everything passes, and what would have been refused is
// recorded.
func TestObserve(t *testing.T) {
	m := mount(t, "--enforce=observe")
	openDir(t, m.Back("D"))
	openDir(t, m.Back("D/sub"))
	openFile(t, m.Back("D/file"), "x")
	holder, other := agent(t), stranger(t)
	holder.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	ops := [][]string{
		{"creat", m.At("D/new"), "wronly,creat,excl"},
		{"mkdir", m.At("D/newdir")},
		{"put", m.At("D/file"), "y", "wronly,trunc"},
		{"truncate", m.At("D/file"), "3"},
		{"symlink", "x", m.At("D/link")},
		{"rename", m.At("D/new"), m.At("D/renamed")},
		{"unlink", m.At("D/renamed")},
		{"rmdir", m.At("D/newdir")},
		{"mkdir", m.At("D/devserver.lock")},
	}
	for i, op := range ops {
		other.must(op...)
		if n := len(m.Denials()); n != i+1 {
			t.Errorf("%v: %d refusals are recorded, want %d", op, n, i+1)
		}
	}
	if b, err := os.ReadFile(m.Back("D/file")); !bytes.Equal(b, []byte("y\x00\x00")) || err != nil {
		t.Errorf("D/file = %q, %v", b, err)
	}
	// Also the truncation that is dropped where locks are enforced (A10).
	holder.must("put", m.At("D/devserver"), "12345678", "wronly")
	other.must("put", m.At("D/devserver"), "y", "wronly,trunc")
	if b, err := os.ReadFile(m.Back("D/devserver")); string(b) != "y" || err != nil {
		t.Errorf("D/devserver = %q, %v, want y", b, err)
	}
	mustShow(t, m, "locks", "observing only")
	m.wantOwner("D", holder.Pid)
	r := run(t, stagefsBin(), "acquire", "-n", m.At("D"))
	if r.Status != 0 || r.Out != "0\n" || !strings.Contains(r.Err, "no lock was taken") {
		t.Errorf("acquire of what somebody else has: %v, want token 0, and that it is none", r)
	}
}

// TestObserveCrash: nor is anything removed with an owner that crashes, or at its word.
func TestObserveCrash(t *testing.T) {
	m := mount(t, "--enforce=observe", "--on-crash=destroy")
	for _, how := range []string{"killed", "failed", "destroyed"} {
		a := agent(t)
		a.must("mkdir", m.At(how))
		a.must("put", m.At(how, "f"), "1", "creat")
		switch how {
		case "killed":
			a.Kill()
		case "failed":
			a.mustCommand(m, "release %s failed", how)
		case "destroyed":
			a.mustCommand(m, "release %s destroy", how)
		}
		m.awaitFree(how)
		wantTree(t, m.Back(how), []string{"f=1"})
	}
}

func mustShow(t *testing.T, m *Mount, file, want string) {
	t.Helper()
	b, err := os.ReadFile(m.control(file))
	mustDo(t, err)
	if !bytes.Contains(b, []byte(want)) {
		t.Errorf("%s says %q, want %q in it", file, b, want)
	}
}
