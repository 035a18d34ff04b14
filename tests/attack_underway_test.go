//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// underWayRace has one process change names just before another acquires the directory
// above and writes a file anew. The first does not get the processor while it is in the
// system call that has been answered.
const underWayRace = `
import ctypes, fcntl, os, select, signal, sys, time
d, back, daemon, what, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
libc = ctypes.CDLL(None, use_errno=True)
lock = d + "/devserver"
def at(top, name):
    return top + "/sub/in/" + name
f, g, inner, moved = at(d, "f"), at(d, "g"), d + "/sub/in", d + "/sub/moved"
def exchange():
    assert libc.renameat2(-100, f.encode(), -100, g.encode(), 2) == 0
def content(path):
    try:
        with open(path, "rb") as h:
            return h.read()
    except FileNotFoundError:
        return None
def gone(path):
    try:
        os.close(os.open(path, os.O_WRONLY))
        return False
    except FileNotFoundError:
        return True
# What is done, when that shows in the backing, and what is there then beside f.
change = {
    "unlink": (lambda: os.unlink(f), lambda: content(at(back, "f")) is None, {g: b"other"}),
    "rename": (lambda: os.rename(f, f + "2"), lambda: content(at(back, "f2")) == b"old", {g: b"other", f + "2": b"old", f + "3": None}),
    "replace": (lambda: os.rename(g, f), lambda: content(at(back, "f")) == b"other", {g: None}),
    "exchange": (exchange, lambda: content(at(back, "g")) == b"old", {g: b"old"}),
    "directory": (lambda: os.rename(inner, moved), lambda: os.path.isdir(back + "/sub/moved"), {moved + "/f": b"old", moved + "/g": b"other", moved + "/devserver": None}),
}
change["attributes"], change["beneath"] = change["rename"], change["directory"]
change["tmpfile"] = change["unlink"]
change["both"] = (lambda: os.unlink(f if content(at(back, "f")) else g), change["unlink"][1], {g: None})
inner2, moved2 = inner + "2", moved + "2"
change["twice"] = (lambda: os.rename(*(inner, moved) if os.path.isdir(inner) else (inner2, moved2)), change["directory"][1], {})
change, done, after = change[what]
cpus = sorted(os.sched_getaffinity(0))
def child(run, *pipes):
    pid = os.fork()
    if pid == 0:
        for p in pipes:
            os.close(p)
        try:
            run()
        except BaseException as e:
            print(repr(e), flush=True)
        os._exit(0)
    return pid
go, told = os.pipe()
spin, turn = os.pipe()
answer, tell = os.pipe()
def changer():
    os.sched_setaffinity(0, {cpus[-1]})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while os.read(go, 1):
        change()
        os.write(tell, b"c")
def spinner():
    os.sched_setaffinity(0, {cpus[-1]})
    while os.read(spin, 1):
        until = time.monotonic() + 0.1
        while time.monotonic() < until:
            pass
def put(path, text):
    h = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o666)
    os.write(h, text)
    os.close(h)
def born(path, text): # without a name
    h = os.open(inner, os.O_TMPFILE | os.O_WRONLY, 0o666)
    os.write(h, text)
    assert libc.linkat(-100, b"/proc/self/fd/%d" % h, -100, path.encode(), 0x400) == 0
    os.close(h)
def state(pid):
    with open("/proc/%d/stat" % pid) as s:
        return s.read().rpartition(")")[2].split()[0]
def wait(until):
    end = time.monotonic() + 20
    while not until():
        assert time.monotonic() < end, what + " does not come to pass"
def race(done):
    os.kill(daemon, signal.SIGSTOP)
    os.write(told, b"x")
    time.sleep(0.001)
    wait(lambda: state(children[0]) in "SD")
    os.write(turn, b"x")
    os.kill(daemon, signal.SIGCONT)
    wait(done)
def answered(): # and, mostly, without the processor still; an acquisition waits for that itself
    wait(lambda: state(children[0]) == "R" or select.select([answer], [], [], 0)[0])
def acquire(lock):
    os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
def attributes():
    for call, *args in (os.chmod, 0o640), (os.truncate, 1), (os.utime, (1, 1)), (os.setxattr, "user.x", b"1"), (os.link, f + "3"):
        try:
            call(f, *args)
        except FileNotFoundError:
            pass
def stage():
    try:
        if what == "beneath":
            acquire(inner + "/devserver")
        elif what == "attributes":
            attributes()
        put(f, b"new")
    except FileNotFoundError: # the directory has gone
        os.mkdir(inner)
        put(f, b"new")
def twice(): # who has looked for one directory in vain looks for another, which goes likewise
    os.makedirs(inner2, exist_ok=True)
    with open(back + "/devserver", "w"):
        pass
    h = os.open(lock, os.O_RDWR)
    wrong = []
    race(done)
    try:
        acquire(inner + "/devserver")
        wrong.append(inner)
    except FileNotFoundError:
        os.read(answer, 1)
    race(lambda: os.path.isdir(back + "/sub/moved2"))
    fcntl.flock(h, fcntl.LOCK_EX)
    try:
        os.mkdir(inner2 + "/x")
        wrong.append(inner2)
    except FileNotFoundError:
        pass
    os.read(answer, 1)
    if os.path.isdir(moved2 + "/x"):
        wrong.append(moved2 + "/x")
        os.rmdir(moved2 + "/x")
    os.close(h)
    os.rename(moved2, inner2)
    return wrong
os.umask(0o022)
os.makedirs(inner, exist_ok=True)
children = [child(changer, told, turn), child(spinner, told, turn)]
os.sched_setaffinity(0, {cpus[0]})
lost = 0
try:
    for _ in range(rounds):
        if os.path.isdir(moved):
            os.rename(moved, inner)
        (born if what == "tmpfile" else put)(f, b"old")
        put(g, b"other")
        time.sleep(0.005) # what was closed is, also for the daemon
        if what == "twice":
            wrong = twice()
            lost += bool(wrong)
            if wrong:
                print("wrong:", *wrong)
            continue
        race(done)
        wrong = []
        if what == "both": # who has looked for f in vain looks for g, which goes likewise
            answered()
            wrong = [p for p in [f] if not gone(p)]
            os.read(answer, 1)
            race(lambda: content(at(back, "g")) is None)
            answered()
            wrong += [p for p in [g] if not gone(p)]
        if what != "beneath":
            acquire(lock)
        stage()
        os.read(answer, 1)
        wrong += [p for p, c in after.items() if content(p) != c]
        if content(f) != b"new":
            wrong.append(f)
        if what == "attributes" and os.stat(f + "2").st_mode & 0o777 != 0o644:
            wrong.append("mode")
        if wrong:
            lost += 1
            print("wrong:", *wrong)
        for p in [f, g, f + "2"]:
            if os.path.exists(p):
                os.unlink(p)
        if os.path.isdir(moved):
            os.rmdir(inner)
        if what != "beneath":
            os.unlink(lock)
finally:
    os.kill(daemon, signal.SIGCONT)
    os.close(told)
    os.close(turn)
    for c in children:
        os.waitpid(c, 0)
print("lost", lost, "of", rounds)
`

// TestW3AttackUnderWay: a removal or rename that was admitted before an acquisition takes
// nothing from the new holder, though who called it has not returned from it yet.
func TestW3AttackUnderWay(t *testing.T) {
	need(t, "python3")
	m := mount(t)
	prog := filepath.Join(tempDir(t), "race.py")
	mustDo(t, os.WriteFile(prog, []byte(underWayRace), 0o644))
	const rounds = 6
	for _, what := range []string{"unlink", "rename", "replace", "exchange", "directory", "attributes", "beneath", "tmpfile", "both", "twice"} {
		t.Run(what, func(t *testing.T) {
			cmd := command("python3", prog, m.At(what), m.Back(what), fmt.Sprint(m.cmd.Process.Pid), what, fmt.Sprint(rounds))
			cmd.Stderr = os.Stderr
			out, err := cmd.Output()
			if got := strings.TrimSpace(string(out)); err != nil || got != fmt.Sprintf("lost 0 of %d", rounds) {
				t.Errorf("%s, %v", got, err)
			}
		})
	}
}

// TestW3AttackUnderWayMidway: who is about to acquire a directory while it is renamed does not
// have it under the name that is gone, also if the daemon has begun with that before.
func TestW3AttackUnderWayMidway(t *testing.T) {
	needInject(t)
	m := newMount(t, staticDir(t), tempDir(t))
	var mover atomic.Int64
	goesOn := make(chan struct{})
	release := sync.OnceFunc(func() { close(goesOn) })
	defer release()
	m.inject(&fault{call: unix.SYS_OPENAT, until: func(a asked) <-chan struct{} {
		pid := mover.Load()
		if pid == 0 || a.path(1) != fmt.Sprintf("/proc/%d/status", pid) || !mover.CompareAndSwap(pid, 0) {
			return nil
		}
		return goesOn
	}})
	m.serve()
	openDir(t, m.Back("D/sub/in"))
	openFile(t, m.Back("x"), "x")
	taker, renamer := agent(t), agent(t)
	// The daemon looks whether somebody who has renamed something else has returned: not in
	// the first 10 ms.
	mv := exec.Command("mv", m.At("x"), m.At("y"))
	mustDo(t, mv.Run())
	time.Sleep(50 * time.Millisecond)
	mover.Store(int64(mv.Process.Pid))
	took := taker.Start("creat", m.At("D/sub/in/devserver"), "wronly,creat,excl")
	eventually(t, "it looks", func() bool { return mover.Load() == 0 })
	renamer.must("rename", m.At("D/sub/in"), m.At("D/sub/moved"))
	release()
	if got := took(); got != "ENOENT" {
		t.Errorf("who acquires hears %s, want ENOENT", got)
	}
	if exists(m.Back("D/sub/moved/devserver")) {
		t.Error("the directory that has moved is acquired")
	}
}

// TestW3Nameless: what has no name any more is reached by a descriptor as ever.
func TestW3Nameless(t *testing.T) {
	need(t, "python3")
	m := mount(t)
	mustDo(t, os.MkdirAll(m.Back("D"), 0o777))
	prog := filepath.Join(tempDir(t), "nameless.py")
	mustDo(t, os.WriteFile(prog, []byte(`
import os, sys
p = sys.argv[1] + "/f"
for path in (False, True):
    fd = os.open(p, os.O_CREAT | os.O_RDWR)
    os.write(fd, b"content")
    if path:
        os.close(fd)
        fd = os.open(p, os.O_PATH)
    os.unlink(p)
    again = "/proc/self/fd/%d" % fd
    for _ in range(3):
        h = os.open(again, os.O_RDWR)
        assert os.read(h, 100) == b"content"
        os.close(h)
        os.chmod(again, 0o600)
        os.utime(again, (1, 1))
        os.setxattr(again, "user.x", b"1")
        assert os.stat(again).st_mtime == 1
        os.truncate(again, 7)
    if not path:
        os.fchmod(fd, 0o640)
        assert os.fstat(fd).st_mode & 0o777 == 0o640
    os.close(fd)
os.mkdir(p)
d = os.open(p, os.O_RDONLY)
os.rmdir(p)
os.mkfifo(p)
fifo = os.open(p, os.O_RDWR)
os.unlink(p)
for fd in (d, fifo):
    os.fchmod(fd, 0o700)
    os.fchown(fd, 1, 1)
    os.utime(fd, (1, 1))
    s = os.fstat(fd)
    assert s.st_mode & 0o777 == 0o700 and s.st_uid == 1 and s.st_mtime == 1
print("ok")
`), 0o644))
	out, err := command("python3", prog, m.At("D")).CombinedOutput()
	if strings.TrimSpace(string(out)) != "ok" || err != nil {
		t.Errorf("%s%v", out, err)
	}
}
