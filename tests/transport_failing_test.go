//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// TestTransportFailing: where io_uring_enter(2) fails now and then, whoever calls is answered,
// and so is whoever waits.
func TestTransportFailing(t *testing.T) {
	needInject(t)
	need(t, "taskset", "flock")
	needTransport(t, "uring")
	t.Setenv("STAGEFS_MOUNT_OPTS", "")
	for _, errno := range []unix.Errno{unix.EBUSY, unix.ENOMEM} {
		t.Run(errnoName(errno), func(t *testing.T) {
			dir := staticDir(t)
			m := newMount(t, dir, dir+".mnt")
			var failing atomic.Bool
			var calls atomic.Uint64
			m.inject(&fault{call: unix.SYS_IO_URING_ENTER, errno: errno, times: 1 << 20, is: func(asked) bool {
				return failing.Load() && calls.Add(1)%3 == 0
			}})
			m.serve("--transport=uring")
			defer func() {
				if t.Failed() {
					m.kill() // or nobody who hangs could be ended
				}
			}()
			holder := locker(t)
			holder.must("open", "x", m.At("file"), "rdwr,creat")
			holder.must("flock", "x", "ex")
			var all []*Proc
			for i := range 8 {
				all = append(all, startCmd(t, exec.Command("taskset", "-c", fmt.Sprint(i%2), "flock", m.At("file"), "true")))
			}
			waiting := m.waiting()
			eventually(t, "all wait for the lock", func() bool { return waiting() >= len(all) })
			failing.Store(true)
			for i := range 2 {
				script := `for i in 1 2 3 4 5; do d="$1.$i"; mkdir "$d" && echo x >"$d/f" && cat "$d/f" && rm -r "$d" || exit; done >/dev/null`
				all = append(all, startCmd(t, exec.Command("taskset", "-c", fmt.Sprint(i), "sh", "-c", script, "sh", m.At("d"+fmt.Sprint(i)))))
			}
			holder.must("close", "x")
			for _, p := range all {
				eventually(t, "all are answered", p.over)
				// Who finds no place to wait in hears ENOLCK.
				if r := p.Wait(); r.Status != 0 && !(errno == unix.ENOMEM && strings.Contains(r.Err, "No locks available")) {
					t.Errorf("%v", r)
				}
			}
			failing.Store(false)
		})
	}
}

// TestTransportNoPlaces: where the daemon gets no memory for further requests while calls wait for
// the backing, the log says so once, and not for each try; others are served when it gets some.
func TestTransportNoPlaces(t *testing.T) {
	needInject(t)
	need(t, "taskset")
	needTransport(t, "uring")
	t.Setenv("STAGEFS_MOUNT_OPTS", "")
	dir := staticDir(t)
	m := newMount(t, dir, dir+".mnt")
	var short atomic.Bool
	faults := m.inject(&fault{call: unix.SYS_MMAP, errno: unix.ENOMEM, times: 1 << 20, is: func(a asked) bool {
		const place = 1<<20 + 4096
		return short.Load() && a.args[1] == place
	}})
	m.serve("--transport=uring")
	var names []string
	for i := range 8 {
		name := fmt.Sprint(i)
		openFile(t, m.Back(name), "x")
		_, err := os.Stat(m.At(name))
		mustDo(t, err)
		answer, _ := awaitedOpen(t, m.Back(name))
		defer answer()
		names = append(names, m.At(name))
	}
	short.Store(true)
	for _, name := range names {
		startCmd(t, exec.Command("taskset", "-c", "0", "cat", name))
	}
	eventually(t, "it has tried again and again", func() bool { return faults.did()[0] >= 40 })
	if n := strings.Count(m.Log(), "buffers of a ring"); n == 0 || n > 2 { // no thread, and no place
		t.Errorf("the log has %d lines about it, want one or two:\n%s", n, shorten(m.Log()))
	}
	short.Store(false)
	p := startCmd(t, exec.Command("taskset", "-c", "0", "mkdir", m.At("d")))
	eventually(t, "a directory is made", p.over)
}
