//go:build linux

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	stagefs "github.com/stagefs/stagefs/fs"
	"github.com/stagefs/stagefs/lockstate/filestore"
)

// Exit statuses, after sysexits.h. They are promised in the manual page.
const (
	exitOK          = 0
	exitNotHeld     = 1  // check: no
	exitUsage       = 64 // the command line is wrong
	exitNoInput     = 66 // the directory is missing, or no directory that can be served
	exitUnavailable = 69 // there is no stagefs mount, or (doctor) there can be none
	exitSoftware    = 70 // an error in stagefs
	exitOS          = 71 // the machine lacks something
	exitCantCreate  = 73 // the mountpoint can't be used, or something can't be created
	exitIO          = 74 // an input or output error
	exitHeld        = 75 // somebody else has it; try again later
	exitLost        = 76 // the lock was lost while the command ran
	exitNoPerm      = 77 // not allowed
	exitSignal      = 128
)

// An exitError ends the program with a status and a message for its user.
type exitError struct {
	status int
	text   string // empty: all is said
}

func (e *exitError) Error() string { return e.text }

func exitf(status int, format string, args ...any) error {
	return &exitError{status, fmt.Sprintf(format, args...)}
}

func usagef(format string, args ...any) error { return exitf(exitUsage, format, args...) }

// explain turns any error into an exit status, and a message that tells its
// reader what to do.
func explain(err error) (status int, text string) {
	var exit *exitError
	if errors.As(err, &exit) {
		return exit.status, exit.text
	}
	if noDirectory(err) {
		return exitNoInput, "the working directory " + whyNoDirectory()
	}
	var option *stagefs.OptionError
	if errors.As(err, &option) {
		name := option.Option
		if name != "directory" { // the one that is an argument
			name = "option --" + strings.ReplaceAll(name, " ", "-")
		}
		return exitUsage, fmt.Sprintf("%s %s: %s", name, quote(option.Value), option.Reason)
	}
	var served *stagefs.ServedError
	if errors.As(err, &served) {
		return exitHeld, explainServed(served)
	}
	var overlap *stagefs.OverlapError
	if errors.As(err, &overlap) {
		text, fix := explainOverlap(overlap)
		return exitHeld, text + "; " + fix
	}
	var another *stagefs.AnotherError
	if errors.As(err, &another) {
		return exitNoInput, fmt.Sprintf("%s is not the directory that the dead mount at %s showed: mount its file system again, or put it back; or, to serve what is there now, first give up the dead mount: stagefs umount %s",
			quote(another.Dir), quote(another.Mountpoint), shellWord(another.Mountpoint))
	}
	var twin *stagefs.CopyError
	if errors.As(err, &twin) {
		return exitHeld, oneLine(err) + "; name a state directory of its own with --state-dir, give it another UUID (such as with tune2fs -U random), or unmount that one"
	}
	if errors.Is(err, filestore.ErrDir) {
		if status = errnoStatus(err); status == exitSoftware {
			status = exitNoPerm // whose it is, or its mode
		}
		advice := "name another with --state-dir"
		if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
			advice = "make room there, or " + advice
		}
		return status, oneLine(err) + "; " + advice
	}
	if errors.Is(err, fs.ErrNotExist) && !pathExists("/proc/sys") { // or it shows processes alone
		return exitOS, oneLine(err) + "; stagefs needs /proc: mount -t proc proc /proc"
	}
	for _, known := range []struct {
		is     error
		status int
		advice string
	}{
		{stagefs.ErrNotDirectory, exitNoInput, "name the directory itself"},
		{stagefs.ErrOnFuse, exitNoInput, "the static directory must be on a local filesystem, not on FUSE"},
		{stagefs.ErrKernelFS, exitNoInput, "serve a directory of files"},
		{stagefs.ErrNeeded, exitCantCreate, "choose another mountpoint"},
		{stagefs.ErrReadOnly, exitNoInput, "remount the filesystem read-write (mount -o remount,rw), or serve another directory"},
		{stagefs.ErrNotTaken, exitOS, "try again; or clear it, which lays the directory open: stagefs umount MOUNTPOINT"},
		{stagefs.ErrUnmounted, exitHeld, "mount it again"},
		{stagefs.ErrMoved, exitCantCreate, "see who moved it, and mount it again"},
		{stagefs.ErrStaleMount, exitCantCreate, "a dead mount is in the way; clear it with: umount -l MOUNTPOINT"},
		{stagefs.ErrMountpointBusy, exitCantCreate, "something is mounted there; unmount it, or choose another mountpoint"},
		{stagefs.ErrInside, exitUsage, "see: stagefs mount --help"},
		{stagefs.ErrNewerState, exitUnavailable, "mount with the version that was in use before, or move these files away to go without the locks in them; nothing was changed"},
		{stagefs.ErrLostState, exitUnavailable, "put it back, or unmount what covers it; or, to go on without the locks in it, mount by hand: stagefs mount, with the same options"},
		{stagefs.ErrNoFuse, exitOS, "see: stagefs doctor"},
		{stagefs.ErrHelperKilled, exitOS, "try again"},
		{stagefs.ErrNoCall, exitOS, "see: stagefs doctor"},
		{stagefs.ErrNoTransport, exitOS, "see: stagefs doctor"},
		{stagefs.ErrStrict, exitHeld, "end what is named, or mount without --strict"},
		{stagefs.ErrNoAtimes, exitUnavailable, "leave them as they are there"},
		{stagefs.ErrNoMount, exitUnavailable, "mount one with: stagefs mount DIR"},
		{stagefs.ErrMountLocked, exitNoPerm, "unmount it where it was mounted: this namespace has it from one with more privilege"},
		{stagefs.ErrNotExist, exitNoInput, "make it first"},
	} {
		if errors.Is(err, known.is) {
			return known.status, fmt.Sprintf("%s; %s", oneLine(err), known.advice)
		}
	}
	if errors.Is(err, stagefs.ErrState) {
		return errnoStatus(err), oneLine(err) + "; mount again when that is mended: nothing was changed"
	}
	return errnoStatus(err), oneLine(err)
}

// noDirectory reports whether an error is that the working directory is gone, which
// what is relative to it needs.
func noDirectory(err error) bool {
	var call *os.SyscallError
	return errors.As(err, &call) && call.Syscall == "getwd" && errors.Is(err, unix.ENOENT)
}

// whyNoDirectory tells why the working directory has no path, and what to do.
func whyNoDirectory() string {
	path := make([]byte, unix.PathMax)
	if n, err := unix.Getcwd(path); err == nil && n > 0 && path[0] != '/' { // "(unreachable)/…"
		return "is in a mount that is gone; cd to its path anew, or to another one"
	}
	return "was removed; cd to another one"
}

// explainServed tells who serves a directory already, and what to do.
func explainServed(e *stagefs.ServedError) string {
	by := "another process"
	if e.Pid != 0 {
		by = "process " + strconv.Itoa(e.Pid)
	}
	text := fmt.Sprintf("%s is served already, by %s", quote(e.Dir), by)
	switch at, here := mountpointOf(e.Dir); {
	case at != "" && !isDead(ask(at, false, answerTime)): // else it is not what is in the way
		if at != e.Dir {
			text += ", at " + quote(at)
		}
		text += fmt.Sprintf("; unmount it with: stagefs umount %s, or upgrade it with: stagefs mount --replace %s", shellWord(at), shellWord(at))
	case !here && e.Pid != 0:
		text += ", though it is not mounted here"
		if other := elsewhere(func(m stagefs.MountEntry) bool { return m.Source == e.Dir }); other != 0 {
			text += ": it is in the mount namespace of " + nameOf(other) + "; unmount it there: " + umountIn(other, e.Dir)
		}
	}
	return text
}

// explainOverlap tells who serves a directory that is inside of another, or around
// it, and what to do.
func explainOverlap(e *stagefs.OverlapError) (text, fix string) {
	other, by := "another directory", "another process"
	if e.Other != "" {
		other = quote(e.Other)
	}
	if e.Pid != 0 {
		by = "process " + strconv.Itoa(e.Pid)
	}
	if e.Within {
		text = fmt.Sprintf("%s is inside of %s", quote(e.Dir), other)
	} else {
		text = fmt.Sprintf("inside of %s is %s", quote(e.Dir), other)
	}
	text += ", which " + by + " serves already"
	if e.Mountpoint != "" {
		return text + ", at " + quote(e.Mountpoint), "only one of them can be served: to unmount that one, stagefs umount " + shellWord(e.Mountpoint)
	}
	text += ", though it is not mounted here"
	if ns := elsewhere(func(m stagefs.MountEntry) bool { return e.Other != "" && m.Source == e.Other }); ns != 0 {
		text += ": it is in the mount namespace of " + nameOf(ns)
	}
	return text, "only one of them can be served: unmount that one there"
}

// oneLine is the text of err, which may hold what a helper program said.
func oneLine(err error) string {
	return harmless(strings.Join(strings.FieldsFunc(err.Error(), func(r rune) bool { return r == '\n' }), " "))
}

func errnoStatus(err error) int {
	var errno syscall.Errno
	switch {
	case errors.Is(err, fs.ErrPermission):
		return exitNoPerm
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENAMETOOLONG), errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENOTDIR):
		return exitNoInput
	case errors.Is(err, unix.EIO), errors.Is(err, os.ErrDeadlineExceeded):
		return exitIO
	case errors.Is(err, unix.EBUSY):
		return exitHeld
	case errors.Is(err, unix.ENOTCONN):
		return exitUnavailable
	case errors.As(err, &errno):
		return exitOS
	}
	return exitSoftware
}
