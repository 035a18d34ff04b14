//go:build linux

package tests

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestFaultFullState: while the state cannot be written, locks are taken, kept
// and released as ever, and the log says that they would not outlive the daemon;
// when there is room again, those that stand are durable without anybody's doing.
func TestFaultFullState(t *testing.T) {
	m, disk := onSmallState(t)
	m.serve()
	old, a, b, rival := agent(t), agent(t), agent(t), stranger(t)
	old.must("mkdir", m.At("old"))
	disk.fill()
	last := m.Locks()["old"].Token
	// As many as do not fit into what the journal has as room.
	for i := range 6000 {
		a.must("mkdir", m.At("D"))
		if i%1000 == 0 {
			row := m.Locks()["D"]
			if row.Token <= last || row.Pid != a.Pid {
				t.Fatalf("lock %d on a full state: %+v after token %d", i, row, last)
			}
			last = row.Token
			rival.want("EBUSY", "mkdir", m.At("D/x"))
		}
		a.must("rmdir", m.At("D"))
	}
	eventually(t, "a warning", func() bool { return strings.Contains(m.Log(), "locks are not kept for a restart") })
	m.wantUnwritable(true)
	m.replace()
	for tries := 0; m.stateWritable() && tries < 6000; tries++ {
		a.must("mkdir", m.At("D"))
		a.must("rmdir", m.At("D"))
	}
	m.wantUnwritable(true)
	a.must("mkdir", m.At("A"))
	b.must("creat", m.At("devserver"), "wronly,creat,excl")
	b.must("mkdir", m.At("B"))
	held := m.Locks()
	disk.free()
	eventually(t, "the state is written again", func() bool { return strings.Contains(m.Log(), "locks are kept for a restart again") })
	m.wantUnwritable(false)
	m.restart(b.Kill)
	for _, name := range []string{"old", "A"} {
		if row := m.Locks()[name]; row.Token != held[name].Token || row.Pid != held[name].Pid {
			t.Errorf("%s after the restart: %+v, want token %d of pid %d", name, row, held[name].Token, held[name].Pid)
		}
	}
	m.wantFree("B")
	a.must("mkdir", m.At("new"))
	if row := m.Locks()["new"]; row.Token <= held["B"].Token {
		t.Errorf("token %d after %d", row.Token, held["B"].Token)
	}
}

// TestFaultFullStateFirst: with no room for the state, a directory that was never served
// is not mounted, and it is said what to do. With room, it is, and its first lock can be
// had though there is no room any more.
func TestFaultFullStateFirst(t *testing.T) {
	m, disk := onSmallState(t)
	mustDo(t, os.Mkdir(m.State, 0o700))
	disk.fill()
	wantRefusal(t, "71", []string{"state directory: ", m.State + "/", "no space left on device; make room there, or name another with --state-dir"},
		"mount", "--state-dir", m.State, m.Path)
	if r := run(t, stagefsBin(), "doctor", "--state-dir", m.State); !strings.Contains(r.Out, "a first mount fails") {
		t.Errorf("doctor: %v", r)
	}
	disk.free()
	m.serve()
	if log := m.Log(); strings.Contains(log, "warning") {
		t.Errorf("the first mount warns:\n%s", log)
	}
	disk.fill()
	a := agent(t)
	a.must("mkdir", m.At("D"))
	m.wantOwner("D", a.Pid)
	if !m.stateWritable() {
		t.Error("the metric tells that the state can't be written")
	}
}

// TestFaultFullStateLine: what a line of the state had no more room for is not taken for
// a crash's by the next daemon, which would say that nothing is missing.
func TestFaultFullStateLine(t *testing.T) {
	m := mountOver(t)
	a := agent(t)
	// With a limit a write is cut off at a byte. The daemon has taken off its own.
	mustDo(t, unix.Prlimit(m.daemon(), unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 4567, Max: unix.RLIM_INFINITY}, nil))
	for i := 0; m.stateWritable() && i < 100; i++ {
		a.must("mkdir", m.At("D"+itoa(i)))
	}
	if m.stateWritable() {
		t.Fatal("the state can be written")
	}
	held := m.Locks()["D0"]
	m.restart(nil)
	m.wantStill("D0", held)
	for _, said := range []string{"in the middle of a line", "is damaged"} {
		if log := m.Log(); strings.Contains(log, said) {
			t.Errorf("the next daemon says %q:\n%s", said, shorten(log))
		}
	}
}

// stateWritable is what the metrics tell of the state.
func (m *Mount) stateWritable() bool {
	m.t.Helper()
	b, err := os.ReadFile(m.control("metrics"))
	mustDo(m.t, err)
	_, value, ok := strings.Cut(string(b), "\nstagefs_state_writable ")
	if !ok {
		m.t.Fatal("no stagefs_state_writable in the metrics")
	}
	return value[0] == '1'
}

// wantUnwritable expects the metric and `doctor` to tell whether the state can be
// written.
func (m *Mount) wantUnwritable(unwritable bool) {
	m.t.Helper()
	eventually(m.t, "the metric", func() bool { return m.stateWritable() != unwritable })
	r := run(m.t, stagefsBin(), "doctor", "--state-dir", m.State)
	said := false
	for line := range strings.Lines(r.Out) {
		said = said || strings.HasPrefix(line, "warn  mounts") && strings.Contains(line, m.Path) && strings.Contains(line, "cannot write its state")
	}
	if full := strings.Contains(r.Out, "no room left"); said != unwritable || full != unwritable {
		m.t.Errorf("doctor says so of the mount: %v, and of the disk: %v; want %v:\n%s", said, full, unwritable, r.Out)
	}
}

// onSmallState is a mount that is not served yet, with its state on a small disk.
func onSmallState(t *testing.T) (m *Mount, disk *image) {
	disk, dir := newImage(t, 8), staticDir(t)
	m = newMount(t, dir, dir)
	m.State = filepath.Join(disk.Dir, "state")
	return m, disk
}

// lease makes a directory that a client, c, has a lease on.
func (m *Mount) lease(dir string) {
	m.t.Helper()
	mustDo(m.t, os.Mkdir(m.At(dir), 0o755))
	if s := m.Ctl("release " + dir); s != "ok" {
		m.t.Fatal(s)
	}
	if r := run(m.t, stagefsBin(), "acquire", "--client", "c", "--ttl", "600s", m.At(dir)); r.Status != 0 {
		m.t.Fatal(r)
	}
}

// TestFaultFullStateReplace: a lock that ended while nothing could be written,
// before the daemon was replaced, is not back after a restart.
func TestFaultFullStateReplace(t *testing.T) {
	m, disk := onSmallState(t)
	m.serve()
	m.lease("L")
	disk.fill()
	a := agent(t)
	for tries := 0; m.stateWritable() && tries < 6000; tries++ {
		a.must("mkdir", m.At("D"))
		a.must("rmdir", m.At("D"))
	}
	m.wantUnwritable(true)
	if s := m.Ctl("break L over"); s != "ok" {
		t.Fatal(s)
	}
	m.replace()
	m.wantFree("L")
	disk.free()
	m.wantUnwritable(false)
	// The journal is appended to, or another begun: both within a second.
	a.must("mkdir", m.At("E"))
	eventually(t, "E is kept", func() bool {
		all, _ := filepath.Glob(filepath.Join(m.State, "*.[jl]o*"))
		for _, f := range all {
			if b, _ := os.ReadFile(f); strings.Contains(string(b), `"E"`) {
				return true
			}
		}
		return false
	})
	m.restart(nil)
	if rows := m.Locks(); len(rows) != 1 || rows["E"].Pid != a.Pid {
		t.Errorf("after the restart: %+v, want E alone", rows)
	}
}

// TestFaultFullStateRestart: a daemon that starts while its state is full has
// what is there, warns, and keeps locks where the one before kept them.
func TestFaultFullStateRestart(t *testing.T) {
	m, disk := onSmallState(t)
	m.serve()
	a := agent(t)
	a.must("mkdir", m.At("D"))
	token := m.Locks()["D"].Token
	m.restart(disk.fill)
	if row := m.Locks()["D"]; row.Token != token || row.Pid != a.Pid {
		t.Errorf("D after the restart: %+v, want token %d", row, token)
	}
	eventually(t, "a warning", func() bool { return strings.Contains(m.Log(), "no space left on device; the last journal goes on") })
	stranger(t).want("EBUSY", "mkdir", m.At("D/x"))
	a.must("mkdir", m.At("E"))
	kept := m.Locks()["E"].Token
	if kept <= token {
		t.Errorf("token %d after %d", kept, token)
	}
	// Once more, without room, and then with it.
	m.restart(nil)
	if rows := m.Locks(); rows["D"].Token != token || rows["E"].Token != kept {
		t.Errorf("after another restart: %+v, want D with token %d and E with %d", rows, token, kept)
	}
	a.must("rmdir", m.At("E"))
	m.restart(nil)
	if rows := m.Locks(); len(rows) != 1 || rows["D"].Token != token {
		t.Errorf("after a third restart: %+v, want D with token %d", rows, token)
	}
	journals := func() []string {
		all, _ := filepath.Glob(filepath.Join(m.State, "*.journal.*"))
		return all
	}
	full := journals()
	disk.free()
	a.must("mkdir", m.At("F"))
	want := m.Locks()["F"].Token
	eventually(t, "another journal is begun", func() bool { now := journals(); return len(now) == 1 && now[0] != full[0] })
	m.restart(nil)
	if row := m.Locks()["F"]; row.Token != want {
		t.Errorf("F: %+v, want token %d", row, want)
	}
}

// TestFaultPowerCut: the time that a client was told its lease has is on the
// disk when it is told.
func TestFaultPowerCut(t *testing.T) {
	m, disk := onSmallState(t)
	m.serve()
	m.lease("L")
	for i, ttl := range []float64{600, 3600, 1800} {
		// What is on the disk at that moment is all that the next daemon finds.
		if i > 0 {
			if r := run(t, stagefsBin(), "renew", "--client", "c", "--ttl", fmt.Sprintf("%gs", ttl), m.At("L")); r.Status != 0 {
				t.Fatal(r)
			}
		}
		cut := filepath.Join(tempDir(t), "cut")
		mustDo(t, copyFile(disk.file, cut, 0o600))
		m.restart(func() {
			there := cut + ".fs"
			mustDo(t, os.Mkdir(there, 0o755))
			if r := run(t, "mount", "-o", "loop", cut, there); r.Status != 0 {
				t.Fatal(r)
			}
			t.Cleanup(func() { unix.Unmount(there, unix.MNT_DETACH) })
			disk = &image{t: t, file: cut, Dir: there}
			m.State = filepath.Join(there, "state")
		})
		if row := m.Locks()["L"]; row.Client != "c" || row.TTL != ttl {
			t.Errorf("after cut %d: %+v, want a lease of %g s", i, row, ttl)
		}
	}
}

// TestFaultPowerCutMark: how long the journal was is on the disk as well, so that after a
// power cut what was never written is told from damage.
func TestFaultPowerCutMark(t *testing.T) {
	m, disk := onSmallState(t)
	m.serve()
	m.lease("L")
	cut := filepath.Join(tempDir(t), "cut")
	there := cut + ".fs"
	mustDo(t, os.Mkdir(there, 0o755))
	eventually(t, "the mark of the journal is on the disk", func() bool {
		mustDo(t, copyFile(disk.file, cut, 0o600))
		if r := run(t, "mount", "-o", "loop", cut, there); r.Status != 0 {
			t.Fatal(r)
		}
		defer unix.Unmount(there, unix.MNT_DETACH)
		files, err := filepath.Glob(filepath.Join(there, "state", "*.place"))
		if err != nil || len(files) != 1 {
			t.Fatalf("%q, %v", files, err)
		}
		b, err := os.ReadFile(files[0])
		mustDo(t, err)
		_, mark, _ := strings.Cut(string(b), "\n")
		return strings.Contains(mark, " M 1 ")
	})
}

// TestFaultTornState: what a kill or a power cut leaves of a line that nobody
// had been answered for is reported, and costs neither a lock nor a search of
// the whole backing; of such files, and of half snapshots, only a few are kept.
func TestFaultTornState(t *testing.T) {
	dir := staticDir(t)
	cold := filepath.Join(dir, "cold")
	mustDo(t, os.Mkdir(cold, 0o777))
	mustDo(t, os.WriteFile(filepath.Join(cold, "file"), nil, 0o666))
	seen, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	mustDo(t, err)
	defer unix.Close(seen)
	_, err = unix.InotifyAddWatch(seen, filepath.Join(cold, "file"), unix.IN_OPEN)
	mustDo(t, err)

	m := mountDir(t, dir, dir)
	a := agent(t)
	a.must("mkdir", m.At("D"))
	before := m.Locks()["D"]
	for range 12 {
		said := len(m.Log())
		m.restart(func() {
			journals, _ := filepath.Glob(filepath.Join(m.State, "*.journal.*[0-9]"))
			last := ""
			for _, j := range journals {
				if !strings.Contains(j, "damaged") {
					last = j
				}
			}
			f, err := os.OpenFile(last, os.O_WRONLY|os.O_APPEND, 0)
			mustDo(t, err)
			defer f.Close()
			_, err = f.WriteString(`3f2a91cc P 7 {"token":7,"wor`)
			mustDo(t, err)
			mustDo(t, os.WriteFile(strings.Replace(last, ".journal.", ".locks.", 1)+"7.tmp", []byte("stagefs-lo"), 0o600))
		})
		if row := m.Locks()["D"]; row.Token != before.Token || row.Pid != before.Pid {
			t.Fatalf("D after the restart: %+v, want %+v", row, before)
		}
		eventually(t, "a warning", func() bool { return strings.Contains(m.Log()[said:], "in the middle of a line") })
	}
	if n, err := unix.Read(seen, make([]byte, 4096)); err != unix.EAGAIN {
		t.Errorf("the daemon looked into a file where nothing was open (%d, %v)", n, err)
	}
	if left, _ := filepath.Glob(filepath.Join(m.State, "*.tmp")); len(left) > 1 { // the token mark has one
		t.Errorf("half snapshots %q", left)
	}
	if left, _ := filepath.Glob(filepath.Join(m.State, "*.damaged-*")); len(left) != 8 {
		t.Errorf("%d files set aside, want the newest 8: %q", len(left), left)
	}
}

// TestFaultDamagedState: of a state that was cut off anywhere, or has a bit
// flipped, what can be proven is there after a restart: a lock is as it was, or
// it is gone and said so; never another's. Tokens go on above all that were
// given.
func TestFaultDamagedState(t *testing.T) {
	m := mountOver(t)
	owners := make([]*Agent, 4)
	for i := range owners {
		owners[i] = agent(t)
	}
	take := func() {
		for i, a := range owners {
			if a.Try("mkdir", m.At("D"+itoa(i))) != "ok" {
				if row, held := m.Locks()["D"+itoa(i)]; held && row.Pid == a.Pid {
					continue
				}
				a.must("rmdir", m.At("D"+itoa(i)))
				a.must("mkdir", m.At("D"+itoa(i)))
			}
		}
	}
	damages := map[string]func(b []byte, n int) []byte{
		"cut off": func(b []byte, n int) []byte { return b[:n] },
		"flipped": func(b []byte, n int) []byte { b[n] ^= 1 << (n % 8); return b },
		"zeroes":  func(b []byte, n int) []byte { clear(b[n:min(n+64, len(b))]); return b },
	}
	for _, what := range slices.Sorted(maps.Keys(damages)) {
		for _, kind := range []string{"*.journal.*", "*.locks.*", "*.tokens"} {
			for part := range 4 {
				t.Run(fmt.Sprintf("%s/%s/%d", what, strings.Trim(kind, "*."), part), func(t *testing.T) {
					defer func(t *testing.T) { m.t = t }(m.t)
					m.t = t
					take()
					if kind == "*.locks.*" {
						m.restart(nil) // puts what is held into a snapshot
					}
					before := m.Locks()
					last := uint64(0)
					for _, row := range before {
						last = max(last, row.Token)
					}
					damaged, shows := false, true
					m.restart(func() {
						files, _ := filepath.Glob(filepath.Join(m.State, kind))
						for _, file := range files {
							b, err := os.ReadFile(file)
							mustDo(t, err)
							if len(b) == 0 {
								continue
							}
							n := min(len(b)*part/4+part*7, len(b)-1)
							// Without its last lines a file is whole: a daemon that
							// was killed at once has not noted how long it was.
							shows = what != "cut off" || n > 0 && b[n-1] != '\n'
							mustDo(t, os.WriteFile(file, damages[what](b, n), 0o600))
							damaged = true
						}
					})
					if !damaged {
						t.Skip("nothing there to damage")
					}
					after := m.Locks()
					for dir, row := range after {
						if was, ok := before[dir]; !ok || row.Token != was.Token || row.Pid != was.Pid || row.Start != was.Start {
							t.Errorf("%s: %+v, was %+v", dir, row, was)
						}
					}
					lost := len(before) - len(after)
					if lost > 0 && shows {
						eventually(t, "that locks are lost is said", func() bool { return strings.Contains(m.Log(), "damaged") })
					}
					if kind == "*.tokens" && lost > 0 {
						t.Errorf("%d locks are lost with the token mark", lost)
					}
					other := agent(t)
					for dir := range after {
						other.want("EBUSY", "mkdir", m.At(dir, "x"))
					}
					other.must("mkdir", m.At("new"))
					if row := m.Locks()["new"]; row.Token <= last {
						t.Errorf("token %d after %d", row.Token, last)
					}
					other.must("rmdir", m.At("new"))
				})
			}
		}
	}
}

// TestFaultStateCut: a journal that was cut off at the end of a line is no whole one: that
// locks are missing is said.
func TestFaultStateCut(t *testing.T) {
	m := mountOver(t)
	a := agent(t)
	a.must("mkdir", m.At("D"))
	last := m.Locks()["D"].Token
	only := func(kind string) string {
		files, err := filepath.Glob(filepath.Join(m.State, kind))
		if err != nil || len(files) != 1 {
			t.Fatalf("%s: %q, %v", kind, files, err)
		}
		return files[0]
	}
	eventually(t, "it is noted how long the journal is", func() bool {
		b, err := os.ReadFile(only("*.place"))
		mustDo(t, err)
		st, err := os.Stat(only("*.journal.*"))
		mustDo(t, err)
		return strings.HasSuffix(string(b), fmt.Sprintf(" %d\n", st.Size()))
	})
	m.restart(func() { mustDo(t, os.Truncate(only("*.journal.*"), 0)) })
	eventually(t, "what is missing is told of", func() bool {
		return strings.Contains(m.Log(), "is damaged in one place, set aside")
	})
	m.wantFree("D")
	a.must("mkdir", m.At("E"))
	if row := m.Locks()["E"]; row.Token <= last {
		t.Errorf("token %d after %d", row.Token, last)
	}
}

// TestFaultStateFifo: what is no file, but has the name of one, is set aside and
// said; the mount comes up.
func TestFaultStateFifo(t *testing.T) {
	m := mountOver(t)
	a := agent(t)
	a.must("mkdir", m.At("D"))
	last := m.Locks()["D"].Token
	for _, kind := range []string{".tokens", ".tokens.tmp", ".lock", ".journal.", ".locks."} {
		replaced := ""
		m.kill()
		entries, err := os.ReadDir(m.State)
		mustDo(t, err)
		for _, e := range entries {
			if key, rest, _ := strings.Cut(e.Name(), "."); replaced == "" && strings.HasPrefix("."+rest, kind) && e.Type().IsRegular() && !strings.Contains(rest, "damaged") {
				replaced = e.Name()
			} else if replaced == "" && kind == ".tokens.tmp" {
				replaced = key + kind
			}
		}
		if replaced == "" {
			t.Fatalf("no state file *%s: %v", kind, entries)
		}
		os.Remove(filepath.Join(m.State, replaced))
		mustDo(t, unix.Mkfifo(filepath.Join(m.State, replaced), 0o600))
		m.start(nil)
		m.awaitReady()
		eventually(t, replaced+" is a FIFO, and that is said", func() bool {
			return strings.Contains(m.Log(), replaced+" is no regular file, set aside as ")
		})
		dir := "E" + kind
		a.must("mkdir", m.At(dir))
		row := m.Locks()[dir]
		if row.Token <= last {
			t.Errorf("%s: token %d after %d", kind, row.Token, last)
		}
		last = row.Token
	}
}

// TestFaultStateHuge: a state file that seems to be larger than the memory is not read
// into it; what is in it is found, or it is set aside.
func TestFaultStateHuge(t *testing.T) {
	for _, kind := range []string{"lock", "place", "tokens", "journal.*", "locks.*"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			m := mountOver(t)
			a := agent(t)
			a.must("mkdir", m.At("D"))
			last := m.Locks()["D"].Token
			m.kill()
			files, err := filepath.Glob(filepath.Join(m.State, "*."+kind))
			if err != nil || len(files) == 0 {
				t.Fatalf("no state file *.%s: %v", kind, err)
			}
			const size = 1 << 30
			mustDo(t, os.Truncate(files[0], size))
			m.start(nil)
			m.awaitReady()
			status, err := os.ReadFile("/proc/" + itoa(m.cmd.Process.Pid) + "/status")
			mustDo(t, err)
			_, peak, _ := strings.Cut(string(status), "VmHWM:")
			if peak = strings.Fields(peak)[0]; atoi(peak) > size/2>>10 {
				t.Errorf("the daemon had %s KiB in memory", peak)
			}
			a.must("mkdir", m.At("E"))
			if got := m.Locks(); got["D"].Token != last || got["E"].Token <= last {
				t.Errorf("locks %v; want that of D, with token %d, and a higher one", got, last)
			}
			if kind != "lock" && kind != "place" {
				eventually(t, "it is said", func() bool { return strings.Contains(m.Log(), filepath.Base(files[0])+" is damaged") })
			}
		})
	}
}

// TestBadInputClientFile: a client's file without an end is not read to its end.
func TestBadInputClientFile(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	cmd := exec.Command("sh", "-c", `ulimit -v 8000000; exec timeout 20 "$@"`, "sh", stagefsBin(), "check", "--client-file", "/dev/zero", m.At("D"))
	if r := runCmd(t, cmd); r.Status != 66 || !strings.Contains(r.Err, "too long") {
		t.Errorf("check --client-file /dev/zero: %v, want 66", r)
	}
}
