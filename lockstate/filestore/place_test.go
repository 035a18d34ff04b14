package filestore_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stagefs/stagefs/lockstate/filestore"
)

// TestOlder: state under an older key is the backing's own from then on, also
// when taking it over was cut off.
func TestOlder(t *testing.T) {
	dir := t.TempDir()
	s, err := filestore.Open(dir, filestore.Options{Key: "old"})
	if err != nil {
		t.Fatal(err)
	}
	s.Put(1, []byte(`{"token":1}`))
	if err := s.Reserve(100); err != nil {
		t.Fatal(err)
	}
	o := filestore.Options{Key: "new", Older: []string{"never", "old"}}
	if _, err := filestore.Open(dir, o); !errors.As(err, new(*filestore.HeldError)) {
		t.Errorf("Open() = %v while a daemon has the older state, want a HeldError", err)
	}
	s.Close()
	// As if it had died in the middle.
	if err := os.Rename(filepath.Join(dir, "old.tokens"), filepath.Join(dir, "new.tokens")); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		s, err := filestore.Open(dir, o)
		if err != nil {
			t.Fatal(err)
		}
		if got := s.Load(); len(got) != 1 || s.Tokens() != 100 || len(s.Warnings()) > 0 {
			t.Errorf("Load() = %v, Tokens() = %d, Warnings() = %q", got, s.Tokens(), s.Warnings())
		}
		s.Close()
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "old.*")); len(left) > 0 {
		t.Errorf("left over: %q", left)
	}
}

// TestConfirm: state that is refused is as it was.
func TestConfirm(t *testing.T) {
	dir := t.TempDir()
	first, err := filestore.Open(dir, filestore.Options{Key: "key", Place: "here"})
	if err != nil {
		t.Fatal(err)
	}
	var held *filestore.HeldError
	if _, err := filestore.Open(dir, filestore.Options{Key: "key"}); !errors.As(err, &held) || held.Place != "here" || held.Pid != os.Getpid() {
		t.Errorf("Open() = %+v, want one that is held here", err)
	}
	first.Put(1, []byte(`{"token":1}`))
	if err := first.Sync(); err != nil {
		t.Fatal(err)
	}
	copied := copyState(t, dir) // as a killed daemon leaves it
	first.Close()
	refusal := errors.New("not yours")
	o := filestore.Options{Key: "key", Place: "there", Confirm: func(last string) error {
		if last != "here" {
			t.Errorf("Confirm(%q), want here", last)
		}
		return refusal
	}}
	if _, err := filestore.Open(copied, o); err != refusal {
		t.Errorf("Open() = %v, want %v", err, refusal)
	}
	s := open(t, copied)
	if got := s.Load(); len(got) != 1 || !s.Crashed() {
		t.Errorf("Load() = %v, Crashed() = %v after a refusal", got, s.Crashed())
	}
}
