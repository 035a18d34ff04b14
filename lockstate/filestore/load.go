package filestore

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
)

func (s *Store) journalName(gen uint64) string {
	return s.key + ".journal." + strconv.FormatUint(gen, 10)
}

func (s *Store) snapshotName(gen uint64) string {
	return s.key + ".locks." + strconv.FormatUint(gen, 10)
}

// loadJournal reads what an earlier daemon left, and goes on with it: a snapshot
// takes long where there are many locks, and everybody waits. Where anything is
// not as it ought to be, a generation is begun. fresh: there was none.
func (s *Store) loadJournal(fresh bool) error {
	j := &s.journal
	j.begin(s)
	whole, err := s.readJournal(fresh)
	if err != nil {
		return err
	}
	j.seq, j.written = 1, 1 // what was written last may not be on disk
	if whole && len(s.damaged) == 0 && j.goOnWithRoom() == nil {
		s.removeGenerations(j.base)
	} else if err := s.named(j.renew(nil)); err != nil {
		// It goes on trying; what is there now stays for the next daemon.
		var goesOn error
		j.writeMu.Lock()
		if j.file == nil {
			goesOn = j.goOnLocked()
		}
		if goesOn == nil {
			j.stale = true
			s.warn("%v; the last journal goes on, and locks are kept for a restart as long as there is room in it", err)
		} else {
			j.failLocked(err)
			s.warn("%v; locks are not kept for a restart until there is room", err)
		}
		j.writeMu.Unlock()
	}
	go j.tend()
	return nil
}

// resumeJournal goes on with generation gen, which the program before had.
func (s *Store) resumeJournal(gen uint64) error {
	j := &s.journal
	j.begin(s)
	_, err := s.readJournal(true) // what is in force is known
	if errors.Is(err, ErrNewer) {
		return err
	}
	j.gen = max(j.gen, gen)
	j.seq, j.written = 1, 1 // what was written last may not be on disk
	j.writeMu.Lock()
	defer j.writeMu.Unlock()
	if err == nil {
		err = j.goOnLocked()
		j.stale = len(s.damaged) > 0
	}
	if err != nil {
		// The next generation is begun in a moment, when all is put again.
		j.failLocked(err)
		s.warn("%v; locks are not kept for a restart until the state can be written again", err)
	}
	s.tidy()
	go j.tend()
	return nil
}

// goOnWithRoom is goOnLocked with more room than the last daemon made: a full disk
// is told of before it matters.
func (j *journal) goOnWithRoom() error {
	j.writeMu.Lock()
	defer j.writeMu.Unlock()
	if err := j.goOnLocked(); err != nil {
		return err
	}
	return j.makeRoomLocked(j.size + 2*ahead)
}

// goOnLocked extends the last of the journals that were read. The caller holds
// writeMu.
func (j *journal) goOnLocked() error {
	for _, f := range j.behind {
		f.Close() // of a try that failed
	}
	j.behind = nil
	for gen := j.base; gen < j.gen; gen++ {
		f, err := j.store.dir.Open(j.store.journalName(gen))
		switch {
		case err == nil:
			j.behind = append(j.behind, f)
		case !errors.Is(err, os.ErrNotExist):
			return fmt.Errorf("going on with a journal: %w", err)
		}
	}
	return j.extendLocked()
}

// begin makes j an empty journal, without a file.
func (j *journal) begin(s *Store) {
	j.store, j.live = s, make(map[uint64][]byte)
	j.stop, j.done = make(chan struct{}), make(chan struct{})
}

// readJournal reads the records of the last generation, or of those that a
// daemon has left that died while it began one. whole: there is a snapshot and
// each journal since. fresh: it is no surprise if there is nothing.
func (s *Store) readJournal(fresh bool) (whole bool, err error) {
	j := &s.journal
	if _, err := s.setAsideOdd(); err != nil {
		return false, err
	}
	snapshots, journals, err := s.generations()
	if err != nil {
		return false, err
	}
	var from uint64
	if len(snapshots) > 0 {
		// An earlier one is there only if the daemon died before it could
		// remove it.
		from = snapshots[len(snapshots)-1]
		s.expect([]string{s.snapshotName(from), s.journalName(from)})
		if err := s.read(s.snapshotName(from), true, -1, false); err != nil {
			return false, err
		}
	}
	j.gen, j.base = from, from
	whole = len(snapshots) > 0 && slices.Contains(journals, from)
	if missing := s.missingOf(snapshots, journals); missing != "" && !fresh {
		s.incomplete = true
		s.warn("%s is missing; so may be locks", missing)
	}
	if whole {
		j.snapshot, _ = s.dir.Lstat(s.snapshotName(from))
	}
	mark := s.markOfJournal()
	for i, gen := range journals {
		if gen >= from {
			if err := s.read(s.journalName(gen), false, mark.of(gen), s.empty(journals[i+1:])); err != nil {
				return false, err
			}
			whole = whole && gen <= j.gen+1
			j.gen = gen
		}
	}
	j.loaded, j.shared = j.live, true
	for _, r := range j.live {
		j.bytes += len(r)
	}
	return whole, nil
}

// missingOf returns a file that was there by the names of the others, or "".
func (s *Store) missingOf(snapshots, journals []uint64) string {
	if len(journals) == 0 {
		return s.journalName(max(1, slices.Max(append(snapshots, 1))))
	}
	from := journals[0]
	if n := len(snapshots); n > 0 {
		from = snapshots[n-1] // which gets its name when its journal is there
	} else if from > 1 { // the first one's is made later
		return s.snapshotName(from)
	}
	for gen := from; gen <= max(from, journals[len(journals)-1]); gen++ {
		if !slices.Contains(journals, gen) {
			return s.journalName(gen)
		}
	}
	return ""
}

// expect makes room for the records of some files.
func (s *Store) expect(names []string) {
	const record = 450 // bytes of one, about
	size := int64(0)
	for _, name := range names {
		if info, err := s.dir.Stat(name); err == nil {
			size += info.Size()
		}
	}
	s.journal.live = make(map[uint64][]byte, min(size/record, 1<<20))
}

// empty reports whether nothing was written into some journals.
func (s *Store) empty(journals []uint64) bool {
	return !slices.ContainsFunc(journals, func(gen uint64) bool {
		info, err := s.dir.Stat(s.journalName(gen))
		return err != nil || info.Size() > 0
	})
}

func (s *Store) warn(format string, args ...any) {
	s.warnings = append(s.warnings, fmt.Sprintf(format, args...))
}

// files returns what is there under the store's key.
func (s *Store) files() ([]fs.DirEntry, error) {
	entries, err := fs.ReadDir(s.dir.FS(), ".")
	if err != nil {
		return nil, fmt.Errorf("reading the state: %w", err)
	}
	return slices.DeleteFunc(entries, func(e fs.DirEntry) bool { return !strings.HasPrefix(e.Name(), s.key+".") }), nil
}

// generations returns the numbers of the snapshots and journals, ascending.
func (s *Store) generations() (snapshots, journals []uint64, err error) {
	entries, err := s.files()
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

// removeGenerations removes what gen replaces, but for what is damaged.
func (s *Store) removeGenerations(gen uint64) {
	snapshots, journals, err := s.generations()
	if err != nil {
		return // the next daemon removes them
	}
	remove := func(name string) {
		if aside, ok := s.damaged[name]; !ok || s.dir.Rename(name, aside) != nil {
			s.remove(name)
		}
	}
	for _, n := range snapshots {
		if n < gen {
			remove(s.snapshotName(n))
		}
	}
	for _, n := range journals {
		if n < gen {
			remove(s.journalName(n))
		}
	}
	s.damaged = nil
	s.tidy()
}

// keepDamaged is how many of the files that were set aside are kept.
const keepDamaged = 8

// tidy removes what a daemon has left that died while it wrote a snapshot, and
// all but the newest of what was set aside.
func (s *Store) tidy() {
	entries, err := s.files()
	if err != nil {
		return // the next daemon does so
	}
	var aside []string
	when := func(name string) string { _, t, _ := strings.Cut(name, damagedMark); return t }
	for _, e := range entries {
		name := e.Name()
		switch {
		case when(name) != "":
			aside = append(aside, name)
		case strings.HasPrefix(name, s.key+".locks.") && strings.HasSuffix(name, ".tmp"):
			s.dir.Remove(name)
		}
	}
	slices.SortFunc(aside, func(a, b string) int { return strings.Compare(when(b), when(a)) })
	for _, name := range aside[min(keepDamaged, len(aside)):] {
		s.dir.Remove(name)
	}
}

// read applies each line of a file that is whole (S2). A lock whose line is
// damaged is lost; one whose end is damaged is still there: it ends with its
// owner, and an admin can break it. synced is how much of it was on the disk, in bytes, -1
// if that is not known, and last says that nothing was written later.
func (s *Store) read(name string, snapshot bool, synced int64, last bool) error {
	f, err := s.dir.Open(name)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading the state: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return fmt.Errorf("reading the state: %w", err)
	}
	size := info.Size()
	damaged, torn := 0, false
	records, ended := 0, !snapshot
	var room recordRoom
	for l := range parsed(f, snapshot) {
		ended = ended && !snapshot // nothing follows the end
		switch {
		case l.err != nil:
			return fmt.Errorf("reading the state: %w", l.err)
		case l.is == lineCutOff && last && (l.blank == 0 || synced >= 0):
			torn = true
			size -= l.blank
		case l.is == lineNewer:
			return fmt.Errorf("%s: %w", name, ErrNewer)
		case l.is != lineGood:
			damaged++
		case l.op == opPut:
			s.journal.live[l.token] = room.keep(s.journal.live[l.token], l.record)
			records++
		case l.op == opDelete:
			delete(s.journal.live, l.token)
		case l.op == opEnd && snapshot:
			ended = uint64(records) == l.token
		case l.op == opEnd:
			damaged++
		}
	}
	if !ended {
		damaged++
	}
	if size < synced {
		damaged++
	}
	switch {
	case damaged > 0:
		s.incomplete = true
		places := "one place"
		if damaged > 1 {
			places = fmt.Sprintf("%d places", damaged)
		}
		s.warn("%s is damaged in %s, set aside as %s; locks may be missing, or be listed that had ended", name, places, s.setAside(name))
	case torn:
		// Nobody had been told that this one was kept (Flush).
		s.warn("%s ends in the middle of a line, as a kill or a power cut leaves it; set aside as %s; nothing is missing that was answered before", name, s.setAside(name))
	}
	return nil
}

const damagedMark = ".damaged-"
