//go:build linux

package tests

import (
	"bufio"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// A follower is a command that prints on and on.
type follower struct {
	*Proc
	out *bufio.Scanner
}

// follow starts a command, and waits until the daemon has seen that it reads
// the events.
func (m *Mount) follow(args ...string) *follower {
	m.t.Helper()
	start, out := outputOf(m.t, exec.Command(stagefsBin(), args...))
	f := &follower{start(), bufio.NewScanner(patientReader{out})}
	eventually(m.t, "it reads the events", func() bool {
		if !running(f.Pid()) {
			m.t.Fatalf("%v: %v", args, f.Wait())
		}
		fds, _ := os.ReadDir("/proc/" + itoa(f.Pid()) + "/fd")
		for _, fd := range fds {
			if to, _ := os.Readlink("/proc/" + itoa(f.Pid()) + "/fd/" + fd.Name()); strings.HasPrefix(to, m.control("events")) {
				return true
			}
		}
		return false
	})
	return f
}

// until reads up to a line that holds all words.
func (f *follower) until(words ...string) string {
	f.t.Helper()
	seen := ""
next:
	for f.out.Scan() {
		seen += f.out.Text() + "\n"
		for _, w := range words {
			if !strings.Contains(f.out.Text(), w) {
				continue next
			}
		}
		return f.out.Text()
	}
	f.t.Fatalf("never printed: %q; but, until %v:\n%s", words, f.out.Err(), seen)
	return ""
}

// TestR6EventsCommand: `events` prints what happens as it happens, of the
// directory that was asked for.
func TestR6EventsCommand(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	openDir(t, m.Back("elsewhere"))
	all, some, raw := m.follow("events", m.Path), m.follow("events", m.At("D")), m.follow("events", "--json", m.At("D"))
	_, p := m.runAgent("--why", "testing", m.At("D"))
	all.until("acquired D", "process "+itoa(p.Pid()))
	raw.until(`"event":"acquired"`, `"dir":"D"`)
	m.wantStatus(75, "", "run", "-n", m.At("D"), "true")
	all.until("refused D")
	m.wantStatus(0, "", "run", m.At("elsewhere"), "true")
	all.until("acquired elsewhere")
	all.until("released elsewhere", "released")
	m.wantStatus(0, "", "break", "--why", "it hangs", m.At("D"))
	all.until("broken D", "it hangs")
	raw.until(`"event":"broken"`, "it hangs")
	p.Wait()
	m.wantStatus(0, "", "run", m.At("D"), "true")
	seen := ""
	for !strings.Contains(seen, "broken") || strings.Count(seen, "acquired") < 2 {
		line := some.until("")
		seen += line + "\n"
	}
	if strings.Contains(seen, "elsewhere") {
		t.Errorf("events of D prints of others:\n%s", seen)
	}
	for _, f := range []*follower{all, some, raw} {
		mustDo(t, f.cmd.Process.Signal(syscall.SIGINT))
		f.Wait()
	}
}

// TestW6LongPath: who makes a path of any length keeps nobody from hearing of what
// happens elsewhere, or was refused later.
func TestW6LongPath(t *testing.T) {
	m := mount(t)
	a, b := stranger(t), stranger(t)
	elsewhere := m.follow("events", m.At("E"))
	a.must("mkdir", m.At("D"))
	a.must("chdir", m.At("D"))
	b.must("chdir", m.At("D"))
	name := strings.Repeat("\x01", 255) // of which JSON makes six times as much
	for range 800 {
		a.must("mkdir", name)
		a.must("chdir", name)
		b.must("chdir", name)
	}
	b.want("EBUSY", "creat", "x", "wronly,creat")
	b.want("EBUSY", "creat", m.At("D/later"), "wronly,creat")
	a.must("mkdir", m.At("E"))
	elsewhere.until("acquired E")
	m.wantWhy("D", "D/later")
	mustDo(t, elsewhere.cmd.Process.Signal(syscall.SIGINT))
	elsewhere.Wait()
}

// TestR6LocksWatch: `locks --watch` prints the table again when something has
// happened, and ends with a SIGINT or with the mount.
func TestR6LocksWatch(t *testing.T) {
	m := mount(t)
	w, raw := m.follow("locks", "--watch", m.Path), m.follow("locks", "--watch", "--json", m.Path)
	w.until("DIR", "TOKEN")
	a, b := agent(t), agent(t)
	a.must("mkdir", m.At("one"))
	w.until("one", itoa(a.Pid))
	raw.until(`"dir":"one"`)
	b.must("mkdir", m.At("two"))
	w.until("two", itoa(b.Pid))
	a.Kill()
	for {
		line := raw.until(`"locks"`)
		if !strings.Contains(line, `"dir":"one"`) && strings.Contains(line, `"dir":"two"`) {
			break
		}
	}
	mustDo(t, w.cmd.Process.Signal(syscall.SIGINT))
	if r := w.Wait(); r.Status != 0 {
		t.Errorf("locks --watch after SIGINT: %v", r)
	}
	mustDo(t, m.cmd.Process.Signal(syscall.SIGTERM))
	if r := raw.Wait(); r.Status != 69 {
		t.Errorf("locks --watch after the daemon's end: %v, want 69", r)
	}
	eventually(t, "the daemon ends", m.dead)
}
