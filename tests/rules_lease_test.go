//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stagefs/stagefs/lockstate"
)

// carrier starts an agent with a client's ID in its environment.
func carrier(t *testing.T, uid uint32, client string) *Agent {
	t.Helper()
	return awaitAgent(t, func(sock string) {
		cmd := agentCmd(sock)
		cmd.Env = append(cmd.Env, "STAGEFS_CLIENT="+client)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		startCmd(t, cmd)
	})
}

// follow has the agent watch a lock; the function that it returns waits for
// the lock's end.
func (a *Agent) follow(m *Mount, dir string, token uint64) func() lockstate.Answer {
	a.t.Helper()
	a.must("open", "follow", m.control("ctl"), "rdwr")
	a.must("write", "follow", fmt.Sprintf("watch %s token=%d", dir, token))
	got := a.StartGet("pread", "follow", "4096", "0")
	return func() lockstate.Answer {
		a.t.Helper()
		answer := readAnswer(a.t, got())
		a.must("close", "follow")
		return answer
	}
}

// TestL1Lease: a lease has its client as owner, whoever took it, and ends by
// itself, with its lock file.
func TestL1Lease(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	taker, other, follower := agent(t), agent(t), stranger(t)
	got := taker.mustCommand(m, "acquire D client=ci/42 ttl=1h250ms")
	if got.Kind != "lease" || got.Client != "ci/42" || got.TTL != 3600.25 || got.Deadline <= 3000 || got.Deadline > 3600.25 {
		t.Errorf("the answer: %+v", got)
	}
	row := m.Locks()["D"]
	if row.Kind != "lease" || row.Client != "ci/42" || row.Scope != "client" || row.Token != got.Token || row.TTL != 3600.25 {
		t.Errorf("the row: %+v", row)
	}
	other.want("EBUSY", "put", m.At("D/f"), "", "creat")
	no := other.wantCommand(m, "EBUSY", "acquire D client=ci/43")
	if no.Held == nil || no.Held.Client != "ci/42" {
		t.Errorf("the refusal: %+v", no)
	}
	taker.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	if row := m.Locks()["D"]; row.Token != got.Token {
		t.Errorf("the row after the lock file was made: %+v, want the lease", row)
	}
	// It outlives who took it, but not its deadline.
	token := got.Token
	over := follower.follow(m, "D", token)
	taker.Kill()
	if row := m.Locks()["D"]; row.Token != token {
		t.Errorf("the row after its taker's death: %+v, want the lease", row)
	}
	other.mustCommand(m, "renew D client=ci/42 ttl=20ms")
	if end := over(); end.Ended != lockstate.Expired {
		t.Errorf("the lease ended: %+v, want expired", end)
	}
	m.wantFree("D")
	if _, err := os.Lstat(m.Back("D/devserver")); err == nil {
		t.Error("the lock file of the lease is still there")
	}
	other.wantCommand(m, "ENOENT", "renew D client=ci/42")
	other.wantCommand(m, "ENOENT", "release D client=ci/42")
	if again := other.mustCommand(m, "acquire D client=ci/42"); again.Token <= token || again.TTL != 16 {
		t.Errorf("the next lease: %+v, want a token above %d and 16 s", again, token)
	}
}

// TestL1Renew: the same client re-enters, and renews as often as it likes; a
// shorter time than the lease had counts at once.
func TestL1Renew(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	a, b := agent(t), agent(t)
	first := a.mustCommand(m, "acquire D client=x ttl=10m")
	if again := b.mustCommand(m, "acquire D client=x"); again.Token != first.Token || again.TTL != 600 {
		t.Errorf("re-entry: %+v, want token %d and 600 s still", again, first.Token)
	}
	for range 64 {
		if got := b.mustCommand(m, "renew D client=x"); got.Token != first.Token || got.Deadline < 599 {
			t.Fatalf("renewed: %+v", got)
		}
	}
	if got := a.mustCommand(m, "check D client=x token=%d", first.Token); got.Deadline > 600 {
		t.Errorf("check: %+v", got)
	}
	if why := run(t, stagefsBin(), "why", m.At("D")); !strings.Contains(why.Out, "D: held by client x, uid 0\n") || !strings.Contains(why.Out, "unless the client renews") {
		t.Errorf("stagefs why: %v", why)
	}
	b.wantCommand(m, "ENOENT", "renew D client=y")
	b.wantCommand(m, "ENOENT", "check D client=y")
	over := stranger(t).follow(m, "D", first.Token)
	b.mustCommand(m, "renew D client=x ttl=.02")
	if end := over(); end.Ended != lockstate.Expired {
		t.Errorf("shortened: %+v, want expired", end)
	}

	b.mustCommand(m, "acquire D client=x")
	b.mustCommand(m, "release D client=x")
	m.wantFree("D")
	b.mustCommand(m, "acquire D client=x")
	mustDo(t, os.WriteFile(m.control("ctl"), []byte("break D enough"), 0))
	m.wantFree("D")
}

// TestL1Renewed: a lease that is renewed in time lives on far beyond its time
// to live.
func TestL1Renewed(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	a := agent(t)
	const ttl = 400 * time.Millisecond
	var token uint64
	var taken, renewed time.Time
	take := func() {
		taken = time.Now()
		renewed = taken
		token = a.mustCommand(m, "acquire D client=x ttl=%v", ttl).Token
	}
	for take(); time.Since(taken) < 3*ttl; time.Sleep(10 * time.Millisecond) {
		now := time.Now()
		errno, got := a.command(m, "renew D client=x")
		switch {
		case errno == "ok" && got.Token == token:
			renewed = now
		case errno == "ENOENT" && time.Since(renewed) > ttl:
			take() // this one was not in time
		default:
			t.Fatalf("renew = %s, %+v", errno, got)
		}
	}
}

// TestL1Users: the ID alone is no key: the listing shows it to everyone. It
// opens the lease for the same user and for root.
func TestL1Users(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	openDir(t, m.Back("D/sub"))
	a := stranger(t)
	a.mustCommand(m, "acquire D client=x")
	thief := agentAs(t, 4242)
	for _, dir := range []string{"D", "D/sub"} {
		thief.wantCommand(m, "EBUSY", "acquire %s client=x", dir)
	}
	for _, c := range []string{"renew D client=x", "release D client=x", "join D client=x"} {
		thief.wantCommand(m, "EPERM", "%s", c)
	}
	thief = carrier(t, 4242, "x")
	thief.want("EBUSY", "put", m.At("D/f"), "", "creat")
	thief.wantCommand(m, "EPERM", "release D")
	carrier(t, nobody, "x").must("put", m.At("D/f"), "", "creat")
	carrier(t, 0, "x").must("put", m.At("D/f"), "", "")
	carrier(t, 0, "x").mustCommand(m, "release D")
	m.wantFree("D")

	// The other way around root's lease is root's alone.
	agent(t).mustCommand(m, "acquire D client=x")
	carrier(t, nobody, "x").want("EBUSY", "put", m.At("D/f"), "", "")
}

// TestL2Holders: holders are the processes that carry the ID, those that took
// or joined the lease, and their descendants; nobody else.
func TestL2Holders(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	put := []string{"put", m.At("D/f"), "x", "creat,trunc"}
	taker := agent(t)
	taker.mustCommand(m, "acquire D client=x")
	taker.must(put...)
	taker.Child().must(put...)

	holder := carrier(t, 0, "x")
	child := holder.Child()
	holder.must(put...)
	holder.mustCommand(m, "check D")
	child.must(put...)
	carrier(t, 0, "x").must("mkdir", m.At("D/sub"))
	if _, made := m.Locks()["D/sub"]; made {
		t.Error("a directory beneath the lease has a lock of its own")
	}
	for _, other := range []string{"", "y", "xx", "x ", "X"} {
		o := carrier(t, 0, other)
		o.want("EBUSY", put...)
		o.wantCommand(m, "EPERM", "check D")
	}
	// With a clean environment it is a descendant of what was seen to hold.
	if got := holder.Get("sh", fmt.Sprintf("env -i /bin/sh -c 'echo y >%s'", m.At("D/f"))); got != "0 " {
		t.Errorf("a child without the variable: %q", got)
	}
	// The first one of several is what getenv(3) tells.
	twice := awaitAgent(t, func(sock string) {
		cmd := exec.Command("/usr/bin/python3", "-c", `if True:
			import ctypes, sys
			libc = ctypes.CDLL(None)
			args = (ctypes.c_char_p * 2)(sys.argv[1].encode(), None)
			env = (ctypes.c_char_p * 5)(*[e.encode() for e in sys.argv[2:6]], None)
			libc.execve(args[0], args, env)`,
			agentBin(), envAgent+"="+sock, envRoot+"="+testRoot(), "STAGEFS_CLIENT=y", "STAGEFS_CLIENT=x")
		startCmd(t, cmd)
	})
	twice.want("EBUSY", put...)

	joiner := agent(t)
	joiner.want("EBUSY", put...)
	joiner.wantCommand(m, "ENOENT", "join D client=y")
	joiner.mustCommand(m, "join D client=x")
	joiner.must(put...)
	joiner.Child().must(put...)
}

// TestL2Script: a script that exports its client's ID is no holder itself, nor is what it
// forks: what it was started with counts. The programs that it runs then are; and it is
// one when it has joined.
func TestL2Script(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	script := `id=$("$0" acquire --client-file "$2" "$1/D") || exit
export STAGEFS_CLIENT=$(cat "$2")
echo x >"$1/D/f" && echo "it has written"
(echo x >"$1/D/f") && echo "its fork has written"
touch "$1/D/f" || echo "its program has not"
echo "join D client=$STAGEFS_CLIENT" >"$1/.stagefs/ctl"
echo x >"$1/D/f" && (echo y >>"$1/D/f") && echo joined
"$0" release "$1/D"`
	r := run(t, "sh", "-c", script, stagefsBin(), m.Path, filepath.Join(tempDir(t), "id"))
	if r.Status != 0 || r.Out != "joined\n" || strings.Count(r.Err, "busy") != 2 {
		t.Errorf("the script: %v, want two refusals before it has joined", r)
	}
	if b, _ := os.ReadFile(m.Back("D/f")); string(b) != "x\ny\n" {
		t.Errorf("D/f = %q", b)
	}
}

// TestL2Container: holders may be in other pid and mount namespaces, as in
// containers and CI steps.
func TestL2Container(t *testing.T) {
	need(t, "root", "fuse", "unshare")
	m := mount(t)
	openDir(t, m.Back("D"))
	agent(t).mustCommand(m, `acquire D client="step 1"`)
	script := `mount -t proc proc /proc && echo text >"$1/f" && (exec /bin/sh -c 'echo more >>"$1/f"' sh "$1")`
	in := func(env string) Result {
		cmd := exec.Command("unshare", "-p", "-m", "-f", "/bin/sh", "-c", script, "sh", m.At("D"))
		cmd.Env = append(os.Environ(), env)
		return runCmd(t, cmd)
	}
	if r := in("STAGEFS_CLIENT=step 1"); r.Status != 0 {
		t.Errorf("a step with the ID: %v", r)
	}
	if b, _ := os.ReadFile(m.Back("D/f")); string(b) != "text\nmore\n" {
		t.Errorf("D/f = %q", b)
	}
	if r := in("STAGEFS_CLIENT=step 2"); r.Status == 0 || !strings.Contains(r.Err, "busy") {
		t.Errorf("a step with another ID: %v, want a refusal", r)
	}
}

// TestL2Touch: touching the lock file renews, for a holder, and so does
// writing to it.
func TestL2Touch(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	a, other := agent(t), agent(t)
	a.mustCommand(m, "acquire D client=x ttl=1h")
	a.must("put", m.At("D/devserver"), "", "creat,excl")
	left := func() float64 { return m.Locks()["D"].Deadline }
	for name, touch := range map[string][]string{
		"utimes": {"utimens", m.At("D/devserver")},
		"write":  {"put", m.At("D/devserver"), "x", ""},
		"touch":  {"sh", "touch " + m.At("D/devserver")},
	} {
		before := left()
		// Long enough for a listing to be read.
		eventually(t, "time goes by", func() bool { return left() < before-0.5 })
		before = left()
		other.want("EBUSY", "utimens", m.At("D/devserver"))
		if now := left(); now > before {
			t.Errorf("%s: a stranger has renewed the lease: %v after %v", name, now, before)
		}
		before = left()
		a.must(touch...)
		if now := left(); now <= before {
			t.Errorf("%s: %v s left after it, %v before", name, now, before)
		}
	}
}

// TestL2Again: a holder locks the lock file again through the same description, and has
// the lease.
func TestL2Again(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	a := agent(t)
	lease := a.mustCommand(m, "acquire D client=x")
	a.must("open", "l", m.At("D/devserver"), "rdwr,creat")
	for range 3 {
		a.must("flock", "l")
	}
	if row := m.Locks()["D"]; row.Token != lease.Token {
		t.Errorf("the row: %+v, want the lease's", row)
	}
}

// TestL2Owner: a lease takes the place of what its taker had by itself; its
// release frees the directory (A13), and what the taker made on the way (A12).
func TestL2Owner(t *testing.T) {
	m := mount(t)
	a, b := agent(t), agent(t)
	a.must("mkdir", m.At("board"))
	a.must("mkdir", m.At("board/v1"))
	a.mustCommand(m, "acquire board/v1 client=x")
	if rows := m.Listing().Locks; len(rows) != 1 || rows[0].Client != "x" {
		t.Errorf("rows: %+v, want the lease alone", rows)
	}
	a.mustCommand(m, "release board/v1 client=x")
	b.mustCommand(m, "acquire board/v1")
	b.mustCommand(m, "release board/v1")

	// What the client has beneath stands in no process's way that works for it (C3c).
	a.mustCommand(m, "acquire board/v1 client=x")
	b.wantCommand(m, "EBUSY", "acquire board client=y")
	b.mustCommand(m, "acquire board client=x")
	b.mustCommand(m, "release board client=x")
	a.mustCommand(m, "release board/v1 client=x")

	// Shared leases, and one that becomes exclusive.
	a.mustCommand(m, "acquire board client=x shared")
	b.mustCommand(m, "acquire board client=y shared")
	a.wantCommand(m, "EBUSY", "acquire board client=x")
	b.mustCommand(m, "release board client=y")
	a.mustCommand(m, "acquire board client=x")
	if rows := m.Listing().Locks; len(rows) != 1 || rows[0].Kind != "lease" {
		t.Errorf("rows: %+v, want one lease", rows)
	}
}

// TestL4Sleep: the time that a machine sleeps counts. A machine that slept for an hour
// shows it in CLOCK_BOOTTIME alone, clock_gettime(2); so does a time namespace. A step
// of CLOCK_MONOTONIC, which no sleep makes, changes nothing.
func TestL4Sleep(t *testing.T) {
	need(t, "root", "fuse", "unshare")
	for clock, slept := range map[string]bool{"boottime": true, "monotonic": false} {
		t.Run(clock, func(t *testing.T) {
			m := mount(t)
			openDir(t, m.Back("short"))
			openDir(t, m.Back("long"))
			a := agent(t)
			a.mustCommand(m, "acquire short client=x ttl=30m")
			a.mustCommand(m, "acquire long client=x ttl=3h")
			m.kill()
			m.cmdBin = filepath.Join(tempDir(t), "later")
			script := "#!/bin/sh\nexec unshare --time --" + clock + "=3600 " + stagefsBin() + " \"$@\"\n"
			writeProgram(t, m.cmdBin, []byte(script))
			m.start(nil)
			m.awaitReady()
			rows := m.Locks()
			if _, held := rows["short"]; held == slept {
				t.Errorf("the short lease is there: %v, want %v", held, !slept)
			}
			want := 3 * 3600.0
			if slept {
				want -= 3600
			}
			if left := rows["long"].Deadline; left > want || left < want-600 {
				t.Errorf("the long lease has %v s left, want %v", left, want)
			}
		})
	}
}

// TestL3Stopped: a client that is stopped when its lease ends writes nothing
// when it goes on: neither by a new open nor by what it had open; and the next
// owner need not wait for it. A mapping that could be written to later, past
// any check, cannot be made under a lease at all.
func TestL3Stopped(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	for _, name := range []string{"written", "mapped", "fresh"} {
		mustDo(t, os.WriteFile(m.Back("D", name), []byte(strings.Repeat("old ", 1024)), 0o666))
	}
	client, next, follower := agent(t), agent(t), stranger(t)
	token := client.mustCommand(m, "acquire D client=x ttl=1h").Token
	over := follower.follow(m, "D", token)
	client.must("open", "w", m.At("D/written"), "wronly")
	client.must("open", "m", m.At("D/mapped"), "rdwr")
	client.want("ENODEV", "mmap", "p", "m")
	client.must("pwrite", "w", "1", "4", "0")
	client.must("pwrite", "m", "1", "4", "0")
	halt(t, client.Pid)
	agent(t).mustCommand(m, "renew D client=x ttl=20ms")
	if end := over(); end.Ended != lockstate.Expired {
		t.Fatalf("the lease ended: %+v", end)
	}
	got := next.mustCommand(m, "acquire D client=y ttl=1h")
	if got.Token <= token {
		t.Errorf("token %d after %d", got.Token, token)
	}
	before := digest(t, m.Back("D"))
	mustDo(t, syscall.Kill(client.Pid, syscall.SIGCONT))
	client.want("EBUSY", "pwrite", "w", "2", "4", "0")
	client.want("EBUSY", "ftruncate", "w", "0")
	client.want("EBUSY", "fallocate", "w", "0", "0", "8192")
	client.want("EBUSY", "fchmod", "w", "0600")
	client.want("EBUSY", "open", "n", m.At("D/fresh"), "wronly")
	client.want("EBUSY", "put", m.At("D/new"), "", "creat")
	client.want("ENODEV", "mmap", "p", "m")
	client.want("EBUSY", "pwrite", "m", "2", "4", "0")
	client.must("close", "m")
	client.Try("close", "w")
	client.wantCommand(m, "ENOENT", "renew D client=x")
	client.wantCommand(m, "EBUSY", "acquire D client=x")
	if after := digest(t, m.Back("D")); after != before {
		t.Errorf("written after the deadline:\n%s", diff(before, after))
	}
	next.must("put", m.At("D/written"), "next", "trunc")
	next.must("put", m.At("D/mapped"), "next", "trunc")
	for _, name := range []string{"written", "mapped"} {
		if b, _ := os.ReadFile(m.Back("D", name)); string(b) != "next" {
			t.Errorf("%s = %q, want what the next owner wrote", name, b)
		}
	}
}

// TestL3Broken: nor does a client write through what it had open when its lease is
// broken, and the next owner need not wait for it either.
func TestL3Broken(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	client, next := agent(t), agent(t)
	client.mustCommand(m, "acquire D client=x ttl=1h")
	client.must("open", "w", m.At("D/file"), "wronly,creat")
	client.must("open", "a", m.At("D/file"), "wronly,append")
	client.must("write", "w", "before")
	if got := m.Ctl("break D enough"); got != "ok" {
		t.Fatalf("break = %s", got)
	}
	before := digest(t, m.Back("D"))
	for range 2 {
		client.want("EBUSY", "write", "w", "late")
		client.want("EBUSY", "write", "a", "late")
		client.want("EBUSY", "ftruncate", "w", "0")
		if after := digest(t, m.Back("D")); after != before {
			t.Errorf("written after the break:\n%s", diff(before, after))
		}
		next.mustCommand(m, "acquire D")
	}
}

// TestL3Before: what the client had open before it took the lease, with a
// writable mapping of it, cannot be revoked. So it stands in the next owner's
// way until it is gone (C3d), and nothing of it comes later.
func TestL3Before(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	mustDo(t, os.WriteFile(m.Back("D/mapped"), []byte(strings.Repeat("old ", 1024)), 0o666))
	client, next, follower := agent(t), agent(t), stranger(t)
	client.must("open", "m", m.At("D/mapped"), "rdwr")
	client.must("mmap", "p", "m")
	client.must("close", "m")
	token := client.mustCommand(m, "acquire D client=x ttl=1h").Token
	client.must("poke", "p", "mine")
	over := follower.follow(m, "D", token)
	client.mustCommand(m, "renew D client=x ttl=20ms") // no sooner: an end before the watch is not told
	if end := over(); end.Ended != lockstate.Expired {
		t.Fatalf("the lease ended: %+v", end)
	}
	no := next.wantCommand(m, "EBUSY", "acquire D client=y")
	if len(no.Blockers) != 1 || no.Blockers[0].Pid != client.Pid {
		t.Errorf("the refusal: %+v, want the mapping as blocker", no)
	}
	client.must("poke", "p", "free") // nobody has the directory
	client.must("munmap", "p")
	next.mustCommand(m, "acquire D client=y wait=20s")
	if b, _ := os.ReadFile(m.Back("D/mapped")); !strings.HasPrefix(string(b), "free") {
		t.Errorf("mapped begins with %q", b[:4])
	}
}

// TestL3Flags: what is written with O_APPEND or O_DIRECT, through the daemon although the
// file passes it, is lost with the lease, also if somebody reads the file past the daemon.
// What was open so before the lease stands in the next owner's way, as any such handle.
func TestL3Flags(t *testing.T) {
	for _, flags := range []string{"wronly,append", "wronly,direct", "rdwr,append", "rdwr,direct"} {
		for _, read := range []bool{false, true} {
			if read && strings.HasPrefix(flags, "rdwr") {
				continue // is refused: it could be mapped past the daemon
			}
			t.Run(fmt.Sprintf("%s, read meanwhile: %v", flags, read), func(t *testing.T) {
				m := mount(t)
				for _, d := range []string{"D", "E"} {
					openDir(t, m.Back(d))
					mustDo(t, os.WriteFile(m.Back(d, "f"), make([]byte, 256<<10), 0o666)) // it passes
				}
				client, next, reader := agent(t), agent(t), stranger(t)
				if read {
					reader.must("open", "r", m.At("D/f"), "rdonly")
					reader.must("open", "r", m.At("E/f"), "rdonly")
				}
				client.must("open", "before", m.At("E/f"), flags)
				client.mustCommand(m, "acquire D client=x ttl=1h")
				client.mustCommand(m, "acquire E client=x ttl=1h")
				client.must("open", "under", m.At("D/f"), flags)
				for _, name := range []string{"before", "under"} {
					client.must("pwrite", name, "1", "512", "0")
				}
				for _, d := range []string{"D", "E"} {
					if got := m.Ctl("break " + d + " enough"); got != "ok" {
						t.Fatalf("break %s = %s", d, got)
					}
				}
				next.mustCommand(m, "acquire D client=y ttl=1h")
				no := next.wantCommand(m, "EBUSY", "acquire E client=y ttl=1h")
				if len(no.Blockers) != 1 || no.Blockers[0].Pid != client.Pid {
					t.Errorf("the refusal: %+v, want what was open before as blocker", no)
				}
				before := digest(t, m.Back("D"))
				client.want("EBUSY", "pwrite", "under", "2", "512", "0")
				client.want("EBUSY", "fallocate", "under", "0", "0", "1048576")
				client.want("EBUSY", "ftruncate", "under", "0")
				if after := digest(t, m.Back("D")); after != before {
					t.Errorf("written after the break:\n%s", diff(before, after))
				}
				client.must("pwrite", "before", "2", "512", "0") // nobody has E
				client.must("close", "before")
				next.mustCommand(m, "acquire E client=y ttl=1h wait=20s")
			})
		}
	}
}
