//go:build linux

package tests

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"time"
)

// keepBuilds is how many finished builds stay until the end. Older ones are
// verified again and removed.
const keepBuilds = 16

// stager stages one build after the other with one kind of tool, until time is
// up and one is finished.
func (s *soak) stager(n int, k stagerKind) {
	board := fmt.Sprintf("board%d", n%soakBoards)
	version, took, resume := 1, 8*time.Second, false
	for i := 1; s.ctx.Err() == nil; i++ {
		last := time.Now().After(s.until)
		if last && s.countOf(k) > 0 {
			return
		}
		name := strings.ReplaceAll(k.name, " ", "-")
		a := &attempt{s: s, kind: k, id: fmt.Sprintf("%s-%d", name, i), dir: fmt.Sprintf("%s/%s-%d", board, name, version)}
		began := time.Now()
		finished := a.run(s.killAfter(k, i, took))
		switch {
		case finished:
			took = (took + time.Since(began)) / 2
			version++
			resume = false
		case k.resumes && !resume:
			resume = true // the next attempt finds what this one left
		default:
			resume = false
			a.remove(a.dir)
		}
		if last && !finished {
			return
		}
	}
}

// killAfter is when a stager is to be killed, 0 for never: the first of each
// kind soon, and others at any time, often in the middle of an acquisition.
func (s *soak) killAfter(k stagerKind, attempt int, took time.Duration) time.Duration {
	var after time.Duration
	switch n := rand.IntN(10); {
	case s.countOf(k) == 0 && time.Now().After(s.half):
		return 0
	case attempt == 1:
		after = time.Duration(rand.Int64N(int64(4 * time.Second)))
	case n < 2:
		after = time.Duration(rand.Int64N(int64(60 * time.Millisecond)))
	case n < 5:
		after = time.Duration(rand.Int64N(int64(took + took/10)))
	}
	if time.Now().Add(after).After(s.until) {
		return 0
	}
	return after
}

func (s *soak) countOf(k stagerKind) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.builds[k.name]
}

// keep verifies a finished build, and again an old one in whose place it comes.
func (s *soak) keep(b build) {
	s.verify(b, "when finished")
	s.mu.Lock()
	s.builds[b.kind]++
	s.finished = append(s.finished, b)
	var old build
	if len(s.finished) > keepBuilds {
		old, s.finished = s.finished[0], s.finished[1:]
	}
	s.mu.Unlock()
	if old.dir != "" {
		s.verify(old, "later")
		a := &attempt{s: s, id: "cleaner"}
		a.remove(old.dir)
	}
}
