package lockstate

import (
	"encoding/json"
	"strconv"
	"time"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// encode returns what json.Marshal does. A record is written while the table
// stands still and a mkdir(2) waits, and most are of the same few fields: those
// are written without reflection.
func (rec *Record) encode() ([]byte, error) {
	if b, ok := rec.appendPlain(make([]byte, 0, 512)); ok {
		return b, nil
	}
	return json.Marshal(rec)
}

// appendPlain reports false if it cannot write a record.
func (rec *Record) appendPlain(b []byte) ([]byte, bool) {
	if rec.Move != nil || len(rec.Opened) > 0 || len(rec.Members) > 0 || len(rec.Stagers) > 0 || len(rec.Foreign) > 0 || rec.Scope != nil || rec.Lease != nil {
		return nil, false
	}
	for _, s := range []string{rec.World, string(rec.Path), rec.Protocol, string(rec.File), rec.Why, rec.OnCrash} {
		if !isPlain(s) {
			return nil, false
		}
	}
	if y := rec.Since.Year(); y < 0 || y > 9999 {
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
	for i, a := range rec.Lineage {
		if i == 0 {
			b = append(b, `,"lineage":[`...)
		} else {
			b = append(b, ',')
		}
		b = appendID(append(b, `{"ID":`...), a.ID)
		b = append(strconv.AppendBool(append(b, `,"Reaper":`...), a.Reaper), '}')
		if i == len(rec.Lineage)-1 {
			b = append(b, ']')
		}
	}
	b = append(rec.Since.AppendFormat(append(b, `,"since":"`...), time.RFC3339Nano), '"')
	if rec.File != "" {
		b = appendText(b, `,"file":`, string(rec.File))
	}
	for i, f := range rec.Files {
		switch {
		case !isPlain(string(f)):
			return nil, false
		case i == 0:
			b = appendText(b, `,"files":[`, string(f))
		default:
			b = appendText(b, ",", string(f))
		}
		if i == len(rec.Files)-1 {
			b = append(b, ']')
		}
	}
	for i, n := range rec.Inodes {
		if i == 0 {
			b = append(b, `,"inodes":[`...)
		} else {
			b = append(b, ',')
		}
		b = appendInode(b, n)
		if i == len(rec.Inodes)-1 {
			b = append(b, ']')
		}
	}
	b = appendTrue(b, `,"keys":true`, rec.Keys)
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
	return append(b, '}'), true
}

// isPlain reports whether JSON shows a text as it is.
func isPlain(s string) bool {
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

func appendTrue(b []byte, text string, is bool) []byte {
	if is {
		b = append(b, text...)
	}
	return b
}
