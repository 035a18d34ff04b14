//go:build linux

package tests

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// sh is a script that runs in the mount.
func (m *Mount) sh(text string) *exec.Cmd {
	cmd := exec.Command("/bin/sh", "-c", text)
	cmd.Dir = m.Path
	cmd.Env = append(os.Environ(), m.scriptMark())
	return cmd
}

// scriptMark is in the environment of the mount's scripts, and of all that they start.
func (m *Mount) scriptMark() string { return "STAGEFS_TEST_SCRIPT=" + m.Path }

// awaitScripts waits until all that scripts have left behind has ended.
func (m *Mount) awaitScripts() {
	m.t.Helper()
	eventually(m.t, "no process of the scripts is left", func() bool { return len(pidsWithEnv(m.scriptMark())) == 0 })
}

// needBirths skips a test where the kernel does not tell who makes which process.
func needBirths(t *testing.T) {
	t.Helper()
	need(t, "root", "fuse")
	var said struct {
		Checks []struct{ Name, Status, Detail string }
	}
	mustDo(t, json.Unmarshal([]byte(run(t, stagefsBin(), "doctor", "--json").Out), &said))
	for _, c := range said.Checks {
		if c.Name == "descent" && c.Status == "ok" {
			return
		} else if c.Name == "descent" && os.Getenv("STAGEFS_REQUIRE") == "1" {
			t.Fatal(c.Detail)
		}
	}
	t.Skip("the kernel does not tell who makes which process")
}

// Orphan starts a descendant of the agent whose parents are dead before it does
// anything: through is a shell script that runs "$@" as the last of several processes.
// It returns the number of the first of them, too.
func (a *Agent) Orphan(through string) (o *Agent, parent int) {
	a.t.Helper()
	o = awaitAgent(a.t, func(sock string) {
		said := a.Get("sh", fmt.Sprintf("exec 2>&1; set -- env '%s=%s' '%s'; cd /; sh -c 'echo $$; %s' sh \"$@\"", envAgent, sock, agentBin(), through))
		if _, err := fmt.Sscanf(said, "0 %d", &parent); err != nil {
			a.t.Fatalf("a shell said %q: %v", said, err)
		}
	})
	eventually(a.t, "the parents are dead", func() bool { return !running(parent) && parentOf(a.t, o.Pid) != parent })
	return o, parent
}

// Ways to be left behind.
const (
	leftOnce  = `"$@" </dev/null >/dev/null 2>/dev/null & exit 0`
	leftTwice = `(setsid "$@" </dev/null >/dev/null 2>/dev/null &) & wait`
)

// TestH2LeftBehind: who was made by a holder holds, although all that were between
// the two are dead before its first call; who was made by somebody else does not.
func TestH2LeftBehind(t *testing.T) {
	needBirths(t)
	for _, opts := range [][]string{nil, {"--compat"}, {"--unlocked=deny"}} {
		t.Run(strings.Join(opts, " "), func(t *testing.T) {
			m := mount(t, opts...)
			a, b := agent(t), agent(t)
			before, _ := a.Orphan(leftOnce)
			a.must("mkdir", m.At("D"))
			for i, through := range []string{leftOnce, leftTwice} {
				o, _ := a.Orphan(through)
				o.must("creat", m.At("D", itoa(i)), "wronly,creat")
				o.must("thread", "put", m.At("D", itoa(i)), "x", "")
				o.Child().must("mkdir", m.At("D", itoa(i)+"dir"))
				other, _ := b.Orphan(through)
				other.want("EBUSY", "creat", m.At("D/other"), "wronly,creat")
				other.Child().want("EBUSY", "put", m.At("D", itoa(i)), "other", "")
				other.want("EEXIST", "creat", m.At("D/devserver"), "wronly,creat,excl")
			}
			before.must("creat", m.At("D/before"), "wronly,creat")
			// Its child is one, too, and the child's; the one between was never seen.
			o, _ := a.Orphan(leftOnce)
			later, _ := o.Orphan(leftTwice)
			later.must("creat", m.At("D/later"), "wronly,creat")
			o.must("creat", m.At("D/o"), "wronly,creat")
			m.wantOwner("D", a.Pid)
			a.Kill()
			m.awaitFree("D")
			b.must("creat", m.At("D/devserver"), "wronly,creat,excl")
			for _, o := range []*Agent{before, o, later} {
				o.want("EBUSY", "creat", m.At("D/over"), "wronly,creat")
			}
			other, _ := b.Orphan(leftTwice)
			other.must("creat", m.At("D/b"), "wronly,creat")
		})
	}
}

// TestH2LeftBehindScripts: programs that put themselves into the background work in
// the directory of the script that has started them.
func TestH2LeftBehindScripts(t *testing.T) {
	needBirths(t)
	for name, daemon := range map[string]string{
		"shell":    `((sleep 0.3; echo x >late) &)`,
		"subshell": `(setsid sh -c "sleep 0.3; cp /etc/passwd late" >/dev/null 2>&1 &)`,
		"python": `python3 -c '
import os, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
time.sleep(0.3)
open("late", "w").write("x")
'`,
	} {
		t.Run(name, func(t *testing.T) {
			m := mount(t)
			script := startCmd(t, m.sh(`mkdir D && cd D && `+daemon+` && : >first; exec sleep 1000`))
			b := agent(t)
			eventually(t, "the daemon writes", func() bool {
				_, err := os.Stat(m.At("D/late"))
				return err == nil
			})
			b.want("EBUSY", "put", m.At("D/late"), "rival", "")
			for _, d := range m.Denials() {
				if d.Pid != b.Pid {
					t.Errorf("refused: %+v", d)
				}
			}
			script.Kill()
			m.awaitFree("D")
			m.awaitScripts()
		})
	}
}

// TestH2LeftBehindHandedOver: the descendants of who had the lock first are those of
// who has it now (R5).
func TestH2LeftBehindHandedOver(t *testing.T) {
	needBirths(t)
	m := mount(t)
	a := agent(t)
	o := awaitAgent(t, func(sock string) {
		a.must("sh", fmt.Sprintf(`cd '%s'; mkdir D; %s='%s' '%s' </dev/null >/dev/null 2>&1 & exit 0`, m.Path, envAgent, sock, agentBin()))
	})
	m.wantOwner("D", a.Pid)
	o.must("creat", m.At("D/x"), "wronly,creat")
	other, _ := agent(t).Orphan(leftTwice)
	other.want("EBUSY", "creat", m.At("D/y"), "wronly,creat")
}

// TestH2LeftBehindEntered: the init of a pid namespace adopts who has entered that, and
// is left behind there, and has not made it (W1); who was made there descends from it.
func TestH2LeftBehindEntered(t *testing.T) {
	needBirths(t)
	m := mount(t)
	a, enter := firstAgent(t)
	b := agent(t)
	a.must("mkdir", m.At("D"))
	m.wantOwner("D", a.hostPid())
	own := a.leave("env", "")
	own.must("creat", m.At("D/own"), "wronly,creat")
	own.Child().must("creat", m.At("D/child"), "wronly,creat")
	other := b.leave(enter, "")
	other.want("EBUSY", "creat", m.At("D/other"), "wronly,creat")
	other.Child().want("EBUSY", "put", m.At("D/own"), "other", "")
	other.want("EEXIST", "creat", m.At("D/devserver"), "wronly,creat,excl")
	// It is a descendant of who has had it made.
	b.must("mkdir", m.At("E"))
	other = b.leave(enter, "")
	other.must("creat", m.At("E/other"), "wronly,creat")
	other.Child().must("creat", m.At("E/child"), "wronly,creat")
}

// TestH2LeftBehindEnteredOpen: what such a process has open for writing, since whenever, is
// in the way of who has adopted it (C3d); what was made there has open is not.
func TestH2LeftBehindEnteredOpen(t *testing.T) {
	needBirths(t)
	m := mount(t)
	a, enter := firstAgent(t)
	b := agent(t)
	open := func(o *Agent) *Agent { o.must("open", "f", m.At("D/f"), "wronly"); return o }
	for name, c := range map[string]struct {
		holds bool
		left  func() *Agent
	}{
		"made there":              {true, func() *Agent { return open(a.leave("env", "")) }},
		"made there, before":      {true, func() *Agent { return a.stay("env").thenLeft(a, open) }},
		"entered":                 {false, func() *Agent { return open(b.leave(enter, "")) }},
		"entered, before it left": {false, func() *Agent { return b.stay(enter).thenLeft(a, open) }},
		"entered with it":         {false, func() *Agent { return b.leave(enter, "7>>"+m.At("D/f")) }},
	} {
		t.Run(name, func(t *testing.T) {
			m := m.on(t)
			if !exists(m.Back("D")) {
				openDir(t, m.Back("D"))
				openFile(t, m.Back("D/f"), "")
			}
			o := c.left()
			if c.holds {
				a.mustCommand(m, "acquire D")
				o.must("write", "f", "x")
			} else {
				a.want("EBUSY", "put", m.control("ctl"), "acquire D", "wronly")
				o.Kill()
				a.mustCommand(m, "acquire D")
			}
			o.Kill()
			a.mustCommand(m, "release D")
		})
	}
}

// firstAgent is the init of a new pid namespace, and how a shell has a command enter that.
func firstAgent(t *testing.T) (a *Agent, enter string) {
	t.Helper()
	need(t, "nsenter")
	var first *Proc
	a = awaitAgent(t, func(sock string) {
		cmd := agentCmd(sock)
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
		first = startCmd(t, cmd)
	})
	return a, fmt.Sprintf("nsenter -p -t %d", first.Pid())
}

// hostPid is the agent's number in the pid namespace of the test.
func (a *Agent) hostPid() int {
	a.t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", a.ends))
	mustDo(a.t, err)
	_, pid, _ := strings.Cut(string(b), "\nPid:\t")
	pid, _, _ = strings.Cut(pid, "\n")
	return atoi(pid)
}

// leave starts an agent that is left behind, by a program that waits for its parent. Before
// it enters, with opens a file.
func (a *Agent) leave(enter, with string) *Agent {
	a.t.Helper()
	return awaitAgent(a.t, func(sock string) {
		a.must("sh", fmt.Sprintf(`%s sh -c "%s='%s' '%s' </dev/null >/dev/null 2>&1 & exit 0" %s; true`, enter, envAgent, sock, agentBin(), with))
	})
}

// stay is leave whose parents live.
func (a *Agent) stay(enter string) *Agent {
	a.t.Helper()
	return awaitAgent(a.t, func(sock string) {
		a.must("sh", fmt.Sprintf(`%s sh -c "%s='%s' '%s' & wait" </dev/null >/dev/null 2>&1 & true`, enter, envAgent, sock, agentBin()))
	})
}

// thenLeft has it do something first, and then be left behind to by.
func (a *Agent) thenLeft(by *Agent, do func(*Agent) *Agent) *Agent {
	a.t.Helper()
	do(a)
	mustDo(a.t, syscall.Kill(parentOf(a.t, a.hostPid()), syscall.SIGKILL))
	eventually(a.t, "it is adopted", func() bool { return parentOf(a.t, a.hostPid()) == by.hostPid() })
	return a
}

// TestH2LeftBehindInLockDir: who was left behind counts among those who work in a
// directory that is a lock file, and those above the owner do not (R4).
func TestH2LeftBehindInLockDir(t *testing.T) {
	needBirths(t)
	m := mount(t)
	a := agent(t)
	a.must("mkdir", m.At("D"))
	a.must("mkdir", m.At("D/devserver"))
	o, _ := a.Orphan(leftTwice)
	o.must("creat", m.At("D/devserver/x"), "wronly,creat")
	o.Kill()
	a.Kill()
	eventually(t, "the lock file is removed", func() bool {
		_, err := os.Stat(m.Back("D/devserver"))
		return os.IsNotExist(err)
	})
	m.awaitFree("D")
}

// orphanAt is Orphan whose parent has a certain number, and so has it, if both are
// not 0.
func (a *Agent) orphanAt(parent, pid int) *Agent {
	a.t.Helper()
	const last = "/proc/sys/kernel/ns_last_pid"
	if f, err := os.OpenFile(last, os.O_WRONLY, 0); err != nil {
		a.t.Skip(err)
	} else {
		f.Close()
	}
	return awaitAgent(a.t, func(sock string) {
		for end := time.Now().Add(patience); time.Now().Before(end); {
			// Others make processes, too. Each shell ends if it has the wrong number.
			second := `"$@" </dev/null >/dev/null 2>&1 & exit 0`
			if pid != 0 {
				second = fmt.Sprintf(`echo %d >%s; sh -c '\''[ $$ = %d ] && exec "$@"'\'' sh "$@" </dev/null >/dev/null 2>&1 &
					sleep 0.05; grep -qs agent /proc/%d/cmdline`, pid-1, last, pid, pid)
			}
			first := `sh -c '` + second + `' sh "$@"`
			if parent != 0 {
				first = fmt.Sprintf(`echo %d >%s; sh -c '[ $$ = %d ] || exit 1; %s' sh "$@"`, parent-1, last, parent, second)
			}
			script := fmt.Sprintf("set -- env '%s=%s' '%s'; cd /; %s", envAgent, sock, agentBin(), first)
			if strings.HasPrefix(a.Get("sh", script), "0 ") {
				return
			}
		}
		a.t.Fatalf("nobody had the numbers %d and %d", parent, pid)
	})
}

// TestH2Numbers: the numbers of dead holders, and of their dead children, make nobody
// a holder.
func TestH2Numbers(t *testing.T) {
	needBirths(t)
	m := mount(t)
	a, b := agent(t), agent(t)
	a.must("mkdir", m.At("D"))
	for i, seen := range []bool{true, false} {
		o, parent := a.Orphan(leftOnce)
		if seen {
			o.must("creat", m.At("D", itoa(i)), "wronly,creat")
		}
		o.Kill()
		// First, since the number may be the next after its parent's.
		asItself := b.orphanAt(0, o.Pid)
		if asItself.Pid != o.Pid {
			t.Fatalf("pid %d, want %d", asItself.Pid, o.Pid)
		}
		asItself.want("EBUSY", "creat", m.At("D/itself"), "wronly,creat")
		child, _ := asItself.Orphan(leftTwice)
		child.want("EBUSY", "creat", m.At("D/child"), "wronly,creat")
		asParent := b.orphanAt(parent, 0)
		asParent.want("EBUSY", "creat", m.At("D/parent"), "wronly,creat")
		asParent.Child().want("EBUSY", "creat", m.At("D/parent"), "wronly,creat")
	}
	// And the other way around.
	o, parent := b.Orphan(leftOnce)
	o.want("EBUSY", "creat", m.At("D/b"), "wronly,creat")
	o.Kill()
	a.orphanAt(0, o.Pid).must("creat", m.At("D/a"), "wronly,creat")
	a.orphanAt(parent, 0).must("creat", m.At("D/aa"), "wronly,creat")
}

// flood makes more threads than the daemon can hear of while it is stopped, as it would
// of processes.
func flood(t *testing.T) {
	t.Helper()
	var here unix.CPUSet
	mustDo(t, unix.SchedGetaffinity(0, &here))
	cpu := 0
	for !here.IsSet(cpu) {
		cpu++
	}
	// On one processor, whose buffer has room for 16384 ends and beginnings.
	r := run(t, "taskset", "-c", itoa(cpu), "python3", "-c", `
import _thread
for i in range(12000):
    ended = _thread.allocate_lock()
    ended.acquire()
    _thread.start_new_thread(ended.release, ())
    ended.acquire()
`)
	if r.Status != 0 {
		t.Fatal(r)
	}
}

// TestH2Flood: of whom the daemon could not hear, as too many processes were made, it
// does not know whom it descends from; it is no holder. Others are, who were
// made before or afterwards.
func TestH2Flood(t *testing.T) {
	needBirths(t)
	need(t, "taskset", "python3")
	m := mount(t)
	a, b := agent(t), agent(t)
	a.must("mkdir", m.At("D"))
	early, _ := a.Orphan(leftTwice)
	dies, _ := a.Orphan(leftTwice)
	a.Child().must("creat", m.At("D/1"), "wronly,creat") // it hears of all up to now
	daemon := m.daemon()
	halt(t, daemon)
	defer syscall.Kill(daemon, syscall.SIGCONT)
	unheard, _ := a.Orphan(leftTwice)
	stranger, _ := b.Orphan(leftTwice)
	dies.Kill()
	flood(t)
	again := b.orphanAt(0, dies.Pid)
	mustDo(t, syscall.Kill(daemon, syscall.SIGCONT))
	unheard.want("EBUSY", "creat", m.At("D/unheard"), "wronly,creat")
	stranger.want("EBUSY", "creat", m.At("D/stranger"), "wronly,creat")
	again.want("EBUSY", "creat", m.At("D/again"), "wronly,creat")
	early.must("creat", m.At("D/early"), "wronly,creat")
	late, _ := a.Orphan(leftTwice)
	late.must("creat", m.At("D/late"), "wronly,creat")
	other, _ := b.Orphan(leftTwice)
	other.want("EBUSY", "creat", m.At("D/other"), "wronly,creat")
}

// TestS1ReplaceLeftBehind: the next program knows of those who were left behind before
// it came, and a daemon that starts after a crash of those from then on.
func TestS1ReplaceLeftBehind(t *testing.T) {
	needBirths(t)
	m := mount(t)
	a, b := agent(t), agent(t)
	a.must("mkdir", m.At("D"))
	early, _ := a.Orphan(leftTwice)
	twice, _ := a.Orphan(leftTwice)
	dies, _ := a.Orphan(leftTwice)
	stranger, _ := b.Orphan(leftTwice)
	unseen := a.Child() // lives, and has done nothing
	m.replace()
	dies.Kill()
	again := b.orphanAt(0, dies.Pid)
	again.want("EBUSY", "creat", m.At("D/again"), "wronly,creat")
	early.must("creat", m.At("D/early"), "wronly,creat")
	child, _ := early.Orphan(leftTwice)
	child.must("creat", m.At("D/child"), "wronly,creat")
	below, _ := unseen.Orphan(leftTwice)
	below.must("creat", m.At("D/below"), "wronly,creat")
	stranger.want("EBUSY", "creat", m.At("D/stranger"), "wronly,creat")
	m.replace()
	twice.must("creat", m.At("D/twice"), "wronly,creat")
	late, _ := a.Orphan(leftTwice)
	late.must("creat", m.At("D/late"), "wronly,creat")

	lost, _ := a.Orphan(leftTwice)
	m.restart(nil)
	lost.want("EBUSY", "creat", m.At("D/lost"), "wronly,creat")
	stranger.want("EBUSY", "creat", m.At("D/stranger"), "wronly,creat")
	late, _ = a.Orphan(leftTwice)
	late.must("creat", m.At("D/later"), "wronly,creat")
	other, _ := b.Orphan(leftTwice)
	other.want("EBUSY", "creat", m.At("D/other"), "wronly,creat")
}

// TestS1ReplaceUnseen: a process that the next program sees for the first time descends from
// its parents, also from one that has done nothing so far, below one that was seen: that one
// inherits (R5), and what it acquires is its child's, too.
func TestS1ReplaceUnseen(t *testing.T) {
	m := mount(t)
	seen := agent(t)
	seen.must("creat", m.At("f"), "wronly,creat")
	parent := seen.Child()
	first, second := parent.Child(), parent.Child()
	m.replace()
	first.must("mkdir", m.At("D"))
	second.must("creat", m.At("g"), "wronly,creat")
	first.Exit(0)
	eventually(t, "the parent has it", func() bool { return m.Locks()["D"].Pid == parent.Pid })
	parent.must("mkdir", m.At("E"))
	for _, dir := range []string{"D", "E"} {
		second.must("creat", m.At(dir, "f"), "wronly,creat")
		seen.want("EBUSY", "creat", m.At(dir, "of-seen"), "wronly,creat")
	}
}

// TestH2LeftBehindMany: of a great many that are made at once by several, each is known
// for what it is.
func TestH2LeftBehindMany(t *testing.T) {
	needBirths(t)
	const each = 150
	m := mount(t)
	dirs := []string{"D", "E", "F"}
	var scripts []*Proc
	for i, d := range dirs {
		other := dirs[(i+1)%len(dirs)]
		scripts = append(scripts, startCmd(t, m.sh(fmt.Sprintf(`mkdir %[1]s && echo x >%[1]s/own
			until [ -e D/own ] && [ -e E/own ] && [ -e F/own ]; do sleep 0.01; done
			i=0; while [ $i -lt %[3]d ]; do
				( ([ $((i %% 3)) = 0 ] || sleep 0.0$((i %% 7)); : >%[1]s/$i; : >%[2]s/from%[1]s$i) 2>/dev/null & )
				i=$((i+1))
			done; exec sleep 1000`, d, other, each))))
	}
	for _, d := range dirs {
		eventually(t, "all have written in "+d, func() bool {
			entries, _ := os.ReadDir(m.Back(d))
			n := 0
			for _, e := range entries {
				if strings.HasPrefix(e.Name(), "from") {
					t.Fatalf("%s was made in %s", e.Name(), d)
				} else if e.Name() != "own" {
					n++
				}
			}
			return n == each
		})
	}
	for _, s := range scripts {
		s.Kill()
	}
	m.awaitScripts()
}

// TestH2LeftBehindUntold: where the kernel does not tell who makes which process, who
// was not seen before its parents' death is nobody's descendant.
func TestH2LeftBehindUntold(t *testing.T) {
	paranoid, err := os.ReadFile("/proc/sys/kernel/perf_event_paranoid")
	if err != nil || strings.HasPrefix(string(paranoid), "-") || strings.HasPrefix(string(paranoid), "0") {
		t.Skip("the kernel tells everybody")
	}
	m := mountUser(t)
	a := stranger(t)
	a.must("mkdir", m.At("D"))
	o, _ := a.Orphan(leftTwice)
	o.want("EBUSY", "creat", m.At("D/x"), "wronly,creat")
	a.Child().must("creat", m.At("D/x"), "wronly,creat")
	m.wantLog("perf_event_open(2): permission denied")
}

// TestFaultExecLeftBehind: who was left behind by a child of a process in execve(2) is
// known all the same, if not as a descendant of that one.
func TestFaultExecLeftBehind(t *testing.T) {
	needBirths(t)
	e, m := newElsewhere(t), mount(t)
	maker, other := agent(t), agent(t)
	o, _ := maker.Orphan(leftTwice)
	child := o.Child()
	e.stick(maker)
	o.must("mkdir", m.At("D"))
	m.wantOwner("D", o.Pid)
	othersGoOn(t, m, other)
	child.must("put", m.At("D/x"), "x", "creat")
	other.want("EBUSY", "put", m.At("D/x"), "x", "")
	e.answer()
}
