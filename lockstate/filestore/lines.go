package filestore

import (
	"bufio"
	"bytes"
	"io"
	"iter"
	"os"

	"github.com/stagefs/stagefs/lockstate/prefetch"
)

// What a line may be.
const (
	lineGood   = iota
	lineNewer  // as it was written, by a newer version
	lineCutOff // the last one, without its end
	lineDamaged
)

// A parsedLine is a line of a file, or why there are no more.
type parsedLine struct {
	line
	is    int
	blank int64 // bytes at the end of one that is cut off that have no text, as after a power cut
	err   error
}

// parsed returns the lines of a file, which it reads on another processor if there
// is one: everybody waits for a mount. Of a snapshot's first line only what is wrong
// with it is told. What it hands out is valid until the next one.
func parsed(f io.Reader, snapshot bool) iter.Seq[parsedLine] {
	return func(yield func(parsedLine) bool) {
		const some = 512
		p := lineParser{in: lineReader{r: bufio.NewReaderSize(f, 256<<10)}, header: snapshot}
		for batch := range prefetch.Batches(func(b *parsedLines) (more bool) {
			b.lines, b.text = b.lines[:0], b.text[:0]
			for more = true; len(b.lines) < some && more; {
				more = p.next(b)
			}
			return more
		}) {
			for _, l := range batch.lines {
				if !yield(l) {
					return
				}
			}
		}
	}
}

// A lineParser parses the lines of a file.
type lineParser struct {
	in     lineReader
	header bool // of a snapshot comes next
}

// parsedLines are some lines, and the text that they are of.
type parsedLines struct {
	lines []parsedLine
	text  []byte
}

func (b *parsedLines) add(l parsedLine) { b.lines = append(b.lines, l) }

// next adds what the next line is. It reports whether more follow.
func (p *lineParser) next(b *parsedLines) (more bool) {
	text, whole, err := p.in.next()
	if err != nil {
		b.add(parsedLine{err: err})
		return false
	}
	if p.header {
		p.header = false
		if newerHeader(text) {
			b.add(parsedLine{is: lineNewer})
			return false
		}
		if whole && string(text)+"\n" == snapshotHeader {
			return true
		}
		b.add(parsedLine{is: lineDamaged})
	}
	if !whole && len(text) == 0 {
		return false
	}
	l := parsedLine{}
	ok := false
	l.line, ok = parseLine(text)
	written := bytes.TrimRight(text, "\x00")
	switch {
	case !whole && bytes.IndexByte(written, 0) < 0:
		l.is, l.blank = lineCutOff, int64(len(text)-len(written))
	case whole && !ok && intact(text):
		l.is = lineNewer
	case !whole || !ok:
		l.is = lineDamaged
	case l.record != nil:
		at := len(b.text)
		b.text = append(b.text, l.record...)
		l.record = b.text[at:]
	}
	b.add(l)
	return true
}

// A recordRoom is where the records are that are read, which are many: some share a
// block of memory, and one that comes again stays where it was if it fits.
type recordRoom struct{ room []byte }

// keep returns a copy of a record, which takes the place of an earlier one; nil:
// there was none.
func (r *recordRoom) keep(earlier, record []byte) []byte {
	if len(record) <= cap(earlier) {
		return append(earlier[:0], record...)
	}
	const block, slack = 4 << 10, 63 // a record comes again with little more in it
	if len(record) == 0 || len(record) > block/4 {
		return bytes.Clone(record)
	}
	size := (len(record) + slack) &^ slack
	if cap(r.room)-len(r.room) < size {
		r.room = make([]byte, 0, block)
	}
	at := len(r.room)
	r.room = r.room[:at+size]
	return append(r.room[at:at:at+size], record...)
}

// maxLine is more than a line can have: what is in a record is bounded. A damaged file
// may seem to be larger than the memory.
const maxLine = 64 << 20

// A lineReader reads lines. Of one that is longer than maxLine it drops what is in the
// middle: then its checksum is wrong.
type lineReader struct {
	r    *bufio.Reader
	long []byte
}

// next returns a line without its end, until the next call; whole: it has one.
// Behind the last one is an empty one that has none.
func (l *lineReader) next() (text []byte, whole bool, err error) {
	text, err = l.r.ReadSlice('\n')
	if err == bufio.ErrBufferFull {
		l.long = l.long[:0]
		for err == bufio.ErrBufferFull {
			if len(l.long) < maxLine {
				l.long = append(l.long, text...)
			}
			text, err = l.r.ReadSlice('\n')
		}
		l.long = append(l.long, text...)
		text = l.long
	}
	text, whole = bytes.CutSuffix(text, []byte("\n"))
	if err == io.EOF {
		err = nil
	}
	return text, whole, err
}

// readSmall reads a file that has one line, once it is open.
func readSmall(f *os.File, err error) ([]byte, error) {
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxSmall))
}

// maxSmall is more than such a file has.
const maxSmall = 64 << 10
