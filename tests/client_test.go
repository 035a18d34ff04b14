//go:build linux

package tests

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	goclient "github.com/stagefs/stagefs/lockstate/client"
)

// clientHands carries out an agent's commands with the Go client. What goes
// wrong with a lock is printed, since it has no errno.
type clientHands struct {
	locks map[string]*goclient.Lock
}

func (h *clientHands) do(w []string) (out string, err error) {
	for len(w) < 6 {
		w = append(w, "")
	}
	l := h.locks[w[1]]
	switch w[0] {
	case "acquire": // acquire NAME DIR CLIENT TTL OPTIONS
		ttl, _ := time.ParseDuration(w[4])
		opts := goclient.Options{Client: w[3], TTL: ttl, MakeParents: strings.Contains(w[5], "make"), MustBeNew: strings.Contains(w[5], "new"), Wait: strings.Contains(w[5], "wait")}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if strings.Contains(w[5], "soon") {
			ctx, cancel = context.WithTimeout(ctx, 50*time.Millisecond)
			defer cancel()
		}
		if l, err = goclient.Acquire(ctx, w[2], opts); err != nil {
			return failure(err), nil
		}
		if h.locks == nil {
			h.locks = map[string]*goclient.Lock{}
		}
		h.locks[w[1]] = l
		return itoa(int(l.Token())), nil
	case "release":
		return failure(l.Release(w[2] == "destroy")), nil
	case "renew":
		return failure(l.Renew(context.Background())), nil
	case "await": // until it is lost
		select {
		case <-l.Lost():
		case <-time.After(patience):
		}
		return failure(l.Err()), nil
	case "give": // give DIR CLIENT: release without a Lock
		d, err := goclient.Find(w[1])
		if err != nil {
			return failure(err), nil
		}
		return failure(d.Release(context.Background(), goclient.Release{Client: w[2]})), nil
	case "with": // with DIR CLIENT FILE: writes FILE, and waits until the lock is lost or FILE is gone
		return failure(goclient.TryWithLock(context.Background(), w[1], w[2], func(ctx context.Context) error {
			if err := os.WriteFile(w[3], nil, 0o666); err != nil {
				return err
			}
			for ctx.Err() == nil {
				if _, err := os.Stat(w[3]); err != nil {
					return errors.New("the function's own")
				}
				time.Sleep(time.Millisecond)
			}
			return nil
		})), nil
	}
	return "", fmt.Errorf("no command %q", w[0])
}

// failure is an error as a test can compare it: the sentinels that it is, then
// its text.
func failure(err error) string {
	if err == nil {
		return "ok"
	}
	var b strings.Builder
	for _, s := range []struct {
		err  error
		name string
	}{
		{goclient.ErrFailedToLock, "failed"},
		{goclient.ErrEmptyClientID, "empty"},
		{goclient.ErrNotStagefs, "notstagefs"},
		{goclient.ErrLost, "lost"},
		{goclient.ErrNoLock, "nolock"},
		{os.ErrExist, "exist"},
		{context.DeadlineExceeded, "deadline"},
	} {
		if errors.Is(err, s.err) {
			b.WriteString(s.name + " ")
		}
	}
	return b.String() + err.Error()
}

// client runs a command of clientHands and compares what it prints with the
// beginning and a part of it.
func (a *Agent) client(begins, holds string, args ...string) string {
	a.t.Helper()
	got := a.Get(append([]string{"client"}, args...)...)
	if !strings.HasPrefix(got, begins) || !strings.Contains(got, holds) {
		a.t.Errorf("client %q: %q, want %q… with %q", args, got, begins, holds)
	}
	return got
}

// TestL1Client: a lease by the Go client: its process and descendants write,
// others are refused and hear who has it; however it ends, its holder learns it.
func TestL1Client(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	dir := m.At("D")
	a, b := agent(t), agent(t)
	token := a.client("", "", "acquire", "l", dir, "A")
	if row := m.Locks()["D"]; row.Client != "A" || itoa(int(row.Token)) != token {
		t.Errorf("the lease: %+v, token %q", row, token)
	}
	a.must("put", m.At("D/x"), "", "creat")
	a.Child("setsid").must("put", m.At("D/y"), "", "creat")
	b.want("EBUSY", "put", m.At("D/z"), "", "creat")
	b.client("failed ", `client "A"`, "acquire", "l", dir, "B")
	b.client("failed ", `client "A"`, "acquire", "l", dir, "B", "", "wait soon")
	b.client("failed ", `client "A"`, "acquire", "l", dir)
	a.client("failed ", `client "A"`, "acquire", "l2", dir, "B") // from the same process too
	a.client("ok", "", "release", "l")
	a.client("ok", "", "release", "l")
	m.wantFree("D")

	// Re-entry by the same ID, from another process; what one releases the
	// other has lost.
	one := a.client("", "", "acquire", "l", dir, "A")
	if two := b.client("", "", "acquire", "l", dir, "A"); two != one {
		t.Errorf("tokens %s and %s, want one lock", one, two)
	}
	b.must("put", m.At("D/z"), "", "creat")
	agent(t).client("nolock", "", "give", dir, "B")
	agent(t).client("ok", "", "give", dir, "A")
	b.client("lost ", "released", "await", "l")
	a.client("lost ", "released", "await", "l")
	a.client("lost ", "released", "release", "l")

	// Evicted, and somebody else has it.
	a.client("", "", "acquire", "l", dir, "A")
	m.wantStatus(0, "", "break", "--why", "it hangs", dir)
	b.client("", "", "acquire", "l", dir, "B")
	a.client("lost ", `broken`, "await", "l")
	a.client("lost ", `"it hangs"`, "renew", "l")
	a.want("EBUSY", "put", m.At("D/x"), "", "")
	a.client("lost ", "", "release", "l")
	b.client("ok", "", "release", "l")

	// Stopped beyond its deadline, it wakes up without.
	a.client("", "", "acquire", "l", dir, "A", "200ms")
	halt(t, a.Pid)
	b.client("", "", "acquire", "l", dir, "B", "", "wait")
	mustDo(t, syscall.Kill(a.Pid, syscall.SIGCONT))
	a.client("lost ", "expired", "await", "l")
	a.want("EBUSY", "put", m.At("D/x"), "", "")
	b.client("ok", "", "release", "l")

	// Killed, it leaves the directory at its deadline and not before.
	a.client("", "", "acquire", "l", dir, "A", "1h")
	a.Kill()
	if row := m.Locks()["D"]; row.Client != "A" {
		t.Errorf("after the kill: %+v, want the lease still", row)
	}
	b.mustCommand(m, "renew D client=A ttl=20ms")
	m.awaitFree("D")
}

// TestL1ClientWaits: a lease lasts its TTL from when it is granted, however long it has
// stood in line before.
func TestL1ClientWaits(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	first, err := goclient.Acquire(t.Context(), m.At("D"), goclient.Options{Client: "first"})
	mustDo(t, err)
	waited := make(chan error, 1)
	go func() {
		next, err := goclient.Acquire(t.Context(), m.At("D"), goclient.Options{Client: "next", TTL: time.Second, Wait: true})
		if err == nil {
			time.Sleep(10 * time.Millisecond) // as somebody does who works
			err = errors.Join(next.Err(), next.Release(false))
		}
		waited <- err
	}()
	time.Sleep(2 * time.Second)
	mustDo(t, first.Release(false))
	mustDo(t, <-waited)
	m.awaitFree("D")
}

// TestR3Client: a lease goes with its directory, also if its client takes the name that
// this had again, for another one.
func TestR3Client(t *testing.T) {
	m := mount(t)
	a := agent(t)
	tokens := map[string]string{}
	for _, dir := range []string{"one", "two"} {
		openDir(t, m.Back("D"))
		tokens[dir] = a.client("", "", "acquire", dir, m.At("D"), "A", "1h")
		if dir == "one" {
			a.must("rename", m.At("D"), m.At("E"))
		}
	}
	for dir, name := range map[string]string{"one": "E", "two": "D"} {
		a.client("ok", "", "renew", dir)
		if row := m.Locks()[name]; itoa(int(row.Token)) != tokens[dir] {
			t.Errorf("the row of %s: %+v, want token %s", name, row, tokens[dir])
		}
		a.client("ok", "", "release", dir)
		m.wantFree(name)
	}
}

// TestA7ClientThreads: who has a lock can do what all threads have to take part in, those
// too that wait for the lock's end.
func TestA7ClientThreads(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	a := agent(t)
	a.client("", "", "acquire", "l", m.At("D"))
	eventually(t, "a thread waits for the end", func() bool { return inCall(a.Pid, unix.SYS_PREAD64) })
	a.must("setgid", "0")
	a.client("ok", "", "release", "l")
}

// TestL1Client64: 64 renewals in a row by the real client, on a short TTL.
func TestL1Client64(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	a := agent(t)
	a.client("", "", "acquire", "l", m.At("D"), "A", "800ms")
	for renewals, last := 0, 0.0; renewals < 64; {
		row, held := m.Locks()["D"]
		if !held {
			t.Fatalf("lost after %d renewals", renewals)
		}
		if row.Deadline > last {
			renewals++
		}
		last = row.Deadline
	}
	a.client("ok", "", "release", "l")
}

// TestA7Client: locks of processes by the Go client: waiting, new directories,
// the end with the process, and what is no mount.
func TestA7Client(t *testing.T) {
	m := mount(t)
	a, b := agent(t), agent(t)
	a.client("", "", "acquire", "l", m.At("x/y/z"), "", "", "make")
	m.wantOwner("x/y/z", a.Pid)
	b.client("exist ", "", "acquire", "l", m.At("x/y/z"), "", "", "new make")
	b.client("failed ", "process "+itoa(a.Pid), "acquire", "l", m.At("x/y/z"))
	b.client("failed ", "process "+itoa(a.Pid), "acquire", "l", m.At("x/y/z/new"), "", "", "make")
	b.client("failed ", "process "+itoa(a.Pid), "acquire", "l", m.At("x/y/z/new"), "", "", "make wait soon")
	waited := b.StartGet("client", "acquire", "l", m.At("x/y/z"), "", "", "wait")
	m.awaitWaiters("x/y/z", 1)
	// The lock goes with its directory, which the client finds again (R3).
	a.must("rename", m.At("x/y/z"), m.At("x/y/w"))
	a.client("ok", "", "release", "l")
	if got := waited(); !strings.Contains(got, "no such file") {
		t.Errorf("who waited for what was renamed: %q", got)
	}
	b.client("", "", "acquire", "l", m.At("x/y/w"))
	m.wantOwner("x/y/w", b.Pid)
	b.Kill()
	m.awaitFree("x/y/w")

	a.client("", "", "acquire", "l", m.At("new"), "", "", "new")
	a.must("rmdir", m.At("new"))
	a.client("lost ", "removed", "await", "l")

	elsewhere := tempDir(t)
	a.client("notstagefs ", elsewhere, "acquire", "l", elsewhere)
	a.client("notstagefs ", elsewhere, "acquire", "l", filepath.Join(elsewhere, "new"), "", "", "make new")
	if entries, _ := os.ReadDir(elsewhere); len(entries) > 0 {
		t.Errorf("left %v elsewhere", entries)
	}
	a.client("", "no such file", "acquire", "l", m.At("nothing"))
	a.client("empty ", "", "with", m.At("x"), "")
	m.kill()
	a.client("", "daemon of", "acquire", "l", m.At("x"))
}

// TestL1TryWithLock: the function runs under the lease, its context ends with
// the lock, and its own error comes back.
func TestL1TryWithLock(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	a, b := agent(t), agent(t)
	begin := func() func() string {
		t.Helper()
		end := a.StartGet("client", "with", m.At("D"), "A", m.At("D/running"))
		eventually(t, "the function runs", func() bool { return exists(m.Back("D/running")) })
		return end
	}
	end := begin()
	b.client("failed ", `client "A"`, "with", m.At("D"), "B", m.At("D/x"))
	b.client("", "", "acquire", "l", m.At("D"), "A")
	b.must("unlink", m.At("D/running"))
	if got := end(); got != "the function's own" {
		t.Errorf("TryWithLock = %q, want the function's own error", got)
	}
	b.client("lost ", "", "await", "l") // it was released
	m.wantFree("D")

	end = begin()
	m.wantStatus(0, "", "break", "--why", "it hangs", m.At("D"))
	if got := end(); !strings.HasPrefix(got, "lost ") || !strings.Contains(got, "it hangs") {
		t.Errorf("TryWithLock = %q, want ErrLost with the reason", got)
	}
}

// TestA7Container: all of it works where nothing but the mount can be seen; a
// part of it is refused with a hint.
func TestA7Container(t *testing.T) {
	m := mount(t)
	need(t, "unshare", "chroot")
	root := filepath.Join(tempDir(t), "root")
	for _, d := range []string{"static", "part", "bin"} {
		mustDo(t, os.MkdirAll(filepath.Join(root, d), 0o755))
	}
	mustDo(t, copyFile(stagefsBin(), filepath.Join(root, "bin/stagefs"), 0o755))
	openDir(t, m.Back("board/v1"))
	inside := func(args ...string) Result {
		t.Helper()
		script := `mount --make-rprivate / && mount --bind "$1" "$2/static" && mount --bind "$1/board" "$2/part" || exit 99; root=$2; shift 2; exec chroot "$root" /bin/stagefs "$@"`
		cmd := exec.Command("unshare", append([]string{"-m", "sh", "-c", script, "sh", m.Path, root}, args...)...)
		return runCmd(t, cmd)
	}
	if r := inside("run", "/static/board/v1", "/bin/stagefs", "check", "/static/board/v1"); r.Status != 0 || atoi(strings.TrimSpace(r.Out)) == 0 {
		t.Errorf("run in a container: %v", r)
	}
	if r := inside("acquire", "--client=job", "--ttl=1h", "/static/board/v1"); r.Status != 0 || m.Locks()["board/v1"].Client != "job" {
		t.Errorf("acquire in a container: %v", r)
	}
	if r := m.stagefs("release", "--client=job", m.At("board/v1")); r.Status != 0 {
		t.Errorf("release outside: %v", r)
	}
	if r := inside("run", "/part/v1", "/bin/stagefs", "version"); r.Status != 69 || !strings.Contains(r.Err, "whole mount") {
		t.Errorf("run in a part of the mount: %v, want 69 with a hint", r)
	}
}
