//go:build linux

package tests

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"text/tabwriter"
)

// A client is a real program that locks by the existence of a file. Its script
// takes the lock in directory $1, prints "acquired", waits for the end of its
// standard input, and releases; or it prints what the program says, and fails. The
// Python clients have a program for that.
type client struct {
	name   string
	needs  []string
	script string
	lock   string // the lock file, relative to the staged directory
	dir    string // what the lock governs, likewise; "" is the directory itself
	setUp  string // script that makes the directory's content
}

func existenceClients() []client {
	python := []string{"/usr/bin/python3"}
	py := func(class string) string { return forkedPrefix + class }
	tool := func(acquire, release string) string {
		return acquire + ` || exit; echo acquired; cat >/dev/null; ` + release + ` || exit; echo released`
	}
	return []client{
		{name: "lockfile LinkLockFile", needs: python, script: py("LinkLockFile"), lock: "devserver.lock"},
		{name: "lockfile LinkLockFile without threads", needs: python, script: py("LinkLockFile threaded=False"), lock: "devserver.lock"},
		{name: "lockfile 0.9", needs: python, script: py("Lockfile09"), lock: "devserver.lock"},
		{name: "lockfile 0.8", needs: python, script: py("Lockfile08"), lock: "devserver.lock"},
		{name: "lockfile MkdirLockFile", needs: python, script: py("MkdirLockFile"), lock: "devserver.lock"},
		{name: "lockfile SymlinkLockFile", needs: python, script: py("SymlinkLockFile"), lock: "devserver.lock"},
		{name: "lockfile PIDLockFile", needs: python, script: py("PIDLockFile"), lock: "devserver"},
		{name: "filelock SoftFileLock", needs: python, script: py("SoftFileLock"), lock: "devserver.lock"},
		{name: "flufl.lock", needs: []string{"/usr/lib/python3/dist-packages/flufl/lock/__init__.py"}, script: py("flufl"), lock: "devserver.lock"},
		{
			name: "File::NFSLock", needs: []string{"/usr/share/perl5/File/NFSLock.pm"}, lock: "devserver.NFSLock",
			script: `exec perl -MFile::NFSLock -e '$| = 1; my $l = File::NFSLock->new("$ARGV[0]/devserver", "NB");
				print("$File::NFSLock::errstr\n"), exit 1 if !$l; print "acquired\n"; <STDIN>; $l->unlock; print "released\n"' "$1"`,
		},
		{
			name: "dotlockfile", needs: []string{"dotlockfile"}, lock: "devserver.lock",
			script: tool(`dotlockfile -r 0 "$1/devserver.lock"`, `dotlockfile -u "$1/devserver.lock"`),
		},
		{
			name: "dotlockfile -p", needs: []string{"dotlockfile"}, lock: "devserver.lock",
			script: tool(`dotlockfile -r 0 -p "$1/devserver.lock"`, `dotlockfile -u "$1/devserver.lock"`),
		},
		{
			name: "lockfile-create", needs: []string{"lockfile-create"}, lock: "devserver.lock",
			script: tool(`lockfile-create --retry 0 "$1/devserver"`, `lockfile-remove "$1/devserver"`),
		},
		{
			name: "procmail lockfile", needs: []string{"lockfile"}, lock: "devserver.lock",
			script: tool(`lockfile -r0 "$1/devserver.lock"`, `rm -f "$1/devserver.lock"`),
		},
		{
			name: "git commit", needs: []string{"git"}, lock: ".git/index.lock", dir: ".git",
			script: `cd "$1" || exit; export GIT_EDITOR="echo acquired; cat >/dev/null; echo edited >"; git commit -qa --allow-empty && echo released`,
			setUp:  `git init -q . && echo one >file && git add file && git commit -qm one && echo changed >file`,
		},
		{
			name: "dash set -C", needs: []string{"dash"}, lock: "devserver",
			script: `exec dash -c 'set -C; true >"$1/devserver" || exit; echo acquired; cat >/dev/null; rm "$1/devserver"; echo released' dash "$1"`,
		},
		{
			name: "bash set -C", needs: []string{"bash"}, lock: "devserver",
			script: `exec bash -c 'set -C; echo $$ >"$1/devserver" || exit; echo acquired; cat >/dev/null; rm "$1/devserver"; echo released' bash "$1"`,
		},
	}
}

const clientPy = `
import importlib, sys, threading

kind, directory = sys.argv[1], sys.argv[-1]
path = directory + "/devserver"
options = {"threaded": False} if "threaded=False" in sys.argv else {}
if kind == "SoftFileLock":
    from filelock import SoftFileLock
    lock, timeout = SoftFileLock(path + ".lock"), 0
elif kind == "flufl":
    from flufl.lock import Lock
    lock, timeout = Lock(path + ".lock"), 0
    lock.acquire, lock.release = lock.lock, lock.unlock
elif kind in ("Lockfile09", "Lockfile08"): # which called the temporary file otherwise
    from lockfile.linklockfile import LinkLockFile
    lock, timeout = LinkLockFile(path), -1
    thread = threading.get_ident()
    if kind == "Lockfile09":
        name = "%s-%x.%d" % (lock.hostname, thread & 0xffffffff, lock.pid)
    else:
        name = "%s.%x-%d" % (lock.hostname, thread, lock.pid)
    lock.unique_name = directory + "/" + name
else:
    module = importlib.import_module("lockfile." + kind.lower())
    lock, timeout = getattr(module, kind)(path, **options), -1
try:
    lock.acquire(timeout=timeout)
except Exception as e:
    print(type(e).__name__, e)
    sys.exit(1)
print("acquired", flush=True)
sys.stdin.read()
lock.release()
print("released")
`

// bench is where a client is tried: a mount, or a plain directory.
type bench struct {
	t      *testing.T
	c      client
	python *forker
}

// start runs the client's script on dir; end its standard input to let it go on.
func (b bench) start(dir string) (p started, stdin io.Closer, said *bufio.Reader) {
	b.t.Helper()
	args, python := strings.CutPrefix(b.c.script, forkedPrefix)
	if python {
		p, stdin, r := startPiped(b.t, nil, b.python, append(strings.Fields(args), dir)...)
		return p, stdin, bufio.NewReader(r)
	}
	cmd := exec.Command("/bin/sh", "-c", b.c.script, "sh", dir)
	cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null", "LC_ALL=C",
		"GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@b", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@b")
	p, stdin, r := startPiped(b.t, cmd, nil)
	return p, stdin, bufio.NewReader(r)
}

// try runs the client to its end, and tells what it printed and left.
func (b bench) try(dir string) string {
	b.t.Helper()
	p, stdin, said := b.start(dir)
	stdin.Close()
	out, err := io.ReadAll(said)
	mustDo(b.t, err)
	return b.normal(fmt.Sprintf("exit %d: %s", p.Wait().Status, out), dir)
}

// hold runs the client until it has the lock.
func (b bench) hold(dir string) (p started, release func() string) {
	b.t.Helper()
	p, stdin, said := b.start(dir)
	first, _ := said.ReadString('\n')
	if first != "acquired\n" {
		rest, _ := io.ReadAll(said)
		b.t.Fatalf("the holder printed %q, want acquired", first+string(rest))
	}
	return p, func() string {
		stdin.Close()
		out, _ := io.ReadAll(said)
		return b.normal(fmt.Sprintf("exit %d: %s%s", p.Wait().Status, first, out), dir)
	}
}

func (b bench) normal(out, dir string) string {
	return strings.TrimSpace(strings.ReplaceAll(out, dir, "DIR"))
}

func (b bench) prepare(dir string) {
	b.t.Helper()
	openDir(b.t, dir)
	if b.c.setUp == "" {
		return
	}
	cmd := exec.Command("/bin/sh", "-c", b.c.setUp)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@b", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@b")
	if r := runCmd(b.t, cmd); r.Status != 0 {
		b.t.Fatal(r)
	}
}

// clientForker runs the program of the Python clients.
func clientForker(t *testing.T) *forker {
	t.Helper()
	return newForker(t, clientPy, "filelock", "flufl.lock", "lockfile.linklockfile", "lockfile.mkdirlockfile", "lockfile.symlinklockfile", "lockfile.pidlockfile")
}

// TestA8Clients tries every existence locker in four situations. What it says
// on a mount is what it says on a plain directory when it is free, or when
// somebody else has the lock; and a killed holder is in nobody's way.
func TestA8Clients(t *testing.T) {
	need(t, "root", "fuse")
	m := mount(t, "--lock-name", "devserver", "--lock-name", "devserver.lock", "--lock-name", "index.lock", "--lock-name", "devserver.NFSLock")
	python := clientForker(t)

	var table strings.Builder
	w := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "client\tfree\theld, lock file there\theld by mkdir\tkilled, tried again")
	for i, c := range existenceClients() {
		verdict := [4]string{"-", "-", "-", "-"}
		t.Run(c.name, func(t *testing.T) {
			need(t, c.needs...)
			b := bench{t: t, c: c, python: python}
			free, held := b.reference()
			dir := fmt.Sprintf("build-%d", i)
			for j, situation := range []func(bench, *Mount, string, string, string){bench.whenFree, bench.whenLocked, bench.whenMade, bench.whenKilled} {
				t.Run([]string{"free", "locked", "mkdir", "killed"}[j], func(t *testing.T) {
					b := b
					b.t, verdict[j] = t, "differs"
					situation(b, m.on(t), fmt.Sprintf("%s-%d", dir, j), free, held)
					if !t.Failed() {
						verdict[j] = "same"
					}
				})
			}
			t.Logf("free: %q; held: %q", free, held)
		})
		fmt.Fprintln(w, c.name+"\t"+strings.Join(verdict[:], "\t"))
	}
	w.Flush()
	t.Logf("clients and situations, compared with a plain directory:\n%s", &table)
}
