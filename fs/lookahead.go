package fs

import (
	"iter"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/prefetch"
)

// A storedRecord is a record as the store has it.
type storedRecord struct {
	token uint64
	data  []byte
}

// A readRecord is a lock's record that was read, with what is at its path.
type readRecord struct {
	token uint64
	rec   lockstate.Record
	bad   error // the record cannot be read
	inode lockstate.Inode
	err   error // there is no directory at its path, or it cannot be looked at
}

// lookAhead reads the records of locks, in the given order, and looks at their
// directories while the caller puts locks back: on another processor if there is
// one, since everybody waits for the mount. What it hands out is valid until the
// next one. It is for a while in which nobody changes the backing.
func (fs *FS) lookAhead(records []storedRecord) iter.Seq[*readRecord] {
	return func(yield func(*readRecord) bool) {
		const some = 128
		near := neighbours{root: fs.back.root}
		defer near.close()
		var reader lockstate.RecordReader
		rest := records
		for batch := range prefetch.Batches(func(b *[]readRecord) (more bool) {
			now := rest[:min(some, len(rest))]
			rest = rest[len(now):]
			*b = (*b)[:0]
			for _, r := range now {
				s := readRecord{token: r.token}
				if s.rec, s.bad = reader.Read(r.token, r.data); s.bad == nil {
					st, err := near.stat(string(s.rec.Path))
					s.inode, s.err = fs.inodeOf(&st), err
				}
				*b = append(*b, s)
			}
			return len(rest) > 0
		}) {
			for i := range *batch {
				if !yield(&(*batch)[i]) {
					return
				}
			}
		}
	}
}
