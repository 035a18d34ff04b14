package filestore

import (
	"errors"
	"os"
	"strconv"
	"syscall"
)

// Why the state does not outlive the daemon.
var (
	errFilesRemoved = errors.New("files of the state were removed")
	errDirRemoved   = errors.New("the state directory was removed; unmount, and mount again")
)

// lookForFiles notices that somebody has removed files of the store, or all of its
// directory: no later daemon finds what is written to them. Files are made anew, from
// what is live; a directory is not, as its path may lead into the mount by now (M4).
func (s *Store) lookForFiles() {
	if !s.mu.TryLock() {
		return // it is being closed, or asked for tokens
	}
	defer s.mu.Unlock()
	if s.dir == nil {
		return
	}
	if unlinked(s.self) {
		s.journal.lost(errDirRemoved)
		return
	}
	if s.missing(s.key + ".lock") {
		s.guardAgain()
	}
	if s.missing(s.key + ".tokens") {
		_ = s.writeMarkLocked(s.mark) // or the next time
	}
	if s.journal.lacksFiles() {
		s.journal.lost(errFilesRemoved)
	}
}

// guardAgain makes the lock file anew. Nobody else does: the backing is this daemon's.
// The caller holds mu.
func (s *Store) guardAgain() {
	guarded, err := s.lock(s.key+".lock", os.O_RDWR|os.O_CREATE)
	if err != nil {
		return
	}
	guard, err := descriptor(guarded)
	if err != nil {
		guarded.Close()
		return
	}
	_ = s.unguard()
	s.guarded, s.guard = guarded, guard
	_ = s.writeGuard(strconv.Itoa(os.Getpid()) + "\n")
}

// lacksFiles reports whether a file is gone that a restart would need.
func (j *journal) lacksFiles() bool {
	j.writeMu.Lock()
	defer j.writeMu.Unlock()
	if j.failed != nil || j.file == nil {
		return false // all is written anew in any case
	}
	return unlinked(j.file) || j.gen == j.base && !j.stale && j.store.missing(j.store.snapshotName(j.base))
}

// lost notes why a restart would not find what is live.
func (j *journal) lost(err error) {
	j.writeMu.Lock()
	defer j.writeMu.Unlock()
	if j.removed {
		return
	}
	j.removed = err == errDirRemoved
	j.failed = nil // for another reason
	_ = j.failLocked(err)
}

// unlinked reports whether an open file has no name any more.
func unlinked(f *os.File) bool {
	info, err := f.Stat()
	return err == nil && info.Sys().(*syscall.Stat_t).Nlink == 0
}

func (s *Store) missing(name string) bool {
	_, err := s.dir.Lstat(name)
	return errors.Is(err, os.ErrNotExist)
}
