package filestore

import (
	"fmt"
	"strings"
	"time"
)

// setAsideOdd moves away what is no file but has the name of one of ours: to open
// a FIFO could take for ever. It tells whether there was any.
func (s *Store) setAsideOdd() (odd bool, err error) {
	entries, err := s.files()
	if err != nil {
		return false, err
	}
	for _, e := range entries {
		if name := e.Name(); !strings.Contains(name, damagedMark) && !e.Type().IsRegular() {
			aside := asideName(name)
			if err := s.dir.Rename(name, aside); err != nil {
				return odd, fmt.Errorf("setting aside what is no file: %w", err)
			}
			s.warn("%s is no regular file, set aside as %s; locks may be missing", name, aside)
			odd, s.incomplete = true, true
		}
	}
	return odd, nil
}

// setAside has a damaged file kept when its generation is replaced, and returns
// under which name.
func (s *Store) setAside(name string) string {
	aside := asideName(name)
	if s.damaged == nil {
		s.damaged = make(map[string]string)
	}
	s.damaged[name] = aside
	return aside
}

func asideName(name string) string {
	return name + damagedMark + time.Now().UTC().Format("20060102T150405.000000000Z")
}
