package filestore

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

func (s *Store) journalName(gen uint64) string {
	return s.key + ".journal." + strconv.FormatUint(gen, 10)
}

func (s *Store) snapshotName(gen uint64) string {
	return s.key + ".locks." + strconv.FormatUint(gen, 10)
}

// loadJournal reads what an earlier daemon left, and begins a generation of its
// own with it.
func (s *Store) loadJournal() error {
	j := &s.journal
	j.store = s
	j.stop, j.done = make(chan struct{}), make(chan struct{})
	snapshots, journals, err := s.generations()
	if err != nil {
		return fmt.Errorf("reading the state: %w", err)
	}
	j.live = make(map[uint64][]byte)
	var from uint64
	if len(snapshots) > 0 {
		// An earlier one is there only if the daemon died before it could
		// remove it.
		from = snapshots[len(snapshots)-1]
		if err := s.read(s.snapshotName(from), true); err != nil {
			return err
		}
	}
	last := from
	for _, gen := range journals {
		if gen >= from {
			if err := s.read(s.journalName(gen), false); err != nil {
				return err
			}
			last = max(last, gen)
		}
	}
	j.loaded = maps.Clone(j.live)
	for _, r := range j.live {
		j.bytes += len(r)
	}
	j.gen = last
	j.writeMu.Lock()
	err = j.renewLocked()
	j.writeMu.Unlock()
	if err != nil {
		// It goes on trying; what is there now stays for the next daemon.
		s.warn("%v; locks are not kept for a restart until there is room", err)
	}
	go j.tend()
	return nil
}

func (s *Store) warn(format string, args ...any) {
	s.warnings = append(s.warnings, fmt.Sprintf(format, args...))
}

// generations returns the numbers of the snapshots and journals, ascending.
func (s *Store) generations() (snapshots, journals []uint64, err error) {
	entries, err := fs.ReadDir(s.dir.FS(), ".")
	if err != nil {
		return nil, nil, err
	}
	number := func(name, prefix string) (uint64, bool) {
		digits, ok := strings.CutPrefix(name, prefix)
		n, err := strconv.ParseUint(digits, 10, 64)
		return n, ok && err == nil
	}
	for _, e := range entries {
		if n, ok := number(e.Name(), s.key+".locks."); ok {
			snapshots = append(snapshots, n)
		}
		if n, ok := number(e.Name(), s.key+".journal."); ok {
			journals = append(journals, n)
		}
	}
	slices.Sort(snapshots)
	slices.Sort(journals)
	return snapshots, journals, nil
}

// removeGenerations removes what gen replaces.
func (s *Store) removeGenerations(gen uint64) {
	snapshots, journals, err := s.generations()
	if err != nil {
		return // the next daemon removes them
	}
	for _, n := range snapshots {
		if n < gen {
			s.dir.Remove(s.snapshotName(n))
		}
	}
	for _, n := range journals {
		if n < gen {
			s.dir.Remove(s.journalName(n))
		}
	}
}

// read applies each line of a file that is whole (S2). A lock whose line is
// damaged is lost; one whose end is damaged is still there: it ends with its
// owner, and an admin can break it.
func (s *Store) read(name string, snapshot bool) error {
	data, err := s.dir.ReadFile(name)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading the state: %w", err)
	}
	damaged := 0
	if rest, ok := bytes.CutPrefix(data, []byte(snapshotHeader)); snapshot && ok {
		data = rest
	} else if snapshot {
		damaged++
	}
	records, ended := 0, !snapshot
	for len(data) > 0 {
		text, rest, whole := bytes.Cut(data, []byte("\n"))
		l, ok := parseLine(text)
		switch {
		case !whole || !ok:
			damaged++
		case l.op == opPut:
			s.journal.live[l.token] = l.record
			records++
		case l.op == opDelete:
			delete(s.journal.live, l.token)
		case l.op == opEnd:
			ended = uint64(records) == l.token && len(rest) == 0
		}
		data = rest
	}
	if !ended {
		damaged++
	}
	if damaged > 0 {
		return s.setAside(name, damaged)
	}
	return nil
}

// setAside keeps a copy of a damaged file.
func (s *Store) setAside(name string, damaged int) error {
	aside := name + ".damaged-" + time.Now().UTC().Format("20060102T150405.000000000Z")
	if err := s.dir.Link(name, aside); err != nil {
		return fmt.Errorf("setting damaged state aside: %w", err)
	}
	s.warn("%s is damaged in %d places, set aside as %s; locks may be missing, or be listed that had ended", name, damaged, aside)
	return nil
}
