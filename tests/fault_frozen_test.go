//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// frozenCalls is how many calls the backing keeps waiting: far more than a queue has
// threads.
const frozenCalls = 40

// TestFaultFrozen: while the backing is frozen, so that whoever changes something
// there waits in a system call that nothing ends, whoever only looks is answered, on
// the same core as on the others; when it thaws, all calls succeed.
func TestFaultFrozen(t *testing.T) {
	need(t, "taskset")
	for _, transport := range transports {
		t.Run(transport, func(t *testing.T) {
			needTransport(t, transport)
			disk := newImage(t, 16)
			t.Setenv("STAGEFS_MOUNT_OPTS", "")
			m := disk.mount("--transport=" + transport)
			for i := range frozenCalls {
				openDir(t, m.Back(fmt.Sprint("stuck", i)))
				openDir(t, m.Back(fmt.Sprint("free", i)))
				mustDo(t, os.WriteFile(m.Back(fmt.Sprintf("free%d/f", i)), nil, 0o644))
				for _, name := range []string{"stuck", "free"} {
					_, err := os.Stat(m.At(fmt.Sprint(name, i)))
					mustDo(t, err)
				}
			}
			thaw := disk.freeze()
			defer thaw() // before anything is waited for that is stuck
			var calls []*Proc
			for i := range frozenCalls {
				calls = append(calls, startCmd(t, exec.Command("taskset", "-c", "0", "touch", m.At(fmt.Sprintf("stuck%d/f", i)))))
			}
			waiting := m.waiting()
			eventually(t, "all are stuck", func() bool { return waiting() >= frozenCalls })

			const script = `for d; do stat -c %s $d/f & done; wait`
			for core := range 2 {
				if core > 0 && exec.Command("taskset", "-c", fmt.Sprint(core), "true").Run() != nil {
					continue // a single core
				}
				argv := []string{"-c", fmt.Sprint(core), "sh", "-c", script, "sh"}
				for i := core; i < frozenCalls; i += 2 { // what nobody has looked at yet
					argv = append(argv, m.At(fmt.Sprint("free", i)))
				}
				look := startCmd(t, exec.Command("taskset", argv...))
				eventually(t, fmt.Sprintf("who only looks, on core %d, is answered", core), look.over)
				if r := look.Wait(); r.Status != 0 || r.Err != "" || len(r.Out) != 2*(len(argv)-6) {
					t.Errorf("beside %d calls that are stuck: %v", frozenCalls, r)
				}
			}
			for i, p := range calls {
				if p.over() {
					t.Errorf("call %d was not stuck", i)
				}
			}
			thaw()
			for i, p := range calls {
				if r := p.Wait(); r.Status != 0 {
					t.Errorf("call %d: %v", i, r)
				}
				if _, err := os.Stat(m.Back(fmt.Sprintf("stuck%d/f", i))); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// over reports whether the program has ended.
func (p *Proc) over() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// freeze has whoever changes something wait until thaw is called, which the caller
// defers.
func (i *image) freeze() (thaw func()) {
	i.t.Helper()
	fd, err := unix.Open(i.Dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	mustDo(i.t, err)
	const fiFreeze, fiThaw = 0xc0045877, 0xc0045878
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), fiFreeze, 0); errno != 0 {
		unix.Close(fd)
		if os.Getenv("STAGEFS_REQUIRE") == "1" {
			i.t.Fatalf("%s cannot be frozen: %v", filepath.Base(i.file), errno)
		}
		i.t.Skipf("%s cannot be frozen: %v", filepath.Base(i.file), errno)
	}
	frozen := true
	thaw = func() {
		if frozen {
			frozen = false
			unix.Syscall(unix.SYS_IOCTL, uintptr(fd), fiThaw, 0)
			unix.Close(fd)
		}
	}
	return thaw
}
