//go:build linux

package tests

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"
)

// An fdTool is a real program that locks a file's descriptor. Its scripts get
// the directory as $1, and print "acquired", wait for the end of their standard
// input, and release; or they print what the program says, and fail.
type fdTool struct {
	name  string
	needs []string
	hold  string // default: wait
	try   string
	wait  string // default: there is no way to wait
	stale bool   // leaves a stale lock when it is killed, in a plain directory
	// shares: a second one beside the holder succeeds.
	shares bool
	polls  bool // waits by trying again and again
	dpkg   bool // needs dpkg's administrative directory
}

func fdTools() []fdTool {
	const hold = `sh -c "echo acquired; cat >/dev/null; echo released"`
	flock := func(name, options, wait string) fdTool {
		return fdTool{
			name: "flock " + name, needs: []string{"flock"},
			hold: `exec flock "$1/devserver.lock" ` + hold, try: `exec flock ` + options + ` "$1/devserver.lock" ` + hold, wait: wait,
		}
	}
	python := func(name, kind string) fdTool {
		py := forkedPrefix + kind + ` `
		blocks := oneOf(kind, "flock|lockf|setlk|ofd|dpkg-lock")
		return fdTool{name: name, needs: []string{debianPython}, try: py + `try`, wait: py + `wait`, polls: !blocks}
	}
	gofrs := func(name, r string) fdTool {
		return fdTool{name: "gofrs/flock " + name, needs: []string{"go"}, try: `exec "$GOFRS" ` + r + `try "$1/devserver.lock"`, wait: `exec "$GOFRS" ` + r + `wait "$1/devserver.lock"`}
	}
	script := func(name, how, end string) fdTool {
		s := func(options string) string {
			return `exec ` + how + `"$1/devserver"; flock ` + options + ` 9 || exit; echo acquired; cat >/dev/null; ` + end + ` || exit; echo released`
		}
		return fdTool{name: name, needs: []string{"flock"}, try: s("-n"), wait: s("")}
	}
	wait := `exec flock "$1/devserver.lock" ` + hold
	shared := flock("-s beside -s", "-s -n", `exec flock -s "$1/devserver.lock" `+hold)
	shared.hold, shared.shares = `exec flock -s "$1/devserver.lock" `+hold, true
	beside := flock("-x beside -s", "-x -n", wait)
	beside.hold = shared.hold
	readers := python("fasteners read beside read", "fasteners-read")
	readers.shares = true
	writer := python("fasteners write beside read", "fasteners-write")
	writer.hold = python("", "fasteners-read").wait
	soft := python("filelock SoftFileLock", "soft")
	soft.stale = true
	rlock := gofrs("RLock beside RLock", "r")
	rlock.shares = true
	dpkg := python("dpkg --clear-avail", "dpkg-lock")
	dpkg.hold, dpkg.wait, dpkg.dpkg = dpkg.wait, "", true
	dpkg.needs = append(dpkg.needs, "dpkg")
	dpkg.try = `dpkg --admindir="$1" --clear-avail && echo cleared`
	return []fdTool{
		flock("-n", "-n", wait), flock("-w", "-w 0.2", `exec flock -w 30 "$1/devserver.lock" `+hold), flock("-n -E", "-n -E 42", wait),
		flock("-n -o", "-n -o", `exec flock -o "$1/devserver.lock" `+hold), flock("-n -F", "-n -F", `exec flock -F "$1/devserver.lock" `+hold),
		flock("-n --verbose", "-n --verbose", wait), beside, shared,
		script("exec 9>, flock 9", "9>", ":"), script("exec 9>, flock -u 9", "9>>", "flock -u 9"),
		gofrs("Lock", ""), rlock,
		python("fcntl.flock", "flock"), python("fcntl.lockf", "lockf"), python("F_SETLK", "setlk"), python("F_OFD_SETLK", "ofd"),
		python("filelock FileLock", "filelock"), python("filelock FileLock, newer", "newfilelock"), soft,
		python("fasteners InterProcessLock", "fasteners"), writer, readers,
		python("oslo lockutils.lock", "oslo"), python("oslo lockutils.external_lock", "oslo-external"), python("lockutils, older", "oldlockutils"),
		dpkg,
	}
}

// forkedPrefix begins what is no script, but arguments of the Python program.
const forkedPrefix = "python "

const locksPy = `
import fcntl, os, struct, sys, time
kind, how, d = sys.argv[1:]
path, wait = d + "/devserver.lock", how == "wait"

class Held(Exception):
    pass

def record(call, wait_call):
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    fcntl.fcntl(fd, wait_call if wait else call, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
    return lambda: fcntl.fcntl(fd, call, struct.pack("hhqqi4x", fcntl.F_UNLCK, 0, 0, 0, 0))

def python(call):
    f = open(path, "a+")
    call(f, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    return lambda: call(f, fcntl.LOCK_UN)

# newfilelock makes the system calls of filelock's later versions, which remove
# the lock file before they unlock it.
def newfilelock():
    while True:
        fd = os.open(path, os.O_RDWR | os.O_TRUNC | os.O_NOFOLLOW | os.O_CREAT, 0o644)
        try:
            os.fchmod(fd, 0o644)
        except PermissionError:
            pass
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            if not wait:
                raise Held("filelock")
            time.sleep(0.01)
            continue
        if os.fstat(fd).st_nlink:
            break
        os.close(fd)
    def release():
        os.unlink(path)
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
    return release

def gotten(ok):
    if not ok:
        raise Held(repr(ok))

def take():
    if kind == "flock":
        return python(fcntl.flock)
    if kind == "lockf":
        return python(fcntl.lockf)
    if kind == "setlk":
        return record(fcntl.F_SETLK, fcntl.F_SETLKW)
    if kind == "ofd":
        return record(fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW)
    if kind == "dpkg-lock":
        f = open(d + "/lock-frontend", "w")
        fcntl.lockf(f, fcntl.LOCK_EX)
        return f.close
    if kind == "newfilelock":
        return newfilelock()
    if kind in ("filelock", "soft"):
        import filelock
        lock = (filelock.FileLock if kind == "filelock" else filelock.SoftFileLock)(path)
        lock.acquire(timeout=-1 if wait else 0)
        return lock.release
    if kind == "fasteners":
        import fasteners
        lock = fasteners.InterProcessLock(path)
        gotten(lock.acquire(blocking=wait))
        return lock.release
    if kind.startswith("fasteners-"):
        import fasteners
        lock = fasteners.InterProcessReaderWriterLock(path)
        gotten(getattr(lock, "acquire_%s_lock" % kind[10:])(blocking=wait))
        return getattr(lock, "release_%s_lock" % kind[10:])
    if kind == "oslo":
        from oslo_concurrency import lockutils
        lock = lockutils.lock("stage", "devserver-", external=True, lock_path=d, blocking=wait)
        lock.__enter__()
        return lambda: lock.__exit__(None, None, None)
    if kind == "oslo-external":
        from oslo_concurrency import lockutils
        lock = lockutils.external_lock("stage", "devserver-", d)
        gotten(lock.acquire(blocking=wait))
        return lock.release
    if kind == "oldlockutils":
        f = open(path, "w")
        while True:
            try:
                fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return f.close
            except IOError as e:
                if not wait:
                    raise
                time.sleep(0.01)

try:
    release = take()
except Exception as e:
    print(type(e).__name__, e)
    sys.exit(1)
print("acquired", flush=True)
sys.stdin.read()
release()
print("released")
`

// toolBench tries one tool in one kind of place.
type toolBench struct {
	t     *testing.T
	tool  fdTool
	env   []string
	locks *forker                       // runs locksPy
	place func(situation string) string // makes a directory
	// while is called when a directory is held, and waits until a tool waits for it.
	while func(dir string)
	waits func(*toolRun)
}

type toolRun struct {
	b     toolBench
	dir   string
	p     started
	stdin io.Closer
	pipe  *os.File
	said  *bufio.Reader
	out   strings.Builder
}

func (b toolBench) start(script, dir string) *toolRun {
	b.t.Helper()
	cmd := command("/bin/sh", "-c", script, "sh", dir)
	cmd.Env = append(cmd.Env, b.env...)
	args, python := strings.CutPrefix(script, forkedPrefix)
	f := b.locks
	if !python {
		f = nil
	}
	p, stdin, r := startPiped(b.t, cmd, f, append(strings.Fields(args), dir)...)
	b.t.Cleanup(func() { p.signalGroup(syscall.SIGKILL) })
	return &toolRun{b: b, dir: dir, p: p, stdin: stdin, pipe: r, said: bufio.NewReader(r)}
}

var numbers = regexp.MustCompile(`pid \d+|\d+\.\d+ seconds`)

// end ends its standard input, and tells what it said and how it ended.
func (r *toolRun) end() string {
	r.b.t.Helper()
	r.stdin.Close()
	r.pipe.SetReadDeadline(time.Now().Add(patience))
	b, _ := io.ReadAll(r.said)
	r.out.Write(b)
	text := strings.ReplaceAll(r.out.String(), r.dir, "DIR")
	return strings.TrimSpace(numbers.ReplaceAllString(fmt.Sprintf("exit %d: %s", r.p.Wait().Status, strings.ReplaceAll(strings.TrimSpace(text), "\n", "; ")), "N"))
}

// acquired waits until it has the lock.
func (r *toolRun) acquired() *toolRun {
	r.b.t.Helper()
	r.pipe.SetReadDeadline(time.Now().Add(patience))
	for !strings.Contains(r.out.String(), "acquired\n") {
		line, err := r.said.ReadString('\n')
		r.out.WriteString(line)
		if err != nil {
			r.b.t.Fatalf("the tool said %q, then %v; want acquired", r.out.String(), err)
		}
	}
	return r
}

// awaitCall waits until one of its processes is in the system call by which it waits.
func (r *toolRun) awaitCall() {
	r.b.t.Helper()
	calls := []int{unix.SYS_FLOCK, unix.SYS_FCNTL}
	if r.b.tool.polls {
		calls = []int{unix.SYS_CLOCK_NANOSLEEP, unix.SYS_PSELECT6}
	}
	eventually(r.b.t, r.b.tool.name+" waits", func() bool {
		processes, _ := filepath.Glob("/proc/[0-9]*/stat")
		return slices.ContainsFunc(processes, func(stat string) bool {
			if f := statFields(stat); len(f) < 3 || f[2] != itoa(r.p.Pid()) {
				return false
			}
			threads, _ := filepath.Glob(filepath.Join(filepath.Dir(stat), "task/[0-9]*/syscall"))
			return slices.ContainsFunc(threads, func(call string) bool {
				b, _ := os.ReadFile(call)
				number, _, _ := strings.Cut(string(b), " ")
				return slices.Contains(calls, atoi(number))
			})
		})
	})
}

func (r *toolRun) kill() string {
	r.p.signalGroup(syscall.SIGKILL)
	return r.end()
}

// outcomes plays the five situations.
func (b toolBench) outcomes() (all [5]string) {
	b.t.Helper()
	hold := b.tool.hold
	if hold == "" {
		hold = b.tool.wait
	}
	all[0] = b.start(b.tool.try, b.place("free")).end()

	dir := b.place("held")
	holder := b.start(hold, dir).acquired()
	b.while(dir)
	all[1] = b.start(b.tool.try, dir).end() + " | " + holder.end() + " | " + b.start(b.tool.try, dir).end()

	wait := b.waits
	if b.tool.shares {
		wait = func(r *toolRun) { r.acquired() }
	}
	all[2], all[3] = "-", "-"
	if b.tool.wait != "" {
		dir = b.place("waiting")
		holder = b.start(hold, dir).acquired()
		waiter := b.start(b.tool.wait, dir)
		wait(waiter)
		holder.end()
		all[2] = waiter.acquired().end()

		dir = b.place("waiterkilled")
		holder = b.start(hold, dir).acquired()
		waiter = b.start(b.tool.wait, dir)
		wait(waiter)
		all[3] = waiter.kill() + " | " + holder.end() + " | " + b.start(b.tool.try, dir).end()
	}

	dir = b.place("holderkilled")
	all[4] = b.start(hold, dir).acquired().kill() + " | "
	if b.tool.wait != "" && !b.tool.stale {
		all[4] += b.start(b.tool.wait, dir).acquired().end()
	} else {
		all[4] += b.start(b.tool.try, dir).end()
	}
	return all
}

// wantAllFree reports an error if a lock is left on a directory whose name
// begins so.
func (b toolBench) wantAllFree(m *Mount, prefix string) {
	b.t.Helper()
	left := "?"
	for end := time.Now().Add(time.Second); left != "" && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		left = ""
		for dir, row := range m.Locks() {
			if strings.HasPrefix(dir, prefix) {
				left += fmt.Sprintf("%+v\n", row)
			}
		}
	}
	if left != "" {
		b.t.Errorf("locks are left:\n%s", left)
	}
}

// TestA8FdTools: what programs that lock a descriptor say, and how they end, is
// on a mount what it is in a plain directory, in every situation. Meanwhile the
// directory is held, and afterwards it is free, with the lock file still there.
func TestA8FdTools(t *testing.T) {
	m := mount(t, "--lock-name", "devserver", "--lock-name", "devserver.lock", "--lock-name", "devserver-*", "--lock-name", "lock", "--lock-name", "lock-frontend")
	tmp := tempDir(t)
	env := []string{"GOFRS=" + filepath.Join(tmp, "gofrslock")}
	locks := newForker(t, locksPy, "filelock", "fasteners", "oslo_concurrency.lockutils")
	if _, err := exec.LookPath("go"); err == nil {
		if r := runHere(t, "go", "build", "-trimpath", "-o", filepath.Join(tmp, "gofrslock"), "./testdata/gofrslock"); r.Status != 0 {
			t.Fatal(r)
		}
	}
	var table, said strings.Builder
	w := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	situations := []string{"free", "held", "waiting until released", "waiting and killed", "holder killed"}
	fmt.Fprintln(w, "tool\t"+strings.Join(situations, "\t"))
	for i, tool := range fdTools() {
		if *soakFlag == 0 && oneOf(tool.name, "flock -n -E|flock -n --verbose|F_SETLK|filelock FileLock, newer|oslo lockutils.external_lock") {
			continue // whose calls are those of another one
		}
		verdict := [5]string{"-", "-", "-", "-", "-"}
		t.Run(tool.name, func(t *testing.T) {
			need(t, tool.needs...)
			m := m.on(t)
			b := toolBench{t: t, tool: tool, env: env, locks: locks, while: func(string) {}}
			place := func(base string) string {
				openDir(t, base)
				if tool.dpkg {
					for _, name := range []string{"info", "updates", "triggers"} {
						openDir(t, filepath.Join(base, name))
					}
					mustDo(t, os.WriteFile(filepath.Join(base, "status"), nil, 0o666))
				}
				return base
			}
			plain := tempDir(t)
			b.place = func(situation string) string { return place(filepath.Join(plain, situation)) }
			b.waits = (*toolRun).awaitCall
			want := b.outcomes()

			rival := agent(t)
			at := func(situation string) string { return fmt.Sprintf("tool%d-%s", i, situation) }
			b.place = func(situation string) string { place(m.Back(at(situation))); return m.At(at(situation)) }
			if !tool.polls {
				b.waits = func(r *toolRun) { m.awaitWaiters(filepath.Base(r.dir), 1) }
			}
			b.while = func(dir string) {
				t.Helper()
				rival.want("EBUSY", "creat", filepath.Join(dir, "of-a-rival"), "wronly,creat")
				rival.want("EBUSY", "mkdir", filepath.Join(dir, "dir-of-a-rival"))
			}
			got := b.outcomes()
			for j, s := range situations {
				switch {
				case want[j] == "-":
				case got[j] == want[j]:
					verdict[j] = "same"
				case j == 4 && tool.stale && strings.HasSuffix(got[j], " | "+want[0]):
					verdict[j] = "better: not stale" // R4
				default:
					verdict[j] = "differs"
					t.Errorf("%s: %q, want %q", s, got[j], want[j])
				}
				fmt.Fprintf(&said, "%s, %s: %s\n", tool.name, s, got[j])
			}
			if shared := strings.HasPrefix(want[1], "exit 0"); shared != tool.shares {
				t.Errorf("held: %q: not what the situation is meant to be", want[1])
			}
			b.wantAllFree(m, at(""))
		})
		fmt.Fprintln(w, tool.name+"\t"+strings.Join(verdict[:], "\t"))
	}
	w.Flush()
	t.Logf("tools and situations, compared with a plain directory:\n%s", &table)
	if testing.Verbose() {
		t.Logf("what they said:\n%s", &said)
	}
}

// runHere runs a program in the tests' own directory.
func runHere(t *testing.T, name string, args ...string) Result {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir, _ = os.Getwd()
	return runCmd(t, cmd)
}

// TestA8LockutilsWrapper: the wrapper of oslo.concurrency makes a directory for
// locks, runs a program that locks in it, and removes it.
func TestA8LockutilsWrapper(t *testing.T) {
	need(t, "lockutils-wrapper", debianPython)
	m := mount(t, "--lock-name", "devserver-*")
	openDir(t, m.Back("D"))
	program := `
import os
from oslo_concurrency import lockutils
with lockutils.lock("stage", "devserver-", external=True):
    open(os.environ["OSLO_LOCK_PATH"] + "/content", "w").write("x")
    print(sorted(os.listdir(os.environ["OSLO_LOCK_PATH"])))
`
	// It does without eventlet, which takes seconds to load.
	without := tempDir(t)
	mustDo(t, os.WriteFile(filepath.Join(without, "eventlet.py"), []byte("raise ImportError\n"), 0o644))
	var said []string
	for _, dir := range []string{tempDir(t), m.Path, m.At("D")} {
		for _, status := range []string{"0", "3"} {
			cmd := command("lockutils-wrapper", debianPython, "-W", "ignore", "-c", program+"raise SystemExit("+status+")")
			cmd.Env = append(cmd.Env, "TMPDIR="+dir, "PYTHONPATH="+without)
			cmd.Dir = dir
			r := runCmd(t, cmd)
			said = append(said, r.String())
			if want := said[(len(said)-1)%2]; r.String() != want || !strings.Contains(want, "content") {
				t.Errorf("lockutils-wrapper in %s: %v, want %s", dir, r, want)
			}
		}
	}
	t.Logf("said: %q", said)
	for dir := range m.Locks() {
		t.Errorf("a lock is left on %s", dir)
	}
}
