//go:build linux

package tests

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A target is what a rival is pointed at, as paths below the mount.
type target struct {
	N      int    `json:"n"`
	Dir    string `json:"d"` // the build
	Sub    string `json:"s"` // a directory in it, or the build itself
	File   string `json:"f"` // a file there; it may be gone already
	New    string `json:"new"`
	Own    string `json:"own"`  // a directory that the rival holds
	OwnF   string `json:"ownf"` // a file there
	Anchor bool   `json:"anchor"`
}

// A rivalKind is one way to attack. attack tries one operation: "ok" means
// that it went through, which no lock allows.
type rivalKind struct {
	name   string
	pause  time.Duration
	attack func(target) (op, answer string)
	stop   func()
	own    string // below the mount
}

func (s *soak) rivals() []rivalKind {
	s.t.Helper()
	return []rivalKind{s.pythonRival(), s.shellRival(), s.syscallRival(), s.lockRival()}
}

// rival attacks builds until the soak is over.
func (s *soak) rival(r rivalKind) {
	if r.stop != nil {
		defer r.stop()
	}
	for n := 0; s.ctx.Err() == nil; n++ {
		if !s.assault(r, n) {
			time.Sleep(5 * time.Millisecond)
		}
		time.Sleep(r.pause)
	}
}

// assault attacks one build that is under way. If the operation went through
// while one and the same lock stood on the build before and after, the lock
// was violated.
func (s *soak) assault(r rivalKind, n int) (met bool) {
	marks, err := os.ReadDir(s.path("live"))
	if err != nil || len(marks) == 0 {
		return false
	}
	mark, err := os.Open(s.path("live", marks[rand.IntN(len(marks))].Name()))
	if err != nil {
		return false
	}
	defer mark.Close()
	content, err := io.ReadAll(mark)
	if err != nil || unix.Flock(int(mark.Fd()), unix.LOCK_SH) != nil || !linked(mark) {
		return false
	}
	dir := string(content)
	before := s.tokens(dir, false)
	if len(before) == 0 {
		return false
	}
	to := s.pick(dir)
	to.N, to.New = n, filepath.Join(to.Sub, fmt.Sprintf("rival-%s-%d", r.name, n))
	to.Own, to.OwnF = r.own, filepath.Join(r.own, "file")
	op, answer := r.attack(to)
	after := s.tokens(dir, false)
	same := linked(mark) && slices.ContainsFunc(after, func(token uint64) bool { return slices.Contains(before, token) })
	s.note(r, op, to, answer, same)
	return true
}

func linked(f *os.File) bool {
	var st unix.Stat_t
	return unix.Fstat(int(f.Fd()), &st) == nil && st.Nlink > 0
}

// pick walks down from a build to any file but a lock file, by whichever name:
// that one has attacks of its own, and answers of its own (A10).
func (s *soak) pick(dir string) target {
	to := target{Dir: s.m.At(dir), Sub: s.m.At(dir), Anchor: strings.HasSuffix(dir, "/anchor")}
	to.File = filepath.Join(to.Sub, "none")
	for {
		entries, _ := os.ReadDir(to.Sub)
		if len(entries) == 0 || rand.IntN(8) == 0 {
			return to
		}
		e := entries[rand.IntN(len(entries))]
		if ofLockers(e.Name()) {
			return to
		}
		if !e.IsDir() {
			to.File = filepath.Join(to.Sub, e.Name())
			return to
		}
		to.Sub = filepath.Join(to.Sub, e.Name())
		to.File = filepath.Join(to.Sub, "none")
	}
}

// note judges an answer.
func (s *soak) note(r rivalKind, op string, to target, answer string, held bool) {
	s.ops.Add(1)
	switch {
	case answer == "ok" && held:
		s.violate("%s: %s went through on %s (%s) while it was held", r.name, op, to.Dir, to.File)
	case answer == "ok":
		s.legit.Add(1)
	case answer == "EBUSY":
		s.refused.Add(1)
	case answer == "EEXIST", answer == "locked":
		s.lockedOut.Add(1)
	case oneOf(answer, "ENOENT|ENOTEMPTY|ENOTDIR"):
		// What it was after was not there any more.
		s.missed.Add(1)
	default:
		s.mu.Lock()
		s.odd[answer] = fmt.Sprintf("%s: %s on %+v (held: %v)", r.name, op, to, held)
		s.mu.Unlock()
	}
	if len(answer) > 12 {
		answer = "other"
	}
	s.mu.Lock()
	s.errnos[answer]++
	s.mu.Unlock()
}

// A server is a rival's process that reads a target a line and answers each
// with a line: operation, tab, answer.
type server struct {
	s   *soak
	cmd *exec.Cmd
	all group
	in  io.WriteCloser
	out *bufio.Reader

	once sync.Once
}

func (s *soak) serve(own string, argv ...string) *server {
	s.t.Helper()
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), "LC_ALL=C", "OWN="+own, "STAGEFS_SOAK_DIR="+s.dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	in, err := cmd.StdinPipe()
	mustDo(s.t, err)
	out, err := cmd.StdoutPipe()
	mustDo(s.t, err)
	log, err := os.Create(s.path(filepath.Base(argv[0]) + ".rival.log"))
	mustDo(s.t, err)
	defer log.Close()
	cmd.Stderr = log
	mustDo(s.t, cmd.Start())
	v := &server{s: s, cmd: cmd, all: groupOf(s.t, cmd), in: in, out: bufio.NewReader(out)}
	s.t.Cleanup(v.stop)
	return v
}

func (v *server) attack(line string) (op, answer string) {
	limit := 2 * patience
	if v.s.whole {
		limit = 20 * patience // to remove a build is to be refused ten thousand times
	}
	late := time.AfterFunc(limit, func() { // what it hangs in is in its own group
		at, _ := exec.Command("pgrep", "-a", "-g", itoa(v.cmd.Process.Pid)).CombinedOutput()
		v.s.violate("a rival's operation hangs: %s\n%s", line, at)
		v.all.signal(syscall.SIGKILL)
	})
	defer late.Stop()
	io.WriteString(v.in, line+"\n")
	reply, err := v.out.ReadString('\n')
	if err != nil {
		time.Sleep(100 * time.Millisecond)
		return line, "no answer: " + err.Error()
	}
	op, answer, _ = strings.Cut(strings.TrimSuffix(reply, "\n"), "\t")
	return op, answer
}

func (v *server) stop() {
	v.once.Do(func() {
		v.in.Close()
		kill := time.AfterFunc(2*time.Second, func() { v.all.signal(syscall.SIGKILL) })
		defer kill.Stop()
		v.cmd.Wait()
	})
}

func (s *soak) pythonRival() rivalKind {
	own := s.m.At("rivals", "python")
	v := s.serve(own, "/usr/bin/python3", "-u", s.path("rival.py"))
	attack := func(to target) (op, answer string) {
		line, _ := json.Marshal(to)
		return v.attack(string(line))
	}
	return rivalKind{name: "python", own: own, pause: 4 * time.Millisecond, attack: attack, stop: v.stop}
}

func (s *soak) shellRival() rivalKind {
	own := s.m.At("rivals", "shell")
	v := s.serve(own, "bash", s.path("rival.sh"))
	attack := func(to target) (op, answer string) {
		return v.attack(strings.Join([]string{itoa(to.N), to.Dir, to.Sub, to.File, to.New}, "\t"))
	}
	return rivalKind{name: "shell", own: own, pause: 10 * time.Millisecond, attack: attack, stop: v.stop}
}

// syscallRival is an agent. Each of its operations is a list of commands, the
// last of which must be refused; what it did nevertheless is undone.
func (s *soak) syscallRival() rivalKind {
	s.t.Helper()
	a := agent(s.t)
	own := s.m.At("rivals", "syscalls")
	a.Try("mkdir", s.m.At("rivals"))
	a.must("mkdir", own)
	attack := func(to target) (op, answer string) {
		a.must("put", to.OwnF, "RIVAL", "creat")
		ops := syscallAttacks(to)
		try := ops[rand.IntN(len(ops))]
		for i, step := range try.steps {
			answer = a.Try(step...)
			if answer != "ok" {
				if i < try.own {
					answer = "in its own directory: " + answer
				}
				break
			}
		}
		for _, step := range try.undo {
			a.Try(step...)
		}
		return fmt.Sprintf("%q", try.steps), answer
	}
	// Its processes and locks end with the test's cleanup otherwise.
	return rivalKind{name: "syscalls", own: own, pause: 2 * time.Millisecond, attack: attack, stop: func() { a.conn.Close() }}
}

// lockRival tries to get the build's lock with every existence locker, and by
// file locks.
func (s *soak) lockRival() rivalKind {
	clients := []client{
		{name: "flock", script: `exec flock -n "$1/devserver" sh -c 'echo acquired; rm "$1/devserver"' sh "$1"`},
		{name: "lockf", script: `exec /usr/bin/python3 -c '
import fcntl, os, sys
f = open(sys.argv[1] + "/devserver.lock", "a")
try:
    fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit("locked")
print("acquired")
os.remove(f.name)' "$1"`},
	}
	for _, c := range existenceClients() {
		if c.setUp == "" && !slices.ContainsFunc(c.needs, func(tool string) bool { _, err := exec.LookPath(tool); return err != nil }) {
			clients = append(clients, c)
		}
	}
	attack := func(to target) (op, answer string) {
		c := clients[to.N%len(clients)]
		dir := to.Dir
		if rand.IntN(3) == 0 {
			dir = to.Sub
		}
		out, err := s.command(2*patience, "env", "LC_ALL=C", "CLIENT_PY="+s.path("client.py"), "sh", "-c", c.script+" </dev/null", "sh", dir)
		switch {
		case strings.HasPrefix(string(out), "acquired"):
			return c.name, "ok"
		case err != nil && strings.Contains(string(out), "No such file"):
			return c.name, "ENOENT"
		case err != nil && !strings.Contains(string(out), "Traceback"):
			return c.name, "locked"
		default:
			return c.name, fmt.Sprintf("%v %q", err, out)
		}
	}
	return rivalKind{name: "locks", attack: attack}
}
