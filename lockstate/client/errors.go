//go:build linux

package client

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Errors of an acquisition.
var (
	// ErrFailedToLock: somebody else has the directory, or something in it
	// open for writing. A [*HeldError] beside it says who.
	ErrFailedToLock = errors.New("failed to lock")
	// ErrEmptyClientID: a lease needs an ID.
	ErrEmptyClientID = errors.New("the client ID is empty")
	// ErrRoot: the root of a mount is never locked, only directories in it.
	ErrRoot = errors.New("the root of a mount can't be locked; name a directory in it")
	// ErrLockName: to make the directory would be to make a lock file, which locks
	// the one above it (A3).
	ErrLockName = errors.New("a lock file's name")
	// ErrNotStagefs: the path is not on a stagefs mount, or the root of its
	// mount can't be seen from here.
	ErrNotStagefs = errors.New("in no stagefs mount")
)

// Errors of a lock that was acquired.
var (
	// ErrLost: the lock ended before it was released. A [*LostError] says
	// why.
	ErrLost = errors.New("the lock was lost")
	// ErrNoLock: there is no such lock (any more).
	ErrNoLock = errors.New("no such lock")
	// ErrNotHolder: the lock is somebody else's.
	ErrNotHolder = errors.New("not a holder of the lock")
)

// A Holder is who has a directory.
type Holder struct {
	Dir      string `json:"dir"` // of the lock, relative to the mount
	DirBytes []byte `json:"dir_bytes"`
	Kind     string `json:"kind"` // implicit, explicit, shared or lease
	Token    uint64 `json:"token"`
	Pid      int    `json:"pid"`
	UID      uint32 `json:"uid"`
	Cmd      string `json:"cmd"`
	Client   string `json:"client"`
	Why      string `json:"why"`
}

func (h *Holder) String() string {
	who := fmt.Sprintf("process %d (%s)", h.Pid, strconv.Quote(h.Cmd))
	if h.Client != "" {
		who = "client " + strconv.Quote(h.Client)
	}
	if h.Why != "" {
		who += ", " + strconv.Quote(h.Why)
	}
	return who
}

// A Blocker is a process that has something beneath the directory open for
// writing, or mapped.
type Blocker struct {
	Pid       int    `json:"pid"` // 0: not known, since it opened it before the daemon's start or outside of its PID namespace
	Cmd       string `json:"cmd"`
	Path      string `json:"path"` // relative to the mount
	PathBytes []byte `json:"path_bytes"`
}

// A HeldError says what stands in the way of an acquisition.
type HeldError struct {
	Dir      string    // that was to be locked
	Holder   *Holder   // whose lock is in the way; nil if none is
	Blockers []Blocker // what is open for writing there
	Reason   string    // in the daemon's words
	rel      string    // Dir, relative to the mount, where it is known
	err      error
}

func (e *HeldError) Error() string {
	dir := strconv.Quote(e.Dir)
	switch {
	case e.Holder != nil:
		of := bytesOf(e.Holder.Dir, e.Holder.DirBytes)
		if of == "" || of == e.rel {
			return fmt.Sprintf("%s is held by %s", dir, e.Holder)
		}
		return fmt.Sprintf("%s is held by %s, through the lock on %s", dir, e.Holder, strconv.Quote(of))
	case len(e.Blockers) > 0:
		b := e.Blockers[0]
		who := fmt.Sprintf("process %d (%s)", b.Pid, strconv.Quote(b.Cmd))
		if b.Pid == 0 {
			who = "a process that is not known"
		}
		return fmt.Sprintf("%s: %s has %s open for writing", dir, who, strconv.Quote(bytesOf(b.Path, b.PathBytes)))
	case e.Reason != "":
		return fmt.Sprintf("%s: %s", dir, e.Reason)
	}
	return fmt.Sprintf("%s: %v", dir, e.err)
}

// bytesOf returns a name as the bytes it is: they are there if it is not valid UTF-8.
func bytesOf(text string, bytes []byte) string {
	if len(bytes) > 0 {
		return string(bytes)
	}
	return text
}

// Unwrap returns the errno.
func (e *HeldError) Unwrap() error { return e.err }

// A LostError says why a lock ended.
type LostError struct {
	Dir    string
	Token  uint64
	Reason string // the daemon's: broken, expired, released …; "unknown" if it did not say
	By     int    // the process that ended it, if it was one
	Why    string // what an admin gave as the reason
}

func (e *LostError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "the lock on %s (token %d) was lost: %s", strconv.Quote(e.Dir), e.Token, e.Reason)
	if e.By != 0 {
		fmt.Fprintf(&b, " by process %d", e.By)
	}
	if e.Why != "" {
		fmt.Fprintf(&b, ": %s", strconv.Quote(e.Why))
	}
	return b.String()
}

// Is makes errors.Is(err, ErrLost) true.
func (e *LostError) Is(target error) bool { return target == ErrLost }

// daemonGone reports whether an error is the kernel's answer for a daemon that
// is dead: ECANCELED is what a request gets that it had just taken.
func daemonGone(err error) bool {
	return errors.Is(err, unix.ENOTCONN) || errors.Is(err, unix.ECONNABORTED) || errors.Is(err, unix.ECANCELED)
}
