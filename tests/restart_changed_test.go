//go:build linux

package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// unmounted unmounts in an orderly way, does what is to happen while nothing is
// mounted, and starts the next daemon.
func (m *Mount) unmounted(between func(), opts ...string) {
	m.t.Helper()
	if r := run(m.t, stagefsBin(), "umount", m.Path); r.Status != 0 {
		m.t.Fatal(r)
	}
	<-m.gone
	between()
	m.start(opts)
	m.awaitReady()
}

// crashed is unmounted for a daemon that was killed first.
func (m *Mount) crashed(between func(), opts ...string) {
	m.t.Helper()
	m.kill()
	m.unmounted(between, opts...)
}

// awaitRecorded waits until the daemon has written something down: a second, at
// the most, for what matters only when the mount is gone.
func (m *Mount) awaitRecorded(text string) {
	m.t.Helper()
	eventually(m.t, text+" is recorded", func() bool {
		files, _ := filepath.Glob(filepath.Join(m.State, "*.journal.*"))
		return slices.ContainsFunc(files, func(file string) bool {
			b, _ := os.ReadFile(file)
			return strings.Contains(string(b), text)
		})
	})
}

// TestR7Replaced: while nothing is mounted, somebody puts another directory in
// the place of a locked one. It is not the owner's, who crashes later; the lock
// is on the owner's own one, if that is there.
func TestR7Replaced(t *testing.T) {
	for _, moved := range []bool{true, false} {
		for how, away := range map[string]func(*Mount, func(), ...string){"unmounted": (*Mount).unmounted, "killed": (*Mount).crashed} {
			t.Run(how+map[bool]string{true: ", moved", false: ", removed"}[moved], func(t *testing.T) {
				m := mountOver(t, "--on-crash", "destroy")
				owner, rival := agent(t), agent(t)
				owner.must("mkdir", m.At("D"))
				owner.must("put", m.At("D/mine"), "1", "creat")
				token := m.Locks()["D"].Token
				m.awaitRecorded(`"inode":`)
				away(m, func() {
					if moved {
						mustDo(t, os.Rename(m.At("D"), m.At("old")))
					} else {
						mustDo(t, os.RemoveAll(m.At("D")))
					}
					openDir(t, m.At("D"))
					mustDo(t, os.WriteFile(m.At("D/precious"), []byte("2"), 0o666))
				}, "--on-crash", "destroy")
				m.wantFree("D")
				rival.must("put", m.At("D/more"), "3", "creat")
				if row, held := m.Locks()["old"]; held != moved || moved && row.Token != token {
					t.Errorf("old: %+v, held: %v", row, held)
				}
				if moved {
					rival.want("EBUSY", "put", m.At("old/x"), "4", "creat")
					owner.must("put", m.At("old/x"), "4", "creat")
				}
				if !strings.Contains(m.Log(), "while it was not mounted") {
					t.Error("nothing is said of it")
				}
				owner.Kill()
				m.awaitFree("old")
				wantTree(t, m.At("D"), []string{"more=3", "precious=2"})
				if moved {
					wantTree(t, m.At("old"), []string{"mine=1", "x=4"})
				}
			})
		}
	}
}

// TestR7Unmounted: what somebody puts into a locked directory while nothing is
// mounted is not known to be the owner's. So all of it is kept.
func TestR7Unmounted(t *testing.T) {
	for _, policy := range []string{"destroy", "quarantine"} {
		t.Run(policy, func(t *testing.T) {
			m := mountOver(t, "--on-crash", policy)
			owner, later := agent(t), agent(t)
			owner.must("mkdir", m.At("D"))
			owner.must("put", m.At("D/mine"), "1", "creat")
			token := m.Locks()["D"].Token
			m.unmounted(func() {
				mustDo(t, os.WriteFile(m.At("D/precious"), []byte("2"), 0o666))
			}, "--on-crash", policy)
			if row := m.Locks()["D"]; row.Token != token || row.Pid != owner.Pid {
				t.Fatalf("D: %+v, want token %d", row, token)
			}
			m.restart(nil, "--on-crash", policy) // that it is not known is known on
			later.must("mkdir", m.At("E"))
			later.must("put", m.At("E/mine"), "1", "creat")
			m.restart(nil, "--on-crash", policy)
			owner.Kill()
			later.Kill()
			m.awaitFree("D")
			m.awaitFree("E")
			wantTree(t, m.At("D"), []string{"mine=1", "precious=2"})
			if exists(m.At("E")) {
				t.Errorf("what was made under a lock since then is left: %q", tree(t, m.At("E")))
			}
			if !strings.Contains(m.Log(), "content is kept") {
				t.Error("nothing is said of what is kept")
			}
		})
	}
}

// twoHeld has D be the directory of an owner, with a file in it, and E one that has a lock
// file, until the next daemon knows both. other is somebody else.
func (m *Mount) twoHeld() (owner, locker, other *Agent) {
	m.t.Helper()
	owner, locker, other = agent(m.t), agent(m.t), agent(m.t)
	owner.must("mkdir", m.At("D"))
	owner.must("put", m.At("D/mine"), "1", "creat")
	openDir(m.t, m.At("E"))
	m.Ctl("release E")
	locker.must("creat", m.At("E/devserver"), "wronly,creat,excl")
	m.awaitRecorded(`"inodes":`)
	return owner, locker, other
}

// TestR7NotEnforced: what others put into a locked directory under a daemon that locks
// nothing, or only observes, is not its owner's, however that daemon ends. So all of it
// is kept by the next one that enforces the lock; and a lock file that is another one
// by then is left alone.
func TestR7NotEnforced(t *testing.T) {
	ends := map[string]func(*Mount, ...string){
		"killed":          func(m *Mount, opts ...string) { m.restart(nil, opts...) },
		"killed twice":    func(m *Mount, opts ...string) { m.restart(nil, "--disable-locking"); m.restart(nil, opts...) },
		"replaced killed": func(m *Mount, opts ...string) { m.replace(); m.restart(nil, opts...) },
		"unmounted":       func(m *Mount, opts ...string) { m.unmounted(func() {}, opts...) },
	}
	for how, end := range ends {
		t.Run("not locked, "+how, func(t *testing.T) {
			m := mountOver(t, "--on-crash", "destroy")
			owner, locker, other := m.twoHeld()
			m.restart(nil, "--disable-locking")
			other.must("put", m.At("D/precious"), "2", "creat")
			other.must("unlink", m.At("E/devserver"))
			other.must("creat", m.At("E/devserver"), "wronly,creat,excl")
			end(m, "--on-crash", "destroy")
			m.wantFree("E")
			owner.Kill()
			locker.Kill()
			m.awaitFree("D")
			wantTree(t, m.At("D"), []string{"mine=1", "precious=2"})
			other.must("stat", m.At("E/devserver"))
		})
	}
	for change, args := range map[string][]string{
		"put":    {"put", "D/precious", "2", "creat"},
		"mkdir":  {"mkdir", "D/precious"},
		"rename": {"rename", "out/precious", "D/precious"},
		"link":   {"link", "out/precious", "D/precious"},
	} {
		t.Run("observed, "+change, func(t *testing.T) {
			m := mountOver(t, "--on-crash", "destroy", "--enforce=observe")
			openDir(t, m.At("out"))
			openFile(t, m.At("out/precious"), "2")
			m.Ctl("release out")
			owner, other := agent(t), agent(t)
			owner.must("mkdir", m.At("D"))
			owner.must("put", m.At("D/mine"), "1", "creat")
			args := slices.Clone(args)
			for i, arg := range args {
				if strings.Contains(arg, "/") {
					args[i] = m.At(arg)
				}
			}
			other.must(args...)
			m.restart(nil, "--on-crash", "destroy")
			owner.Kill()
			m.awaitFree("D")
			other.must("stat", m.At("D/mine"))
			other.must("stat", m.At("D/precious"))
		})
	}
}

const otherState = "was served since with another state"

// TestR7OtherState: nor is what others put there under daemons that had another state,
// as by a forgotten --state-dir, even if each one started in a dead one's place. The next
// one with the first state says so, and gives out no token again.
func TestR7OtherState(t *testing.T) {
	for _, between := range []int{1, 2} {
		t.Run(fmt.Sprintf("%d between", between), func(t *testing.T) {
			m := mountOver(t, "--on-crash", "destroy")
			m.others = true
			own := m.State
			owner, locker, other := m.twoHeld()
			token := uint64(0)
			takes := func(name string) {
				t.Helper()
				other.must("mkdir", m.At(name))
				row := m.Locks()[name]
				if row.Token <= token {
					t.Errorf("%s: token %d, after %d under the daemon before", name, row.Token, token)
				}
				token = row.Token
			}
			for i := range between {
				m.State = filepath.Join(tempDir(t), "other")
				m.restart(nil, "--on-crash", "destroy")
				takes(fmt.Sprintf("made%d", i))
			}
			other.must("put", m.At("D/precious"), "2", "creat")
			other.must("unlink", m.At("E/devserver"))
			other.must("creat", m.At("E/devserver"), "wronly,creat,excl")
			m.State = own
			m.restart(nil, "--on-crash", "destroy")
			m.wantLog(otherState)
			m.wantOwner("D", owner.Pid)
			m.wantFree("E")
			takes("after")
			// What it has found out, it knows after its own death, too.
			m.restart(nil, "--on-crash", "destroy")
			if n := strings.Count(m.Log(), otherState); n != 1 {
				t.Errorf("said %d times, want once", n)
			}
			owner.Kill()
			locker.Kill()
			m.awaitFree("D")
			wantTree(t, m.At("D"), []string{"mine=1", "precious=2"})
			other.must("stat", m.At("E/devserver"))
		})
	}
}

// TestS3Another: a lock file that somebody makes while nothing is mounted, in the
// place of one that a lock was for, is not that lock's: it is left alone, and
// listed.
func TestS3Another(t *testing.T) {
	for how, away := range map[string]func(*Mount, func(), ...string){"unmounted": (*Mount).unmounted, "killed": (*Mount).crashed} {
		for _, lives := range []bool{false, true} {
			t.Run(how+map[bool]string{false: ", dead", true: ", alive"}[lives], func(t *testing.T) {
				m := mountOver(t)
				openDir(t, m.At("D"))
				m.Ctl("release D")
				a, b := agent(t), agent(t)
				a.must("creat", m.At("D/devserver"), "wronly,creat,excl")
				m.awaitRecorded(`"inodes":`)
				away(m, func() {
					if !lives {
						a.Kill()
					}
					mustDo(t, os.Remove(m.At("D/devserver")))
					b.must("creat", m.At("D/devserver"), "wronly,creat,excl")
				})
				m.wantFree("D")
				b.must("stat", m.At("D/devserver"))
				var orphans []string
				eventually(t, "the file is listed", func() bool {
					orphans = nil
					for _, o := range m.Listing().Orphans {
						orphans = append(orphans, o.Path)
					}
					return len(orphans) > 0
				})
				if !slices.Equal(orphans, []string{"D/devserver"}) {
					t.Errorf("orphans %q", orphans)
				}
				if lives {
					a.Kill()
				}
				b.must("stat", m.At("D/devserver"))
			})
		}
	}
}

// TestS1Identity: however a lock file was made, and made anew by its holder, its
// lock is there after an orderly end and a new start, ends when the holder
// removes it, and is cleaned up after a dead one.
func TestS1Identity(t *testing.T) {
	ways := map[string][][]string{
		"create":   {{"creat", "L", "wronly,creat,excl"}},
		"mknod":    {{"mknod", "L", "file"}},
		"mkdir":    {{"mkdir", "L"}},
		"symlink":  {{"symlink", "1", "L"}},
		"link":     {{"creat", "T", "wronly,creat,excl"}, {"link", "T", "L"}},
		"rename":   {{"creat", "T", "wronly,creat,excl"}, {"rename", "T", "L"}},
		"twice":    {{"creat", "L", "wronly,creat,excl"}, {"unlink", "L"}, {"creat", "L", "wronly,creat,excl"}},
		"replaced": {{"creat", "L", "wronly,creat,excl"}, {"creat", "T", "wronly,creat,excl"}, {"rename", "T", "L"}},
		"exchange": {{"creat", "L", "wronly,creat,excl"}, {"creat", "T", "wronly,creat,excl"}, {"rename", "T", "L", "exchange"}},
		"touch":    {{"creat", "L", "wronly,creat"}},
		"dir":      {},
	}
	m := mountOver(t, "--depth", "2")
	mustDo(t, os.Mkdir(m.At("b"), 0o777))
	mustDo(t, os.Chmod(m.At("b"), 0o777))
	live, dying := map[string]*Agent{}, map[string]*Agent{}
	for name, steps := range ways {
		for dir, a := range map[string]*Agent{"b/" + name: agent(t), "b/" + name + ".dies": agent(t)} {
			if strings.HasSuffix(dir, ".dies") {
				dying[dir] = a
			} else {
				live[dir] = a
			}
			a.must("mkdir", m.At(dir))
			for _, step := range steps {
				step = slices.Clone(step)
				for i, word := range step {
					switch word {
					case "L":
						step[i] = m.At(dir, "devserver")
					case "T":
						step[i] = m.At(dir, "temp")
					}
				}
				a.must(step...)
			}
		}
	}
	before := m.Locks()
	if len(before) < 2*len(ways) {
		t.Fatalf("%d locks, want %d", len(before), 2*len(ways))
	}
	m.unmounted(func() {
		for _, a := range dying {
			a.Kill()
		}
	}, "--depth", "2")
	for dir := range dying {
		m.awaitFree(dir)
		if _, err := os.Lstat(m.At(dir, "devserver")); err == nil {
			t.Errorf("%s: the lock file is left", dir)
		}
	}
	after := m.Locks()
	for dir, a := range live {
		if after[dir].Token != before[dir].Token || after[dir].Pid != a.Pid {
			t.Errorf("%s: %+v, want %+v", dir, after[dir], before[dir])
		}
	}
	// What a version has recorded that knew nothing of all that.
	m.unmounted(func() {
		old := regexp.MustCompile(`"inodes?":(\{[^}]*\}|\[[^]]*\]),`)
		if m.restated(func(s string) string { return old.ReplaceAllString(s, "") }) == 0 {
			t.Error("nothing is recorded")
		}
	}, "--depth", "2")
	after = m.Locks()
	for dir, a := range live {
		if after[dir].Token != before[dir].Token || after[dir].Pid != a.Pid {
			t.Errorf("%s, as an earlier version records it: %+v, want %+v", dir, after[dir], before[dir])
		}
	}
}

// TestS1Members: descendants whose parents have died go on as holders after a
// restart, a replacement and an orderly end, all of them (H2); another one's do
// not.
func TestS1Members(t *testing.T) {
	m := mountOver(t)
	owner, other := agent(t), agent(t)
	owner.must("mkdir", m.At("D"))
	other.must("mkdir", m.At("E"))
	var members []*Agent
	for i := range 11 {
		parent := owner.Child()
		member := parent.Child("setsid")
		member.must("put", m.At("D", itoa(i)), "1", "creat")
		parent.Kill()
		member.must("put", m.At("D", itoa(i)), "2", "")
		members = append(members, member)
	}
	strange := other.Child()
	strange.must("put", m.At("E/f"), "1", "creat")
	on := func(after string) {
		t.Helper()
		for i, member := range members {
			if got := member.Try("put", m.At("D", itoa(i)), "3", ""); got != "ok" {
				t.Errorf("%s: descendant %d of the owner: %s", after, i, got)
			}
		}
		strange.want("EBUSY", "put", m.At("D/0"), "x", "")
	}
	m.restart(nil)
	on("a crash")
	m.replace()
	on("a replacement")
	m.restart(members[0].Kill)
	members = members[1:]
	on("another crash")
	m.unmounted(func() {})
	on("an unmount")
	owner.Kill()
	m.awaitFree("D")
	strange.must("put", m.At("D/0"), "4", "")
}
