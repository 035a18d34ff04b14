package filestore

import (
	"bytes"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// A journalMark tells how much of which journal was on the disk once: what ends before
// that was cut off, also where no line is torn. It is kept in KEY.place, behind the
// first line.
type journalMark struct {
	gen  uint64
	size int64
}

const opMark = 'M'

// noteMark writes down how much of the journal is on the disk, for a power cut as well:
// whichever mark is there then, the journal is no shorter.
func (j *journal) noteMark() {
	j.writeMu.Lock()
	m, noted := j.onDisk, j.noted
	j.writeMu.Unlock()
	if m == noted {
		return
	}
	f, err := j.store.dir.OpenFile(j.store.key+".place", os.O_RDWR|unix.O_NONBLOCK, 0)
	if err != nil {
		return // or the next time
	}
	defer f.Close()
	text := make([]byte, maxSmall)
	n, _ := f.ReadAt(text, 0)
	first := bytes.IndexByte(text[:n], '\n')
	if first < 0 {
		return
	}
	line := appendLine(nil, opMark, m.gen, strconv.AppendInt(nil, m.size, 10))
	_, err = f.WriteAt(line, int64(first+1))
	if err == nil {
		err = f.Sync()
	}
	if err == nil {
		j.writeMu.Lock()
		j.noted = m
		j.writeMu.Unlock()
	}
}

// markOfJournal returns what was last noted so, the zero journalMark if that can't be told.
func (s *Store) markOfJournal() (m journalMark) {
	text, _ := readSmall(s.dir.Open(s.key + ".place"))
	_, text, _ = bytes.Cut(text, []byte("\n"))
	text, _, _ = bytes.Cut(text, []byte("\n"))
	if rest, ok := wholeLine(text); ok {
		_, _ = fmt.Sscanf(string(rest), string(opMark)+" %d %d", &m.gen, &m.size)
	}
	return m
}

// of returns how much of a journal was on the disk, in bytes; -1: that was not noted.
func (m journalMark) of(gen uint64) int64 {
	if gen != m.gen {
		return -1
	}
	return m.size
}
