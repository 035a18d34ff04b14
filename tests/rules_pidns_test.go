//go:build linux

package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestH4: a caller whose process the daemon can't name, here one outside the
// daemon's pid namespace, holds nothing and acquires nothing; reading is free.
func TestH4(t *testing.T) {
	need(t, "root", "fuse", "nsenter")
	base := tempDir(t)
	dir := filepath.Join(base, "static")
	openDir(t, dir)
	openDir(t, dir+"/free")

	// The daemon and a holder live in namespaces of their own.
	inside := exec.Command("/bin/sh", "-c", `
		mount -t proc proc /proc && "$BIN" mount --state-dir "$BASE/state" "$BASE/static" 2>"$BASE/log" &
		until [ -e "$BASE/static/.stagefs" ]; do sleep 0.02; done
		# A holder of its own: this shell is init here, which inherits no lock (R5).
		sh -c 'mkdir "$BASE/static/D" && echo content >"$BASE/static/D/file" && head -c 200000 /dev/zero >"$BASE/static/D/devserver.lock" && : >"$BASE/ready"
			until [ -e "$BASE/opened" ]; do sleep 0.02; done; "$BIN" mount --replace "$BASE/static" && : >"$BASE/replaced"; read line'
		"$BIN" umount "$BASE/static"; wait`)
	inside.Env = append(os.Environ(), "BIN="+stagefsBin(), "BASE="+base)
	inside.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS, Unshareflags: syscall.CLONE_NEWNS}
	stdin, err := inside.StdinPipe()
	mustDo(t, err)
	p := startCmd(t, inside)
	defer stdin.Close()
	eventually(t, "the mount in the namespace answers", func() bool { return exists(base + "/ready") })

	// This one has their mounts, and its own pid namespace: pid 0 for FUSE.
	outside := func(script string) string {
		r := run(t, "nsenter", "--mount=/proc/"+itoa(p.Pid())+"/ns/mnt", "/bin/sh", "-c", `cd "`+dir+`" && `+script)
		return strings.TrimSpace(itoa(r.Status) + " " + r.Out)
	}
	if got := outside("cat D/file"); got != "0 content" {
		t.Errorf("reading: %q", got)
	}
	lockFile := outside("cksum D/devserver.lock")
	for _, script := range []string{
		"exec 3<>D/devserver.lock; : >../opened; until [ -e ../replaced ]; do sleep 0.02; done; ! { LC_ALL=C /bin/echo x >&3; } 2>&1 | grep -q busy", "echo x 1<>D/devserver.lock", "echo x | dd of=D/devserver.lock conv=notrunc", "echo x >>D/devserver.lock",
		"echo x >D/file", "echo x >D/new", "mkdir D/new", "rm D/file", "mv D E", "chmod 0 D", "set -C; : >D/devserver",
		"set -C; : >free/devserver", "mkdir free/devserver.lock", "ln -s x free/devserver.lock",
	} {
		if got := outside(script + " 2>/dev/null"); strings.HasPrefix(got, "0") {
			t.Errorf("%s: %q, want a refusal", script, got)
		}
	}
	if got := outside("cksum D/devserver.lock"); got != lockFile {
		t.Errorf("the lock file: %q, want %q", got, lockFile)
	}
	outside("mkdir free/new; mkdir new")
	rows := outside("grep -c . .stagefs/locks; cat .stagefs/locks")
	if !strings.HasPrefix(rows, "0 2\n") {
		t.Errorf("locks: %q, want the one of D and no other", rows)
	}
	if got := outside("cat D/file"); got != "0 content" {
		t.Errorf("content at the end: %q", got)
	}
}

// TestH3Unseen: who asks for a lock of his session, and the daemon can't see
// that session, is told so; where the mount has that by default, the process
// alone holds, and others of a session that can't be seen do not.
func TestH3Unseen(t *testing.T) {
	need(t, "root", "fuse")
	base := tempDir(t)
	openDir(t, filepath.Join(base, "static"))
	inside := exec.Command("/bin/sh", "-c", `
		mount -t proc proc /proc && "$BIN" mount --owner=session --state-dir "$BASE/state" "$BASE/static" 2>"$BASE/log" &
		until [ -e "$BASE/static/.stagefs" ]; do sleep 0.02; done
		cd "$BASE/static"
		sh -c 'mkdir D; : >D/devserver; grep -c "^D .* explicit " .stagefs/locks; mkdir S; "$BIN" acquire --owner=session S; echo $?; setsid -w "$BIN" run --owner=session S true; echo $?'
		sh -c 'mkdir E; : >E/devserver; : >"$BASE/held"; while [ -e "$BASE/held" ]; do sleep 0.02; done' &
		holder=$!
		until [ -e "$BASE/held" ]; do sleep 0.02; done
		sh -c ': >E/x' 2>/dev/null; echo $?
		rm "$BASE/held"; wait $holder
		cd /; "$BIN" umount "$BASE/static"; wait`)
	inside.Env = append(os.Environ(), "BIN="+stagefsBin(), "BASE="+base)
	inside.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS, Unshareflags: syscall.CLONE_NEWNS}
	r := startCmd(t, inside).Wait()
	if got, want := r.Out, "1\n71\n0\n2\n"; got != want || !strings.Contains(r.Err, "setsid") {
		t.Errorf("prints %q, want %q and a word of setsid: %v", got, want, r)
	}
}

// TestA7AcquireInit: to a script that is the first process of a PID namespace, or a service
// manager, and so inherits no lock, `stagefs acquire` says so; what needs no heir is taken.
func TestA7AcquireInit(t *testing.T) {
	need(t, "root", "fuse")
	m := mount(t)
	openDir(t, m.Back("D"))
	cmd := exec.Command("/bin/sh", "-c", `
		mount -t proc proc /proc
		say() { "$0" "$@" >/dev/null; echo $?; }
		say acquire "$1"; say check "$1"
		say acquire --client x "$1"; say release --client x "$1"
		(sh -c '"$0" acquire "$1"; "$0" check "$1"' "$0" "$1" >/dev/null; echo $?)
		exec 9>"$1/devserver"; flock 9; say acquire "$1"; say check "$1"`, stagefsBin(), m.At("D"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS, Unshareflags: syscall.CLONE_NEWNS}
	r := startCmd(t, cmd).Wait()
	if r.Out != "71\n1\n0\n0\n0\n0\n0\n" || !strings.Contains(r.Err, "stagefs run") {
		t.Errorf("acquire by a child of process 1: %v, want 71, and a word of stagefs run", r)
	}

	// Nor does one of a name that is known to adopt or supervise others.
	tini := filepath.Join(t.TempDir(), "tini")
	sh(t, "/", `cp "$(readlink -f /bin/sh)" "$1"`, tini)
	r = startCmd(t, exec.Command(tini, "-c", `
		say() { "$0" "$@" >/dev/null; echo $?; }
		say acquire "$1"; say check "$1"
		say acquire --client x "$1"; say release --client x "$1"`, stagefsBin(), m.At("D"))).Wait()
	if r.Out != "71\n1\n0\n0\n" || !strings.Contains(r.Err, "stagefs run") {
		t.Errorf("acquire by a child of tini: %v, want 71, and a word of stagefs run", r)
	}
}

// TestA7RunInit: as the first process of a PID namespace, `stagefs run` reaps the orphans
// there, as an init does, and ends with the status of its command, which is the last.
func TestA7RunInit(t *testing.T) {
	need(t, "root", "fuse")
	m := mount(t)
	cmd := exec.Command("/bin/sh", "-c", `mount -t proc proc /proc && exec "$@"`, "sh", stagefsBin(), "run", m.At("D"), "sh", "-c", `
		for i in 1 2 3; do sh -c 'sh -c "until read p c s ppid rest </proc/self/stat && [ \$ppid = 1 ]; do :; done; exit 9" & echo $!'; done >"$1"
		while read orphan; do while [ -e /proc/$orphan ]; do sleep 0.02; done; done <"$1"
		exit 5`, "sh", tempDir(t)+"/orphans")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS, Unshareflags: syscall.CLONE_NEWNS}
	if r := startCmd(t, cmd).Wait(); r.Status != 5 {
		t.Errorf("stagefs run as process 1: %v, want status 5", r)
	}
	m.wantFree("D")
}
