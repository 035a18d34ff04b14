package fs

import (
	"testing"
	"testing/synctest"
)

// TestChangeLocks: a file that is had alone keeps out who would change that, and nobody
// else; so does who waits to have it alone.
func TestChangeLocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l changeLocks
		a, same := &node{id: 1}, &node{id: 1 + uint64(len(l))}
		begin := func(n *node, alone bool) (got *bool) {
			got = new(bool)
			go func() {
				l.take(n, alone)
				*got = true
			}()
			synctest.Wait()
			return got
		}
		want := func(what string, got *bool, is bool) {
			t.Helper()
			synctest.Wait()
			if *got != is {
				t.Errorf("%s: %v", what, *got)
			}
		}
		want("the first", begin(a, false), true)
		want("another that shares it", begin(a, false), true)
		alone := begin(a, true)
		want("who wants it alone", alone, false)
		late := begin(a, false)
		want("who comes after that", late, false)
		want("who wants another alone", begin(same, true), true)
		l.give(same)
		l.give(a)
		want("who wants it alone, beside one", alone, false)
		l.give(a)
		want("who wants it alone, in the end", alone, true)
		want("who comes after, beside it", late, false)
		next := begin(a, true)
		l.give(a)
		want("the next who wants it alone", next, true)
		l.give(a)
		want("who came after, in the end", late, true)
		l.give(a)
		if n := len(l[1].busy); n != 0 {
			t.Errorf("%d are busy still", n)
		}
	})
}
