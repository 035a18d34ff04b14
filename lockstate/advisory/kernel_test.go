//go:build linux

package advisory_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stagefs/stagefs/lockstate/advisory"
	"golang.org/x/sys/unix"
)

// Real processes with real locks. The test binary starts itself as a client,
// which does what it reads from its standard input.

const clientEnv = "ADVISORY_TEST_CLIENT"

func TestMain(m *testing.M) {
	if path := os.Getenv(clientEnv); path != "" {
		client(path)
		return
	}
	os.Exit(m.Run())
}

// command is one call; reply is its answer.
type command struct {
	ID         int
	Op         string // open, dup, close, posix, ofd, flock, get, getofd
	Slot, To   int
	Type       int16 // F_RDLCK, F_WRLCK, F_UNLCK
	Start, Len int64
	Wait       bool
}

type reply struct {
	ID    int
	Tid   int // first answer of a call that may block: its thread
	Errno syscall.Errno
	Lock  unix.Flock_t // what get found
}

// inherited is how many descriptions all clients share, in slots 0 up.
const inherited = 2

func client(path string) {
	fds := make(map[int]int)
	for i := range inherited {
		fds[i] = 3 + i
		syscall.CloseOnExec(3 + i)
	}
	var mu sync.Mutex
	out := json.NewEncoder(os.Stdout)
	answer := func(r reply) {
		mu.Lock()
		defer mu.Unlock()
		_ = out.Encode(r)
	}
	in := json.NewDecoder(bufio.NewReader(os.Stdin))
	for {
		var c command
		if err := in.Decode(&c); err != nil {
			return
		}
		fd := fds[c.Slot]
		lock := unix.Flock_t{Type: c.Type, Start: c.Start, Len: c.Len}
		do := func() {
			var err error
			switch c.Op {
			case "open":
				fd, err = unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
				fds[c.Slot] = fd
			case "dup":
				fds[c.To], err = unix.Dup(fd)
			case "close":
				err = unix.Close(fd)
				delete(fds, c.Slot)
			case "posix":
				err = unix.FcntlFlock(uintptr(fd), cmd(c.Wait, unix.F_SETLK, unix.F_SETLKW), &lock)
			case "ofd":
				err = unix.FcntlFlock(uintptr(fd), cmd(c.Wait, unix.F_OFD_SETLK, unix.F_OFD_SETLKW), &lock)
			case "flock":
				how := map[int16]int{unix.F_RDLCK: unix.LOCK_SH, unix.F_WRLCK: unix.LOCK_EX, unix.F_UNLCK: unix.LOCK_UN}[c.Type]
				if !c.Wait {
					how |= unix.LOCK_NB
				}
				err = unix.Flock(fd, how)
			case "get":
				err = unix.FcntlFlock(uintptr(fd), unix.F_GETLK, &lock)
			case "getofd":
				err = unix.FcntlFlock(uintptr(fd), unix.F_OFD_GETLK, &lock)
			}
			errno, _ := err.(syscall.Errno)
			answer(reply{ID: c.ID, Errno: errno, Lock: lock})
		}
		if c.Wait {
			go func() {
				runtime.LockOSThread()
				answer(reply{ID: c.ID, Tid: unix.Gettid()})
				do()
			}()
		} else {
			do()
		}
	}
}

func cmd(wait bool, try, block int) int {
	if wait {
		return block
	}
	return try
}

// A proc is a client process as the test sees it.
type proc struct {
	t       testing.TB
	cmd     *exec.Cmd
	in      io.WriteCloser
	enc     *json.Encoder
	replies chan reply
	early   map[int]reply // taken from replies while looking for others
	tids    map[int]int   // threads of blocking calls
	pid     int
}

// A kernel is a real file, with processes that lock it.
type kernel struct {
	t     testing.TB
	path  string
	ino   string // as in /proc/locks
	procs []*proc
	ids   int
}

func newKernel(t testing.TB, n int) *kernel {
	k := &kernel{t: t, path: filepath.Join(t.TempDir(), "file")}
	if err := os.WriteFile(k.path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Stat(k.path, &st); err != nil {
		t.Fatal(err)
	}
	k.ino = fmt.Sprintf(":%d ", st.Ino)
	shared := make([]*os.File, inherited)
	for i := range shared {
		f, err := os.OpenFile(k.path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		shared[i] = f
		defer f.Close()
	}
	for range n {
		k.procs = append(k.procs, startProc(t, k.path, shared))
	}
	return k
}

func startProc(t testing.TB, path string, shared []*os.File) *proc {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &proc{t: t, cmd: exec.Command(exe), replies: make(chan reply, 1024), early: make(map[int]reply), tids: make(map[int]int)}
	p.cmd.Env = append(os.Environ(), clientEnv+"="+path, "GOMAXPROCS=1")
	p.cmd.ExtraFiles = shared
	p.cmd.Stderr = os.Stderr
	p.in, err = p.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p.pid = p.cmd.Process.Pid
	p.enc = json.NewEncoder(p.in)
	go func() {
		defer close(p.replies)
		dec := json.NewDecoder(bufio.NewReader(out))
		for {
			var r reply
			if dec.Decode(&r) != nil {
				return
			}
			p.replies <- r
		}
	}()
	t.Cleanup(p.kill)
	return p
}

func (p *proc) kill() {
	if p.cmd.ProcessState != nil {
		return
	}
	_ = p.cmd.Process.Kill()
	for range p.replies {
	}
	_ = p.cmd.Wait()
}

// send starts a call, call waits for its answer.
func (k *kernel) send(p *proc, c command) int {
	k.ids++
	c.ID = k.ids
	if err := p.enc.Encode(c); err != nil {
		k.t.Fatal(err)
	}
	return c.ID
}

func (k *kernel) call(p *proc, c command) reply {
	k.t.Helper()
	return k.await(p, k.send(p, c))
}

func (k *kernel) await(p *proc, id int) reply {
	k.t.Helper()
	timeout := time.After(time.Minute)
	for {
		if r, ok := p.early[id]; ok {
			delete(p.early, id)
			return r
		}
		select {
		case r, ok := <-p.replies:
			if !ok {
				k.t.Fatal("client died")
			}
			p.take(r)
		case <-timeout:
			k.t.Fatal("no answer from the kernel")
		}
	}
}

// blocked reports whether the call is asleep in the kernel, and how often it has
// gone to sleep.
func (p *proc) blocked(id int) (sleeps string, ok bool) {
	tid := p.tids[id]
	if tid == 0 {
		return "", false
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/status", p.pid, tid))
	if err != nil {
		return "", false
	}
	_, sleeps, _ = strings.Cut(string(status), "voluntary_ctxt_switches:")
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/syscall", p.pid, tid))
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return "", false // answered, and the thread is gone
	}
	if err != nil {
		p.t.Skip(err)
	}
	nr, _, _ := strings.Cut(string(b), " ")
	return sleeps, nr == fmt.Sprint(unix.SYS_FCNTL) || nr == fmt.Sprint(unix.SYS_FLOCK)
}

// settled waits until each of the calls has been answered or waits for a lock,
// at one moment, and returns the answers.
func (k *kernel) settled(calls map[int]*proc) map[int]reply {
	k.t.Helper()
	got := make(map[int]reply)
	var before map[int]string
	deadline := time.Now().Add(time.Minute)
	for {
		for id, p := range calls {
			p.drain()
			if r, ok := p.early[id]; ok {
				delete(p.early, id)
				got[id] = r
			}
		}
		// Looked at after the answers were taken: one that is awake now will
		// answer, or sleep again. One that was looked at may be woken by one
		// that is looked at later; so all must still sleep the same sleep.
		asleep := make(map[int]string)
		for id, p := range calls {
			if _, ok := got[id]; !ok {
				if n, ok := p.blocked(id); ok {
					asleep[id] = n
				}
			}
		}
		if len(got)+len(asleep) == len(calls) && maps.Equal(before, asleep) {
			return got
		}
		before = asleep
		if time.Now().After(deadline) {
			k.t.Fatalf("of %d calls %d were answered and %d wait", len(calls), len(got), len(asleep))
		}
		time.Sleep(20 * time.Microsecond)
	}
}

// drain takes the answers that are there.
func (p *proc) drain() {
	for {
		select {
		case r, ok := <-p.replies:
			if !ok {
				p.t.Fatal("client died")
			}
			p.take(r)
		default:
			return
		}
	}
}

func (p *proc) take(r reply) {
	if r.Tid != 0 {
		p.tids[r.ID] = r.Tid
	} else {
		p.early[r.ID] = r
	}
}

// held lists the locks on the file, sorted (proc_locks(5)).
func (k *kernel) held() []string {
	f, err := os.Open("/proc/locks")
	if err != nil {
		k.t.Skip(err)
	}
	defer f.Close()
	// What one read returns is consistent, up to a page.
	b := make([]byte, 1<<16)
	n := 0
	for {
		m, err := f.Read(b[n:])
		if n += m; err != nil {
			break
		}
	}
	b = b[:n]
	var all []string
	for line := range strings.Lines(string(b)) {
		// 1: POSIX  ADVISORY  WRITE 1234 fe:00:5678 0 EOF
		if f := strings.Fields(line); len(f) == 8 && strings.Contains(line, k.ino) {
			all = append(all, strings.Join([]string{f[1], f[3], f[4], f[6], f[7]}, " "))
		}
	}
	slices.Sort(all)
	return all
}

// inner: in a pid namespace other than the first, the kernel's list leaves out
// what processes took that are dead, though others have the description open.
var inner = func() bool {
	const first = "pid:[4026531836]"
	ns, err := os.Readlink("/proc/self/ns/pid")
	return err == nil && ns != first
}()

// listed lists locks as (*kernel).held does. Owners of OFD locks are below 1<<40.
func listed(held []advisory.Lock) []string {
	var locks []advisory.Lock
	for _, l := range held {
		if n := len(locks); n > 0 && !l.Flock && locks[n-1].Owner == l.Owner && locks[n-1].Write == l.Write && locks[n-1].End+1 == l.Start {
			locks[n-1].End = l.End
		} else {
			locks = append(locks, l)
		}
	}
	var all []string
	for _, l := range locks {
		kind, mode, end, pid := "POSIX", "READ", fmt.Sprint(l.End), fmt.Sprint(l.Pid)
		if l.Flock {
			if inner && unix.Kill(int(l.Pid), 0) == unix.ESRCH {
				continue
			}
			kind = "FLOCK"
		} else if l.Owner < 1<<40 {
			kind, pid = "OFDLCK", "-1"
		}
		if l.Write {
			mode = "WRITE"
		}
		if l.End == advisory.MaxEnd {
			end = "EOF"
		}
		all = append(all, strings.Join([]string{kind, mode, pid, fmt.Sprint(l.Start), end}, " "))
	}
	slices.Sort(all)
	return all
}
