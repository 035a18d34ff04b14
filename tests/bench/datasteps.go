//go:build linux

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
)

// dataSteps are one large file, written and read in all ways. What is left
// dirty by one step is synced before the next; it is removed dirty at the end.
func dataSteps() []step {
	s := func(row, kind string, cold, prepares bool) step {
		return step{rows: []string{row}, prepares: prepares, run: func(ctx context.Context, b *bout) ([]timing, error) {
			if cold {
				if err := dropCaches(); err != nil {
					return nil, err
				}
			} else if err := b.warmData(ctx, kind); err != nil {
				return nil, err
			}
			return b.data(ctx, kind)
		}}
	}
	return []step{
		s("write 1 GiB", "write", false, true),
		s("read cold", "read", true, false),
		s("read warm", "read", false, false),
		s("mmap read", "mmapread", false, false),
		s("random read", "randomread", false, false),
		s("random write", "randomwrite", false, false),
		s("mmap write", "mmapwrite", false, false),
		{run: func(_ context.Context, b *bout) ([]timing, error) {
			return nil, os.Remove(filepath.Join(b.path(b.state, "data"), dataName))
		}, cleans: true},
	}
}

func (b *bout) data(ctx context.Context, kind string) ([]timing, error) {
	size := b.kit.size
	took, ops, err := runLoops(ctx, b.kit.root, []job{{Kind: kind, Dir: b.path(b.state, "data"), N: size.random, Size: size.data}})
	if err != nil {
		return nil, err
	}
	info, err := os.Stat(filepath.Join(b.under(b.state, "data"), dataName))
	if err == nil && info.Size() != size.data {
		err = fmt.Errorf("%s left %d bytes, not %d", kind, info.Size(), size.data)
	}
	return timings(took, ops), err
}

// warmData reads all of the file, unless it is to be written yet.
func (b *bout) warmData(ctx context.Context, kind string) error {
	if kind == "write" {
		return nil
	}
	_, err := b.data(ctx, "read")
	return err
}

// dropCaches makes the kernel forget all that it could read again.
func dropCaches() error { return os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0) }
