package fs

import (
	"iter"
	"slices"

	"github.com/stagefs/stagefs/lockstate"
)

// A kept is a record as the store has it.
type kept struct {
	token uint64
	data  []byte
}

// A seen is a record of a lock, read, with what is at its path.
type seen struct {
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
func lookAhead(root int, records []kept) iter.Seq[*seen] {
	return func(yield func(*seen) bool) {
		const some = 128
		full, free, stop := make(chan []seen, 2), make(chan []seen, 3), make(chan struct{})
		for range cap(free) {
			free <- make([]seen, 0, some)
		}
		go func() {
			defer close(full)
			near := neighbours{root: root}
			defer near.close()
			var reader lockstate.RecordReader
			for chunk := range slices.Chunk(records, some) {
				var batch []seen
				select {
				case batch = <-free:
				case <-stop:
					return
				}
				for _, r := range chunk {
					s := seen{token: r.token}
					if s.rec, s.bad = reader.Read(r.token, r.data); s.bad == nil {
						st, err := near.stat(string(s.rec.Path))
						s.inode, s.err = inodeOf(&st), err
					}
					batch = append(batch, s)
				}
				full <- batch // there is room for all
			}
		}()
		defer func() {
			close(stop)
			for range full { // until it has ended
			}
		}()
		for batch := range full {
			for i := range batch {
				if !yield(&batch[i]) {
					return
				}
			}
			free <- batch[:0]
		}
	}
}
