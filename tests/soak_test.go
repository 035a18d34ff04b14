//go:build linux

package tests

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

var soakFlag = flag.Duration("soak", 0, "let TestSoak stage the Go toolchain's whole src tree for so long; default: a part of it, for 6 s")

// soakTime is how long new builds are begun, and whether they are of the whole
// tree.
func soakTime(t *testing.T) (d time.Duration, whole bool) {
	t.Helper()
	if *soakFlag > 0 {
		return *soakFlag, true
	}
	if env := os.Getenv("STAGEFS_SOAK"); env != "" {
		d, err := time.ParseDuration(env)
		mustDo(t, err)
		return d, true
	}
	return 6 * time.Second, false
}

// A soak is one run of TestSoak. All that its processes share lies outside the
// mount, in dir:
//
//	src         what is staged (a part of it only in the short form)
//	live/ID     the build called ID is under way; its content is the directory
//	done/ID     the stager of ID has published it: complete, lock still held
//
// Who works on a build has its mark in live locked in shared mode meanwhile. A
// stager removes the mark and locks it exclusively before it publishes: from
// then on no rival touches the build, which after the release would be its
// right.
type soak struct {
	t     *testing.T
	m     *Mount
	dir   string
	src   source
	whole bool

	ctx   context.Context // ends when everything has to stop
	half  time.Time       // until then, kinds without a finished build are killed too
	until time.Time       // no build is begun later, and none is killed

	ops, refused, lockedOut, missed, legit atomic.Int64 // what rivals met
	kills, leaderKills                     atomic.Int64

	mu         sync.Mutex
	violations []string
	finished   []build
	builds     map[string]int // finished ones, by kind of stager
	errnos     map[string]int // what rivals heard, "ok" for a success
	freed      []time.Duration
	odd        map[string]string // answers that no rule foresees, with an example
}

// A build is one that was published and has ended its lock.
type build struct {
	kind, dir string
}

// TestSoak stages real builds with eight kinds of tools at once, while four
// rivals attack them all and stagers are killed at random.
func TestSoak(t *testing.T) {
	need(t, "root", "fuse", "/usr/bin/python3", "bash", "make", "git", "rsync", "tar", "zip", "unzip", "flock", "dotlockfile", "lockfile")
	if *soakFlag > 0 {
		t.Parallel() // beside the soak under faults
	}
	began := time.Now()
	d, whole := soakTime(t)
	s := &soak{
		t: t, m: mount(t, "--depth", "2"), dir: tempDir(t), whole: whole,
		builds: map[string]int{}, errnos: map[string]int{}, odd: map[string]string{},
	}
	defer func() { s.report(time.Since(began)) }()
	s.prepare()
	before := s.metrics()
	fdsBefore := s.descriptors()

	ctx, cancel := context.WithCancel(context.Background())
	s.ctx, s.half, s.until = ctx, time.Now().Add(d/2), time.Now().Add(d)
	defer s.watchdog(d).Stop()
	var stagers, rivals sync.WaitGroup
	a, attackers := s.anchor(), s.rivals()
	t.Cleanup(func() { cancel(); stagers.Wait(); rivals.Wait() })
	for _, r := range attackers {
		rivals.Go(func() { s.rival(r) })
	}
	for i, k := range stagerKinds() {
		stagers.Go(func() { s.stager(i, k) })
	}
	stagers.Wait()
	a.verify()
	cancel()
	rivals.Wait()
	a.conn.Close() // ends it

	s.verifyAll()
	s.verifyNothingStale()
	s.clear()
	s.verifyCounters(before)
	s.verifyDescriptors(before, fdsBefore)
}

// watchdog ends a run that hangs although no stager stands: with the daemon gone,
// every operation on the mount returns. The daemon's stacks are in its log then.
func (s *soak) watchdog(d time.Duration) *time.Timer {
	limit := d + 2*time.Minute
	if s.whole {
		limit = d + 30*time.Minute
	}
	return time.AfterFunc(limit, func() {
		s.violate("the run hangs; the daemon is made to show its stacks")
		s.m.cmd.Process.Signal(syscall.SIGQUIT)
		time.Sleep(time.Second)
		s.m.cmd.Process.Kill()
	})
}

func (s *soak) violate(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.violations = append(s.violations, fmt.Sprintf("%s: ", time.Now().Format("15:04:05.000"))+fmt.Sprintf(format, args...))
}

// path is one of the shared files outside the mount.
func (s *soak) path(rel ...string) string {
	return filepath.Join(s.dir, filepath.Join(rel...))
}

// tokens are those of the locks on dir, or with below also beneath it.
func (s *soak) tokens(dir string, below bool) []uint64 {
	var all []uint64
	for _, row := range s.m.Listing().Locks {
		if row.Dir == dir || below && strings.HasPrefix(row.Dir, dir+"/") {
			all = append(all, row.Token)
		}
	}
	return all
}

// command runs a program to its end, for at most so long.
func (s *soak) command(limit time.Duration, name string, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 2 * time.Second
	return cmd.CombinedOutput()
}

// An anchor is an agent that holds a build in each board all the time, so that
// the board's own name is never free (C1).
type anchor struct {
	*Agent
	s     *soak
	dirs  []string
	shape map[string]string
}

const soakBoards = 3

func (s *soak) anchor() *anchor {
	s.t.Helper()
	a := &anchor{Agent: agent(s.t), s: s, shape: map[string]string{}}
	for i := range soakBoards {
		board := fmt.Sprintf("board%d", i)
		dir := board + "/anchor"
		a.must("mkdir", s.m.At(board))
		a.must("mkdir", s.m.At(dir))
		a.must("mkdir", s.m.At(dir, "sub"))
		for _, name := range []string{"file", "sub/file"} {
			a.must("put", s.m.At(dir, name), "the anchor's own content\n", "creat,excl")
		}
		a.dirs = append(a.dirs, dir)
		a.shape[dir] = digest(s.t, s.m.Back(dir))
		s.mark("anchor-"+board, dir)
	}
	return a
}

func (a *anchor) verify() {
	a.s.t.Helper()
	for _, dir := range a.dirs {
		if got := digest(a.s.t, a.s.m.Back(dir)); got != a.shape[dir] {
			a.s.violate("%s changed, although it was held all the time:\n%s\nwant:\n%s", dir, got, a.shape[dir])
		}
	}
}

// mark tells rivals that a build is under way.
func (s *soak) mark(id, dir string) {
	s.t.Helper()
	part := s.path(id + ".part")
	mustDo(s.t, os.WriteFile(part, []byte(dir), 0o644))
	mustDo(s.t, os.Rename(part, s.path("live", id)))
}

// report prints the figures and fails the test if anything was wrong.
func (s *soak) report(took time.Duration) {
	s.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	slices.Sort(s.freed)
	at := func(q float64) time.Duration {
		if len(s.freed) == 0 {
			return 0
		}
		return s.freed[int(q*float64(len(s.freed)-1))].Round(100 * time.Microsecond)
	}
	total := 0
	for _, n := range s.builds {
		total += n
	}
	s.t.Logf("rivals' operations: %d: %d refused, %d locked out, %d met nothing there, %d on builds whose stager had died",
		s.ops.Load(), s.refused.Load(), s.lockedOut.Load(), s.missed.Load(), s.legit.Load())
	s.t.Logf("rivals heard: %v", s.errnos)
	s.t.Logf("finished builds: %d of %d files each: %v", total, s.src.files, s.builds)
	s.t.Logf("kills: %d of groups, %d of leaders alone; lock free after kill -9: median %v, p99 %v, max %v (of %d)",
		s.kills.Load(), s.leaderKills.Load(), at(.5), at(.99), at(1), len(s.freed))
	s.t.Logf("violations: %d; duration: %v", len(s.violations), took.Round(time.Second))
	for kind, example := range s.odd {
		s.t.Errorf("no rule foresees that a rival hears %s: %s", kind, example)
	}
	for i, v := range s.violations {
		if i == 30 {
			s.t.Errorf("and %d more", len(s.violations)-i)
			break
		}
		s.t.Errorf("violation: %s", v)
	}
	for _, k := range stagerKinds() {
		if s.builds[k.name] == 0 {
			s.t.Errorf("no build by %s was finished", k.name)
		}
	}
}
