//go:build linux

package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A Mount is a running daemon that serves a static directory.
type Mount struct {
	t     *testing.T
	Dir   string // the static directory: its backing, unless mounted over itself
	Path  string // where it is mounted
	State string // state directory
	user  uint32 // whose daemon it is
	// inside: the command is typed in Dir, with relative paths.
	inside bool
	// cmdBin is run as stagefs; "": stagefs itself.
	cmdBin string
	cmd    *exec.Cmd
	log    string // file with all that the daemon prints
	gone   chan struct{}
	others bool // whether daemons with another state serve it, too
}

// mount serves a new static directory elsewhere, so that the test still sees
// the backing under [Mount.Dir].
func mount(t *testing.T, opts ...string) *Mount {
	t.Helper()
	dir := staticDir(t)
	return mountDir(t, dir, dir+".mnt", opts...)
}

// mountOver serves a new static directory over itself (M1).
func mountOver(t *testing.T, opts ...string) *Mount {
	t.Helper()
	dir := staticDir(t)
	return mountDir(t, dir, dir, opts...)
}

// staticDir makes an empty directory that every user may write to.
func staticDir(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(tempDir(t), "static")
	mustDo(t, os.Mkdir(dir, 0o777))
	mustDo(t, os.Chmod(dir, 0o777))
	return dir
}

// tempDir is like [testing.T.TempDir], but open to every user.
func tempDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp(testRoot(), "t-")
	mustDo(t, err)
	mustDo(t, os.Chmod(dir, 0o777))
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// mountDir serves dir at mnt, which may be dir itself.
func mountDir(t *testing.T, dir, mnt string, opts ...string) *Mount {
	t.Helper()
	need(t, "root", "fuse")
	m := newMount(t, dir, mnt)
	m.serve(opts...)
	return m
}

// on is the same mount for a subtest, which failures belong to then.
func (m *Mount) on(t *testing.T) *Mount {
	sub := *m
	sub.t = t
	return &sub
}

func newMount(t *testing.T, dir, mnt string) *Mount {
	t.Helper()
	if mnt != dir {
		mustDo(t, os.MkdirAll(mnt, 0o755))
	}
	base := tempDir(t)
	return &Mount{t: t, Dir: dir, Path: mnt, State: filepath.Join(base, "state"), log: filepath.Join(base, "log")}
}

// serve starts the daemon, which ends with the test, and waits until it serves.
func (m *Mount) serve(opts ...string) {
	m.t.Helper()
	m.start(opts)
	m.t.Cleanup(m.stop)
	m.awaitReady()
}

func (m *Mount) start(opts []string) {
	m.t.Helper()
	log, err := os.OpenFile(m.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	mustDo(m.t, err)
	defer log.Close()
	wd, dir, state := "/", m.Dir, m.State
	if m.inside {
		wd, dir = m.Dir, "."
		state, err = filepath.Rel(wd, m.State)
		mustDo(m.t, err)
	}
	args := append([]string{"mount", "--state-dir", state}, strings.Fields(os.Getenv("STAGEFS_MOUNT_OPTS"))...)
	args = append(append(args, opts...), dir) // a test's own go by what comes last
	if m.Path != m.Dir {
		args = append(args, m.Path)
	}
	bin := m.cmdBin
	if bin == "" {
		bin = stagefsBin()
	}
	m.cmd = exec.Command(bin, args...)
	m.cmd.Dir, m.cmd.Stdout, m.cmd.Stderr = wd, log, log
	// A signal to the test's process group, such as ^C, is not the daemon's.
	m.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if m.user != 0 {
		m.cmd.SysProcAttr.Credential = &syscall.Credential{Uid: m.user, Gid: m.user}
	}
	mustDo(m.t, m.cmd.Start())
	m.gone = make(chan struct{})
	go func(cmd *exec.Cmd, gone chan struct{}) { cmd.Wait(); close(gone) }(m.cmd, m.gone)
}

func (m *Mount) awaitReady() {
	m.t.Helper()
	eventually(m.t, "the mount answers", func() bool {
		if m.dead() {
			m.t.Fatalf("stagefs mount ended: %v\n%s", m.cmd.ProcessState, m.Log())
		}
		_, err := m.version()
		return err == nil
	})
}

// version reads the file of that name, and asks the kernel to poll it, without Go's
// poller. That one keeps all of this process waiting while it adds a file, which the
// kernel asks the daemon about; and the daemon may wait for this process. Who is told
// once that files are not polled never asks again.
func (m *Mount) version() ([]byte, error) {
	fd, err := unix.Open(m.control("version"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	if _, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0); err != nil {
		return nil, err
	}
	buf := make([]byte, 64<<10)
	n, err := unix.Read(fd, buf)
	return buf[:max(n, 0)], err
}

func (m *Mount) dead() bool {
	select {
	case <-m.gone:
		return true
	default:
	}
	if running(m.cmd.Process.Pid) {
		return false
	}
	<-m.gone // at once: it is only to be waited for
	return true
}

// stop unmounts, waits for the daemon, and looks at what it said.
func (m *Mount) stop() {
	if !m.dead() {
		m.wantNoLeaks()
		// If it is unmounted already, another test's mount namespace may have a copy for a
		// while, as after this umount.
		mounted := mountedAt(m.Path)
		// Another user's mount lets nobody in, root neither.
		if m.user == 0 && mounted {
			if err := os.WriteFile(m.control("ctl"), []byte("check\n"), 0); err != nil {
				m.t.Errorf("the tables' invariants: %v", err)
			}
		}
		var r Result
		if mounted && (m.Path == m.Dir || !m.unmount()) {
			r = run(m.t, stagefsBin(), "umount", m.Path)
		}
		patient := patience
		if r.Status != 0 {
			m.t.Errorf("stagefs umount %s: %v", m.Path, r)
			run(m.t, stagefsBin(), "umount", "--lazy", m.Path)
			patient = time.Second // whoever is inside keeps the daemon
		}
		ended := m.endsWithin(patient)
		if !ended && r.Status == 0 {
			copies := m.endCopies()
			if ended = m.endsWithin(patience); !ended {
				m.t.Errorf("the daemon still runs %v after %v; processes %v had copies of the mount", 2*patience, r, copies)
				m.cmd.Process.Signal(syscall.SIGQUIT) // shows where it hangs
			}
		}
		if !ended && !m.endsWithin(2*time.Second) {
			m.kill()
		}
	}
	if mountedAt(m.Path) {
		unix.Unmount(m.Path, unix.MNT_DETACH)
	}
	log := m.Log()
	for _, bad := range []string{"panic:", "DATA RACE", "fatal error:", "\ngoroutine "} {
		if strings.Contains(log, bad) {
			m.t.Errorf("the daemon's log has %q", strings.TrimSpace(bad))
		}
	}
	if !m.others && strings.Contains(log, otherState) {
		m.t.Errorf("the daemon's log says that the directory %s", otherState)
	}
	if m.t.Failed() {
		m.t.Logf("log of the daemon of %s, whose end was %v:\n%s", m.Path, m.cmd.ProcessState, shorten(log))
	}
}

// endsWithin waits for the daemon's end, for so long.
func (m *Mount) endsWithin(d time.Duration) bool {
	select {
	case <-m.gone:
		return true
	case <-time.After(d):
		return false
	}
}

// endCopies takes the mount, once it is unmounted here, from the mount namespaces that have
// a copy, as those of other tests that began meanwhile: as long as they last, the daemon
// serves them.
func (m *Mount) endCopies() (in []int) {
	in = pidsWhere("mountinfo", func(mounts string) bool { return strings.Contains(mounts, " "+m.Path+" ") })
	for _, pid := range in { // the first of each namespace does
		exec.Command("nsenter", "-t", itoa(pid), "-m", "umount", "-l", m.Path).Run()
	}
	return in
}

// unmount does without the command, whose start costs more than many a test. It reports
// whether that was all there is to do; the command tells who is in the way.
func (m *Mount) unmount() bool {
	for end := time.Now().Add(time.Second); ; time.Sleep(5 * time.Millisecond) {
		// A process that has ended may keep it busy for a moment.
		if err := unix.Unmount(m.Path, unix.UMOUNT_NOFOLLOW); err != unix.EBUSY || time.Now().After(end) {
			return err == nil
		}
	}
}

// wantNoLeaks expects that the daemon has let go of all that the test's
// processes had open, once they are gone.
func (m *Mount) wantNoLeaks() {
	if m.user != 0 || !mountedAt(m.Path) || m.t.Failed() {
		return // nobody else can ask; the log is to be seen
	}
	for end := time.Now().Add(patience); m.metric("handles") > 0; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			m.t.Errorf("the daemon keeps %d handles of files that nobody has open", m.metric("handles"))
			return
		}
	}
}

// kill ends the daemon as a crash would.
func (m *Mount) kill() {
	m.cmd.Process.Kill()
	<-m.gone
}

// Log is what the daemon printed so far.
func (m *Mount) Log() string {
	b, _ := os.ReadFile(m.log)
	return string(b)
}

// At is a path below the mount.
func (m *Mount) At(rel ...string) string {
	return filepath.Join(m.Path, filepath.Join(rel...))
}

// Back is the same path in the backing, where the test can see it.
func (m *Mount) Back(rel ...string) string {
	return filepath.Join(m.Dir, filepath.Join(rel...))
}

func (m *Mount) control(name string) string { return m.At(".stagefs", name) }

// shorten keeps the beginning and the end of a long log.
func shorten(log string) string {
	const most = 8 << 10
	if len(log) <= 2*most {
		return log
	}
	return log[:most] + "\n[…]\n" + log[len(log)-most:]
}
