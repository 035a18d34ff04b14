//go:build linux

package tests

import (
	"bufio"
	"bytes"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

const envHang = "STAGEFS_TEST_HANG"

// A run of the tests whose daemon hangs, and which therefore can't even be killed,
// ends in time, and leaves nothing behind.
func TestHang(t *testing.T) {
	for name, end := range map[string]func(*exec.Cmd){
		"time limit": func(*exec.Cmd) {},
		"killed":     func(cmd *exec.Cmd) { cmd.Process.Kill() },
	} {
		t.Run(name, func(t *testing.T) {
			need(t, "fuse", "root")
			t.Parallel()
			limit := "2s"
			if name == "killed" {
				limit = "1h"
			}
			cmd := exec.Command(agentBin(), "-test.run=^TestHung$", "-test.timeout="+limit)
			cmd.Env = append(os.Environ(), envRoot+"=", envHang+"=1", "STAGEFS_BIN="+stagefsBin())
			var told bytes.Buffer
			cmd.Stderr = &told
			out, err := cmd.StdoutPipe()
			mustDo(t, err)
			mustDo(t, cmd.Start())
			line, err := bufio.NewReader(out).ReadString('\n')
			mustDo(t, err)
			root := strings.TrimSpace(line)
			defer func() {
				for _, pid := range markedPids(root) {
					syscall.Kill(pid, syscall.SIGKILL)
				}
			}()
			end(cmd)
			done := make(chan error, 1)
			go func() { done <- cmd.Wait() }()
			select {
			case err := <-done:
				if err == nil {
					t.Error("the run that hung has passed")
				}
				if !strings.Contains(told.String(), "somebody waits for the daemon of "+root) || !strings.Contains(told.String(), "goroutine ") {
					t.Errorf("what the daemon did was not told: %s", told.String())
				}
			case <-time.After(patience):
				t.Error("the run still hangs")
			}
			eventually(t, "nothing is left over", func() bool {
				_, err := os.Stat(root)
				return os.IsNotExist(err) && len(leftOvers(root)) == 0
			})
		})
	}
}

// TestHung is that run.
func TestHung(t *testing.T) {
	if os.Getenv(envHang) == "" {
		t.Skip("TestHang runs it")
	}
	m := mount(t)
	mustDo(t, syscall.Kill(m.cmd.Process.Pid, syscall.SIGSTOP))
	for _, name := range strings.Fields("a b c") {
		go os.Stat(m.At(name))
	}
	time.Sleep(time.Second) // until they wait for the daemon
	os.Stdout.WriteString(testRoot() + "\n")
	os.Stat(m.At("d"))
}
