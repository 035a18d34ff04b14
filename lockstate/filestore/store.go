package filestore

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
)

// ErrClosed is returned by methods of a closed [Store].
var ErrClosed = errors.New("state store is closed")

// A HeldError says that another process serves the backing.
type HeldError struct {
	Pid int // 0: that process has not said
}

func (e *HeldError) Error() string {
	if e.Pid == 0 {
		return "backing is served by another process"
	}
	return fmt.Sprintf("backing is served by process %d", e.Pid)
}

// A Store is the state of one backing. Its methods may be called by several
// goroutines.
type Store struct {
	key      string
	guard    *guard // on KEY.lock
	runtime  *guard // the same outside of the state directory; nil: there is none
	warnings []string

	mu sync.Mutex
	// dir reaches the state directory also when a mount has come to cover its
	// path meanwhile: the daemon must never walk into its own mount (M4).
	dir  *os.Root // nil once closed
	mark uint64   // all of KEY.tokens
}

// Open takes the state of the backing with the given key below stateDir, which
// it makes if necessary. If another process serves the backing, with this or
// another state directory, the error is a *[HeldError].
func Open(stateDir, key string) (*Store, error) {
	if key == "" || strings.ContainsAny(key, "/\x00") || key[0] == '.' {
		return nil, fmt.Errorf("bad key %q for a backing", key)
	}
	if err := makeDir(stateDir); err != nil {
		return nil, fmt.Errorf("state directory: %w", err)
	}
	dir, err := os.OpenRoot(stateDir)
	if err != nil {
		return nil, fmt.Errorf("state directory: %w", err)
	}
	s := &Store{key: key, dir: dir}
	if err := s.open(stateDir); err != nil {
		s.release()
		return nil, err
	}
	return s, nil
}

func (s *Store) open(stateDir string) (err error) {
	if err := s.openRuntime(); err != nil {
		return err
	}
	lockPath := filepath.Join(stateDir, s.key+".lock")
	_, err = os.Lstat(lockPath)
	fresh := errors.Is(err, os.ErrNotExist)
	if s.guard, err = takeGuard(lockPath); err != nil {
		return err
	}
	return s.loadMark(fresh)
}

// openRuntime takes the guard that daemons with other state directories see.
// Without it, as where /run can't be written, this one's own still holds.
func (s *Store) openRuntime() error {
	dir, err := runtimeDir()
	if err == nil {
		err = makeDir(dir)
	}
	if err == nil {
		s.runtime, err = takeGuard(filepath.Join(dir, s.key+".lock"))
	}
	if errors.As(err, new(*HeldError)) {
		return err
	}
	if err != nil {
		s.warnings = append(s.warnings, fmt.Sprintf("daemons with other state directories are not seen: %v", err))
	}
	return nil
}

// release gives up all that the store has open.
func (s *Store) release() error {
	var errs []error
	if s.guard != nil {
		errs = append(errs, s.guard.close())
	}
	if s.runtime != nil {
		errs = append(errs, s.runtime.remove())
	}
	return errors.Join(append(errs, s.dir.Close())...)
}

// Warnings tells what was found damaged when the store was opened (S2).
func (s *Store) Warnings() []string { return s.warnings }

// Close gives the backing up. Closing twice is fine.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dir == nil {
		return nil
	}
	// An empty file tells a daemon that starts at this moment, and loses to yet
	// another, that the pid it reads is not this one's.
	err := s.dir.WriteFile(s.key+".lock", nil, 0o600)
	err = errors.Join(err, s.release())
	s.dir = nil
	return err
}

// makeDir makes the state directory, and refuses one that other users could
// change under the daemon's feet.
func makeDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	info, err := os.Stat(dir)
	if err != nil {
		return err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	switch {
	case !info.IsDir():
		return &os.PathError{Op: "open", Path: dir, Err: syscall.ENOTDIR}
	case ok && int(st.Uid) != os.Geteuid():
		return fmt.Errorf("%s belongs to uid %d, not to uid %d who runs this", dir, st.Uid, os.Geteuid())
	case info.Mode().Perm()&0o022 != 0:
		return fmt.Errorf("%s can be written by others (mode %04o); chmod go-w it", dir, info.Mode().Perm())
	}
	return nil
}

// DefaultDir is where the state lives if nothing else is asked for (S1).
func DefaultDir() (string, error) {
	if os.Geteuid() == 0 {
		return "/var/lib/stagefs", nil
	}
	// The XDG rules say to ignore a path that is not absolute.
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "stagefs"), nil
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("no state directory: %w", err)
	}
	return filepath.Join(home, ".local", "state", "stagefs"), nil
}
