//go:build linux

package main

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// stopSignals end a daemon (M4).
func stopSignals() []syscall.Signal {
	return []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP}
}

// ignoredStops are those that this program was started to ignore: nohup, and a
// shell that starts something in the background, ask for that.
func ignoredStops() []syscall.Signal {
	return slices.DeleteFunc(stopSignals(), func(s syscall.Signal) bool { return !signal.Ignored(s) })
}

// notifyStop has the stop signals sent to ch, but for the ignored ones.
func notifyStop(ch chan<- os.Signal, ignored []syscall.Signal) {
	for _, s := range stopSignals() {
		if !slices.Contains(ignored, s) {
			signal.Notify(ch, s)
		}
	}
}

// notifyUnignored has signals sent to ch, but for those that this program was started to
// ignore.
func notifyUnignored(ch chan<- os.Signal, signals ...syscall.Signal) {
	for _, s := range signals {
		if !signal.Ignored(s) {
			signal.Notify(ch, s)
		}
	}
}

// endByQuit has SIGQUIT end this process as it ends others, without a word, until over is
// called. Go prints the stacks of all goroutines otherwise: a daemon may.
func endByQuit() (over func()) {
	quit, done := make(chan os.Signal, 1), make(chan struct{})
	notifyUnignored(quit, syscall.SIGQUIT)
	go func() {
		select {
		case <-quit:
			dieBy(syscall.SIGQUIT)
		case <-done:
		}
	}()
	return sync.OnceFunc(func() {
		signal.Stop(quit)
		close(done)
	})
}

// undisturbed makes a call that no signal interrupts: another thread takes those that
// come.
func undisturbed(call func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var all, before unix.Sigset_t
	for i := range all.Val {
		all.Val[i] = ^all.Val[i]
	}
	unix.PthreadSigmask(unix.SIG_SETMASK, &all, &before)
	defer unix.PthreadSigmask(unix.SIG_SETMASK, &before, nil)
	return call()
}

// A pause is asked of serve by who is about to replace the program: whether no
// stop signal has come. If none has, serve begins no end until resume is closed.
type pause struct {
	granted chan bool
	resume  chan struct{}
}

// paused runs another program in this process's place, by f, unless this one has
// been told to end.
func (c *command) paused(f func() error) error {
	p := pause{make(chan bool, 1), make(chan struct{})}
	select {
	case c.pauses <- p:
	case <-c.served:
		return errors.Join(fs.ErrReplacing, unix.ESHUTDOWN)
	}
	if !<-p.granted {
		return fmt.Errorf("%w: it is about to end: %w", fs.ErrReplacing, unix.ESHUTDOWN)
	}
	defer close(p.resume)
	return f()
}

// wait carries out a pause for serve, which has or has not been told to end.
//
// A stop signal that comes after it has looked ends the process at once, in this
// program or the next one, until that listens: Go lets a program neither block it nor
// start with it blocked, and one that was ignored would be lost. Who asked for the
// replacement, or the supervisor, then unmounts.
func (p *pause) wait(signals chan os.Signal, ignored []syscall.Signal, stopped bool) {
	signal.Stop(signals)
	defer notifyStop(signals, ignored)
	if stopped || len(signals) > 0 {
		p.granted <- false
		return
	}
	defer leaveToKernel(ignored)()
	p.granted <- true
	<-p.resume
}

// leaveToKernel has the stop signals end this process as they do by default, until over
// is called.
//
// Go's handler ends it, too, but later: a thread has taken the signal by then, and if
// that thread is ended first, by another one's execve(2), the signal is lost. The kernel
// has the process end in the moment in which the signal is sent, and lets no execve(2)
// change that.
func leaveToKernel(ignored []syscall.Signal) (over func()) {
	before := make(map[syscall.Signal]action)
	for _, s := range stopSignals() {
		if !slices.Contains(ignored, s) {
			before[s] = act(s, action{})
		}
	}
	awaitHandlers() // of a signal that was taken before
	return func() {
		for s, a := range before {
			act(s, a)
		}
	}
}

// awaitHandlers waits until no thread is in Go's handler of a signal that it took before.
// All others are blocked in it: a thread that takes one that is sent now has left it.
func awaitHandlers() {
	taken := make(chan os.Signal, 1)
	signal.Notify(taken, roundSignal) // else Go blocks it in one thread
	defer signal.Stop(taken)
	threads, _ := os.ReadDir("/proc/self/task")
	var called []int
	for _, t := range threads {
		if tid, err := strconv.Atoi(t.Name()); err == nil && unix.Tgkill(os.Getpid(), tid, roundSignal) == nil {
			called = append(called, tid)
		}
	}
	for end := time.Now().Add(handlerTime); time.Now().Before(end); time.Sleep(100 * time.Microsecond) {
		called = slices.DeleteFunc(called, func(tid int) bool {
			s, _ := procid.ReadStatus(tid) // empty: it has ended
			pending, _ := strconv.ParseUint(s.Field("SigPnd"), 16, 64)
			// The kernel's own threads, of a ring, take none.
			return pending&(1<<(roundSignal-1)) == 0 || strings.HasPrefix(s.Field("Name"), "iou-")
		})
		if len(called) == 0 {
			return
		}
	}
}

const (
	// roundSignal is sent to each thread. Nobody else has a use for it.
	roundSignal = syscall.Signal(61)
	// handlerTime bounds how long that may take. A thread that takes longer is in no
	// handler, but in a call that is not answered.
	handlerTime = time.Second
)

// An action is the kernel's struct sigaction; the zero one is the default.
type action [4]uint64

// act sets what is done at a signal, past Go, and returns what was done before.
func act(sig syscall.Signal, a action) (before action) {
	unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(sig), uintptr(unsafe.Pointer(&a)), uintptr(unsafe.Pointer(&before)), 8, 0, 0)
	return before
}
