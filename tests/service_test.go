//go:build linux

package tests

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestMountService: a service manager is told that the mount answers when it does, by the
// daemon, also by a supervised one, which is called as the program is. One that was put
// into the background has told its starter: it tells nobody else.
func TestMountService(t *testing.T) {
	need(t, "root", "fuse")
	for opts, told := range map[string]bool{"": true, "-d --supervise": false, "-d --supervise --daemon=false": true} {
		t.Run(opts, func(t *testing.T) {
			name := "@" + filepath.Base(testRoot()) + t.Name()
			if opts == "" {
				name = filepath.Join(tempDir(t), "notify")
			}
			manager, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Net: "unixgram", Name: name})
			mustDo(t, err)
			defer manager.Close()
			heard := func(within time.Duration) (string, error) {
				manager.SetReadDeadline(time.Now().Add(within))
				b := make([]byte, 100)
				n, err := manager.Read(b)
				return string(b[:n]), err
			}
			dir := staticDir(t)
			m := newMount(t, dir, dir)
			var all []int
			t.Cleanup(func() {
				eventually(t, "all end", func() bool { return !slices.ContainsFunc(all, running) })
			})
			m.startedBy("export NOTIFY_SOCKET='"+name+"'", strings.Fields(opts)...)
			if told {
				if got, err := heard(patience); got != "READY=1" || err != nil {
					t.Fatalf("told %q, %v; want READY=1", got, err)
				}
			} else {
				eventually(t, "the mount answers", func() bool { return m.daemon() != 0 })
				if got, err := heard(10 * time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
					t.Errorf("told %q, %v; want nothing", got, err)
				}
			}
			daemon := m.daemon()
			if daemon == 0 {
				t.Fatal("the mount does not answer")
			}
			all = []int{daemon}
			if strings.Contains(opts, "--supervise") {
				all = append(all, parentOf(t, daemon))
			}
			comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", daemon))
			if string(comm) != "stagefs\n" {
				t.Errorf("the daemon is called %q, %v", comm, err)
			}
		})
	}
}
