//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// dataSteps are one large file, written and read in all ways.
func dataSteps() []step {
	s := func(row, kind string, before func(context.Context, *bout) error) step {
		return step{rows: []string{row}, narrow: true, before: before, run: func(ctx context.Context, b *bout) ([]timing, error) {
			return b.data(ctx, kind)
		}}
	}
	cold := func(context.Context, *bout) error { return dropCaches() }
	warm := func(ctx context.Context, b *bout) error { _, err := b.data(ctx, "read"); return err }
	first := s("write", "write", nil)
	first.prepares = true
	last := s("mmap write", "mmapwrite", nil)
	dirty := last.run
	// A file that is gone need not be written out.
	last.cleans, last.run = true, func(ctx context.Context, b *bout) ([]timing, error) {
		t, err := dirty(ctx, b)
		return t, errors.Join(err, os.Remove(filepath.Join(b.path(b.state, "data"), dataName)))
	}
	return []step{
		first,
		s("read cold", "read", cold),
		s("read warm", "read", warm),
		s("mmap read", "mmapread", warm),
		s("random read", "randomread", warm),
		s("random write", "randomwrite", warm),
		last,
	}
}

func (b *bout) data(ctx context.Context, kind string) ([]timing, error) {
	size := b.kit.size
	t, err := runLoops(ctx, b.kit.root, []job{{Kind: kind, Dir: b.path(b.state, "data"), N: size.random, Size: size.data}})
	if err != nil {
		return nil, err
	}
	info, err := os.Stat(filepath.Join(b.under(b.state, "data"), dataName))
	if err == nil && info.Size() != size.data {
		err = fmt.Errorf("%s left %d bytes, not %d", kind, info.Size(), size.data)
	}
	return t, err
}

// dropCaches makes the kernel forget all that it could read again.
func dropCaches() error { return os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0) }
