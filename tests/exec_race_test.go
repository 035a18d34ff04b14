//go:build linux

package tests

import (
	"os"
	"os/exec"
	"runtime"
	"sync"
	"testing"
	"time"
)

// TestM4ExecRace: programs in the mount start, and close what is open in it while
// they do, while others change their modes. What the kernel shows of a process in
// execve(2) can't be read until it got its answers; whoever in the daemon reads
// that nevertheless hangs with it.
func TestM4ExecRace(t *testing.T) {
	for name, opts := range map[string][]string{"the best": nil, "threads": {"--transport", "threads"}} {
		t.Run(name, func(t *testing.T) {
			m := mount(t, opts...)
			program := m.At("true")
			text, err := os.ReadFile("/bin/true")
			mustDo(t, err)
			writeProgram(t, program, text)
			stop := make(chan struct{})
			var others sync.WaitGroup
			defer others.Wait()
			var once sync.Once
			end := func() { once.Do(func() { close(stop) }) }
			defer end()
			others.Go(func() {
				runtime.LockOSThread() // a caller is a thread
				for mode := os.FileMode(0o755); !isShut(stop); mode ^= 0o022 {
					if err := os.Chmod(program, mode); err != nil {
						t.Errorf("chmod: %v", err)
						return
					}
				}
			})
			started := 0
			for began := time.Now(); time.Since(began) < 2*time.Second || started < 50; started++ {
				f, err := os.Open(program) // is closed by the exec
				mustDo(t, err)
				cmd := exec.Command(program)
				hung := time.AfterFunc(patience, func() {
					end()
					m.kill()
				})
				err = cmd.Run()
				if !hung.Stop() {
					t.Fatalf("program number %d did not start within %v", started, patience)
				}
				mustDo(t, err)
				f.Close()
			}
			t.Logf("%d programs started", started)
		})
	}
}
