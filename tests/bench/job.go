//go:build linux

package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// These variables tell a process of this program what it is. envRoot marks all
// processes of a run, so that the janitor finds them.
const (
	envJob     = "STAGEFS_BENCH_JOB"
	envRoot    = "STAGEFS_BENCH_ROOT"
	envJanitor = "STAGEFS_BENCH_JANITOR"
)

// A job is what a client process does. It gets ready, says so, waits for a
// byte, and works.
type job struct {
	Kind string   // "exec", or the name of a loop
	Argv []string // of exec
	Out  string   // where exec's standard output goes
	Dir  string   // where it works
	Hold string   // who has the lock on Dir: "" nobody, held: the process itself, parent: its parent
	N    int      // how many operations
	// Meter is read by a loop that has several rows.
	Meter meter
	Size  int64 // bytes, of the loops on data
}

// A span is a stretch of CLOCK_MONOTONIC, in nanoseconds.
type span struct{ Start, End int64 }

// A result is what a loop did: a span for each row, the count of operations,
// and the nanoseconds that one took in the fastest stretch of them.
type result struct {
	Spans []span
	Ops   []int64
	Best  []float64
	// Spent is what each row's part took of the daemon, if that was read.
	Spent []Spent
}

// A loop prepares, and returns what is to be timed.
type loop func(job) (func() (result, error), error)

func now() int64 {
	var ts unix.Timespec
	unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return ts.Nano()
}

// jobMain is the client process. The third descriptor is a pipe whose only
// purpose is to be closed when the client ends.
func jobMain(spec string) int {
	var j job
	if err := json.Unmarshal([]byte(spec), &j); err != nil {
		return failJob(err)
	}
	if j.Hold != "" {
		if err := takeLock(j.Dir); err != nil {
			return failJob(err)
		}
	}
	if j.Hold == stateParent {
		return runChild(j)
	}
	if j.Kind == "exec" {
		return failJob(execTool(j))
	}
	// No collection and no preemption interrupts a system call of the loops.
	debug.SetGCPercent(-1)
	runtime.LockOSThread()
	do, err := loops()[j.Kind](j)
	if err != nil {
		return failJob(err)
	}
	awaitGo()
	res, err := do()
	if err != nil {
		return failJob(err)
	}
	if err := json.NewEncoder(os.Stdout).Encode(res); err != nil {
		return failJob(err)
	}
	return 0
}

func failJob(err error) int {
	fmt.Fprintln(os.Stderr, err)
	return 1
}

func awaitGo() {
	fmt.Println("ready")
	bufio.NewReader(os.Stdin).ReadByte()
}

// execTool becomes the tool, so that it is the owner of the lock, and no fork
// is in its time.
func execTool(j job) error {
	path, err := exec.LookPath(j.Argv[0])
	if err != nil {
		return err
	}
	out, err := os.Create(j.Out)
	if err != nil {
		return err
	}
	if err := os.Chdir(j.Dir); err != nil {
		return err
	}
	awaitGo()
	if err := unix.Dup2(int(out.Fd()), 1); err != nil {
		return err
	}
	return syscall.Exec(path, j.Argv, os.Environ())
}

// takeLock makes the lock file of a directory as a tool would, and sees that it
// counts. An earlier client's may still be on its way out (R4).
func takeLock(dir string) error {
	var err error
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(time.Millisecond) {
		var f *os.File
		f, err = os.OpenFile(filepath.Join(dir, lockName), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
		if err == nil {
			f.Close()
			// Who did something with his lock does not hand it over when he ends (R5).
			touched := filepath.Join(dir, ".touched")
			if err := os.WriteFile(touched, nil, 0o644); err != nil {
				return err
			}
			if err := os.Remove(touched); err != nil {
				return err
			}
			kind := make([]byte, 16)
			if n, err := unix.Getxattr(dir, "user.stagefs.kind", kind); err != nil || string(kind[:n]) != "explicit" {
				return fmt.Errorf("the lock file in %s made no lock: %q %v", dir, kind[:max(n, 0)], err)
			}
			return nil
		}
		if !os.IsExist(err) {
			return err
		}
	}
	return err
}

const lockName = "devserver"

// runChild lets a child do the work under this process's lock.
func runChild(j job) int {
	dir := j.Dir
	j.Hold = ""
	done := os.NewFile(3, "done")
	cmd, err := jobCommand(j)
	if err != nil {
		return failJob(err)
	}
	cmd.Env = append(os.Environ(), cmd.Env...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.ExtraFiles = []*os.File{done}
	err = cmd.Start()
	done.Close()
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		return failJob(err)
	}
	os.Remove(filepath.Join(dir, lockName))
	return 0
}

// jobCommand is this program again, as a client.
func jobCommand(j job) (*exec.Cmd, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	spec, err := json.Marshal(j)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self)
	cmd.Env = []string{envJob + "=" + string(spec), "GODEBUG=asyncpreemptoff=1"}
	return cmd, nil
}
