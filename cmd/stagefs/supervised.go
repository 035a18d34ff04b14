//go:build linux

package main

import (
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// envSupervised tells a process that it is the daemon which `stagefs mount
// --supervise` started.
const envSupervised = "STAGEFS_SUPERVISED"

// A supervision is what a daemon knows of its supervisor: the value of
// envSupervised are descriptors, and againMark if that is so.
type supervision struct {
	on    bool
	again bool          // it takes the place of one that has mounted
	told  *os.File      // takes news, a byte each; nil: nobody asks
	shelf *procid.Shelf // what the daemon before may have left; nil: there is none
}

// What a daemon tells its supervisor: the last of it counts when it has ended.
const (
	toldNothing = 0
	toldMounted = 'm' // its mount is there
	toldBack    = 'b' // it is about to take it back
	toldServes  = 's' // it answers
	toldFailed  = "f" // why it can't start: the text follows, to the end
)

// maxReason bounds that text: a pipe may have room for a page alone, and nobody reads
// before the daemon has ended.
const maxReason = 3000

// supervised returns that, to nobody but its first caller.
func supervised() (s supervision) {
	value := os.Getenv(envSupervised)
	os.Unsetenv(envSupervised)
	list, again := strings.CutSuffix(value, againMark)
	var fds []int
	for text := range strings.SplitSeq(list, ",") {
		if n, err := strconv.Atoi(text); err == nil {
			if n > 2 {
				unix.CloseOnExec(n)
			}
			fds = append(fds, n)
		}
	}
	if len(fds) > 0 && fds[0] > 2 { // 0: nobody asks
		s.told = os.NewFile(uintptr(fds[0]), "supervisor's pipe")
	}
	if len(fds) == 3 {
		s.shelf = &procid.Shelf{Put: fds[1], Take: fds[2]}
	}
	s.on, s.again = value != "", again
	if s.on {
		nameProcess()
	}
	return s
}

// againMark says in envSupervised that a daemon takes the place of one that has mounted.
const againMark = " again"

func (s *supervision) tell(news byte) {
	if s.told != nil {
		_, _ = s.told.Write([]byte{news}) // a supervisor that is gone needs none
	}
}

// failed leaves it to the supervisor to say why the daemon can't start: it knows what
// it has said already. It returns what is left to be said.
func (s *supervision) failed(err error) error {
	if err == nil || s.told == nil {
		return err
	}
	status, text := explain(err)
	if text != "" {
		_, failed := s.told.WriteString(toldFailed + text[:min(len(text), maxReason)])
		if failed != nil {
			return err
		}
	}
	return &exitError{status, ""}
}

// mounted tells the supervisor that the mount is there, as soon as it is: who
// unmounts it wants no other one, also if the daemon is killed before it serves.
func (s *supervision) mounted(there bool) {
	if there {
		s.tell(toldMounted)
	} else {
		s.tell(toldBack)
	}
}

// serves tells the supervisor that the mount answers.
func (s *supervision) serves() {
	s.tell(toldServes)
	if s.told != nil {
		s.told.Close()
		s.told = nil
	}
}
