//go:build linux

package tests

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// TestRequests: a call costs no more requests than the kernel can't do without. Those
// that nobody waits for are left out. The kernel asks for a directory's attributes, to see
// whether its caller may search it, whenever something in it was changed.
func TestRequests(t *testing.T) {
	need(t, "root", "fuse")
	const each = 50
	open := func(flags int, then func(fd int)) func(name string) {
		return func(name string) {
			fd, err := unix.Open(name, flags, 0o644)
			mustDo(t, err)
			then(fd)
			mustDo(t, unix.Close(fd))
		}
	}
	nothing := func(int) {}
	block := make([]byte, 4096)
	read := func(fd int) {
		_, err := unix.Pread(fd, block, 0)
		mustDo(t, err)
	}
	write := func(fd int) {
		_, err := unix.Write(fd, block)
		mustDo(t, err)
	}
	do := func(f func(name string) error) func(string) {
		return func(name string) { mustDo(t, f(name)) }
	}
	makeFile := open(unix.O_CREAT|unix.O_WRONLY, write)
	stat := func(name string) error { return unix.Lstat(name, new(unix.Stat_t)) }
	tests := []struct {
		name        string
		before, run func(name string)
		want        string // for each
	}{
		{"create", nil, open(unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY, nothing), "create flush getattr lookup"},
		{"create, write", nil, makeFile, "create flush getattr getxattr lookup"},
		{"stat of what was written", makeFile, do(stat), "getattr"},
		{"stat again", func(name string) {
			makeFile(name)
			mustDo(t, stat(name))
		}, do(stat), ""},
		{"stat of what is missing", nil, func(name string) {
			if err := stat(name); err != unix.ENOENT {
				t.Errorf("stat %s: %v, want ENOENT", name, err)
			}
		}, "lookup"},
		{"open", makeFile, open(unix.O_RDONLY, nothing), "flush open"},
		{"open again", func(name string) {
			makeFile(name)
			open(unix.O_RDONLY, nothing)(name)
			open(unix.O_RDONLY, nothing)(name)
		}, open(unix.O_RDONLY, nothing), "flush open"},
		{"read", makeFile, open(unix.O_RDONLY, read), "flush open read"},
		{"read again", func(name string) {
			makeFile(name)
			open(unix.O_RDONLY, read)(name)
		}, open(unix.O_RDONLY, read), "flush open"},
		{"write", makeFile, open(unix.O_WRONLY, write), "flush open"},
		{"truncate in open", makeFile, open(unix.O_WRONLY|unix.O_TRUNC, nothing), "flush open"},
		{"chmod", makeFile, do(func(name string) error { return unix.Chmod(name, 0o600) }), "setattr"},
		{"rename", makeFile, do(func(name string) error { return unix.Rename(name, name+".new") }), "getattr lookup rename"},
		{"unlink", makeFile, do(unix.Unlink), "getattr unlink"},
		{"mkdir", nil, do(func(name string) error { return unix.Mkdir(name, 0o755) }), "getattr lookup mkdir"},
	}
	byTransport(t, func(t *testing.T, opts ...string) {
		m := mount(t, opts...)
		needPassthrough(m)
		mustDo(t, os.Mkdir(m.At("held"), 0o755)) // which this process has locked then
		openDir(t, m.Back("free"))
		for _, state := range []string{"free", "held"} {
			for i, test := range tests {
				t.Run(state+"/"+test.name, func(t *testing.T) {
					m := m.on(t)
					names := make([]string, each)
					for j := range names {
						names[j] = m.At(state, fmt.Sprintf("%d.%d", i, j))
						if test.before != nil {
							test.before(names[j])
						}
					}
					mustDo(t, stat(m.At(state))) // has the directory's attributes asked for
					before := m.requests()
					for _, name := range names {
						test.run(name)
					}
					var got []string
					for op, n := range m.requests() {
						if per := (n - before[op] + each/2) / each; per > 0 {
							got = append(got, slices.Repeat([]string{op}, per)...)
						}
					}
					slices.Sort(got)
					if got := strings.Join(got, " "); got != test.want {
						t.Errorf("requests for each: %q, want %q", got, test.want)
					}
				})
			}
		}
	})
}

// TestHeldCalls: a change in a directory that its caller holds, or an ancestor of its, costs
// no look at who it is once that is known, as long as nobody is made who could have its
// number. On a machine with others on it, some are.
func TestHeldCalls(t *testing.T) {
	needInject(t)
	needBirths(t)
	if stat, _ := os.ReadFile("/proc/stat"); bytes.Count(stat, []byte("\ncpu")) > 16 {
		t.Skip("with so many processors each caller is looked at")
	}
	const each = 1000
	dir := staticDir(t)
	m := newMount(t, dir, dir)
	var calls atomic.Int64
	count := func(asked) bool {
		calls.Add(1)
		return false
	}
	var looks []*fault
	for _, call := range []int{unix.SYS_PPOLL, unix.SYS_PIDFD_OPEN, unix.SYS_PIDFD_SEND_SIGNAL} {
		looks = append(looks, &fault{call: call, times: 1, is: count})
	}
	m.inject(looks...)
	m.serve()
	holder := agent(t)
	holder.must("mkdir", m.At("held"))
	holder.must("sh", ":>"+m.At("held", "f"))
	for _, who := range []struct {
		name string
		a    *Agent
	}{{"holder", holder}, {"child", holder.Child()}} {
		all := []string{"all"}
		for i := range each {
			all = append(all, "chmod", m.At("held", "f"), strconv.Itoa(0o600+i%8), ";")
		}
		// On a machine with too much to do it takes some tries until the daemon is asked
		// without a pause.
		for tries := 20; ; tries-- {
			before := calls.Load()
			who.a.must(all[:len(all)-1]...)
			if n := calls.Load() - before; n <= each/2 {
				break
			} else if tries == 1 {
				t.Fatalf("%d looks at the %s for %d changes", n, who.name, each)
			}
		}
	}
}

// requests is how many requests of each kind the daemon has had that somebody waits for.
func (m *Mount) requests() map[string]int {
	m.t.Helper()
	b, err := os.ReadFile(m.control("metrics"))
	mustDo(m.t, err)
	all := map[string]int{}
	for line := range bytes.Lines(b) {
		rest, ok := bytes.CutPrefix(line, []byte(`stagefs_requests_total{op="`))
		if !ok {
			continue
		}
		op, n, _ := strings.Cut(strings.TrimSpace(string(rest)), `"} `)
		all[op], err = strconv.Atoi(n)
		mustDo(m.t, err)
	}
	if len(all) == 0 {
		m.t.Fatal("no requests in the metrics")
	}
	maps.DeleteFunc(all, func(op string, _ int) bool { return op == "release" || strings.HasSuffix(op, "forget") })
	return all
}
