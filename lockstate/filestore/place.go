package filestore

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// A backing is known by its key. That may change, and a copy of the backing may
// have the same.

// takeOver makes the state under the first of some keys that has one this
// store's. The lock file comes last: until then the next daemon does the rest.
func (s *Store) takeOver(keys []string) (found bool, err error) {
	for _, key := range keys {
		if info, err := s.dir.Stat(key + ".lock"); err != nil || !info.Mode().IsRegular() {
			if err == nil || errors.Is(err, os.ErrNotExist) {
				continue
			}
			return false, fmt.Errorf("locking the state: %w", err)
		}
		guard, err := s.lock(key+".lock", os.O_RDWR)
		if errors.Is(err, errLocked) {
			return false, &HeldError{}
		}
		if err != nil {
			return false, err
		}
		defer guard.Close()
		if err := s.rename(key); err != nil {
			return false, fmt.Errorf("taking over the state of %s: %w", key, err)
		}
		return true, nil
	}
	return false, nil
}

// rename gives the files under another key this store's.
func (s *Store) rename(key string) error {
	entries, err := fs.ReadDir(s.dir.FS(), ".")
	if err != nil {
		return err
	}
	for _, e := range entries {
		rest, ok := strings.CutPrefix(e.Name(), key+".")
		if !ok || rest == "lock" || !e.Type().IsRegular() {
			continue
		}
		if err := s.dir.Rename(e.Name(), s.key+"."+rest); err != nil {
			return err
		}
	}
	if err := s.syncDir(); err != nil {
		return err
	}
	if err := s.dir.Rename(key+".lock", s.key+".lock"); err != nil {
		return err
	}
	return s.syncDir()
}

// place returns what was last set with setPlace, or "".
func (s *Store) place() (string, error) { return readPlace(s.dir.Open(s.key + ".place")) }

// readPlace is place of a file that is to be opened.
func readPlace(f *os.File, err error) (string, error) {
	line, err := readLine(f, err)
	if err != nil {
		return "", fmt.Errorf("reading where the backing was: %w", err)
	}
	return line, nil
}

// readLine returns the first line of a small file that is to be opened; "" if there is none,
// or not the whole of it.
func readLine(f *os.File, err error) (string, error) {
	text, err := readSmall(f, err)
	line, _, whole := strings.Cut(string(text), "\n")
	switch {
	case errors.Is(err, os.ErrNotExist):
		return "", nil
	case err != nil || !whole:
		return "", err
	}
	return line, nil
}

// LastOpened returns the key of a state below stateDir whose place is such a one: of
// those that were not closed, the one that was opened last. It is "" if there is none.
// With an error some could not be looked at.
func LastOpened(stateDir string, is func(place string) bool) (key string, err error) {
	entries, err := os.ReadDir(stateDir)
	var last time.Time
	for _, e := range entries {
		of, ok := strings.CutSuffix(e.Name(), ".place")
		if !ok || !e.Type().IsRegular() {
			continue
		}
		line, bad := readPlace(os.Open(filepath.Join(stateDir, e.Name())))
		err = cmp.Or(err, bad)
		if line == "" || !is(line) {
			continue
		}
		guard := filepath.Join(stateDir, of+".lock")
		info, bad := os.Lstat(guard)
		err = cmp.Or(err, bad)
		if bad != nil || !info.Mode().IsRegular() || !info.ModTime().After(last) {
			continue
		}
		pid, bad := readSmall(os.Open(guard))
		err = cmp.Or(err, bad)
		if len(bytes.TrimSpace(pid)) > 0 {
			key, last = of, info.ModTime()
		}
	}
	return key, err
}

// setPlace keeps a line of text beside the state, in front of the mark of the journal,
// which is still to be read.
func (s *Store) setPlace(line string) error {
	if last, err := s.place(); line == "" || err == nil && line == last {
		return nil
	}
	if strings.Contains(line, "\n") {
		line = "" // no place is better than a wrong one
	}
	text, _ := readSmall(s.dir.Open(s.key + ".place"))
	_, mark, _ := bytes.Cut(text, []byte("\n"))
	if err := s.overwriteSynced(s.key+".place", append([]byte(line+"\n"), mark...)); err != nil {
		return fmt.Errorf("writing where the backing is: %w", err)
	}
	return nil
}
