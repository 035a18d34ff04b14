//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The ways requests come to the daemon. What is served is the same.
var transports = []string{"uring", "threads", "fuse"}

// mountBy serves a new directory through a transport; without the machine's
// part the test is skipped.
func mountBy(t *testing.T, transport string, opts ...string) *Mount {
	t.Helper()
	needTransport(t, transport)
	t.Setenv("STAGEFS_MOUNT_OPTS", "")
	m := mount(t, append(opts, "--transport="+transport)...)
	if got := m.transport(); got != transport {
		t.Errorf("version says that the transport is %q, want %q", got, transport)
	}
	return m
}

// needTransport skips the test where the machine has no part in a transport.
func needTransport(t *testing.T, transport string) {
	t.Helper()
	if b, _ := os.ReadFile("/sys/module/fuse/parameters/enable_uring"); transport == "uring" && string(b) != "Y\n" {
		t.Skip("needs Linux 6.14 with fuse.enable_uring=1")
	}
	if transport == "uring" && strings.Contains(os.Getenv("STAGEFS_MOUNT_OPTS"), "--compat") {
		t.Skip("is more than Linux 5.10 offers")
	}
}

// transport is what the control directory says.
func (m *Mount) transport() string {
	b, err := os.ReadFile(m.control("version"))
	mustDo(m.t, err)
	for line := range strings.Lines(string(b)) {
		if name, ok := strings.CutPrefix(line, "transport "); ok {
			return strings.TrimSpace(name)
		}
	}
	return ""
}

// waiting returns what tells how many requests the kernel has no answer to yet,
// also while there is nobody to answer.
func (m *Mount) waiting() func() int {
	file := filepath.Join(m.connection(), "waiting")
	return func() int {
		b, err := os.ReadFile(file)
		mustDo(m.t, err)
		n, err := strconv.Atoi(strings.TrimSpace(string(b)))
		mustDo(m.t, err)
		return n
	}
}

// connection is the kernel's directory about the mount.
func (m *Mount) connection() string {
	all := openConnections()
	if all < 0 {
		m.t.Fatal("the kernel's directory of connections cannot be opened")
	}
	m.t.Cleanup(func() { unix.Close(int(all)) })
	var st unix.Stat_t
	mustDo(m.t, unix.Stat(m.Path, &st))
	return all.of(fmt.Sprint(unix.Minor(st.Dev)))
}

// waiters is far more requests than a queue has places for at the start.
const waiters = 40

// blockMany lets as many processes, all on the same core, wait for a lock that
// the test has, and returns them and what lets them go.
func blockMany(m *Mount) (all []*exec.Cmd, release func()) {
	m.t.Helper()
	mustDo(m.t, os.WriteFile(m.Back("file"), nil, 0o666))
	f, err := os.Open(m.At("file"))
	mustDo(m.t, err)
	mustDo(m.t, unix.Flock(int(f.Fd()), unix.LOCK_EX))
	m.t.Cleanup(func() {
		f.Close()
		for _, cmd := range all {
			cmd.Process.Kill()
			cmd.Wait()
		}
	})
	for range waiters {
		cmd := exec.Command("taskset", "-c", "0", "flock", m.At("file"), "true")
		mustDo(m.t, cmd.Start())
		all = append(all, cmd)
	}
	waiting := m.waiting()
	eventually(m.t, "all wait for the lock", func() bool { return waiting() >= waiters })
	return all, func() { f.Close() }
}

// TestTransportBlocked: requests that wait keep no other request from being
// answered, however many they are; one that is killed is gone, and the lock
// goes on from hand to hand.
func TestTransportBlocked(t *testing.T) {
	need(t, "root", "fuse", "taskset", "flock")
	for _, transport := range transports {
		t.Run(transport, func(t *testing.T) {
			m := mountBy(t, transport)
			all, release := blockMany(m)
			// On the core that they wait on, and from several processes
			// at a time.
			script := `for i in 1 2 3 4 5 6 7 8; do (mkdir d$i && echo x >d$i/f && sync d$i/f && mv d$i/f d$i/g && stat d$i/g && rm -r d$i) >/dev/null || echo failed & done; wait`
			for core := range 2 {
				if core > 0 && exec.Command("taskset", "-c", fmt.Sprint(core), "true").Run() != nil {
					continue // a single core
				}
				cmd := exec.Command("taskset", "-c", fmt.Sprint(core), "sh", "-c", script)
				cmd.Dir = m.Path
				if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
					t.Errorf("work beside %d waiters: %v %s", waiters, err, out)
				}
			}
			for _, cmd := range all[:waiters/2] {
				cmd.Process.Kill()
				cmd.Wait()
			}
			release()
			for _, cmd := range all[waiters/2:] {
				if err := cmd.Wait(); err != nil {
					t.Errorf("a waiter: %v", err)
				}
			}
		})
	}
}

// TestTransportAbort: when the connection is aborted, requests that wait fail
// and the daemon ends.
func TestTransportAbort(t *testing.T) {
	need(t, "root", "fuse", "taskset", "flock")
	for _, transport := range transports {
		t.Run(transport, func(t *testing.T) {
			m := mountBy(t, transport)
			all, _ := blockMany(m)
			mustDo(t, os.WriteFile(filepath.Join(m.connection(), "abort"), []byte("1\n"), 0))
			wantAllFail(t, all)
			eventually(t, "the daemon ends", m.dead)
		})
	}
}

// TestTransportKilled: requests that wait fail when the daemon is killed, and
// nothing stays.
func TestTransportKilled(t *testing.T) {
	need(t, "root", "fuse", "taskset", "flock")
	for _, transport := range transports {
		t.Run(transport, func(t *testing.T) {
			m := mountBy(t, transport)
			all, _ := blockMany(m)
			m.kill()
			wantAllFail(t, all)
			eventually(t, "the mount is dead", func() bool {
				_, err := os.ReadDir(m.Path)
				return errnoName(err) == "ENOTCONN"
			})
		})
	}
}

// TestTransportTerminated: a daemon that is told to end while requests wait
// detaches, goes on serving them, and ends after the last.
func TestTransportTerminated(t *testing.T) {
	need(t, "root", "fuse", "taskset", "flock")
	for _, transport := range transports {
		t.Run(transport, func(t *testing.T) {
			m := mountBy(t, transport)
			all, release := blockMany(m)
			mustDo(t, m.cmd.Process.Signal(syscall.SIGTERM))
			eventually(t, "the mount is detached", func() bool { return !mountedAt(m.Path) })
			release()
			for _, cmd := range all {
				if err := cmd.Wait(); err != nil {
					t.Errorf("a waiter: %v", err)
				}
			}
			eventually(t, "the daemon ends", m.dead)
		})
	}
}

func wantAllFail(t *testing.T, all []*exec.Cmd) {
	t.Helper()
	for _, cmd := range all {
		if err := cmd.Wait(); err == nil {
			t.Errorf("a waiter succeeded")
		}
	}
}

// TestTransportRefused: where the machine forbids io_uring, the next best
// transport serves; who asked for io_uring is told why there is none.
func TestTransportRefused(t *testing.T) {
	need(t, "root", "fuse")
	t.Setenv("STAGEFS_MOUNT_OPTS", "")
	for _, call := range []struct {
		name string
		nr   uint32
	}{{"io_uring_setup", unix.SYS_IO_URING_SETUP}, {"io_uring_enter", unix.SYS_IO_URING_ENTER}, {"sched_setaffinity", unix.SYS_SCHED_SETAFFINITY}} {
		t.Run(call.name, func(t *testing.T) {
			t.Setenv(envForbid, fmt.Sprint(call.nr))
			dir := staticDir(t)
			m := newMount(t, dir, dir+".mnt")
			m.cmdBin = agentBin()
			m.serve()
			if got := m.transport(); got != "threads" {
				t.Errorf("without %s the transport is %q, want threads", call.name, got)
			}
			mustDo(t, os.WriteFile(m.At("f"), []byte("x"), 0o644))
			if b, err := os.ReadFile(m.Back("f")); string(b) != "x" {
				t.Errorf("what was written: %q, %v", b, err)
			}
			r := run(t, agentBin(), "mount", "--transport=uring", "--state-dir", filepath.Join(tempDir(t), "s"), staticDir(t))
			if r.Status == 0 || !strings.Contains(r.Err, "uring") || !strings.Contains(r.Err, "not available") {
				t.Errorf("mount --transport=uring without %s: %v", call.name, r)
			}
		})
	}
	wantRefusal(t, "64", []string{"transport", "auto"}, "mount", "--transport=best", staticDir(t))
	wantRefusal(t, "64", []string{"compat"}, "mount", "--compat", "--transport=uring", staticDir(t))
}

// TestMountForbidden: where a system call is forbidden that nothing takes the place of, or
// /proc shows processes alone, nothing is mounted, and the message and doctor say why.
func TestMountForbidden(t *testing.T) {
	need(t, "root", "fuse", "unshare")
	refused := func(t *testing.T, what, why string, prefix ...string) {
		t.Helper()
		state, dir := filepath.Join(tempDir(t), "s"), staticDir(t)
		do := func(args ...string) Result { return run(t, prefix[0], append(prefix[1:], args...)...) }
		if r := do("mount", "-d", "--state-dir", state, dir); r.Status != 71 || !strings.Contains(r.Err, what) || mountedAt(dir) {
			t.Errorf("mount: %v, mounted: %v; want status 71, and %s", r, mountedAt(dir), what)
		}
		if r := do("doctor", "--state-dir", state, dir); r.Status != 69 || !regexp.MustCompile(`(?m)^fail +`+why).MatchString(r.Out) {
			t.Errorf("doctor: %v, want a failure for %s", r, why)
		}
	}
	for name, nr := range map[string]int{"statx": unix.SYS_STATX, "faccessat2": unix.SYS_FACCESSAT2, "pidfd_open": unix.SYS_PIDFD_OPEN} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(envForbid, fmt.Sprint(nr))
			refused(t, name+"(2)", "system calls .*"+name, agentBin())
		})
	}
	t.Run("proc", func(t *testing.T) {
		refused(t, "needs /proc", "/proc .*subset=pid", "unshare", "-mpf", "--propagation", "private", "sh", "-c",
			`mount -t proc -o subset=pid proc /proc && exec "$0" "$@"`, stagefsBin())
	})
}

// envForbid is a system call that fails with EPERM in stagefs, which this
// binary becomes; after a colon, with only that second argument.
const envForbid = "STAGEFS_TEST_FORBID"

// forbidMain becomes stagefs with a seccomp filter.
func forbidMain(call string) int {
	number, second, one := strings.Cut(call, ":")
	nr, err := strconv.ParseUint(number, 10, 32)
	if err != nil {
		return 2
	}
	const load, equal, end = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, unix.BPF_RET | unix.BPF_K
	prog := []unix.SockFilter{
		{Code: load, K: 0}, // seccomp_data.nr
		{Code: equal, Jt: 1, K: uint32(nr)},
		{Code: end, K: 0x7fff0000}, // SECCOMP_RET_ALLOW
	}
	if one {
		prog = append(prog, unix.SockFilter{Code: load, K: 24}, // seccomp_data.args[1]
			unix.SockFilter{Code: equal, Jt: 1, K: uint32(atoi(second))},
			unix.SockFilter{Code: end, K: 0x7fff0000})
	}
	prog = append(prog, unix.SockFilter{Code: end, K: 0x00050000 | uint32(unix.EPERM)}) // SECCOMP_RET_ERRNO
	f := unix.SockFprog{Len: uint16(len(prog)), Filter: &prog[0]}
	unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
	// On all threads: the one that goes on may be any.
	if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, 1, 1, uintptr(unsafe.Pointer(&f))); errno != 0 {
		fmt.Fprintln(os.Stderr, "seccomp:", errno)
		return 2
	}
	err = syscall.Exec(stagefsBin(), append([]string{"stagefs"}, os.Args[1:]...), os.Environ())
	fmt.Fprintln(os.Stderr, "exec:", err)
	return 2
}
