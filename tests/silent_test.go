//go:build linux

package tests

import (
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestMountSilent: a daemon that does not answer does not hang the commands that
// are to find it, nor those that were told how long to wait; all say who it is.
func TestMountSilent(t *testing.T) {
	for _, transport := range []string{"auto", "threads"} {
		t.Run(transport, func(t *testing.T) {
			m, other := mount(t, "--transport", transport), mount(t)
			agent(t).must("mkdir", other.At("seen"))
			mustDo(t, m.cmd.Process.Signal(syscall.SIGSTOP))
			defer m.cmd.Process.Signal(syscall.SIGCONT)
			who := "process " + itoa(m.cmd.Process.Pid) + ", does not answer: it is stopped"
			for _, tt := range []struct {
				args   string
				status int
				says   string
			}{
				{"locks", 69, who},
				{"locks " + m.At("x"), 69, who},
				{"why " + m.At("x"), 69, who},
				{"doctor", 0, who},
				{"doctor " + m.Path, 0, who},
				{"run -w 1 " + m.At("x") + " true", 69, who},
				{"acquire -w 1 " + m.At("x"), 69, who},
				{"wait -w 1 " + m.At("x"), 69, who},
				{"umount " + m.Path, 75, who},
			} {
				p := startCmd(t, exec.Command(stagefsBin(), strings.Fields(tt.args)...))
				select {
				case <-p.done:
				case <-time.After(patience):
					m.cmd.Process.Signal(syscall.SIGCONT)
					t.Fatalf("stagefs %s: hangs", tt.args)
				}
				r := p.Wait()
				if tt.args == "umount "+m.Path && r.Status == 0 {
					continue // nobody is left inside
				}
				if r.Status != tt.status || !strings.Contains(r.Out+r.Err, tt.says) {
					t.Errorf("stagefs %s: %v; want status %d, and %q said", tt.args, r, tt.status, tt.says)
				}
				if tt.args == "locks" && !strings.Contains(r.Out, "seen") {
					t.Errorf("stagefs locks: %v; want the locks of the other mount", r)
				}
			}
		})
	}
}

// TestDoctorServed: a directory that is served is no fault, nor is one whose
// daemon is dead: the next one takes its place.
func TestDoctorServed(t *testing.T) {
	m := mountOver(t)
	r := m.wantStatus(0, "", "doctor", m.Path)
	for _, dir := range []string{m.Path, m.At("below")} {
		r = m.wantStatus(0, "", "doctor", dir)
		if want := "is served by process " + itoa(m.cmd.Process.Pid); !strings.Contains(r.Out, want) || strings.Contains(r.Out, "umount") {
			t.Errorf("doctor: %v; want %q", r, want)
		}
	}
	m.kill()
	for _, args := range [][]string{{"doctor", m.Path}, {"doctor"}} {
		r = m.wantStatus(0, "", args...)
		if want := "stagefs mount " + m.Dir; !strings.Contains(r.Out, want) || !strings.Contains(r.Out, "is dead") {
			t.Errorf("doctor: %v; want %q", r, want)
		}
	}
	for _, args := range [][]string{{"locks", m.Path}, {"run", m.At("x"), "true"}} {
		m.wantStatus(69, "start it", args...)
	}
	m.start(nil)
	m.awaitReady()
}
