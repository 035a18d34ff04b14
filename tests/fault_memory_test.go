//go:build linux

package tests

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// keeperProgram has a thread that maps memory over a page, on and from the line "keep".
// Before, it has mapped and done all that takes memory. Other lines are what it is to
// do, alone or with all of its threads.
const keeperProgram = `
import _thread, ctypes, errno, os, sys
c = ctypes.CDLL(None)
c.mmap.restype = ctypes.c_void_p
c.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
fd = os.open(sys.argv[1], os.O_RDWR)
page = c.mmap(None, 4096, 3, 1, fd, 0)
def do(op, path):
    try:
        if op == "mkdir":
            os.mkdir(path)
        elif op == "open":
            os.close(os.open(path, os.O_WRONLY))
        elif op == "trunc":
            os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))
        elif op == "creat":
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644))
        else:
            os.stat(path)
        return "ok"
    except OSError as e:
        return errno.errorcode[e.errno]
def locked():
    l = _thread.allocate_lock()
    l.acquire()
    return l
class Worker:
    def __init__(self):
        self.go, self.done = locked(), locked()
        _thread.start_new_thread(self.work, ())
    def work(self):
        while True:
            self.go.acquire()
            self.answer = do(*job)
            self.done.release()
def together():
    for w in workers:
        w.go.release()
    for w in workers:
        w.done.acquire()
    answers = [w.answer for w in workers]
    return " ".join("%s*%d" % (a, answers.count(a)) for a in sorted(set(answers)))
_thread.stack_size(256 << 10)
workers = [Worker() for _ in range(int(sys.argv[2]))]
job = ("open", "/nonexistent")
for _ in range(3):
    together()
    do(*job)
keep = locked()
def keeper():
    keep.acquire()
    c.mmap(page, 4096, 1, 0x32, -1, 0)
_thread.start_new_thread(keeper, ())
if c.mlockall(1):
    sys.exit("mlockall")
print("ready", flush=True)
for line in sys.stdin:
    words = line.split()
    answer = "ok"
    if words[0] == "touch":
        ctypes.memset(page, 7, 5)
    elif words[0] == "keep":
        keep.release()
    elif words[0] == "together":
        job = (words[1], words[2])
        answer = together()
    else:
        answer = do(words[0], words[1])
    print(answer, flush=True)
`

// A keeper is a process that keeps its own memory locked. (The test's own programs
// need more of it all the time.)
type keeper struct {
	t   *testing.T
	Pid int
	in  io.Writer
	out *bufio.Reader
}

// keeper starts one that has so many threads beside; its n-th.
func (e *elsewhere) keeper(n, threads int, env ...string) *keeper {
	e.t.Helper()
	need(e.t, "/usr/bin/python3")
	f := "page" + itoa(n)
	openFile(e.t, e.m.Back(f), strings.Repeat("x", os.Getpagesize()))
	cmd := exec.Command("/usr/bin/python3", "-c", keeperProgram, e.m.At(f), itoa(threads))
	// All that it allocates is from one heap that is large enough from the start, and
	// none is given back; and no page of it is touched for the first time. Any of these
	// would wait for itself.
	cmd.Env = append(append(os.Environ(), "PYTHONMALLOC=malloc", "MALLOC_ARENA_MAX=1", "MALLOC_TOP_PAD_=16777216",
		"MALLOC_TRIM_THRESHOLD_=1073741824", "MALLOC_MMAP_THRESHOLD_=33554432"), env...)
	in, err := cmd.StdinPipe()
	mustDo(e.t, err)
	out, err := cmd.StdoutPipe()
	mustDo(e.t, err)
	cmd.Stderr = os.Stderr
	mustDo(e.t, cmd.Start())
	e.t.Cleanup(func() {
		e.answer() // or it does not end
		cmd.Process.Kill()
		cmd.Wait()
	})
	k := &keeper{e.t, cmd.Process.Pid, in, bufio.NewReader(out)}
	if got := k.receive(); got != "ready" {
		e.t.Fatalf("the program says %q", got)
	}
	return k
}

// keep has them keep their memory locked until [elsewhere.answer]: what they map
// something over has to be written first.
func (e *elsewhere) keep(ks ...*keeper) {
	e.t.Helper()
	for _, k := range ks {
		k.want("ok", "touch")
	}
	halt(e.t, e.m.cmd.Process.Pid)
	for _, k := range ks {
		k.want("ok", "keep")
		eventually(e.t, "a thread waits with the memory locked", func() bool { return stuckThreads(k.Pid) > 0 })
	}
}

func (k *keeper) send(words ...string) {
	k.t.Helper()
	_, err := fmt.Fprintln(k.in, strings.Join(words, " "))
	mustDo(k.t, err)
}

// receive returns an answer.
func (k *keeper) receive() string {
	k.t.Helper()
	got := make(chan string, 1)
	go func() {
		line, _ := k.out.ReadString('\n')
		got <- strings.TrimSpace(line)
	}()
	select {
	case answer := <-got:
		return answer
	case <-time.After(patience):
		k.t.Fatalf("no answer within %v", patience)
		return ""
	}
}

func (k *keeper) want(want string, words ...string) {
	k.t.Helper()
	k.send(words...)
	if got := k.receive(); got != want {
		k.t.Errorf("%q = %s, want %s", words, got, want)
	}
}

// inTime is what an agent answers, unless it takes longer than d.
func inTime(t *testing.T, d time.Duration, a *Agent, command ...string) string {
	t.Helper()
	a.send(command)
	line := make(chan string, 1)
	go func() {
		a.conn.SetReadDeadline(time.Now().Add(2 * patience))
		s, _ := a.in.ReadString('\n')
		line <- s
	}()
	select {
	case s := <-line:
		words, err := splitWords(s)
		mustDo(t, err)
		return words[0]
	case <-time.After(d):
		t.Fatalf("%q hangs", command)
		return ""
	}
}

// denialsOf returns the command lines of who was refused with a pid.
func (m *Mount) denialsOf(pid int) (cmds []string) {
	m.t.Helper()
	b, err := os.ReadFile(m.control("denials"))
	mustDo(m.t, err)
	for line := range strings.Lines(string(b)) {
		var d struct {
			Pid int    `json:"pid"`
			Cmd string `json:"cmd"`
		}
		mustDo(m.t, json.Unmarshal([]byte(line), &d))
		if d.Pid == pid {
			cmds = append(cmds, d.Cmd)
		}
	}
	return cmds
}

// TestFaultMemoryRefused: a process that is refused has its memory locked by a thread
// that waits for another file system. It is told so all the same, with many threads,
// and keeps nobody waiting; in the listing it has the name of its program.
func TestFaultMemoryRefused(t *testing.T) {
	for _, transport := range []string{"threads", "uring"} {
		t.Run(transport, func(t *testing.T) {
			needTransport(t, transport)
			e, m := newElsewhere(t, "--no-passthrough"), mount(t, "--transport", transport)
			openDir(t, m.Back("D"))
			openFile(t, m.Back("D/f"), "x")
			holder, other := agent(t), agent(t)
			holder.must("creat", m.At("D/devserver"), "rdwr,creat,excl")
			const threads = 200
			k := e.keeper(0, threads)
			e.keep(k)
			k.send("mkdir", m.At("D/new"))
			if got := inTime(t, 5*time.Second, holder, "put", m.At("D/mine"), "x", "creat"); got != "ok" {
				t.Errorf("the holder's own file: %s", got)
			}
			if got := k.receive(); got != "EBUSY" {
				t.Errorf("mkdir = %s, want EBUSY", got)
			}
			for range 10 {
				k.want(fmt.Sprintf("EBUSY*%d", threads), "together", "open", m.At("D/f"))
			}
			eventually(t, "at most one thread of the daemon waits for the process", func() bool { return stuckThreads(m.daemon()) <= 1 })
			othersGoOn(t, m, other)
			if cmds := m.denialsOf(k.Pid); len(cmds) == 0 || cmds[0] != "[python3]" {
				t.Errorf("refused were %.100q, want [python3]", cmds)
			}
			m.replace()
			k.want("EBUSY", "mkdir", m.At("D/new"))
			e.answer()
			eventually(t, "the whole command line is told", func() bool {
				k.want("EBUSY", "mkdir", m.At("D/new"))
				cmds := m.denialsOf(k.Pid)
				return strings.HasPrefix(cmds[len(cmds)-1], "/usr/bin/python3 -c")
			})
		})
	}
}

// TestFaultMemoryMany: there are many of them.
func TestFaultMemoryMany(t *testing.T) {
	e, m := newElsewhere(t, "--no-passthrough"), mount(t)
	openDir(t, m.Back("D"))
	holder, other := agent(t), agent(t)
	holder.must("creat", m.At("D/devserver"), "rdwr,creat,excl")
	ks := make([]*keeper, 24)
	for i := range ks {
		ks[i] = e.keeper(i, 0)
	}
	e.keep(ks...)
	for i, k := range ks {
		k.send("mkdir", m.At("D", "new"+itoa(i)))
	}
	if got := inTime(t, 5*time.Second, holder, "put", m.At("D/mine"), "x", "creat"); got != "ok" {
		t.Errorf("the holder's own file: %s", got)
	}
	othersGoOn(t, m, other)
	for _, k := range ks {
		if got := k.receive(); got != "EBUSY" {
			t.Errorf("mkdir = %s, want EBUSY", got)
		}
	}
	eventually(t, "at most one thread of the daemon waits for each process", func() bool { return stuckThreads(m.daemon()) <= len(ks) })
}

// TestFaultMemoryListed: the owner of a lock has its memory locked. Whoever asks who
// holds what is told, and so is whoever looks through all processes.
func TestFaultMemoryListed(t *testing.T) {
	e, m := newElsewhere(t, "--no-passthrough"), mount(t)
	other, inside := agent(t), agent(t)
	inside.must("open", "inside", m.At(), "rdonly")
	k := e.keeper(0, 0)
	e.keep(k)
	k.want("ok", "mkdir", m.At("D"))
	if got := inTime(t, 5*time.Second, other, "read", m.control("locks.json")); got != "ok" {
		t.Errorf("locks.json: %s", got)
	}
	if l := m.Locks()["D"]; l.Pid != k.Pid || l.Cmd != "[python3]" {
		t.Errorf("D is locked by %d, %q; want %d, [python3]", l.Pid, l.Cmd, k.Pid)
	}
	for _, c := range []struct {
		status int
		args   []string
	}{
		{0, []string{"locks", m.Path}},
		{0, []string{"why", m.At("D")}},
		{75, []string{"acquire", "-n", "--client", "x", m.At("D")}},
		{75, []string{"run", "-n", m.At("D"), "true"}},
		{75, []string{"umount", m.Path}},
	} {
		began := time.Now()
		r := runCmd(t, exec.Command("timeout", append([]string{"-s", "KILL", "20", stagefsBin()}, c.args...)...))
		if r.Status != c.status || time.Since(began) > 10*time.Second {
			t.Errorf("%q: %v after %v, want status %d", c.args, r, time.Since(began), c.status)
		}
	}
	k.want("ok", "creat", m.At("D/f"))
}

// TestFaultMemoryLease: what a process carries that has its memory locked when it is
// seen first is not known. It is waited for, and it holds what its client does (L2).
func TestFaultMemoryLease(t *testing.T) {
	e, m := newElsewhere(t, "--no-passthrough"), mount(t)
	openDir(t, m.Back("D"))
	client, other := agent(t), agent(t)
	client.mustCommand(m, "acquire D client=x ttl=1h")
	k := e.keeper(0, 0, "STAGEFS_CLIENT=x")
	e.keep(k)
	began := time.Now()
	k.send("creat", m.At("D/f"))
	took := make(chan time.Duration, 1)
	done := inBackground(func() string {
		got := k.receive()
		took <- time.Since(began)
		return got
	})
	const soon = 900 * time.Millisecond // a second after it was asked for it is a stranger
	othersGoOn(t, m, other)
	time.Sleep(100 * time.Millisecond)
	select {
	case d := <-took:
		if d < soon {
			t.Fatalf("a process of the client's has %s after %v, want no answer yet", <-done, d)
		}
	default:
	}
	e.answer()
	known := time.Since(began) < soon
	switch got := <-done; {
	case t.Failed():
		return // there was no answer
	case got != "ok" && known:
		t.Errorf("afterwards: %s, want ok", got)
	}
	k.want("ok", "creat", m.At("D/g"))
}

// TestFaultMemoryTruncate: nor does it open its lock file and leave in it what it asks
// to be removed (A10).
func TestFaultMemoryTruncate(t *testing.T) {
	e, m := newElsewhere(t, "--no-passthrough"), mount(t)
	openDir(t, m.Back("D"))
	openFile(t, m.Back("D/devserver"), "an older one")
	client := agent(t)
	client.mustCommand(m, "acquire D client=x ttl=1h")
	k := e.keeper(0, 0, "STAGEFS_CLIENT=x")
	e.keep(k)
	began := time.Now()
	k.send("trunc", m.At("D/devserver"))
	time.Sleep(200 * time.Millisecond)
	e.answer()
	known := time.Since(began) < 900*time.Millisecond // a second after it was asked for it is a stranger
	if got := k.receive(); got != "ok" {
		t.Fatalf("open with O_TRUNC = %s, want ok", got)
	}
	if b, err := os.ReadFile(m.Back("D/devserver")); err != nil || known && len(b) > 0 {
		t.Errorf("the lock file has %q, %v; want nothing", b, err)
	}
}

// TestFaultMemoryCandidate: nor is a file of its own taken for a stranger's candidate,
// which would never reach the directory (A9).
func TestFaultMemoryCandidate(t *testing.T) {
	e, m := newElsewhere(t, "--no-passthrough"), mount(t)
	openDir(t, m.Back("D"))
	client := agent(t)
	client.mustCommand(m, "acquire D client=x ttl=1h")
	k := e.keeper(0, 0, "STAGEFS_CLIENT=x")
	e.keep(k)
	name := fmt.Sprintf("host-7f00ab.%d-456789012", k.Pid) // as of Python's lockfile
	k.send("creat", m.At("D", name))
	time.Sleep(200 * time.Millisecond)
	e.answer()
	got := k.receive() // EBUSY, if it has become a stranger meanwhile
	if _, err := os.Stat(m.Back("D", name)); got == "ok" && err != nil {
		t.Errorf("the file was made, and then: %v", err)
	} else if got != "ok" && got != "EBUSY" {
		t.Errorf("creat = %s, want ok", got)
	}
	k.want("ok", "creat", m.At("D/f"))
}

// TestFaultMemoryStranger: a process whose memory stays locked is refused when a
// second is over, and from then on at once, whatever it carries. Two threads of the
// daemon wait for it, and nobody else does.
func TestFaultMemoryStranger(t *testing.T) {
	e, m := newElsewhere(t, "--no-passthrough"), mount(t)
	openDir(t, m.Back("D"))
	openFile(t, m.Back("D/f"), "x")
	client, other := agent(t), agent(t)
	client.mustCommand(m, "acquire D client=x ttl=1h")
	const threads = 200
	var ks []*keeper
	for i, id := range []string{"x", "y"} {
		ks = append(ks, e.keeper(i, threads, "STAGEFS_CLIENT="+id))
	}
	e.keep(ks...)
	for _, k := range ks {
		k.want(fmt.Sprintf("EBUSY*%d", threads), "together", "open", m.At("D/f"))
		const tries = 20
		soon := 0 // not after another second
		for range tries {
			began := time.Now()
			k.want("EBUSY", "mkdir", m.At("D/new"))
			if time.Since(began) < 500*time.Millisecond {
				soon++
			}
		}
		if soon < tries/2 {
			t.Errorf("%d of %d refusals were soon", soon, tries)
		}
	}
	// For the environment, and the command line.
	eventually(t, "at most two threads of the daemon wait for each process", func() bool { return stuckThreads(m.daemon()) <= 2*len(ks) })
	othersGoOn(t, m, other)
	e.answer()
	eventually(t, "the daemon waits for nobody", func() bool { return stuckThreads(m.daemon()) == 0 })
	ks[0].want("ok", "mkdir", m.At("D/new"))
	ks[1].want("EBUSY", "mkdir", m.At("D/newer"))
}
