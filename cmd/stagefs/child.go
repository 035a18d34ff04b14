//go:build linux

package main

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// A child is the command of `run`. It stays in this process's group and
// session, and has its descriptors and terminal.
type child struct {
	path      string
	argv      []string
	env       []string
	killAfter time.Duration
	listens   func() // is called when signals are passed on

	pid int
}

// passedOn are the signals that are sent on to the child. The others act on
// both, or stop and continue both, when the terminal sends them to the group.
var passedOn = []syscall.Signal{
	syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGALRM,
}

// run starts the child and waits for its end. When lost is closed and ends
// reports true, the child is made to end.
func (ch *child) run(lost <-chan struct{}, ends func() bool) (syscall.WaitStatus, error) {
	signals := make(chan os.Signal, 16)
	notifyUnignored(signals, passedOn...)
	ch.listens()
	// The signal on a parent's death is sent when the *thread* that made
	// the child ends, prctl(2). This one is never given back.
	runtime.LockOSThread()
	keepThreads() // the lock would end with this process
	if err := ch.start(); err != nil {
		return 0, err
	}
	watch := &watch{child: ch, signals: signals, lost: lost, ends: ends, ended: make(chan struct{}), done: make(chan struct{})}
	go watch.run()
	// Not reaped yet, it keeps its number while signals may be sent to it. Others are
	// orphans, whom the first process of a PID namespace has to reap.
	for {
		pid, stop := awaitChild()
		if pid == 0 || pid == ch.pid && stop == 0 {
			break
		}
		if stop == 0 {
			syscall.Wait4(pid, nil, syscall.WNOHANG, nil)
		} else if pid == ch.pid {
			ch.suspended(stop)
		}
	}
	close(watch.ended)
	<-watch.done
	var status syscall.WaitStatus
	for {
		if _, err := syscall.Wait4(ch.pid, &status, 0, nil); err != syscall.EINTR {
			return status, nil
		}
	}
}

// awaitChild waits until a child is dead, and leaves it unreaped, or until one is
// stopped, and returns by which signal. The pid is 0 if there is none to wait for.
func awaitChild() (pid int, stop syscall.Signal) {
	for {
		var info childInfo
		err := info.wait(unix.P_ALL, 0, unix.WEXITED|unix.WSTOPPED|unix.WNOWAIT)
		if err == nil && (info.code == cldStopped || info.code == cldTrapped) {
			err = info.wait(unix.P_PID, int(info.pid), unix.WSTOPPED|unix.WNOHANG) // told once
			if err != nil || info.pid == 0 {
				continue // it goes on already
			}
			return int(info.pid), syscall.Signal(info.status)
		}
		if err != unix.EINTR {
			return int(info.pid), 0
		}
	}
}

// A childInfo is siginfo_t, of which unix.Siginfo shows only the beginning.
type childInfo struct {
	_, _   int32
	code   int32
	_      [0]uintptr // aligned like a pointer
	pid    int32
	_      int32
	status int32
	_      [100]byte
}

func (info *childInfo) wait(what, id, options int) error {
	return unix.Waitid(what, id, (*unix.Siginfo)(unsafe.Pointer(info)), options, nil)
}

// The codes of a child that is stopped, waitid(2).
const (
	cldTrapped = 4
	cldStopped = 5
)

// suspended stops this process, too, if the child has a group of its own that had the
// terminal, or wants it, such as a shell that suspends itself: the caller's shell knows
// this process alone, and nobody else could continue the child.
func (ch *child) suspended(by syscall.Signal) {
	group := ch.ownGroup()
	if group == 0 {
		return // the terminal stops both
	}
	tty, err := openTerminal()
	if err != nil {
		return
	}
	defer unix.Close(tty)
	if foregroundOf(tty) != group && by != syscall.SIGTTIN && by != syscall.SIGTTOU {
		return
	}
	unix.Tgkill(unix.Getpid(), unix.Gettid(), unix.SIGSTOP) // no other thread takes it later
	if foregroundOf(tty) == unix.Getpgrp() {
		unix.IoctlSetPointerInt(tty, unix.TIOCSPGRP, group)
	}
	unix.Kill(-group, unix.SIGCONT)
}

// A watch passes on what the child is to hear while it runs.
type watch struct {
	*child
	signals <-chan os.Signal
	lost    <-chan struct{}
	ends    func() bool // whether the loss is one for the child too
	ended   chan struct{}
	done    chan struct{}
}

func (w *watch) run() {
	defer close(w.done)
	var family []process
	var kill <-chan time.Time
	for {
		select {
		case <-w.ended:
			killAll(family, syscall.SIGKILL)
			closeAll(family)
			return
		case sig := <-w.signals:
			w.passOn(sig.(syscall.Signal))
		case <-w.lost:
			w.lost = nil
			if !w.ends() {
				break
			}
			family = descendants(w.pid)
			killAll(family, syscall.SIGTERM)
			killAll(family, syscall.SIGCONT) // what is stopped hears nothing else
			kill = time.After(w.killAfter)
		case <-kill:
			family = append(family, descendants(w.pid)...)
			killAll(family, syscall.SIGKILL)
		}
	}
}

// start makes the child, which is killed if this process is. A script without
// an interpreter line is one of sh, as for execvp(3).
func (ch *child) start() error {
	attr := &syscall.ProcAttr{Env: ch.env, Files: []uintptr{0, 1, 2}, Sys: &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}}
	var err error
	ch.pid, err = syscall.ForkExec(ch.path, ch.argv, attr)
	if errors.Is(err, syscall.ENOEXEC) {
		ch.pid, err = syscall.ForkExec("/bin/sh", append([]string{"sh", ch.path}, ch.argv[1:]...), attr)
	}
	return err
}

// passOn sends a signal on, unless the child has it already: what is typed at
// the terminal goes to the whole foreground group. A second SIGINT makes many a
// program skip its clean-up. One that has left the group, as timeout(1) does, has
// not heard the first.
func (ch *child) passOn(sig syscall.Signal) {
	if (sig == syscall.SIGINT || sig == syscall.SIGQUIT) && ch.ownGroup() == 0 && inForeground() {
		return
	}
	syscall.Kill(ch.pid, sig)
}

// ownGroup is the child's process group if that is not this process's any more, else 0.
func (ch *child) ownGroup() int {
	group, err := unix.Getpgid(ch.pid)
	if err != nil || group == unix.Getpgrp() {
		return 0
	}
	return group
}

// inForeground tells whether this process is in its terminal's foreground
// group.
func inForeground() bool {
	tty, err := openTerminal()
	if err != nil {
		return false
	}
	defer unix.Close(tty)
	return foregroundOf(tty) == unix.Getpgrp()
}

func openTerminal() (fd int, err error) {
	return unix.Open("/dev/tty", unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
}

// foregroundOf is the group in the foreground of a terminal, 0 if none is known.
func foregroundOf(tty int) int {
	group, err := unix.IoctlGetInt(tty, unix.TIOCGPGRP)
	if err != nil {
		return 0
	}
	return group
}

// A process is one that may be gone by the time it is looked at again: the
// descriptor is its own. (Its start time could not be read while it is in
// execve(2), which may wait for the very mount that is lost.)
type process struct {
	pid, fd int
}

// descendants are this process's child and all beneath it.
func descendants(pid int) []process { return family(pid, os.Getpid()) }

// family are a process, if that is its parent, and all beneath it.
func family(pid, parent int) []process {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil
	}
	if up := parentOf(pid); up != parent && parentOf(parent) != 0 {
		unix.Close(fd)
		return nil // gone, and the number another's
	}
	all := []process{{pid, fd}}
	tasks, _ := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/task/*/children")
	for _, file := range tasks {
		data, _ := os.ReadFile(file)
		for _, word := range strings.Fields(string(data)) {
			if kid, err := strconv.Atoi(word); err == nil {
				all = append(all, family(kid, pid)...)
			}
		}
	}
	return all
}

// parentOf returns the parent of a process, 0 if it is gone.
func parentOf(pid int) int {
	status, _ := procid.ReadStatus(pid)
	parent, _ := strconv.Atoi(status.Field("PPid"))
	return parent
}

func killAll(all []process, sig syscall.Signal) {
	for _, p := range all {
		unix.PidfdSendSignal(p.fd, sig, nil, 0)
	}
}

func closeAll(all []process) {
	for _, p := range all {
		unix.Close(p.fd)
	}
}

// dieBy ends this process by a signal, past Go's own handler, which would
// print stacks for some. It returns if the signal does not kill.
func dieBy(sig syscall.Signal) {
	// The command's core dump is enough.
	unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{})
	act(sig, action{})
	unix.Kill(unix.Getpid(), sig)
	runtime.Gosched()
	time.Sleep(100 * time.Millisecond)
}
