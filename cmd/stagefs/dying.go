//go:build linux

package main

import (
	"errors"
	"os"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// A daemon that was killed may not end by itself: a thread of it has asked something
// of the kernel that waits for a request, which nobody answers any more. That it has
// ended would end the kernel's connection to it; so does root.

// dyingTime is how often it is looked whether a daemon that was killed ends.
const dyingTime = 500 * time.Millisecond

// dying reports whether a process will never run again and has not ended yet: some of
// its threads have not.
func dying(pid int) bool {
	// One that is in execve(2) has killed its threads as well, but for the one which goes
	// on: as the first thread, in the end. So that one is looked at before the others, of
	// which there are no new ones from then on, and after them.
	first := strconv.Itoa(pid)
	if lifeOf(pid, first) == alive {
		return false
	}
	left := 0
	threads, _ := os.ReadDir("/proc/" + first + "/task")
	for _, thread := range threads {
		switch lifeOf(pid, thread.Name()) {
		case alive:
			return false
		case doomed:
			left++
		}
	}
	return left > 0 && lifeOf(pid, first) != alive
}

// What is left of a thread.
type life int

const (
	alive life = iota
	doomed
	dead
)

func lifeOf(pid int, thread string) life {
	const exiting = 0x4 // PF_EXITING
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/task/" + thread + "/stat")
	if err != nil {
		return dead
	}
	state := procid.StatField(stat, statState)
	flags, _ := strconv.ParseUint(procid.StatField(stat, statFlags), 10, 64)
	pending, _ := strconv.ParseUint(procid.StatField(stat, statPending), 10, 64)
	switch {
	case state == "Z" || state == "X":
		return dead
	case flags&exiting != 0 || pending&(1<<(syscall.SIGKILL-1)) != 0:
		return doomed
	}
	return alive
}

// letDie ends the connections of a process that is dying, which serves mount.
func letDie(pid int, mount *fs.MountEntry) error {
	numbers := connections("/proc/" + strconv.Itoa(pid))
	if len(numbers) == 0 && mount != nil && slices.Contains([]int{0, pid}, daemonOf(mount)) {
		// Only root sees what a daemon has open, and nobody what it is closing at its end.
		numbers = []string{mount.Connection()}
	}
	for _, number := range numbers {
		if err := fs.Abort(number); err != nil {
			return exitf(exitOS, "the daemon, process %d, was killed, and cannot end before its connection does: %v; as root: echo 1 >/sys/fs/fuse/connections/%s/abort", pid, err, number)
		}
	}
	return nil
}

// endDying ends the connection of a mount whose daemon is dying, and waits for the
// daemon's end. It leaves any other alone. Only root may.
func endDying(mount *fs.MountEntry, daemon int) error {
	switch {
	case daemon == 0 || !dying(daemon):
		return nil
	case unix.Geteuid() != 0:
		return exitf(exitNoPerm, "%s", silence(mount))
	}
	fd, err := unix.PidfdOpen(daemon, 0)
	if err != nil {
		return nil // it has ended
	}
	defer unix.Close(fd)
	if err := letDie(daemon, mount); err != nil {
		return err
	}
	if !ended(fd, endTime) {
		return exitf(exitUnavailable, "the daemon of %s, process %d, was killed, and has not ended yet", quote(mount.Path), daemon)
	}
	return nil
}

// clearDying is endDying for the mount that a path leads into, if root asks.
func clearDying(path string) error {
	mount := fs.LeadsTo(path)
	if mount == nil || unix.Geteuid() != 0 || !noAnswer(ask(mount.Path, false, dyingTime)) {
		return nil
	}
	return endDying(mount, daemonOf(mount))
}

// noAnswer reports whether what a mount answered says that its daemon does not: over
// io_uring, the kernel ends what a daemon was given that is dying.
func noAnswer(err error) bool {
	return errors.Is(err, errSilent) || errors.Is(err, unix.ECANCELED)
}
