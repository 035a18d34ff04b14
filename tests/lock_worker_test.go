//go:build linux

package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// A locker is an agent that makes lock calls. It is a program in Python,
// because a Go process can't fork without exec, and because C's flock(2) and
// fcntl(2) are then called as they are, with no retry on EINTR.
//
//	open NAME PATH FLAGS · dup NAME NEW · close NAME
//	flock NAME sh|ex|un [nb]
//	setlk, setlkw, getlk, ofdsetlk, ofdsetlkw, ofdgetlk NAME rd|wr|un [START LENGTH]
//	turn NAME CALL…: locks, notes the time, unlocks
//	fork SOCKET: a child by fork(2) alone · threads N: so many more, which do nothing
//	put PATH DATA FLAGS · write NAME DATA · mkdir, unlink, touch, stat, read PATH · rename OLD NEW · exit STATUS
//	ftruncate NAME LENGTH · fchmod NAME MODE · fchown NAME UID · futimens NAME
//
// SIGUSR1 has a handler that interrupts system calls, SIGUSR2 one after which
// they are restarted.
const lockerPy = `
import ast, ctypes, errno, json, os, re, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
fds = {}
FLOCK = {"sh": 1, "ex": 2, "un": 8}
TYPES = {"rd": 0, "wr": 1, "un": 2}
CALLS = {"getlk": 5, "setlk": 6, "setlkw": 7, "ofdgetlk": 36, "ofdsetlk": 37, "ofdsetlkw": 38}

def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result

def flags(words):
    n = 0
    for w in words.split(",") if words else []:
        n |= getattr(os, "O_" + w.upper())
    return n

def lock(call, name, kind, *rest):
    fd = fds[name]
    if call == "flock":
        check(libc.flock(fd, FLOCK[kind] | (4 if "nb" in rest else 0)))
        return ""
    start, length = (int(x) for x in rest) if rest else (0, 0)
    arg = ctypes.create_string_buffer(struct.pack("hhqqi4x", TYPES[kind], 0, start, length, 0))
    check(libc.fcntl(fd, CALLS[call], arg))
    if not call.endswith("getlk"):
        return ""
    kind, _, start, length, pid = struct.unpack("hhqqi4x", arg.raw[:32])
    return "un" if kind == 2 else "%s %d %d %d" % ("rd" if kind == 0 else "wr", start, length, pid)

def unlock(call, name, *rest):
    if call == "flock":
        lock(call, name, "un")
    else:
        lock(call, name, "un", *rest[1:])

def write(fd, data):
    os.write(fd, data.encode())

def put(path, data, how):
    fd = os.open(path, os.O_WRONLY | flags(how), 0o666)
    try:
        write(fd, data)
    finally:
        os.close(fd)

def do(op, *w):
    global conn
    if op == "flock" or op in CALLS:
        return lock(op, *w)
    if op == "turn":
        lock(w[1], w[0], *w[2:])
        at = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        unlock(w[1], w[0], *w[2:])
        return str(at)
    if op == "open":
        fds[w[0]] = os.open(w[1], flags(w[2]), 0o666)
    elif op == "dup":
        fds[w[1]] = os.dup(fds[w[0]])
    elif op == "close":
        os.close(fds.pop(w[0]))
    elif op == "fork":
        if os.fork() == 0:
            conn.close()
            connect(w[0])
            serve()
    elif op == "threads":
        for _ in range(int(w[0])):
            threading.Thread(target=threading.Event().wait, daemon=True).start()
    elif op == "put":
        put(*w)
    elif op == "write":
        write(fds[w[0]], w[1])
    elif op == "ftruncate":
        os.ftruncate(fds[w[0]], int(w[1]))
    elif op == "fchmod":
        os.fchmod(fds[w[0]], int(w[1], 8))
    elif op == "fchown":
        os.fchown(fds[w[0]], int(w[1]), -1)
    elif op == "futimens":
        os.utime(fds[w[0]])
    elif op in ("rename", "link"):
        getattr(os, op)(*w)
    elif op == "stat":
        return "size=%d" % os.stat(w[0]).st_size
    elif op == "read":
        with open(w[0]) as f:
            return f.read()
    elif op == "exit":
        os._exit(int(w[0]))
    else:
        {"mkdir": os.mkdir, "unlink": os.unlink, "touch": os.utime}[op](w[0])
    return ""

def connect(path):
    global conn, lines
    conn = socket.socket(socket.AF_UNIX)
    conn.connect(path)
    lines = conn.makefile("r")
    conn.sendall(b"%d\n" % os.getpid())

def serve():
    for line in iter(lines.readline, ""):
        words = [ast.literal_eval(w) for w in re.findall(r'"(?:[^"\\]|\\.)*"', line)]
        status, out = "ok", ""
        try:
            out = do(*words)
        except OSError as e:
            status = errno.errorcode.get(e.errno, str(e.errno)).replace("EWOULDBLOCK", "EAGAIN").replace("EDEADLOCK", "EDEADLK")
        except Exception as e:
            status = repr(e)
        conn.sendall((json.dumps(status) + " " + json.dumps(out) + "\n").encode())
    os._exit(3)

signal.signal(signal.SIGUSR1, lambda *a: None)
signal.signal(signal.SIGUSR2, lambda *a: None)
signal.siginterrupt(signal.SIGUSR2, False)
os.umask(0)
connect(sys.argv[1])
serve()
`

// debianPython is the interpreter that Debian's packages install for.
const debianPython = "/usr/bin/python3"

// locker starts one, as a child of the test process. What it waits for at the
// end of the test does not keep the test waiting.
func locker(t *testing.T) *Agent { t.Helper(); return lockerAs(t, 0) }

func lockerAs(t *testing.T, uid uint32) *Agent {
	t.Helper()
	need(t, debianPython)
	program := filepath.Join(tempDir(t), "locker.py")
	mustDo(t, os.WriteFile(program, []byte(lockerPy), 0o644))
	a := awaitAgent(t, func(sock string) {
		cmd := exec.Command(debianPython, "-ESs", program, sock)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		startCmd(t, cmd)
	})
	return endAtOnce(a)
}

// forked is a child of a locker that is not yet another program.
func forked(a *Agent) *Agent { a.t.Helper(); return endAtOnce(a.Child()) }

func endAtOnce(a *Agent) *Agent {
	a.t.Cleanup(func() { unix.PidfdSendSignal(a.ends, unix.SIGKILL, nil, 0) })
	return a
}

// lockCall is a way to lock a file, for commands of a locker; the first three
// words of a command are its call, the descriptor and the type.
type lockCall struct{ name, try, wait, get, shared, exclusive string }

func lockCalls() []lockCall {
	return []lockCall{
		{"flock", "flock", "flock", "", "sh", "ex"},
		{"fcntl", "setlk", "setlkw", "getlk", "rd", "wr"},
		{"OFD", "ofdsetlk", "ofdsetlkw", "ofdgetlk", "rd", "wr"},
	}
}

// tryArgs are those of a call that does not wait.
func (c lockCall) tryArgs(fd, kind string) []string {
	if c.name == "flock" {
		return []string{c.try, fd, kind, "nb"}
	}
	return []string{c.try, fd, kind}
}

func (c lockCall) tryExclusive(fd string) []string { return c.tryArgs(fd, c.exclusive) }
func (c lockCall) tryShared(fd string) []string    { return c.tryArgs(fd, c.shared) }
func (c lockCall) waitExclusive(fd string) []string {
	return []string{c.wait, fd, c.exclusive}
}
func (c lockCall) unlock(fd string) []string { return []string{c.try, fd, "un"} }

func command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	return cmd
}
