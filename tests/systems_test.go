//go:build linux

package tests

import (
	"bufio"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The programs below systems/ are written as if there were no stagefs. A test
// of them runs on a plain directory and on a mount, and wants the same of both,
// but for what only a mount can promise.

// A site is a static directory that the programs share.
type site struct {
	t    *testing.T
	dir  string // as the programs see it
	back string // as the test sees it
	m    *Mount // nil: a plain directory
	lock string // a name of lock files
}

// onSites runs a test on a plain directory and on a mount.
func onSites(t *testing.T, opts []string, f func(s *site)) {
	need(t, debianPython)
	t.Run("plain", func(t *testing.T) {
		dir := staticDir(t)
		f(&site{t: t, dir: dir, back: dir, lock: "devserver.lock"})
	})
	t.Run("mount", func(t *testing.T) { f(mountSite(t, opts...)) })
}

// mountSite is for what holds on a mount only.
func mountSite(t *testing.T, opts ...string) *site {
	t.Helper()
	need(t, debianPython)
	m := mount(t, opts...)
	return &site{t: t, dir: m.Path, back: m.Dir, m: m, lock: "devserver.lock"}
}

// boards are the options of a mount for STATIC/<board>/<version>/.
func boards() []string { return []string{"--depth", "2", "--shared-name", "staged.timestamp"} }

func (s *site) at(rel ...string) string    { return filepath.Join(s.dir, filepath.Join(rel...)) }
func (s *site) under(rel ...string) string { return filepath.Join(s.back, filepath.Join(rel...)) }

// names lists what is beneath a directory of the site, without lock files and
// what becomes one.
func (s *site) names(rel string) string {
	s.t.Helper()
	var names []string
	err := filepath.WalkDir(s.under(rel), func(path string, d fs.DirEntry, err error) error {
		if name, _ := filepath.Rel(s.under(rel), path); err == nil && name != "." && !strings.Contains(name, "devserver") && !strings.Contains(name, hostname(s.t)) {
			names = append(names, name)
		}
		return err
	})
	if err != nil && !os.IsNotExist(err) {
		s.t.Error(err)
	}
	return strings.Join(names, " ")
}

func (s *site) wantNames(rel, want string) {
	s.t.Helper()
	if got := s.names(rel); got != want {
		s.t.Errorf("in %q are %q, want %q", rel, got, want)
	}
}

func hostname(t *testing.T) string {
	t.Helper()
	name, err := os.Hostname()
	mustDo(t, err)
	return name
}

// wantHeld expects that a directory is the program's, and everybody else is kept
// out of it with nothing changed. A plain directory promises nothing of that.
func (s *site) wantHeld(tag string, p *program) {
	s.t.Helper()
	if s.m == nil {
		return
	}
	row := s.m.Locks()[tag]
	if row.Pid != p.Pid() || !strings.Contains(row.Cmd, p.name) {
		s.t.Errorf("the listing names pid %d (%q) for %s, want %d (%s)", row.Pid, row.Cmd, tag, p.Pid(), p.name)
	}
	before := digest(s.t, s.under(tag))
	rivals := []*Agent{agent(s.t)}
	rivals[0].want("EBUSY", "chmod", s.at(tag), "700")
	if st, err := os.Stat(s.under(tag)); err == nil && st.Mode()&0o002 != 0 {
		rivals = append(rivals, stranger(s.t))
	}
	for _, rival := range rivals {
		rival.want("EBUSY", "put", s.at(tag, "of-a-rival"), "x", "creat")
		rival.want("EBUSY", "mkdir", s.at(tag, "dir-of-a-rival"))
		rival.want("EBUSY", "utimens", s.at(tag))
		rival.want("EBUSY", "rename", s.at(tag), s.at(tag)+".aside")
		rival.want("EEXIST", "creat", s.at(tag, s.lock), "wronly,creat,excl")
		for _, name := range strings.Fields(s.names(tag)) {
			if name == "staged.timestamp" {
				continue // everybody's
			}
			if !strings.HasPrefix(name, "nova-") { // a lock file, which can be tried
				rival.want("EBUSY|EACCES", "open", "h", s.at(tag, name), "wronly")
			}
			rival.want("EBUSY", "unlink", s.at(tag, name))
		}
	}
	if after := digest(s.t, s.under(tag)); after != before {
		s.t.Errorf("refused, but changed:\n%s", diff(before, after))
	}
}

// wantFree expects that nothing is left of any lock: no row, and no file.
func (s *site) wantFree() {
	s.t.Helper()
	mustDo(s.t, filepath.WalkDir(s.back, func(path string, d fs.DirEntry, err error) error {
		if err == nil && (strings.HasSuffix(path, ".lock") || strings.HasPrefix(d.Name(), hostname(s.t)+"-")) {
			s.t.Errorf("a stale lock: %s", path)
		}
		return err
	}))
	if s.m == nil {
		return
	}
	if l := s.m.Listing(); len(l.Locks)+len(l.Orphans)+len(l.Waiters) > 0 {
		s.t.Errorf("left over: %+v", l)
	}
}

// awaitFree waits for the end of a dead program's lock (R4).
func (s *site) awaitFree(tag string) {
	s.t.Helper()
	if s.m != nil {
		s.m.awaitFree(tag)
	}
}

// A program is one of those below systems/, which reports what happens in
// lines and takes commands in lines.
type program struct {
	*Proc
	name string
	err  string // file with its standard error, and that of what it starts
	in   io.WriteCloser
	pipe *os.File
	out  *bufio.Reader
	said strings.Builder
}

// start runs a program, and returns when it has said its first line.
func (s *site) start(name string, args ...string) *program {
	s.t.Helper()
	p := startProgram(s.t, nil, name, args...)
	p.hear("serving")
	return p
}

// startProgram runs a Python program, with further lines of the environment.
func startProgram(t *testing.T, env []string, name string, args ...string) *program {
	t.Helper()
	if !filepath.IsAbs(name) {
		name = filepath.Join(systemsDir(t), name)
	}
	p := startLines(t, append(env, "PYTHONDONTWRITEBYTECODE=1"), append([]string{debianPython, "-W", "ignore", name}, args...)...)
	p.name = filepath.Base(name)
	return p
}

func startLines(t *testing.T, env []string, argv ...string) *program {
	t.Helper()
	// Without the umask, strangers would be refused for their rights alone.
	cmd := command("/bin/sh", append([]string{"-c", `umask 0; exec "$@"`, "sh"}, argv...)...)
	cmd.Env = append(cmd.Env, env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	r, w, err := os.Pipe()
	mustDo(t, err)
	in, err := cmd.StdinPipe()
	mustDo(t, err)
	stderr, err := os.Create(filepath.Join(tempDir(t), "stderr"))
	mustDo(t, err)
	mark := "PROGRAM=" + stderr.Name()
	cmd.Env = append(cmd.Env, mark)
	cmd.Stdout, cmd.Stderr = w, stderr
	p := &program{Proc: startCmd(t, cmd), name: filepath.Base(argv[0]), err: stderr.Name(), in: in, pipe: r, out: bufio.NewReader(r)}
	w.Close()
	stderr.Close()
	t.Cleanup(func() {
		// What it started is in its group, and may outlive it.
		p.group.signal(syscall.SIGKILL)
		p.Proc.Wait()
		eventually(t, "what it started is gone", func() bool { return len(pidsWithEnv(mark)) == 0 })
		r.Close()
	})
	return p
}

// systemsDir is where the programs are.
func systemsDir(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("systems")
	mustDo(t, err)
	return dir
}

func (p *program) tell(format string, args ...any) {
	p.t.Helper()
	_, err := fmt.Fprintf(p.in, format+"\n", args...)
	mustDo(p.t, err)
}

// line is the next one that it says.
func (p *program) line() string {
	p.t.Helper()
	p.pipe.SetReadDeadline(time.Now().Add(2 * patience))
	line, err := p.out.ReadString('\n')
	p.said.WriteString(line)
	if err != nil || strings.HasPrefix(line, "error") {
		p.t.Fatalf("%s: %v after %q", p.name, err, p.rest())
	}
	return strings.TrimSpace(line)
}

// rest is all that it said so far.
func (p *program) rest() string {
	p.pipe.SetReadDeadline(time.Now().Add(time.Millisecond))
	b, _ := io.ReadAll(p.out)
	p.said.Write(b)
	stderr, _ := os.ReadFile(p.err)
	return p.said.String() + string(stderr)
}

// hear wants that its next line begins so.
func (p *program) hear(want string) string {
	p.t.Helper()
	line := p.line()
	if !strings.HasPrefix(line, want) {
		p.t.Fatalf("%s said %q, want %q", p.name, p.rest(), want)
	}
	return line
}

// ask tells it to do something, and wants an answer that begins so.
func (p *program) ask(request, want string) string {
	p.t.Helper()
	p.tell("%s", request)
	return p.hear(want)
}

// end ends its standard input, and tells what else it said and how it ended.
func (p *program) end() string {
	p.t.Helper()
	p.in.Close()
	p.pipe.SetReadDeadline(time.Now().Add(2 * patience))
	b, _ := io.ReadAll(p.out)
	p.said.Write(b)
	return fmt.Sprintf("exit %d: %s", p.Wait().Status, strings.ReplaceAll(strings.TrimSpace(string(b)), "\n", "; "))
}
