package filestore

import (
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// A Carried is what of a store goes on in another program that this process
// runs by execve(2). The descriptors are what cannot be had again: the flock is
// theirs, and by its path the state directory may be reached no more.
type Carried struct {
	Key        string
	Dir, Guard int    // descriptors: the state directory, and KEY.lock
	Mark       uint64 // of the tokens
	Gen        uint64 // of the files
}

// Carry returns what another program needs to go on with the store by
// [Continue]. All that was put before it is flushed; nothing may be put
// meanwhile. The store stays as it is.
func (s *Store) Carry() (Carried, error) {
	_ = s.Flush() // what can be kept of it now is
	s.journal.writeMu.Lock()
	gen := s.journal.gen
	s.journal.writeMu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dir == nil {
		return Carried{}, ErrClosed
	}
	s.carried = time.Now()
	return Carried{Key: s.key, Dir: int(s.self.Fd()), Guard: int(s.guard.Fd()), Mark: s.mark, Gen: gen}, nil
}

// Continue goes on with a store that the program before had. What is wrong with
// its files ends up in [Store.Warnings] and [Store.Err]: the caller has all that
// is in force, and puts it again.
// What a newer version has written is left to that, with [ErrNewer].
func Continue(c Carried) (*Store, error) {
	unix.CloseOnExec(c.Dir)
	unix.CloseOnExec(c.Guard)
	self, guard := os.NewFile(uintptr(c.Dir), "state directory"), os.NewFile(uintptr(c.Guard), "state lock")
	if self == nil || guard == nil {
		return nil, fmt.Errorf("state directory: %w", os.ErrInvalid)
	}
	s, err := inDir(self, c.Key)
	if err != nil {
		guard.Close()
		return nil, err
	}
	s.guard, s.mark = guard, c.Mark
	s.placed, _ = s.place() // only to make it anew
	s.shown = s.readMount()
	at, _ := os.Readlink(s.dir.Name())
	s.path = filepath.Join(at, c.Key)
	if info, err := self.Stat(); err != nil {
		s.warn("state directory: %v", err)
	} else if err := CheckDir("the state directory", info); err != nil {
		s.warn("%v", err)
	}
	if err := s.resumeJournal(c.Gen); err != nil {
		s.abandon()
		return nil, err
	}
	return s, nil
}
