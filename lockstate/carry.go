package lockstate

import (
	"encoding/binary"
	"errors"
	"iter"
	"maps"
	"slices"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// What of a table goes on in another process. Nothing may be in flight, nor
// begin, from the first of these calls on.

// A CarriedRow is a lock with all that a record leaves out. Its keys are the
// caller's.
type CarriedRow struct {
	Record  Record
	LostKey bool
	Settled bool
	Fresh   bool
	Unknown bool
	Known   []FileID
}

// CarryRows returns all locks, for [CarriedRows]: there may be very many, so most
// are text, and only what that cannot show is in rows. ok is false while one is
// half-way: about to begin, or its content being cleared away.
func (t *Table) CarryRows() (text []byte, rows []CarriedRow, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var line []byte
	for _, token := range slices.Sorted(maps.Keys(t.tokens)) {
		r := t.tokens[token]
		if r.pending || r.sealed || r.leaving {
			return nil, nil, false
		}
		rec := t.recordLocked(r)
		rec.Members, rec.Move = slices.Collect(maps.Keys(r.members)), nil
		rec.Stagers = slices.Collect(maps.Keys(r.stagers))
		if r.lease != nil {
			rec.Lease.Joined = slices.Collect(maps.Keys(r.lease.joined))
		}
		rec.Foreign = nil
		row := CarriedRow{
			Record: rec, LostKey: r.lostKey, Settled: r.settled == nil,
			Fresh: r.content.fresh, Unknown: r.content.unknown, Known: slices.Collect(maps.Keys(r.content.known)),
		}
		var plain bool
		if line, plain = rec.appendPlain(line[:0], &t.lineage); plain && len(row.Known) == 0 {
			text = binary.AppendUvarint(text, uint64(len(line)))
			var bits byte
			for i, is := range row.flags() {
				if *is {
					bits |= 1 << i
				}
			}
			text = append(append(text, line...), bits)
		} else {
			rows = append(rows, row)
		}
	}
	return text, rows, true
}

// flags are the bits of the byte behind a line of the text, from the lowest on.
func (c *CarriedRow) flags() [4]*bool {
	return [...]*bool{&c.LostKey, &c.Settled, &c.Fresh, &c.Unknown}
}

var errRows = errors.New("what another table has written down of its locks makes no sense")

// CarriedRows returns what CarryRows was about, in the order of the tokens, until
// something cannot be read.
func CarriedRows(text []byte, rows []CarriedRow) iter.Seq2[CarriedRow, error] {
	return func(yield func(CarriedRow, error) bool) {
		var reader RecordReader
		for len(text) > 0 {
			size, n := binary.Uvarint(text)
			if n <= 0 || size >= uint64(len(text)-n) {
				yield(CarriedRow{}, errRows)
				return
			}
			line, bits := text[n:][:size], text[n:][size]
			text = text[n:][size+1:]
			rec, ok := reader.plain(line)
			if !ok {
				yield(CarriedRow{}, errRows)
				return
			}
			for len(rows) > 0 && rows[0].Record.Token < rec.Token {
				if !yield(rows[0], nil) {
					return
				}
				rows = rows[1:]
			}
			row := CarriedRow{Record: rec}
			for i, is := range row.flags() {
				*is = bits&(1<<i) != 0
			}
			if !yield(row, nil) {
				return
			}
		}
		for _, row := range rows {
			if !yield(row, nil) {
				return
			}
		}
	}
}

// A CarriedKey is a descriptor lock, and the files that it is on. An earlier version does not
// say which these are.
type CarriedKey struct {
	Key   any
	Files []FileID
}

// EachKey calls f with each descriptor lock and the token of what it keeps. f must
// not call the table.
func (t *Table) EachKey(f func(token uint64, key CarriedKey)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for key, r := range t.keys {
		f(r.token, CarriedKey{key, r.keys[key]})
	}
}

// HasToken reports whether there is a lock with the given token.
func (t *Table) HasToken(token uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.tokens[token] != nil
}

// TakeUpRow puts a lock back that another process had, with the keys that keep
// it.
func (t *Table) TakeUpRow(c CarriedRow, path []string, owner *procid.Process, keys []CarriedKey) error {
	files := make([]string, 0, len(c.Record.Files))
	for _, f := range c.Record.Files {
		files = append(files, string(f))
	}
	if owner == nil || owner.ID() != c.Record.Owner {
		return ErrNobody
	}
	d := t.At(path...)
	defer t.Forget(d)
	t.mu.Lock()
	defer t.mu.Unlock()
	r, err := t.restoreLocked(c.Record, d, owner, files)
	if err != nil {
		return err
	}
	for _, k := range keys {
		t.rekeyLocked(r, k.Key, k.Files)
	}
	r.lost = slices.DeleteFunc(r.lost, func(id FileID) bool { return r.openedAt(id) >= 0 })
	if r.lostKey = c.LostKey; !r.lostKey { // else which of them are lost is not known
		r.open(r.lost) // an earlier version has not said what of
		r.lost = nil
	}
	if c.Settled {
		r.settle()
	}
	r.content = content{fresh: c.Fresh, unknown: c.Unknown}
	for _, id := range c.Known {
		r.content.note(id)
	}
	t.noteLocked(r)
	return nil
}

// Flush makes what was taken up outlive the daemon.
func (t *Table) Flush() { t.flush() }

// LastToken returns the last token that was given out.
func (t *Table) LastToken() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.token
}

// TakeUpTokens goes on with what another table had reserved: last is the last
// token that it gave out. It is called before all else.
func (t *Table) TakeUpTokens(last uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.token = min(t.token, last)
}

// TakeUpStats goes on counting where another table stopped.
func (t *Table) TakeUpStats(s Stats) {
	t.mu.Lock()
	defer t.mu.Unlock()
	maps.Copy(t.stats.Acquired, s.Acquired)
	maps.Copy(t.stats.Ended, s.Ended)
	maps.Copy(t.stats.Cleared, s.Cleared)
	t.stats.HandedOver, t.stats.Refused = s.HandedOver, s.Refused
}

// A CarriedHandle is an open handle.
type CarriedHandle struct {
	Owner     procid.ID // zero: nobody (H4)
	UID       uint32
	Chain     []procid.ID
	Name      string
	Under     uint64
	Leases    []uint64 // see Handle
	Revocable bool
	Revoked   bool
}

// Carry returns what another process needs to go on with the handle.
func (h *Handle) Carry() CarriedHandle {
	h.t.mu.Lock()
	defer h.t.mu.Unlock()
	return CarriedHandle{
		Owner: h.proc.ID(), UID: h.proc.UID(), Chain: h.proc.Ancestors(), Name: h.name,
		Under: h.under, Leases: slices.Clone(h.leases), Revocable: h.revocable, Revoked: h.revoked.Load(),
	}
}

// TakeUpHandle puts a handle back. dirs are where its file has a name.
func (t *Table) TakeUpHandle(c CarriedHandle, p *procid.Process, dirs []*Dir) *Handle {
	h := &Handle{t: t, proc: p, name: c.Name, under: c.Under, revocable: c.Revocable}
	h.revoked.Store(c.Revoked)
	t.mu.Lock()
	defer t.mu.Unlock()
	if !c.Revoked {
		for _, d := range dirs {
			h.enterLocked(d)
		}
	}
	for _, token := range c.Leases {
		t.revokeByLocked(h, token)
	}
	return h
}

// GoneDir returns a directory that was removed, with a reference.
func (t *Table) GoneDir() *Dir { return &Dir{refs: 1, gone: true} }
