//go:build linux

package procid

import (
	"errors"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// An Exit is how a process ended.
type Exit struct {
	Known  bool // false: the kernel does not tell, or not any more; Code and Signal are 0 then
	Code   int  // exit status, 0 to 255
	Signal int  // the signal that killed it, or 0
	Missed bool // the kernel does tell, but nobody heard it: neither a success nor a crash
}

// Success reports whether the process is known to have exited with status 0:
// the condition of a hand-over (R5).
func (e Exit) Success() bool { return e.Known && e.Code == 0 && e.Signal == 0 }

// Exiting reports whether a process is in exit(2) with all of its threads, or dead:
// they have no memory any more when their descriptors are closed. It waits for nobody.
func Exiting(id ID) bool {
	tid, err := RunningThread(id.Pid)
	return tid == 0 && (err == nil || errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH))
}

// RunningThread returns a thread of a process that has not ended, the first one if that
// has not; 0: there is none, or with an error, it can't be had.
func RunningThread(pid int) (tid int, err error) {
	has, err := hasMemory(pid)
	if has { // mostly
		return pid, nil
	}
	if IsShort(err) {
		return 0, err
	}
	threads, err := os.ReadDir("/proc/" + strconv.Itoa(pid) + "/task")
	for _, thread := range threads {
		tid, _ := strconv.Atoi(thread.Name())
		has, bad := hasMemory(tid)
		if has {
			return tid, nil
		}
		if IsShort(bad) {
			err = bad
		}
	}
	return 0, err
}

// exitPatience bounds the search for a status, but for what the connector may
// still say. Between the moment in which a pidfd becomes readable and the one in
// which the status can be read lies a few instructions' work of the dying
// process, which may be preempted there.
const exitPatience = 5 * time.Millisecond

// surePatience bounds it where the status is sure to come: on a machine with
// too much to do, who is preempted there may be so for long, and a kill must
// not pass for a success.
const surePatience = time.Second

// reapPatience bounds it where the kernel does not show us a zombie of another
// user. Most parents wait for their children.
const reapPatience = 100 * time.Millisecond

// fromWait reads a status as wait(2) gives it.
func fromWait(ws int) Exit {
	w := unix.WaitStatus(ws)
	if w.Signaled() {
		return Exit{Known: true, Signal: int(w.Signal())}
	}
	return Exit{Known: true, Code: w.ExitStatus()}
}

// exitStatus finds out how the process id ended, which the caller knows to be
// dead. fd is a pidfd from when it lived, g its pinned group or nil.
func (r *Resolver) exitStatus(id ID, fd int, g *group) Exit {
	pause := 200 * time.Microsecond
	for began := time.Now(); ; {
		// Looked up before the try: the one that begins when the time is over
		// is still made, however long this process did not run.
		waited := time.Since(began)
		e, patience := r.kernel.tryExitStatus(id, fd)
		if !e.Known && g != nil {
			if told, p := r.heard(g); told.Known || p > patience {
				e, patience = told, p
			}
		}
		switch {
		case e.Known:
			return e
		case waited >= patience:
			return r.unheard()
		}
		time.Sleep(pause)
		pause = min(2*pause, exitPatience)
	}
}

// unheard is the end of a process of which nothing was learnt. Only where there
// is nothing to learn may it pass for a success.
func (r *Resolver) unheard() Exit {
	return Exit{Missed: r.kernel.exits || r.hears()}
}

// tryExitStatus asks both places once. It may be worth asking again for patience
// after the death.
//
// The zombie is asked first: a process that is reaped before that question has
// left its status behind when the second one is asked. In the other order one
// that is reaped in between would be missed.
func (k kernel) tryExitStatus(id ID, fd int) (e Exit, patience time.Duration) {
	if k.blind {
		return Exit{}, exitPatience
	}
	st, shown, err := zombieStat(id.Pid)
	gone := err != errNoZombie && (err != nil || st.start != id.Start)
	if err == nil && !gone && (st.state == 'Z' || st.state == 'X') && shown {
		return fromWait(st.code), 0
	}
	if k.info && fd >= 0 {
		// With the exit mask this call also works on a process that was reaped.
		in, err := info(fd, pidfdInfoExit)
		if err == nil && in.mask&pidfdInfoExit != 0 {
			return fromWait(int(in.exitCode)), 0
		}
		switch {
		case err != nil || !k.exits:
		case os.Geteuid() == 0:
			return Exit{}, surePatience // root sees a zombie's status, and a reaped one's here
		default:
			return Exit{}, reapPatience // here, once it is reaped
		}
		// Before Linux 6.15 there is nothing to know about the reaped.
		gone = gone && err == unix.ESRCH
	}
	if gone {
		return Exit{}, 0
	}
	return Exit{}, exitPatience
}

// errNoZombie: the process is not quite dead, or the pid is another's by now.
var errNoZombie = errors.New("no zombie")

// EndOf returns how a process ended, of which fd is a pidfd that is readable. It
// waits up to a second for that to be known.
func EndOf(pid, fd int) Exit {
	for began := time.Now(); ; time.Sleep(exitPatience) {
		waited := time.Since(began)
		if in, err := info(fd, pidfdInfoExit); err == nil && in.mask&pidfdInfoExit != 0 {
			return fromWait(int(in.exitCode))
		}
		if st, shown, err := zombieStat(pid); err == nil && shown {
			return fromWait(st.code)
		}
		if waited >= surePatience {
			return Exit{}
		}
	}
}

// zombieStat is readStat for what is dead, and tells whether the status in it is
// the true one. Whoever has the pid by now may be in execve(2), and its stat file
// wait for that; its status file does not.
//
// To those who may not trace the process the kernel shows a 0, which must not pass
// for success. The link is a thing of the same permission: a zombie's leads
// nowhere, but only who may look learns that. It is asked before, because that of
// a process which was reaped leads nowhere either.
func zombieStat(pid int) (st stat, shown bool, err error) {
	dead, err := readStatus(pid)
	if err == nil && dead.state != 'Z' && dead.state != 'X' {
		err = errNoZombie
	}
	if err != nil {
		return stat{}, false, err
	}
	var buf [1]byte
	_, denied := unix.Readlink(procPath(pid, "exe"), buf[:])
	st, err = readStat(pid)
	return st, st.code != 0 || denied == nil || denied == unix.ENOENT, err
}
