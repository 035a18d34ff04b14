//go:build linux

package client

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// make makes what is missing of a directory, as the options want it, and
// returns what it made. Whether this process may is up to the kernel.
func (s *system) make(ctx context.Context, p place, c conn, opts Options) (made []string, err error) {
	if !opts.MakeParents && !opts.MustBeNew || !opts.MustBeNew && !missing(p.path) {
		return nil, nil
	}
	if err := s.noLockName(p); err != nil {
		return nil, err
	}
	for vain := 0; ; vain++ {
		// From the top down; another one may make or remove some meanwhile.
		path := p.path
		for opts.MakeParents && missing(filepath.Dir(path)) {
			path = filepath.Dir(path)
		}
		err := s.mkdir(ctx, p, c, opts, path)
		switch {
		case err == nil:
			made, vain = append(made, path), 0
		case errors.Is(err, unix.EEXIST) && (path != p.path || !opts.MustBeNew):
		case errors.Is(err, unix.ENOENT) && opts.MakeParents && vain < maxTries && ctx.Err() == nil:
			continue // the parent is gone again
		case errors.Is(err, unix.ENOENT) && opts.MakeParents:
			// What was removed in the backing may still be seen: only nothing can
			// be made in it.
			return made, fmt.Errorf("%s: %w", filepath.Dir(path), errRemoved)
		default:
			return made, err
		}
		if path == p.path {
			return made, nil
		}
	}
}

// noLockName refuses a directory of which something that is missing has a lock file's
// name: to make that would lock the directory above it, and nobody would release it.
func (s *system) noLockName(p place) error {
	var names []string
	for at, rel := p.path, p.rel; missing(at); at, rel = filepath.Dir(at), filepath.Dir(rel) {
		if !strings.Contains(rel, "/") {
			return nil // in the root, which is never locked
		}
		if names == nil {
			if names = s.names(p.root); len(names) == 0 {
				return nil
			}
		}
		for _, name := range names {
			if ok, _ := filepath.Match(name, filepath.Base(at)); ok || name == filepath.Base(at) {
				return fmt.Errorf("%s: %q is %w here, to make it would lock %s; name that directory itself",
					p.path, filepath.Base(at), ErrLockName, filepath.Dir(at))
			}
		}
	}
	return nil
}

// errRemoved: a directory is still seen, by name, that was removed.
var errRemoved = fmt.Errorf("was removed: %w", unix.ENOENT)

// maxVain is how often a name may be taken, and gone when it is looked at.
const maxVain = 8

// mkdir makes one directory, and waits for whoever has its parent if the
// options say so.
func (s *system) mkdir(ctx context.Context, p place, c conn, opts Options, path string) error {
	for vain := 0; ; {
		err := ignoringEINTR(func() error { return unix.Mkdir(path, 0o777) })
		if err == nil {
			return nil
		}
		if err == unix.EEXIST && missing(path) && ctx.Err() == nil {
			// Just removed; or a lock file's name where somebody else has the
			// directory (A8).
			if vain++; vain < maxVain {
				continue
			}
			err = unix.EBUSY
		}
		if err != unix.EBUSY {
			return &os.PathError{Op: "mkdir", Path: path, Err: err}
		}
		again, err := s.waitToMake(ctx, p, c, opts, path)
		if !again {
			return err
		}
	}
}

// waitToMake waits until it makes sense to try again to make a directory. It
// tells who is in the way otherwise.
func (s *system) waitToMake(ctx context.Context, p place, c conn, opts Options, path string) (again bool, err error) {
	rel, _ := filepath.Rel(p.root, path)
	line := func() string {
		wait := "0s"
		if opts.Wait {
			wait = waitFor(ctx)
		}
		return "wait " + word(rel) + " wait=" + wait
	}
	late, done := lenient(ctx)
	defer done()
	r, err := opts.send(late, c, line, nil)
	ended := ctx.Err()
	switch {
	case cancelled(ctx):
		return false, fmt.Errorf("%w: %w", ErrFailedToLock, context.Cause(ctx))
	case err == nil && opts.Wait && ended == nil:
		return true, nil
	case errors.Is(err, unix.ENOENT) && ended == nil:
		return true, nil // a parent is gone: mkdir(2) says so
	case err == nil:
		err = unix.EBUSY // it was a moment ago
	}
	return false, r.refusal(path, rel, err)
}

func missing(path string) bool {
	var st unix.Stat_t
	return ignoringEINTR(func() error { return unix.Lstat(path, &st) }) == unix.ENOENT
}

func ignoringEINTR(call func() error) error {
	for {
		if err := call(); err != unix.EINTR {
			return err
		}
	}
}
