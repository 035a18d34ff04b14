package filestore

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Tokens returns the mark: tokens up to and including it may have been given
// out, so the next one is a higher one.
//
// It is 0 for a backing that was never served. If the file with the mark is
// damaged or gone, the mark is taken from the clock: microseconds since 1970.
// That is higher than anything before it, because tokens grow by one an
// acquisition, and acquisitions are far from a million a second; it stays below
// 2^53, which every reader of JSON can represent, until the year 2255. A clock
// that was set back is no danger as long as the times of the files that are
// left are higher.
func (s *Store) Tokens() (last uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mark
}

// Reserve raises the mark to upTo, durably. Only then may tokens up to upTo be
// given out. A mark that is as high already stays. If the state directory was removed,
// so was the mark, and the next daemon finds another one.
func (s *Store) Reserve(upTo uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dir == nil {
		return ErrClosed
	}
	if upTo <= s.mark {
		return nil
	}
	err := s.writeMarkLocked(upTo)
	if err != nil && unlinked(s.self) {
		s.mark = upTo
		return nil
	}
	return err
}

// clockSlack covers what the clock's resolution and a last block of reserved
// tokens could make up: about a second of microseconds.
const clockSlack = 1 << 20

// loadMark reads KEY.tokens, or finds a mark that is surely higher. fresh says
// that the backing was never served before.
func (s *Store) loadMark(fresh bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	name := s.key + ".tokens"
	data, err := readSmall(s.dir.Open(name))
	if err == nil {
		if mark, ok := decodeMark(data); ok {
			s.mark = mark
			return nil
		}
	}
	switch {
	case err == nil:
	case !errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("reading the token mark: %w", err)
	case fresh:
		return s.writeMarkLocked(0)
	}

	// The temporary file of a write that was cut off may still prove a mark.
	mark := s.clockMark()
	if data, err := readSmall(s.dir.Open(name + ".tmp")); err == nil {
		if proven, ok := decodeMark(data); ok {
			mark = max(mark, proven)
		}
	}
	if err == nil {
		aside := asideName(name)
		if err := s.dir.Rename(name, aside); err != nil {
			return fmt.Errorf("setting the damaged token mark aside: %w", err)
		}
		s.warn("%s is damaged, set aside as %s; tokens go on above %d", name, aside, mark)
	} else {
		s.warn("%s is missing; tokens go on above %d", name, mark)
	}
	s.incomplete = true
	return s.writeMarkLocked(mark)
}

// clockMark is a mark above all that the clock and the files' times allow for.
func (s *Store) clockMark() uint64 {
	latest := time.Now()
	if s.touched.After(latest) {
		latest = s.touched
	}
	return uint64(max(latest.UnixMicro(), 0)) + clockSlack
}

// lastTouched returns when the last of the files was changed, as far as that can be.
func (s *Store) lastTouched() (latest time.Time) {
	files, _ := s.files()
	for _, e := range files {
		if info, err := e.Info(); err == nil && info.ModTime().After(latest) && info.ModTime().Unix() < endOfMarks/1_000_000 {
			latest = info.ModTime()
		}
	}
	return latest
}

// haveRoomForMark sees to it that both files of the mark are there before the first
// token is given out: the disk may be full by then.
func (s *Store) haveRoomForMark() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.missing(s.key + ".tokens.tmp") {
		_ = s.writeMarkLocked(s.mark) // which is there, perhaps where nothing else can be made
	}
}

// writeMarkLocked writes the mark into a second file, which then changes places
// with the first: a crash at any point leaves the old mark or the new one, and
// a full disk does not stop it, since both files have their room already.
func (s *Store) writeMarkLocked(mark uint64) error {
	name := s.key + ".tokens"
	if err := s.overwriteSynced(name+".tmp", encodeMark(mark)); err != nil {
		return fmt.Errorf("writing the token mark: %w", s.named(err))
	}
	if err := s.exchange(name+".tmp", name); err != nil {
		return fmt.Errorf("writing the token mark: %w", err)
	}
	if err := s.syncDir(); err != nil {
		return fmt.Errorf("writing the token mark: %w", err)
	}
	s.mark = mark
	return nil
}

// overwriteSynced writes a file to the disk, into the blocks that it has.
func (s *Store) overwriteSynced(name string, data []byte) error {
	f, err := s.dir.OpenFile(name, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(data, 0)
	return errors.Join(err, f.Truncate(int64(len(data))), f.Sync(), f.Close())
}

// exchange swaps two files, or moves the first where the second does not exist
// or the file system cannot swap.
func (s *Store) exchange(a, b string) error {
	dir := int(s.self.Fd())
	err := unix.Renameat2(dir, a, dir, b, unix.RENAME_EXCHANGE)
	if err == unix.ENOENT || err == unix.EINVAL || err == unix.ENOSYS {
		return s.dir.Rename(a, b)
	}
	return err
}

const markHeader = "stagefs-tokens 1 "

// endOfMarks is above all marks: no daemon lives to give out so many tokens, and the
// numbers of other records than locks' are not far (lockstate.MemberBase).
const endOfMarks = 1 << 59

// encodeMark writes one line: the header, the mark, and a checksum of both.
func encodeMark(mark uint64) []byte {
	line := markHeader + strconv.FormatUint(mark, 10)
	sum := crc32.Checksum([]byte(line), castagnoli())
	return fmt.Appendf(nil, "%s %08x\n", line, sum)
}

// decodeMark accepts exactly what encodeMark writes of a mark that can be.
func decodeMark(data []byte) (mark uint64, ok bool) {
	rest, ok := bytes.CutPrefix(data, []byte(markHeader))
	if !ok {
		return 0, false
	}
	digits, _, ok := bytes.Cut(rest, []byte(" "))
	if !ok {
		return 0, false
	}
	mark, err := strconv.ParseUint(string(digits), 10, 64)
	return mark, err == nil && mark < endOfMarks && bytes.Equal(data, encodeMark(mark))
}
