//go:build linux

package tests

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
)

// TestDevserverNested: a nested tag is locked as a whole, by its server, and a
// second server stages another version of the same new board meanwhile.
func TestDevserverNested(t *testing.T) {
	for _, opts := range [][]string{nil, boards()} {
		t.Run(strings.Join(opts, " "), func(t *testing.T) {
			onSites(t, opts, func(s *site) {
				a, b := s.start("devserver.py", s.dir), s.start("devserver.py", s.dir)
				a.ask("acquire board/R1/full", "acquired board/R1/full")
				a.ask("put board/R1/full image x", "put")
				s.wantHeld("board/R1/full", a)
				b.ask("acquire board/R2/full", "acquired")
				b.ask("put board/R2/full image x", "put")
				s.wantHeld("board/R2/full", b)
				a.ask("release board/R1/full", "released")
				b.ask("release board/R2/full", "released")
				s.wantNames("board", "R1 R1/full R1/full/image R2 R2/full R2/full/image")
				s.wantFree()
			})
		})
	}
}

// TestDevserverOutside: a tag that leaves the static directory is refused, and
// nothing is made anywhere.
func TestDevserverOutside(t *testing.T) {
	onSites(t, boards(), func(s *site) {
		outside := tempDir(t)
		mustDo(t, os.Symlink(outside, s.under("out")))
		mustDo(t, os.Symlink("..", s.under("up")))
		before := digest(t, s.back)
		p := s.start("devserver.py", s.dir)
		for _, tag := range []string{"../x", "/etc/x", "a/../../x", "", ".", "a/..", outside + "/x", "out/x", "up/x", s.dir + "-x", ".."} {
			for _, how := range []string{"", " revisit"} {
				p.ask(fmt.Sprintf("acquire '%s'%s", tag, how), "refused "+tag)
			}
			p.ask(fmt.Sprintf("release '%s' destroy", tag), "refused "+tag)
		}
		if after := digest(t, s.back); after != before {
			t.Errorf("refused, but changed:\n%s", diff(before, after))
		}
		if entries, _ := os.ReadDir(outside); len(entries) > 0 {
			t.Errorf("made outside: %v", entries)
		}
		p.ask("acquire a/../b/v", "acquired") // this one does not leave it
		s.wantHeld("b/v", p)
		p.ask("release b/v destroy", "released")
		s.wantFree()
	})
}

// TestDevserverMustBeNew: a directory that exists is refused, unless it may be
// revisited; then it keeps its content. It survives the refusal.
func TestDevserverMustBeNew(t *testing.T) {
	onSites(t, boards(), func(s *site) {
		a, b := s.start("devserver.py", s.dir), s.start("devserver.py", s.dir)
		a.ask("acquire board/v", "acquired")
		a.ask("put board/v one 1", "put")
		a.ask("release board/v", "released")
		for _, p := range []*program{a, b} {
			p.ask("acquire board/v", "refused board/v cannot acquire: FileExistsError")
		}
		s.wantNames("board", "v v/one")
		s.wantFree()
		b.ask("acquire board/v revisit", "acquired")
		b.ask("put board/v two 2", "put")
		s.wantHeld("board/v", b)
		a.ask("acquire board/v revisit", "refused board/v cannot acquire: AlreadyLocked")
		a.ask("acquire board/v", "refused board/v cannot acquire: FileExistsError")
		b.ask("release board/v", "released")
		s.wantNames("board", "v v/one v/two")
		a.ask("acquire board/new revisit", "acquired") // it need not exist
		a.ask("release board/new", "released")
		s.wantFree()
	})
}

// TestDevserverBreaks: a server that releases by the lock's name leaves its temporary
// file. It comes again all the same, and hears that somebody has the lock if so.
func TestDevserverBreaks(t *testing.T) {
	onSites(t, boards(), func(s *site) {
		a, b := s.start("devserver.py", s.dir), s.start("devserver.py", s.dir)
		for i, p := range []*program{a, b, a} {
			other := map[*program]*program{a: b, b: a}[p]
			p.ask("acquire board/v revisit", "acquired")
			p.ask(fmt.Sprintf("put board/v image %d", i), "put")
			for range 2 { // the first one takes what is left of its own away
				other.ask("acquire board/v revisit", "refused board/v cannot acquire: AlreadyLocked")
			}
			s.wantHeld("board/v", p)
			p.ask("break board/v", "broken")
			s.wantNames("board", "v v/image")
		}
		b.ask("acquire board/v revisit", "acquired")
		b.ask("break board/v destroy", "broken")
		s.wantNames("board", "")
		s.wantFree()
	})
}

// TestDevserverOneWins: of several servers, each with several threads, that all
// want one tag, one gets it; the others hear the same as ever.
func TestDevserverOneWins(t *testing.T) {
	const servers, threads, rounds = 6, 3, 5
	onSites(t, boards(), func(s *site) {
		var all []*program
		for range servers {
			all = append(all, s.start("devserver.py", s.dir))
		}
		for round := range rounds {
			tag := fmt.Sprintf("board%d/v", round)
			winners := make([]int, servers)
			var wg sync.WaitGroup
			for i, p := range all {
				for range threads {
					p.tell("acquire %s", tag)
				}
				wg.Go(func() {
					for range threads {
						line, err := p.out.ReadString('\n')
						switch {
						case err == nil && strings.HasPrefix(line, "acquired"):
							winners[i]++
						case err != nil || !strings.HasPrefix(line, "refused"):
							t.Errorf("server %d said %q, %v", i, line, err)
						}
					}
				})
			}
			wg.Wait()
			winner, count := -1, 0
			for i, n := range winners {
				if count += n; n > 0 {
					winner = i
				}
			}
			if count != 1 {
				t.Fatalf("%s was acquired by %v", tag, winners)
			}
			s.wantHeld(tag, all[winner])
			all[winner].ask("put "+tag+" image x", "put")
			all[winner].ask("release "+tag, "released")
			s.wantNames(tag, "image")
		}
		s.wantFree()
	})
}

// TestDevserverFails: a failure between mkdir and lock removes the directory,
// and the next one makes it; nobody gets in between.
func TestDevserverFails(t *testing.T) {
	onSites(t, boards(), func(s *site) {
		a, b := s.start("devserver.py", s.dir), s.start("devserver.py", s.dir)
		a.tell("pause made")
		a.ask("acquire board/v", "at made")
		s.wantHeld("board/v", a)
		b.ask("acquire board/v", "refused board/v cannot acquire: FileExistsError")
		a.ask("fail made no space", "refused board/v cannot acquire: OSError: no space")
		s.wantNames("", "board")
		b.ask("acquire board/v", "acquired")
		b.ask("put board/v image x", "put")
		s.wantHeld("board/v", b)
		b.ask("release board/v", "released")

		// What it did not make, it does not remove.
		a.tell("pause made")
		a.ask("acquire board/v revisit", "at made")
		a.ask("fail made no space", "refused")
		s.wantNames("board", "v v/image")
		s.wantFree()
	})
}

// TestDevserverOvertaken: who is overtaken between mkdir and lock destroys what
// the other one staged meanwhile; on a mount nobody overtakes.
func TestDevserverOvertaken(t *testing.T) {
	onSites(t, boards(), func(s *site) {
		a, b := s.start("devserver.py", s.dir), s.start("devserver.py", s.dir)
		a.tell("pause made")
		a.ask("acquire board/v", "at made")
		if s.m == nil {
			b.ask("acquire board/v revisit", "acquired")
			b.ask("put board/v image x", "put")
			a.ask("go made", "refused board/v cannot acquire: AlreadyLocked")
			s.wantNames("", "board") // and with it all that b staged
			return
		}
		b.ask("acquire board/v revisit", "refused board/v cannot acquire: AlreadyLocked")
		s.wantHeld("board/v", a)
		a.ask("go made", "acquired")
		s.wantHeld("board/v", a)
		a.ask("release board/v", "released")
		s.wantFree()
	})
}

// TestDevserverRelease: each request has a thread of its own, so the lock is
// released by another thread than took it. The content is kept or destroyed.
func TestDevserverRelease(t *testing.T) {
	onSites(t, boards(), func(s *site) {
		a, b := s.start("devserver.py", s.dir), s.start("devserver.py", s.dir)
		for _, tag := range []string{"board/kept", "board/gone"} {
			a.ask("acquire "+tag, "acquired")
			a.ask("put "+tag+" image x", "put")
			// Somebody else's is not released.
			b.ask("release "+tag+" destroy", "refused "+tag+" cannot release: NotMyLock")
			s.wantHeld(tag, a)
		}
		a.ask("release board/kept", "released")
		a.ask("release board/gone destroy", "released")
		s.wantNames("board", "kept kept/image")
		for _, tag := range []string{"board/kept", "board/gone", "board/never"} {
			a.ask("release "+tag, "refused "+tag+" cannot release: NotLocked")
		}
		s.wantFree()
		b.ask("acquire board/gone", "acquired")
		b.ask("acquire board/kept revisit", "acquired")
		s.wantHeld("board/gone", b)
		s.wantHeld("board/kept", b)
		b.ask("release board/gone destroy", "released")
		b.ask("release board/kept destroy", "released")
		s.wantNames("", "board")
		s.wantFree()
	})
}

// TestDevserverDestroysLate: the server gives up the lock first and removes the
// directory then. Who takes it in between loses what he stages; on a mount he
// keeps it, and the remover is refused.
func TestDevserverDestroysLate(t *testing.T) {
	onSites(t, boards(), func(s *site) {
		a, b := s.start("devserver.py", s.dir), s.start("devserver.py", s.dir)
		a.ask("acquire board/v", "acquired")
		a.ask("put board/v one 1", "put")
		a.tell("pause released")
		a.ask("release board/v destroy", "at released")
		b.ask("acquire board/v revisit", "acquired")
		b.ask("put board/v two 2", "put")
		s.wantHeld("board/v", b)
		if s.m == nil {
			a.ask("go released", "released")
			s.wantNames("board", "")
			return
		}
		before := digest(t, s.under("board"))
		a.ask("go released", "refused board/v cannot release: OSError: [Errno 16]")
		if after := digest(t, s.under("board")); after != before {
			t.Errorf("refused, but changed:\n%s", diff(before, after))
		}
		b.ask("release board/v", "released")
		s.wantFree()
	})
}
