package filestore

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"github.com/gofrs/flock"
	"golang.org/x/sys/unix"
)

// errLocked: another process has the file locked.
var errLocked = errors.New("locked by another process")

// lock locks a file of the state directory.
func (s *Store) lock(name string, flags int) (*flock.Flock, error) {
	path := filepath.Join("/proc/self/fd", strconv.Itoa(int(s.self.Fd())), name)
	l := flock.New(path, flock.SetFlag(flags), flock.SetPermissions(0o600))
	var opened *os.PathError
	switch ok, err := l.TryLock(); {
	case errors.As(err, &opened) && flags&os.O_CREATE != 0:
		return nil, fmt.Errorf("%w %s: files can't be made there: %w", ErrDir, filepath.Dir(s.path), opened.Err)
	case err != nil:
		return nil, fmt.Errorf("locking the state: %w", err)
	case !ok:
		return nil, errLocked
	}
	return l, nil
}

// descriptor returns a descriptor of the description that l has locked, which
// goes over an exec and takes the lock with it. The library shows none.
func descriptor(l *flock.Flock) (*os.File, error) {
	info, err := l.Stat()
	if err != nil {
		return nil, err
	}
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return nil, err
	}
	for _, e := range fds {
		n, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		fd, err := unix.FcntlInt(uintptr(n), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			continue // closed meanwhile
		}
		f := os.NewFile(uintptr(fd), l.Path())
		if other, err := f.Stat(); err == nil && os.SameFile(info, other) && unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) == nil {
			return f, nil
		}
		f.Close()
	}
	return nil, fmt.Errorf("%s: %w", l.Path(), os.ErrNotExist)
}
