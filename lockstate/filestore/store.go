package filestore

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gofrs/flock"

	"github.com/stagefs/stagefs/lockstate"
)

// ErrClosed is returned by methods of a closed [Store].
var ErrClosed = errors.New("state store is closed")

// ErrDir: the state directory cannot be made, opened or written for the first time. What
// it wraps says why.
var ErrDir = errors.New("state directory")

// ErrLost is returned where there is no state, though there must be: see
// [Options.Required].
var ErrLost = errors.New("there is no state of the daemon that was here before")

// ErrNewer is returned for a state that this version does not understand.
var ErrNewer = errors.New("the state was written by a newer version")

// A HeldError says that another process serves the backing.
type HeldError struct {
	Pid   int    // 0: that process has not said
	Place string // see Options
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
	path     string
	guard    *os.File     // KEY.lock, flocked
	guarded  *flock.Flock // what flocked it; nil after an exec
	self     *os.File     // the state directory
	warnings []string
	crashed  bool

	touched    time.Time // when the last of the files was, before Open changed any
	incomplete bool
	another    bool                             // see Another
	damaged    map[string]string                // files to be set aside, and under which name
	steps      func(op, name string, done bool) // see step; nil: no test

	mu sync.Mutex
	// dir reaches the state directory also when a mount has come to cover its
	// path meanwhile: the daemon must never walk into its own mount (M4).
	dir  *os.Root // nil once closed
	mark uint64   // all of KEY.tokens
	// carried is when the descriptors were handed on, see Carry.
	carried time.Time

	placed string // the line of KEY.place, as far as it is known
	shown  string // that of KEY.mount

	journal journal
}

var _ lockstate.Store = (*Store)(nil)

// Options say which state is opened. Key is required.
type Options struct {
	Key string
	// Older are keys that a backing without state under Key may have had. The
	// first state that is found under one of them is its own from now on.
	Older []string
	// Place is a line of text that tells where the backing is now. Confirm is
	// given that of whoever had the state before, if there is one, and may
	// refuse the state: then nothing is changed. nil: it never does.
	Place   string
	Confirm func(last string) error
	// Served: the backing was served before, as something else shows. If there is
	// no state of that, it was lost.
	Served bool
	// Required: if it was lost, Open returns ErrLost and makes nothing.
	Required bool
	// Another reports whether the backing was served with another state since a mount
	// of this one was noted so, with [Store.NoteMount]. nil: it never was.
	Another func(mount string) bool

	steps func(op, name string, done bool)
}

// Open takes the state of the backing with o.Key below stateDir, which it makes if
// necessary. If another process has it, the error is a *[HeldError].
func Open(stateDir string, o Options) (*Store, error) {
	key := o.Key
	if key == "" || strings.ContainsAny(key, "/\x00") || key[0] == '.' {
		return nil, fmt.Errorf("bad key %q for a backing", key)
	}
	if o.Served && o.Required {
		if _, err := os.Stat(stateDir); errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("%s: %w", stateDir, ErrLost)
		}
	}
	if err := makeDir(stateDir); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrDir, err)
	}
	self, err := os.Open(stateDir)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrDir, err)
	}
	s, err := inDir(self, key)
	if err != nil {
		return nil, err
	}
	s.path, s.steps = filepath.Join(stateDir, key), o.steps
	if err := s.open(o); err != nil {
		s.abandon()
		return nil, err
	}
	return s, nil
}

// inDir makes a store of a state directory that is open, which is its to close.
func inDir(self *os.File, key string) (*Store, error) {
	dir, err := os.OpenRoot("/proc/self/fd/" + strconv.Itoa(int(self.Fd())))
	if err != nil {
		self.Close()
		return nil, fmt.Errorf("state directory: %w", err)
	}
	return &Store{key: key, self: self, dir: dir}, nil
}

// abandon lets go of what a store has that could not be opened.
func (s *Store) abandon() {
	s.unguard()
	s.dir.Close()
	s.self.Close()
}

// unguard lets go of the lock.
func (s *Store) unguard() (err error) {
	if s.guard != nil {
		err = s.guard.Close()
	}
	if s.guarded != nil {
		err = errors.Join(err, s.guarded.Close())
	}
	return err
}

func (s *Store) open(o Options) error {
	odd, err := s.setAsideOdd()
	if err != nil {
		return err
	}
	name := s.key + ".lock"
	fresh := false
	if s.missing(name) && !odd {
		found, err := s.takeOver(o.Older)
		if err != nil {
			return err
		}
		files, err := s.files()
		if err != nil {
			return err
		}
		fresh = !found && len(files) == 0
	}
	if fresh && o.Served && s.missing(s.key+".tokens") {
		if o.Required {
			return fmt.Errorf("%s: %w", filepath.Dir(s.path), ErrLost)
		}
		s.warn("%v; the locks that it gave out are lost", ErrLost)
		fresh, s.incomplete = false, true
	}

	s.touched = s.lastTouched()
	s.guarded, err = s.lock(name, os.O_RDWR|os.O_CREATE)
	if errors.Is(err, errLocked) {
		last, _ := s.place()
		return &HeldError{Pid: s.holder(), Place: last}
	}
	if err == nil {
		s.guard, err = descriptor(s.guarded)
	}
	if err != nil {
		return err
	}
	last, err := s.place()
	if err == nil && last != "" && o.Confirm != nil {
		err = o.Confirm(last)
	}
	if err != nil {
		return err
	}
	s.placed = o.Place
	if err := s.setPlace(o.Place); err != nil {
		s.warn("%v; a copy of the backing may be taken for it", err)
	}
	old, _ := readSmall(s.dir.Open(name))
	s.crashed = odd || len(bytes.TrimSpace(old)) > 0
	if err := s.writeGuard(strconv.Itoa(os.Getpid()) + "\n"); err != nil {
		s.warn("writing the pid: %v; who is refused hears of no pid", err)
	}
	nothing := fresh || s.incomplete // more is missing than need be told
	if err := s.loadMark(fresh); err != nil {
		if fresh { // or the next one would miss the mark
			files, _ := s.files()
			for _, e := range files {
				_ = s.dir.Remove(e.Name())
			}
		}
		return fmt.Errorf("%w: %w", ErrDir, err)
	}
	if err := s.lookForAnother(o.Another); err != nil {
		return fmt.Errorf("%w: %w", ErrDir, err)
	}
	s.haveRoomForMark()
	return s.loadJournal(nothing)
}

// named has an error of a file of the state name the file by its path, rather than by the
// descriptor that it is reached by.
func (s *Store) named(err error) error {
	var at *os.PathError
	if errors.As(err, &at) {
		at.Path = filepath.Join(filepath.Dir(s.path), filepath.Base(at.Path))
	}
	return err
}

// writeGuard writes into the room that the file has: the disk may be full.
func (s *Store) writeGuard(text string) error {
	if _, err := s.guard.WriteAt([]byte(text), 0); err != nil {
		return err
	}
	return s.guard.Truncate(int64(len(text)))
}

// Warnings tells what was found damaged when the store was opened (S2).
func (s *Store) Warnings() []string { return s.warnings }

// Complete reports whether all is there that was ever flushed, as far as the
// files show.
func (s *Store) Complete() bool { return !s.incomplete }

// Crashed reports whether whoever had the backing before did not close the
// store.
func (s *Store) Crashed() bool { return s.crashed }

// Another reports whether the backing was served with another state since this one
// was in use, see [Options]: what is kept here may not be true any more.
func (s *Store) Another() bool { return s.another }

// Path is what the names of all its files begin with.
func (s *Store) Path() string { return s.path }

// Close gives the backing up. Closing twice is fine.
func (s *Store) Close() error { return s.close(false) }

// CloseUnserved is Close for who has not served the backing: Crashed tells the
// next one what it told this one.
func (s *Store) CloseUnserved() error { return s.close(s.crashed) }

func (s *Store) close(crashed bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dir == nil {
		return nil
	}
	err := s.journal.close()
	if !crashed {
		// An empty line tells a daemon that starts at this moment, and loses to yet
		// another, that the pid it reads is not this one's.
		err = errors.Join(err, s.writeGuard("\n"))
	}
	err = errors.Join(err, s.unguard(), s.dir.Close(), s.self.Close())
	s.dir = nil
	return err
}

// makeDir makes the state directory, and refuses one that other users could
// change under the daemon's feet.
func makeDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return dangling(err)
	}
	info, err := os.Stat(dir)
	if err != nil {
		return err
	}
	return CheckDir(dir, info)
}

// dangling says what is in the way of a directory if that is a symbolic link to nothing:
// mkdir(2) only says that it is there.
func dangling(err error) error {
	var at *os.PathError
	var errno syscall.Errno
	if !errors.Is(err, syscall.EEXIST) || !errors.As(err, &at) {
		return err
	}
	if _, nothing := os.Stat(at.Path); errors.As(nothing, &errno) && (errno == syscall.ENOENT || errno == syscall.ELOOP) {
		return fmt.Errorf("%s is a dangling symbolic link: %w", at.Path, errno)
	}
	return err
}

// CheckDir makes sure that a state directory is this user's, and that others can't
// change what is in it.
func CheckDir(dir string, info os.FileInfo) error {
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

// holder reads the pid of the process that has the lock file flocked. One that
// has the lock may not have written its pid yet: then the file is empty, or
// names a process that was killed earlier.
func (s *Store) holder() int {
	for range 20 {
		text, _ := readSmall(s.dir.Open(s.key + ".lock"))
		pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
		if err == nil && pid > 0 && !errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
			return pid
		}
		time.Sleep(10 * time.Millisecond)
	}
	return 0
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
	home := os.Getenv("HOME")
	if !filepath.IsAbs(home) { // mount(8) takes it away from what it runs for an ordinary user
		who, err := user.LookupId(strconv.Itoa(os.Geteuid()))
		if err != nil || !filepath.IsAbs(who.HomeDir) {
			return "", errors.New("no state directory: HOME is not set, and the user has no home directory")
		}
		home = who.HomeDir
	}
	return filepath.Join(home, ".local", "state", "stagefs"), nil
}
