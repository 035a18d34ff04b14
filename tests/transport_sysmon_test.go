//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
)

// TestTransportSysmon: one thread of the daemon, which looks after the others, rests for
// longer than the kernel lets it by itself, but not while as many calls are stuck as
// need it.
func TestTransportSysmon(t *testing.T) {
	need(t, "root", "fuse", "taskset")
	if runtime.NumCPU() > 16 {
		t.Skip("more threads wait for requests than are looked after so")
	}
	for _, transport := range transports[:2] {
		t.Run(transport, func(t *testing.T) {
			needTransport(t, transport)
			disk := newImage(t, 16)
			t.Setenv("STAGEFS_MOUNT_OPTS", "")
			m := disk.mount("--transport=" + transport)
			resting := func() int {
				return m.threadsThat(func(tid string) bool {
					b, _ := os.ReadFile("/proc/" + tid + "/timerslack_ns") // it may have ended
					return strings.TrimSpace(string(b)) == "5000000"
				})
			}
			eventually(t, "a thread rests", func() bool { return resting() > 0 })
			stuck := frozenCalls + runtime.NumCPU()
			for i := range stuck {
				openDir(t, m.Back(fmt.Sprint("stuck", i)))
			}
			thaw := disk.freeze()
			defer thaw() // before anything is waited for that is stuck
			var calls []*Proc
			for i := range stuck {
				calls = append(calls, startCmd(t, exec.Command("taskset", "-c", "0", "touch", m.At(fmt.Sprintf("stuck%d/f", i)))))
			}
			eventually(t, "none rests", func() bool { return resting() == 0 })
			wantStuck(t, calls, thaw)
			eventually(t, "it rests again", func() bool { return resting() > 0 })
		})
	}
}
