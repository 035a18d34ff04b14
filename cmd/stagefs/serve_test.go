//go:build linux

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stagefs/stagefs/fs"
)

// envFake makes the test binary the program itself, with a mount that is a
// fake and behaves as the value says.
const envFake = "STAGEFS_TEST_FAKE"

// A fakeServer is a mount that does nothing until it is unmounted.
type fakeServer struct {
	mode string
	at   string
	gone chan struct{}
}

func (s *fakeServer) Mountpoint() string { return s.at }
func (s *fakeServer) Warnings() []string { return []string{"a warning"} }
func (s *fakeServer) Transport() string  { return "fake" }
func (s *fakeServer) Wait() error        { <-s.gone; return nil }
func (s *fakeServer) Detach() error      { return nil }

func (s *fakeServer) Shutdown(context.Context) error {
	switch s.mode {
	case "busy":
		return fs.ErrDetached
	case "stuck":
		select {}
	}
	close(s.gone)
	return nil
}

func fakeMain(mode string) int {
	c := &command{args: os.Args[1:], in: os.Stdin, out: os.Stdout, err: os.Stderr}
	c.mount = func(o fs.Options) (server, error) {
		switch mode {
		case "error":
			return nil, fs.ErrReadOnly
		case "crash":
			os.Exit(0)
		case "slow": // mounted when the test says so
			fmt.Fprintln(os.Stderr, "mounting")
			for {
				if _, err := os.Stat(filepath.Join(o.Dir, "go")); err == nil {
					break
				}
				time.Sleep(5 * time.Millisecond)
			}
		case "killed":
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
		s := &fakeServer{mode: mode, at: o.Dir, gone: make(chan struct{})}
		if mode == "umounted" {
			close(s.gone)
		}
		return s, nil
	}
	status := c.run(context.Background())
	if mode == "late" {
		syscall.Kill(os.Getpid(), syscall.SIGTERM)
		time.Sleep(50 * time.Millisecond)
	}
	return status
}

// A program is the test binary, run as stagefs with a fake mount.
type program struct {
	cmd *exec.Cmd
	err syncBuffer
}

func start(t *testing.T, mode string, args ...string) *program {
	t.Helper()
	p := &program{cmd: exec.Command(os.Args[0], args...)}
	p.cmd.Env = append(os.Environ(), envFake+"="+mode)
	p.cmd.Stderr = &p.err
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.cmd.Process.Kill() })
	return p
}

// signalWhileMounting sends a signal to a slow program on dir, which goes on
// when it has said something of it.
func (p *program) signalWhileMounting(t *testing.T, sig syscall.Signal, dir string) {
	t.Helper()
	p.err.eventually(t, "mounting")
	p.cmd.Process.Signal(sig)
	p.err.eventually(t, "unmounting")
	if err := os.WriteFile(filepath.Join(dir, "go"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
}

func (p *program) status() int {
	p.cmd.Wait()
	return p.cmd.ProcessState.ExitCode()
}

func TestServe(t *testing.T) {
	dir := t.TempDir()
	const term, intr = syscall.SIGTERM, syscall.SIGINT
	for _, tt := range []struct {
		mode    string
		signals []syscall.Signal
		status  int
		says    []string
	}{
		{"ok", []syscall.Signal{term}, 0, []string{"warning: a warning", "serving " + dir, "terminated: unmounting"}},
		{"ok", []syscall.Signal{intr}, 0, []string{"interrupt: unmounting"}},
		{"umounted", nil, 0, []string{"was unmounted"}},
		{"busy", []syscall.Signal{term, intr}, 130, []string{"still in use: detached", "ending at once"}},
		{"stuck", []syscall.Signal{term, term}, 143, []string{"terminated again"}},
		{"error", nil, 66, []string{"read-write"}},
	} {
		p := start(t, tt.mode, "mount", dir)
		if len(tt.signals) > 0 {
			p.err.eventually(t, "serving ")
		}
		for i, s := range tt.signals {
			if i > 0 {
				p.cmd.Process.Signal(s) // too soon to count
				time.Sleep(secondTime)
			}
			p.cmd.Process.Signal(s)
			p.err.eventually(t, s.String())
			if tt.mode == "busy" {
				p.err.eventually(t, "detached")
			}
		}
		if got := p.status(); got != tt.status {
			t.Errorf("%s, %v: status %d, want %d", tt.mode, tt.signals, got, tt.status)
		}
		for _, want := range tt.says {
			if !strings.Contains(p.err.String(), want) {
				t.Errorf("%s, %v: says\n%s\nwant %q in it", tt.mode, tt.signals, p.err.String(), want)
			}
		}
	}
}

// A stop signal that comes when a program is about to end does not change how.
func TestServeSignalLate(t *testing.T) {
	dir := t.TempDir()
	for _, args := range [][]string{{"mount", dir}, {"mount", "--supervise", dir}, {"mount", "-d", dir}} {
		p := start(t, "late", args...)
		p.err.eventually(t, "serving ")
		if args[1] == "-d" {
			defer syscall.Kill(daemonPid(t, p.err.String()), syscall.SIGKILL)
		} else {
			p.cmd.Process.Signal(syscall.SIGTERM)
		}
		if got := p.status(); got != 0 {
			t.Errorf("%q: status %d, want 0: %s", args, got, p.err.String())
		}
	}
}

// A signal that comes before the mount answers is not lost.
func TestServeSignalWhileMounting(t *testing.T) {
	dir := t.TempDir()
	p := start(t, "slow", "mount", dir)
	p.signalWhileMounting(t, syscall.SIGTERM, dir)
	if got := p.status(); got != 0 {
		t.Errorf("status %d, want 0: %s", got, p.err.String())
	}
	if got := p.err.String(); strings.Contains(got, "serving") {
		t.Errorf("says %q", got)
	}
}

// Neither ^Z nor a reader that is gone stops a mount.
func TestServeGoesOn(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0], "mount", t.TempDir())
	cmd.Env = append(os.Environ(), envFake+"=ok")
	cmd.Stderr = w
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Process.Kill()
	w.Close()
	line, err := bufio.NewReaderSize(r, 16).ReadString('\n')
	if err != nil {
		t.Fatalf("first line %q, %v", line, err)
	}
	r.Close()
	cmd.Process.Signal(syscall.SIGTSTP)
	time.Sleep(50 * time.Millisecond)
	cmd.Process.Signal(syscall.SIGTERM)
	if err := cmd.Wait(); err != nil {
		t.Errorf("the server ends with %v, want status 0", err)
	}
}

func TestExplainMount(t *testing.T) {
	dir := t.TempDir()
	gone := filepath.Join(dir, "gone\n")
	for _, tt := range []struct {
		o    fs.Options
		err  error
		want string
	}{
		{fs.Options{Dir: gone}, fs.ErrNotExist, `gone\n": no such directory; make it first`},
		{fs.Options{Dir: dir, Mountpoint: gone}, fs.ErrNotExist, "mountpoint "},
		{fs.Options{Dir: dir}, fs.ErrStaleMount, "umount -l"},
		{fs.Options{Dir: dir}, errors.New("other"), "other"},
	} {
		if _, got := explain(explainMount(tt.o, tt.err)); !strings.Contains(got, tt.want) {
			t.Errorf("explainMount(%+v, %v) = %q, want %q in it", tt.o, tt.err, got, tt.want)
		}
	}
}
