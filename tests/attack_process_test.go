//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestAttackKillOwner attacks R4: an owner is killed with -9 in all kinds of
// locks. When it has been waited for, the next one gets the lock at its first
// try, and nothing of the dead one is left.
func TestAttackKillOwner(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	rival := agent(t)
	scripts := map[string]string{
		"create":  `set -C; : >D/devserver`,
		"mkdir":   `mkdir D/devserver`,
		"symlink": `ln -s x D/devserver`,
		"link":    `: >tmp$$; ln tmp$$ D/devserver`,
		"rename":  `: >tmp$$; mv -T tmp$$ D/devserver`,
	}
	groups := map[string]bool{}
	for _, name := range []string{"create", "mkdir", "symlink", "link", "rename"} {
		for i := range 25 {
			// The tools exit with 0, so that the lock passes to the shell (R5).
			script := scripts[name] + `; echo; sleep 60`
			cmd := exec.Command("/bin/sh", "-c", script)
			cmd.Dir = m.Path
			cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
			cmd.Stderr = os.Stderr // Wait is to wait for the shell alone
			start, out := linesOf(t, cmd)
			p := start()
			_, err := out.ReadString('\n')
			mustDo(t, err)
			rival.want("EEXIST", "creat", m.At("D/devserver"), "wronly,creat,excl")
			if i%2 == 0 {
				p.group.signal(syscall.SIGSTOP) // a stopped one holds, too
				rival.want("EBUSY", "creat", m.At("D/x"), "wronly,creat")
			}
			killGroup(t, p)
			if got := rival.Try("creat", m.At("D/devserver"), "wronly,creat,excl"); got != "ok" {
				t.Fatalf("%s: the next one's create = %s", name, got)
			}
			rival.must("creat", m.At("D/x"), "wronly,creat,trunc")
			rival.must("unlink", m.At("D/devserver"))
			groups[itoa(p.Pid())] = true
		}
	}
	m.wantFree("D")
	eventually(t, "all groups are dead", func() bool {
		procs, _ := filepath.Glob("/proc/[0-9]*/stat")
		return !slices.ContainsFunc(procs, func(stat string) bool {
			f := statFields(stat)
			return len(f) > 2 && f[0] != "Z" && groups[f[2]]
		})
	})
}

// TestAttackKillRace attacks R4 and C3a: a rival tries without a pause while the
// owner is killed. Once it has the lock, the owner is dead.
func TestAttackKillRace(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	rival := agent(t)
	for i := range 40 {
		owner := agent(t)
		how := []string{"create", "mkdir", "link", "rename"}[i%4]
		for _, p := range protocols() {
			if p.name == how && p.take(owner, m.At("D"), itoa(i)) != "ok" {
				t.Fatal("the owner didn't get a free directory")
			}
		}
		done := make(chan bool)
		go func() { syscall.Kill(owner.Pid, syscall.SIGKILL); close(done) }()
		tries := 0
		for ; rival.Try("creat", m.At("D/devserver"), "wronly,creat,excl") != "ok"; tries++ {
			if tries > 20000 {
				t.Fatal("the dead owner's lock stays")
			}
		}
		if running(owner.Pid) {
			t.Errorf("the rival has the lock while the owner (pid %d) lives", owner.Pid)
		}
		<-done
		m.wantOwner("D", rival.Pid)
		rival.must("unlink", m.At("D/devserver"))
	}
}

// TestAttackHandover attacks R5: mkdir(1) in a shell, and at once a write of the
// shell itself, which is never refused; a rival never gets in between.
func TestAttackHandover(t *testing.T) {
	m := mount(t)
	b, c := agent(t), stranger(t)
	storms := []*storm{
		b.storm([]string{"creat", m.At("D/rival"), "wronly,creat"}, []string{"creat", m.At("D/devserver"), "wronly,creat,excl"}, []string{"rename", m.At("D"), m.At("E")}),
		c.storm([]string{"mkdir", m.At("D/rival")}, []string{"chmod", m.At("D"), "0777"},
			// A10. Of a directory that was removed meanwhile it gets nothing but the file.
			[]string{"open", "h", m.At("D/devserver"), "rdwr,creat"}, []string{"flock", "h"},
			[]string{"creat", m.At("D/locked"), "wronly,creat"}, []string{"mknod", m.At("D/locked"), "fifo"}, []string{"close", "h"}),
	}
	script := `i=0; while [ $i -lt 60 ]; do
		i=$((i+1))
		mkdir -m 777 D || { echo "$i: mkdir refused"; continue; }
		: >D/a || echo "$i: the write after mkdir was refused"
		set -- D/*
		[ "$*" = D/a ] || echo "$i: found $*"
		rm -r D || echo "$i: rm refused"
	done`
	if r := sh(t, m.Path, script); r.Status != 0 || r.Out != "" {
		t.Errorf("the script: %v", r)
	}
	for _, s := range storms {
		for what, n := range s.over() {
			if strings.HasSuffix(what, " ok") && !oneOf(what, "open ok|close ok|flock ok") {
				t.Errorf("a rival's %s: %d times", what, n)
			}
		}
	}
	// And with a lock file that a tool makes.
	openDir(t, m.Back("F"))
	script = `i=0; while [ $i -lt 50 ]; do
		i=$((i+1))
		ln -s x F/devserver 2>/dev/null || continue
		: >F/a || echo "$i: the write after ln was refused"
		rm F/a F/devserver || echo "$i: rm refused"
	done`
	racers := []*Proc{}
	for range 2 {
		cmd := exec.Command("/bin/sh", "-c", script)
		cmd.Dir = m.Path
		racers = append(racers, startCmd(t, cmd))
	}
	for _, p := range racers {
		if r := p.Wait(); r.Status != 0 || r.Out != "" {
			t.Errorf("two scripts at once: %v", r)
		}
	}
	m.awaitFree("F")
}

// TestAttackPidReuse attacks H1: a process that gets the pid of one that held
// the directory a moment ago, while so much is asked that the daemon looks at nobody anew
// as long as no thread is made.
func TestAttackPidReuse(t *testing.T) {
	need(t, "root", "fuse")
	if f, err := os.OpenFile("/proc/sys/kernel/ns_last_pid", os.O_WRONLY, 0); err != nil {
		t.Skip(err)
	} else {
		f.Close()
	}
	m := mount(t)
	owner := agent(t)
	owner.must("mkdir", m.At("D"))
	owner.must("creat", m.At("D/busy"), "wronly,creat")
	busy := owner.Child().storm([]string{"chmod", m.At("D/busy"), "0600"}, []string{"chmod", m.At("D/busy"), "0640"})
	defer busy.over()
	hit := 0
	for try := 0; try < 60 && hit < 5; try++ {
		// A descendant holds (H2), is known to the daemon, and ends.
		got := owner.Get("sh", "for i in 1 2 3 4 5; do : >"+m.At("D/child")+"; done; echo $$")
		pid := atoi(strings.Fields(got)[1])
		// Start times have ticks of 10 ms: nobody's pid comes round as fast
		// as that by itself.
		time.Sleep(20 * time.Millisecond)
		out, _ := exec.Command("/bin/sh", "-c", `echo $1 >/proc/sys/kernel/ns_last_pid; /bin/sh -c 'echo $$; : >"$1"' sh "$2"; exit 1`,
			"sh", itoa(pid-1), m.At("D/stranger")).Output()
		if atoi(strings.TrimSpace(string(out))) != pid {
			continue
		}
		hit++
		if _, err := os.Lstat(m.Back("D/stranger")); err == nil {
			t.Fatalf("a stranger with the pid %d of a dead holder wrote beneath D", pid)
		}
	}
	t.Logf("%d pids used again", hit)
	if hit == 0 {
		t.Skip("no pid could be had again")
	}
}

// threads is a program that acquires on a thread, lets its first thread end,
// writes from another, and replaces itself from a thread that is not the first.
const threads = `
import ctypes, os, sys, threading, time
d, how = sys.argv[1], sys.argv[2]
libc = ctypes.CDLL(None)
def say(s): os.write(1, (s + "\n").encode())
def lock(): os.close(os.open(d + "/devserver", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
def write(name): os.close(os.open(d + "/" + name, os.O_CREAT | os.O_WRONLY))
if how == "again":
    write("after-exec")
    say("replaced")
    sys.stdin.readline()
    os._exit(3)
def first():
    t = threading.Thread(target=lock); t.start(); t.join()
    write("main")
    say("locked")
def second():
    sys.stdin.readline()
    write("second")
    if how == "exec":
        os.execv(sys.executable, [sys.executable, sys.argv[0], d, "again"])
    say("written")
    sys.stdin.readline()
    os._exit(3)
first()
threading.Thread(target=second).start()
if how == "leader":
    libc.syscall({'x86_64': 60}.get(os.uname().machine, 93), 0) # exit(2) of this thread alone
time.sleep(100)
`

// TestAttackThreads attacks H1 and R4: the thread that acquired is gone, the
// first thread is gone, another one replaces the program. The process holds
// until all of it has ended.
func TestAttackThreads(t *testing.T) {
	need(t, "root", "fuse", "/usr/bin/python3")
	m := mount(t)
	prog := filepath.Join(tempDir(t), "threads.py")
	mustDo(t, os.WriteFile(prog, []byte(threads), 0o644))
	for _, how := range []string{"plain", "leader", "exec"} {
		t.Run(how, func(t *testing.T) {
			openDir(t, m.Back(how))
			rival := agent(t)
			cmd := exec.Command("/usr/bin/python3", prog, m.At(how), how)
			in, err := cmd.StdinPipe()
			mustDo(t, err)
			start, out := linesOf(t, cmd)
			p := start()
			hear := func(want string) {
				t.Helper()
				if got, err := out.ReadString('\n'); got != want+"\n" {
					t.Fatalf("it says %q, then %v; want %q", got, err, want)
				}
			}
			hear("locked")
			refused := func() {
				t.Helper()
				rival.want("EEXIST", "creat", m.At(how, "devserver"), "wronly,creat,excl")
				rival.want("EBUSY", "creat", m.At(how, "x"), "wronly,creat")
				m.wantOwner(how, p.Pid())
			}
			if how == "leader" {
				eventually(t, "the first thread is a zombie", func() bool {
					stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Pid()))
					return strings.Contains(string(stat), ") Z ")
				})
			}
			refused()
			fmt.Fprintln(in)
			if how == "exec" {
				hear("replaced")
			} else {
				hear("written")
			}
			refused()
			fmt.Fprintln(in)
			p.Wait()
			rival.want("ok", "creat", m.At(how, "devserver"), "wronly,creat,excl")
		})
	}
}
