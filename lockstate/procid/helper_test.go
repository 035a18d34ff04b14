//go:build linux

package procid_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// helperEnv makes the test binary another process: its value is one of the
// roles below and its argument.
const helperEnv = "PROCID_TEST_HELPER"

func TestMain(m *testing.M) {
	if role, ok := os.LookupEnv(helperEnv); ok {
		name, arg, _ := strings.Cut(role, " ")
		n, _ := strconv.Atoi(arg)
		helper(name, n)
		os.Exit(0)
	}
	// The runtime's poller takes descriptors of its own, from the first pipe on.
	if r, w, err := os.Pipe(); err == nil {
		r.Close()
		w.Close()
	}
	if signal.Ignored(unix.SIGHUP) { // by nohup(1), and the helpers are to end by it
		signal.Notify(make(chan os.Signal, 1), unix.SIGHUP)
	}
	os.Exit(m.Run())
}

// helperEnviron is a helper's environment. A binary with the race detector
// would take a second to exit.
func helperEnviron(role string) []string {
	env := []string{helperEnv + "=" + role, "GORACE=atexit_sleep_ms=0"}
	switch name, _, _ := strings.Cut(role, " "); name {
	case "exit", "deadleader", "execthread":
		// It may be traced: a thread that the runtime preempts by a signal would stop
		// then, and never exit.
		env = append(env, "GODEBUG=asyncpreemptoff=1")
	}
	return env
}

// helper prints what the test needs to know on one line, waits for the end of
// its standard input, and does what its role says.
func helper(role string, n int) {
	switch role {
	case "exit": // with status n
		say(os.Getpid())
		untilEOF(os.Stdin)
		os.Exit(n)

	case "reap": // has n children, says their pids, and reaps each the moment it ends
		reapAll(n)

	case "threads": // n further threads; says their ids
		tids := make(chan int)
		for range n {
			go func() {
				runtime.LockOSThread()
				tids <- unix.Gettid()
				select {}
			}()
		}
		line := make([]any, n)
		for i := range line {
			line[i] = <-tids
		}
		say(line...)
		untilEOF(os.Stdin)

	case "deadleader": // the first thread ends with status 0, the process with n
		dead := make(chan struct{})
		go onLeader(func() { // never returns
			close(dead)
			syscall.Syscall(unix.SYS_EXIT, 0, 0, 0)
		})
		<-dead
		for { // until the kernel shows it
			b, err := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/stat", os.Getpid()))
			if err != nil || strings.Contains(string(b), ") Z ") {
				break
			}
			runtime.Gosched()
		}
		say(os.Getpid())
		untilEOF(os.Stdin)
		os.Exit(n)

	case "execthread": // a thread says its id, and execs at the first input
		done := make(chan error)
		go execThread(done)
		fmt.Fprintln(os.Stderr, <-done)
		os.Exit(1)

	case "tree": // n generations below; the last says all pids, from the top
		pids := append(os.Args[1:], strconv.Itoa(os.Getpid()))
		if n == 0 {
			fmt.Println(strings.Join(pids, " "))
		} else {
			check(child("tree "+strconv.Itoa(n-1), os.Stdin, pids...).Start())
		}
		untilEOF(os.Stdin)

	case "observe", "observecompat": // tells how process n ends
		r, err := procid.NewResolver(procid.Options{Compat: role == "observecompat"})
		check(err)
		p, err := r.ByPid(n)
		check(err)
		done := make(chan procid.Exit)
		check(r.Watch(p.ID(), func(_ procid.ID, e procid.Exit) { done <- e }))
		knows := 0
		if r.KnowsExits() {
			knows = 1
		}
		say(knows)
		e := <-done
		known := 0
		if e.Known {
			known = 1
		}
		say(known, e.Code, e.Signal)

	case "trace", "tracebut": // attaches to all threads of process n, or to all but its first
		threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", n))
		check(err)
		runtime.LockOSThread() // which traces them
		traced := 0
		for _, thread := range threads {
			tid, _ := strconv.Atoi(thread.Name())
			if role == "tracebut" && tid == n {
				continue
			}
			if err := unix.PtraceSeize(tid); err == nil { // or it has ended
				traced++
			}
		}
		say(traced)
		untilEOF(os.Stdin)

	case "tini": // takes a reaper's name and has a child
		check(os.WriteFile("/proc/self/comm", []byte(role), 0))
		check(child("exit 0", os.Stdin).Start())
		untilEOF(os.Stdin)

	case "abandon": // leaves a child behind, which lives until descriptor 3 ends
		check(child("adopted", os.NewFile(3, "input")).Start())
		untilEOF(os.Stdin)

	case "adopted": // at its first input, starts a child
		say(os.Getpid())
		var b [1]byte
		if n, _ := os.Stdin.Read(b[:]); n > 0 {
			check(child("exit 0", os.Stdin).Start())
			untilEOF(os.Stdin)
		}

	case "leftbehind": // as init: says whether who was left behind descends from who made it
		say(asInit())

	case "hidden": // says whether births are followed where a processor may be hidden
		say(amongHidden())

	default:
		fmt.Fprintf(os.Stderr, "no role %q\n", role)
		os.Exit(1)
	}
}

// reapAll ends its children at the end of its standard input: every fourth by a
// signal, the others with the statuses 0, 1 and 2. Meanwhile it keeps all
// processors busy.
func reapAll(n int) {
	r, w, err := os.Pipe()
	check(err)
	children := make([]*exec.Cmd, n)
	pids := make([]any, n)
	for i := range children {
		children[i] = child("exit "+strconv.Itoa(i%4), r)
		children[i].Stdout = nil
		check(children[i].Start())
		pids[i] = children[i].Process.Pid
	}
	r.Close()
	say(pids...)
	untilEOF(os.Stdin)
	var ended sync.WaitGroup
	for _, c := range children {
		ended.Go(func() { c.Wait() })
	}
	for range runtime.NumCPU() {
		go func() {
			for i := 0; ; i++ {
				runtime.KeepAlive(i)
			}
		}()
	}
	for i, c := range children {
		if i%4 == 3 {
			c.Process.Kill()
		}
	}
	w.Close()
	ended.Wait()
}

// onLeader runs f on the first thread of the process.
func onLeader(f func()) {
	// Where it is looked, it stays. And another goroutine gets another thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if unix.Gettid() == os.Getpid() {
		f()
		return
	}
	done := make(chan struct{})
	go func() { defer close(done); onLeader(f) }()
	<-done
}

// execThread execs on another thread than the first.
func execThread(done chan<- error) {
	runtime.LockOSThread()
	if unix.Gettid() == os.Getpid() { // keep this one busy, take another
		go execThread(done)
		select {}
	}
	say(unix.Gettid())
	var b [1]byte
	os.Stdin.Read(b[:])
	done <- syscall.Exec("/proc/self/exe", os.Args, helperEnviron("exit 0"))
}

// child is a helper that talks to whom this one talks.
func child(role string, stdin *os.File, args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = helperEnviron(role)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, os.Stdout, os.Stderr
	return cmd
}

func say(a ...any) { fmt.Println(a...) }

func untilEOF(r io.Reader) { io.Copy(io.Discard, r) }

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// A process is a helper as the test sees it.
type process struct {
	*exec.Cmd
	stdin io.WriteCloser // its end is the helper's cue
	lines *bufio.Scanner
}

// start runs a helper, and kills it at the end of the test at the latest.
// extra files become its descriptors 3 and up.
func start(t testing.TB, role string, extra ...*os.File) *process {
	t.Helper()
	return startIn(t, nil, role, extra...)
}

// startIn is start with what else the new process is to have.
func startIn(t testing.TB, attr *syscall.SysProcAttr, role string, extra ...*os.File) *process {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.SysProcAttr = attr
	cmd.Env = helperEnviron(role)
	cmd.ExtraFiles = extra
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); attr != nil && errors.Is(err, unix.EPERM) {
		t.Skipf("cannot start a process with %+v: %v", *attr, err)
	} else if err != nil {
		t.Fatal(err)
	}
	p := &process{cmd, stdin, bufio.NewScanner(stdout)}
	p.lines.Buffer(nil, 1<<20)
	t.Cleanup(func() { p.kill(); p.Wait() })
	return p
}

func (p *process) pid() int { return p.Process.Pid }

func (p *process) kill() { p.Process.Kill() }

// numbers reads a line of pids or thread ids.
func (p *process) numbers(t testing.TB) []int {
	t.Helper()
	if !p.lines.Scan() {
		t.Fatalf("helper ended early: %v", p.lines.Err())
	}
	var ns []int
	for _, f := range strings.Fields(p.lines.Text()) {
		n, err := strconv.Atoi(f)
		if err != nil {
			t.Fatalf("helper said %q", p.lines.Text())
		}
		ns = append(ns, n)
	}
	return ns
}

// inBothModes runs a test with what the kernel offers and with what Linux 5.10
// would, and sees to it that no descriptor is left.
func inBothModes(t *testing.T, f func(t *testing.T, r *procid.Resolver, compat bool)) {
	for _, mode := range []struct {
		name   string
		compat bool
	}{{"native", false}, {"compat", true}} {
		t.Run(mode.name, func(t *testing.T) {
			// Last of the cleanups: after the helpers' pipes are closed.
			before := descriptors(t)
			t.Cleanup(func() {
				if after := descriptors(t); after > before {
					t.Errorf("%d descriptors left open", after-before)
				}
			})
			f(t, newResolver(t, mode.compat), mode.compat)
		})
	}
}

func newResolver(t testing.TB, compat bool) *procid.Resolver {
	t.Helper()
	r, err := procid.NewResolver(procid.Options{Compat: compat})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Errorf("Close() = %v", err)
		}
	})
	return r
}

func descriptors(t testing.TB) int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(fds)
}

func lookup(t testing.TB, r *procid.Resolver, tid int) *procid.Process {
	t.Helper()
	p, err := r.Lookup(uint32(tid), nil)
	if err != nil {
		t.Fatalf("Lookup(%d) = %v", tid, err)
	}
	return p
}

// zombie waits until the process is dead, and leaves it unreaped.
func zombie(t testing.TB, pid int) {
	t.Helper()
	var info unix.Siginfo
	for {
		err := unix.Waitid(unix.P_PID, pid, &info, unix.WEXITED|unix.WNOWAIT, nil)
		if err == nil {
			return
		}
		if err != unix.EINTR {
			t.Fatal(err)
		}
	}
}

// An ending is a call of a watch.
type ending struct {
	id   procid.ID
	exit procid.Exit
}

// watch returns where the process's end arrives.
func watch(t testing.TB, r *procid.Resolver, id procid.ID) <-chan ending {
	t.Helper()
	c := make(chan ending, 8) // more than one would be an error: it must not block then
	if err := r.Watch(id, func(id procid.ID, e procid.Exit) { c <- ending{id, e} }); err != nil {
		t.Fatalf("Watch(%v) = %v", id, err)
	}
	return c
}
