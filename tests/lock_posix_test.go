//go:build linux

package tests

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Advisory locks on ordinary files are what they are anywhere (M2). A script of
// lock calls by several processes runs in a plain directory and on a mount; all
// answers must be the same.

// A troupe is a set of processes that play a script.
type troupe struct {
	t     *testing.T
	dir   string
	cast  []*Agent
	names map[string]string // pid: who it is
}

func newTroupe(t *testing.T, dir string, size int) *troupe {
	t.Helper()
	c := &troupe{t: t, dir: dir, names: map[string]string{"-1": "unknown", "0": "nobody"}}
	for range size {
		c.join(locker(t))
	}
	return c
}

func (c *troupe) join(a *Agent) {
	c.names[itoa(a.Pid)] = fmt.Sprintf("#%d", len(c.cast))
	c.cast = append(c.cast, a)
}

// A call is one line of a script.
type scriptCall struct {
	who  int
	args []string
}

func (s scriptCall) String() string { return fmt.Sprintf("#%d %s", s.who, strings.Join(s.args, " ")) }

// play makes one call and tells its answer, with the names of processes in
// place of their numbers.
func (c *troupe) play(s scriptCall) string {
	c.t.Helper()
	if s.args[0] == "fork" {
		c.join(forked(c.cast[s.who]))
		return "ok"
	}
	args := s.args
	if args[0] == "open" {
		args = []string{"open", args[1], filepath.Join(c.dir, args[2]), args[3]}
	}
	status, out := c.cast[s.who].call(args)
	words := strings.Fields(out)
	if n := len(words); n == 4 {
		words[3] = c.names[words[3]]
	}
	return strings.Join(append([]string{status}, words...), " ")
}

// unknownSetter: the kernel does not tell a file system which record locks are
// OFD locks. So F_GETLK names the process that set one, where it says -1
// elsewhere, and F_OFD_GETLK always says -1.
var setter = regexp.MustCompile(` (#\d+|unknown)$`)

func sameAnswer(want, got string) bool {
	if want == got {
		return true
	}
	unknown := strings.HasSuffix(want, " unknown") || strings.HasSuffix(got, " unknown")
	return unknown && setter.ReplaceAllString(want, "") == setter.ReplaceAllString(got, "")
}

// randomScript is one that makes sense: no call names a descriptor that its
// process has not open.
func randomScript(r *rand.Rand, size, length int) []scriptCall {
	open := make([]map[string]bool, size)
	for i := range open {
		open[i] = map[string]bool{}
	}
	pick := func(words ...string) string { return words[r.IntN(len(words))] }
	var script []scriptCall
	for len(script) < length {
		who := r.IntN(len(open))
		var have []string
		for _, name := range []string{"a", "b", "c", "d"} {
			if open[who][name] {
				have = append(have, name)
			}
		}
		say := func(args ...string) { script = append(script, scriptCall{who, args}) }
		n := r.IntN(20)
		switch {
		case len(have) == 0 || n == 0 && len(have) < 4:
			name := pick("a", "b", "c", "d")
			if !open[who][name] {
				say("open", name, pick("one", "one", "two"), pick("rdwr", "rdwr", "rdwr", "rdonly", "wronly"))
				open[who][name] = true
			}
		case n == 1:
			name := pick(have...)
			say("close", name)
			delete(open[who], name)
		case n == 2:
			name := pick("a", "b", "c", "d")
			if !open[who][name] {
				say("dup", pick(have...), name)
				open[who][name] = true
			}
		case n == 3 && len(open) < 2*size:
			say("fork")
			child := map[string]bool{}
			for _, name := range have {
				child[name] = true
			}
			open = append(open, child)
		case n < 9:
			say("flock", pick(have...), pick("sh", "ex", "un"), "nb")
		default:
			call := pick("setlk", "setlk", "setlk", "getlk", "ofdsetlk", "ofdsetlk", "ofdgetlk")
			kind := pick("rd", "wr", "wr", "un")
			if strings.HasSuffix(call, "getlk") {
				kind = pick("rd", "wr")
			}
			start, span := r.IntN(12), r.IntN(5) // 0: to the end
			if r.IntN(10) == 0 {
				start = 1<<31 + r.IntN(3)
			}
			say(call, pick(have...), kind, itoa(start), itoa(span))
		}
	}
	return script
}

// TestM2Locks plays random scripts. STAGEFS_SEED repeats one.
func TestM2Locks(t *testing.T) {
	m := mount(t)
	scripts, seed := 6, uint64(time.Now().UnixNano())
	if s, err := strconv.ParseUint(os.Getenv("STAGEFS_SEED"), 10, 64); err == nil {
		scripts, seed = 1, s
	}
	calls := 0
	for i := range scripts {
		seed := seed + uint64(i)
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			script := randomScript(rand.New(rand.NewPCG(seed, 0)), 3, 400)
			calls += len(script)
			compare(t, m.on(t), fmt.Sprintf("D%d", i), 3, script)
		})
	}
	t.Logf("%d calls, answered as in a plain directory", calls)
}

// compare plays a script on both sides.
func compare(t *testing.T, m *Mount, dir string, size int, script []scriptCall) {
	t.Helper()
	plain := tempDir(t)
	openDir(t, m.Back(dir))
	for _, d := range []string{plain, m.Back(dir)} {
		for _, name := range []string{"one", "two"} {
			mustDo(t, os.WriteFile(filepath.Join(d, name), []byte("content"), 0o666))
		}
	}
	reference, tried := newTroupe(t, plain, size), newTroupe(t, m.At(dir), size)
	for i, call := range script {
		want, got := reference.play(call), tried.play(call)
		if !sameAnswer(want, got) {
			var before strings.Builder
			for _, c := range script[max(0, i-30):i] {
				fmt.Fprintln(&before, c)
			}
			t.Fatalf("call %d: %s = %s, want %s; before it:\n%s", i, call, got, want, &before)
		}
	}
}

// TestM2LockCases plays scripts that are known to be difficult.
func TestM2LockCases(t *testing.T) {
	m := mount(t)
	opens := "0 open a one rdwr; 1 open a one rdwr; 2 open a one rdwr; "
	n := 0
	for name, text := range map[string]string{
		"close of any descriptor": opens + "0 open b one rdwr; 0 setlk a wr; 1 setlk a wr; 0 close b; 1 setlk a wr",
		"fork":                    opens + "0 setlk a wr; 0 fork; 3 setlk a wr; 3 getlk a wr; 3 close a; 1 setlk a wr; 0 close a; 1 setlk a wr",
		"fork flock":              opens + "0 flock a ex nb; 0 fork; 3 flock a ex nb; 0 close a; 1 flock a ex nb; 3 flock a un; 1 flock a ex nb",
		"fork OFD":                opens + "0 ofdsetlk a wr; 0 fork; 3 ofdsetlk a wr 0 10; 0 close a; 1 ofdsetlk a wr; 3 close a; 1 ofdsetlk a wr",
		"dup":                     opens + "0 flock a ex nb; 0 dup a b; 0 close a; 1 flock a sh nb; 0 close b; 1 flock a sh nb",
		"split and merge":         opens + "0 setlk a wr 0 100; 0 setlk a un 40 20; 1 getlk a wr 30 40; 1 setlk a wr 40 20; 0 setlk a rd 0 40; 1 setlk a rd 0 40; 2 getlk a wr 0 0; 0 setlk a wr 60 0; 2 getlk a wr 80 1",
		"upgrade":                 opens + "0 setlk a rd; 1 setlk a rd; 0 setlk a wr; 1 setlk a un; 0 setlk a wr; 1 setlk a rd; 0 setlk a rd; 1 setlk a rd",
		"upgrade flock":           opens + "0 flock a sh nb; 1 flock a sh nb; 0 flock a ex nb; 2 flock a ex nb; 1 flock a ex nb; 0 flock a sh nb; 1 flock a sh nb; 0 flock a sh nb",
		"modes":                   opens + "0 open b one rdonly; 0 setlk b wr; 0 setlk b rd; 0 flock b ex nb; 0 open c one wronly; 0 setlk c rd; 0 setlk c wr; 1 flock a sh nb",
		"flock and fcntl":         opens + "0 flock a ex nb; 1 setlk a wr; 1 flock a sh nb; 2 setlk a rd; 2 ofdsetlk a rd; 1 setlk a un; 2 ofdsetlk a wr; 1 getlk a rd",
		"ranges":                  opens + "0 setlk a wr 9223372036854775807 1; 1 getlk a wr; 0 setlk a wr 9223372036854775807 2; 0 setlk a wr -1 1; 0 setlk a wr 10 -5; 1 getlk a wr 0 8; 0 setlk a wr 3 -5; 0 getlk a un",
		"same process":            opens + "0 open b one rdwr; 0 setlk a wr; 0 setlk b wr; 0 ofdsetlk b wr; 0 flock a ex nb; 0 flock b ex nb; 0 ofdsetlk a wr; 0 ofdgetlk a wr",
	} {
		n++
		t.Run(name, func(t *testing.T) {
			var script []scriptCall
			for _, line := range strings.Split(text, ";") {
				w := strings.Fields(line)
				if n := len(w); strings.HasSuffix(w[1], "lk") && n == 4 {
					w = append(w, "0", "0")
				}
				script = append(script, scriptCall{atoi(w[0]), w[1:]})
			}
			compare(t, m.on(t), fmt.Sprintf("D%d", n), 3, script)
		})
	}
}

// TestM2LockWait: waiting locks on ordinary files, on both sides.
func TestM2LockWait(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	for side, dir := range map[string]string{"plain": tempDir(t), "mount": m.At("D")} {
		back := dir
		if side == "mount" {
			back = m.Back("D")
		}
		t.Run(side, func(t *testing.T) {
			for name, test := range map[string]func(*testing.T, string){
				"deadlock of 2": func(t *testing.T, path string) { deadlock(t, path, 2) },
				"deadlock of 5": func(t *testing.T, path string) { deadlock(t, path, 5) },
				"order":         waitInOrder, "conversion": waitToConvert, "killed": waitAndDie,
			} {
				t.Run(name, func(t *testing.T) {
					file := strings.ReplaceAll(name, " ", "-")
					mustDo(t, os.WriteFile(filepath.Join(back, file), nil, 0o666))
					test(t, filepath.Join(dir, file))
				})
			}
		})
	}
}

// deadlock: each of some has one byte and waits for the next one's. The last
// hears EDEADLK, and keeps what it has.
func deadlock(t *testing.T, path string, size int) {
	var cast []*Agent
	for i := range size {
		a := locker(t)
		a.must("open", "x", path, "rdwr")
		a.must("setlk", "x", "wr", itoa(i), "1")
		cast = append(cast, a)
	}
	got := make([]func() string, size)
	for i, a := range cast[:size-1] {
		got[i] = a.Start("setlkw", "x", "wr", itoa(i+1), "1")
		awaitAsleep(t, a)
	}
	last := cast[size-1]
	last.want("EDEADLK", "setlkw", "x", "wr", "0", "1")
	last.must("setlk", "x", "un", itoa(size-1), "1")
	for i := size - 2; i >= 0; i-- {
		if status := got[i](); status != "ok" {
			t.Errorf("the wait of #%d = %s, want ok", i, status)
		}
		cast[i].must("setlk", "x", "un")
	}
}

// awaitAsleep waits until a process has long been in its call.
func awaitAsleep(t *testing.T, a *Agent) {
	t.Helper()
	asleep := 0
	eventually(t, "it sleeps", func() bool {
		f := statFields(fmt.Sprintf("/proc/%d/stat", a.Pid))
		call, _ := os.ReadFile(fmt.Sprintf("/proc/%d/syscall", a.Pid))
		number := strings.Fields(string(call) + " -")[0]
		if f != nil && (f[0] == "S" || f[0] == "D") && (number == strconv.Itoa(syscall.SYS_FCNTL) || number == strconv.Itoa(syscall.SYS_FLOCK)) {
			asleep++
		} else {
			asleep = 0
		}
		return asleep > 5
	})
}

// waitInOrder: writers are served as they came, by each call.
func waitInOrder(t *testing.T, path string) {
	for _, call := range lockCalls() {
		holder := locker(t)
		holder.must("open", "x", path, "rdwr")
		holder.must(call.tryExclusive("x")...)
		var turns []func() string
		for range 5 {
			w := forked(holder)
			w.must("open", "y", path, "rdwr")
			turns = append(turns, w.StartGet("turn", "y", call.wait, call.exclusive))
			awaitAsleep(t, w)
		}
		holder.must(call.unlock("x")...)
		last := int64(0)
		for i, turn := range turns {
			at, _ := strconv.ParseInt(turn(), 10, 64)
			if at < last {
				t.Errorf("%s: #%d had its turn before #%d", call.name, i, i-1)
			}
			last = at
		}
	}
}

// waitToConvert: of two readers one waits for the upgrade, and gets it when the
// other goes.
func waitToConvert(t *testing.T, path string) {
	for _, call := range lockCalls() {
		a, b := locker(t), locker(t)
		for _, x := range []*Agent{a, b} {
			x.must("open", "x", path, "rdwr")
			x.must(call.tryShared("x")...)
		}
		got := a.Start(call.waitExclusive("x")...)
		awaitAsleep(t, a)
		b.must(call.unlock("x")...)
		if status := got(); status != "ok" {
			t.Errorf("%s: the upgrade = %s, want ok", call.name, status)
		}
		b.want("EAGAIN", call.tryShared("x")...)
		a.must("close", "x")
		b.want("ok", call.tryShared("x")...)
		b.must("close", "x")
	}
}

// waitAndDie: neither a killed waiter nor a killed holder is in the way.
func waitAndDie(t *testing.T, path string) {
	for _, call := range lockCalls() {
		holder, first, second := locker(t), locker(t), locker(t)
		for _, a := range []*Agent{holder, first, second} {
			a.must("open", "x", path, "rdwr")
		}
		holder.must(call.tryExclusive("x")...)
		first.Start(call.waitExclusive("x")...)
		awaitAsleep(t, first)
		got := second.Start(call.waitExclusive("x")...)
		awaitAsleep(t, second)
		mustDo(t, syscall.Kill(second.Pid, syscall.SIGUSR1))
		if status := got(); status != "EINTR" {
			t.Errorf("%s: the interrupted wait = %s, want EINTR", call.name, status)
		}
		got = second.Start(call.waitExclusive("x")...)
		awaitAsleep(t, second)
		first.Kill()
		holder.Kill()
		if status := got(); status != "ok" {
			t.Errorf("%s: the wait = %s, want ok", call.name, status)
		}
		second.must("close", "x")
	}
}

// TestA8GetLk: who asks for a lock file's locks is told of him who holds the directory by
// another protocol, whom a try would hear of, too; the holders may lock it.
func TestA8GetLk(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	file := m.At("D", "devserver")
	a, b := locker(t), locker(t)
	a.must("open", "x", file, "rdwr,creat,excl")
	child := forked(a)
	b.must("open", "x", file, "rdwr")
	b.want("EAGAIN", "setlk", "x", "wr")
	for call, pid := range map[string]int{"getlk": a.Pid, "ofdgetlk": -1} {
		for _, kind := range []string{"rd", "wr"} {
			if got, want := b.Get(call, "x", kind), fmt.Sprintf("wr 0 0 %d", pid); got != want {
				t.Errorf("%s %s of a stranger = %q, want %q", call, kind, got, want)
			}
			for _, holder := range []*Agent{a, child} {
				if got := holder.Get(call, "x", kind); got != "un" {
					t.Errorf("%s %s of a holder = %q, want %q", call, kind, got, "un")
				}
			}
		}
	}
	a.must("unlink", file)
	if got := b.Get("getlk", "x", "wr"); got != "un" {
		t.Errorf("getlk after the release = %q, want %q", got, "un")
	}

	a.must("open", "shared", file, "rdwr,creat")
	a.must("flock", "shared", "sh", "nb")
	b.must("open", "shared", file, "rdwr")
	b.want("EAGAIN", "setlk", "shared", "wr")
	for kind, want := range map[string]string{"rd": "un", "wr": fmt.Sprintf("rd 0 0 %d", a.Pid)} {
		if got := b.Get("getlk", "shared", kind); got != want {
			t.Errorf("getlk %s of who does not share = %q, want %q", kind, got, want)
		}
	}
	if got := a.Get("getlk", "shared", "wr"); got != "un" {
		t.Errorf("getlk wr of the only one that shares = %q, want %q", got, "un")
	}
}
