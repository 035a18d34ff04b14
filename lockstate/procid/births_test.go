//go:build linux

package procid_test

import (
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// A born process of the model.
type born struct {
	id    procid.ID
	maker *born
	seen  *procid.Process
}

// H2: whatever is born, dies and is seen, in whatever order, with numbers that are used
// again and again: the nearest that is named was an ancestor, and all that is
// known is said.
func TestBirths(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const numbers, since = 12, 1000
		table := procid.NewBirths(since)
		now := uint64(since)
		living := map[int]*born{}
		for i := range rapid.IntRange(1, 4).Draw(t, "there before") {
			living[i+1] = &born{id: procid.ID{Pid: i + 1}}
		}
		swept := false
		pick := func(what string) *born {
			var pids []int
			for pid := range living {
				pids = append(pids, pid)
			}
			slices.Sort(pids)
			return living[rapid.SampledFrom(pids).Draw(t, what)]
		}
		for range rapid.IntRange(1, 80).Draw(t, "steps") {
			now++
			switch op := rapid.SampledFrom([]string{"fork", "fork", "thread", "exit", "see", "ask", "sweep"}).Draw(t, "op"); op {
			case "fork":
				var free []int
				for pid := 1; pid <= numbers; pid++ {
					if living[pid] == nil {
						free = append(free, pid)
					}
				}
				if len(free) == 0 {
					continue
				}
				maker, pid := pick("maker"), rapid.SampledFrom(free).Draw(t, "pid")
				table.Note(now, pid, pid, maker.id.Pid, false)
				living[pid] = &born{id: procid.ID{Pid: pid, Start: now}, maker: maker}
			case "thread":
				pid := pick("process").id.Pid
				table.Note(now, pid, pid+1000, pid, false)
				table.Note(now, pid, pid+1000, 0, true)
			case "exit":
				if x := pick("process"); len(living) > 1 {
					table.Note(now, x.id.Pid, x.id.Pid, 0, true)
					delete(living, x.id.Pid)
				}
			case "see":
				if x := pick("process"); x.seen == nil && !swept {
					x.seen = procid.Fake(x.id, nil)
					table.See(x.seen)
				}
			case "sweep":
				table.Sweep() // which finds out that none of the first ones is there
				swept = true
			case "ask":
				x := pick("process")
				seen, unseen := table.Above(x.id.Pid)
				var want procid.ID
				nearest := 0
				for m := x; m != nil && want == (procid.ID{}); m = m.maker {
					if m.seen != nil {
						want = m.id
					} else if m != x && nearest == 0 && living[m.id.Pid] == m {
						nearest = m.id.Pid
					}
				}
				switch {
				case seen != (procid.ID{}) && seen != want:
					t.Fatalf("%v is said to descend from %v, want %v", x.id, seen, want)
				case unseen != 0 && !swept && unseen != nearest && living[unseen] != nil:
					t.Fatalf("%v is said to descend from somebody with pid %d, want %d", x.id, unseen, nearest)
				case !swept && seen == (procid.ID{}) && unseen == 0 && want != (procid.ID{}):
					t.Fatalf("nothing is said of %v, want that it descends from %v", x.id, want)
				}
			}
		}
	})
}

// A later process with the same number is not taken for the one that was born.
func TestBirthsFit(t *testing.T) {
	const tick = 10_000_000
	table := procid.NewBirths(100 * tick)
	table.Note(205*tick+7, 5, 5, 1, false)
	for _, tt := range []struct {
		id   procid.ID
		want bool
	}{
		{procid.ID{Pid: 5, Start: 205}, true},
		{procid.ID{Pid: 5, Start: 204}, true}, // it takes a moment to be born
		{procid.ID{Pid: 5, Start: 206}, false},
		{procid.ID{Pid: 6, Start: 100}, true}, // there before
		{procid.ID{Pid: 6, Start: 101}, false},
	} {
		if got := table.Fits(tt.id); got != tt.want {
			t.Errorf("Fits(%v) = %v, want %v", tt.id, got, tt.want)
		}
	}
}

// What is known of the dead is forgotten, however many have lived one after the other,
// and still those who descend from them do so.
func TestBirthsForgotten(t *testing.T) {
	table := procid.NewBirths(0)
	owner := procid.Fake(procid.ID{Pid: 1000}, nil)
	table.See(owner)
	pid := 1000
	for now := uint64(1); now < 100_000; now++ {
		child := 2000 + int(now%7000)
		table.Note(now, child, child, pid, false)
		if pid != 1000 {
			table.Note(now, pid, pid, 0, true)
		}
		if pid = child; now%1000 == 0 {
			if n := table.Sweep(); n > 10 {
				t.Fatalf("%d processes are known where 2 live", n)
			}
			table.See(owner) // which is none here, and so was forgotten
		}
	}
	if seen, _ := table.Above(pid); seen != owner.ID() {
		t.Errorf("the last one descends from %v, want %v", seen, owner.ID())
	}
}

func record(kind uint32, at uint64, pid int) []byte {
	b := make([]byte, 0, 32)
	b = binary.NativeEndian.AppendUint32(b, kind)
	b = binary.NativeEndian.AppendUint16(b, 0)
	b = binary.NativeEndian.AppendUint16(b, 32)
	for _, n := range []int{pid, 1, pid, 1} {
		b = binary.NativeEndian.AppendUint32(b, uint32(n))
	}
	return binary.NativeEndian.AppendUint64(b, at)
}

// The records of a buffer are read up to a time, also where they wrap around; a
// buffer that was full has lost some.
func TestRing(t *testing.T) {
	const fork, exit, lost = 7, 4, 2
	r := procid.NewTestRing(128)
	want := func(now uint64, pids []int, ok bool) {
		t.Helper()
		got, gotOK := r.Read(now)
		if !slices.Equal(got, pids) || gotOK != ok {
			t.Fatalf("Read(%d) = %v, %v, want %v, %v", now, got, gotOK, pids, ok)
		}
	}
	want(10, nil, true)
	for i := range 500 {
		at := uint64(10 * i)
		r.Add(record(fork, at, 2*i+1))
		r.Add(record(exit, at+1, 2*i+2))
		r.Add(record(fork, at+5, 2*i+3))
		want(at+4, []int{2*i + 1, 2*i + 2}, true)
		want(at+5, []int{2*i + 3}, true)
	}
	for i := range 124 {
		r.Add(record(fork, 5000, i+1))
	}
	if got, ok := r.Read(5000); !ok || len(got) != 124 {
		t.Fatalf("Read() of 124 records = %d, %v", len(got), ok)
	}
	for i := range 125 {
		r.Add(record(fork, 5001, i+1))
	}
	want(5001, nil, false)

	r = procid.NewTestRing(128)
	r.Add(record(fork, 1, 1))
	r.Add(binary.NativeEndian.AppendUint64(record(lost, 1, 1)[:16], 7))
	want(1, []int{1}, false)
}

func TestParseCPUs(t *testing.T) {
	for list, want := range map[string]string{
		"0": "[0]", "0-3": "[0 1 2 3]", "0-1,4,6-7": "[0 1 4 6 7]", "": "error", "1-0": "error", "0-": "error", "x": "error", "0,,1": "error",
	} {
		got, err := procid.ParseCPUs(list)
		s := fmt.Sprint(got)
		if err != nil {
			s = "error"
		}
		if s != want {
			t.Errorf("ParseCPUs(%q) = %v, %v, want %s", list, got, err, want)
		}
	}
}

// following returns a resolver that learns of births.
func following(t *testing.T, r *procid.Resolver) *procid.Resolver {
	t.Helper()
	if err := r.FollowBirths(); err != nil {
		t.Skip(err)
	}
	return r
}

// leftBehind returns somebody who was not seen before its parent's death.
func leftBehind(t *testing.T, prepare func(owner *process)) (adopted int, out *os.File) {
	t.Helper()
	in, out, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { out.Close() })
	owner := start(t, "abandon", in)
	in.Close()
	adopted = owner.numbers(t)[0]
	if prepare != nil {
		prepare(owner)
	}
	owner.kill()
	zombie(t, owner.pid())
	return adopted, out
}

// H2: who was left behind before it was seen descends from those who made it, and so
// do those whom it makes.
func TestLeftBehind(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		following(t, r)
		var owner *procid.Process
		adopted, _ := leftBehind(t, func(h *process) { owner = lookup(t, r, h.pid()) })
		p := lookup(t, r, adopted)
		if !p.Descends(owner.ID()) || !p.Descends(procid.Self()) {
			t.Errorf("Ancestors() = %v, want %v and %v among them", p.Ancestors(), owner.ID(), procid.Self())
		}
		if l := p.Lineage(); l[0].ID == owner.ID() {
			t.Errorf("Lineage() = %v begins with who is its parent no more", l)
		}
		// Also if the one between was never seen.
		adopted, _ = leftBehind(t, nil)
		p = lookup(t, r, adopted)
		if p.Descends(owner.ID()) || !p.Descends(procid.Self()) {
			t.Errorf("Ancestors() = %v, want %v among them, and not %v", p.Ancestors(), procid.Self(), owner.ID())
		}
	})
}

// What is lost begins anew: who is in the cache is known from then on, and whom
// anybody made before and had been heard of.
func TestLeftBehindAgain(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		following(t, r)
		self := lookup(t, r, os.Getpid())
		early, _ := leftBehind(t, nil)
		lookup(t, r, start(t, "exit 0").pid()) // hears of all
		r.Begin()
		if p := lookup(t, r, early); !p.Descends(self.ID()) {
			t.Errorf("Ancestors() = %v, want %v among them", p.Ancestors(), self.ID())
		}
		late, _ := leftBehind(t, nil)
		if p := lookup(t, r, late); !p.Descends(self.ID()) {
			t.Errorf("Ancestors() of a later one = %v, want %v among them", p.Ancestors(), self.ID())
		}
	})
}

// A processor that does not tell what is made there makes all of that unknown; then it
// is told again.
func TestLeftBehindProcessor(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		following(t, r)
		self := lookup(t, r, os.Getpid())
		for i := range 8 {
			r.SwitchOff(i)
			adopted, _ := leftBehind(t, nil)
			if p := lookup(t, r, adopted); p.Descends(self.ID()) {
				t.Errorf("Ancestors() = %v, want %v not among them", p.Ancestors(), self.ID())
			}
			adopted, _ = leftBehind(t, nil)
			if p := lookup(t, r, adopted); !p.Descends(self.ID()) {
				t.Errorf("Ancestors() = %v of a later one, want %v among them", p.Ancestors(), self.ID())
			}
		}
	})
}

// What a resolver knows of who was not seen goes on in another one.
func TestLeftBehindCarried(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, compat bool) {
		following(t, r)
		self := lookup(t, r, os.Getpid())
		adopted, _ := leftBehind(t, nil)
		births := r.CarryBirths()
		if !slices.ContainsFunc(births, func(c procid.CarriedBirth) bool {
			return c.Pid == adopted && slices.Contains(c.Above, self.ID())
		}) {
			t.Fatalf("CarryBirths() = %v, want one of %d that descends from %v", births, adopted, self.ID())
		}
		next := following(t, newResolver(t, compat))
		next.TakeUpBirths(births)
		for again := range 2 {
			if got := next.CarryBirths(); len(got) != len(births) {
				t.Errorf("CarryBirths() the %d. time = %v, want %v", again+2, got, births)
			}
		}
		if p := lookup(t, next, adopted); !p.Descends(self.ID()) {
			t.Errorf("Ancestors() = %v, want %v among them", p.Ancestors(), self.ID())
		}
		// Of a later process with the number nothing was known.
		other := newResolver(t, compat)
		following(t, other).TakeUpBirths([]procid.CarriedBirth{{Pid: adopted, At: 1, Above: []procid.ID{self.ID()}}})
		if p := lookup(t, other, adopted); p.Descends(self.ID()) {
			t.Errorf("Ancestors() = %v, want %v not among them", p.Ancestors(), self.ID())
		}
	})
}

// In a pid namespace of its own a resolver is told that namespace's numbers.
func TestLeftBehindInNamespace(t *testing.T) {
	h := startIn(t, &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS}, "leftbehind")
	if got := h.numbers(t); got[0] == 2 {
		t.Skip("the kernel does not tell it there")
	} else if got[0] != 1 {
		t.Errorf("who was left behind does not descend from who made it")
	}
}

// asInit mounts the proc of a new namespace, and has somebody left behind.
func asInit() int {
	check(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	check(unix.Mount("proc", "/proc", "proc", 0, ""))
	r, err := procid.NewResolver(procid.Options{})
	check(err)
	if r.FollowBirths() != nil {
		return 2
	}
	maker := exec.Command("/bin/sh", "-c", `echo $$; sleep 1000 </dev/null >/dev/null 2>&1 & echo $!; exec sleep 1000`)
	out, err := maker.StdoutPipe()
	check(err)
	check(maker.Start())
	buf, words := make([]byte, 64), []string(nil)
	for text := ""; len(words) < 2; words = strings.Fields(text) {
		n, err := out.Read(buf)
		check(err)
		text += string(buf[:n])
	}
	p := must(r.ByPid(maker.Process.Pid))
	maker.Process.Kill()
	maker.Process.Wait()
	pid, err := strconv.Atoi(words[1])
	check(err)
	if must(r.ByPid(pid)).Descends(p.ID()) {
		return 1
	}
	return 0
}

// Where the list of processors is not the kernel's, births on those that it hides would
// be unknown.
func TestLeftBehindHiddenProcessor(t *testing.T) {
	following(t, newResolver(t, false))
	h := startIn(t, &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}, "hidden")
	if got := h.numbers(t); got[0] != 0 {
		t.Error("births are followed by a list of processors that somebody else has made")
	}
}

// amongHidden puts another list of processors in the place of the kernel's.
func amongHidden() int {
	const online = "/sys/devices/system/cpu/online"
	check(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	f, err := os.CreateTemp("", "online")
	check(err)
	defer os.Remove(f.Name())
	_, err = f.WriteString("0\n")
	check(err)
	check(unix.Mount(f.Name(), online, "", unix.MS_BIND, ""))
	r, err := procid.NewResolver(procid.Options{})
	check(err)
	defer r.Close()
	if r.FollowBirths() == nil || procid.TryBirths() == nil {
		return 1
	}
	return 0
}

func must(p *procid.Process, err error) *procid.Process {
	check(err)
	return p
}

// A buffer that fills up while it is read has lost some, although the kernel does not
// say so yet.
func TestRingFull(t *testing.T) {
	b := record(7, 1, 1)
	for range 2000 {
		r := procid.NewTestRing(64)
		var lost atomic.Bool
		go r.Fill(b, &lost)
		for ok := true; ok; {
			full := lost.Load()
			if _, ok = r.Read(1); ok && full {
				t.Fatal("Read() = true of a buffer that was full")
			}
		}
	}
}
