package lockstate

import (
	"iter"
	"slices"
	"strings"
)

// removedPath is that of a directory that is no more. Nothing is there by that path:
// relative ones begin with a name.
const removedPath = "/(removed)"

// path returns the directory's path relative to the root.
func (d *Dir) path() string {
	if d.parent == nil {
		if d.gone {
			return removedPath
		}
		return "."
	}
	var few [8]string
	names, size := few[:0], 0
	for e := d; e.parent != nil; e = e.parent {
		names = append(names, e.name)
		size += len(e.name) + 1
	}
	var b strings.Builder
	b.Grow(size)
	for i := len(names) - 1; i >= 0; i-- {
		b.WriteString(names[i])
		if i > 0 {
			b.WriteByte('/')
		}
	}
	return b.String()
}

// top returns the row in force on d itself.
func (d *Dir) top() *row {
	if len(d.rows) == 0 {
		return nil
	}
	return d.rows[len(d.rows)-1]
}

// locked reports whether somebody has got d itself. No directory is not.
func (d *Dir) locked() bool {
	return d != nil && slices.ContainsFunc(d.rows, func(r *row) bool { return !r.pending })
}

// governing returns the row in force on the nearest directory at or above d.
func (d *Dir) governing() *row {
	for ; d != nil; d = d.parent {
		if r := d.top(); r != nil {
			return r
		}
	}
	return nil
}

// granted is governing as if nothing were about to be acquired, or shared.
func (d *Dir) granted() *row {
	for ; d != nil; d = d.parent {
		if r := granted(d.rows); r != nil {
			return r
		}
	}
	return nil
}

// above yields the rows on d and on all directories above it.
func (d *Dir) above() iter.Seq[*row] {
	return func(yield func(*row) bool) {
		for e := d; e != nil; e = e.parent {
			for _, r := range e.rows {
				if !yield(r) {
					return
				}
			}
		}
	}
}

// inForce yields what is to be held to change something in d: the governing row and, as
// long as that is pending, the one behind it. Each may come to nothing, and those behind it
// then be in force.
func (d *Dir) inForce() iter.Seq[*row] {
	return func(yield func(*row) bool) {
		top := true
		for e := d; e != nil; e = e.parent {
			for _, r := range slices.Backward(e.rows) {
				if !top && r.kind == Shared {
					continue // as for granted
				}
				if !yield(r) || !r.pending {
					return
				}
				top = false
			}
		}
	}
}

// inForce reports whether r is one of the rows on its directory that have to be held, as
// for [Dir.inForce].
func (r *row) inForce() bool {
	for o := range r.dir.inForce() {
		if o == r || o.dir != r.dir {
			return o == r
		}
	}
	return false
}

// within reports whether d is top or beneath it.
func (d *Dir) within(top *Dir) bool {
	for ; d != nil; d = d.parent {
		if d == top {
			return true
		}
	}
	return false
}

// count adds to the counters of d and all directories above it.
func (d *Dir) count(rows, handles int) {
	for ; d != nil; d = d.parent {
		d.rowsBelow += rows
		d.handlesBelow += handles
		d.markBusy()
	}
}

// markBusy keeps the parent's set of busy children right.
func (d *Dir) markBusy() {
	p := d.parent
	busy := d.rowsBelow+d.handlesBelow > 0
	switch {
	case p == nil || busy == (d.busyAt > 0):
	case busy:
		p.busy = append(p.busy, d)
		d.busyAt = len(p.busy)
	default:
		d.markIdle()
	}
}

// markIdle takes d out of its parent's set of busy children. The array stays: the next
// one comes soon.
func (d *Dir) markIdle() {
	if d.busyAt == 0 {
		return
	}
	cut(&d.parent.busy, d.busyAt-1).busyAt = d.busyAt
	d.busyAt = 0
}

// walkRows calls f with each row at or below d until f returns false.
func (d *Dir) walkRows(f func(*row) bool) bool {
	if d.rowsBelow == 0 {
		return true
	}
	for _, r := range d.rows {
		if !f(r) {
			return false
		}
	}
	for _, c := range d.busy {
		if !c.walkRows(f) {
			return false
		}
	}
	return true
}

// walkHandles calls f with each handle at or below d until f returns false. A
// handle of a file with several links may come more than once.
func (d *Dir) walkHandles(f func(*Handle) bool) bool {
	if d.handlesBelow == 0 {
		return true
	}
	for _, h := range d.handles {
		if !f(h) {
			return false
		}
	}
	for _, c := range d.busy {
		if !c.walkHandles(f) {
			return false
		}
	}
	return true
}
