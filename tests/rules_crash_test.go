//go:build linux

package tests

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stagefs/stagefs/lockstate"
)

// tree lists what is in a directory: paths, types and contents.
func tree(t *testing.T, dir string) []string {
	t.Helper()
	var all []string
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		rel, _ := filepath.Rel(dir, path)
		line := rel
		switch {
		case d.IsDir():
			line += "/"
		case d.Type()&os.ModeSymlink != 0:
			to, _ := os.Readlink(path)
			line += " -> " + to
		default:
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			line += "=" + string(b)
		}
		all = append(all, line)
		return nil
	})
	mustDo(t, err)
	slices.Sort(all)
	return all
}

// quarantine lists what was put aside.
func (m *Mount) quarantine() []lockstate.Quarantined {
	m.t.Helper()
	b, err := os.ReadFile(m.control("quarantine"))
	mustDo(m.t, err)
	var all []lockstate.Quarantined
	for line := range strings.Lines(string(b)) {
		var q lockstate.Quarantined
		mustDo(m.t, json.Unmarshal([]byte(line), &q))
		all = append(all, q)
	}
	return all
}

// The stages of TestR7: what an owner does in a directory that it made, and in
// one that was there before.
var (
	freshMade = []string{"f=1", "made/", "made/g=2", "s -> nowhere"}
	oldBefore = []string{"old/", "old/deep=1", "was=1"}
	oldAfter  = []string{"linked=out", "moved/", "moved/in=1", "old/", "old/deep=1 and more", "was=1"}
	oldMade   = []string{"f=1", "made/", "made/g=2", "old/", "old/new=3", "s -> nowhere"}
)

func stageIn(a *Agent, dir string) {
	a.must("put", dir+"/f", "1", "wronly,creat")
	a.must("mkdir", dir+"/made")
	a.must("put", dir+"/made/g", "2", "wronly,creat")
	a.must("symlink", "nowhere", dir+"/s")
}

// TestR7: what becomes of what was made under a lock, by policy and by how its
// owner ended; what was there before is never touched.
func TestR7(t *testing.T) {
	ends := map[string]struct {
		crash bool
		end   func(m *Mount, a *Agent, dir string)
	}{
		"killed":   {true, func(_ *Mount, a *Agent, _ string) { a.Kill() }},
		"exit 1":   {true, func(_ *Mount, a *Agent, _ string) { a.Exit(1) }},
		"exit 0":   {false, func(_ *Mount, a *Agent, _ string) { a.Exit(0) }},
		"released": {false, func(m *Mount, a *Agent, dir string) { a.must("put", m.control("ctl"), "release "+dir+"\n", "wronly") }},
		"failed": {true, func(m *Mount, a *Agent, dir string) {
			a.must("put", m.control("ctl"), "release "+dir+" failed\n", "wronly")
		}},
		"broken": {false, func(m *Mount, _ *Agent, dir string) { m.Ctl("break " + dir + " test") }},
	}
	for _, policy := range []string{"keep", "destroy", "quarantine"} {
		t.Run(policy, func(t *testing.T) {
			m := mount(t, "--on-crash", policy)
			out := m.Back("out")
			openDir(t, out)
			mustDo(t, os.WriteFile(out+"/file", []byte("out"), 0o666))
			for name, e := range ends {
				t.Run("fresh, "+name, func(t *testing.T) {
					m := m.on(t)
					dir := strings.ReplaceAll("fresh "+name, " ", "-")
					a := agent(t)
					a.must("mkdir", m.At(dir))
					stageIn(a, m.At(dir))
					e.end(m, a, dir)
					m.awaitFree(dir)
					switch {
					case !e.crash || policy == "keep":
						wantTree(t, m.Back(dir), freshMade)
					case policy == "destroy":
						wantGone(t, m, dir)
					default:
						wantGone(t, m, dir)
						wantQuarantined(t, m, dir, freshMade)
					}
				})
				t.Run("old, "+name, func(t *testing.T) {
					m := m.on(t)
					dir := strings.ReplaceAll("old "+name, " ", "-")
					old := m.Back(dir)
					openDir(t, old)
					mustDo(t, os.Mkdir(old+"/old", 0o777))
					mustDo(t, os.WriteFile(old+"/old/deep", []byte("1"), 0o666))
					mustDo(t, os.WriteFile(old+"/was", []byte("1"), 0o666))
					wantTree(t, old, oldBefore)
					mustDo(t, os.Mkdir(m.Back("out", "moved"+dir), 0o777))
					mustDo(t, os.WriteFile(m.Back("out", "moved"+dir, "in"), []byte("1"), 0o666))
					a := agent(t)
					a.must("creat", m.At(dir, "devserver"), "wronly,creat,excl")
					stageIn(a, m.At(dir))
					a.must("put", m.At(dir, "old", "new"), "3", "wronly,creat")
					a.must("put", m.At(dir, "old", "deep"), " and more", "wronly,append")
					a.must("rename", m.At("out", "moved"+dir), m.At(dir, "moved"))
					a.must("link", m.At("out", "file"), m.At(dir, "linked"))
					e.end(m, a, dir)
					m.awaitFree(dir)
					os.Remove(m.At(dir, "devserver")) // broken: an orphan
					switch {
					case !e.crash || policy == "keep":
						wantTree(t, old, append(slices.Clone(oldAfter), slices.DeleteFunc(slices.Clone(oldMade), func(s string) bool { return s == "old/" })...))
					case policy == "destroy":
						wantTree(t, old, oldAfter)
					default:
						wantTree(t, old, oldAfter)
						wantQuarantined(t, m, dir, oldMade)
					}
				})
			}
			eventually(t, "the trash is empty", func() bool {
				left, _ := filepath.Glob(m.Back(".stagefs", "trash", "*"))
				return len(left) == 0
			})
		})
	}
}

// TestR7Locked: who makes a directory, and then its lock file, has made both under
// the lock (A13): nothing is left in the way of the next one's mkdir.
func TestR7Locked(t *testing.T) {
	protocols := map[string]func(a *Agent, dir string){
		"creat": func(a *Agent, dir string) { a.must("creat", dir+"/devserver", "wronly,creat,excl") },
		"mkdir": func(a *Agent, dir string) { a.must("mkdir", dir+"/devserver.lock") },
		"link": func(a *Agent, dir string) {
			u := dir + "/" + candidateName(t, a)
			a.must("put", u, "pid", "creat,excl")
			a.must("link", u, dir+"/devserver.lock")
			a.must("unlink", u)
		},
		"flock": func(a *Agent, dir string) {
			a.must("open", "l", dir+"/devserver", "rdwr,creat")
			a.must("flock", "l")
		},
		"setlk": func(a *Agent, dir string) {
			a.must("open", "l", dir+"/devserver", "rdwr,creat")
			a.must("setlk", "l", "wr")
		},
	}
	for _, policy := range []string{"destroy", "quarantine"} {
		m := mount(t, "--on-crash", policy)
		for name, lock := range protocols {
			t.Run(policy+", "+name, func(t *testing.T) {
				m := m.on(t)
				a := agent(t)
				a.must("mkdir", m.At(name))
				lock(a, m.At(name))
				stageIn(a, m.At(name))
				a.Kill()
				m.awaitFree(name)
				wantGone(t, m, name)
				if policy == "quarantine" {
					made := freshMade
					if name == "flock" || name == "setlk" {
						made = append([]string{"devserver="}, made...) // it stays (R2)
					}
					wantQuarantined(t, m, name, made)
				}
			})
		}
	}
}

// TestR7Closed: a lock on a descriptor ends as others do, with the process, a command,
// or as the command's user says, if it was not unlocked or closed before (R2, R6).
func TestR7Closed(t *testing.T) {
	m := mount(t, "--on-crash", "destroy")
	events := m.events(t)
	command := func(line string) func(*Agent, string) {
		return func(a *Agent, dir string) { a.must("put", m.control("ctl"), fmt.Sprintf(line, dir), "wronly") }
	}
	for lock, args := range map[string][]string{"flock": {"l"}, "setlk": {"l", "wr"}, "ofdsetlk": {"l", "wr"}} {
		for name, e := range map[string]struct {
			left   []string // nil: the directory is gone
			reason string
			end    func(a *Agent, dir string)
		}{
			"killed":       {[]string{"devserver="}, "exited", func(a *Agent, _ string) { a.Kill() }},
			"exit 1":       {[]string{"devserver="}, "exited", func(a *Agent, _ string) { a.Exit(1) }},
			"exit 0":       {[]string{"devserver=", "f=1"}, "exited", func(a *Agent, _ string) { a.Exit(0) }},
			"closed":       {[]string{"devserver=", "f=1"}, "unlocked", func(a *Agent, _ string) { a.must("close", "l"); a.Kill() }},
			"unlocked":     {[]string{"devserver=", "f=1"}, "unlocked", func(a *Agent, _ string) { a.must(lock, "l", "un"); a.Kill() }},
			"removed":      {[]string{"f=1"}, "unlocked", func(a *Agent, dir string) { a.must("close", "l"); a.must("unlink", m.At(dir, "devserver")); a.Exit(1) }},
			"nothing made": {[]string{"devserver="}, "exited", func(a *Agent, dir string) { a.must("unlink", m.At(dir, "f")); a.Exit(0) }},
			"released":     {[]string{"devserver=", "f=1"}, "released", command("release %s\n")},
			"failed":       {[]string{"devserver="}, "failed", command("release %s failed\n")},
			"destroyed":    {nil, "released", command("release %s destroy\n")},
			"broken":       {[]string{"devserver=", "f=1"}, "broken", command("break %s test\n")},
		} {
			t.Run(lock+", "+name, func(t *testing.T) {
				m := m.on(t)
				events.t = t
				dir := strings.ReplaceAll(lock+" "+name, " ", "-")
				openDir(t, m.Back(dir))
				openFile(t, m.Back(dir, "devserver"), "")
				a := agent(t)
				a.must("open", "l", m.At(dir, "devserver"), "rdwr")
				a.must(append([]string{lock}, args...)...)
				a.must("put", m.At(dir, "f"), "1", "wronly,creat")
				e.end(a, dir)
				m.awaitFree(dir)
				if l := ending(events, dir); l.Reason != e.reason {
					t.Errorf("it ended: %+v, want %q", l, e.reason)
				}
				if e.left == nil {
					wantGone(t, m, dir)
					return
				}
				wantTree(t, m.Back(dir), e.left)
				agent(t).must("creat", m.At(dir, "new"), "wronly,creat")
			})
		}
	}
}

// TestR7ClosedShared: an owner that has closed its descriptor of a lock which a child
// has, too, and is killed, has crashed before the lock was given up. If the child
// ended before, it has not.
func TestR7ClosedShared(t *testing.T) {
	m := mount(t, "--on-crash", "destroy")
	for name, left := range map[string][]string{"owner": {"devserver="}, "child": {"devserver=", "f=1"}} {
		t.Run(name+" killed", func(t *testing.T) {
			m := m.on(t)
			openDir(t, m.Back(name))
			openFile(t, m.Back(name, "devserver"), "")
			script := `exec 9>devserver; flock 9; printf 1 > f; sleep 100 & exec 9>&-; echo $!; read go; kill -9 $$`
			cmd := exec.Command("sh", "-c", script)
			cmd.Dir = m.At(name)
			in, err := cmd.StdinPipe()
			mustDo(t, err)
			cmd.Stderr = os.Stderr // Wait is to wait for the shell alone
			start, out := linesOf(t, cmd)
			p := start()
			var child int
			_, err = fmt.Fscanln(out, &child)
			mustDo(t, err)
			end := func() {
				mustDo(t, syscall.Kill(child, syscall.SIGKILL))
				awaitEnd(t, "the child ends", child)
			}
			if name == "child" {
				end()
				m.awaitFree(name)
			}
			fmt.Fprintln(in)
			p.Wait()
			m.awaitFree(name)
			wantTree(t, m.Back(name), left)
			if name == "owner" {
				end()
			}
		})
	}
}

const closeAndDie = `
import fcntl, os, signal, struct, sys
at, rounds = sys.argv[1], int(sys.argv[2])
for i in range(rounds):
    for lock in "flock", "ofd":
        d = "%s/%s%d" % (at, lock, i)
        os.mkdir(d)
        pid = os.fork()
        if pid == 0:
            f = os.open(d + "/devserver", os.O_RDWR | os.O_CREAT)
            if lock == "flock":
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            else:
                fcntl.fcntl(f, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
            os.close(os.open(d + "/f", os.O_CREAT | os.O_WRONLY))
            os.close(f)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
`

// TestR7ClosedKilled: who is killed as soon as it has closed its descriptor has given its lock
// up, and not crashed, although the kernel tells the daemon of both at about the same time.
func TestR7ClosedKilled(t *testing.T) {
	need(t, "python3")
	const workers, rounds = 4, 50
	m := mount(t, "--on-crash", "destroy", "--depth", "3") // so that the parents have nothing
	var wg sync.WaitGroup
	for w := range workers {
		openDir(t, m.Back(strconv.Itoa(w)))
		wg.Go(func() {
			if out, err := exec.Command("python3", "-c", closeAndDie, m.At(strconv.Itoa(w)), strconv.Itoa(rounds)).CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
	wg.Wait()
	for _, lock := range []string{"flock", "ofd"} {
		lost := 0
		for i := range workers * rounds {
			dir := filepath.Join(strconv.Itoa(i%workers), lock+strconv.Itoa(i/workers))
			m.awaitFree(dir)
			if !exists(m.Back(dir, "f")) {
				lost++
			}
		}
		if lost > 0 {
			t.Errorf("%s: in %d of %d rounds the content was destroyed", lock, lost, workers*rounds)
		}
	}
}

func wantTree(t *testing.T, dir string, want []string) {
	t.Helper()
	want = slices.Sorted(slices.Values(want))
	if got := tree(t, dir); !slices.Equal(got, want) {
		t.Errorf("in %s: %q, want %q", filepath.Base(dir), got, want)
	}
}

func wantGone(t *testing.T, m *Mount, dir string) {
	t.Helper()
	for _, path := range []string{m.At(dir), m.Back(dir)} {
		if _, err := os.Lstat(path); !os.IsNotExist(err) {
			t.Errorf("%s: %v, want that it is gone", path, err)
		}
	}
	// So that a retry works.
	a := agent(t)
	a.must("mkdir", m.At(dir))
	a.must("put", m.At(dir, "x"), "x", "wronly,creat")
	a.must("unlink", m.At(dir, "x"))
	a.must("rmdir", m.At(dir))
}

// wantQuarantined finds what was put aside and puts it back.
func wantQuarantined(t *testing.T, m *Mount, dir string, want []string) {
	t.Helper()
	for _, q := range m.quarantine() {
		if string(q.Dir) != dir {
			continue
		}
		wantTree(t, m.Back(".stagefs", "quarantine", q.ID, "content"), want)
		before := []string(nil)
		if _, err := os.Lstat(m.Back(dir)); err == nil {
			before = tree(t, m.Back(dir))
		}
		if r := run(t, stagefsBin(), "quarantine", "--restore", q.ID, m.Path); r.Status != 0 {
			t.Errorf("restore: %v", r)
		}
		all := append(before, want...)
		slices.Sort(all)
		wantTree(t, m.At(dir), slices.Compact(all))
		return
	}
	t.Errorf("%s is not in quarantine", dir)
}

// TestR7Policy: an acquisition says for itself what becomes of its content.
func TestR7Policy(t *testing.T) {
	m := mount(t)
	for _, d := range []string{"C", "D"} {
		openDir(t, m.Back(d))
		mustDo(t, os.WriteFile(m.Back(d, "old"), []byte("1"), 0o666))
	}
	a := agent(t)
	a.must("put", m.control("ctl"), "acquire D on-crash=destroy\n", "wronly")
	a.must("put", m.At("D", "new"), "2", "wronly,creat")
	a.must("put", m.control("ctl"), "acquire C\n", "wronly")
	a.must("put", m.At("C", "new"), "2", "wronly,creat")
	a.Kill()
	m.awaitFree("D")
	m.awaitFree("C")
	wantTree(t, m.Back("D"), []string{"old=1"})
	wantTree(t, m.Back("C"), []string{"old=1", "new=2"})

	// `release destroy` is the holder's word: the directory and all in it.
	b := agent(t)
	b.must("put", m.control("ctl"), "acquire C\n", "wronly")
	stranger(t).want("EPERM", "put", m.control("ctl"), "release C destroy\n", "wronly")
	b.must("put", m.control("ctl"), "release C destroy\n", "wronly")
	wantGone(t, m, "C")
}

// TestR7Described: what is put aside is listed with whose it was, and why.
func TestR7Described(t *testing.T) {
	m := mount(t, "--on-crash=quarantine")
	openDir(t, m.Back("L"))
	a, client := stranger(t), stranger(t)
	a.must("mkdir", m.At("D"))
	a.must("put", m.At("D/f"), "1", "creat")
	token := m.Locks()["D"].Token
	lease := client.mustCommand(m, "acquire L client=x ttl=1h").Token
	client.must("put", m.At("L/f"), "1", "creat")
	a.Kill()
	m.awaitFree("D")
	client.mustCommand(m, "renew L client=x ttl=10ms")
	m.awaitFree("L")
	eventually(t, "both are listed", func() bool { return len(m.quarantine()) == 2 })
	for _, q := range m.quarantine() {
		want := lockstate.Quarantined{ID: q.ID, Dir: "D", Token: token, Pid: a.Pid, UID: nobody, Reason: "exited", Why: "signal 9", Time: q.Time}
		if q.Dir != "D" {
			want = lockstate.Quarantined{ID: q.ID, Dir: "L", Token: lease, Pid: client.Pid, UID: nobody, Client: "x", Reason: "expired", Time: q.Time}
		}
		if q != want || time.Since(q.Time).Abs() > time.Hour {
			t.Errorf("listed: %+v, want %+v", q, want)
		}
	}
}

// TestR7Entered: what came from elsewhere was not created under the lock, in whatever
// way it came, and neither is what came before anybody took note of it.
func TestR7Entered(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("out"))
	outside := func(name string) string {
		mustDo(t, os.WriteFile(m.Back("out", name), []byte(name), 0o666))
		return m.At("out", name)
	}
	outsideDir := func(name string) string {
		openDir(t, m.Back("out", name))
		outside(name + "/in")
		return m.At("out", name)
	}
	a := agent(t)
	a.must("mkdir", m.At("early"))
	a.must("rename", outside("early"), m.At("early", "f"))
	a.mustCommand(m, "acquire early on-crash=destroy")
	a.must("put", m.At("early", "new"), "1", "wronly,creat")
	a.Kill()
	m.awaitFree("early")
	wantTree(t, m.Back("early"), []string{"f=early"})

	m = mount(t, "--on-crash", "destroy")
	openDir(t, m.Back("out"))
	a = agent(t)
	a.must("mkdir", m.At("D"))
	for _, name := range []string{"f1", "f2", "f3"} {
		a.must("put", m.At("D", name), "own", "wronly,creat")
	}
	for _, name := range []string{"d1", "d2"} {
		a.must("mkdir", m.At("D", name))
	}
	a.must("rename", outside("1"), m.At("D", "f1"), "exchange")
	a.must("rename", m.At("D", "f2"), outside("2"), "exchange")
	a.must("rename", outsideDir("3"), m.At("D", "d1"), "exchange")
	a.must("rename", m.At("D", "d2"), outsideDir("4"), "exchange")
	a.must("rename", outside("5"), m.At("D", "moved"))
	a.must("link", outside("6"), m.At("D", "linked"))
	a.Kill()
	m.awaitFree("D")
	wantTree(t, m.Back("D"), []string{
		"d1/", "d1/in=3/in", "d2/", "d2/in=4/in", "f1=1", "f2=2", "linked=6", "moved=5",
	})
}

// TestR7Gone: what came from elsewhere and is no more is forgotten, however much of it
// there was. So the next daemon, to which no long list is left, knows what was made under
// the lock.
func TestR7Gone(t *testing.T) {
	m := mountOver(t, "--on-crash", "destroy")
	openDir(t, m.At("out"))
	if s := m.Ctl("release out"); s != "ok" && s != "ENOENT" {
		t.Fatal(s)
	}
	a := agent(t)
	a.must("mkdir", m.At("D"))
	for i := range 1100 {
		a.must("creat", m.At("out", "f"), "wronly,creat,excl")
		a.must("rename", m.At("out", "f"), m.At("D", "f")) // over the one before
		if i%2 == 0 {
			a.must("unlink", m.At("D", "f"))
		}
	}
	a.must("unlink", m.At("D", "f"))
	a.must("put", m.At("D", "made"), "1", "wronly,creat")
	m.restart(nil, "--on-crash", "destroy")
	a.Kill()
	m.awaitFree("D")
	wantGone(t, m, "D")

	// Who has another name is still here.
	b := agent(t)
	b.must("mkdir", m.At("D"))
	b.must("put", m.At("out", "kept"), "1", "wronly,creat")
	b.must("rename", m.At("out", "kept"), m.At("D", "kept"))
	b.must("link", m.At("D", "kept"), m.At("D", "too"))
	b.must("unlink", m.At("D", "kept"))
	b.Kill()
	m.awaitFree("D")
	wantTree(t, m.At("D"), []string{"too=1"})
}

// TestR7Others: what somebody else holds beneath, and what a lock was handed
// over with (R5), is not the dead owner's.
func TestR7Others(t *testing.T) {
	m := mount(t, "--on-crash", "destroy")
	a := agent(t)
	a.must("mkdir", m.At("D"))
	child := a.Child("setsid")
	child.must("mkdir", m.At("D", "sub"))
	child.must("creat", m.At("D", "sub", "devserver"), "wronly,creat,excl")
	child.must("put", m.At("D", "sub", "theirs"), "1", "wronly,creat")
	child.must("put", m.At("D", "gone"), "1", "wronly,creat")
	a.Kill()
	eventually(t, "the dead owner's lock ends", func() bool { return m.Locks()["D"].Pid != a.Pid })
	wantTree(t, m.Back("D"), []string{"sub/", "sub/devserver=", "sub/theirs=1"})
	m.wantOwner("D/sub", child.Pid)
	child.must("put", m.At("D", "sub", "theirs"), "2", "wronly,append")

	// The script is the owner of what its mkdir made.
	script := agent(t)
	if out := script.Get("sh", "mkdir "+m.At("S")+" && echo x >"+m.At("S")+"/f && exit 0"); !strings.HasPrefix(out, "0") {
		t.Fatal(out)
	}
	wantTree(t, m.Back("S"), []string{"f=x\n"})
}

// TestR7Big: a tree that is swept, not moved, is not in anybody's way meanwhile
// and its lock ends when that is over.
func TestR7Big(t *testing.T) {
	m := mount(t, "--on-crash", "destroy")
	openDir(t, m.Back("D"))
	mustDo(t, os.WriteFile(m.Back("D", "old"), nil, 0o666))
	a := agent(t)
	a.must("creat", m.At("D", "devserver"), "wronly,creat,excl")
	const files = 5000
	if out := a.Get("sh", fmt.Sprintf("cd %s && seq -f %%05g %d | xargs touch", m.At("D"), files)); !strings.HasPrefix(out, "0") {
		t.Fatal(out)
	}
	a.Kill()
	other := agent(t)
	deadline := time.Now().Add(patience)
	for other.Try("creat", m.At("D", "devserver"), "wronly,creat,excl") != "ok" {
		mustDo(t, os.WriteFile(m.At("elsewhere"), nil, 0o666))
		if time.Now().After(deadline) {
			t.Fatal("the lock does not end")
		}
	}
	// Whoever gets the directory finds it clean.
	wantTree(t, m.Back("D"), []string{"devserver=", "old="})
}

// TestR7DaemonKilled: if the daemon dies in the middle, the next one finishes or
// keeps; nothing of before is lost, and no lock is left.
func TestR7DaemonKilled(t *testing.T) {
	m := mountOver(t, "--on-crash", "quarantine")
	for i := range 12 {
		dir := "D" + itoa(i)
		openDir(t, m.At(dir))
		if s := m.Ctl("release " + dir); s != "ok" && s != "ENOENT" {
			t.Fatal(s)
		}
		mustDo(t, os.WriteFile(m.At(dir, "old"), []byte("1"), 0o666))
		a := agent(t)
		a.must("creat", m.At(dir, "devserver"), "wronly,creat,excl")
		for j := range 20 {
			a.must("put", m.At(dir, "new"+itoa(j)), "2", "wronly,creat")
		}
		fresh := agent(t)
		fresh.must("mkdir", m.At("F"+itoa(i)))
		fresh.must("put", m.At("F"+itoa(i), "f"), "2", "wronly,creat")
		m.restart(func() {}, "--on-crash", "quarantine") // what was made in D is not known any more
		go syscall.Kill(a.Pid, syscall.SIGKILL)
		go syscall.Kill(fresh.Pid, syscall.SIGKILL)
		time.Sleep(time.Duration(i) * 300 * time.Microsecond) // at any moment of it
		m.restart(nil, "--on-crash", "quarantine")
		m.awaitFree(dir)
		m.awaitFree("F" + itoa(i))
		if b, err := os.ReadFile(m.At(dir, "old")); string(b) != "1" {
			t.Errorf("%s: what was there before: %q, %v", dir, b, err)
		}
		if got := tree(t, m.At(dir)); len(got) != 21 {
			t.Errorf("%s: %q, want all of it: nobody knows what was made under the lock", dir, got)
		}
		// The whole of F is in one place.
		inPlace, err := os.ReadFile(m.At("F"+itoa(i), "f"))
		aside := 0
		for _, q := range m.quarantine() {
			if string(q.Dir) == "F"+itoa(i) {
				aside++
			}
		}
		if (err == nil) == (aside == 1) {
			t.Errorf("F%d: in place %q, %v; %d in quarantine", i, inPlace, err, aside)
		}
	}
}

// TestR7RestoreOver: what comes back is merged with a directory in the root, which is
// covered by the mount itself.
func TestR7RestoreOver(t *testing.T) {
	m := mountOver(t, "--on-crash", "quarantine")
	for _, into := range []string{"D", "E"} {
		a := agent(t)
		a.must("mkdir", m.At("D"))
		a.must("mkdir", m.At("D", "sub"))
		a.must("put", m.At("D", "sub", "f"), "new", "wronly,creat")
		a.Kill()
		m.awaitFree("D")
		all := m.quarantine()
		if len(all) != 1 {
			t.Fatalf("quarantine: %+v", all)
		}
		mustDo(t, os.MkdirAll(m.At(into, "sub"), 0o777))
		mustDo(t, os.WriteFile(m.At(into, "sub", "old"), []byte("old"), 0o666))
		if s := m.Ctl("release " + into); s != "ok" {
			t.Fatal(s)
		}
		p := startCmd(t, exec.Command(stagefsBin(), "quarantine", "--restore", all[0].ID, m.At(into)))
		eventually(t, "it is restored", p.over)
		if r := p.Wait(); r.Status != 0 {
			t.Fatalf("restore into %s: %v", into, r)
		}
		wantTree(t, m.At(into), []string{"sub/", "sub/f=new", "sub/old=old"})
		if all := m.quarantine(); len(all) != 0 {
			t.Errorf("still in quarantine: %+v", all)
		}
		mustDo(t, os.RemoveAll(m.At(into)))
	}
}

// TestR7Restore: nothing is replaced, only admins may, and what is deleted is
// gone from the backing.
func TestR7Restore(t *testing.T) {
	m := mount(t, "--on-crash", "quarantine")
	a := agent(t)
	a.must("mkdir", m.At("D"))
	a.must("put", m.At("D", "f"), "1", "wronly,creat")
	a.Kill()
	m.awaitFree("D")
	all := m.quarantine()
	if len(all) != 1 || all[0].Pid != a.Pid || string(all[0].Dir) != "D" {
		t.Fatalf("quarantine: %+v", all)
	}
	id := all[0].ID
	other := stranger(t)
	other.want("EPERM", "put", m.control("ctl"), "restore E id="+id+"\n", "wronly")
	other.want("EPERM", "put", m.control("ctl"), "discard . id="+id+"\n", "wronly")
	other.want("ENOTDIR", "stat", m.At(".stagefs", "quarantine", id))
	mustDo(t, os.Mkdir(m.At("E"), 0o777))
	mustDo(t, os.WriteFile(m.At("E", "f"), []byte("mine"), 0o666))
	if s := m.Ctl("release E"); s != "ok" {
		t.Fatal(s)
	}
	wantRefusal(t, "73", []string{"E/f", "in the way"}, "quarantine", "--restore", id, m.At("E"))
	wantTree(t, m.At("E"), []string{"f=mine"})
	holder := agent(t)
	holder.must("mkdir", m.At("H"))
	wantRefusal(t, "75", []string{"H"}, "quarantine", "--restore", id, m.At("H"))
	wantRefusal(t, "66", []string{"not there"}, "quarantine", "--restore", id, m.At("no/such"))
	wantRefusal(t, "66", []string{"999"}, "quarantine", "--restore", "999", m.Path)
	if r := run(t, stagefsBin(), "quarantine", m.Path); r.Status != 0 || !strings.Contains(r.Out, id) ||
		!strings.Contains(r.Out, all[0].Time.UTC().Format(time.RFC3339)) || !strings.Contains(r.Out, "exited: signal 9") {
		t.Errorf("%v", r)
	}
	if r := run(t, stagefsBin(), "quarantine", "--restore", id, m.At("G")); r.Status != 0 {
		t.Error(r)
	}
	wantTree(t, m.At("G"), []string{"f=1"})
	if left := m.quarantine(); len(left) != 0 {
		t.Errorf("still there: %+v", left)
	}

	b := agent(t)
	b.must("mkdir", m.At("D"))
	b.Exit(3)
	m.awaitFree("D")
	if r := run(t, stagefsBin(), "quarantine", "--delete-older", "1h", m.Path); r.Status != 0 {
		t.Error(r)
	}
	if left := m.quarantine(); len(left) != 1 || left[0].Why != "status 3" {
		t.Errorf("left: %+v, want the new one, of exit status 3", left)
	}
	for _, dir := range []string{"E", "D/x"} { // it is from neither
		if r := run(t, stagefsBin(), "quarantine", "--delete-older", "0s", m.At(dir)); r.Status != 0 || len(m.quarantine()) != 1 {
			t.Errorf("--delete-older 0s %s: %v, left: %+v", dir, r, m.quarantine())
		}
	}
	if r := run(t, stagefsBin(), "quarantine", "--delete-older", "0s", m.At("D")); r.Status != 0 || len(m.quarantine()) != 0 {
		t.Errorf("--delete-older 0s D: %v, left: %+v", r, m.quarantine())
	}
	c := agent(t)
	c.must("mkdir", m.At("D"))
	c.Exit(3)
	m.awaitFree("D")
	if r := run(t, stagefsBin(), "quarantine", "--delete-older", "0s", m.Path); r.Status != 0 {
		t.Error(r)
	}
	eventually(t, "nothing is left in the backing", func() bool {
		_, err := os.Lstat(m.Back(".stagefs"))
		return os.IsNotExist(err)
	})
}

// TestR7Foreign: a .stagefs of somebody else's in the backing is left alone, and
// the content kept.
func TestR7Foreign(t *testing.T) {
	dir := staticDir(t)
	mustDo(t, os.Symlink("/etc", dir+"/.stagefs"))
	m := mountDir(t, dir, dir+".mnt", "--on-crash", "destroy")
	a := agent(t)
	a.must("mkdir", m.At("D"))
	a.must("put", m.At("D", "f"), "1", "wronly,creat")
	a.Kill()
	m.awaitFree("D")
	wantTree(t, m.At("D"), []string{"f=1"})
	if to, err := os.Readlink(dir + "/.stagefs"); to != "/etc" {
		t.Errorf("%q, %v", to, err)
	}
}

// TestR7DestroyAtOnce: what many leave that die at once is destroyed, and nothing
// of it kept because what another left is being deleted meanwhile.
func TestR7DestroyAtOnce(t *testing.T) {
	m := mount(t, "--on-crash", "destroy")
	const owners = 24
	for range 5 {
		var pids []int
		for i := range owners {
			a := agent(t)
			a.must("mkdir", m.At("D"+itoa(i)))
			a.must("put", m.At("D"+itoa(i), "f"), "x", "wronly,creat")
			pids = append(pids, a.Pid)
		}
		for _, pid := range pids {
			mustDo(t, syscall.Kill(pid, syscall.SIGKILL))
		}
		for i := range owners {
			m.awaitFree("D" + itoa(i))
			if exists(m.Back("D" + itoa(i))) {
				t.Errorf("D%d is left", i)
				mustDo(t, os.RemoveAll(m.Back("D"+itoa(i))))
			}
		}
	}
	if strings.Contains(m.Log(), "content is kept") {
		t.Error("the log tells of content that is kept")
	}
	eventually(t, "the trash is gone", func() bool { return !exists(m.Back(".stagefs")) })
}
