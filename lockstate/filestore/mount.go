package filestore

import (
	"fmt"
	"os"
	"strings"
)

// NoteMount keeps a line of text that tells by which mount the backing is served, for
// after kill -9: no mount outlives a power cut.
func (s *Store) NoteMount(line string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dir == nil {
		return ErrClosed
	}
	s.shown = line
	return s.writeMountLocked()
}

// mountRoom is how long the file is at least: a line is written over another one at once.
const mountRoom = 256

func (s *Store) writeMountLocked() error {
	f, err := s.dir.OpenFile(s.key+".mount", os.O_WRONLY|os.O_CREATE, 0o600)
	if err == nil {
		defer f.Close()
		_, err = f.WriteAt(fmt.Appendf(nil, "%-*s\n", mountRoom-1, s.shown), 0)
	}
	if err != nil {
		return fmt.Errorf("writing by which mount the backing is served: %w", s.named(err))
	}
	return nil
}

// readMount returns what was last noted with NoteMount, or "".
func (s *Store) readMount() string {
	line, _ := readLine(s.dir.Open(s.key + ".mount"))
	return strings.TrimRight(line, " ")
}

// lookForAnother asks whether another state was in use since this one, see Options. That
// may have given out any tokens.
func (s *Store) lookForAnother(another func(string) bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.shown = s.readMount(); s.shown == "" || another == nil || !another(s.shown) {
		return nil
	}
	s.another, s.incomplete = true, true
	return s.writeMarkLocked(max(s.mark, s.clockMark()))
}
