//go:build linux

package procid

import (
	"bytes"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// maxCmdline bounds what Cmdline reads.
	maxCmdline = 4096
	// lineTime is how long a command line may keep others waiting. It is only for
	// people to read.
	lineTime = 5 * time.Millisecond
	// maxLines bounds how many are read at a time, each of which may keep a thread.
	maxLines = 128
	// noteTime is how long one that was read stands for the next: who is refused
	// again and again is not to pay for it each time.
	noteTime = time.Second
)

// lines are the looks at command lines that are under way: one a process, however
// many want to know. The kernel reads them from the process's memory, and so waits
// for its other threads, which may change what is mapped there and wait for any file
// system meanwhile, without end.
type lines struct {
	mu    sync.Mutex // nothing is waited for with it
	looks map[ID]*lineLook
}

type lineLook struct {
	done chan struct{} // closed when line is there
	late chan struct{} // closed when it is known to take long
	tid  atomic.Int32  // of the thread that asks; 0: none yet

	line string // empty and false if there is none
	ok   bool

	gaveUp bool // late is closed; guarded by lines.mu
}

// A lineNote is a command line that was read.
type lineNote struct {
	comm, line string
	at         time.Time
}

// Cmdline returns the command line of a process for a listing: at most 4096
// bytes as they are, arguments joined by spaces, "" when the process is gone.
// Where it can't be had at once it is the name of the program in brackets, as
// for ps(1). It may be that of a moment ago.
func (r *Resolver) Cmdline(id ID) string {
	comm := commOf(id.Pid)
	if line, ok := r.noted(id, comm); ok {
		return line
	}
	line, ok := "", false
	if l := r.lines.look(id); l != nil {
		line, ok = r.lines.await(l)
	}
	switch {
	case !r.Alive(id): // after the looks: they were at no later process
		return ""
	case !ok && comm != "":
		return "[" + comm + "]"
	case ok:
		r.keepLine(id, &lineNote{comm, line, time.Now()})
	}
	return line
}

// commOf returns the name of a process's program, which the kernel always tells.
func commOf(pid int) string {
	var buf [64]byte
	b, _ := readProc(pid, "comm", buf[:])
	return string(bytes.TrimSuffix(b, []byte{'\n'}))
}

// noted returns the line that was read of a living process just now, while it ran
// the same program.
func (r *Resolver) noted(id ID, comm string) (string, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	g := r.groups[id]
	if g == nil {
		return "", false
	}
	n := g.line.Load()
	if n == nil || n.comm != comm || time.Since(n.at) > noteTime || readable(g.fd) {
		return "", false
	}
	return n.line, true
}

// keepLine notes the line of a process in the cache.
func (r *Resolver) keepLine(id ID, n *lineNote) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if g := r.groups[id]; g != nil {
		g.line.Store(n)
	}
}

// look returns the look at a process's line, or nil if that would take long.
func (s *lines) look(id ID) *lineLook {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.looks[id]; l != nil {
		if l.gaveUp {
			return nil
		}
		return l
	}
	if len(s.looks) >= maxLines {
		return nil
	}
	if s.looks == nil {
		s.looks = make(map[ID]*lineLook)
	}
	l := &lineLook{done: make(chan struct{}), late: make(chan struct{})}
	s.looks[id] = l
	go s.run(id, l)
	return l
}

func (s *lines) run(id ID, l *lineLook) {
	l.read(id.Pid)
	s.mu.Lock()
	delete(s.looks, id)
	s.mu.Unlock()
	close(l.done)
}

func (l *lineLook) read(pid int) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	l.tid.Store(int32(unix.Gettid()))
	var buf [maxCmdline]byte
	b, err := readProc(pid, "cmdline", buf[:])
	if err == nil && len(b) == 0 { // as of a thread that has ended
		if tid, _ := RunningThread(pid); tid != 0 && tid != pid {
			b, err = readProc(tid, "cmdline", buf[:])
		}
	}
	if err != nil {
		return
	}
	b = bytes.TrimRight(b, "\x00")
	l.line, l.ok = string(bytes.ReplaceAll(b, []byte{0}, []byte{' '})), true
}

// await waits for a look, but not for long for the kernel.
func (s *lines) await(l *lineLook) (line string, ok bool) {
	t := time.NewTimer(lineTime)
	defer t.Stop()
	for began := time.Now(); ; t.Reset(lineTime) {
		select {
		case <-l.done:
			return l.line, l.ok
		case <-l.late:
			return "", false
		case <-t.C:
		}
		tid := l.tid.Load()
		if tid != 0 && threadState(int(tid)) == 'D' || time.Since(began) > lookPatience {
			s.giveUp(l)
		}
	}
}

// giveUp has nobody wait for a look any more.
func (s *lines) giveUp(l *lineLook) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !l.gaveUp {
		l.gaveUp = true
		close(l.late)
	}
}
