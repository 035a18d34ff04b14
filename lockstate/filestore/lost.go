package filestore

import (
	"errors"
	"fmt"
	"os"
	"path"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Why the state does not outlive the daemon.
var (
	errFilesLost  = errors.New("files of the state were removed, or changed by others")
	errDirRemoved = errors.New("the state directory was removed, and cannot be made anew")
)

// carriedTime is for how long the files stay as they are after Carry: until the
// program after this one has the store, or could not be run.
const carriedTime = 10 * time.Second

// lookForFiles notices that somebody has removed files of the store, has changed them,
// or has removed the directory: no later daemon finds what is written to them. They
// are made anew, from what is live.
func (s *Store) lookForFiles() {
	if !s.mu.TryLock() {
		return // it is being closed, or asked for tokens
	}
	defer s.mu.Unlock()
	if s.dir != nil && (s.carried.IsZero() || time.Since(s.carried) > carriedTime) {
		s.lookForFilesLocked()
	}
}

// lookForFilesLocked is for who makes the snapshots. The caller holds mu.
func (s *Store) lookForFilesLocked() {
	if unlinked(s.self) {
		if err := s.makeDirAgain(); err != nil {
			s.journal.lost(fmt.Errorf("%w: %w", errDirRemoved, err))
			return
		}
	}
	s.journal.found()
	if !s.guards(s.key + ".lock") {
		s.guardAgain()
	}
	if !s.marked(s.key + ".tokens") {
		_ = s.writeMarkLocked(s.mark) // or the next time
	}
	if s.missing(s.key + ".place") {
		_ = s.setPlace(s.placed)
	}
	if s.shown != "" && s.missing(s.key+".mount") {
		_ = s.writeMountLocked()
	}
	if s.journal.lacksFiles() {
		s.journal.lost(errFilesLost)
	}
}

// makeDirAgain makes the state directory where it was. The caller holds mu.
func (s *Store) makeDirAgain() error {
	fd, err := makeAgain(int(s.self.Fd()))
	if err != nil {
		return err
	}
	made, err := inDir(os.NewFile(uintptr(fd), s.self.Name()), s.key)
	if err != nil {
		return err
	}
	info, err := made.self.Stat()
	if err == nil {
		err = CheckDir(info.Name(), info)
	}
	if err != nil {
		made.dir.Close()
		made.self.Close()
		return err
	}
	s.dir.Close()
	s.self.Close()
	s.dir, s.self = made.dir, made.self
	return nil
}

// makeAgain makes a directory that was removed where it was, and opens it. No path is
// walked: it may lead into the mount by now (M4).
func makeAgain(dir int) (int, error) {
	above := &unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_XDEV}
	parent, err := unix.Openat2(dir, "..", above)
	if err != nil {
		return -1, os.NewSyscallError("openat2", err)
	}
	defer func() { unix.Close(parent) }()
	var st unix.Stat_t
	if err := unix.Fstat(parent, &st); err != nil {
		return -1, os.NewSyscallError("fstat", err)
	}
	if st.Nlink == 0 {
		again, err := makeAgain(parent)
		if err != nil {
			return -1, err
		}
		unix.Close(parent)
		parent = again
	}
	was, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(dir))
	if err != nil {
		return -1, err
	}
	name := path.Base(strings.TrimSuffix(was, " (deleted)"))
	if err := unix.Mkdirat(parent, name, 0o700); err != nil && err != unix.EEXIST {
		return -1, os.NewSyscallError("mkdirat", err)
	}
	fd, err := unix.Openat2(parent, name, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_NO_XDEV | unix.RESOLVE_BENEATH,
	})
	if err != nil {
		return -1, os.NewSyscallError("openat2", err)
	}
	return fd, nil
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

// guards reports whether the lock file is the one that is flocked. What is no file is left
// to the next daemon, as with the mark.
func (s *Store) guards(name string) bool {
	named, err := s.dir.Lstat(name)
	if err != nil {
		return !errors.Is(err, os.ErrNotExist)
	}
	own, err := s.guard.Stat()
	return err != nil || !named.Mode().IsRegular() || os.SameFile(own, named)
}

// marked reports whether the mark of the tokens is as it was written: an older one, from a
// backup perhaps, would have the next daemon give out tokens again. The caller holds mu.
func (s *Store) marked(name string) bool {
	named, err := s.dir.Lstat(name)
	if err != nil || !named.Mode().IsRegular() {
		return !errors.Is(err, os.ErrNotExist)
	}
	text, err := readSmall(s.dir.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0))
	mark, whole := decodeMark(text)
	return err != nil || whole && mark >= s.mark
}

// lacksFiles reports whether a file that a restart would need is gone, or is not as
// it was written.
func (j *journal) lacksFiles() bool {
	j.writeMu.Lock()
	defer j.writeMu.Unlock()
	if j.failed != nil || j.file == nil {
		return false // all is written anew in any case
	}
	open, err := j.file.Stat()
	if err != nil {
		return false
	}
	named, err := j.store.dir.Lstat(j.store.journalName(j.gen))
	if errors.Is(err, os.ErrNotExist) || err == nil && (!os.SameFile(open, named) || named.Size() != j.size) {
		return true
	}
	if j.gen != j.base || j.stale {
		return false // a snapshot is to be made in any case
	}
	named, err = j.store.dir.Lstat(j.store.snapshotName(j.base))
	return errors.Is(err, os.ErrNotExist) ||
		err == nil && j.snapshot != nil && (!os.SameFile(j.snapshot, named) || named.Size() != j.snapshot.Size())
}

// lost notes why a restart would not find what is live.
func (j *journal) lost(err error) {
	j.writeMu.Lock()
	defer j.writeMu.Unlock()
	if j.removed {
		return
	}
	j.removed = errors.Is(err, errDirRemoved)
	j.failed = nil // for another reason
	_ = j.failLocked(err)
}

// found notes that there is a state directory.
func (j *journal) found() {
	j.writeMu.Lock()
	defer j.writeMu.Unlock()
	j.removed = false
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
