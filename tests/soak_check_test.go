//go:build linux

package tests

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// verifyAll looks at the finished builds that still are once more.
func (s *soak) verifyAll() {
	s.t.Helper()
	for _, b := range s.finished {
		s.verify(b, "at the end")
	}
}

// ofLockers tells whether a name is that of a lock file, or of the temporary
// file of a locker that makes one.
func ofLockers(name string) bool {
	host, _ := os.Hostname()
	return strings.HasPrefix(name, "devserver") || strings.HasPrefix(name, ".lk") || strings.HasPrefix(name, host+"-") ||
		strings.HasPrefix(name, "_") && strings.HasSuffix(name, "."+host)
}

// litterIn finds what no release or death may leave beneath dir.
func litterIn(dir string) []string {
	var litter []string
	filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && ofLockers(d.Name()) {
			litter = append(litter, path)
		}
		return nil
	})
	return litter
}

// verifyNothingStale waits for the ends of the last owners, and then finds
// neither a lock nor a lock file.
func (s *soak) verifyNothingStale() {
	s.t.Helper()
	var l listing
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if l = s.m.Listing(); len(l.Locks)+len(l.Waiters)+len(l.Blockers) == 0 {
			break
		}
	}
	l.violations(s.violate)
	for _, path := range litterIn(s.m.Dir) {
		s.violate("left in the backing: %s", path)
	}
}

// clear removes all builds through the mount: that they are free shows once
// more, and the daemon may forget what it knew of them.
func (s *soak) clear() {
	s.t.Helper()
	out, err := s.command(10*patience, "sh", "-c", `cd "$1" && rm -rf board* rivals`, "sh", s.m.Path)
	if err != nil {
		s.violate("the builds can't be removed: %v\n%s", err, out)
	}
}

// metrics sums up .stagefs/metrics by name; a counter with labels is also
// there with them.
func (s *soak) metrics() map[string]int {
	s.t.Helper()
	b, err := os.ReadFile(s.m.control("metrics"))
	mustDo(s.t, err)
	all := map[string]int{}
	for line := range strings.Lines(string(b)) {
		var v int
		full, value, ok := strings.Cut(strings.TrimSpace(line), " ")
		if _, err := fmt.Sscan(value, &v); !ok || err != nil {
			continue
		}
		name, _, labelled := strings.Cut(full, "{")
		all[name] += v
		if labelled {
			all[full] += v
		}
	}
	return all
}

func (s *soak) verifyCounters(before map[string]int) {
	s.t.Helper()
	after := s.metrics()
	grown := func(name string) int { return after["stagefs_"+name] - before["stagefs_"+name] }
	if denied, refused := grown("denials_total"), int(s.refused.Load()); denied < refused {
		s.violate("denials_total grew by %d, but the rivals were refused %d times", denied, refused)
	}
	// An acquisition that failed half-way counts as an end of its own kind.
	taken, ended := grown("acquisitions_total"), grown("releases_total")-grown(`releases_total{reason="abandoned"}`)
	if live := after["stagefs_locks"]; taken != ended+live {
		s.violate("%d acquisitions, but %d ends and %d live locks", taken, ended, live)
	}
	s.t.Logf("counters: %d denials, %d acquisitions, %d releases, %d hand-overs, %d abandoned",
		grown("denials_total"), taken, ended, grown("handovers_total"), grown(`releases_total{reason="abandoned"}`))
}

// descriptors counts the daemon's open files by what they are.
func (s *soak) descriptors() map[string]int {
	fds := fmt.Sprintf("/proc/%d/fd", s.m.cmd.Process.Pid)
	entries, err := os.ReadDir(fds)
	if err != nil {
		s.violate("the daemon's descriptors: %v", err)
	}
	count := map[string]int{}
	for _, e := range entries {
		switch target, err := os.Readlink(filepath.Join(fds, e.Name())); {
		case err != nil:
		case target == "anon_inode:[pidfd]", strings.HasPrefix(target, "pidfd:"):
			count["pidfd"]++
		default:
			count["other"]++
		}
	}
	return count
}

// verifyDescriptors finds the daemon as small as at its start. It may keep
// descriptors of a bounded number of processes, dead ones too.
func (s *soak) verifyDescriptors(before, fdsBefore map[string]int) {
	s.t.Helper()
	const slack, processes = 24, 1024
	var after, fds map[string]int
	ok := false
	for end := time.Now().Add(patience); !ok && time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		after, fds = s.metrics(), s.descriptors()
		ok = fds["other"] <= fdsBefore["other"]+slack && fds["pidfd"] <= processes+slack &&
			after["stagefs_goroutines"] <= before["stagefs_goroutines"]+slack && after["stagefs_nodes"] <= before["stagefs_nodes"]+slack && after["stagefs_handles"] <= before["stagefs_handles"]+slack
	}
	figures := fmt.Sprintf("goroutines %d, at first %d; descriptors %v, at first %v; handles %d, at first %d; nodes %d, at first %d",
		after["stagefs_goroutines"], before["stagefs_goroutines"], fds, fdsBefore, after["stagefs_handles"], before["stagefs_handles"], after["stagefs_nodes"], before["stagefs_nodes"])
	s.t.Logf("the daemon: %s", figures)
	if !ok {
		s.violate("the daemon does not get back to its start: %s", figures)
	}
}

// violations tells of all that stands in a listing where nothing should.
func (l listing) violations(violate func(format string, args ...any)) {
	for _, row := range l.Locks {
		violate("stale lock: %+v", row)
	}
	for _, w := range l.Waiters {
		violate("stale waiter: %+v", w)
	}
	for _, b := range l.Blockers {
		violate("stale blocker: %+v", b)
	}
	for _, o := range l.Orphans {
		violate("orphan: %+v", o)
	}
}
