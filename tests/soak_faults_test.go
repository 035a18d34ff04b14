//go:build linux

package tests

import (
	"bufio"
	"bytes"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stagefs/stagefs/lockstate"
)

// A faultSoak is one run of TestSoakFaults.
type faultSoak struct {
	t     *testing.T
	m     *Mount
	dir   string // outside the mount
	slots []string
	stop  chan struct{}
	calm  time.Time // no daemon is killed from then on

	mu         sync.Mutex
	violations []string
	up         time.Time         // since when a daemon has answered without a break
	tokens     map[string]uint64 // the highest that an event told of, by directory
	books      map[string]*book
	kills      map[string]int
	outages    []time.Duration
	stale      time.Duration // the longest that a lock or waiter outlived its process
	events     int
	samples    []sample
	through    []hit
}

// A hit is an attack that went through, on a file that may just have lost its
// last name: then it concerned nobody.
type hit struct {
	name   string
	attack int
}

// A book is what the journal of one worker says.
type book struct {
	path   string
	read   int64
	state  byte           // of its last line
	at     time.Time      // when that was seen first
	tried  map[string]int // files that it may have written, with their size
	wrote  map[string]int // files that it has
	gone   map[string]bool
	ops    int
	taken  int // directories
	refuse int
	done   bool // its worker is dead, and it is read to the end
}

// A sample is how big the daemon was.
type sample struct {
	pid, files, goroutines, memory int
}

const soakSlots = 6

// TestSoakFaults lets processes take directories in all ways, write and give
// them up, while others attack them, and while holders, waiters and the daemon
// are killed at random, and the daemon is stopped. Where writing needs a lock
// (W4), what is in the backing can be accounted for to the last byte: the oracle
// knows from journals outside the mount what was tried and what was
// acknowledged.
func TestSoakFaults(t *testing.T) {
	need(t, "root", "fuse")
	d := 8 * time.Second
	if *soakFlag > 0 {
		t.Parallel() // beside the stagers
		d = *soakFlag
	}
	began := time.Now()
	opts := []string{"--supervise", "--depth", "2", "--unlocked", "deny"}
	img, err := tryImage(t, 512)
	static := ""
	if err != nil {
		t.Logf("the backing never runs full: %v", err)
		static = staticDir(t)
	} else {
		static = img.static()
	}
	s := &faultSoak{
		t: t, m: mountDir(t, static, filepath.Join(tempDir(t), "mnt"), opts...), dir: tempDir(t), stop: make(chan struct{}),
		books: map[string]*book{}, kills: map[string]int{}, tokens: map[string]uint64{},
	}
	s.calm = began.Add(d * 2 / 3)
	mustDo(t, os.Mkdir(filepath.Join(s.dir, "witness"), 0o777))
	openDir(t, s.m.Back("b"))
	for i := range soakSlots {
		slot := "b/S" + itoa(i)
		openDir(t, s.m.Back(slot))
		s.slots = append(s.slots, slot)
	}
	s.up = time.Now()

	var workers, watchers sync.WaitGroup
	for i, kind := range []string{"excl", "link", "mkdir", "flock", "flock waits", "flock waits", "lease", "lease", "run", "run", "rival", "rival"} {
		workers.Go(func() { s.employ(i, kind) })
	}
	watchers.Go(s.killDaemons)
	watchers.Go(s.readEvents)
	watchers.Go(s.watchStale)
	watchers.Go(s.watchBacking)
	if img != nil {
		watchers.Go(func() { s.fillUp(filepath.Join(img.Dir, "hog")) })
	}
	time.Sleep(d)
	close(s.stop)
	workers.Wait()
	done := make(chan struct{})
	go func() { watchers.Wait(); close(done) }()
	for waiting := true; waiting; {
		// Who reads events waits for one.
		startCmd(t, exec.Command("sh", "-c", `mkdir "$0/last"; rmdir "$0/last"; exit 3`, s.m.Path)).Wait()
		select {
		case <-done:
			waiting = false
		case <-time.After(50 * time.Millisecond):
		}
	}

	s.account(true)
	s.nothingStale()
	s.grown()
	s.report(time.Since(began))
}

func (s *faultSoak) over() bool { return isShut(s.stop) }

// pause waits, and reports false when the run is over.
func (s *faultSoak) pause(d time.Duration) bool {
	select {
	case <-s.stop:
		return false
	case <-time.After(d):
		return true
	}
}

func (s *faultSoak) violate(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.violations = append(s.violations, time.Now().Format("15:04:05.000 ")+fmt.Sprintf(format, args...))
}

func (s *faultSoak) count(what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kills[what]++
}

// employ starts one worker of a kind after the other, and kills most of them.
func (s *faultSoak) employ(n int, kind string) {
	for i := 0; !s.over(); i++ {
		path := filepath.Join(s.dir, fmt.Sprintf("journal-%d-%d", n, i))
		spec := workerSpec{Kind: kind, Mount: s.m.Path, Slots: s.slots, Journal: path, Witness: filepath.Join(s.dir, "witness")}
		cmd := exec.Command(agentBin())
		if kind == "run" {
			spec.Slots = []string{s.slots[rand.IntN(len(s.slots))]}
			cmd = exec.Command(stagefsBin(), "run", "-w", "20s", filepath.Join(s.m.Path, spec.Slots[0]), agentBin())
		}
		text, _ := json.Marshal(spec)
		cmd.Env = append(os.Environ(), envWorker+"="+string(text))
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		var said bytes.Buffer
		cmd.Stderr = &said
		// The oracle knows of the journal before there is anything in it.
		b := &book{path: path, at: time.Now(), tried: map[string]int{}, wrote: map[string]int{}, gone: map[string]bool{}}
		s.mu.Lock()
		s.books[path] = b
		s.mu.Unlock()
		if err := cmd.Start(); err != nil {
			s.violate("starting a worker: %v", err)
			return
		}
		ended := make(chan struct{})
		go func() { cmd.Wait(); close(ended) }()
		life := time.Duration(rand.Int64N(int64(1500 * time.Millisecond)))
		if kind == "rival" {
			life *= 8
		}
		select {
		case <-ended:
		case <-time.After(life):
		case <-s.stop:
		}
		select {
		case <-ended:
		default:
			s.mu.Lock()
			s.readBook(b)
			state := b.state
			s.mu.Unlock()
			cmd.Process.Kill()
			<-ended
			switch {
			case kind == "rival":
				s.count("rivals")
			case state == 'w', kind == "run" && state == 0:
				s.count("waiters")
			case strings.IndexByte("HTWdD", state) >= 0:
				s.count("holders")
			default:
				s.count("others")
			}
		}
		if kind != "run" { // whose command may live for a moment longer
			s.mu.Lock()
			s.readBook(b)
			b.done = true
			s.mu.Unlock()
		}
		for _, bad := range []string{"panic", "fatal error"} {
			if strings.Contains(said.String(), bad) {
				s.violate("a worker (%s): %.1000s", kind, said.String())
			}
		}
		// What `run` has started dies with it.
		for end := time.Now().Add(patience); kind == "run"; time.Sleep(5 * time.Millisecond) {
			if len(pidsWithEnv(envWorker+"="+string(text))) == 0 {
				break
			}
			if time.Now().After(end) {
				s.violate("the command of a killed run goes on")
				return
			}
		}
	}
}

// killDaemons kills the daemon, and stops it for a moment, until it is to be
// calm. The supervisor gives up on a daemon that never lives long.
func (s *faultSoak) killDaemons() {
	for i := 0; time.Now().Before(s.calm); i++ {
		life := time.Duration(100+rand.IntN(900)) * time.Millisecond
		if i%4 == 3 {
			life = 3 * time.Second
		}
		if !s.pause(life) || time.Now().After(s.calm) {
			return
		}
		pid := s.m.daemon()
		if pid == 0 {
			s.violate("no daemon answers %v after the last kill", life)
			return
		}
		if i%4 == 1 {
			s.upgrade(pid)
			continue
		}
		if i%5 == 4 {
			syscall.Kill(pid, syscall.SIGSTOP)
			s.pause(time.Duration(rand.IntN(400)) * time.Millisecond)
			s.mu.Lock()
			s.up = time.Now()
			s.mu.Unlock()
			syscall.Kill(pid, syscall.SIGCONT)
			s.count("stops of the daemon")
			continue
		}
		killed := time.Now()
		s.mu.Lock()
		s.up = time.Time{}
		s.mu.Unlock()
		syscall.Kill(pid, syscall.SIGKILL)
		for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
			if now := s.m.daemon(); now != 0 && now != pid {
				break
			}
			if time.Now().After(end) {
				s.violate("no daemon answers %v after kill -9 of the one before: %s", patience, s.m.Log())
				return
			}
		}
		s.mu.Lock()
		s.up = time.Now()
		s.kills["daemons"]++
		s.outages = append(s.outages, time.Since(killed))
		s.mu.Unlock()
	}
}

// upgrade has the daemon replaced in place.
func (s *faultSoak) upgrade(pid int) {
	before := s.m.goneOn()
	out, err := exec.Command(stagefsBin(), "mount", "--replace", s.m.Path).CombinedOutput()
	s.mu.Lock()
	s.up = time.Now()
	s.mu.Unlock()
	switch now := s.m.daemon(); {
	case err != nil && strings.Contains(string(out), "try again"):
		s.count("upgrades put off")
	case err != nil:
		s.violate("mount --replace: %v: %s", err, out)
	case now != pid || s.m.goneOn() <= before:
		s.violate("mount --replace of daemon %d: now %d serves: %s", pid, now, out)
	default:
		s.count("upgrades")
	}
}

// fillUp fills the backing to the last block for a moment, now and then.
func (s *faultSoak) fillUp(path string) {
	for s.pause(time.Second + time.Duration(rand.IntN(3000))*time.Millisecond) {
		if err := hog(path); err != nil {
			s.violate("%v", err)
		}
		s.count("full disks")
		s.pause(time.Duration(rand.IntN(300)) * time.Millisecond)
		os.Remove(path)
	}
}

// readEvents follows the events of one daemon after the other: tokens of
// acquisitions grow.
func (s *faultSoak) readEvents() {
	for !s.over() {
		f, err := os.Open(s.m.control("events"))
		if err != nil {
			s.pause(5 * time.Millisecond)
			continue
		}
		done := make(chan struct{})
		go func() { // a read waits for the next event
			select {
			case <-s.stop:
				f.Close()
			case <-done:
			}
		}()
		for in := bufio.NewScanner(f); in.Scan(); {
			var e lockstate.Event
			if err := json.Unmarshal(in.Bytes(), &e); err != nil {
				s.violate("an event: %v in %q", err, in.Text())
				continue
			}
			s.mu.Lock()
			s.events++
			last := s.tokens[e.Dir]
			if e.Event == "acquired" {
				s.tokens[e.Dir] = max(last, e.Token)
			}
			s.mu.Unlock()
			if e.Event == "acquired" && e.Token <= last {
				s.violate("event: token %d after %d: %s", e.Token, last, in.Text())
			}
		}
		close(done)
		f.Close()
	}
}

// watchStale finds locks, and waiters, that outlive their process by a second
// while a daemon is there.
func (s *faultSoak) watchStale() {
	dead := map[string]time.Time{} // by token or pid
	for s.pause(100 * time.Millisecond) {
		var l listing
		asked := time.Now() // this process may not run for seconds after the answer
		b, err := os.ReadFile(s.m.control("locks.json"))
		if err != nil || json.Unmarshal(b, &l) != nil {
			clear(dead)
			continue
		}
		s.mu.Lock()
		up := s.up
		s.mu.Unlock()
		now := map[string]time.Time{}
		note := func(key, what string, pid int, start uint64) {
			if livesSince(pid, start) {
				return
			}
			since, ok := dead[key]
			if !ok {
				since = time.Now()
			}
			now[key] = since
			if up.IsZero() || up.After(since) {
				now[key] = time.Now()
				return
			}
			s.mu.Lock()
			s.stale = max(s.stale, asked.Sub(since))
			s.mu.Unlock()
			if asked.Sub(since) > time.Second {
				s.violate("stale for %v: %s", asked.Sub(since), what)
				now[key] = time.Now()
			}
		}
		for _, row := range l.Locks {
			if row.Pid == os.Getpid() {
				// All rivals would be holders then (H2).
				s.violate("a lock has passed to the parent of all, and no worker exits with status 0 (R5): %+v", row)
			}
			if row.Client == "" {
				note("lock "+fmt.Sprint(row.Token), fmt.Sprintf("%+v", row), row.Pid, row.Start)
			}
		}
		for _, w := range l.Waiters {
			note("waiter "+itoa(w.Pid)+w.Dir, fmt.Sprintf("%+v", w), w.Pid, 0)
		}
		dead = now
	}
}

// livesSince tells whether the process with that start time lives.
func livesSince(pid int, start uint64) bool {
	f := statFields(fmt.Sprintf("/proc/%d/stat", pid))
	if f == nil || !running(pid) {
		return false
	}
	return start == 0 || f[19] == fmt.Sprint(start)
}

// watchBacking holds the backing against the journals again and again, and
// takes the measure of the daemon.
func (s *faultSoak) watchBacking() {
	for s.pause(time.Second) {
		s.account(false)
		s.measure()
	}
}

// readBook goes on in a journal. The caller holds mu.
func (s *faultSoak) readBook(b *book) {
	if b.done {
		return
	}
	f, err := os.Open(b.path)
	if err != nil {
		return
	}
	defer f.Close()
	f.Seek(b.read, 0)
	for in := bufio.NewReader(f); ; {
		line, err := in.ReadString('\n')
		if err != nil {
			return
		}
		b.read += int64(len(line))
		b.state, b.at = line[0], time.Now()
		var name string
		var size int
		fmt.Sscan(line[1:], &name, &size)
		switch line[0] {
		case 'H':
			b.ops++
			b.taken++
		case 'R':
			b.ops++
		case 'T':
			b.tried[name] = size
		case 'W':
			b.ops++
			b.wrote[name] = size
		case 'd':
			b.gone[name] = true
		case 'D':
			b.ops++
		case 'N':
			fmt.Sscan(line[1:], &b.ops, &b.refuse)
		case 'E':
			s.kills["calls with EIO or EINTR"]++
		case 'X':
			s.through = append(s.through, hit{name, size})
		case 'V':
			s.violations = append(s.violations, time.Now().Format("15:04:05.000 ")+filepath.Base(b.path)+": "+strings.TrimSpace(line[1:]))
		}
	}
}

// readBooks adds all journals up.
func (s *faultSoak) readBooks() (tried, wrote map[string]int, gone map[string]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	tried, wrote, gone = map[string]int{}, map[string]int{}, map[string]bool{}
	for _, b := range s.books {
		s.readBook(b)
		for name, size := range b.tried {
			tried[name] = size
		}
		for name, size := range b.wrote {
			wrote[name] = size
		}
		for name := range b.gone {
			gone[name] = true
		}
	}
	return tried, wrote, gone
}

// account holds the backing against the journals: every acknowledged write is
// there, and nothing that nobody tried to write.
func (s *faultSoak) account(last bool) {
	tried, wrote, gone := s.readBooks()
	for name, size := range wrote {
		if gone[name] {
			continue
		}
		got, err := os.ReadFile(s.m.Back(name))
		if err == nil && bytes.Equal(got, soakContent(filepath.Base(name), size)) {
			continue
		}
		if _, _, gone = s.readBooks(); gone[name] {
			continue // since then
		}
		s.violate("an acknowledged write is lost: %s: %d bytes, %v, want %d", name, len(got), err, size)
		s.forget(name)
	}
	for _, slot := range s.slots {
		filepath.WalkDir(s.m.Back(slot), func(path string, d fs.DirEntry, err error) error {
			rel, _ := filepath.Rel(s.m.Dir, path)
			if err != nil || d.IsDir() && rel == slot || ofLockers(d.Name()) && !last {
				return nil
			}
			if tried[rel] == 0 {
				tried, _, _ = s.readBooks() // since then
			}
			if tried[rel] == 0 {
				if ofLockers(d.Name()) && d.Name() == "devserver" {
					return nil // what fd lockers make stays (R2)
				}
				s.violate("in the backing, and no holder made it: %s", rel)
				return nil
			}
			info, err := d.Info()
			if err != nil {
				return nil
			}
			content, err := os.ReadFile(path)
			if st := info.Sys().(*syscall.Stat_t); err == nil && (bytes.Contains(content, []byte("RIVAL")) || st.Uid != 0 || info.Mode().Perm() != 0o666 || st.Nlink > 1) {
				s.violate("changed by a rival: %s: %v, uid %d, %d links, %.40q", rel, info.Mode(), st.Uid, st.Nlink, content)
			}
			return nil
		})
	}
	// A worker that says nothing for so long hangs.
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.books) > 4000 {
		s.foldBooks()
	}
}

// foldBooks makes one of all journals whose workers are long dead. The caller
// holds mu.
func (s *faultSoak) foldBooks() {
	all := &book{path: filepath.Join(s.dir, "folded"), tried: map[string]int{}, wrote: map[string]int{}, gone: map[string]bool{}}
	for path, b := range s.books {
		s.readBook(b) // the last time may be minutes ago, on a slow machine
		if time.Since(b.at) < 2*patience {
			continue
		}
		for name := range b.gone {
			all.gone[name] = true
		}
		for name, size := range b.tried {
			all.tried[name] = size
		}
		for name, size := range b.wrote {
			all.wrote[name] = size
		}
		all.ops += b.ops
		all.taken += b.taken
		all.refuse += b.refuse
		delete(s.books, path)
		if path != all.path {
			os.Remove(path)
		}
	}
	for name := range all.gone {
		if _, err := os.Lstat(s.m.Back(name)); errors.Is(err, fs.ErrNotExist) {
			delete(all.tried, name)
			delete(all.wrote, name)
		}
	}
	s.books[all.path] = all
}

// forget makes a loss be told once.
func (s *faultSoak) forget(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.books {
		delete(b.wrote, name)
	}
}

func (s *faultSoak) measure() {
	text, err := os.ReadFile(s.m.control("metrics"))
	pid := s.m.daemon()
	if err != nil || pid == 0 {
		return
	}
	sm := sample{pid: pid}
	for line := range strings.Lines(string(text)) {
		fmt.Sscanf(line, "stagefs_goroutines %d", &sm.goroutines)
	}
	// Those of processes and directories are bounded by themselves, and take
	// their time to get there: each rival leaves a directory behind.
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, f := range files {
		info, err := os.Stat(f)
		if target, bad := os.Readlink(f); err == nil && bad == nil && !info.IsDir() && !strings.Contains(target, "pidfd") {
			sm.files++
		}
	}
	statm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if f := strings.Fields(string(statm)); len(f) > 1 {
		sm.memory = atoi(f[1]) * os.Getpagesize()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.samples = append(s.samples, sm)
}

// grown compares the daemon of the calm at the beginning of it and at the end,
// all under the same load.
func (s *faultSoak) grown() {
	if len(s.samples) == 0 {
		s.violate("the daemon was never seen")
		return
	}
	var calm []sample
	for _, sm := range s.samples {
		if sm.pid == s.samples[len(s.samples)-1].pid {
			calm = append(calm, sm)
		}
	}
	// The highest of each half, since each goes up and down.
	top := func(part []sample) (m sample) {
		for _, sm := range part {
			m.files, m.goroutines, m.memory = max(m.files, sm.files), max(m.goroutines, sm.goroutines), max(m.memory, sm.memory)
		}
		return m
	}
	first, second := top(calm[:(len(calm)+1)/2]), top(calm[len(calm)/2:])
	s.t.Logf("the last daemon, highest in the first and second half of %d samples: descriptors %d, %d; goroutines %d, %d; resident MiB %d, %d",
		len(calm), first.files, second.files, first.goroutines, second.goroutines, first.memory>>20, second.memory>>20)
	bloats := second.memory > first.memory+first.memory/4+32<<20 && !raceDetected(s.t)
	if second.files > first.files+64 || second.goroutines > first.goroutines+32 || bloats {
		s.violate("the daemon grows: %+v, then %+v", first, second)
	}
}

// raceDetected reports whether the race detector watches the daemon, which keeps
// what it has seen of memory that was used once.
func raceDetected(t *testing.T) bool {
	info, err := buildinfo.ReadFile(stagefsBin())
	mustDo(t, err)
	return slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}

// around returns what the daemon said in the second of a violation, and in the
// one before.
func (s *faultSoak) around(violation string) string {
	at, err := time.ParseInLocation("15:04:05", violation[:len("15:04:05")], time.Local)
	if err != nil {
		return err.Error()
	}
	now := time.Now()
	at = at.AddDate(now.Year(), int(now.Month())-1, now.Day()-1).UTC()
	var b strings.Builder
	for line := range strings.Lines(s.m.Log()) {
		for _, t := range []time.Time{at.Add(-time.Second), at} {
			if strings.Contains(line, t.Format("T15:04:05.")) && b.Len() < 64<<10 {
				b.WriteString(line)
			}
		}
	}
	return b.String()
}

// nothingStale: when all are dead, no lock is left, nor a lock file that a dead
// one made.
func (s *faultSoak) nothingStale() {
	var l listing
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		l = s.m.Listing()
		// What an fd locker has made is no lock file of a dead owner's (R2).
		l.Orphans = slices.DeleteFunc(l.Orphans, func(o struct{ Path string }) bool { return filepath.Base(o.Path) == "devserver" })
		if len(l.Locks)+len(l.Waiters)+len(l.Blockers)+len(l.Orphans) == 0 {
			break
		}
	}
	l.violations(s.violate)
}

func (s *faultSoak) report(took time.Duration) {
	s.t.Helper()
	_, _, gone := s.readBooks()
	for _, h := range s.through {
		if !gone[h.name] {
			s.violate("attack %d of a rival went through on %s", h.attack, h.name)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	ops, taken, refused := 0, 0, 0
	for _, b := range s.books {
		ops += b.ops
		taken += b.taken
		refused += b.refuse
	}
	var worst, sum time.Duration
	for _, o := range s.outages {
		worst, sum = max(worst, o), sum+o
	}
	if n := len(s.outages); n > 0 {
		s.t.Logf("outages after kill -9 of the daemon: %d, mean %v, max %v", n, (sum / time.Duration(n)).Round(time.Millisecond), worst.Round(time.Millisecond))
	}
	s.t.Logf("soak of %v: %d operations, %d acquisitions, %d refusals, %d events, faults %v, longest stale lock %v, %d violations",
		took.Round(time.Second), ops, taken, refused, s.events, s.kills, s.stale.Round(time.Millisecond), len(s.violations))
	if n := s.kills["calls with EIO or EINTR"]; n > 1+s.kills["daemons"]/20 {
		s.t.Errorf("%d calls failed with EIO or EINTR: more than kills of the daemon account for", n)
	}
	for i, v := range s.violations {
		if i == 30 {
			s.t.Errorf("and %d more", len(s.violations)-i)
			break
		}
		s.t.Errorf("violation: %s", v)
		if i < 5 {
			s.t.Logf("the daemon about then:\n%s", s.around(v))
		}
	}
	for _, what := range []string{"holders", "waiters", "daemons"} {
		if s.kills[what] == 0 {
			s.t.Errorf("none of the %s was killed", what)
		}
	}
}
