//go:build linux

package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// replace has the daemon replaced, and makes sure that it was: by exec(2) in the
// same process, and not by a new mount.
func (m *Mount) replace() {
	m.t.Helper()
	pid, before := m.daemon(), m.goneOn()
	if r := run(m.t, stagefsBin(), "mount", "--replace", m.Path); r.Status != 0 {
		m.t.Fatalf("mount --replace: %v\n%s", r, shorten(m.Log()))
	}
	if now := m.daemon(); now != pid {
		m.t.Fatalf("served by pid %d, want %d", now, pid)
	}
	if now := m.goneOn(); now <= before {
		m.t.Fatalf("replaced %d times, want more than %d", now, before)
	}
	if strings.Contains(m.Log(), "mounting anew") {
		m.t.Fatalf("it mounted anew:\n%s", shorten(m.Log()))
	}
}

// goneOn is how often a daemon went on in the place of another.
func (m *Mount) goneOn() int { return strings.Count(m.Log(), `msg="goes on"`) }

// replaceWays are the ways in which requests and data come to the daemon.
func replaceWays(t *testing.T, f func(t *testing.T, opts []string)) {
	for _, transport := range []string{"threads", "uring"} {
		for _, data := range []string{"", "--no-passthrough"} {
			t.Run(strings.TrimSuffix(transport+data, "-"), func(t *testing.T) {
				needTransport(t, transport)
				f(t, strings.Fields("--transport "+transport+" "+data))
			})
		}
	}
}

// TestS1Replace: whatever a client has goes on when the daemon is replaced.
func TestS1Replace(t *testing.T) {
	replaceWays(t, func(t *testing.T, opts []string) {
		m := mountOver(t, opts...)
		a, b := agent(t), stranger(t)
		a.must("mkdir", m.At("D"))
		a.must("mkdir", m.At("D", "sub"))
		a.must("chdir", m.At("D", "sub"))
		a.must("open", "rw", m.At("D", "rw"), "rdwr,creat")
		a.must("write", "rw", "before ")
		a.must("open", "log", m.At("D", "log"), "wronly,creat,append")
		a.must("write", "log", "one ")
		a.must("open", "gone", m.At("D", "gone"), "rdwr,creat")
		a.must("write", "gone", "unlinked")
		a.must("unlink", m.At("D", "gone"))
		a.must("open", "map", m.At("D", "map"), "rdwr,creat")
		a.must("ftruncate", "map", "4096")
		mapped := a.Try("mmap", "m", "map") == "ok"
		a.must("open", "tmp", m.At("D"), "rdwr,tmpfile")
		a.must("write", "tmp", "nameless")
		a.must("put", m.At("D", "here"), "x", "creat")
		before := m.Locks()
		const handles = 5
		eventually(t, "what was closed is", func() bool { return m.metric("handles") == handles })
		for range 3 {
			m.replace()
			if got := m.metric("handles"); got != handles {
				t.Errorf("%d handles, want %d", got, handles)
			}
		}
		after := m.Locks()
		if len(after) != 1 || after["D"].Token != before["D"].Token || after["D"].Pid != a.Pid {
			t.Errorf("locks %v, want %v", after, before)
		}
		a.must("write", "rw", "after")
		if got := a.Get("pread", "rw", "20", "0"); got != "before after" {
			t.Errorf("read %q", got)
		}
		a.must("write", "log", "two")
		a.must("put", "there", "y", "creat") // in its working directory
		if got := a.Get("pread", "gone", "20", "0"); got != "unlinked" {
			t.Errorf("read %q of an unlinked file", got)
		}
		a.must("linkfd", "tmp", m.At("D", "tmp"))
		if mapped {
			a.must("poke", "m", "poked")
			if got := a.Get("pread", "map", "5", "0"); got != "poked" {
				t.Errorf("read %q of what was mapped", got)
			}
		}
		for name, want := range map[string]string{"rw": "before after", "log": "one two", "tmp": "nameless", "sub/there": "y", "here": "x"} {
			if got, err := os.ReadFile(m.At("D", name)); string(got) != want {
				t.Errorf("%s has %q, %v, want %q", name, got, err, want)
			}
		}
		b.want("EBUSY", "creat", m.At("D", "x"), "wronly,creat")
		// What is open still stands in the way (C3d), and no longer than it is.
		a.must("rename", m.At("D", "sub"), m.At("D", "moved"))
		a.must("put", "again", "z", "creat")
		for _, f := range []string{"rw", "log", "gone", "tmp", "map"} {
			a.must("close", f)
		}
		if mapped {
			a.must("munmap", "m")
		}
		if s := m.Ctl("release D"); s != "ok" && s != "EPERM" {
			t.Error(s)
		}
	})
}

// TestS1ReplaceLocks: advisory locks, and the directory locks that they stand
// for, go on, and those who wait for them keep their order.
func TestS1ReplaceLocks(t *testing.T) {
	replaceWays(t, func(t *testing.T, opts []string) {
		m := mountOver(t, opts...)
		for _, d := range []string{"D", "E"} {
			mustDo(t, os.Mkdir(m.At(d), 0o777))
			mustDo(t, os.Chmod(m.At(d), 0o777))
			if s := m.Ctl("release " + d); s != "ok" {
				t.Fatal(s)
			}
		}
		mustDo(t, os.WriteFile(m.At("plain"), nil, 0o666))
		mustDo(t, os.Chmod(m.At("plain"), 0o666))
		a, b := agent(t), stranger(t)
		a.must("open", "l", m.At("D", "devserver"), "rdwr,creat")
		a.must("flock", "l")
		a.must("open", "r", m.At("E", "devserver"), "rdwr,creat")
		a.must("setlk", "r", "wr")
		a.must("open", "p", m.At("plain"), "rdwr")
		a.must("setlk", "p", "wr")
		order := filepath.Join(tempDir(t), "order")
		mustDo(t, os.WriteFile(order, nil, 0o666))
		for i := range 4 {
			// The first two wait for a directory, the others for a file.
			file := m.At("D", "devserver")
			if i >= 2 {
				file = m.At("plain")
			}
			w := exec.Command("python3", "-c", `
import fcntl, sys
f = open(sys.argv[1], "r+")
fcntl.lockf(f, fcntl.LOCK_EX) if sys.argv[3] >= "2" else fcntl.flock(f, fcntl.LOCK_EX)
open(sys.argv[2], "a").write(sys.argv[3])
`, file, order, itoa(i))
			startCmd(t, w)
			eventually(t, "it waits", func() bool { return waitsInFuse(w.Process.Pid) })
		}
		before := m.Locks()
		for range 3 {
			m.replace()
		}
		for dir, row := range m.Locks() {
			if row.Token != before[dir].Token || row.Pid != before[dir].Pid {
				t.Errorf("%s: %+v, want %+v", dir, row, before[dir])
			}
		}
		if n := len(m.Listing().Waiters); n != 2 {
			t.Errorf("%d wait for directories, want 2", n)
		}
		b.must("open", "p", m.At("plain"), "rdwr")
		b.want("EAGAIN", "setlk", "p", "wr")
		b.want("EBUSY", "creat", m.At("D", "x"), "wronly,creat")
		b.want("EBUSY", "creat", m.At("E", "x"), "wronly,creat")
		if got, _ := os.ReadFile(order); len(got) > 0 {
			t.Fatalf("%q got a lock that was held", got)
		}
		a.must("close", "l")
		eventually(t, "the first two", func() bool { got, _ := os.ReadFile(order); return string(got) == "01" })
		a.must("close", "p")
		eventually(t, "the other two", func() bool { got, _ := os.ReadFile(order); return string(got) == "0123" })
		a.must("setlk", "r", "un")
		m.wantFree("E")
		m.awaitFree("D")
	})
}

// waitsInFuse reports whether a process is in a lock request.
func waitsInFuse(pid int) bool {
	b, _ := os.ReadFile("/proc/" + itoa(pid) + "/wchan")
	s, _ := os.ReadFile("/proc/" + itoa(pid) + "/syscall")
	nr, _, _ := strings.Cut(string(s), " ")
	return strings.Contains(string(b), "fuse") || strings.Contains(string(b), "request_wait") ||
		nr == itoa(unix.SYS_FLOCK) || nr == itoa(unix.SYS_FCNTL)
}

// TestS1ReplaceLine: a reader who waits behind a writer does not get past it
// because the daemon is replaced (A8).
func TestS1ReplaceLine(t *testing.T) {
	replaceWays(t, func(t *testing.T, opts []string) {
		m := mountOver(t, opts...)
		mustDo(t, os.Mkdir(m.At("D"), 0o777))
		if s := m.Ctl("release D"); s != "ok" {
			t.Fatal(s)
		}
		order := filepath.Join(tempDir(t), "order")
		mustDo(t, os.WriteFile(order, nil, 0o666))
		// With another status than 0 nothing passes to the parent that all have (R5).
		lock := func(how, end string) {
			startCmd(t, exec.Command("flock", how, m.At("D", "devserver"), "sh", "-c", `echo "$1" >>"$0"; `+end+`; exit 3`, order, how))
		}
		said := func() string { b, _ := os.ReadFile(order); return strings.Join(strings.Fields(string(b)), " ") }
		release := filepath.Join(tempDir(t), "release")
		lock("-s", "while ! [ -e "+release+" ]; do sleep 0.01; done")
		eventually(t, "a reader has it", func() bool { return said() == "-s" })
		lock("-x", ":")
		eventually(t, "a writer waits", func() bool { return len(m.Listing().Waiters) == 1 })
		lock("-s", ":")
		eventually(t, "a reader waits behind it", func() bool { return len(m.Listing().Waiters) == 2 })
		for range 10 {
			m.replace()
		}
		if got := said(); got != "-s" {
			t.Fatalf("order %q", got)
		}
		mustDo(t, os.WriteFile(release, nil, 0o644))
		eventually(t, "all are through", func() bool { return said() != "-s" && said() != "-s -x" })
		if got := said(); got != "-s -x -s" {
			t.Errorf("order %q", got)
		}
	})
}

// TestS1ReplaceKilled: a waiter that is killed while the daemon is being
// replaced, or after it, ends; an owner that is killed has its locks released.
func TestS1ReplaceKilled(t *testing.T) {
	replaceWays(t, func(t *testing.T, opts []string) {
		m := mountOver(t, opts...)
		mustDo(t, os.Mkdir(m.At("D"), 0o777))
		a := agent(t)
		a.must("open", "l", m.At("D", "devserver"), "rdwr,creat")
		for i := range 10 {
			b := agent(t)
			b.must("mkdir", m.At("B"+itoa(i)))
			w := exec.Command("flock", m.At("D", "devserver"), "true")
			startCmd(t, w)
			eventually(t, "it waits", func() bool { return waitsInFuse(w.Process.Pid) })
			done := make(chan struct{})
			go func() {
				defer close(done)
				w.Process.Kill()
				b.Kill()
			}()
			m.replace()
			<-done
			awaitEnd(t, "the waiter ends", w.Process.Pid)
			m.awaitFree("B" + itoa(i))
		}
	})
}

// TestS1ReplaceControl: open control files go on: a reader of events misses
// none, and who waits for the end of a lock hears of it.
func TestS1ReplaceControl(t *testing.T) {
	replaceWays(t, func(t *testing.T, opts []string) {
		m := mountOver(t, opts...)
		events := m.events(t)
		a := agent(t)
		a.must("mkdir", m.At("D"))
		events.want("acquired D")
		w := exec.Command(stagefsBin(), "wait", m.At("D"))
		startCmd(t, w)
		events.want("waiting D")
		m.replace()
		events.want("waiting D") // it asks again
		a.must("mkdir", m.At("E"))
		events.want("acquired E")
		m.replace()
		events.want("waiting D")
		a.Kill()
		awaitEnd(t, "the wait ends", w.Process.Pid)
		// Lines that were carried out before are not again.
		b := agent(t)
		mustDo(t, os.Mkdir(m.At("F"), 0o777))
		if s := m.Ctl("release F"); s != "ok" {
			t.Fatal(s)
		}
		c := agent(t)
		c.must("mkdir", m.At("G"))
		both := b.Start("ctl", m.control("ctl"), "acquire F\nacquire G wait=forever\n")
		eventually(t, "it waits", func() bool { return len(m.Listing().Waiters) == 1 })
		token := m.Locks()["F"].Token
		m.replace()
		c.Kill()
		if got := both(); got != "ok" {
			t.Errorf("two commands in one write: %s", got)
		}
		if now := m.Locks()["F"].Token; now != token {
			t.Errorf("token %d, want %d", now, token)
		}
	})
}

// TestS1ReplaceRefused: only root and who mounted can have the daemon replaced,
// by a program that nobody else can change and that can go on from here. Else
// the daemon serves on.
func TestS1ReplaceRefused(t *testing.T) {
	m := mountOver(t)
	pid := m.daemon()
	dir := tempDir(t)
	copied := func(name string, mode os.FileMode) string {
		to := filepath.Join(dir, name)
		mustDo(t, copyFile(stagefsBin(), to, mode))
		mustDo(t, os.Chmod(to, mode))
		return to
	}
	b := stranger(t)
	if out := b.Get("sh", stagefsBin()+" mount --replace "+m.Path); !strings.HasPrefix(out, "77 ") {
		t.Errorf("a stranger: %s", out)
	}
	b.want("EPERM", "put", m.control("ctl"), "replace\n", "wronly")
	if r := run(t, copied("writable", 0o777), "mount", "--replace", m.Path); r.Status != 77 || !strings.Contains(r.Err, "written by others") {
		t.Errorf("a program that others can write: %v", r)
	}
	other := copied("other", 0o755)
	mustDo(t, os.Chown(other, nobody, nobody))
	if r := run(t, other, "mount", "--replace", m.Path); r.Status != 77 || !strings.Contains(r.Err, "belongs to uid") {
		t.Errorf("another user's program: %v", r)
	}
	// The shell is a program of root's that knows nothing of this.
	if r := run(t, "sh", "-c", "echo replace >"+m.control("ctl")); r.Status == 0 {
		t.Errorf("the shell in place of the daemon: %v", r)
	}
	if r := run(t, stagefsBin(), "mount", "--replace", "--strict", m.Path); r.Status != 64 {
		t.Errorf("with another option: %v", r)
	}
	if r := run(t, stagefsBin(), "mount", "--replace", dir); r.Status != 69 {
		t.Errorf("where there is no mount: %v", r)
	}
	mustDo(t, os.WriteFile(m.At("file"), nil, 0o644))
	if now := m.daemon(); now != pid || m.goneOn() != 0 {
		t.Errorf("pid %d, want %d; replaced %d times", now, pid, m.goneOn())
	}
	plain := mountOver(t, "--transport", "fuse")
	if r := run(t, stagefsBin(), "mount", "--replace", plain.Path); r.Status != 69 || !strings.Contains(r.Err, "cannot be handed over; unmount, and mount with another --transport; ") {
		t.Errorf("with go-fuse's own server: %v", r)
	}
	mustDo(t, os.WriteFile(plain.At("file"), nil, 0o644))
}

// TestS1ReplaceOff: a daemon that is replaced while locks are switched off leaves
// alone what is recorded of them, and of candidates: both are there again with the
// next daemon that has locks.
func TestS1ReplaceOff(t *testing.T) {
	m := mountOver(t)
	owner, creator := agent(t), agent(t)
	owner.must("mkdir", m.At("D"))
	owner.must("put", m.At("D/devserver"), "", "creat,excl")
	parent := owner.Child()
	child := parent.Child("setsid")
	child.must("put", m.At("D/child"), "1", "creat")
	parent.Kill()
	child.must("put", m.At("D/child"), "2", "")
	openDir(t, m.At("L"))
	openDir(t, m.At("C"))
	m.Ctl("release L")
	m.Ctl("release C")
	owner.mustCommand(m, "acquire L client=x ttl=1h")
	candidate := m.At("C", candidateName(t, creator))
	creator.must("put", candidate, "pid", "creat,excl")
	before := m.Locks()

	m.unmounted(func() {}, "--disable-locking")
	m.replace()
	m.replace()
	creator.Kill()
	m.unmounted(func() {})

	after := m.Locks()
	for _, dir := range []string{"D", "L"} {
		if got, want := after[dir], before[dir]; want.Token == 0 || got.Token != want.Token || got.Pid != want.Pid || got.Client != want.Client {
			t.Errorf("lock of %s: %+v, want %+v", dir, got, want)
		}
	}
	m.wantOrphan("D/devserver", false)
	stranger(t).want("EBUSY", "creat", m.At("D/x"), "wronly,creat")
	child.must("put", m.At("D/child"), "3", "")
	eventually(t, "the candidate goes, its creator being dead", func() bool { return !exists(candidate) })
	creator = agent(t)
	creator.must("mkdir", m.At("E"))
	if token, last := m.Locks()["E"].Token, before["L"].Token; token <= last {
		t.Errorf("token %d after %d", token, last)
	}
}

// TestS1ReplaceCannot: a program that has begun and cannot go on mounts anew, as
// after a crash: what is open is lost, but no lock is.
func TestS1ReplaceCannot(t *testing.T) {
	m := mountOver(t)
	a := agent(t)
	a.must("mkdir", m.At("D"))
	token := m.Locks()["D"].Token
	// It runs as what asks for the replacement, and says that it can go on.
	// Instead of the daemon, it closes what was left to it first.
	run(t, buildBad(t), m.control("ctl"), stagefsBin())
	eventually(t, "the mount answers", func() bool { return m.daemon() != 0 })
	if row := m.Locks()["D"]; row.Token != token || row.Pid != a.Pid {
		t.Errorf("%+v, want token %d of pid %d", row, token, a.Pid)
	}
	if !strings.Contains(m.Log(), "mounting anew") {
		t.Error("it did not mount anew")
	}
	a.must("put", m.At("D", "file"), "x", "creat")
	stranger(t).want("EBUSY", "creat", m.At("D", "y"), "wronly,creat")
}

// TestS1ReplaceNotRun: if the program cannot be run after all, the daemon goes on
// with all that it has, and with those who wait.
func TestS1ReplaceNotRun(t *testing.T) {
	need(t, "root", "fuse")
	bad := buildBad(t)
	mustDo(t, os.WriteFile(filepath.Join(filepath.Dir(bad), "vanish"), nil, 0o644))
	replaceWays(t, func(t *testing.T, opts []string) {
		m := mountOver(t, opts...)
		mustDo(t, os.Mkdir(m.At("D"), 0o777))
		mustDo(t, os.Chmod(m.At("D"), 0o777))
		if s := m.Ctl("release D"); s != "ok" {
			t.Fatal(s)
		}
		pid := m.daemon()
		events := m.events(t)
		a, b := agent(t), agent(t)
		a.must("open", "l", m.At("D", "devserver"), "rdwr,creat")
		a.must("flock", "l")
		events.want("acquired D")
		a.must("open", "f", m.At("D", "file"), "rdwr,creat")
		b.must("open", "l", m.At("D", "devserver"), "rdwr,creat")
		waits := b.Start("sh", "flock "+m.At("D", "devserver")+" echo done")
		events.want("waiting D")
		for range 3 {
			mustDo(t, os.Chmod(bad, 0o755))
			r := run(t, bad, m.control("ctl"), stagefsBin())
			if !strings.Contains(r.Out, "permission denied") {
				t.Errorf("replace: %v", r)
			}
			events.want("waiting D") // it stands in line again
		}
		if now := m.daemon(); now != pid || m.goneOn() > 0 || strings.Contains(m.Log(), "mounting anew") {
			t.Errorf("served by %d, want %d:\n%s", now, pid, shorten(m.Log()))
		}
		a.must("write", "f", "after")
		stranger(t).want("EBUSY", "creat", m.At("D", "x"), "wronly,creat")
		a.must("close", "f")
		a.must("close", "l")
		if got := waits(); got != "ok" {
			t.Errorf("who waited: %s", got)
		}
		m.replace()
	})
}

// buildBad makes a program that empties what it is to go on from, and then is
// stagefs; after a while, if there is a file "slow" beside it, or it ends with the status
// in one called "exit".
func buildBad(t *testing.T) string {
	dir := tempDir(t)
	src := `package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

func main() {
	if len(os.Args) > 2 && os.Args[1] == "version" {
		if _, err := os.Stat("` + dir + `/vanish"); err == nil {
			os.Chmod("` + dir + `/bad", 0o644)
		}
		for format := range 100 {
			fmt.Println(format)
		}
		fmt.Println("idmap")
		return
	}
	if text := os.Getenv("STAGEFS_HANDOVER"); text != "" {
		if status, err := os.ReadFile("` + dir + `/exit"); err == nil {
			n, _ := strconv.Atoi(string(status))
			os.Exit(n)
		}
		var fd int
		fmt.Sscanf(text[strings.Index(text, "State")+len("State\":"):], "%d", &fd)
		syscall.Ftruncate(fd, 10)
		if _, err := os.Stat("` + dir + `/slow"); err == nil {
			time.Sleep(400 * time.Millisecond)
		}
		bin, _ := os.ReadFile("` + dir + `/bin")
		fmt.Fprintln(os.Stderr, syscall.Exec(string(bin), os.Args, os.Environ()))
		os.Exit(70)
	}
	os.WriteFile("` + dir + `/bin", []byte(os.Args[2]), 0o644)
	f, err := os.OpenFile(os.Args[1], os.O_RDWR, 0)
	if err == nil {
		_, err = f.WriteString("replace\n")
	}
	fmt.Println(err)
}
`
	mustDo(t, os.WriteFile(filepath.Join(dir, "bad.go"), []byte(src), 0o644))
	cmd := exec.Command("go", "build", "-trimpath", "-o", "bad", "bad.go") // as all else is built, or the libraries are built anew
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "CGO_ENABLED=0", "GO111MODULE=off")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return filepath.Join(dir, "bad")
}

// TestS1ReplaceSupervised: the supervisor notices nothing, and still does what
// it is there for.
func TestS1ReplaceSupervised(t *testing.T) {
	m := mountOver(t, "--supervise")
	for range 3 {
		m.replace()
	}
	if strings.Contains(m.Log(), "the daemon ended") {
		t.Error("the supervisor took it for an end")
	}
	for range 5 {
		old := m.daemon()
		mustDo(t, syscall.Kill(old, syscall.SIGKILL))
		m.awaitNext(old)
		m.replace() // as soon as it answers
	}
	mustDo(t, m.cmd.Process.Signal(syscall.SIGTERM))
	<-m.gone
	if mountedAt(m.Path) {
		t.Error("still mounted after SIGTERM to the supervisor")
	}
}
