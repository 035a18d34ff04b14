package lockstate

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// A RecordReader reads records, one after the other. What several of them have
// in common, most of all their owner's ancestors, is kept once. The zero value
// works.
type RecordReader struct {
	texts       map[string]string // worlds, protocols and such, which are few
	lineage     []procid.Ancestor // of the last record
	lineageText []byte
}

// Read reads a record that a table has put into its store.
func (x *RecordReader) Read(token uint64, data []byte) (Record, error) {
	rec, ok := x.plain(data)
	if !ok {
		odd := new(Record) // so that rec needs no memory of its own
		if err := json.Unmarshal(data, odd); err != nil {
			return *odd, fmt.Errorf("record of token %d: %w", token, err)
		}
		rec = *odd
	}
	if rec.Token != token || rec.Kind > Shared || rec.Path == "" || rec.Path == "." ||
		rec.Lease != nil && (rec.Lease.Client == "" || rec.Lease.TTL <= 0) || rec.Scope != nil && rec.Scope.Kind > CgroupScope {
		return rec, fmt.Errorf("record of token %d makes no sense", token)
	}
	return rec, nil
}

// plain reads what [Record.appendPlain] has written, without reflection: a mount
// waits until all records are read. It reports false for any other text, also for
// one that means the same.
func (x *RecordReader) plain(data []byte) (rec Record, ok bool) {
	p := plainReader{rest: data}
	p.want(`{"token":`)
	rec.Token = p.uint(64)
	p.want(`,"world":`)
	rec.World = x.common(p.text())
	p.want(`,"path":`)
	rec.Path = Bytes(p.text())
	if p.has(`,"inode":`) {
		rec.Inode = p.inode()
	}
	p.want(`,"kind":`)
	rec.Kind = Kind(p.uint(8))
	p.want(`,"protocol":`)
	rec.Protocol = x.common(p.text())
	p.want(`,"owner":`)
	rec.Owner = p.id()
	p.want(`,"uid":`)
	rec.UID = uint32(p.uint(32))
	if p.has(`,"lineage":[`) {
		rec.Lineage = x.ancestors(&p)
	}
	p.want(`,"since":`)
	rec.Since = p.time()
	if p.has(`,"file":`) {
		rec.File = Bytes(x.common(p.text()))
	}
	if p.has(`,"files":[`) {
		for more := true; more; more = p.more() {
			rec.Files = append(rec.Files, Bytes(x.common(p.text())))
		}
	}
	if p.has(`,"inodes":[`) {
		for more := true; more; more = p.more() {
			rec.Inodes = append(rec.Inodes, p.inode())
		}
	}
	rec.Keys = p.has(`,"keys":true`)
	if p.has(`,"opened":[`) {
		for more := true; more; more = p.more() {
			rec.Opened = append(rec.Opened, p.fileID())
		}
	}
	rec.Command = p.has(`,"command":true`)
	if p.has(`,"why":`) {
		rec.Why = string(p.text())
	}
	if p.has(`,"on_crash":`) {
		rec.OnCrash = x.common(p.text())
	}
	rec.New = p.has(`,"new":true`)
	rec.Changed = p.has(`,"changed":true`)
	rec.Revocable = p.has(`,"revocable":true`)
	rec.Sealed = p.has(`,"sealed":true`)
	rec.Fresh = p.has(`,"fresh":true`)
	if p.has(`,"scope":{"Kind":`) {
		s := &Scope{Kind: ScopeKind(p.uint(8))}
		p.want(`,"ID":`)
		s.ID = x.common(p.text())
		p.want(`,"Born":`)
		s.Born = p.uint(64)
		p.want(`}`)
		rec.Scope = s
	}
	if p.has(`,"lease":{"client":`) {
		l := &LeaseRecord{Client: string(p.text())}
		p.want(`,"uid":`)
		l.UID = uint32(p.uint(32))
		p.want(`,"ttl":`)
		l.TTL = time.Duration(p.int())
		p.want(`,"deadline":`)
		l.Deadline = time.Duration(p.int())
		p.want(`,"until":`)
		l.Until = p.time()
		p.want(`}`)
		rec.Lease = l
	}
	p.want(`}`)
	return rec, !p.bad && len(p.rest) == 0
}

// maxCommon bounds how many texts are kept once.
const maxCommon = 256

// common returns a text that many records have.
func (x *RecordReader) common(text []byte) string {
	if s, ok := x.texts[string(text)]; ok {
		return s
	}
	s := string(text)
	if x.texts == nil {
		x.texts = make(map[string]string)
	}
	if len(x.texts) < maxCommon {
		x.texts[s] = s
	}
	return s
}

// ancestors reads a lineage behind its first bracket.
func (x *RecordReader) ancestors(p *plainReader) []procid.Ancestor {
	if n := len(x.lineageText); n > 0 && bytes.HasPrefix(p.rest, x.lineageText) {
		p.rest = p.rest[n:]
		return x.lineage
	}
	begin := p.rest
	var all []procid.Ancestor
	for more := true; more; more = p.more() {
		p.want(`{"ID":`)
		a := procid.Ancestor{ID: p.id()}
		a.Reaper = p.has(`,"Reaper":true`)
		p.want(`}`)
		all = append(all, a)
	}
	if !p.bad {
		x.lineage, x.lineageText = all, append(x.lineageText[:0], begin[:len(begin)-len(p.rest)]...)
	}
	return all
}

// A plainReader reads text from left to right, until something is not as it is
// to be.
type plainReader struct {
	rest []byte
	bad  bool
}

func (p *plainReader) fail() {
	p.bad, p.rest = true, nil
}

// has takes a text, if it comes next.
func (p *plainReader) has(text string) bool {
	if len(p.rest) < len(text) || string(p.rest[:len(text)]) != text {
		return false
	}
	p.rest = p.rest[len(text):]
	return true
}

func (p *plainReader) want(text string) {
	if !p.has(text) {
		p.fail()
	}
}

// more reports whether another element of a list follows.
func (p *plainReader) more() bool {
	if p.has(",") {
		return true
	}
	p.want("]")
	return false
}

// uint takes a number as strconv writes it.
func (p *plainReader) uint(bits int) (v uint64) {
	n := 0
	for n < len(p.rest) && p.rest[n]-'0' <= 9 {
		d := uint64(p.rest[n] - '0')
		if v > (math.MaxUint64-d)/10 {
			p.fail()
			return 0
		}
		v = v*10 + d
		n++
	}
	if n == 0 || n > 1 && p.rest[0] == '0' || v>>(bits-1)>>1 != 0 {
		p.fail()
		return 0
	}
	p.rest = p.rest[n:]
	return v
}

func (p *plainReader) int() int64 {
	n := 0
	for n < len(p.rest) && (p.rest[n]-'0' <= 9 || p.rest[n] == '-' && n == 0) {
		n++
	}
	v, err := strconv.ParseInt(string(p.rest[:n]), 10, 64)
	if err != nil || p.rest[0] == '0' && n > 1 || p.rest[0] == '-' && p.rest[1] == '0' {
		p.fail()
		return 0
	}
	p.rest = p.rest[n:]
	return v
}

// text takes a string that isPlain.
func (p *plainReader) text() []byte {
	p.want(`"`)
	end := bytes.IndexByte(p.rest, '"')
	if end < 0 || !isPlain(p.rest[:end]) {
		p.fail()
		return nil
	}
	text := p.rest[:end]
	p.rest = p.rest[end+1:]
	return text
}

func (p *plainReader) time() (t time.Time) {
	// As JSON does it, which is stricter than time.Parse.
	if err := t.UnmarshalText(p.text()); err != nil {
		p.fail()
	}
	return t
}

func (p *plainReader) id() (id procid.ID) {
	p.want(`{"Pid":`)
	id.Pid = int(p.int())
	p.want(`,"Start":`)
	id.Start = p.uint(64)
	p.want(`}`)
	return id
}

func (p *plainReader) fileID() (f FileID) {
	p.want(`{"Dev":`)
	f.Dev = p.uint(64)
	p.want(`,"Ino":`)
	f.Ino = p.uint(64)
	p.want(`,"Birth":`)
	f.Birth = p.int()
	p.want(`}`)
	return f
}

func (p *plainReader) inode() (n Inode) {
	p.want(`{"ino":`)
	n.Ino = p.uint(64)
	p.want(`,"birth":`)
	n.Birth = p.int()
	p.want(`}`)
	return n
}
