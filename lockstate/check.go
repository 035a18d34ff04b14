package lockstate

import (
	"errors"
	"fmt"
	"slices"
)

// Check verifies the invariants of the package comment and returns all that
// do not hold, joined. It stops the table for as long as it takes.
func (t *Table) Check() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := checker{t: t, tokens: make(map[uint64]bool), handles: make(map[*Handle]int)}
	c.dir(t.root)
	if len(c.tokens) != len(t.tokens) || int(t.rows.Load()) != len(t.tokens) {
		c.failf("I2: %d rows in the tree, %d by token, %d counted", len(c.tokens), len(t.tokens), t.rows.Load())
	}
	owned := 0
	for id, rows := range t.owners {
		for i, r := range rows {
			owned++
			if r.owner.ID() != id || t.tokens[r.token] != r || r.ownedAt != i {
				c.failf("I2: token %d is indexed under %v", r.token, id)
			}
		}
	}
	c.lines()
	taken := 0
	for _, r := range t.tokens {
		taken += r.size
	}
	if taken != t.taken {
		c.failf("I2: the rows take %d bytes, %d are counted", taken, t.taken)
	}
	if leased := int(t.leased.Load()); owned+leased != len(t.tokens) {
		c.failf("I2: %d rows by owner, %d leases, %d by token", owned, leased, len(t.tokens))
	}
	c.leases()
	c.keys()
	for h, n := range c.handles {
		if n != len(h.dirs) {
			c.failf("I5: a handle is in %d directories and names %d", n, len(h.dirs))
		}
	}
	for _, g := range t.draining {
		for op := range g.pending {
			if !op.touches(g.row.dir) {
				c.failf("I6: the grant of token %d waits for an operation elsewhere", g.row.token)
			}
		}
	}
	return errors.Join(c.errs...)
}

type checker struct {
	t       *Table
	tokens  map[uint64]bool
	handles map[*Handle]int
	errs    []error
}

func (c *checker) failf(format string, args ...any) {
	c.errs = append(c.errs, fmt.Errorf(format, args...))
}

// lines checks that each lock is in the line of its owner, which all in it lead to.
func (c *checker) lines() {
	t := c.t
	rows := make(map[*line]int)
	for _, r := range t.tokens {
		switch l := r.line; {
		case l == nil:
			if r.lease == nil && len(r.heirs) > 0 && !r.heirs[0].Reaper {
				c.failf("I2: token %d is in no line", r.token)
			}
		case t.lines.all[l.lineKey] != l || l.owner != r.owner.ID() || l.next != &r.heirs[0]:
			c.failf("I2: token %d is in another's line", r.token)
		default:
			rows[l]++
		}
	}
	inLine := 0
	for _, l := range t.lines.all {
		if l.rows != rows[l] || l.rows == 0 {
			c.failf("I2: a line of %v counts %d rows, want %d", l.owner, l.rows, rows[l])
		}
		inLine += len(l.heirs)
		for _, h := range l.heirs {
			if _, ok := t.lines.of[h.ID][l]; !ok {
				c.failf("I2: %v does not lead to a line of %v", h.ID, l.owner)
			}
		}
	}
	for _, of := range t.lines.of {
		inLine -= len(of)
	}
	if inLine != 0 {
		c.failf("I2: %d places in lines too few", inLine)
	}
}

// keys checks that the end of each descriptor lock is the end of what it keeps.
func (c *checker) keys() {
	for k, r := range c.t.keys {
		if _, lists := r.keys[k]; !lists || c.t.tokens[r.token] != r {
			c.failf("I10: token %d is found by a descriptor lock that does not keep it", r.token)
		}
	}
	for _, r := range c.t.tokens {
		for k := range r.keys {
			if !r.pending && c.t.keys[k] != r {
				c.failf("I10: token %d is not found by a descriptor lock that keeps it", r.token)
			}
			for _, id := range r.keys[k] {
				if r.openedAt(id) < 0 {
					c.failf("I10: token %d does not know what a descriptor lock that keeps it is on", r.token)
				}
			}
		}
	}
}

// leases checks that each lease ends by itself, and belongs to one client.
func (c *checker) leases() {
	t := c.t
	for i, r := range t.leases {
		if r.lease == nil || r.lease.at != i || t.tokens[r.token] != r {
			c.failf("I8: the %d-th lease is not where it should be", i)
		}
		if up := (i - 1) / 2; i > 0 && t.leases[up].lease.deadline > r.lease.deadline {
			c.failf("I8: the %d-th lease ends before its parent", i)
		}
	}
	waiting := 0
	for _, r := range t.tokens {
		switch {
		case r.lease == nil:
			continue
		case r.pending, r.sealed:
			waiting++
		case r.lease.at < 0:
			c.failf("I8: the lease of token %d never ends", r.token)
		}
		if r.lease.client == "" || r.scope.Kind != ProcessScope {
			c.failf("I9: the lease of token %d is of no client, or of a scope", r.token)
		}
		for _, o := range r.dir.rows {
			if o.pending && o.isInsteadOf(r) || r.pending && r.isInsteadOf(o) {
				continue // one of them ends when that is acquired
			}
			if o != r && o.key() == r.key() && o.kind == r.kind && !o.doomed() && !r.doomed() {
				c.failf("I9: tokens %d and %d are leases of one client on one directory", r.token, o.token)
			}
		}
	}
	if n := int(t.leased.Load()); n != len(t.leases)+waiting {
		c.failf("I8: %d leases counted, %d have a deadline, %d wait", n, len(t.leases), waiting)
	}
}

// dir checks d and what is below it and returns how many rows and handles
// there are.
func (c *checker) dir(d *Dir) (rows, handles int) {
	if d.gone {
		c.failf("I4: %q was removed and is still in the tree", d.name)
	}
	last := uint64(0)
	for _, r := range d.rows {
		if r.dir != d {
			c.failf("I2: token %d is on a directory that is not its own", r.token)
		}
		if r.token == 0 || r.token > c.t.token || c.tokens[r.token] {
			c.failf("I3: token %d is used twice or was never given out", r.token)
		}
		if r.token <= last {
			c.failf("I7: token %d is in front of %d", r.token, last)
		}
		last = r.token
		c.tokens[r.token] = true
		rows++
	}
	for i, h := range d.handles {
		c.handles[h]++
		handles++
		if at := slices.Index(h.dirs, d); at < 0 || h.at[at] != i {
			c.failf("I5: a handle in %q does not know that", d.path())
		}
	}
	for name, e := range d.children {
		if e.parent != d || e.name != name {
			c.failf("I1: %q does not lead back to its parent", name)
		}
		if busy := e.busyAt > 0; busy != (e.rowsBelow+e.handlesBelow > 0) || busy && d.busy[e.busyAt-1] != e {
			c.failf("I1: %q is marked busy: %t", name, busy)
		}
		r, h := c.dir(e)
		rows, handles = rows+r, handles+h
	}
	if rows != d.rowsBelow || handles != d.handlesBelow {
		c.failf("I1: %q counts %d rows and %d handles, has %d and %d", d.path(), d.rowsBelow, d.handlesBelow, rows, handles)
	}
	return rows, handles
}
