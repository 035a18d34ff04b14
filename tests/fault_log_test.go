//go:build linux

package tests

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestFaultLogReader: while nobody takes the daemon's log off, requests are served all the
// same, and a signal ends the daemon; what could not be kept is counted in the log.
func TestFaultLogReader(t *testing.T) {
	for _, how := range []string{"late", "never"} {
		t.Run(how, func(t *testing.T) {
			fifo := filepath.Join(tempDir(t), "log")
			mustDo(t, unix.Mkfifo(fifo, 0o600))
			reader, err := os.OpenFile(fifo, os.O_RDWR|syscall.O_NONBLOCK, 0) // reads nothing for now
			mustDo(t, err)
			defer reader.Close()
			m := mount(t, "--log", fifo)
			openDir(t, m.Back("D"))
			a := agent(t)
			why := strings.Repeat("long ", 200)
			for range 1500 { // a kilobyte each
				a.mustCommand(m, "acquire D")
				a.mustCommand(m, "break D %s", why)
			}
			a.must("mkdir", m.At("D/x"))
			if how == "never" {
				mustDo(t, m.cmd.Process.Signal(syscall.SIGTERM))
				eventually(t, "it ends", m.dead)
				return
			}
			mustDo(t, reader.SetReadDeadline(time.Now().Add(patience)))
			var log bytes.Buffer
			for buf := make([]byte, 1<<16); !bytes.Contains(log.Bytes(), []byte(" lost=")); {
				n, err := reader.Read(buf)
				mustDo(t, err)
				log.Write(buf[:n])
			}
			if all := strings.Count(log.String(), "lock broken"); all < 500 {
				t.Errorf("the log has %d locks that were broken, want most", all)
			}
		})
	}
}
