//go:build linux

package tests

import (
	"os"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// TestTransportForbiddenLater: a daemon over io_uring that may make no more rings says so when it
// is to be replaced, and serves on: the next program could not.
func TestTransportForbiddenLater(t *testing.T) {
	needInject(t)
	needTransport(t, "uring")
	t.Setenv("STAGEFS_MOUNT_OPTS", "")
	dir := staticDir(t)
	m := newMount(t, dir, dir+".mnt")
	var forbidden atomic.Bool
	m.inject(&fault{call: unix.SYS_IO_URING_SETUP, errno: unix.EPERM, times: 1 << 20, is: func(asked) bool { return forbidden.Load() }})
	m.serve("--transport=uring")
	forbidden.Store(true)
	wantRefusal(t, "69", []string{"io_uring_setup", "serves on"}, "mount", "--replace", m.Path)
	mustDo(t, os.WriteFile(m.At("f"), []byte("x"), 0o644))
	forbidden.Store(false)
	m.replace()
	mustDo(t, os.WriteFile(m.At("f"), []byte("x"), 0o644))
}
