//go:build linux

package main

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs"
)

// stopSignals end a daemon (M4).
func stopSignals() []syscall.Signal {
	return []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP}
}

// ignoredStops are those that this program was started to ignore: nohup, and a
// shell that starts something in the background, ask for that.
func ignoredStops() (ignored []syscall.Signal) {
	for _, s := range stopSignals() {
		if signal.Ignored(s) {
			ignored = append(ignored, s)
		}
	}
	return ignored
}

// notifyStop has the stop signals sent to ch, but for the ignored ones.
func notifyStop(ch chan<- os.Signal, ignored []syscall.Signal) {
	for _, s := range stopSignals() {
		if !slices.Contains(ignored, s) {
			signal.Notify(ch, s)
		}
	}
}

// ignoreStops makes the kernel ignore the stop signals, and whoever this process
// becomes by exec(2): a Go program that is about to start would end, and leave a
// dead mount. What comes in the few milliseconds until that one listens is lost,
// since Go unblocks these signals when a program starts.
func ignoreStops() (undo func()) {
	type sigaction [4]uint64 // of the kernel: the handler comes first
	const ignore = 1         // SIG_IGN
	old := make(map[syscall.Signal]*sigaction)
	set := func(s syscall.Signal, to, from *sigaction) {
		unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(s), uintptr(unsafe.Pointer(to)), uintptr(unsafe.Pointer(from)), 8, 0, 0)
	}
	for _, s := range stopSignals() {
		old[s] = new(sigaction)
		set(s, &sigaction{ignore}, old[s])
	}
	return func() {
		for s, action := range old {
			set(s, action, nil)
		}
	}
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
	defer ignoreStops()()
	return f()
}

// wait carries out a pause for serve, which has or has not been told to end.
func (p *pause) wait(signals chan os.Signal, stopped bool) {
	if stopped || len(signals) > 0 {
		p.granted <- false
		return
	}
	p.granted <- true
	<-p.resume
}
