//go:build linux

package client

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// make makes what is missing of a directory, as the options want it, and
// returns what it made. Whether this process may is up to the kernel.
func (s *system) make(ctx context.Context, p place, c conn, opts Options) (made []string, err error) {
	if !opts.MakeParents && !opts.MustBeNew || !opts.MustBeNew && !missing(p.path) {
		return nil, nil
	}
	for opts.MakeParents && missing(filepath.Dir(p.path)) {
		// From the top down; another one may make or remove some meanwhile.
		top := filepath.Dir(p.path)
		for missing(filepath.Dir(top)) {
			top = filepath.Dir(top)
		}
		switch err := s.mkdir(ctx, p, c, opts, top); {
		case err == nil:
			made = append(made, top)
		case !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.ENOENT):
			return made, err
		}
	}
	switch err := s.mkdir(ctx, p, c, opts, p.path); {
	case err == nil:
		return append(made, p.path), nil
	case errors.Is(err, unix.EEXIST) && !opts.MustBeNew:
		return made, nil
	case errors.Is(err, unix.ENOENT) && opts.MakeParents && ctx.Err() == nil:
		more, err := s.make(ctx, p, c, opts) // the parent is gone again
		return append(made, more...), err
	default:
		return made, err
	}
}

// mkdir makes one directory, and waits for whoever has its parent if the
// options say so.
func (s *system) mkdir(ctx context.Context, p place, c conn, opts Options, path string) error {
	for {
		err := ignoringEINTR(func() error { return unix.Mkdir(path, 0o777) })
		if err == nil {
			return nil
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
	wait := "0s"
	if opts.Wait {
		wait = waitFor(ctx)
	}
	rel, _ := filepath.Rel(p.root, path)
	r, err := c.command(lenient(ctx), "wait "+word(rel)+" wait="+wait, nil)
	ended := ctx.Err()
	switch {
	case ended != nil && !errors.Is(ended, context.DeadlineExceeded):
		return false, fmt.Errorf("%w: %w", ErrFailedToLock, context.Cause(ctx))
	case err == nil && opts.Wait && ended == nil:
		return true, nil
	case errors.Is(err, unix.ENOENT) && ended == nil:
		return true, nil // a parent is gone: mkdir(2) says so
	case err == nil:
		err = unix.EBUSY // it was a moment ago
	}
	return false, r.refusal(path, err)
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
