//go:build linux

package tests

import (
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// twoNames serves a directory with E/x, whose second name G/x was made before
// the mount, and with twins in E and G, one pair for each round of a race.
func twoNames(t *testing.T, rounds int, opts ...string) *Mount {
	t.Helper()
	dir := staticDir(t)
	m := &Mount{t: t, Dir: dir}
	openDir(t, m.Back("E"))
	openDir(t, m.Back("G"))
	twins := func(one, two string) {
		openFile(t, m.Back(one), string(make([]byte, os.Getpagesize())))
		mustDo(t, os.Link(m.Back(one), m.Back(two)))
	}
	twins("E/x", "G/x")
	for i := range rounds {
		openDir(t, m.Back("R"+itoa(i)))
		twins("E/r"+itoa(i), "R"+itoa(i)+"/r")
	}
	return mountDir(t, dir, dir+".mnt", opts...)
}

// TestAttackSeenAlias attacks W3: a file is open for writing, or mapped, by one
// name, and somebody looks at its other name before that one's directory is
// acquired, or moved beneath a lock.
func TestAttackSeenAlias(t *testing.T) {
	looks := map[string]func(a *Agent, m *Mount){
		"stat": func(a *Agent, m *Mount) { a.must("stat", m.At("G/x")) },
		"list": func(a *Agent, m *Mount) { a.must("sh", "ls -l "+m.At("G")) },
		"open": func(a *Agent, m *Mount) { a.must("creat", m.At("G/x"), "rdonly") },
	}
	for _, opts := range [][]string{nil, {"--no-passthrough"}} {
		for how, look := range looks {
			t.Run(strings.Join(append(opts, how), " "), func(t *testing.T) {
				m := twoNames(t, 0, opts...)
				b, other, holder := agent(t), agent(t), agent(t)
				lock := []string{"creat", m.At("G/devserver"), "wronly,creat,excl"}
				b.must("open", "h", m.At("E/x"), "rdwr")
				look(other, m)
				holder.want("EEXIST", lock...)
				b.must("mmap", "p", "h")
				b.must("close", "h")
				holder.want("EEXIST", lock...)
				b.must("poke", "p", "still mine")

				// What enters a lock is nobody else's to write either.
				openDir(t, m.Back("D"))
				holder.must("creat", m.At("D/devserver"), "wronly,creat,excl")
				holder.want("EBUSY", "rename", m.At("G"), m.At("D/G"))
				b.must("munmap", "p")
				eventually(t, "the mapping's end is known", func() bool { return holder.Try(lock...) == "ok" })
				b.want("EBUSY", "open", "h", m.At("E/x"), "rdwr")
			})
		}
	}
}

// TestAttackSeenAliasRace attacks W3: the other name is looked up for the first
// time while its directory is being acquired.
func TestAttackSeenAliasRace(t *testing.T) {
	const rounds = 60
	m := twoNames(t, rounds)
	b, other, holder := agent(t), agent(t), agent(t)
	for i := range rounds {
		dir, h := "R"+itoa(i), "h"+itoa(i)
		b.must("open", h, m.At("E/r"+itoa(i)), "rdwr")
		seen := other.Start("stat", m.At(dir, "r"))
		got := holder.Try("creat", m.At(dir, "devserver"), "wronly,creat,excl")
		if seen(); got != "EEXIST" {
			t.Fatalf("round %d: the lock although the file is open by another name: %s", i, got)
		}
		b.must("close", h)
	}
}

// TestAttackLateLook attacks W3: a file of several names gets one more while it
// is looked at all the time. A look that ends late must not have the daemon
// believe that the file has as few names as before, and so search for none.
func TestAttackLateLook(t *testing.T) {
	m := twoNames(t, 0)
	openDir(t, m.Back("F"))
	old := m.At("E", "host-7f00.4711") // looks like a candidate: the kernel asks each time
	mustDo(t, os.Link(m.Back("E/x"), m.Back("E/host-7f00.4711")))
	mustDo(t, os.Remove(m.Back("E/x")))
	b, holder := agent(t), agent(t)
	rounds := 0
	for end := seconds(5); time.Now().Before(end); rounds++ {
		b.must("linkseen", old, m.At("F/y"), "4")
		holder.must("creat", m.At("G/devserver"), "wronly,creat,excl")
		if got := b.Try("put", m.At("F/y"), "evil", ""); got != "EBUSY" {
			t.Fatalf("round %d: G/x is another name of what a stranger writes: %s, want EBUSY", rounds, got)
		}
		holder.must("unlink", m.At("G/devserver"))
		b.must("unlink", m.At("F/y"))
	}
	t.Logf("%d rounds", rounds)
}

// linkSeen is link(2) of a file that many threads look at.
func linkSeen(old, name string, many int) error {
	var over atomic.Bool
	var threads sync.WaitGroup
	var began atomic.Int64
	for range many {
		threads.Go(func() {
			for st := new(unix.Stat_t); !over.Load(); began.Add(1) {
				unix.Lstat(old, st)
			}
		})
	}
	for began.Load() < int64(2*many) {
		time.Sleep(10 * time.Microsecond)
	}
	err := unix.Link(old, name)
	over.Store(true)
	threads.Wait()
	return err
}
