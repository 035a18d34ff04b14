package filestore

import (
	"os"
	"testing"
)

// TestMountNoted: what was noted last is asked about, and if it tells of another state,
// the mark goes on above all that there can have been.
func TestMountNoted(t *testing.T) {
	dir := t.TempDir()
	asked := ""
	open := func(another bool) *Store {
		t.Helper()
		s, err := Open(dir, Options{Key: "k", Another: func(mount string) bool { asked = mount; return another }})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		return s
	}
	s := open(true)
	if asked != "" || s.Another() {
		t.Errorf("asked about %q before anything was noted", asked)
	}
	for _, line := range []string{"a mount with a longer name", "a mount"} {
		if err := s.NoteMount(line); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Remove(s.Path() + ".mount"); err != nil {
		t.Fatal(err)
	}
	s.lookForFiles()
	if err := s.Reserve(7); err != nil {
		t.Fatal(err)
	}
	s.Close()
	if err := s.NoteMount("late"); err != ErrClosed {
		t.Errorf("NoteMount of a closed store: %v, want ErrClosed", err)
	}
	s = open(false)
	if asked != "a mount" || s.Another() || !s.Complete() || s.Tokens() != 7 {
		t.Errorf("asked about %q, Another() = %v, Complete() = %v, Tokens() = %d", asked, s.Another(), s.Complete(), s.Tokens())
	}
	s.Close()
	s = open(true)
	if s.Close(); !s.Another() || s.Complete() || s.Tokens() < clockSlack {
		t.Errorf("another: Another() = %v, Complete() = %v, Tokens() = %d", s.Another(), s.Complete(), s.Tokens())
	}
}
