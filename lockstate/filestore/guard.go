package filestore

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gofrs/flock"
)

// A guard is a file whose flock says that somebody serves a backing, and whose
// content is that process's pid.
type guard struct {
	lock *flock.Flock
}

// takeGuard locks the file at path, which it makes. If another process has it,
// the error is a *[HeldError].
func takeGuard(path string) (*guard, error) {
	for {
		lock := flock.New(path)
		taken, err := lock.TryLock()
		if err != nil {
			return nil, fmt.Errorf("locking %s: %w", path, err)
		}
		if !taken {
			return nil, &HeldError{Pid: holder(path)}
		}
		// Whoever had it before may have removed the file meanwhile.
		mine, err := lock.Stat()
		if err == nil {
			var now os.FileInfo
			if now, err = os.Stat(path); err == nil && os.SameFile(mine, now) {
				err = os.WriteFile(path, []byte(strconv.Itoa(os.Getpid())+"\n"), 0o600)
				if err == nil {
					return &guard{lock}, nil
				}
			} else if err == nil || errors.Is(err, os.ErrNotExist) {
				lock.Close()
				continue
			}
		}
		lock.Close()
		return nil, fmt.Errorf("locking %s: %w", path, err)
	}
}

func (g *guard) close() error { return g.lock.Close() }

// remove gives the guard up and leaves no file.
func (g *guard) remove() error {
	return errors.Join(os.Remove(g.lock.Path()), g.close())
}

// holder reads the pid of the process that has the file at path locked. One
// that has the lock may not have written its pid yet: then the file is empty, or
// names a process that was killed earlier.
func holder(path string) int {
	for range 20 {
		text, _ := os.ReadFile(path)
		pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
		if err == nil && pid > 0 && !errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
			return pid
		}
		time.Sleep(10 * time.Millisecond)
	}
	return 0
}

// runtimeDir is where this user's daemons see each other whatever their state
// directories. It need not outlive a restart of the machine.
func runtimeDir() (string, error) {
	if os.Geteuid() == 0 {
		return "/run/stagefs", nil
	}
	if dir := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "stagefs"), nil
	}
	dir, err := DefaultDir()
	return filepath.Join(dir, "run"), err
}
