//go:build linux

package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestR7AttackSameDirectory: a child's own lock stands in front of the row of an
// owner that crashes, on the same directory. What is in it is the child's.
func TestR7AttackSameDirectory(t *testing.T) {
	for _, policy := range []string{"destroy", "quarantine"} {
		t.Run(policy, func(t *testing.T) {
			m := mount(t, "--on-crash", policy)
			a := agent(t)
			a.must("mkdir", m.At("D"))
			child := a.Child("setsid")
			child.must("creat", m.At("D", "devserver"), "wronly,creat,excl")
			child.must("put", m.At("D", "theirs"), "1", "wronly,creat")
			a.Kill()
			eventually(t, "the dead owner's lock ends", func() bool { return !m.ownsAny(a.Pid) })
			wantTree(t, m.Back("D"), []string{"devserver=", "theirs=1"})
			m.wantOwner("D", child.Pid)
			child.must("put", m.At("D", "theirs"), "2", "wronly,append")
		})
	}
}

// ownsAny reports whether a process is listed as the owner of a lock.
func (m *Mount) ownsAny(pid int) bool {
	for _, l := range m.Listing().Locks {
		if l.Pid == pid {
			return true
		}
	}
	return false
}

// TestR7AttackLease: a lease beneath is its client's, also if the process that
// took it for him is the owner that crashes.
func TestR7AttackLease(t *testing.T) {
	m := mount(t, "--on-crash", "destroy")
	a, other := agent(t), agent(t)
	a.must("mkdir", m.At("D"))
	a.must("put", m.At("D", "made"), "1", "wronly,creat") // no narrowing (A12)
	a.must("mkdir", m.At("D", "sub"))
	token := a.mustCommand(m, "acquire D/sub client=x ttl=1h").Token
	other.mustCommand(m, "join D/sub client=x")
	other.must("put", m.At("D", "sub", "theirs"), "1", "wronly,creat")
	a.Kill()
	m.awaitFree("D")
	if got := m.Locks()["D/sub"]; got.Token != token {
		t.Errorf("the lock on D/sub is %+v, want token %d", got, token)
	}
	other.must("put", m.At("D", "sub", "theirs"), "2", "wronly,append")
	wantTree(t, m.Back("D"), []string{"sub/", "sub/theirs=12"})
}

// TestR7AttackRights: the daemon destroys for nobody what that one could not
// remove himself.
func TestR7AttackRights(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	mustDo(t, os.Mkdir(m.Back("D", "roots"), 0o755))
	mustDo(t, os.WriteFile(m.Back("D", "roots", "file"), []byte("1"), 0o644))
	other := stranger(t)
	other.must("put", m.control("ctl"), "acquire D\n", "wronly")
	other.must("put", m.At("D", "own"), "1", "wronly,creat")
	if s := other.Try("put", m.control("ctl"), "release D destroy\n", "wronly"); s == "ok" {
		t.Errorf("release D destroy = ok, want a refusal")
	}
	if b, err := os.ReadFile(m.Back("D", "roots", "file")); string(b) != "1" {
		t.Errorf("root's file: %q, %v", b, err)
	}
}

// TestR7AttackRestart: an owner that ended while no daemon was there may have
// succeeded. Its content is kept.
func TestR7AttackRestart(t *testing.T) {
	for _, policy := range []string{"destroy", "quarantine"} {
		t.Run(policy, func(t *testing.T) {
			m := mountOver(t, "--on-crash", policy)
			a := agent(t)
			a.must("mkdir", m.At("D"))
			a.must("put", m.At("D", "artifact"), "1", "wronly,creat")
			m.restart(func() { a.Exit(0) }, "--on-crash", policy)
			m.awaitFree("D")
			wantTree(t, m.At("D"), []string{"artifact=1"})
		})
	}
}

// TestR7AttackFlattened: what was there before the lock stays what it is,
// however often it is renamed within the directory that it came into.
func TestR7AttackFlattened(t *testing.T) {
	m := mount(t, "--on-crash", "destroy")
	openDir(t, m.Back("out"))
	mustDo(t, os.MkdirAll(m.Back("out", "pkg", "deep"), 0o777))
	for _, f := range []string{"one", "two", "deep/three"} {
		mustDo(t, os.WriteFile(m.Back("out", "pkg", f), []byte("old"), 0o666))
	}
	a := agent(t)
	a.must("mkdir", m.At("D"))
	a.must("put", m.At("D", "made"), "1", "wronly,creat")
	a.must("rename", m.At("out", "pkg"), m.At("D", "pkg"))
	a.must("rename", m.At("D", "pkg", "one"), m.At("D", "one"))
	a.must("link", m.At("D", "pkg", "two"), m.At("D", "two"))
	a.must("unlink", m.At("D", "pkg", "two"))
	a.must("rename", m.At("D", "pkg", "deep"), m.At("D", "deep"))
	a.must("rename", m.At("D", "deep", "three"), m.At("D", "three"))
	a.Kill()
	m.awaitFree("D")
	wantTree(t, m.Back("D"), []string{"deep/", "one=old", "pkg/", "three=old", "two=old"})
}

// TestR7AttackBroken: who breaks a lock whose content is being swept away stops
// that: what the next owner makes is not swept with it.
func TestR7AttackBroken(t *testing.T) {
	m := mount(t, "--on-crash", "destroy")
	for i := range 2 {
		dir := "D" + itoa(i)
		openDir(t, m.Back(dir))
		mustDo(t, os.WriteFile(m.Back(dir, "old"), nil, 0o666))
		a := agent(t)
		a.must("creat", m.At(dir, "devserver"), "wronly,creat,excl")
		if out := a.Get("sh", "cd "+m.At(dir)+" && seq -f %05g 2000 | xargs touch"); !strings.HasPrefix(out, "0") {
			t.Fatal(out)
		}
		next := agent(t)
		a.Kill()
		for m.Ctl("break "+dir+" attack") == "ok" {
		}
		next.must("creat", m.At(dir, "devserver"), "wronly,creat,excl")
		out := next.Get("sh", "cd "+m.At(dir)+" && for f in $(seq -f %05g 2000); do echo new >$f; done; sleep 0.1; cat 0* | sort | uniq -c")
		if strings.TrimSpace(out) != "0    2000 new" {
			t.Errorf("what the next owner wrote: %q", out)
		}
		next.Exit(0)
		m.awaitFree(dir)
	}
}

// TestR7AttackRestored: what comes back from quarantine is in nobody's hands: a
// descriptor from before stands in the way of the next owner, or of the restore.
func TestR7AttackRestored(t *testing.T) {
	for _, transport := range transports {
		t.Run(transport, func(t *testing.T) { attackRestored(t, transport) })
	}
}

func attackRestored(t *testing.T, transport string) {
	m := mountBy(t, transport, "--on-crash", "quarantine")
	a := agent(t)
	a.must("mkdir", m.At("D"))
	a.must("mkdir", m.At("D", "sub"))
	child := a.Child("setsid")
	child.must("open", "w", m.At("D", "sub", "f"), "rdwr,creat")
	child.must("ftruncate", "w", "4096")
	child.must("mmap", "p", "w")
	child.must("chdir", m.At("D", "sub"))
	a.Kill()
	m.awaitFree("D")
	id := m.quarantine()[0].ID
	r := run(t, stagefsBin(), "quarantine", "--restore", id, m.At("D"))
	if r.Status == 0 {
		next := agent(t)
		s := next.Try("put", m.control("ctl"), "acquire D\n", "wronly")
		if s == "ok" {
			before := digest(t, m.Back("D"))
			child.Try("pwrite", "w", "x", "4", "0")
			child.Try("poke", "p", "evil")
			child.Try("put", "new", "1", "wronly,creat")
			if after := digest(t, m.Back("D")); after != before {
				t.Errorf("changed by a stranger to the lock:\n%s", diff(before, after))
			}
		}
		return
	}
	if !strings.Contains(r.Err, "sub/f") || !strings.Contains(r.Err, "open") {
		t.Errorf("the refusal: %v", r)
	}
	child.must("close", "w")
	child.must("munmap", "p")
	r = run(t, stagefsBin(), "quarantine", "--restore", id, m.At("D"))
	if r.Status != 0 {
		t.Fatalf("nobody has it open any more: %v", r)
	}
	next := agent(t)
	next.must("creat", m.At("D", "devserver"), "wronly,creat,excl")
	before := digest(t, m.Back("D"))
	child.Try("put", "new", "1", "wronly,creat")
	if after := digest(t, m.Back("D")); after != before {
		t.Errorf("changed from a working directory:\n%s", diff(before, after))
	}
}

// TestR7AttackRestoredWithin: what its holder puts back into a directory is not his, and
// does not go with what he made there.
func TestR7AttackRestoredWithin(t *testing.T) {
	m := mount(t, "--on-crash", "quarantine")
	first, second := agent(t), agent(t)
	first.must("mkdir", m.At("D"))
	first.must("put", m.At("D", "artifact"), "old", "wronly,creat")
	first.Kill()
	m.awaitFree("D")
	second.must("mkdir", m.At("E"))
	second.must("put", m.control("ctl"), "acquire E on-crash=destroy", "wronly")
	second.must("put", m.control("ctl"), "restore E/D id="+m.quarantine()[0].ID, "wronly")
	second.Kill()
	m.awaitFree("E")
	if b, err := os.ReadFile(m.Back("E", "D", "artifact")); string(b) != "old" {
		t.Errorf("what was put back: %q, %v", b, err)
	}
}

// TestR7AttackRestoredKilled: so it is if the daemon is killed afterwards, or midway: then the
// rest can still be put back.
func TestR7AttackRestoredKilled(t *testing.T) {
	opts := []string{"--on-crash", "quarantine"}
	for _, midway := range []bool{false, true} {
		for name, to := range map[string]struct{ dir, in string }{"within": {"E", "E/D"}, "itself": {"D", "D"}} {
			t.Run(fmt.Sprintf("%s, midway %v", name, midway), func(t *testing.T) {
				m := mountOver(t, opts...)
				first, second := agent(t), agent(t)
				first.must("mkdir", m.At("D"))
				first.must("mkdir", m.At("D/sub"))
				for i := range 3 {
					first.must("put", m.At("D", itoa(i)), "old", "wronly,creat")
				}
				first.Kill()
				m.awaitFree("D")
				second.must("mkdir", m.At(to.dir))
				if to.in != to.dir {
					second.must("mkdir", m.At(to.in))
				}
				second.mustCommand(m, "acquire %s on-crash=destroy", to.dir)
				second.must("put", m.At(to.in, "own"), "1", "wronly,creat")
				restore := fmt.Sprintf("restore %s id=%s", to.in, m.quarantine()[0].ID)
				if midway {
					killed := m.killAfter(unix.SYS_RENAMEAT2)
					second.want("ENOTCONN|ECONNABORTED|ECANCELED", "put", m.control("ctl"), restore, "wronly")
					killed()
					m.start(opts)
					m.awaitReady()
				}
				if !midway {
					second.must("put", m.control("ctl"), restore, "wronly")
					m.restart(nil, opts...)
				}
				second.must("put", m.At(to.in, "more"), "1", "wronly,creat")
				second.Kill()
				m.awaitFree(to.dir)
				if midway {
					if s := m.Ctl(restore); s != "ok" {
						t.Fatal(s)
					}
				}
				for i := range 3 {
					wantContent(t, m.At(to.in, itoa(i)), "old")
				}
			})
		}
	}
}

// TestR7AttackShared: what a stranger makes under a shared name (W5) is not its holder's,
// also if he says only afterwards what is to become of what he has made.
func TestR7AttackShared(t *testing.T) {
	m := mount(t, "--shared-name", "staged.timestamp")
	owner, other := agent(t), agent(t)
	owner.must("mkdir", m.At("D"))
	other.must("put", m.At("D", "staged.timestamp"), "theirs", "wronly,creat")
	owner.must("put", m.control("ctl"), "acquire D on-crash=destroy", "wronly")
	owner.Kill()
	m.awaitFree("D")
	if b, err := os.ReadFile(m.Back("D", "staged.timestamp")); string(b) != "theirs" {
		t.Errorf("the stranger's file: %q, %v", b, err)
	}
}

// TestR7AttackSharedSwept: so it is while the content of a dead owner is cleared away.
func TestR7AttackSharedSwept(t *testing.T) {
	m := mount(t, "--shared-name", "stamp*", "--on-crash", "destroy")
	for round := range 24 {
		m.sharedSwept("D"+itoa(round), round%2 == 0, func(owner *Agent) {
			if round%4 < 2 {
				time.Sleep(time.Duration(round) * time.Millisecond / 4)
			}
			owner.Kill()
		})
	}
}

// TestR7AttackSharedSweptKilled: and also if the daemon is killed meanwhile.
func TestR7AttackSharedSweptKilled(t *testing.T) {
	opts := []string{"--shared-name", "stamp*", "--on-crash", "destroy"}
	m := mountOver(t, opts...)
	for round := range 12 {
		m.sharedSwept("D"+itoa(round), round%2 == 0, func(owner *Agent) {
			if round%4 < 2 { // when the first thing has gone
				killed := m.killAfter(unix.SYS_RENAMEAT2)
				owner.Kill()
				killed()
				m.start(opts)
				m.awaitReady()
				return
			}
			owner.Kill()
			time.Sleep(time.Duration(round) * time.Millisecond / 4)
			m.restart(nil, opts...)
		})
	}
}

// swept is how many directories there are in what [Mount.sharedSwept] makes.
const swept = 20

// sharedSwept has an owner make a directory, and a stranger make shared files in it until
// it is nobody's after die. What he made is still there. bySteps: the rest does not go at once.
func (m *Mount) sharedSwept(top string, bySteps bool, die func(owner *Agent)) {
	m.t.Helper()
	t := m.t
	owner := agent(t)
	owner.must("mkdir", m.At(top))
	if out := owner.Get("sh", fmt.Sprintf("cd %s && mkdir $(seq 0 %d) && touch $(seq -f %%g/f 0 %d)", m.At(top), swept-1, swept-1)); !strings.HasPrefix(out, "0") {
		t.Fatal(out)
	}
	if bySteps {
		mustDo(t, os.WriteFile(m.At(top, "0", "stamp"), nil, 0o666))
	}
	over, made := make(chan struct{}), make(chan []string)
	go func() {
		var paths []string
		for i := 0; ; i++ {
			select {
			case <-over:
				made <- paths
				return
			default:
			}
			path := m.At(top, itoa(i%swept), "stamp"+itoa(i))
			if f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666); err == nil {
				f.Close()
				paths = append(paths, path)
			}
		}
	}()
	die(owner)
	m.awaitFree(top)
	close(over)
	for _, path := range <-made {
		if _, err := os.Lstat(path); err != nil {
			t.Fatalf("%s: what a stranger made: %v", top, err)
		}
	}
}

// TestR7AttackDeep: a tree that is deeper than the daemon has descriptors is
// deleted all the same, and in nobody's way.
func TestR7AttackDeep(t *testing.T) {
	m := mount(t, "--on-crash", "destroy")
	a := agent(t)
	a.must("mkdir", m.At("D"))
	deepTree(t, m.Back("D"), 3000, "")
	few := unix.Rlimit{Cur: 1000, Max: 1000}
	mustDo(t, unix.Prlimit(m.daemon(), unix.RLIMIT_NOFILE, &few, nil))
	a.Kill()
	m.awaitFree("D")
	eventually(t, "the trash is empty", func() bool {
		left, _ := filepath.Glob(m.Back(".stagefs", "trash", "*"))
		return len(left) == 0
	})
}

// TestR7AttackDeepRestored: such a tree can be put back, also into another one
// that is as deep.
func TestR7AttackDeepRestored(t *testing.T) {
	const depth = 3000
	m := mount(t, "--on-crash", "quarantine")
	few := unix.Rlimit{Cur: 1000, Max: 1000}
	mustDo(t, unix.Prlimit(m.daemon(), unix.RLIMIT_NOFILE, &few, nil))
	for _, there := range []int{0, depth / 2} {
		a := agent(t)
		a.must("mkdir", m.At("D"))
		deepTree(t, m.Back("D"), depth, "kept")
		a.Kill()
		m.awaitFree("D")
		if there > 0 {
			mustDo(t, os.Mkdir(m.Back("D"), 0o777))
			deepTree(t, m.Back("D"), there, "")
		}
		if r := run(t, stagefsBin(), "quarantine", "--restore", m.quarantine()[0].ID, m.At("D")); r.Status != 0 {
			t.Fatalf("restore into a tree of depth %d: %v", there, r)
		}
		if got := deepTree(t, m.Back("D"), depth, ""); got != "kept" {
			t.Errorf("at the bottom of what was restored into a tree of depth %d: %q", there, got)
		}
		if r := sh(t, m.Dir, "rm -r D"); r.Status != 0 {
			t.Fatal(r)
		}
	}
}

// deepTree makes a tree that deep, as far as it is not there, with a file of that
// content at the bottom, and returns what the file has.
func deepTree(t *testing.T, dir string, depth int, content string) string {
	t.Helper()
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_CLOEXEC, 0)
	mustDo(t, err)
	for range depth {
		if err := unix.Mkdirat(fd, "d", 0o777); err != unix.EEXIST {
			mustDo(t, err)
		}
		next, err := unix.Openat(fd, "d", unix.O_PATH|unix.O_CLOEXEC, 0)
		mustDo(t, err)
		mustDo(t, unix.Close(fd))
		fd = next
	}
	defer unix.Close(fd)
	file := fmt.Sprintf("/proc/self/fd/%d/file", fd)
	if content != "" {
		mustDo(t, os.WriteFile(file, []byte(content), 0o666))
	}
	b, err := os.ReadFile(file)
	if !os.IsNotExist(err) {
		mustDo(t, err)
	}
	return string(b)
}

// TestAttackControlSetuid: a program with root's rights that a stranger starts, and
// that writes to a ctl file that the stranger has opened, gives him none.
func TestAttackControlSetuid(t *testing.T) {
	m := mount(t)
	a := agent(t)
	a.must("mkdir", m.At("D"))
	a.mustCommand(m, "acquire D client=x ttl=1h")
	dir := tempDir(t)
	mustDo(t, os.Chmod(dir, 0o755))
	echo := filepath.Join(dir, "echo")
	mustDo(t, copyFile("/bin/echo", echo, 0o755))
	mustDo(t, os.Chmod(echo, 0o755|os.ModeSetuid))
	var st syscall.Statfs_t
	mustDo(t, syscall.Statfs(dir, &st))
	if st.Flags&syscall.MS_NOSUID != 0 {
		t.Skip("no setuid programs here")
	}
	other := stranger(t)
	for _, line := range []string{"break D mine", "release D client=x", "discard . older=0s", "check", "renew D client=x"} {
		if out := other.Get("sh", echo+" '"+line+"' >"+m.control("ctl")); strings.HasPrefix(out, "0") {
			t.Errorf("%s, written by a setuid program: %q, want a refusal", line, out)
		}
	}
	m.wantOwner("D", a.Pid)
}

// TestL1AttackSealed: a lease that has expired, and whose content is being swept
// away, is nobody's: whoever acquires meanwhile, the client too, gets the
// directory when that is over, with a token of his own.
func TestL1AttackSealed(t *testing.T) {
	m := mount(t, "--on-crash", "destroy")
	openDir(t, m.Back("D"))
	mustDo(t, os.WriteFile(m.Back("D", "old"), nil, 0o666))
	a := agent(t)
	token := a.mustCommand(m, "acquire D client=x ttl=1h").Token
	if out := a.Get("sh", "cd "+m.At("D")+" && seq -f %05g 4000 | xargs touch"); !strings.HasPrefix(out, "0") {
		t.Fatal(out)
	}
	a.mustCommand(m, "renew D client=x ttl=10ms")
	eventually(t, "the deadline", func() bool { return a.Try("put", m.control("ctl"), "check D client=x\n", "wronly") != "ok" })
	got := a.mustCommand(m, "acquire D client=x ttl=1h wait=forever")
	if got.Token == token {
		t.Errorf("token %d again", token)
	}
	wantTree(t, m.Back("D"), []string{"old="})
	a.must("put", m.At("D", "new"), "1", "wronly,creat")
	a.mustCommand(m, "check D client=x")
	if s := m.Ctl("check"); s != "ok" {
		t.Errorf("the tables: %s", s)
	}
}

// TestL2AttackSealed: who carries the ID of a lease whose content is being put aside is refused
// at once, like anybody, and does not keep that, and with it the whole mount, from going on (R7).
func TestL2AttackSealed(t *testing.T) {
	needInject(t)
	dir := staticDir(t)
	openDir(t, filepath.Join(dir, "D"))
	m := newMount(t, dir, tempDir(t))
	clearing, goesOn := m.stopClearing()
	m.serve("--on-crash", "quarantine")
	a, c := agent(t), carrier(t, 0, "x")
	a.mustCommand(m, "acquire D client=x ttl=1h")
	a.must("put", m.At("D/f"), "valuable", "wronly,creat")
	released := inBackground(a.Start("ctl", m.control("ctl"), "release D client=x failed"))
	<-clearing
	written := inBackground(c.Start("put", m.At("D/g"), "", "wronly,creat"))
	select {
	case s := <-written:
		if s != "EBUSY" {
			t.Errorf("a write by a carrier of the ID = %s, want EBUSY", s)
		}
	case <-time.After(2 * time.Second):
		t.Error("a write by a carrier of the ID is not answered")
	}
	close(goesOn)
	select {
	case s := <-released:
		if s != "ok" {
			t.Errorf("release = %s, want ok", s)
		}
	case <-time.After(5 * time.Second):
		t.Error("the release does not come to an end")
		m.kill()
	}
}

// TestL3AttackAlias: a file with a name outside is under the lease all the same:
// what its client has open by either name is revoked with it.
func TestL3AttackAlias(t *testing.T) {
	m := mount(t)
	for _, dir := range []string{"A", "D"} {
		openDir(t, m.Back(dir))
	}
	mustDo(t, os.WriteFile(m.Back("A", "f"), []byte(strings.Repeat("old ", 1024)), 0o666))
	mustDo(t, os.Link(m.Back("A", "f"), m.Back("D", "f")))
	client, next := agent(t), agent(t)
	client.must("stat", m.At("A", "f")) // this name first
	client.must("stat", m.At("D", "f"))
	client.mustCommand(m, "acquire D client=x ttl=1h")
	client.must("open", "a", m.At("A", "f"), "rdwr")
	client.must("open", "d", m.At("D", "f"), "wronly")
	client.want("ENODEV", "mmap", "p", "a")
	client.must("pwrite", "a", "1", "4", "0")
	if s := m.Ctl("break D attack"); s != "ok" {
		t.Fatal(s)
	}
	next.mustCommand(m, "acquire D client=y ttl=1h")
	before := digest(t, m.Back("D"))
	client.want("EBUSY", "pwrite", "a", "2", "4", "0")
	client.want("EBUSY", "pwrite", "d", "2", "4", "0")
	client.want("EBUSY", "ftruncate", "a", "0")
	if after := digest(t, m.Back("D")); after != before {
		t.Errorf("written after the break:\n%s", diff(before, after))
	}
}

// TestL1AttackRenamed: a lease that expires while its directory is being renamed
// ends all the same, and its content is in one place.
func TestL1AttackRenamed(t *testing.T) {
	m := mount(t, "--on-crash", "quarantine", "--depth", "2")
	openDir(t, m.Back("b"))
	for i := range 10 {
		a := agent(t)
		one, two := "b/one"+itoa(i), "b/two"+itoa(i)
		a.must("mkdir", m.At(one))
		a.mustCommand(m, "acquire %s client=x ttl=1h", one)
		a.must("open", "f", m.At(one, "f"), "wronly,creat")
		a.mustCommand(m, "acquire %s client=x ttl=30ms", one)
		status := "ok"
		for status == "ok" {
			a.Try("pwrite", "f", "x", "10", "0")
			status = a.Try("rename", m.At(one), m.At(two))
			one, two = two, one
		}
		m.awaitFree(one)
		m.awaitFree(two)
		a.want("EBUSY", "pwrite", "f", "y", "10", "0")
		places := 0
		for _, q := range m.quarantine() {
			if string(q.Dir) == one || string(q.Dir) == two {
				places++
			}
		}
		for _, dir := range []string{one, two} {
			if _, err := os.Stat(m.Back(dir)); err == nil {
				places++
			}
		}
		if places != 1 {
			t.Errorf("round %d: the content is in %d places (rename: %s)", i, places, status)
		}
	}
	if s := m.Ctl("check"); s != "ok" {
		t.Errorf("the tables: %s", s)
	}
}

// TestH3AttackBoot: a group, session or cgroup of an earlier boot owns nothing,
// whoever is in one of that name now.
func TestH3AttackBoot(t *testing.T) {
	m := mountOver(t)
	a := agentOfSession(t)
	a.must("mkdir", m.At("D"))
	a.mustCommand(m, "acquire D owner=session")
	m.restart(m.reboot)
	m.awaitFree("D")
}

// TestW4AttackOff: with locks switched off, what is in quarantine can be put
// back or deleted nevertheless, or it is said that it was not.
func TestW4AttackOff(t *testing.T) {
	m := mountOver(t, "--on-crash", "quarantine")
	a := agent(t)
	a.must("mkdir", m.At("D"))
	a.must("put", m.At("D", "f"), "1", "wronly,creat")
	a.Kill()
	m.awaitFree("D")
	id := m.quarantine()[0].ID
	m.restart(nil, "--disable-locking")
	if s := m.Ctl("restore D id=" + id); s != "ok" {
		t.Errorf("restore = %s", s)
	}
	wantTree(t, m.At("D"), []string{"f=1"})
	if s := m.Ctl("discard . id=" + id); s != "ENOENT" {
		t.Errorf("discard = %s, want ENOENT: it is there no more", s)
	}
}

// TestAttackControlCrowd: a user who has as many requests wait as he can keeps nobody
// else from being answered.
func TestAttackControlCrowd(t *testing.T) {
	m := mount(t)
	crowd, other := stranger(t), agent(t)
	other.must("mkdir", m.At("D"))
	openDir(t, m.Back("D"))
	// Nobody has a file open or looked up: the kernel knows only directories.
	if got := crowd.Get("crowd", m.control("events"), "1030"); got != "ENOLCK" {
		t.Errorf("one too many = %s, want ENOLCK", got)
	}
	other.must("put", m.At("D", "f"), "1", "wronly,creat")
	other.must("mkdir", m.At("D", "sub"))
	stranger(t).wantCommand(m, "ENOLCK", "wait D wait=1ms")
	stranger(t).wantCommand(m, "EBUSY", "acquire D")
	crowd.Kill()
	later := stranger(t)
	eventually(t, "nobody waits any more", func() bool {
		return later.Try("put", m.control("ctl"), "wait D wait=1ms\n", "wronly") == "ETIMEDOUT"
	})
}
