package lockstate_test

import (
	"fmt"
	"strconv"
	"testing"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// crowded returns a table with n locks, a thousand in each directory.
func crowded(b *testing.B, n int) (*lockstate.Table, *procid.Process) {
	b.Helper()
	t := lockstate.New(lockstate.Options{})
	p := newProc(100, 1, procid.FakeReaper(procid.ID{Pid: 1}, nil))
	var up *lockstate.Dir
	for i := range n {
		if i%1000 == 0 {
			up = t.Dir(t.Root(), "board"+strconv.Itoa(i/1000))
		}
		acquire(b, t, p, t.Dir(up, strconv.Itoa(i)))
	}
	return t, p
}

func acquire(b *testing.B, t *lockstate.Table, p *procid.Process, d *lockstate.Dir) lockstate.Lock {
	g, err := t.Acquire(nil, lockstate.Request{Process: p, Dir: d, Kind: explicit, Protocol: "create", File: "devserver"})
	if err != nil {
		b.Fatal(err)
	}
	l, _ := g.Commit()
	return l
}

// deep returns a directory that many levels below d.
func deep(t *lockstate.Table, d *lockstate.Dir, levels int) *lockstate.Dir {
	for range levels {
		d = t.Dir(d, "d")
	}
	return d
}

// BenchmarkTable measures what each request of the file system costs, by how
// many locks there are and how far below its lock a directory is.
func BenchmarkTable(b *testing.B) {
	for _, locks := range []int{1, 1000, 1_000_000} {
		b.Run(fmt.Sprintf("locks=%d", locks), func(b *testing.B) {
			t, p := crowded(b, locks)
			stranger := newProc(200, 1, procid.FakeReaper(procid.ID{Pid: 1}, nil))
			held := t.Dir(t.Dir(t.Root(), "board0"), "0")
			for _, depth := range []int{1, 10, 100} {
				d := deep(t, held, depth-1)
				c := lockstate.Change{Process: p, Dirs: []*lockstate.Dir{d}}
				b.Run(fmt.Sprintf("Begin/depth=%d", depth), func(b *testing.B) {
					b.ReportAllocs()
					for b.Loop() {
						op, err := t.Begin(c)
						if err != nil {
							b.Fatal(err)
						}
						op.End()
					}
				})
				b.Run(fmt.Sprintf("Refuse/depth=%d", depth), func(b *testing.B) {
					b.ReportAllocs()
					c := lockstate.Change{Process: stranger, Dirs: c.Dirs}
					for b.Loop() {
						if _, err := t.Begin(c); err == nil {
							b.Fatal("a stranger was let in")
						}
					}
				})
				b.Run(fmt.Sprintf("Governing/depth=%d", depth), func(b *testing.B) {
					b.ReportAllocs()
					for b.Loop() {
						if _, ok := t.Governing(d); !ok {
							b.Fatal("free")
						}
					}
				})
			}
			free := t.Dir(t.Root(), "free")
			b.Run("Free", func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					op, _ := t.Begin(lockstate.Change{Process: p, Dirs: []*lockstate.Dir{free}})
					op.End()
				}
			})
			b.Run("Acquire", func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					l := acquire(b, t, p, free)
					t.End(l.Token, lockstate.Given)
				}
			})
			b.Run("OpenHandle", func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					h, _ := t.OpenHandle(lockstate.Change{Process: p, Dirs: []*lockstate.Dir{held}}, "f")
					h.Close()
				}
			})
		})
	}
}

// BenchmarkParallel measures how the one mutex bears several clients.
func BenchmarkParallel(b *testing.B) {
	t, p := crowded(b, 1000)
	d := t.Dir(t.Dir(t.Root(), "board0"), "0")
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			op, _ := t.Begin(lockstate.Change{Process: p, Dirs: []*lockstate.Dir{d}})
			op.End()
		}
	})
}

// BenchmarkAcquireWide measures an acquisition of a directory with very many
// children, few of which matter.
func BenchmarkAcquireWide(b *testing.B) {
	for _, children := range []int{10, 100_000} {
		b.Run(strconv.Itoa(children), func(b *testing.B) {
			t, p := crowded(b, 1)
			d := t.Dir(t.Root(), "wide")
			for i := range children {
				t.Dir(d, strconv.Itoa(i))
			}
			acquire(b, t, p, t.Dir(d, "0"))
			b.ReportAllocs()
			for b.Loop() {
				l := acquire(b, t, p, d)
				t.End(l.Token, lockstate.Given)
			}
		})
	}
}
