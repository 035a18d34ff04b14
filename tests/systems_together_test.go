//go:build linux

package tests

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// TestSystemsTogether: downloaders stage the same few builds of new boards over
// and over, forced or not, and are killed with -9 now and then, alone or with
// what they started. Whoever has a build stages it to its end; at last all builds
// can be staged, and no lock is left.
func TestSystemsTogether(t *testing.T) {
	const servers, rounds = 6, 15
	s := mountSite(t, boards()...)
	ar := newArchive(t)
	var tags []string
	for i := range 6 {
		tags = append(tags, fmt.Sprintf("board%d/v%d", i%2, i))
		ar.build(tags[i])
	}
	seed := rand.Uint64()
	count := map[string]int{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i := range servers {
		random := rand.New(rand.NewPCG(seed, uint64(i)))
		wg.Go(func() {
			p := s.start("downloader.py", s.dir, ar.dir)
			for range rounds {
				request := "download " + tags[random.IntN(len(tags))]
				if random.IntN(2) == 0 {
					request += " force"
				}
				p.tell("%s", request)
				end := p.untilOver(random.IntN(12))
				if end == "destroyed" {
					t.Errorf("a downloader failed with what it has: %s", p.rest())
				}
				if end == "killed" {
					if random.IntN(2) == 0 {
						p.group.signal(syscall.SIGKILL)
					}
					p.Kill()
					p = s.start("downloader.py", s.dir, ar.dir)
				}
				mu.Lock()
				count[end]++
				mu.Unlock()
			}
			p.Kill()
		})
	}
	wg.Wait()
	t.Logf("seed %d: %v", seed, count)
	p := s.start("downloader.py", s.dir, ar.dir)
	for _, tag := range tags {
		eventually(t, tag+" is staged", func() bool { // the tar of a dead one may have a file open
			p.tell("download %s force", tag)
			return p.untilOver(0) == "staged"
		})
		s.wantNames(tag, stagedNames)
	}
	s.wantFree()
}

// untilOver reads what a downloader says about a request until it is over, or
// until it has said some lines, and it is time to kill it.
func (p *program) untilOver(lines int) (end string) {
	p.t.Helper()
	for n := 1; ; n++ {
		word, _, _ := strings.Cut(p.line(), " ")
		switch {
		case n == lines:
			return "killed"
		case oneOf(word, "refused|there|staged|destroyed"):
			return word
		}
	}
}
