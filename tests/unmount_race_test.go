//go:build linux

package tests

import (
	"flag"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

var unmounts = flag.Int("unmounts", 5, "how often TestM4UnmountRace unmounts in each way beside each change of daemons")

// TestM4UnmountRace: whoever unmounts, in whatever way, while the daemon is
// replaced or another one takes the dead one's place: once that has succeeded,
// nothing is mounted, and nobody stays behind. One that fails has changed
// nothing: the mount is served.
func TestM4UnmountRace(t *testing.T) {
	need(t, "root", "fuse", "umount", "fusermount3")
	ways := map[string]func(m *Mount) []string{
		"umount":         func(m *Mount) []string { return []string{"umount", m.Path} },
		"umount -l":      func(m *Mount) []string { return []string{"umount", "-l", m.Path} },
		"fusermount3 -u": func(m *Mount) []string { return []string{"fusermount3", "-u", m.Path} },
		"stagefs umount": func(m *Mount) []string { return []string{stagefsBin(), "umount", m.Path} },
	}
	for _, transport := range transports[:2] {
		for _, change := range []string{"replaced", "killed"} {
			for way, command := range ways {
				t.Run(transport+" "+change+" "+way, func(t *testing.T) {
					needTransport(t, transport)
					race := unmountRace{t: t, transport: transport, killed: change == "killed", command: command}
					for turn := range *unmounts {
						// The change takes some 25 ms on a quiet machine.
						race.run(60 * time.Millisecond * time.Duration(turn) / time.Duration(*unmounts))
						if t.Failed() {
							return
						}
					}
					t.Logf("%d unmounted, %d in vain", race.done, race.vain)
				})
			}
		}
	}
}

type unmountRace struct {
	t          *testing.T
	transport  string
	killed     bool
	command    func(*Mount) []string
	done, vain int
}

// run unmounts so long after the change of daemons has begun.
func (r *unmountRace) run(after time.Duration) {
	t := r.t
	mark := "STAGEFS_UNMOUNT=" + itoa(int(monotonic()))
	name, value, _ := strings.Cut(mark, "=")
	t.Setenv(name, value)
	dir := staticDir(t)
	mustDo(t, os.WriteFile(dir+"/file", []byte("content"), 0o644))
	m := newMount(t, dir, dir)
	opts := []string{"--transport", r.transport}
	if r.killed {
		opts = append(opts, "--supervise")
	}
	m.start(opts)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("unmounted %v after the change began; log:\n%s", after, shorten(m.Log()))
		}
		syscall.Unmount(m.Path, syscall.MNT_DETACH)
		m.cmd.Process.Kill()
	})
	m.awaitReady()
	old := m.daemon()

	began := time.Now()
	var replaced *Proc
	if r.killed {
		mustDo(t, syscall.Kill(old, syscall.SIGKILL))
	} else {
		replaced = startCmd(t, exec.Command(stagefsBin(), "mount", "--replace", m.Path))
	}
	for time.Since(began) < after {
		time.Sleep(100 * time.Microsecond)
	}
	command := r.command(m)
	got := run(t, command[0], command[1:]...)
	if replaced != nil {
		select {
		case <-replaced.done:
		case <-time.After(patience):
			t.Fatalf("mount --replace does not end")
		}
	}
	if got.Status != 0 {
		r.vain++
		eventually(t, "what could not be unmounted is served", func() bool {
			b, err := os.ReadFile(m.control("version"))
			return err == nil && len(b) > 0
		})
		if end := run(t, stagefsBin(), "umount", m.Path); end.Status != 0 {
			t.Fatalf("after %v, unmounting again: %v", got, end)
		}
	} else {
		r.done++
	}
	eventually(t, "nobody stays behind", func() bool { return len(pidsWithEnv(mark)) == 0 })
	if mountedAt(m.Path) {
		t.Errorf("still mounted, after %v", got)
	}
	if b, err := os.ReadFile(dir + "/file"); string(b) != "content" {
		t.Errorf("read = %q, %v", b, err)
	}
	for _, bad := range []string{"panic:", "fatal error:", "\ngoroutine "} {
		if strings.Contains(m.Log(), bad) {
			t.Errorf("the daemon's log has %q", bad)
		}
	}
}
