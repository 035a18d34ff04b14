//go:build linux

package tests

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"
)

// mountTimed serves a new directory over io_uring, whose connection the kernel ends if a request
// is not answered for long. What counts is what was so when it was mounted.
func mountTimed(t *testing.T) *Mount {
	t.Helper()
	need(t, "root", "fuse", "taskset", "flock")
	needTransport(t, "uring")
	const file = "/proc/sys/fs/fuse/default_request_timeout"
	before, err := os.ReadFile(file)
	if err == nil {
		err = os.WriteFile(file, []byte("60"), 0)
	}
	if err != nil {
		t.Skipf("needs Linux 6.15: %v", err)
	}
	defer func() { mustDo(t, os.WriteFile(file, before, 0)) }()
	return mountBy(t, "uring")
}

// TestTransportTimed: where the kernel ends a connection that leaves a request unanswered for
// too long, none is left so but those that wait: not after a crowd, nor after an upgrade.
func TestTransportTimed(t *testing.T) {
	m := mountTimed(t)
	waiting := m.waiting()
	wantNone := func(when string) {
		t.Helper()
		eventually(t, when+" all is answered", func() bool { return waiting() == 0 })
	}
	all, release := blockMany(m)
	release()
	for _, cmd := range all {
		if err := cmd.Wait(); err != nil {
			t.Errorf("a waiter: %v", err)
		}
	}
	wantNone("after a crowd")
	m.replace()
	wantNone("after an upgrade")
	wantServed(t, m.Path, 5, "mkdir d$i && echo x >d$i/f && cat d$i/f && rm -r d$i")
}

// TestTransportTimedStuck: there, too, calls that the backing does not answer keep no other one
// on their core waiting, however many they are.
func TestTransportTimedStuck(t *testing.T) {
	m := mountTimed(t)
	const stuck = 8
	for i := range stuck {
		openFile(t, m.Back(fmt.Sprint(i)), "x")
		_, err := os.Stat(m.At(fmt.Sprint(i)))
		mustDo(t, err)
		answer, _ := awaitedOpen(t, m.Back(fmt.Sprint(i)))
		defer answer()
	}
	daemon := m.daemon()
	var all []*Proc
	var begin []io.Closer
	prepare := func(script, name string) {
		cmd := exec.Command("taskset", "-c", "0", "sh", "-c", `read -r line; `+script, "sh", m.At(name))
		in, err := cmd.StdinPipe()
		mustDo(t, err)
		all, begin = append(all, startCmd(t, cmd)), append(begin, in)
	}
	for i := range stuck {
		prepare(`exec cat "$1"`, fmt.Sprint(i))
	}
	prepare(`exec mkdir "$1"`, "dir")
	halt(t, daemon)
	for i, p := range all {
		begin[i].Close()
		eventually(t, "it waits", func() bool { return waitsInFuse(p.Pid()) })
	}
	mustDo(t, unix.Kill(daemon, unix.SIGCONT))
	eventually(t, "a directory is made", all[stuck].over)
}
