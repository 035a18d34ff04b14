//go:build linux

package client

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A path that is on no stagefs mount is refused clearly, also where something
// looks like a control directory.
func TestFindNotStagefs(t *testing.T) {
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, controlDir), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, controlDir, "ctl"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{dir, filepath.Join(dir, "a", "b"), "/", "/proc/self", "."} {
		_, err := Find(path)
		if !errors.Is(err, ErrNotStagefs) || !strings.Contains(err.Error(), path) {
			t.Errorf("Find(%s) = %v, want ErrNotStagefs", path, err)
		}
		if _, err := Acquire(t.Context(), path, Options{}); !errors.Is(err, ErrNotStagefs) {
			t.Errorf("Acquire(%s) = %v, want ErrNotStagefs", path, err)
		}
	}
	if err := os.Symlink("nowhere", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"", filepath.Join(dir, "link"), filepath.Join(dir, "link", "x"), filepath.Join(dir, controlDir, "ctl", "x")} {
		if _, err := Find(path); err == nil || errors.Is(err, ErrNotStagefs) || !strings.Contains(err.Error(), strings.TrimSuffix(path, "/x")) {
			t.Errorf("Find(%q) = %v, want another error, which names it", path, err)
		}
	}
}

// A call that blocks ends when its context does; one that does not is left
// behind, and cleared away when it ends.
func TestInterruptible(t *testing.T) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(p[0])
	defer unix.Close(p[1])
	before := runtime.NumGoroutine()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	f := &ctlFile{fd: p[0]}
	late, err := f.interruptible(ctx, func() error {
		_, err := unix.Poll([]unix.PollFd{{Fd: int32(p[0]), Events: unix.POLLIN}}, -1)
		return err
	}, func(error) {})
	if !errors.Is(err, context.DeadlineExceeded) || late {
		t.Errorf("interruptible = %v, late: %v", err, late)
	}

	ctx, cancel = context.WithCancel(t.Context())
	cleared, end := make(chan error), make(chan struct{})
	late, err = f.interruptible(ctx, func() error { cancel(); <-end; return nil }, func(err error) { cleared <- err })
	if !errors.Is(err, context.Canceled) || !late || f.fd != -1 {
		t.Fatalf("interruptible = %v, late: %v", err, late)
	}
	close(end)
	if err := <-cleared; err != nil {
		t.Errorf("what was left behind ended with %v", err)
	}
	for range 1000 {
		if runtime.NumGoroutine() <= before {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Errorf("%d goroutines are left", runtime.NumGoroutine()-before)
}
