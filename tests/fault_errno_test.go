//go:build linux

package tests

import (
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// TestFaultOddErrno: an error that only kernels know, and that the backing lets out, is EIO to
// who called: FUSE takes no answer with such a number, and nothing would end the call.
func TestFaultOddErrno(t *testing.T) {
	byTransport(t, func(t *testing.T, opts ...string) {
		needInject(t)
		dir := staticDir(t)
		m := newMount(t, dir, dir+".mnt")
		var odd atomic.Bool
		is := func(asked) bool { return odd.Load() }
		const enotsupp = unix.Errno(524)
		m.inject(&fault{call: unix.SYS_FALLOCATE, errno: enotsupp, times: 1 << 20, is: is},
			&fault{call: unix.SYS_MKDIRAT, errno: enotsupp, times: 1 << 20, is: is})
		m.serve(opts...)
		defer func() {
			if t.Failed() {
				m.kill() // or nobody who hangs could be ended
			}
		}()
		openFile(t, m.Back("f"), "x")
		odd.Store(true)
		for _, argv := range [][]string{{"fallocate", "-l", "4096", m.At("f")}, {"mkdir", m.At("d")}} {
			p := startCmd(t, exec.Command(argv[0], argv[1:]...))
			eventually(t, argv[0]+" is answered", p.over)
			if r := p.Wait(); r.Status == 0 || !strings.Contains(r.Err, "Input/output error") {
				t.Errorf("%v: %v, want EIO", argv, r)
			}
		}
	})
}
