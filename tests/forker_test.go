//go:build linux

package tests

import (
	"encoding/json"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A forker runs one program of Python again and again, each time in a process of its own
// that is forked when its modules are there: they take ten times as long as all else.
type forker struct {
	t    *testing.T
	conn *net.UnixConn
	mu   sync.Mutex // of one request at a time
	came chan *forkedProc
}

// A forkedProc is such a process, the leader of its process group.
type forkedProc struct {
	t      *testing.T
	group  group
	status int // once it has ended
	ended  chan struct{}
}

const forkerPy = `
import atexit, gc, importlib, json, os, select, socket, sys, traceback

sys.modules["eventlet"] = None # oslo does without, and it takes seconds to load
conn = socket.socket(fileno=0)
program = compile(open(sys.argv[1]).read(), sys.argv[1], "exec")
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except ImportError:
        pass # as the program will say
gc.collect()
gc.freeze()

def serve():
    children, poll = {}, select.poll()
    poll.register(conn, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd != conn.fileno():
                poll.unregister(fd)
                os.close(fd)
                pid = children.pop(fd)
                conn.send(json.dumps([pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]).encode())
                continue
            args, fds, _, _ = socket.recv_fds(conn, 1 << 16, 2)
            if not args:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                return json.loads(args), fds
            os.setpgid(pid, pid)
            for fd in fds:
                os.close(fd)
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid
            poll.register(pidfd, select.POLLIN)
            socket.send_fds(conn, [json.dumps([pid]).encode()], [pidfd])

args, (stdin, out) = serve()
os.setpgid(0, 0)
for fd, of in ((0, stdin), (1, out), (2, out)):
    os.dup2(of, fd)
os.closerange(3, 1 << 10)
sys.argv[1:] = args
status = 0
try:
    exec(program, {"__name__": "__main__"})
except SystemExit as e:
    status = e.code or 0
except BaseException:
    traceback.print_exc()
    status = 1
# All but this an interpreter does at its end is to clear memory, which is shared yet.
atexit._run_exitfuncs()
sys.stdout.flush()
os._exit(status)
`

// newForker starts one of a program that uses those modules. Where there is no Python,
// there is none.
func newForker(t *testing.T, program string, modules ...string) *forker {
	t.Helper()
	if _, err := os.Stat(debianPython); err != nil {
		return nil
	}
	dir := tempDir(t)
	file := filepath.Join(dir, "program.py")
	mustDo(t, os.WriteFile(file, []byte(program), 0o644))
	mustDo(t, os.WriteFile(filepath.Join(dir, "forker.py"), []byte(forkerPy), 0o644))
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	mustDo(t, err)
	ours, theirs := os.NewFile(uintptr(pair[0]), "forker"), os.NewFile(uintptr(pair[1]), "forker")
	conn, err := net.FileConn(ours)
	mustDo(t, err)
	ours.Close()
	cmd := command(debianPython, append([]string{"-W", "ignore", filepath.Join(dir, "forker.py"), file}, modules...)...)
	cmd.Stdin = theirs
	p := startCmd(t, cmd)
	theirs.Close()
	f := &forker{t: t, conn: conn.(*net.UnixConn), came: make(chan *forkedProc)}
	heard := make(chan struct{})
	go func() {
		defer close(heard)
		f.listen()
	}()
	t.Cleanup(func() {
		conn.Close()
		<-heard
		if r := p.Wait(); r.Status != 0 {
			t.Errorf("the forker: %v", r)
		}
	})
	return f
}

// listen hears of processes that begin and end, until the forker is gone.
func (f *forker) listen() {
	defer close(f.came)
	running := map[int]*forkedProc{}
	for {
		buf, oob := make([]byte, 64), make([]byte, unix.CmsgSpace(4))
		n, oobn, _, _, err := f.conn.ReadMsgUnix(buf, oob)
		var said []int
		if err != nil || json.Unmarshal(buf[:n], &said) != nil {
			return
		}
		pid := said[0]
		if len(said) > 1 {
			running[pid].status = said[1]
			close(running[pid].ended)
			delete(running, pid)
			continue
		}
		p := &forkedProc{group: group{pid: pid, pidfd: -1}, ended: make(chan struct{})}
		if msgs, _ := unix.ParseSocketControlMessage(oob[:oobn]); len(msgs) == 1 {
			if fds, _ := unix.ParseUnixRights(&msgs[0]); len(fds) == 1 {
				unix.CloseOnExec(fds[0])
				p.group.pidfd = fds[0]
			}
		}
		running[pid] = p
		f.came <- p
	}
}

// start runs the program.
func (f *forker) start(t *testing.T, stdin, out *os.File, args ...string) *forkedProc {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	text, err := json.Marshal(args)
	mustDo(t, err)
	// Fd has them block.
	_, _, err = f.conn.WriteMsgUnix(text, unix.UnixRights(int(stdin.Fd()), int(out.Fd())), nil)
	mustDo(t, err)
	p, ok := <-f.came
	if !ok {
		t.Fatal("the forker is gone")
	}
	p.t = t
	t.Cleanup(func() {
		p.signalGroup(syscall.SIGKILL)
		p.Wait()
		unix.Close(p.group.pidfd)
	})
	return p
}

func (p *forkedProc) Pid() int { return p.group.pid }

func (p *forkedProc) signalGroup(sig syscall.Signal) error { return p.group.signal(sig) }

// Wait is as that of a Proc, which has what it prints elsewhere, too.
func (p *forkedProc) Wait() Result {
	p.t.Helper()
	select {
	case <-p.ended:
	case <-time.After(2 * patience):
		p.t.Fatalf("process %d did not end", p.Pid())
	}
	if p.status < 0 {
		return Result{Status: 128 - p.status}
	}
	return Result{Status: p.status}
}

// A started program runs, whoever has started it.
type started interface {
	Pid() int
	Wait() Result
	signalGroup(sig syscall.Signal) error
}

// startPiped starts one with pipes, as its own process group: the command, or if the
// forker is one, that program with those arguments.
func startPiped(t *testing.T, cmd *exec.Cmd, f *forker, args ...string) (p started, stdin, said *os.File) {
	t.Helper()
	in, stdin, err := os.Pipe()
	mustDo(t, err)
	said, out, err := os.Pipe()
	mustDo(t, err)
	defer in.Close()
	defer out.Close()
	if f != nil {
		p = f.start(t, in, out, args...)
	} else {
		cmd.Stdin, cmd.Stdout, cmd.Stderr = in, out, out
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		p = startCmd(t, cmd)
	}
	t.Cleanup(func() { stdin.Close(); said.Close() })
	return p, stdin, said
}
