//go:build linux

package advisory_test

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"syscall"

	"github.com/stagefs/stagefs/lockstate/advisory"
)

// A linux is a state that the kernel's locks on a file may be in: fs/locks.c,
// told step by step. When one call wakes several who wait, they run in any order;
// [linux.settle] follows every one of them.
type linux struct {
	posix, flocks []*entry
	blocked       []*entry // blocked_hash: who waits behind a POSIX owner, the latest first
	woken         []*entry // and have not run yet; by id
	dying         []int    // calls of a killed process that still wait; sorted
	todo          []event  // what remains of a close or an exit

	// The table's rules: it doesn't know OFD locks from POSIX ones, and so also
	// follows the waits behind them when it looks for a deadlock. (See the package
	// comment.)
	blind bool

	// Since the last call was begun: its answer, and the waits that are over.
	answer syscall.Errno
	ended  map[int]syscall.Errno
}

// An entry is a struct file_lock: a lock, or a call that waits for one.
type entry struct {
	advisory.Lock
	id      int // of the call; 0 if held
	beneath []*entry
	blocker *entry
}

func (e *entry) ofd() bool { return !e.Flock && e.Owner < 1<<40 }

// An event is a part of a close or an exit. Those of the lowest rank come first,
// in any order.
type event struct {
	rank int
	name string
	do   func(*linux)
}

func newLinux(blind bool) []*linux {
	return []*linux{{blind: blind, ended: make(map[int]syscall.Errno)}}
}

// begin returns the state to begin another call in.
func (s *linux) begin() *linux {
	s = s.clone()
	s.answer = 0
	clear(s.ended)
	return s
}

// try is a call that doesn't wait.
func (s *linux) try(l advisory.Lock) {
	if b, _ := s.take(&entry{Lock: l}, false); b != nil {
		s.answer = syscall.EAGAIN
	}
}

// wait is a call that does: do_lock_file_wait, flock_lock_inode_wait.
func (s *linux) wait(id int, l advisory.Lock) { s.run(&entry{Lock: l, id: id}) }

// run tries e, which has just come or was woken.
func (s *linux) run(e *entry) {
	if b, errno := s.take(e, true); b == nil {
		s.wake(e) // locks_delete_block
		s.end(e, errno)
	}
}

func (s *linux) end(e *entry, errno syscall.Errno) {
	if i, dying := slices.BinarySearch(s.dying, e.id); dying {
		s.dying = slices.Delete(s.dying, i, i+1)
	} else {
		s.ended[e.id] = errno
	}
}

// take is flock_lock_inode or posix_lock_inode. It returns what e is blocked by.
func (s *linux) take(e *entry, sleep bool) (*entry, syscall.Errno) {
	if e.Flock {
		for i, l := range s.flocks {
			if l.Handle != e.Handle {
				continue
			}
			if l.Write == e.Write {
				return nil, 0
			}
			s.flocks = slices.Delete(s.flocks, i, i+1)
			s.wake(l)
			break
		}
	}
	list := &s.posix
	if e.Flock {
		list = &s.flocks
	}
	for _, l := range *list {
		if !conflict(l.Lock, e.Lock) {
			continue
		}
		if sleep {
			if !e.Flock {
				s.wake(e)
				if s.deadlock(e, l) {
					return nil, syscall.EDEADLK
				}
			}
			s.block(e, l)
		}
		return l, 0
	}
	if e.Flock {
		s.flocks = append(s.flocks, hold(e))
	} else {
		s.rewrite(e, false)
	}
	return nil, 0
}

// hold is locks_copy_lock and locks_move_blocks.
func hold(e *entry) *entry {
	l := &entry{Lock: e.Lock, beneath: e.beneath}
	for _, w := range l.beneath {
		w.blocker = l
	}
	e.beneath = nil
	return l
}

// block is __locks_insert_block.
func (s *linux) block(e, b *entry) {
next:
	for _, w := range b.beneath {
		if conflict(w.Lock, e.Lock) {
			b = w
			goto next
		}
	}
	e.blocker = b
	b.beneath = append(b.beneath, e)
	if !b.Flock && (s.blind || !b.ofd()) {
		s.blocked = slices.Insert(s.blocked, 0, e)
	}
	s.wake(e)
}

// wake is __locks_wake_up_blocks.
func (s *linux) wake(e *entry) {
	for _, w := range e.beneath {
		w.blocker = nil
		s.unhash(w)
		s.woken = append(s.woken, w)
	}
	e.beneath = nil
	slices.SortFunc(s.woken, func(a, b *entry) int { return cmp.Compare(a.id, b.id) })
}

func (s *linux) unhash(e *entry) {
	s.blocked = slices.DeleteFunc(s.blocked, func(w *entry) bool { return w == e })
}

// deadlock is posix_locks_deadlock.
func (s *linux) deadlock(e, b *entry) bool {
	for i := 0; !e.ofd() && i <= 10; i++ {
		at := slices.IndexFunc(s.blocked, func(w *entry) bool { return w.Owner == b.Owner })
		if at < 0 {
			return false
		}
		for b = s.blocked[at]; b.blocker != nil; {
			b = b.blocker
		}
		if b.Owner == e.Owner {
			return true
		}
	}
	return false
}

// rewrite is the second half of posix_lock_inode.
func (s *linux) rewrite(e *entry, unlock bool) {
	list := slices.Clone(s.posix)
	i := slices.IndexFunc(list, func(l *entry) bool { return l.Owner == e.Owner })
	if i < 0 {
		i = len(list)
	}
	drop := func() {
		s.wake(list[i])
		list = slices.Delete(list, i, i+1)
	}
	var left, right *entry
	added := false
	r := &entry{Lock: e.Lock}
loop:
	for i < len(list) && list[i].Owner == e.Owner {
		l := list[i]
		switch {
		case !unlock && l.Write == r.Write:
			if l.End+1 < r.Start {
				break
			}
			if l.Start > r.End+1 {
				break loop
			}
			l.Start, l.End = min(l.Start, r.Start), max(l.End, r.End)
			r.Start, r.End = l.Start, l.End
			if added {
				drop()
				continue
			}
			r, added = l, true
		case l.End < r.Start:
		case l.Start > r.End:
			break loop
		default:
			if unlock {
				added = true
			}
			if l.Start < r.Start {
				left = l
			}
			if l.End > r.End {
				right = l
				break loop
			}
			if l.Start >= r.Start {
				if added {
					drop()
					continue
				}
				r = hold(e)
				s.wake(l)
				list[i] = r
				added = true
			}
		}
		i++
	}
	if !added && !unlock {
		list = slices.Insert(list, i, hold(e))
	}
	if right != nil {
		if left == right {
			left = &entry{Lock: right.Lock}
			list = slices.Insert(list, i, left)
		}
		right.Start = r.End + 1
		s.wake(right)
	}
	if left != nil {
		left.End = r.Start - 1
		s.wake(left)
	}
	s.posix = list
}

func (s *linux) unlock(l advisory.Lock) {
	if !l.Flock {
		s.rewrite(&entry{Lock: l}, true)
		return
	}
	for i, h := range s.flocks {
		if h.Handle == l.Handle {
			s.flocks = slices.Delete(s.flocks, i, i+1)
			s.wake(h)
			return
		}
	}
}

// close is a close(2) of a process, of the last descriptor of each of released.
func (s *linux) close(owner uint64, released ...uint64) {
	all := advisory.Lock{Owner: owner, End: advisory.MaxEnd}
	s.todo = append(s.todo, event{0, "flush", func(s *linux) { s.unlock(all) }})
	for _, h := range released {
		all := advisory.Lock{Owner: h, Handle: h, End: advisory.MaxEnd}
		whole := all
		whole.Flock = true
		s.todo = append(s.todo,
			event{1, fmt.Sprint("ofd ", h), func(s *linux) { s.unlock(all) }},
			event{1, fmt.Sprint("flock ", h), func(s *linux) { s.unlock(whole) }})
	}
}

// kill ends the waits. A killed thread that was woken before it runs tries again
// all the same.
func (s *linux) kill(ids ...int) { s.dying = slices.Sorted(slices.Values(ids)) }

// get is posix_test_lock; own: for the type F_UNLCK.
func (s *linux) get(l advisory.Lock, own bool) (advisory.Lock, bool) {
	for _, h := range s.posix {
		if own && h.Owner == l.Owner && h.Start <= l.End && l.Start <= h.End || !own && conflict(h.Lock, l) {
			return h.Lock, true
		}
	}
	return advisory.Lock{}, false
}

// held lists the locks in their order.
func (s *linux) held() []advisory.Lock {
	var all []advisory.Lock
	for _, e := range slices.Concat(s.flocks, s.posix) {
		all = append(all, e.Lock)
	}
	return all
}

// next returns the states after each of the things that may happen next.
func (s *linux) next() []*linux {
	var all []*linux
	for i := range s.woken {
		c := s.clone()
		e := c.woken[i]
		c.woken = slices.Delete(c.woken, i, i+1)
		c.run(e)
		all = append(all, c)
	}
	for _, id := range s.dying {
		c := s.clone()
		if e := c.waiting(id); e != nil {
			i := slices.Index(e.blocker.beneath, e)
			e.blocker.beneath = slices.Delete(e.blocker.beneath, i, i+1)
			c.unhash(e)
			c.wake(e)
			c.end(e, syscall.EINTR)
			all = append(all, c)
		}
	}
	if len(s.dying) > 0 || len(s.todo) == 0 {
		return all
	}
	first := slices.MinFunc(s.todo, func(a, b event) int { return cmp.Compare(a.rank, b.rank) }).rank
	for i, e := range s.todo {
		if e.rank == first {
			c := s.clone()
			c.todo = slices.Delete(c.todo, i, i+1)
			e.do(c)
			all = append(all, c)
		}
	}
	return all
}

// waiting returns the call, nil if it is awake.
func (s *linux) waiting(id int) (found *entry) {
	s.each(func(e *entry) {
		if e.id == id && e.blocker != nil {
			found = e
		}
	})
	return found
}

// each visits all entries, a blocker before those beneath it.
func (s *linux) each(visit func(*entry)) {
	line := slices.Concat(s.flocks, s.posix, s.woken)
	for ; len(line) > 0; line = line[1:] {
		visit(line[0])
		line = append(line, line[0].beneath...)
	}
}

// settle returns the states in which nothing happens any more, nil if there are
// too many.
func settle(states []*linux) []*linux {
	const most = 20000
	seen := make(map[string]bool)
	var quiet []*linux
	for ; len(states) > 0; states = states[1:] {
		s := states[0]
		if k := s.key(); seen[k] {
			continue
		} else if seen[k] = true; len(seen) > most {
			return nil
		}
		if next := s.next(); len(next) > 0 {
			states = append(states, next...)
		} else {
			quiet = append(quiet, s)
		}
	}
	return quiet
}

func (s *linux) clone() *linux {
	to := make(map[*entry]*entry)
	s.each(func(e *entry) { to[e] = &entry{Lock: e.Lock, id: e.id} })
	list := func(from []*entry) []*entry {
		var all []*entry
		for _, e := range from {
			all = append(all, to[e])
		}
		return all
	}
	for e, c := range to {
		c.beneath = list(e.beneath)
		for _, w := range c.beneath {
			w.blocker = c
		}
	}
	return &linux{
		list(s.posix), list(s.flocks), list(s.blocked), list(s.woken),
		slices.Clone(s.dying), slices.Clone(s.todo), s.blind, s.answer, maps.Clone(s.ended),
	}
}

// key tells apart what may become of states that were one before a call.
func (s *linux) key() string {
	var b strings.Builder
	var put func(string, []*entry)
	put = func(name string, list []*entry) {
		b.WriteString(name)
		for _, e := range list {
			if e.id != 0 {
				fmt.Fprintf(&b, " %d", e.id)
			} else {
				fmt.Fprintf(&b, " %d,%d,%d,%d,%v", e.Owner, e.Pid, e.Start, e.End, e.Write)
			}
			put("<", e.beneath)
			b.WriteString(">")
		}
	}
	put("posix", s.posix)
	put(" flock", s.flocks)
	put(" woken", s.woken)
	b.WriteString(" blocked")
	for _, e := range s.blocked {
		fmt.Fprintf(&b, " %d", e.id)
	}
	for _, e := range s.todo {
		b.WriteString(" " + e.name)
	}
	fmt.Fprint(&b, s.dying, s.answer, s.ended) // fmt sorts maps
	return b.String()
}
