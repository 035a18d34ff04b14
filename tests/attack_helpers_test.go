//go:build linux

package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The attacks try to break what the other tests see at rest: they race real
// processes against each other in tight loops. An agent that storms is sent
// its commands ahead of the answers, so that one system call follows the other
// without a turn to the test.

// A storm is an agent that repeats commands until it is stopped.
type storm struct {
	a    *Agent
	stop chan struct{}
	done chan struct{}

	mu     sync.Mutex
	counts map[string]int // "command errno" → how often
	total  int
	err    error
}

// storm makes a repeat commands. Nothing else may use a until it is over.
func (a *Agent) storm(commands ...[]string) *storm {
	a.t.Helper()
	s := &storm{a: a, stop: make(chan struct{}), done: make(chan struct{}), counts: map[string]int{}}
	lines := make([]string, len(commands))
	for i, c := range commands {
		lines[i] = quoteWords(c)
	}
	ahead := make(chan int, 32)
	go func() {
		defer close(ahead)
		for i := 0; ; i = (i + 1) % len(lines) {
			select {
			case <-s.stop:
				return
			case ahead <- i:
			}
			if _, err := a.conn.Write([]byte(lines[i])); err != nil {
				return
			}
		}
	}()
	go func() {
		defer close(s.done)
		for i := range ahead {
			a.conn.SetReadDeadline(time.Now().Add(2 * patience))
			line, err := a.in.ReadString('\n')
			if err != nil {
				s.err = err
				for range ahead {
				}
				return
			}
			status, _, _ := strings.Cut(line, " ")
			status, _ = strconv.Unquote(status)
			s.mu.Lock()
			s.counts[commands[i][0]+" "+status]++
			s.total++
			s.mu.Unlock()
		}
	}()
	a.t.Cleanup(s.end)
	return s
}

func quoteWords(words []string) string {
	var b strings.Builder
	for _, w := range words {
		b.WriteString(strconv.QuoteToASCII(w) + " ")
	}
	return b.String() + "\n"
}

// end stops the storm and waits for its last command.
func (s *storm) end() {
	select {
	case <-s.stop:
	default:
		close(s.stop)
	}
	<-s.done
}

// over is end, and fails the test if the agent hung or died.
func (s *storm) over() map[string]int {
	s.a.t.Helper()
	s.end()
	if s.err != nil {
		s.a.t.Fatalf("a storming agent does not answer: %v", s.err)
	}
	return s.counts
}

func (s *storm) so() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.total
}

// await waits until each storm has carried out n commands more: then all that
// was under way before is over.
func await(t *testing.T, n int, storms ...*storm) {
	t.Helper()
	before := make([]int, len(storms))
	for i, s := range storms {
		before[i] = s.so()
	}
	for i, s := range storms {
		for end := time.Now().Add(2 * patience); s.so() < before[i]+n; time.Sleep(200 * time.Microsecond) {
			select {
			case <-s.done:
				t.Fatalf("a storm ended by itself: %v", s.err)
			default:
			}
			if time.Now().After(end) {
				t.Fatal("a storm hangs")
			}
		}
	}
}

// A protocol takes and gives the lock on a directory; every one is an agent's
// command or several.
type protocol struct {
	name    string
	prepare func(dir, id string) []string // a command that must come before, or nil
	acquire func(dir, id string) []string
	release func(dir, id string) []string
	tidy    func(dir, id string) []string
}

func protocols() []protocol {
	lock := func(dir string) string { return dir + "/devserver" }
	unlink := func(dir, id string) []string { return []string{"unlink", lock(dir)} }
	temp := func(dir, id string) string { return dir + ".tmp-" + id }
	none := func(string, string) []string { return nil }
	touch := func(dir, id string) []string { return []string{"creat", temp(dir, id), "wronly,creat"} }
	return []protocol{
		{"create", none, func(d, id string) []string { return []string{"creat", lock(d), "wronly,creat,excl"} }, unlink, none},
		{"mknod", none, func(d, id string) []string { return []string{"mknod", lock(d), "fifo"} }, unlink, none},
		{
			"mkdir", none, func(d, id string) []string { return []string{"mkdir", lock(d)} },
			func(d, id string) []string { return []string{"rmdir", lock(d)} }, none,
		},
		{"symlink", none, func(d, id string) []string { return []string{"symlink", "nowhere", lock(d)} }, unlink, none},
		{
			"link", touch, func(d, id string) []string { return []string{"link", temp(d, id), lock(d)} }, unlink,
			func(d, id string) []string { return []string{"unlink", temp(d, id)} },
		},
		{"rename", touch, func(d, id string) []string { return []string{"rename", temp(d, id), lock(d), "noreplace"} }, unlink, none},
	}
}

// take tries to acquire dir once.
func (p protocol) take(a *Agent, dir, id string) string {
	if c := p.prepare(dir, id); c != nil {
		a.Try(c...)
	}
	return a.Try(p.acquire(dir, id)...)
}

func (p protocol) give(a *Agent, dir, id string) {
	a.t.Helper()
	a.must(p.release(dir, id)...)
	if c := p.tidy(dir, id); c != nil {
		a.must(c...)
	}
}

// A contender takes the lock on a directory, or is answered that it is busy, and gives
// it back after its work.
type contender struct {
	name       string
	busy       string
	take       func() string
	work, give func()
}

// contest has contenders race for a directory. The witness is a directory outside of the
// mount that only the owner may make.
func contest(t *testing.T, contenders ...contender) {
	t.Helper()
	witness := filepath.Join(tempDir(t), "held")
	won := make([]int, len(contenders))
	var all sync.WaitGroup
	for n, c := range contenders {
		all.Go(func() {
			for end := seconds(0.3); time.Now().Before(end) || won[n] == 0 && time.Now().Before(end.Add(patience)); {
				if got := c.take(); got != "ok" {
					if !oneOf(got, c.busy) {
						t.Errorf("%s = %s", c.name, got)
					}
					continue
				}
				won[n]++
				if err := os.Mkdir(witness, 0o700); err != nil {
					t.Errorf("%s has it while the other one has it: %v", c.name, err)
				}
				c.work()
				os.Remove(witness)
				c.give()
			}
		})
	}
	all.Wait()
	if slices.Contains(won, 0) {
		t.Errorf("acquisitions: %v; one never got it", won)
	}
}

// seconds is when a race is over: after half of the time, unless there is more of it (-soak).
func seconds(n float64) time.Time {
	if *soakFlag == 0 {
		n /= 2
	}
	return time.Now().Add(time.Duration(n * float64(time.Second)))
}

// still reports an error unless the backing of dir stays as it is while the
// storms go on, each for n commands more.
func still(t *testing.T, m *Mount, dir, what string, n int, storms ...*storm) {
	t.Helper()
	before := digest(t, m.Back(dir))
	await(t, n, storms...)
	if after := digest(t, m.Back(dir)); after != before {
		t.Errorf("%s: changed while another process held it:\n%s", what, diff(before, after))
	}
}

// copyFD takes a copy of another process's descriptor, as one that was passed
// through a socket: the same open file description.
func copyFD(t *testing.T, a *Agent, name string) (fd int, closeIt func()) {
	t.Helper()
	pidfd, err := unix.PidfdOpen(a.Pid, 0)
	mustDo(t, err)
	defer unix.Close(pidfd)
	fd, err = unix.PidfdGetfd(pidfd, atoi(a.Get("fd", name)), 0)
	mustDo(t, err)
	closeIt = sync.OnceFunc(func() { unix.Close(fd) })
	t.Cleanup(closeIt)
	return fd, closeIt
}

// candidateName is one that Python's lockfile gives to its temporary file.
func candidateName(t *testing.T, a *Agent) string {
	t.Helper()
	return fmt.Sprintf("%s-7f00ab.%d123", hostname(t), a.Pid)
}

// openFile makes a file in the backing that every user may write to.
func openFile(t *testing.T, path, content string) {
	t.Helper()
	mustDo(t, os.WriteFile(path, []byte(content), 0o666))
	mustDo(t, os.Chmod(path, 0o666))
}
