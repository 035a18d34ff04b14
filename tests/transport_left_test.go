//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestTransportLeftPlace: a ring's thread that has left its place to a request that waits
// touches nothing there any more, however long it takes to go on: what is written by then
// may have come to that place.
func TestTransportLeftPlace(t *testing.T) {
	needInject(t)
	need(t, "taskset", "flock", "dd")
	needTransport(t, "uring")
	t.Setenv("STAGEFS_MOUNT_OPTS", "")
	dir := staticDir(t)
	m := newMount(t, dir, dir+".mnt")
	var stopLeaver, stopWriter atomic.Bool
	left, goesOn := make(chan struct{}), make(chan struct{})
	writes, written := make(chan struct{}), make(chan struct{})
	m.inject(&fault{call: unix.SYS_MADVISE, until: func(a asked) <-chan struct{} {
		const places = 0x4000_0000_0000 >> 40
		if a.args[0]>>40 != places || a.args[2] != unix.MADV_DONTNEED || !stopLeaver.CompareAndSwap(true, false) {
			return nil
		}
		close(left)
		return goesOn
	}}, &fault{call: unix.SYS_PWRITE64, until: func(a asked) <-chan struct{} {
		name, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", a.pid, a.args[0]))
		if filepath.Base(name) != "data" || !stopWriter.CompareAndSwap(true, false) {
			return nil
		}
		close(writes)
		return written
	}})
	m.serve("--transport=uring", "--no-passthrough")
	goOn := sync.OnceFunc(func() { close(goesOn) })
	writeOn := sync.OnceFunc(func() { close(written) })
	defer goOn()
	defer writeOn()
	await := func(what string, c <-chan struct{}) {
		t.Helper()
		select {
		case <-c:
		case <-time.After(patience):
			t.Fatalf("never happened: %s", what)
		}
	}
	onCore := func(argv ...string) *Proc {
		return startCmd(t, exec.Command("taskset", append([]string{"-c", "0"}, argv...)...))
	}
	hold := func(name string) *os.File {
		openFile(t, m.Back(name), "")
		f, err := os.Open(m.At(name))
		mustDo(t, err)
		mustDo(t, unix.Flock(int(f.Fd()), unix.LOCK_EX))
		t.Cleanup(func() { f.Close() })
		return f
	}
	want := strings.Repeat("x", 4096)
	source := filepath.Join(tempDir(t), "source")
	openFile(t, source, want)
	openFile(t, m.Back("data"), "")
	free, other := hold("free"), hold("other")

	stopLeaver.Store(true)
	first := onCore("flock", m.At("free"), "true")
	await("a thread leaves its place", left)
	free.Close()
	for range 20 { // who waited is answered, or only when that thread goes on
		if time.Sleep(10 * time.Millisecond); first.over() {
			break
		}
	}
	second := onCore("flock", m.At("other"), "true") // has another thread take a place that is left over
	eventually(t, "it waits", func() bool { return waitsInFuse(second.Pid()) })
	time.Sleep(50 * time.Millisecond)
	stopWriter.Store(true)
	write := onCore("dd", "if="+source, "of="+m.At("data"), "bs=4096", "conv=notrunc")
	await("the daemon writes", writes)
	goOn()
	time.Sleep(50 * time.Millisecond)
	writeOn()
	for _, p := range []*Proc{write, first} {
		if r := p.Wait(); r.Status != 0 {
			t.Errorf("%v", r)
		}
	}
	other.Close()
	second.Wait()
	if b, err := os.ReadFile(m.Back("data")); string(b) != want {
		t.Errorf("%d bytes were written, %d of them zero, %v; want %d, none", len(b), strings.Count(string(b), "\x00"), err, len(want))
	}
}
