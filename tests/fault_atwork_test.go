//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// bigFile is one that the kernel reads past the daemon.
const bigFile = 256 << 10

// TestFaultAtWork: while somebody reads a file past the daemon into memory that is slow
// to arrive, the kernel keeps its inode locked. Who gives the file another name, or
// takes one, waits for that, and keeps nobody else waiting.
func TestFaultAtWork(t *testing.T) {
	need(t, "root", "fuse")
	for name, args := range map[string]string{
		"rename":      `mv -T "$1/f" "$1/g"`,
		"rename onto": `mv -T "$1/over" "$1/f"`,
		"link":        `ln "$1/f" "$1/g"`,
	} {
		t.Run(name, func(t *testing.T) {
			m := mount(t, "--transport=threads")
			needPassthrough(m)
			openDir(t, m.Back("slow"))
			openDir(t, m.Back("free"))
			openFile(t, m.Back("slow/f"), strings.Repeat("x", bigFile))
			openFile(t, m.Back("slow/over"), "x")
			letGo := readSlowly(t, openDirect(t, m.At("slow/f")))
			defer letGo()
			waiting := m.waiting()
			calls := []*Proc{startCmd(t, exec.Command("sh", "-c", args, "sh", m.At("slow")))}
			eventually(t, "the call is stuck", func() bool { return waiting() >= 1 })

			wantServed(t, m.At("free"), 100, "mkdir d$i && echo x >d$i/f && chmod 600 d$i/f && mv d$i/f d$i/g && cat d$i/g")
			wantStuck(t, calls, letGo)
		})
	}
}

// TestFaultAtWorkAgain: so it is if another such read begins in the moment in which the
// daemon renames the file at last, after it has waited for the first.
func TestFaultAtWorkAgain(t *testing.T) {
	need(t, "root", "fuse")
	for name, args := range map[string]string{
		"rename":      `mv -T "$1/f" "$1/g"`,
		"rename onto": `mv -T "$1/over" "$1/f"`,
	} {
		t.Run(name, func(t *testing.T) {
			byTransport(t, func(t *testing.T, opts ...string) {
				m := mount(t, opts...)
				needPassthrough(m)
				openDir(t, m.Back("slow"))
				openDir(t, m.Back("free"))
				openDir(t, m.Back("D"))
				openFile(t, m.Back("slow/f"), strings.Repeat("x", bigFile))
				openFile(t, m.Back("slow/over"), "x")
				openFile(t, m.Back("slow/other"), "x")
				_, err := os.Stat(m.At("slow/other")) // who looks for a name there waits for the rename
				mustDo(t, err)
				owner := agent(t)
				owner.must("creat", m.At("D/devserver"), "wronly,creat,excl")
				letFirst := readSlowly(t, openDirect(t, m.At("slow/f")))
				defer letFirst()
				begun, letGo := beginSlowRead(t, openDirect(t, m.At("slow/f")))
				defer letGo()
				waiting := m.waiting()
				calls := []*Proc{startCmd(t, exec.Command("sh", "-c", args, "sh", m.At("slow")))}
				eventually(t, "the call is stuck", func() bool { return waiting() >= 1 })
				defer time.AfterFunc(patience, func() { t.Error("the others wait"); letGo() }).Stop()
				reading := begun() // behind the rename's look, which is behind the first one
				letFirst()
				reading()

				wantServed(t, m.At("free"), 100, "mkdir d$i && echo x >d$i/f && chmod 600 d$i/f && mv d$i/f d$i/g && cat d$i/g")
				wantServed(t, m.At("slow"), 10, "chmod 60$((i%8)) other && cat f >/dev/null && stat f >/dev/null && echo x")
				owner.Kill()
				m.awaitFree("D")
				wantStuck(t, calls, letGo)
			})
		})
	}
}

// TestW2FaultAtWork: who may not do that is told so at once.
func TestW2FaultAtWork(t *testing.T) {
	need(t, "root", "fuse")
	m := mount(t)
	needPassthrough(m)
	openDir(t, m.Back("D"))
	openFile(t, m.Back("D/f"), strings.Repeat("x", bigFile))
	openFile(t, m.Back("D/g"), "x")
	holder, other := agent(t), stranger(t)
	holder.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	letGo := readSlowly(t, openDirect(t, m.At("D/f")))
	defer letGo()
	defer time.AfterFunc(patience, func() { t.Error("the refusal waits"); letGo() }).Stop()
	for _, call := range [][]string{{"rename", "D/f", "D/h"}, {"rename", "D/g", "D/f"}, {"link", "D/f", "D/h"}} {
		other.want("EBUSY", call[0], m.At(call[1]), m.At(call[2]))
	}
}

// TestR4FaultAtWork: so it is with the lock file of an owner that dies. Its lock ends, and
// those of others that die; the file goes when it can.
func TestR4FaultAtWork(t *testing.T) {
	need(t, "root", "fuse")
	m := mount(t)
	needPassthrough(m)
	openDir(t, m.Back("D"))
	openDir(t, m.Back("E"))
	openFile(t, m.Back("D/f"), strings.Repeat("x", bigFile))
	fd := openDirect(t, m.At("D/f")) // a lock file passes no more
	owner, other := agent(t), agent(t)
	owner.must("link", m.At("D/f"), m.At("D/devserver"))
	letGo := readSlowly(t, fd)
	defer letGo()
	defer time.AfterFunc(patience, func() { t.Error("the daemon hangs"); letGo() }).Stop()
	other.must("creat", m.At("E/devserver"), "wronly,creat,excl")
	owner.Kill()
	m.awaitFree("D")
	other.Kill()
	m.awaitFree("E")
	if _, err := os.Lstat(m.At("E/devserver")); !os.IsNotExist(err) {
		t.Errorf("the other's lock file is left: %v", err)
	}
	letGo()
	eventually(t, "the lock file is gone", func() bool { _, err := os.Lstat(m.At("D/devserver")); return os.IsNotExist(err) })
}

func openDirect(t *testing.T, file string) (fd int) {
	t.Helper()
	fd, err := unix.Open(file, unix.O_RDONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	mustDo(t, err)
	return fd
}

// readSlowly has the kernel read a file into memory that does not arrive until letGo is
// called, or this process ends. It closes fd.
func readSlowly(t *testing.T, fd int) (letGo func()) {
	t.Helper()
	begin, letGo := beginSlowRead(t, fd)
	begin()()
	return letGo
}

// beginSlowRead is readSlowly for a file that may be locked: begin returns when the read
// waits, if only for that, and what that returns when it has got to the memory.
func beginSlowRead(t *testing.T, fd int) (begin func() (arrive func()), letGo func()) {
	t.Helper()
	const uffdioAPI, uffdioRegister, missing = 0xc018aa3f, 0xc020aa00, 1
	uffd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC, 0, 0)
	if errno != 0 {
		t.Skipf("no userfaultfd(2): %v", errno)
	}
	api := [3]uint64{0xaa}
	memory, err := unix.Mmap(-1, 0, 1<<16, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	mustDo(t, err)
	at := [4]uint64{uint64(uintptr(unsafe.Pointer(&memory[0]))), uint64(len(memory)), missing}
	for _, c := range []struct {
		call uintptr
		arg  unsafe.Pointer
	}{{uffdioAPI, unsafe.Pointer(&api)}, {uffdioRegister, unsafe.Pointer(&at)}} {
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uffd, c.call, uintptr(c.arg)); errno != 0 {
			t.Fatalf("userfaultfd: %v", errno)
		}
	}
	var reading sync.WaitGroup
	tid := make(chan int, 1)
	begin = func() func() {
		reading.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			tid <- unix.Gettid()
			if _, err := unix.Pread(fd, memory, 0); err != nil {
				t.Errorf("read: %v", err)
			}
			unix.Close(fd)
			unix.Munmap(memory)
		})
		awaitUninterruptible(t, <-tid)
		return func() {
			var fault [32]byte
			if _, err := unix.Read(int(uffd), fault[:]); err != nil { // it waits for the memory
				t.Errorf("userfaultfd: %v", err)
			}
		}
	}
	return begin, sync.OnceFunc(func() {
		syscall.Close(int(uffd))
		reading.Wait()
	})
}

// awaitUninterruptible returns when a thread waits for a lock of the kernel, or a page.
func awaitUninterruptible(t *testing.T, tid int) {
	t.Helper()
	eventually(t, "the read waits", func() bool {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", tid))
		mustDo(t, err)
		_, rest, _ := strings.Cut(string(b), ") ")
		return strings.HasPrefix(rest, "D")
	})
}
