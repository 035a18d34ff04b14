//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestAttackCandidateHandle attacks W3: the temporary file of a link(2)
// protocol in a free directory stands in no acquisition's way (A9), and must
// not be a way to write beneath the lock afterwards.
func TestAttackCandidateHandle(t *testing.T) {
	for _, how := range []string{"kept", "renamed", "linked"} {
		t.Run(how, func(t *testing.T) {
			m := mount(t)
			openDir(t, m.Back("D"))
			locker, b := agent(t), agent(t)
			u := m.At("D", candidateName(t, b))
			b.must("open", "h", u, "rdwr,creat,excl")
			b.must("write", "h", "before")
			mapped := b.Try("mmap", "m", "h") == "ok"
			switch how {
			case "renamed":
				b.must("rename", u, m.At("D/data"))
			case "linked":
				b.must("link", u, m.At("D/data"))
			}
			if got := locker.Try("creat", m.At("D/devserver"), "wronly,creat,excl"); got != "ok" {
				if got != "EEXIST" {
					t.Errorf("acquire = %s, want ok or EEXIST", got)
				}
				return
			}
			before := digest(t, m.Back("D"))
			attacks := [][]string{
				{"pwrite", "h", "e", "4", "0"},
				{"write", "h", "evil"},
				{"ftruncate", "h", "1"},
				{"fallocate", "h", "0", "0", "4096"},
				{"copyrange", m.At(".stagefs/version"), "h"},
				{"fchmod", "h", "0600"},
			}
			if mapped {
				attacks = append(attacks, []string{"poke", "m", "evil"})
			}
			for _, c := range attacks {
				got := b.Try(c...)
				if after := digest(t, m.Back("D")); after != before {
					t.Fatalf("%v = %s, and changed beneath D:\n%s", c, got, diff(before, after))
				}
			}
		})
	}
}

// TestAttackCandidateWins attacks W3 with a private candidate that is kept open,
// wins, and loses the lock again.
func TestAttackCandidateWins(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	first, b := agent(t), agent(t)
	first.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	u := m.At("D", candidateName(t, b))
	b.must("open", "h", u, "rdwr,creat,excl")
	b.must("write", "h", "pid")
	first.must("unlink", m.At("D/devserver"))
	b.must("link", u, m.At("D/devserver"))
	for _, c := range [][]string{
		{"write", "h", "!"}, {"pread", "h", "4", "0"}, {"ftruncate", "h", "2"}, {"fchmod", "h", "0666"}, {"seek", "h", "data", "0"},
	} {
		b.want("ok", c...)
	}
	if got, err := os.ReadFile(m.Back("D/devserver")); string(got) != "pi" {
		t.Errorf("the lock file has %q, %v, want %q", got, err, "pi")
	}
	b.must("unlink", m.At("D/devserver"))
	if got := first.Try("creat", m.At("D/devserver"), "wronly,creat,excl"); got == "EEXIST" {
		return // b's handle is in the way: fine (C3d)
	} else if got != "ok" {
		t.Errorf("acquire = %s", got)
	}
	before := digest(t, m.Back("D"))
	for _, c := range [][]string{{"write", "h", "evil"}, {"ftruncate", "h", "1"}, {"fchmod", "h", "0600"}} {
		got := b.Try(c...)
		if after := digest(t, m.Back("D")); after != before {
			t.Fatalf("%v = %s, and changed beneath D:\n%s", c, got, diff(before, after))
		}
	}
}

// TestAttackCandidateSeen attacks A9: strangers look for the candidate all the
// time, which must not take it from its creator. It is moved to no other name,
// and never reaches the backing.
func TestAttackCandidateSeen(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	locker, b, c := agent(t), agent(t), agent(t)
	locker.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	u := m.At("D", candidateName(t, b))
	s := c.storm([]string{"stat", u}, []string{"creat", u, "rdwr"}, []string{"unlink", u})
	before := digest(t, m.Back("D"))
	for range 150 {
		b.must("creat", u, "wronly,creat,excl")
		await(t, 2, s)
		b.must("put", u, "pid", "")
		b.must("stat", u)
		b.want("EEXIST", "link", u, m.At("D/devserver"))
		b.want("EBUSY", "rename", u, m.At("D/other"))
		b.want("EBUSY", "link", u, m.At("D/other"))
		b.want("EBUSY", "link", u, m.At("other"))
		b.must("unlink", u)
		b.want("ENOENT", "stat", u)
	}
	for what, n := range s.over() {
		if !oneOf(what, "stat ENOENT|creat ENOENT|unlink ENOENT|unlink EBUSY") {
			t.Errorf("a stranger's %s: %d times", what, n)
		}
	}
	if after := digest(t, m.Back("D")); after != before {
		t.Errorf("changed beneath D:\n%s", diff(before, after))
	}
}

// TestAttackCandidateSquatted attacks A9: a stranger makes one of that name first.
func TestAttackCandidateSquatted(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	locker, b, c := agent(t), agent(t), agent(t)
	locker.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	u := m.At("D", candidateName(t, b))
	c.Try("put", u, "squatter", "creat,excl")
	b.must("put", u, "mine", "creat,excl")
	if got := b.Get("read", u); got != "mine" {
		t.Errorf("b reads %q of its own candidate", got)
	}
	locker.must("unlink", m.At("D/devserver"))
	b.must("link", u, m.At("D/devserver"))
	if got, err := os.ReadFile(m.Back("D/devserver")); string(got) != "mine" {
		t.Errorf("the lock file has %q, %v", got, err)
	}
}

// TestAttackCandidateOfOthers attacks W1 and A9: another one's lock file, or a
// file of a holder that looks like a candidate, is nobody else's to link.
func TestAttackCandidateOfOthers(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	openDir(t, m.Back("E"))
	holder, b := agent(t), agent(t)
	holder.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	u := candidateName(t, holder)
	holder.must("put", m.At("D", u), "pid", "creat")
	before := digest(t, m.Back("D"))
	for _, src := range []string{"devserver", u} {
		for _, dst := range []string{"E/devserver", "E/" + u, "E/x", "D/devserver.lock"} {
			b.want("EBUSY|EEXIST", "link", m.At("D", src), m.At(dst))
			b.want("EBUSY|EEXIST", "rename", m.At("D", src), m.At(dst))
		}
		b.want("EBUSY", "unlink", m.At("D", src))
		b.want("EBUSY", "put", m.At("D", src), "x", "")
	}
	if after := digest(t, m.Back("D")); after != before {
		t.Errorf("changed beneath D:\n%s", diff(before, after))
	}
	m.wantFree("E")
}

// TestAttackCandidateReplaced attacks R4's clean-up: what somebody else has put
// in the place of a dead process's candidate stays.
func TestAttackCandidateReplaced(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	for i, how := range []string{"rename", "unlink", "exchange"} {
		a, b := agent(t), agent(t)
		u, data := m.At("D", candidateName(t, a)), m.At(fmt.Sprint("D/data", i))
		a.must("creat", u, "wronly,creat,excl")
		b.must("put", data, "precious", "creat")
		switch how {
		case "rename":
			b.must("rename", data, u)
		case "unlink":
			b.must("unlink", u)
			b.must("rename", data, u)
		case "exchange":
			b.must("rename", data, u, "exchange")
		}
		a.Kill()
		b.must("mkdir", m.At(fmt.Sprint("then", i))) // the news of the death is old
		eventually(t, "a's end is known", func() bool { return m.metric("locks") > i })
		if got, err := os.ReadFile(m.Back("D", candidateName(t, a))); string(got) != "precious" {
			t.Errorf("%s: what took the candidate's name has %q, %v", how, got, err)
		}
	}
}

// TestAttackUnlockedDeny attacks W4: where writing needs a lock, the protocols
// that make a temporary file first get one.
func TestAttackUnlockedDeny(t *testing.T) {
	m := mount(t, "--unlocked", "deny")
	openDir(t, m.Back("D"))
	b := agent(t)
	u := m.At("D", candidateName(t, b))
	b.want("EBUSY", "creat", m.At("D/x"), "wronly,creat")
	b.must("creat", u, "wronly,creat,excl")
	b.must("link", u, m.At("D/devserver"))
	b.must("unlink", u)
	b.must("put", m.At("D/x"), "x", "creat")
	b.must("unlink", m.At("D/devserver"))
	b.want("EBUSY", "put", m.At("D/x"), "y", "")
}

// TestAttackControlHandles attacks W1 through the control directory: its
// descriptors are nobody's file, however many are opened.
func TestAttackControlHandles(t *testing.T) {
	m := mount(t)
	holder, b := agent(t), stranger(t)
	holder.must("mkdir", m.At("D"))
	holder.must("open", "h", m.At("D/f"), "rdwr,creat")
	holder.must("pwrite", "h", "a", "8192", "0")
	openFile(t, m.Back("mine"), "evil")
	before := digest(t, m.Back("D"))
	ctl := m.control("ctl")
	s := b.storm(
		[]string{"open", "c", ctl, "rdwr"}, []string{"fallocate", "c", "3", "0", "4096"}, []string{"copyrange", m.At("mine"), "c"},
		[]string{"ftruncate", "c", "1"}, []string{"seek", "c", "hole", "0"}, []string{"close", "c"},
	)
	await(t, 6*1300, s)
	s.over()
	if after := digest(t, m.Back("D")); after != before {
		t.Errorf("changed beneath D:\n%s", diff(before, after))
	}
}

// TestAttackLinkedLocks attacks liveness: files with several names become lock
// files while others do the same elsewhere.
func TestAttackLinkedLocks(t *testing.T) {
	m := mount(t)
	var storms []*storm
	for _, d := range []string{"D", "E"} {
		openDir(t, m.Back(d))
		openFile(t, m.Back(d, "a"), "x")
		mustDo(t, os.Link(m.Back(d, "a"), m.Back(d, "b")))
		mustDo(t, os.Link(m.Back(d, "a"), m.Back(d, "c")))
	}
	for i, d := range []string{"D", "E", "D", "E"} {
		other := []string{"E", "D", "E", "D"}[i]
		storms = append(storms, agent(t).storm(
			[]string{"link", m.At(d, "a"), m.At(d, "devserver")}, []string{"unlink", m.At(d, "devserver")},
			[]string{"link", m.At(d, "b"), m.At(other, "devserver")}, []string{"unlink", m.At(other, "devserver")},
			[]string{"rename", m.At(d, "c"), m.At(d, "devserver.lock")}, []string{"rename", m.At(d, "devserver.lock"), m.At(d, "c")},
			[]string{"truncate", m.At(d, "a"), "1"},
		))
	}
	await(t, 700, storms...)
	got := 0
	for _, s := range storms {
		got += s.over()["link ok"]
	}
	if got == 0 {
		t.Error("nobody ever got a lock")
	}
}

// TestAttackCandidateLeft attacks R4: who won with a private candidate is
// killed before it removes the candidate's own name. Neither name is left.
func TestAttackCandidateLeft(t *testing.T) {
	m := mount(t)
	for _, waits := range []bool{false, true} {
		dir := fmt.Sprint("D-", waits)
		openDir(t, m.Back(dir))
		first, b, next := agent(t), agent(t), agent(t)
		u := m.At(dir, candidateName(t, b))
		if waits {
			first.must("creat", m.At(dir, "devserver"), "wronly,creat,excl")
		}
		b.must("put", u, "pid", "creat,excl")
		if waits {
			first.must("unlink", m.At(dir, "devserver"))
		}
		b.must("link", u, m.At(dir, "devserver"))
		b.Kill()
		next.want("ok", "creat", m.At(dir, "devserver"), "wronly,creat,excl")
		eventually(t, "the dead one's candidate is gone", func() bool {
			rest, err := os.ReadDir(m.Back(dir))
			return err == nil && len(rest) == 1
		})
	}
}

// TestAttackCandidateUnmade: a candidate that could not be opened, and so was not made, is
// forgotten: the next one of its name goes with who made it as any other.
func TestAttackCandidateUnmade(t *testing.T) {
	needInject(t)
	m := newMount(t, staticDir(t), filepath.Join(tempDir(t), "mnt"))
	again := &fault{call: unix.SYS_OPENAT, errno: unix.EIO, times: 1, is: func(a asked) bool {
		name := a.path(1)
		return a.args[2]&unix.O_ACCMODE != unix.O_RDONLY && name != "" && strings.Trim(name, "0123456789") == ""
	}}
	did := m.inject(again)
	m.serve()
	openDir(t, m.Back("D"))
	a := agent(t)
	name := candidateName(t, a)
	a.want("EIO", "open", "h", m.At("D", name), "wronly,creat,excl")
	if n := did.did()[0]; n != 1 {
		t.Fatalf("%d calls failed, want 1", n)
	}
	a.must("open", "h", m.At("D", name), "wronly,creat,excl")
	a.Kill()
	eventually(t, "the candidate goes", func() bool {
		_, err := os.Lstat(m.Back("D", name))
		return os.IsNotExist(err)
	})
}

// TestAttackSharedName attacks W5: a name that everyone may touch is no way to
// anything else beneath D.
func TestAttackSharedName(t *testing.T) {
	m := mount(t, "--shared-name", "staged.timestamp")
	openDir(t, m.Back("D"))
	openDir(t, m.Back("out"))
	holder, b := agent(t), agent(t)
	holder.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	holder.must("put", m.At("D/data"), "data", "creat")
	shared := m.At("D/staged.timestamp")
	b.must("open", "h", shared, "rdwr,creat")
	b.must("write", "h", "x")
	unshared := func() string {
		os.Rename(m.Back("D/staged.timestamp"), m.Back("moved"))
		defer os.Rename(m.Back("moved"), m.Back("D/staged.timestamp"))
		return digest(t, m.Back("D/data")) + digest(t, m.Back("D/devserver"))
	}
	before := unshared()
	for _, c := range [][]string{
		{"rename", shared, m.At("D/data")},
		{"rename", m.At("D/data"), shared},
		{"rename", shared, m.At("D/data"), "exchange"},
		{"rename", shared, m.At("D/new")},
		{"link", shared, m.At("D/new")},
		{"link", m.At("D/data"), m.At("out/staged.timestamp")},
		{"rename", m.At("D/data"), m.At("out/staged.timestamp")},
		{"link", m.At("D/devserver"), m.At("out/staged.timestamp")},
		{"mkdir", m.At("D/staged.timestamp.d")},
		{"put", m.At("D/data"), "evil", ""},
	} {
		b.want("EBUSY|EEXIST", c...)
	}
	// What the holder makes of it is nobody else's to write.
	for _, how := range []string{"link", "rename"} {
		if got := holder.Try(how, shared, m.At("D/mine")); got == "ok" {
			was := digest(t, m.Back("D/mine"))
			b.Try("write", "h", "evil")
			b.Try("ftruncate", "h", "0")
			b.Try("put", shared, "evil", "trunc")
			if now := digest(t, m.Back("D/mine")); now != was {
				t.Errorf("a stranger changed what the holder made by %s:\n%s", how, diff(was, now))
			}
			holder.Try("unlink", m.At("D/mine"))
		}
	}
	if after := unshared(); after != before {
		t.Errorf("changed:\n%s", diff(before, after))
	}
}

// TestA9AttackAcquired: a candidate is made whoever acquires the directory at that moment,
// so that the tool gets to its own answer.
func TestA9AttackAcquired(t *testing.T) {
	need(t, debianPython)
	m := mount(t)
	openDir(t, m.Back("D"))
	mustDo(t, os.WriteFile(m.Back("D/devserver"), nil, 0o666))
	locker := startCmd(t, exec.Command(debianPython, "-c", `
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
while True:
    fcntl.flock(fd, fcntl.LOCK_EX)
    fcntl.flock(fd, fcntl.LOCK_UN)
`, m.At("D/devserver")))
	defer locker.Kill()
	out, err := command(debianPython, "-c", `
import os, sys, time
end, refused, made = time.monotonic() + 2, 0, 0
while time.monotonic() < end or made < 1000:
    for flags in os.O_EXCL, os.O_TRUNC:
        name = "%s/%s-7f%x.%d-9" % (sys.argv[1], os.uname().nodename, made, os.getpid())
        try:
            os.close(os.open(name, os.O_CREAT | os.O_WRONLY | flags, 0o644))
            os.unlink(name)
        except OSError as e:
            refused += 1
        made += 1
print("refused", refused)
`, m.At("D")).CombinedOutput()
	if got := strings.TrimSpace(string(out)); err != nil || got != "refused 0" {
		t.Errorf("%s, %v", got, err)
	}
}

// TestR4AttackCandidateElsewhere attacks R4's clean-up of candidates: their directory is
// put aside, or renamed, and another one gets a name by which theirs could be called.
func TestR4AttackCandidateElsewhere(t *testing.T) {
	for name, test := range map[string]struct {
		opts   []string
		goes   func(m *Mount, parent *Agent) // what becomes of D
		called string                        // the other directory
		ends   func(m *Mount, maker *Agent)
	}{
		"put aside": {
			opts: []string{"--on-crash", "quarantine"},
			goes: func(m *Mount, parent *Agent) {
				parent.Kill()
				m.awaitFree("D")
			},
			called: "(removed)",
			ends: func(m *Mount, maker *Agent) {
				other := agent(t)
				other.must("mkdir", m.At("other"))
				maker.Exit(0)
				eventually(t, "its other candidate is gone", func() bool { return len(readNames(t, m.Back("F"))) == 0 })
				other.Kill() // which is carried out after that
				m.awaitFree("other")
			},
		},
		"renamed": {
			goes:   func(m *Mount, parent *Agent) { parent.must("rename", m.At("D"), m.At("E")) },
			called: "D",
			ends: func(m *Mount, maker *Agent) {
				m.restart(maker.Kill)
				if left := readNames(m.t, m.Back("E")); len(left) > 0 {
					m.t.Errorf("its candidate is left: %q", left)
				}
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := mount(t, test.opts...)
			openDir(t, m.Back("F"))
			parent, holder := agent(t), agent(t)
			maker := parent.Child()
			file := candidateName(t, maker)
			maker.must("creat", m.At("F", file), "wronly,creat,excl")
			parent.must("mkdir", m.At("D"))
			maker.must("open", "f", m.At("D", file), "wronly,creat,excl")
			test.goes(m, parent)
			holder.must("mkdir", m.At(test.called))
			holder.must("put", m.At(test.called, file), "artifact", "wronly,creat,excl")
			test.ends(m, maker)
			if b, err := os.ReadFile(m.Back(test.called, file)); string(b) != "artifact" {
				t.Errorf("the holder's file: %q, %v", b, err)
			}
		})
	}
}

// TestR4CandidateMidway: nor is one left if the daemon is killed while the directory, or
// one above, is being renamed, whether that was carried out or not.
func TestR4CandidateMidway(t *testing.T) {
	needInject(t)
	for _, in := range []string{"D", "D/sub"} {
		for _, carriedOut := range []bool{true, false} {
			for _, dies := range []string{"meanwhile", "later"} {
				t.Run(fmt.Sprintf("%s/renamed %v/dies %s", in, carriedOut, dies), func(t *testing.T) {
					dir := staticDir(t)
					m := newMount(t, dir, dir+".mnt")
					reached, killed := make(chan struct{}), make(chan struct{})
					t.Cleanup(func() { close(killed) })
					m.inject(&fault{call: unix.SYS_RENAMEAT2, until: func(a asked) <-chan struct{} {
						if a.path(3) != "E" {
							return nil
						}
						close(reached)
						return killed
					}})
					m.serve()
					parent, at := agent(t), in
					maker := parent.Child()
					parent.must("mkdir", m.At("D"))
					parent.must("mkdir", m.At("D/sub"))
					maker.must("creat", m.At(in, candidateName(t, maker)), "wronly,creat,excl")
					renamed := make(chan string)
					go func() { renamed <- parent.Try("rename", m.At("D"), m.At("E")) }()
					<-reached
					if carriedOut {
						mustDo(t, os.Rename(m.Back("D"), m.Back("E")))
						at = strings.Replace(at, "D", "E", 1)
					}
					m.healthy()
					m.restart(func() {
						<-renamed
						if dies == "meanwhile" {
							maker.Kill()
						}
					})
					if dies == "later" {
						maker.Kill()
					}
					eventually(t, "its candidate is gone", func() bool {
						return !slices.ContainsFunc(readNames(t, m.Back(at)), func(name string) bool { return name != "sub" })
					})
				})
			}
		}
	}
}

// TestR4AttackCandidateTaken attacks R4's clean-up after a kill -9: what somebody else has
// put in the place of a candidate just before that is not its creator's, and stays.
func TestR4AttackCandidateTaken(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	other := agent(t)
	for gone, goes := range map[string]func(maker *Agent, file string){
		"its creator dead": func(maker *Agent, file string) {
			maker.Kill()
			eventually(t, "its candidate is gone", func() bool { return !slices.Contains(readNames(t, m.Back("D")), filepath.Base(file)) })
		},
		"removed":     func(maker *Agent, file string) { maker.must("unlink", file) },
		"still there": func(*Agent, string) {},
	} {
		for by, takes := range map[string]func(file string){
			"create": func(file string) { other.must("put", file, "artifact", "wronly,creat") },
			"rename": func(file string) { other.must("rename", file+".new", file) },
			"link":   func(file string) { other.must("link", file+".new", file) },
		} {
			if gone == "still there" && by != "rename" {
				continue
			}
			maker := agent(t)
			file := m.At("D", candidateName(t, maker))
			maker.must("creat", file, "wronly,creat,excl")
			other.must("put", file+".new", "artifact", "wronly,creat,excl")
			goes(maker, file)
			takes(file)
			m.restart(func() {
				if gone != "its creator dead" {
					maker.Kill()
				}
			})
			if b, err := os.ReadFile(m.Back("D", filepath.Base(file))); string(b) != "artifact" {
				t.Errorf("%s, then %s: %q, %v", gone, by, b, err)
			}
		}
	}
}

// TestA9AttackContent: what is called like a candidate and holds more than a link(2)
// protocol writes is content (W1), to who made it as to others, also after a restart.
func TestA9AttackContent(t *testing.T) {
	need(t, "root", "fuse")
	m := mount(t)
	openDir(t, m.Back("D"))
	a, holder := agent(t), agent(t)
	host, err := os.Hostname()
	mustDo(t, err)
	large, log := "D/"+candidateName(t, a), "D/"+host+"."+itoa(a.Pid)
	a.must("put", m.At(large), strings.Repeat("x", 5000), "creat,excl")
	a.must("put", m.At(log), "started", "creat,excl")
	holder.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	for _, when := range []string{"at first", "after a restart"} {
		before := digest(t, m.Back("D"))
		for _, name := range []string{large, log} {
			for _, try := range [][]string{{"open", "u", m.At(name), "wronly"}, {"chmod", m.At(name), "600"}, {"utimens", m.At(name)}, {"unlink", m.At(name)}} {
				if got := a.Try(try...); got != "EBUSY" {
					t.Errorf("%s: %v = %s, want EBUSY", when, try, got)
				}
			}
		}
		if after := digest(t, m.Back("D")); after != before {
			t.Fatalf("%s, changed beneath D:\n%s", when, diff(before, after))
		}
		m.restart(nil)
	}
}
