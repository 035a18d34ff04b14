//go:build linux

package tests

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// TestM2WrittenWhileOpened: what somebody has written is there for all who read from
// then on, also while others open the file to read it, as each sqlite3 does before it
// opens the database.
func TestM2WrittenWhileOpened(t *testing.T) {
	need(t, "root", "fuse")
	for _, opts := range [][]string{nil, {"--no-passthrough"}, {"--transport=threads"}} {
		t.Run(strings.Join(opts, " "), func(t *testing.T) {
			m := mount(t, opts...)
			if err := writeWhileOpened(m.At("file")); err != nil {
				t.Error(err)
			}
		})
	}
}

// writeWhileOpened writes to a file and reads it back, while others open it.
func writeWhileOpened(path string) error {
	const size, at = 3 * 4096, 2 * 4096
	if err := os.WriteFile(path, make([]byte, size), 0o644); err != nil {
		return err
	}
	reader, err := os.Open(path) // so small a file is read through the page cache from now on
	if err != nil {
		return err
	}
	defer reader.Close()
	writer, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer writer.Close()

	var ended atomic.Bool
	var others sync.WaitGroup
	defer others.Wait()
	defer ended.Store(true)
	for range 2 {
		others.Go(func() {
			for !ended.Load() {
				if f, err := os.Open(path); err == nil {
					f.ReadAt(make([]byte, 25), size-25)
					f.Close()
				}
			}
		})
	}
	for n, until := 1, seconds(2); time.Now().Before(until); n++ {
		want, got := bytes.Repeat([]byte(itoa(n%10)), 4096), make([]byte, 4096)
		if _, err := writer.WriteAt(want, at); err != nil {
			return err
		}
		if _, err := writer.ReadAt(got, at); err != nil {
			return err
		}
		if !bytes.Equal(got, want) {
			return fmt.Errorf("write no. %d: %q is read, want %q", n, got[:1], want[:1])
		}
	}
	return nil
}
