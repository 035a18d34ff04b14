package filestore

import (
	"bytes"
	"hash/crc32"
	"strconv"
	"strings"
	"sync"
)

// A line of a journal or a snapshot is text:
//
//	CRC OP TOKEN [RECORD]
//
// CRC is the CRC-32C of the rest of the line in hexadecimal digits.

const (
	opPut    = 'P'
	opDelete = 'D'
	opEnd    = 'E' // of a snapshot, with the number of its records for a token
)

// lineOverhead is how much longer a line is than its record, at the most, in bytes.
const lineOverhead = len("00000000 P 18446744073709551615 \n")

const snapshotHeader = "stagefs-locks 1\n"

// castagnoli is made when it is needed: it takes 0.3 ms, which most commands
// need not spend.
var castagnoli = sync.OnceValue(func() *crc32.Table { return crc32.MakeTable(crc32.Castagnoli) })

type line struct {
	op     byte
	token  uint64
	record []byte
}

// appendLine adds a line to b.
func appendLine(b []byte, op byte, token uint64, record []byte) []byte {
	start := len(b)
	b = append(b, "00000000 "...)
	b = append(b, op, ' ')
	b = strconv.AppendUint(b, token, 10)
	if record != nil {
		b = append(b, ' ')
		b = append(b, record...)
	}
	sum := hexOf(crc32.Checksum(b[start+9:], castagnoli()))
	copy(b[start:], sum[:])
	return append(b, '\n')
}

// hexOf is Sprintf("%08x"): there may be very many lines.
func hexOf(sum uint32) (text [8]byte) {
	const digits = "0123456789abcdef"
	for i := range text {
		text[i] = digits[sum>>(28-4*i)&15]
	}
	return text
}

// newerHeader reports whether a snapshot begins as one of a later format does.
func newerHeader(data []byte) bool {
	name, _, _ := strings.Cut(snapshotHeader, " ")
	first, _, _ := bytes.Cut(data, []byte("\n"))
	digits, ok := bytes.CutPrefix(first, []byte(name+" "))
	format, err := strconv.Atoi(string(digits))
	return ok && err == nil && format > 1
}

// wholeLine returns what the checksum of a line is of, if it is right.
func wholeLine(text []byte) (rest []byte, ok bool) {
	crc, rest, ok := bytes.Cut(text, []byte(" "))
	if !ok {
		return rest, false
	}
	sum := hexOf(crc32.Checksum(rest, castagnoli()))
	return rest, bytes.Equal(crc, sum[:])
}

// intact reports whether a line is as it was written, by whatever version.
func intact(text []byte) bool {
	_, ok := wholeLine(text)
	return ok
}

// parseLine accepts what appendLine writes, without the newline. The record is a
// part of text.
func parseLine(text []byte) (l line, ok bool) {
	var err error
	rest, ok := wholeLine(text)
	if !ok || len(rest) < 3 || rest[1] != ' ' {
		return l, false
	}
	l.op = rest[0]
	token, record, has := bytes.Cut(rest[2:], []byte(" "))
	if has {
		l.record = record
	}
	l.token, err = strconv.ParseUint(string(token), 10, 64)
	return l, err == nil && has == (l.op == opPut) && (has || l.op == opDelete || l.op == opEnd)
}
