//go:build linux

package tests

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// An eventStream reads the events file.
type eventStream struct {
	t  *testing.T
	f  *os.File
	in *bufio.Scanner
}

func (m *Mount) events(t *testing.T) *eventStream {
	t.Helper()
	// Without Go's poller, which the mount knows nothing of; Close would wait for a read.
	fd, err := unix.Open(m.control("events"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	mustDo(t, err)
	f := os.NewFile(uintptr(fd), "events")
	t.Cleanup(func() { f.Close() })
	return &eventStream{t, f, bufio.NewScanner(f)}
}

func (s *eventStream) next() lockstate.Event {
	s.t.Helper()
	there := make(chan bool, 1)
	go func() { there <- s.in.Scan() }()
	select {
	case ok := <-there:
		if !ok {
			s.t.Fatalf("the events end: %v", s.in.Err())
		}
	case <-time.After(patience):
		s.t.Fatal("no event comes")
	}
	var e lockstate.Event
	if err := json.Unmarshal(s.in.Bytes(), &e); err != nil {
		s.t.Fatalf("an event: %v in %q", err, s.in.Text())
	}
	if e.Time.IsZero() {
		s.t.Errorf("an event without a time: %q", s.in.Text())
	}
	return e
}

// want reads events until the named ones came, in this order and with none
// between, but for refusals where none is wanted.
func (s *eventStream) want(wants ...string) []lockstate.Event {
	s.t.Helper()
	var all []lockstate.Event
	for _, want := range wants {
		e := s.next()
		for e.Event == "refused" && !strings.HasPrefix(want, "refused") {
			e = s.next()
		}
		if got := strings.TrimSpace(e.Event + " " + e.Dir + " " + e.Reason); got != want {
			s.t.Errorf("event %+v, want %q", e, want)
		}
		all = append(all, e)
	}
	return all
}

// TestR6Events: what happens to locks is told in the order in which it
// happened, with who and why.
func TestR6Events(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	a, b := agent(t), agent(t)
	a.mustCommand(m, "acquire D") // before the open: not told
	a.mustCommand(m, "release D")
	s := m.events(t)

	token := a.mustCommand(m, `acquire D why="a try"`).Token
	b.want("EBUSY", "put", m.At("D/f"), "", "creat")
	b.mustCommand(m, "wait E wait=forever") // free: nobody waits
	waits := b.Start("ctl", m.control("ctl"), "acquire D wait=forever")
	m.awaitWaiters("D", 1)
	a.mustCommand(m, "release D")
	waits()
	got := s.want("acquired D", "refused D/f EBUSY", "waiting D", "released D released", "acquired D")
	for i, want := range []lockstate.Event{
		{Token: token, Pid: a.Pid, Kind: "explicit", Protocol: "command", Why: "a try"},
		{Token: token, Pid: b.Pid, Protocol: "create", By: a.Pid},
		{Pid: b.Pid, Kind: "explicit", Protocol: "command"},
		{Token: token, Pid: a.Pid, Kind: "explicit", Protocol: "command", By: a.Pid},
	} {
		e := got[i]
		if e.Token != want.Token || e.Pid != want.Pid || e.Kind != want.Kind || e.Protocol != want.Protocol || e.By != want.By || want.Why != "" && e.Why != want.Why {
			t.Errorf("event %d: %+v, want %+v", i, e, want)
		}
	}
	m.Ctl("break D enough is enough")
	if e := s.want("broken D broken", "lost D broken"); e[0].Why != "enough is enough" || e[0].By != os.Getpid() {
		t.Errorf("the break: %+v", e[0])
	}
	a.mustCommand(m, "acquire D client=x ttl=20ms")
	if e := s.want("acquired D", "released D expired", "lost D expired"); e[2].Client != "x" || e[0].Kind != "lease" {
		t.Errorf("the lease: %+v", e)
	}
	a.mustCommand(m, "acquire D client=x ttl=20ms on-crash=destroy")
	if e := s.want("acquired D", "destroyed D", "released D expired", "lost D expired"); e[1].Client != "x" || e[1].Kind != "lease" {
		t.Errorf("the end of a lease's content: %+v", e[1])
	}
	b.must("mkdir", m.At("E"))
	b.must("creat", m.At("E/devserver"), "wronly,creat,excl")
	b.must("unlink", m.At("E/devserver"))
	s.want("acquired E", "acquired E", "released E replaced", "released E unlinked")
	doomed := agent(t)
	doomed.must("mkdir", m.At("F"))
	doomed.Kill()
	s.want("acquired F", "released F exited")
	a.must("mkdir", m.At("G"))
	a.must("rmdir", m.At("G"))
	s.want("acquired G", "released G removed")
	script := startCmd(t, exec.Command("sh", "-c", `mkdir "$1/H"; read x`, "sh", m.Path))
	if e := s.want("acquired H", "handed-over H"); e[1].Pid != script.Pid() || e[1].By != e[0].Pid {
		t.Errorf("the hand-over: %+v, want from %d to %d", e[1], e[0].Pid, script.Pid())
	}
	s.want("released H exited") // the script found no input
	a.must("mkdir", m.At("caf\xe9"))
	if e := s.next(); string(e.DirBytes) != "caf\xe9" {
		t.Errorf("odd bytes: %+v", e)
	}
}

// TestR6EventsRead: a read waits, unless the descriptor says not to; a signal
// ends it; a small buffer gets everything in pieces.
func TestR6EventsRead(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	fd, err := unix.Open(m.control("events"), unix.O_RDONLY|unix.O_NONBLOCK, 0)
	mustDo(t, err)
	defer unix.Close(fd)
	buf := make([]byte, 7)
	if _, err := unix.Read(fd, buf); err != unix.EAGAIN {
		t.Errorf("read of nothing = %v, want EAGAIN", err)
	}
	if _, err := unix.Open(m.control("events"), unix.O_RDWR, 0); err == nil {
		t.Error("the events can be opened for writing")
	}
	if _, err := unix.Seek(fd, 0, 0); err != unix.ESPIPE {
		t.Errorf("seek = %v, want ESPIPE", err)
	}
	a := agent(t)
	a.mustCommand(m, "acquire D")
	var all []byte
	for {
		n, err := unix.Read(fd, buf)
		if err == unix.EAGAIN {
			break
		}
		mustDo(t, err)
		all = append(all, buf[:n]...)
	}
	var e lockstate.Event
	if err := json.Unmarshal(all, &e); err != nil || e.Event != "acquired" || strings.Count(string(all), "\n") != 1 {
		t.Errorf("read in pieces: %q, %v", all, err)
	}
	p := startCmd(t, exec.Command("cat", m.control("events")))
	a.mustCommand(m, "release D")
	eventually(t, "cat has the events open and read one", func() bool {
		a.mustCommand(m, "acquire D")
		a.mustCommand(m, "release D")
		links, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.Pid()))
		return slices.ContainsFunc(links, func(l os.DirEntry) bool {
			to, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", p.Pid(), l.Name()))
			return to == m.control("events")
		})
	})
	mustDo(t, syscall.Kill(p.Pid(), syscall.SIGTERM))
	if r := p.Wait(); r.Status != 128+15 {
		t.Errorf("cat: %v, want it to die by the signal", r)
	}
}

// TestR6EventsSlow: a reader that is too slow loses the oldest events, hears
// how many, and then goes on; it holds up nobody.
func TestR6EventsSlow(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	s := m.events(t)
	a := agent(t)
	const rounds = 3000 // two events each
	a.must("sh", fmt.Sprintf(`i=0; while [ $i -lt %d ]; do echo acquire D; echo release D; i=$((i+1)); done >cmds
		split -l 2000 cmds part.; for p in part.*; do cat $p >%s || exit; done; rm -f cmds part.*`, rounds, m.control("ctl")))
	first := s.next()
	if first.Event != "lost-events" || first.Count != 2*rounds-4096 {
		t.Fatalf("the first event: %+v, want %d lost", first, 2*rounds-4096)
	}
	var last uint64
	for range 4096 {
		e := s.next()
		if e.Token < last {
			t.Fatalf("token %d after %d", e.Token, last)
		}
		last = e.Token
	}
	a.mustCommand(m, "acquire D")
	if e := s.next(); e.Event != "acquired" {
		t.Errorf("after what was missed: %+v", e)
	}
}

// TestR6EventsReaders: many readers see the same.
func TestR6EventsReaders(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	const readers, rounds = 20, 100
	streams := make([]*eventStream, readers)
	for i := range streams {
		streams[i] = m.events(t)
	}
	seen := make([][]string, readers)
	var wg sync.WaitGroup
	for i, s := range streams {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for range 2 * rounds {
				if !s.in.Scan() {
					return
				}
				seen[i] = append(seen[i], s.in.Text())
			}
		}()
	}
	a := agent(t)
	for range rounds {
		a.mustCommand(m, "acquire D")
		a.mustCommand(m, "release D")
	}
	wg.Wait()
	for i := range seen {
		if len(seen[i]) != 2*rounds || !slices.Equal(seen[i], seen[0]) {
			t.Errorf("reader %d saw %d events, or others than the first", i, len(seen[i]))
		}
	}
}
