//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// readPages reads a file through the kernel's pages, with several threads, until over.
func readPages(t *testing.T, path string, over *atomic.Bool) (wait func()) {
	var wg sync.WaitGroup
	for range 4 {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		mustDo(t, err)
		wg.Go(func() {
			defer unix.Close(fd)
			buf := make([]byte, 1<<16)
			for !over.Load() {
				if _, err := unix.Pread(fd, buf, 0); err != nil {
					return // the daemon is dead
				}
			}
		})
	}
	return wg.Wait
}

// pagesMount is a mount where a lease's holder writes to a file again and again that
// others have read pages of.
func pagesMount(t *testing.T, opts ...string) (m *Mount, writer *Agent) {
	m = mount(t, opts...)
	openDir(t, m.Back("D"))
	openFile(t, m.Back("D/f"), strings.Repeat("x", 1<<16))
	writer = agent(t)
	writer.mustCommand(m, "acquire D client=x ttl=1h")
	abort := m.aborter()
	t.Cleanup(func() { // before anybody is waited for
		if t.Failed() {
			abort()
		}
	})
	return m, writer
}

// TestS1AttackPagesReplaced attacks S1: the daemon is replaced while it has the kernel
// drop pages, which others are reading.
func TestS1AttackPagesReplaced(t *testing.T) {
	for _, transport := range []string{"threads", "uring"} {
		t.Run(transport, func(t *testing.T) {
			needTransport(t, transport)
			m, writer := pagesMount(t, "--transport", transport)
			var over atomic.Bool
			wait := readPages(t, m.At("D/f"), &over)
			writer.must("open", "w", m.At("D/f"), "wronly")
			s := writer.storm([]string{"pwrite", "w", "a", "1", "0"}, []string{"pwrite", "w", "b", "1", "50000"})
			for range *upgrades {
				await(t, 100, s)
				m.replace()
			}
			over.Store(true)
			wait()
			s.over()
		})
	}
}

// aborter returns what ends the connection to the kernel, as it is now.
func (m *Mount) aborter() (abort func()) {
	file := filepath.Join(m.connection(), "abort")
	return func() { os.WriteFile(file, []byte("1"), 0) }
}

// TestS1AttackPagesKilled attacks S1: the daemon is killed then. Once in a while it
// waits for a page that it was reading itself, and does not end before the connection
// does: see TestFaultPagesHeldAlone.
func TestS1AttackPagesKilled(t *testing.T) {
	for _, transport := range []string{"threads", "uring"} {
		t.Run(transport, func(t *testing.T) {
			needTransport(t, transport)
			for range 5 {
				m, writer := pagesMount(t, "--transport", transport)
				var over atomic.Bool
				wait := readPages(t, m.At("D/f"), &over)
				writer.must("open", "w", m.At("D/f"), "wronly")
				s := writer.storm([]string{"pwrite", "w", "a", "1", "0"}, []string{"pwrite", "w", "b", "1", "50000"})
				await(t, 100, s)
				abort := m.aborter()
				mustDo(t, m.cmd.Process.Signal(syscall.SIGKILL))
				for began := time.Now(); !m.dead() && time.Since(began) < 3*time.Second; {
					time.Sleep(time.Millisecond)
				}
				if !m.dead() {
					t.Log("the killed daemon waits for a page")
					abort()
				}
				eventually(t, "the daemon is dead", m.dead)
				over.Store(true)
				wait()
				s.end()
			}
		})
	}
}

// TestFaultPagesHeld: a daemon that is killed while it has the kernel drop pages that
// it is reading itself ends, and the next one serves.
func TestFaultPagesHeld(t *testing.T) {
	for _, transport := range []string{"threads", "uring"} {
		t.Run(transport, func(t *testing.T) {
			m, pid := pagesHeld(t, transport, "--supervise")
			eventually(t, "another daemon serves", func() bool { now := m.daemon(); return now != 0 && now != pid })
			if b, err := os.ReadFile(m.At("D/f")); err != nil || !strings.HasSuffix(string(b), "xend") {
				t.Errorf("%d bytes, %v", len(b), err)
			}
		})
	}
}

// TestFaultPagesHeldAlone: one that nobody supervises ends when its mount is made
// anew, or unmounted. Who cannot do that hears what it waits for.
func TestFaultPagesHeldAlone(t *testing.T) {
	for _, transport := range []string{"threads", "uring"} {
		t.Run(transport, func(t *testing.T) {
			t.Run("mount", func(t *testing.T) {
				m, pid := pagesHeld(t, transport)
				m.start(nil)
				eventually(t, "the killed daemon has ended", func() bool { return syscall.Kill(pid, 0) == syscall.ESRCH })
				m.awaitReady()
				if b, err := os.ReadFile(m.At("D/f")); err != nil || !strings.HasSuffix(string(b), "xend") {
					t.Errorf("%d bytes, %v", len(b), err)
				}
			})
			t.Run("umount", func(t *testing.T) {
				m, pid := pagesHeld(t, transport)
				who := "process " + itoa(pid) + ", does not answer: it was killed"
				for _, args := range []string{"locks", "acquire -n"} {
					m.wantStatus(69, who, append(strings.Fields(args), m.At("D"))...)
				}
				asUser := exec.Command(stagefsBin(), "mount", "--state-dir", m.State, m.Dir, m.Path)
				asUser.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
				if r := startCmd(t, asUser).Wait(); r.Status != 69 || !strings.Contains(r.Err, who) || !strings.Contains(r.Err, "stagefs umount "+m.Path) {
					t.Errorf("stagefs mount, as nobody: %v; want 69, and %q said", r, who)
				}
				m.stagefs("umount", m.Path) // it may be in use still
				eventually(t, "the killed daemon has ended", func() bool { return syscall.Kill(pid, 0) == syscall.ESRCH })
				if r := m.stagefs("umount", "--lazy", m.Path); r.Status != 0 && mountedAt(m.Path) {
					t.Errorf("stagefs umount --lazy: %v", r)
				}
			})
		})
	}
}

// TestFaultPagesHeldReplace: an upgrade gives up where the kernel waits for such a page,
// and a later one succeeds. Meanwhile the daemon serves.
func TestFaultPagesHeldReplace(t *testing.T) {
	for _, transport := range []string{"threads", "uring"} {
		t.Run(transport, func(t *testing.T) {
			m, letGo := holdPages(t, transport)
			wantRefusal(t, "75", []string{"cannot be replaced", "backing", "try again", "serves on"}, "mount", "--replace", m.Path)
			openDir(t, m.At("E"))
			letGo()
			eventually(t, "the kernel waits no more", func() bool { return !sleepsIn(m.daemon(), "folio_lock") })
			m.replace()
			if b, err := os.ReadFile(m.At("D/f")); err != nil || !strings.HasSuffix(string(b), "xend") {
				t.Errorf("%d bytes, %v", len(b), err)
			}
		})
	}
}

// pagesHeld is the mount of a daemon that is killed while it has the kernel drop pages
// that it is reading itself: so it does not end.
func pagesHeld(t *testing.T, transport string, opts ...string) (m *Mount, pid int) {
	t.Helper()
	m, letGo := holdPages(t, transport, opts...)
	pid = m.daemon()
	mustDo(t, syscall.Kill(pid, syscall.SIGKILL))
	letGo()
	return m, pid
}

// holdPages is the mount of a daemon that has the kernel drop pages which it is reading
// itself, until letGo is called.
func holdPages(t *testing.T, transport string, opts ...string) (m *Mount, letGo func()) {
	t.Helper()
	needTransport(t, transport)
	needInject(t)
	dir := staticDir(t)
	m = newMount(t, dir, dir+".mnt")
	openDir(t, m.Back("D"))
	openFile(t, m.Back("D/f"), strings.Repeat("x", 1<<20))
	reading, goOn := make(chan bool), make(chan bool)
	var once, let sync.Once
	m.inject(&fault{call: unix.SYS_PREADV, times: 1, is: func(asked) bool {
		once.Do(func() { close(reading) })
		<-goOn
		return false
	}})
	letGo = func() { let.Do(func() { close(goOn) }) }
	t.Cleanup(letGo)
	m.serve(append(opts, "--no-passthrough", "--transport", transport)...)
	m.healthy()
	abort := m.aborter()
	t.Cleanup(func() {
		if t.Failed() {
			abort() // or it would be there for ever
		}
	})
	pid := m.daemon()
	writer, reader := agent(t), agent(t)
	writer.mustCommand(m, "acquire D client=x ttl=1h")
	reader.must("open", "r", m.At("D/f"), "rdonly")
	writer.must("open", "w", m.At("D/f"), "rdwr,append")
	reader.Start("pread", "r", "4096", "0")
	select {
	case <-reading:
	case <-time.After(patience):
		t.Fatal("the daemon does not read with preadv(2)")
	}
	writer.must("write", "w", "end") // the kernel is to drop all pages
	eventually(t, "the kernel waits for the page", func() bool { return sleepsIn(pid, "folio_lock") })
	return m, letGo
}

// sleepsIn tells whether a thread of a process sleeps in a function of the kernel.
func sleepsIn(pid int, function string) bool {
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/wchan", pid))
	for _, task := range tasks {
		if b, _ := os.ReadFile(task); strings.Contains(string(b), function) {
			return true
		}
	}
	return false
}
