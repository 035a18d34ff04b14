//go:build linux

package tests

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// envInject has this binary become stagefs, with a filter that asks at a socket
// before it carries out some system calls: its value is the socket and the calls.
const envInject = "STAGEFS_TEST_INJECT"

// A fault is what is to go wrong in the daemon: a system call fails so often.
type fault struct {
	call  int
	is    func(a asked) bool // nil: any
	errno unix.Errno
	times int

	// until has no call fail: one waits until what it returns, if not nil, is closed.
	until func(a asked) <-chan struct{}

	did int // protected by faults.mu
}

// asked is a system call that a thread of the daemon is about to make.
type asked struct {
	pid  int
	args [6]uint64
}

// path is the string that an argument points to.
func (a asked) path(arg int) string {
	buf := make([]byte, 4096)
	local := []unix.Iovec{{Base: &buf[0], Len: uint64(len(buf))}}
	// A string may end close to memory that is not there.
	for n := len(buf); n > 0; n /= 2 {
		local[0].Len = uint64(n)
		if got, err := unix.ProcessVMReadv(a.pid, local, []unix.RemoteIovec{{Base: uintptr(a.args[arg]), Len: n}}, 0); err == nil {
			text, _, _ := strings.Cut(string(buf[:got]), "\x00")
			return text
		}
	}
	return ""
}

// faults are those of a mount's daemons.
type faults struct {
	mu  sync.Mutex
	all []*fault
}

// did is how often each has happened so far.
func (f *faults) did() (all []int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, one := range f.all {
		all = append(all, one.did)
	}
	return all
}

// inject makes system calls of the daemons fail that the mount starts from now
// on, and of the processes that they start.
func (m *Mount) inject(all ...*fault) *faults {
	m.t.Helper()
	f := &faults{all: all}
	name := filepath.Join(tempDir(m.t), "ask")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: name, Net: "unix"})
	mustDo(m.t, err)
	m.t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.AcceptUnix()
			if err != nil {
				return
			}
			if fd, err := receiveFD(c); err == nil {
				go f.answer(fd)
			}
			c.Close()
		}
	}()
	var value strings.Builder
	value.WriteString(name)
	for _, one := range all {
		fmt.Fprintf(&value, " %d", one.call)
	}
	m.t.Setenv(envInject, value.String())
	m.cmdBin = agentBin()
	return f
}

// healthy ends that for the daemons to come.
func (m *Mount) healthy() { m.cmdBin = "" }

func receiveFD(c *net.UnixConn) (int, error) {
	control := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := c.ReadMsgUnix(make([]byte, 1), control)
	if err != nil {
		return -1, err
	}
	messages, err := unix.ParseSocketControlMessage(control[:n])
	if err != nil || len(messages) != 1 {
		return -1, unix.EBADMSG
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return -1, unix.EBADMSG
	}
	return fds[0], nil
}

// seccompNotif and seccompAnswer are those of seccomp_unotify(2).
type seccompNotif struct {
	id    uint64
	pid   uint32
	flags uint32
	nr    int32
	arch  uint32
	ip    uint64
	args  [6]uint64
}

type seccompAnswer struct {
	id    uint64
	value int64
	errno int32
	flags uint32
}

const (
	seccompReceive  = 0xc0502100 // SECCOMP_IOCTL_NOTIF_RECV
	seccompSend     = 0xc0182101 // SECCOMP_IOCTL_NOTIF_SEND
	seccompContinue = 1
)

// send reports whether somebody still waited for the answer.
func (a *seccompAnswer) send(listener int) bool {
	for {
		// The kernel's own lock is waited for; a signal, such as Go's scheduler sends, ends that.
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(listener), seccompSend, uintptr(unsafe.Pointer(a))); errno != unix.EINTR {
			return errno == 0
		}
	}
}

// answer decides about the calls of one daemon until that is gone.
func (f *faults) answer(listener int) {
	defer unix.Close(listener)
	for {
		poll := []unix.PollFd{{Fd: int32(listener), Events: unix.POLLIN}}
		if _, err := unix.Poll(poll, -1); err == unix.EINTR {
			continue
		} else if err != nil || poll[0].Revents&unix.POLLIN == 0 {
			return
		}
		var n seccompNotif
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(listener), seccompReceive, uintptr(unsafe.Pointer(&n))); errno != 0 {
			continue // interrupted, or gone
		}
		a := seccompAnswer{id: n.id, flags: seccompContinue}
		if goesOn := f.until(n); goesOn != nil {
			go func() {
				<-goesOn
				a.send(listener)
			}()
			continue
		}
		f.mu.Lock()
		var hit *fault
		for _, one := range f.all {
			if one.until == nil && one.call == int(n.nr) && one.did < one.times && (one.is == nil || one.is(asked{int(n.pid), n.args})) {
				hit = one
				a.flags, a.errno = 0, -int32(one.errno)
				break
			}
		}
		if a.send(listener) && hit != nil {
			hit.did++
		}
		f.mu.Unlock()
	}
}

func (f *faults) until(n seccompNotif) <-chan struct{} {
	for _, one := range f.all {
		if one.until != nil && one.call == int(n.nr) {
			return one.until(asked{int(n.pid), n.args})
		}
	}
	return nil
}

// injectMain becomes stagefs with the filter.
func injectMain(value string) int {
	f := strings.Fields(value)
	runtime.LockOSThread()                                                           // the filter is this thread's, which goes on
	prog := []unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0}} // seccomp_data.nr
	for _, nr := range f[1:] {
		prog = append(prog,
			unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 1, K: uint32(atoi(nr))},
			unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: 0x7fc00000}) // SECCOMP_RET_USER_NOTIF
	}
	prog = append(prog, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: 0x7fff0000}) // SECCOMP_RET_ALLOW
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: f[0], Net: "unix"})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	socket, err := conn.File()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	to := int(socket.Fd()) // which itself makes a call that may have to ask
	const setFilter, newListener = 1, 8
	p := unix.SockFprog{Len: uint16(len(prog)), Filter: &prog[0]}
	fd, _, errno := unix.Syscall(unix.SYS_SECCOMP, setFilter, newListener, uintptr(unsafe.Pointer(&p)))
	if errno == 0 {
		err = unix.Sendmsg(to, []byte{0}, unix.UnixRights(int(fd)), nil, 0)
	} else {
		err = errno
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "seccomp:", err)
		return 2
	}
	unix.CloseOnExec(int(fd))
	os.Unsetenv(envInject)
	err = syscall.Exec(stagefsBin(), append([]string{stagefsBin()}, os.Args[1:]...), os.Environ())
	fmt.Fprintln(os.Stderr, "exec:", err)
	return 2
}

// needInject skips a test where the kernel has no seccomp_unotify(2).
func needInject(t *testing.T) {
	t.Helper()
	need(t, "root", "fuse")
	action := uint32(0x7fc00000)
	if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, 2, 0, uintptr(unsafe.Pointer(&action))); errno != 0 {
		if os.Getenv("STAGEFS_REQUIRE") == "1" {
			t.Fatalf("seccomp_unotify(2): %v", errno)
		}
		t.Skipf("seccomp_unotify(2): %v", errno)
	}
}
