package filestore_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/filestore"
)

// goOn is what another program does after execve(2): the store before is there
// no more, but for its descriptors.
func goOn(t *testing.T, s *filestore.Store) *filestore.Store {
	t.Helper()
	c, err := s.Carry()
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range []*int{&c.Dir, &c.Guard} {
		if *fd, err = unix.Dup(*fd); err != nil {
			t.Fatal(err)
		}
	}
	next, err := filestore.Continue(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { next.Close() })
	return next
}

// TestContinue: another program goes on where the one before was, although the
// path of the directory leads elsewhere, and keeps the backing for itself.
func TestContinue(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	s := open(t, dir)
	if err := s.Reserve(100); err != nil {
		t.Fatal(err)
	}
	s.Put(1, []byte(`{"token":1}`))
	s.Put(2, []byte(`{"token":2}`))
	moved := dir + ".moved"
	if err := os.Rename(dir, moved); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		s = goOn(t, s)
		if got := s.Load(); len(got) != 2 || s.Tokens() != 100 || len(s.Warnings()) > 0 || s.Err() != nil {
			t.Errorf("Load() = %v, Tokens() = %d, Warnings() = %q, Err() = %v", got, s.Tokens(), s.Warnings(), s.Err())
		}
	}
	s.Delete(1)
	s.Put(3, []byte(`{"token":3}`))
	if err := s.Sync(); err != nil {
		t.Fatal(err)
	}
	if err := s.Reserve(200); err != nil {
		t.Fatal(err)
	}
	if _, err := filestore.Open(moved, filestore.Options{Key: "key"}); !errors.As(err, new(*filestore.HeldError)) {
		t.Errorf("Open beside it = %v, want a HeldError", err)
	}
	next := files{moved}.Killed(t)
	if got := next.Load(); len(got) != 2 || string(got[3]) != `{"token":3}` || next.Tokens() != 200 || len(next.Warnings()) > 0 {
		t.Errorf("Load() = %v, Tokens() = %d, Warnings() = %q", got, next.Tokens(), next.Warnings())
	}
}

// TestContinueRemoved: where nothing can be kept any more, it says so, and goes
// on trying.
func TestContinueRemoved(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	s := open(t, dir)
	if err := s.Reserve(100); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	s = goOn(t, s)
	if s.Tokens() != 100 || len(s.Warnings()) == 0 {
		t.Errorf("Tokens() = %d, Warnings() = %q", s.Tokens(), s.Warnings())
	}
	s.Put(1, []byte(`{"token":1}`))
	if s.Flush() == nil {
		t.Error("Flush() = nil in a directory that is gone")
	}
}

// TestRemovedAbove: a state directory that was removed with the one that it was in is
// made anew with that, when the store is closed at the latest.
func TestRemovedAbove(t *testing.T) {
	above := filepath.Join(t.TempDir(), "above")
	dir := filepath.Join(above, "state")
	s := open(t, dir)
	if err := s.Reserve(100); err != nil {
		t.Fatal(err)
	}
	s.Put(1, []byte(`{"token":1}`))
	if err := os.RemoveAll(above); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	next := open(t, dir)
	if got := next.Load(); len(got) != 1 || string(got[1]) != `{"token":1}` || next.Tokens() < 100 || len(next.Warnings()) > 0 {
		t.Errorf("Load() = %v, Tokens() = %d, Warnings() = %q", got, next.Tokens(), next.Warnings())
	}
}
