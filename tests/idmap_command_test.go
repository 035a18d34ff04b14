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

// TestIDMapCommands: by a mapped mount, commands lock what the kernel lets their user make
// entries in, and nothing else.
func TestIDMapCommands(t *testing.T) {
	m, at := mountedMapped(t, shifted)
	mustDo(t, os.Chmod(m.Path, 0o777))
	root, user, rival, other := agentAs(t, shift), agentAs(t, shift+1000), agentAs(t, shift+1000), agentAs(t, shift+2000)
	as := func(a *Agent, want string, args ...string) {
		t.Helper()
		if r := runCmdAs(t, a, args...); !strings.HasPrefix(r, want) {
			t.Errorf("stagefs %q = %q, want %q", args, r, want)
		}
	}
	owned := func(name string, want uint32) {
		t.Helper()
		var st unix.Stat_t
		mustDo(t, unix.Stat(m.Back(name), &st))
		if st.Uid != want {
			t.Errorf("%s belongs to %d below, want %d", name, st.Uid, want)
		}
	}

	as(root, "0 ", "run", at("made"), "touch", at("made/file"))
	owned("made/file", 0)
	as(user, "0 ", "run", at("theirs"), "touch", at("theirs/file"))
	mustDo(t, os.MkdirAll(m.Back("closed0/D"), 0o700))
	mustDo(t, os.Chown(m.Back("closed0"), 1000, 1000))
	owned("theirs/file", 1000)
	root.must("chmod", at("made"), "0755")
	user.must("chmod", at("theirs"), "0755")
	as(other, "77 ", "run", "-n", at("theirs"), "true")
	as(other, "77 ", "wait", at("theirs"))
	as(user, "77 ", "run", "-n", at("made"), "true")
	as(root, "0 ", "run", at("made"), "true")
	as(root, "77 ", "run", "-n", at("theirs"), "true")

	// The root of a user namespace passes over the modes of what is mapped there.
	inside := agentBy(t, &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWUSER, UidMappings: shifted, GidMappings: shifted, GidMappingsEnableSetgroups: true,
		Credential: &syscall.Credential{},
	})
	as(inside, "0 ", "run", at("theirs"), "touch", at("theirs/root"))
	owned("theirs/root", 0)
	as(inside, "0 ", "run", at("closed0/D"), "touch", at("closed0/D/file"))

	// Beneath what the user outside of the mapping may not search.
	user.must("mkdir", at("closed"), "0700")
	user.must("mkdir", at("closed/D"), "0755")
	user.mustCommand(m, "release closed")
	as(user, "0 ", "run", "--client", "c", at("closed/D"), "touch", at("closed/D/file"))
	as(user, "0 ", "run", at("closed/new"), "touch", at("closed/new/file"))
	as(other, "77 ", "run", "-n", at("closed/D"), "true")
	other.wantCommand(m, "EACCES", "wait closed/D")
	other.wantCommand(m, "EACCES", "wait closed/none")

	// Who waits, for a directory, or for the one to make it in.
	as(user, "0 ", "acquire", at("theirs"))
	as(rival, "75 ", "run", "-n", at("theirs"), "true")
	for dir, in := range map[string]string{"theirs": "theirs", "theirs/new": "theirs"} {
		mark := filepath.Join(tempDir(t), "locked")
		mustDo(t, os.Chmod(filepath.Dir(mark), 0o777))
		got := rival.Start("sh", stagefsBin()+" run -w 20 "+at(dir)+" touch "+mark)
		m.awaitWaiters(in, 1)
		as(user, "0 ", "release", at("theirs"))
		got()
		if _, err := os.Lstat(mark); err != nil {
			t.Errorf("who waited for %s did not get it: %v", dir, err)
		}
		as(user, "0 ", "acquire", at("theirs"))
	}

	// Whose it is to remove.
	user.must("mkdir", at("theirs/below"))
	user.must("put", at("theirs/below/file"), "x", "creat")
	as(user, "0 ", "release", "--destroy", at("theirs"))
	if _, err := os.Lstat(m.Back("theirs")); !os.IsNotExist(err) {
		t.Errorf("destroyed: %v", err)
	}
	user.must("mkdir", at("mixed"))
	mustDo(t, os.Mkdir(m.Back("mixed/roots"), 0o755))
	mustDo(t, os.WriteFile(m.Back("mixed/roots/file"), nil, 0o644))
	as(user, "77 ", "release", "--destroy", at("mixed"))
	if _, err := os.Lstat(m.Back("mixed/roots/file")); err != nil {
		t.Errorf("not the user's to remove: %v", err)
	}

	if b, err := os.ReadFile(m.control("denials")); err != nil || strings.Contains(string(b), "permit") {
		t.Errorf("denials: %s, %v; want none of a permit", b, err)
	}
}

// TestIDMapPermitAttack: a permit is of use to whom it was given alone, and for the directory
// that it was given for.
func TestIDMapPermitAttack(t *testing.T) {
	m, at := mountedMapped(t, shifted)
	mustDo(t, os.Chmod(m.Path, 0o777))
	for dir, uid := range map[string]int{"own": 1000, "others": 2000, "roots": 0} {
		mustDo(t, os.Mkdir(m.Back(dir), 0o755))
		mustDo(t, os.Chown(m.Back(dir), uid, uid))
	}
	a, b := agentAs(t, shift+1000), agentAs(t, shift+1000)
	for _, dir := range []string{"own", "others", "roots"} {
		if got := string(a.wantCommand(m, "EACCES", "acquire %s", dir).Permit); got != dir+"/.stagefs-permit" {
			t.Errorf("%s: the permit is to be had as %q", dir, got)
		}
	}
	permit := func(dir, want string) {
		t.Helper()
		a.want(want, "mknod", at(dir+"/.stagefs-permit"), "fifo")
	}
	permit("others", "EACCES")
	permit("roots", "EACCES")
	permit("own", "EALREADY")
	a.want("ENOENT", "stat", at("own/.stagefs-permit"))
	b.wantCommand(m, "EACCES", "acquire own")
	for _, dir := range []string{"others", "roots"} {
		a.wantCommand(m, "EACCES", "acquire %s", dir)
	}
	mustDo(t, os.Rename(m.Back("own"), m.Back("moved"))) // beside the mount
	mustDo(t, os.Rename(m.Back("roots"), m.Back("own")))
	if errno, answer := a.command(m, "acquire own"); errno == "ok" {
		t.Errorf("acquired what has come in its place: %+v", answer)
	}
	mustDo(t, os.Rename(m.Back("own"), m.Back("roots")))
	mustDo(t, os.Rename(m.Back("moved"), m.Back("own")))
	a.mustCommand(m, "acquire own")
	if locks := m.Locks(); len(locks) != 1 {
		t.Errorf("locks: %v", locks)
	}
	a.must("creat", at("own/file"), "wronly,creat,excl")
	b.want("EBUSY", "creat", at("own/file2"), "wronly,creat,excl")
}
