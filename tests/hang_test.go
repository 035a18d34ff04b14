//go:build linux

package tests

import (
	"bufio"
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const envHang = "STAGEFS_TEST_HANG"

// A run of the tests whose daemon hangs, and which therefore can't even be killed,
// ends in time, and leaves nothing behind.
func TestHang(t *testing.T) {
	for name, end := range map[string]func(*exec.Cmd){
		"time limit": func(*exec.Cmd) {},
		"killed":     func(cmd *exec.Cmd) { cmd.Process.Kill() },
		"unheard":    func(cmd *exec.Cmd) { cmd.Process.Kill() }, // so is go test, or what reads it
	} {
		t.Run(name, func(t *testing.T) {
			need(t, "fuse", "root")
			t.Parallel()
			limit := "5s"
			if name != "time limit" {
				limit = "1m"
			}
			cmd := exec.Command(agentBin(), "-test.run=^TestHung$", "-test.timeout="+limit)
			cmd.Env = append(os.Environ(), envRoot+"=", envHang+"=1", "STAGEFS_BIN="+stagefsBin())
			var told bytes.Buffer
			cmd.Stderr = &told
			if name == "unheard" {
				r, w, err := os.Pipe()
				mustDo(t, err)
				r.Close()
				defer w.Close()
				cmd.Stderr = w
			}
			out, err := cmd.StdoutPipe()
			mustDo(t, err)
			mustDo(t, cmd.Start())
			defer cmd.Process.Kill()
			line, err := bufio.NewReader(patientReader{out.(*os.File)}).ReadString('\n')
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
				if name != "unheard" && (!strings.Contains(told.String(), "somebody waits for the daemon of "+root) || !strings.Contains(told.String(), "goroutine ")) {
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

// TestHangPolled: a mount that answers is one whose files nobody asks the daemon to
// poll: a test in Go would wait for it as a whole, also one that the daemon waits for.
func TestHangPolled(t *testing.T) {
	m := mount(t)
	fd, err := unix.Open(m.control("version"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	mustDo(t, err)
	t.Cleanup(func() { unix.Close(fd) }) // when the daemon runs again
	halt(t, m.cmd.Process.Pid)
	polled := make(chan error, 1)
	go func() {
		_, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		polled <- err
	}()
	select {
	case err := <-polled:
		mustDo(t, err)
	case <-time.After(patience):
		t.Error("the daemon is asked")
	}
}

// TestHung is that run.
func TestHung(t *testing.T) {
	if os.Getenv(envHang) == "" {
		t.Skip("TestHang runs it")
	}
	m := mount(t)
	a := agent(t)
	a.must("open", "x", m.At("x"), "rdwr,creat")
	a.must("flock", "x", "ex")
	f, err := os.Open(m.At("x"))
	mustDo(t, err)
	go syscall.Flock(int(f.Fd()), syscall.LOCK_EX)
	// What the daemon has taken up it must answer, or not even a kill ends the wait.
	eventually(t, "the lock is waited for", func() bool { return sleepsIn(os.Getpid(), "request_wait_answer") })
	time.Sleep(100 * time.Millisecond)
	mustDo(t, syscall.Kill(m.cmd.Process.Pid, syscall.SIGSTOP))
	os.Stdout.WriteString(testRoot() + "\n")
	time.Sleep(time.Hour)
}

// TestGroupSignal: a signal to a process group that a test started reaches what is left
// of it, and nobody once all of it is dead.
func TestGroupSignal(t *testing.T) {
	cmd := exec.Command("/bin/sh", "-c", "sleep 1000 & echo $!")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	f, err := os.Create(filepath.Join(tempDir(t), "out"))
	mustDo(t, err)
	defer f.Close()
	cmd.Stdout, cmd.Stderr = f, f // and no pipe, which Wait would wait for
	p := startCmd(t, cmd)
	p.Wait()
	out, err := os.ReadFile(f.Name())
	mustDo(t, err)
	left := atoi(strings.TrimSpace(string(out)))
	if !running(left) {
		t.Fatalf("process %d is not there", left)
	}
	mustDo(t, p.group.signal(syscall.SIGKILL))
	awaitEnd(t, "what the leader left is dead", left)
	eventually(t, "the group is empty", func() bool { return p.group.signal(0) == unix.ESRCH })
}
