//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// A stage is one run of a stager on a mount.
type stage struct {
	t    *testing.T
	m    *Mount
	s    shapeOf
	name string // the staged directory
	src  string
	tmp  string
	proc *Proc
}

// startPaused starts a stager and returns when it stands still in the middle of
// its work. One that was too fast to be stopped there is started again.
func startPaused(t *testing.T, m *Mount, s shapeOf, name, src string) (st *stage, resume func()) {
	t.Helper()
	for try := range 20 {
		st = newStage(t, m, s, fmt.Sprintf("%s.%d", name, try), src)
		st.start()
		if resume, ok := st.pause(); ok {
			return st, resume
		}
	}
	t.Fatal("the stager was always too fast")
	return nil, nil
}

func newStage(t *testing.T, m *Mount, s shapeOf, name, src string) *stage {
	st := &stage{t: t, m: m, s: s, name: name, src: src, tmp: tempDir(t)}
	mustDo(t, os.WriteFile(filepath.Join(st.tmp, "stager.py"), []byte(stagerPy), 0o644))
	mustDo(t, syscall.Mkfifo(filepath.Join(st.tmp, "go"), 0o666))
	writeProgram(t, filepath.Join(st.tmp, "pause"), []byte("#!/bin/sh\n: >"+st.tmp+"/reached\nread line <"+st.tmp+"/go\n"))
	return st
}

func (st *stage) start() {
	st.t.Helper()
	cmd := exec.Command("/bin/sh", "-c", st.s.script)
	cmd.Env = append(os.Environ(), "SRC="+st.src, "D="+st.m.At(st.name), "TMP="+st.tmp, "PAUSE="+filepath.Join(st.tmp, "pause"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	st.proc = startCmd(st.t, cmd)
	st.t.Cleanup(st.abandon)
}

func (st *stage) pause() (resume func(), ok bool) {
	st.t.Helper()
	if st.s.stop {
		return st.pauseByStop()
	}
	eventually(st.t, "the stager pauses", func() bool {
		_, err := os.Stat(filepath.Join(st.tmp, "reached"))
		if st.proc.over() {
			st.t.Fatalf("the stager ended before it paused: %v", st.proc.Wait())
		}
		return err == nil && st.begun(0)
	})
	thaw := func() {}
	if st.s.others {
		thaw = freeze(st.t, "TMP="+st.tmp)
	}
	st.heldNow()
	return func() {
		thaw()
		f, err := os.OpenFile(filepath.Join(st.tmp, "go"), os.O_WRONLY, 0)
		mustDo(st.t, err)
		fmt.Fprintln(f, "go")
		f.Close()
	}, true
}

// begun tells whether the stager has made more than some files.
func (st *stage) begun(files int) bool {
	return countFiles(st.m.Back(st.name)) > files
}

func (st *stage) pauseByStop() (resume func(), ok bool) {
	st.t.Helper()
	eventually(st.t, "the stager has begun", func() bool {
		for end := time.Now().Add(time.Second); time.Now().Before(end); {
			if st.proc.over() || st.begun(0) {
				return true
			}
		}
		return false
	})
	st.proc.group.signal(syscall.SIGSTOP)
	thaw := freeze(st.t, "TMP="+st.tmp)
	if st.proc.over() || st.begun(countFiles(st.src)-1) {
		thaw()
		st.proc.Wait()
		return nil, false
	}
	st.heldNow()
	return thaw, true
}

// heldNow waits until the lock on the staged directory is the right process's. A
// tool that has exited hands it over (R5), which may take a moment.
func (st *stage) heldNow() {
	st.t.Helper()
	want := st.s.owner
	if want == "" {
		want = "sh"
	}
	eventually(st.t, "the directory is held by "+want, func() bool {
		comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", st.m.Locks()[st.name].Pid))
		return strings.TrimSpace(string(comm)) == want
	})
}

// finish waits for the stager's success, and compares what it staged.
func (st *stage) finish() {
	st.t.Helper()
	if r := st.proc.Wait(); r.Status != 0 || r.Err != "" {
		st.t.Errorf("the stager: %v", r)
	}
	st.m.awaitFree(st.name)
	for name := range st.m.Locks() {
		if strings.HasPrefix(name, st.name) {
			st.t.Errorf("a lock is left on %s", name)
		}
	}
	want, got := contents(st.t, st.src), contents(st.t, st.m.Back(st.name))
	for _, extra := range st.s.extra {
		delete(got, extra)
	}
	if len(want) != len(got) {
		st.t.Errorf("%d files were staged, want %d", len(got), len(want))
	}
	for name, content := range want {
		if got[name] != content {
			st.t.Errorf("%s differs from its source", name)
		}
	}
}

// abandon ends all that is left of the stager, and waits until it is gone:
// what it has open would stand in the next owner's way (R8).
func (st *stage) abandon() {
	pids := pidsWithEnv("TMP=" + st.tmp)
	st.proc.group.signal(syscall.SIGKILL)
	for _, pid := range pids {
		syscall.Kill(pid, syscall.SIGKILL)
	}
	st.proc.Wait()
	for _, pid := range pids {
		awaitEnd(st.t, "a process of the stager is gone", pid)
	}
}

// countFiles counts the regular files beneath dir, while they come and go.
func countFiles(dir string) int {
	count := 0
	filepath.WalkDir(dir, func(_ string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			count++
		}
		return nil
	})
	return count
}

func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	files := map[string]string{}
	mustDo(t, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		rel, _ := filepath.Rel(dir, path)
		files[rel] = string(b)
		return err
	}))
	return files
}

// freeze stops all processes that have a line in their environment, in
// whichever session and process group they are, and returns when all stand.
func freeze(t *testing.T, line string) (thaw func()) {
	t.Helper()
	thaw = func() { signalAll(line, syscall.SIGCONT) }
	eventually(t, "all processes stand still", func() bool {
		for end := time.Now().Add(time.Second); time.Now().Before(end); {
			if signalAll(line, syscall.SIGSTOP) == 0 {
				return true
			}
		}
		thaw() // a child that was stopped in vfork(2) keeps its parent from stopping
		return false
	})
	return thaw
}

// signalAll sends a signal to all processes that have a line in their
// environment, and counts those that do not stand still yet.
func signalAll(line string, sig syscall.Signal) int {
	moving := 0
	for _, pid := range pidsWithEnv(line) {
		if state := stateOf(pid); state == "" || state == "T" && sig == syscall.SIGSTOP {
			continue
		}
		syscall.Kill(pid, sig)
		moving++
	}
	return moving
}
