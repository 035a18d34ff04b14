package lockstate

import (
	"encoding/json"
	"strconv"
	"time"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// encode appends what json.Marshal returns. A record is written while the table
// stands still and a mkdir(2) waits, and most are of the same few fields: those
// are written without reflection.
func (rec *Record) encode(room []byte, l *lineageText) ([]byte, error) {
	if b, ok := rec.appendPlain(room, l); ok {
		return b, nil
	}
	data, err := json.Marshal(rec)
	return append(room, data...), err
}

// A lineageText is the JSON of the lineage that was last written: most locks that
// are taken one after the other are one owner's.
type lineageText struct {
	of   []procid.Ancestor // never changed
	text []byte
}

func (l *lineageText) append(b []byte, of []procid.Ancestor) []byte {
	if len(of) != len(l.of) || &of[0] != &l.of[0] {
		l.of, l.text = of, l.text[:0]
		for i, a := range of {
			sep := byte(',')
			if i == 0 {
				sep = '['
			}
			l.text = appendID(append(append(l.text, sep), `{"ID":`...), a.ID)
			l.text = append(appendTrue(l.text, `,"Reaper":true`, a.Reaper), '}')
		}
		l.text = append(l.text, ']')
	}
	return append(b, l.text...)
}

// appendPlain reports false if it cannot write a record.
func (rec *Record) appendPlain(b []byte, l *lineageText) ([]byte, bool) {
	if rec.Move != nil || rec.Instead != 0 || len(rec.Unlike) > 0 || len(rec.Members) > 0 || len(rec.Stagers) > 0 || len(rec.Foreign) > 0 {
		return nil, false
	}
	if rec.Scope != nil && !isPlain(rec.Scope.ID) {
		return nil, false
	}
	if s := rec.Lease; s != nil && (len(s.Joined) > 0 || !isPlain(s.Client) || !hasPlainYear(s.Until)) {
		return nil, false
	}
	for _, s := range []string{rec.World, string(rec.Path), rec.Protocol, string(rec.File), rec.Why, rec.OnCrash} {
		if !isPlain(s) {
			return nil, false
		}
	}
	if !hasPlainYear(rec.Since) {
		return nil, false
	}
	b = strconv.AppendUint(append(b, `{"token":`...), rec.Token, 10)
	b = appendText(b, `,"world":`, rec.World)
	b = appendText(b, `,"path":`, string(rec.Path))
	if rec.Inode != (Inode{}) {
		b = appendInode(append(b, `,"inode":`...), rec.Inode)
	}
	b = strconv.AppendUint(append(b, `,"kind":`...), uint64(rec.Kind), 10)
	b = appendText(b, `,"protocol":`, rec.Protocol)
	b = appendID(append(b, `,"owner":`...), rec.Owner)
	b = strconv.AppendUint(append(b, `,"uid":`...), uint64(rec.UID), 10)
	if len(rec.Lineage) > 0 {
		b = l.append(append(b, `,"lineage":`...), rec.Lineage)
	}
	b = appendTime(b, `,"since":`, rec.Since)
	if rec.File != "" {
		b = appendText(b, `,"file":`, string(rec.File))
	}
	for _, f := range rec.Files {
		if !isPlain(string(f)) {
			return nil, false
		}
	}
	b = appendList(b, `,"files":[`, rec.Files, func(b []byte, f Bytes) []byte { return appendText(b, "", string(f)) })
	b = appendList(b, `,"inodes":[`, rec.Inodes, appendInode)
	b = appendTrue(b, `,"keys":true`, rec.Keys)
	b = appendList(b, `,"opened":[`, rec.Opened, appendFileID)
	b = appendTrue(b, `,"command":true`, rec.Command)
	if rec.Why != "" {
		b = appendText(b, `,"why":`, rec.Why)
	}
	if rec.OnCrash != "" {
		b = appendText(b, `,"on_crash":`, rec.OnCrash)
	}
	b = appendTrue(b, `,"new":true`, rec.New)
	b = appendTrue(b, `,"changed":true`, rec.Changed)
	b = appendTrue(b, `,"revocable":true`, rec.Revocable)
	b = appendTrue(b, `,"sealed":true`, rec.Sealed)
	b = appendTrue(b, `,"fresh":true`, rec.Fresh)
	if s := rec.Scope; s != nil {
		b = strconv.AppendUint(append(b, `,"scope":{"Kind":`...), uint64(s.Kind), 10)
		b = appendText(b, `,"ID":`, s.ID)
		b = append(strconv.AppendUint(append(b, `,"Born":`...), s.Born, 10), '}')
	}
	if l := rec.Lease; l != nil {
		b = appendText(b, `,"lease":{"client":`, l.Client)
		b = strconv.AppendUint(append(b, `,"uid":`...), uint64(l.UID), 10)
		b = strconv.AppendInt(append(b, `,"ttl":`...), int64(l.TTL), 10)
		b = strconv.AppendInt(append(b, `,"deadline":`...), int64(l.Deadline), 10)
		b = append(appendTime(b, `,"until":`, l.Until), '}')
	}
	return append(b, '}'), true
}

// hasPlainYear reports whether JSON has a way to write a time down.
func hasPlainYear(t time.Time) bool {
	y := t.Year()
	return y >= 0 && y <= 9999
}

// isPlain reports whether JSON shows a text as it is.
func isPlain[T string | []byte](s T) bool {
	for i := range len(s) {
		switch c := s[i]; {
		case c < ' ' || c >= 0x7f, c == '"', c == '\\', c == '<', c == '>', c == '&':
			return false
		}
	}
	return true
}

func appendText(b []byte, key, plain string) []byte {
	b = append(append(b, key...), '"')
	return append(append(b, plain...), '"')
}

// appendList appends nothing for an empty list.
func appendList[T any](b []byte, begin string, all []T, appendOne func([]byte, T) []byte) []byte {
	for i, x := range all {
		if i == 0 {
			b = append(b, begin...)
		} else {
			b = append(b, ',')
		}
		b = appendOne(b, x)
	}
	if len(all) > 0 {
		b = append(b, ']')
	}
	return b
}

func appendTime(b []byte, key string, t time.Time) []byte {
	return append(t.AppendFormat(append(append(b, key...), '"'), time.RFC3339Nano), '"')
}

func appendID(b []byte, id procid.ID) []byte {
	b = strconv.AppendInt(append(b, `{"Pid":`...), int64(id.Pid), 10)
	b = strconv.AppendUint(append(b, `,"Start":`...), id.Start, 10)
	return append(b, '}')
}

func appendInode(b []byte, n Inode) []byte {
	b = strconv.AppendUint(append(b, `{"ino":`...), n.Ino, 10)
	b = strconv.AppendInt(append(b, `,"birth":`...), n.Birth, 10)
	return append(b, '}')
}

func appendFileID(b []byte, f FileID) []byte {
	b = strconv.AppendUint(append(b, `{"Dev":`...), f.Dev, 10)
	b = strconv.AppendUint(append(b, `,"Ino":`...), f.Ino, 10)
	b = strconv.AppendInt(append(b, `,"Birth":`...), f.Birth, 10)
	return append(b, '}')
}

func appendTrue(b []byte, text string, is bool) []byte {
	if is {
		b = append(b, text...)
	}
	return b
}
