//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// frozenCalls is how many calls the backing keeps waiting: far more than a queue has
// threads.
const frozenCalls = 40

// TestFaultFrozen: while the backing is frozen, so that whoever changes something
// there waits in a system call that nothing ends, whoever only looks is answered, on
// the same core as on the others, also if it is a rename that waits; when it thaws,
// all calls succeed.
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
			for _, name := range []string{"first", "last"} {
				openDir(t, m.Back(name))
				mustDo(t, os.WriteFile(m.Back(name+"/old"), nil, 0o644))
				_, err := os.Stat(m.At(name + "/old"))
				mustDo(t, err)
			}
			thaw := disk.freeze()
			defer thaw() // before anything is waited for that is stuck
			var calls []*Proc
			waiting := m.waiting()
			stick := func(argv ...string) {
				calls = append(calls, startCmd(t, exec.Command("taskset", append([]string{"-c", "0"}, argv...)...)))
			}
			rename := func(dir string) {
				stick("mv", "-T", m.At(dir+"/old"), m.At(dir+"/f"))
				eventually(t, "the rename is stuck", func() bool { return waiting() >= len(calls) })
			}
			rename("first")
			for i := range frozenCalls {
				stick("touch", m.At(fmt.Sprintf("stuck%d/f", i)))
			}
			eventually(t, "all are stuck", func() bool { return waiting() >= len(calls) })
			rename("last")

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
			wantStuck(t, calls, thaw)
			made, err := filepath.Glob(m.Back("*/f"))
			if err != nil || len(made) != 2*frozenCalls+2 {
				t.Errorf("made are %q (%v)", made, err)
			}
		})
	}
}

// wantStuck expects that all of calls wait for the thaw, or for what else ends it, and
// succeed then.
func wantStuck(t *testing.T, calls []*Proc, thaw func()) {
	t.Helper()
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
	}
}

// TestFaultFrozenDescriptors: so it is where the daemon may not open one file more:
// neither a thread nor a goroutine that answers needs any.
func TestFaultFrozenDescriptors(t *testing.T) {
	need(t, "taskset", "flock")
	const stuck = 8
	for _, transport := range transports {
		t.Run(transport, func(t *testing.T) {
			needTransport(t, transport)
			disk := newImage(t, 16)
			t.Setenv("STAGEFS_MOUNT_OPTS", "")
			m := disk.mount("--transport=" + transport)
			for i := range stuck {
				openDir(t, m.Back(fmt.Sprint("stuck", i)))
				mustDo(t, os.Mkdir(m.At(fmt.Sprintf("stuck%d/warm", i)), 0o755))
			}
			// A crowd leaves spare places: none may be lost with a thread that cannot be added.
			crowd, release := blockMany(m)
			release()
			for _, cmd := range crowd {
				mustDo(t, cmd.Wait())
			}
			on0 := func(argv ...string) *Proc {
				return startCmd(t, exec.Command("taskset", append([]string{"-c", "0"}, argv...)...))
			}
			thaw := disk.freeze()
			defer thaw() // before anything is waited for that is stuck
			pid := m.daemon()
			var old unix.Rlimit
			mustDo(t, unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &old))
			few := unix.Rlimit{Cur: uint64(freeDescriptor(t, pid)), Max: old.Max}
			mustDo(t, unix.Prlimit(pid, unix.RLIMIT_NOFILE, &few, nil))
			var calls []*Proc
			for i := range stuck {
				// What is no lock needs no look at who makes it.
				calls = append(calls, on0("mkfifo", m.At(fmt.Sprintf("stuck%d/p", i))))
			}
			for i, p := range calls {
				eventually(t, fmt.Sprintf("call %d is stuck, or over", i), func() bool {
					return p.over() || sleepsIn(p.cmd.Process.Pid, "request_wait_answer")
				})
			}
			look := on0("sh", "-c", `for i in 1 2 3 4 5 6 7 8 9 10; do stat -f -c %T "$1" || exit; done`, "sh", m.Path)
			eventually(t, "who only looks is answered", look.over)
			if r := look.Wait(); r.Status != 0 || strings.Count(r.Out, "\n") != 10 {
				t.Errorf("beside %d calls that are stuck: %v", stuck, r)
			}
			wantStuck(t, calls, thaw)
			mustDo(t, unix.Prlimit(pid, unix.RLIMIT_NOFILE, &old, nil))
		})
	}
}

// freeDescriptor returns the lowest one that a process has not in use.
func freeDescriptor(t *testing.T, pid int) int {
	t.Helper()
	for fd := 0; ; fd++ {
		if _, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", pid, fd)); os.IsNotExist(err) {
			return fd
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

// wantServed has somebody else make some calls in dir, so many times: $i counts, and each
// time they say x.
func wantServed(t *testing.T, dir string, times int, calls string) {
	t.Helper()
	script := fmt.Sprintf(`cd "$1" && for i in $(seq %d); do %s || exit; done`, times, calls)
	others := startCmd(t, exec.Command("sh", "-c", script, "sh", dir))
	eventually(t, "the others go on", others.over)
	if r := others.Wait(); r.Status != 0 || strings.Count(r.Out, "x") != times {
		t.Errorf("the others: %v", r)
	}
}

// TestFaultStuckCall: a call that the backing does not answer, as with one bad file
// of a server, and the rename of a directory, which has to wait for it, keep nobody else
// waiting, nor who renames a file.
func TestFaultStuckCall(t *testing.T) {
	need(t, "root", "fuse")
	byTransport(t, func(t *testing.T, opts ...string) {
		m := mount(t, opts...)
		for _, dir := range []string{"slow", "moved1", "moved2", "free"} {
			openDir(t, m.Back(dir))
			mustDo(t, os.WriteFile(m.Back(dir+"/f"), []byte("x"), 0o644))
			openDir(t, m.Back(dir+"/d"))
			for _, name := range []string{"/f", "/d"} {
				_, err := os.Stat(m.At(dir + name))
				mustDo(t, err)
			}
		}
		answer := unansweredOpen(t, m.Back("slow/f"))
		defer answer()
		waiting := m.waiting()
		calls := []*Proc{startCmd(t, exec.Command("cat", m.At("slow/f")))}
		eventually(t, "the open is stuck", func() bool { return waiting() >= 1 })
		for _, dir := range []string{"moved1", "moved2"} {
			calls = append(calls, startCmd(t, exec.Command("mv", "-T", m.At(dir+"/d"), m.At(dir+"/e"))))
			eventually(t, "the rename waits", func() bool { return waiting() >= len(calls) })
		}
		wantServed(t, m.At("free"), 10, "mkdir d$i && echo x >d$i/f && mv d$i/f d$i/g && cat d$i/g && chmod 600 d$i/g && rm d$i/g && rmdir d$i")
		wantStuck(t, calls, answer)
	})
}

// TestFaultFrozenFile: who looks at a file that somebody is truncating, while the backing is
// frozen, is answered, and reads it; and who looks at one whose open the backing does not
// answer is, too (C5).
func TestFaultFrozenFile(t *testing.T) {
	need(t, "root", "fuse")
	t.Run("truncated", func(t *testing.T) {
		disk := newImage(t, 16)
		m := disk.mount()
		dirs := map[string][]string{
			"truncate": {"perl", "-e", "truncate('f', 1) or die"}, "ftruncate": {"truncate", "-s", "1", "f"}, "trunc": {"sh", "-c", ": >f"},
		}
		for dir := range dirs {
			openDir(t, m.Back(dir))
			openFile(t, m.Back(dir, "f"), "of before")
			_, err := os.Stat(m.At(dir, "f"))
			mustDo(t, err)
		}
		thaw := disk.freeze()
		defer thaw() // before anything is waited for that is stuck
		waiting := m.waiting()
		var calls []*Proc
		for dir, argv := range dirs {
			cmd := exec.Command(argv[0], argv[1:]...)
			cmd.Dir = m.At(dir)
			calls = append(calls, startCmd(t, cmd))
			eventually(t, "the call is stuck", func() bool { return waiting() >= len(calls) })
			wantServed(t, m.At(dir), 1, "[ $(stat --cached=never -c %s f) = 9 ] && ls -l >/dev/null && grep -q before f && echo x")
		}
		wantStuck(t, calls, thaw)
	})
	t.Run("opened", func(t *testing.T) {
		m := mount(t)
		openDir(t, m.Back("slow"))
		openFile(t, m.Back("slow/f"), "of before")
		_, err := os.Stat(m.At("slow/f"))
		mustDo(t, err)
		slow, answer := stuckOpen(t, m, "slow/f")
		defer answer() // before anything is waited for that is stuck
		wantServed(t, m.At("slow"), 1, "[ $(stat --cached=never -c %s f) = 9 ] && ls -l >/dev/null && chmod 600 f && echo x")
		wantStuck(t, []*Proc{slow}, answer)
	})
}

// TestR4FaultStuckCall: nor does it keep the lock of an owner that dies, whose file goes when
// it can.
func TestR4FaultStuckCall(t *testing.T) {
	need(t, "root", "fuse")
	m := mount(t)
	openDir(t, m.Back("D"))
	openFile(t, m.Back("f"), "x")
	_, err := os.Stat(m.At("f"))
	mustDo(t, err)
	owner, rival := agent(t), agent(t)
	owner.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	slow, answer := stuckOpen(t, m, "f")
	defer answer() // before anything is waited for that is stuck
	defer time.AfterFunc(patience, func() { t.Error("the lock has not ended"); answer() }).Stop()
	owner.Kill()
	m.awaitFree("D")
	rival.must("put", m.At("D/g"), "x", "creat")
	wantStuck(t, []*Proc{slow}, answer)
	eventually(t, "the lock file is gone", func() bool { return !exists(m.Back("D/devserver")) })
}

// TestC5FaultFrozenDead: who only looks at what a dead owner has locked, or at all locks, is
// answered while the backing is frozen, though the lock cannot end; and who wants to lock it can
// be killed.
func TestC5FaultFrozenDead(t *testing.T) {
	disk := newImage(t, 16)
	m := disk.mount()
	openDir(t, m.Back("D"))
	openFile(t, m.Back("D/f"), "x")
	owner, waiter := agent(t), locker(t)
	owner.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	waiter.must("open", "l", m.At("D/devserver"), "rdwr")
	thaw := disk.freeze()
	defer thaw() // before anything is waited for that is stuck
	owner.Kill()
	for i, argv := range [][]string{
		{"ls", "-l", m.At("D")},
		{"stat", m.At("D/devserver")},
		{"cat", m.At("D/devserver")},
		{"cat", m.control("locks")},
		{stagefsBin(), "locks", m.Path},
		{stagefsBin(), "why", m.At("D/f")},
	} {
		p := startCmd(t, exec.Command(argv[0], argv[1:]...))
		eventually(t, fmt.Sprintf("look %d is answered", i), p.over)
		if r := p.Wait(); r.Status != 0 {
			t.Errorf("%q: %v", argv, r)
		}
	}
	rival := agent(t)
	waiter.Start("flock", "l", "ex")
	got := rival.Start("put", m.At("D/x"), "x", "creat")
	time.Sleep(20 * time.Millisecond)
	waiter.Kill()
	thaw()
	if s := got(); s != "ok" {
		t.Errorf("who makes a file there heard %s, want ok", s)
	}
	m.awaitFree("D")
	if exists(m.Back("D/devserver")) {
		t.Error("the lock file is left")
	}
}

// TestR4FaultStuckCallMany: nor does an owner with many locks, whose content is to be destroyed
// when it can be, keep the lock of another one that dies.
func TestR4FaultStuckCallMany(t *testing.T) {
	need(t, "root", "fuse")
	m := mount(t, "--on-crash", "destroy")
	openFile(t, m.Back("f"), "x")
	_, err := os.Stat(m.At("f"))
	mustDo(t, err)
	owner, other := agent(t), agent(t)
	const locks = 80 // half a second for each would be longer than it is waited for
	for i := range locks {
		owner.must("mkdir", m.At("D"+itoa(i)))
		owner.must("creat", m.At("D"+itoa(i), "devserver"), "wronly,creat,excl")
		owner.must("put", m.At("D"+itoa(i), "g"), "x", "creat")
	}
	openDir(t, m.Back("E"))
	other.mustCommand(m, "acquire E on-crash=keep")
	slow, answer := stuckOpen(t, m, "f")
	defer answer() // before anything is waited for that is stuck
	defer time.AfterFunc(patience, func() { t.Error("the lock has not ended"); answer() }).Stop()
	owner.Kill()
	time.Sleep(5 * time.Millisecond) // the daemon has heard of it
	other.Kill()
	m.awaitFree("E")
	rival := agent(t)
	rival.want("EBUSY", "put", m.At("D0/h"), "x", "creat")
	wantStuck(t, []*Proc{slow}, answer)
	for i := range locks {
		m.awaitFree("D" + itoa(i))
		if exists(m.Back("D" + itoa(i))) {
			t.Errorf("what was made in D%d is there still", i)
		}
	}
}

// TestA8FaultStuckCall: nor does it keep who waits for a directory in which it was made, and is
// killed.
func TestA8FaultStuckCall(t *testing.T) {
	need(t, "root", "fuse")
	byTransport(t, func(t *testing.T, opts ...string) {
		m := mount(t, opts...)
		openDir(t, m.Back("D"))
		openFile(t, m.Back("D/slow"), "x")
		openFile(t, m.Back("D/devserver"), "")
		answer, stands := awaitedOpen(t, m.Back("D/slow"))
		defer answer()
		other := agent(t)
		stuck := other.Start("truncate", m.At("D/slow"), "0")
		eventually(t, "the truncation is stuck", stands)
		for _, lock := range [][]string{{"flock", "l", "ex"}, {"setlkw", "l", "wr"}} {
			waiter := locker(t)
			waiter.must("open", "l", m.At("D/devserver"), "rdwr")
			waiter.Start(lock...)
			time.Sleep(50 * time.Millisecond) // it waits
			waiter.Kill()
		}
		answer()
		if got := stuck(); got != "ok" {
			t.Errorf("truncate = %s, want ok", got)
		}
	})
}

// TestS3FaultStuckCall: who breaks what an orphan seems to lock waits for its removal.
func TestS3FaultStuckCall(t *testing.T) {
	need(t, "root", "fuse")
	m := mount(t)
	openDir(t, m.Back("D"))
	openDir(t, m.Back("E"))
	openFile(t, m.Back("f"), "x")
	m.unmounted(func() { openFile(t, m.Back("D/devserver"), "x") })
	eventually(t, "the orphan is listed", func() bool { return len(m.Listing().Orphans) > 0 })
	_, err := os.Stat(m.At("f"))
	mustDo(t, err)
	owner := agent(t)
	owner.must("creat", m.At("E/devserver"), "wronly,creat,excl")
	answer := unansweredOpen(t, m.Back("f"))
	defer answer()
	waiting := m.waiting()
	calls := []*Proc{startCmd(t, exec.Command("cat", m.At("f")))}
	eventually(t, "the open is stuck", func() bool { return waiting() >= 1 })
	calls = append(calls, startCmd(t, exec.Command(stagefsBin(), "break", "--why", "orphan", m.At("D"))))
	eventually(t, "the break is stuck", func() bool { return waiting() >= 2 || calls[1].over() })
	owner.Kill()
	m.awaitFree("E") // which waits for the same thing for a time
	wantStuck(t, calls, answer)
	if _, err := os.Lstat(m.Back("D/devserver")); !os.IsNotExist(err) {
		t.Errorf("the orphan is left: %v", err)
	}
}

// TestFaultStuckReplace: a daemon that waits for its backing is not replaced; all
// else goes on then, those who wait for a lock in their place, and a later
// replacement succeeds.
func TestFaultStuckReplace(t *testing.T) {
	need(t, "root", "fuse")
	for _, transport := range []string{"threads", "uring"} {
		t.Run(transport, func(t *testing.T) {
			needTransport(t, transport)
			t.Setenv("STAGEFS_MOUNT_OPTS", "")
			m := mount(t, "--transport", transport)
			for _, dir := range []string{"slow", "free", "D"} {
				openDir(t, m.Back(dir))
				mustDo(t, os.WriteFile(m.Back(dir+"/f"), []byte("x"), 0o644))
			}
			slow, answer := stuckOpen(t, m, "slow/f")
			defer answer() // before anything is waited for that is stuck
			holder, next := locker(t), locker(t)
			holder.must("open", "l", m.At("D", "devserver"), "rdwr,creat")
			holder.must("flock", "l", "ex")
			next.must("open", "l", m.At("D", "devserver"), "rdwr,creat")
			got := next.Start("flock", "l", "ex")
			m.awaitWaiters("D", 1)

			wantRefusal(t, "75", []string{"cannot be replaced", "backing", "try again", "serves on"}, "mount", "--replace", m.Path)
			mustDo(t, os.WriteFile(m.At("free", "g"), []byte("x"), 0o644))
			holder.must("put", m.At("D", "g"), "held", "wronly,creat")
			if slow.over() {
				t.Error("what was stuck has ended")
			}
			m.awaitWaiters("D", 1)
			holder.must("flock", "l", "un")
			if s := got(); s != "ok" {
				t.Errorf("the one who waited: %s", s)
			}
			answer()
			if r := slow.Wait(); r.Status != 0 || r.Out != "x" {
				t.Errorf("the one who was stuck: %v", r)
			}
			m.replace()
			next.must("put", m.At("D", "g"), "next", "wronly,trunc")
		})
	}
}

// unansweredOpen has whoever opens a file wait until answer is called, or this
// process ends.
func unansweredOpen(t *testing.T, file string) (answer func()) {
	t.Helper()
	answer, _ = awaitedOpen(t, file)
	return answer
}

// stuckOpen starts a program that opens a file, and is stuck there until answer.
func stuckOpen(t *testing.T, m *Mount, file string) (slow *Proc, answer func()) {
	t.Helper()
	answer, came := awaitedOpen(t, m.Back(file))
	slow = startCmd(t, exec.Command("cat", m.At(file)))
	t.Cleanup(answer) // or it could not be ended
	eventually(t, "the open is stuck", came)
	return slow, answer
}

// awaitedOpen is unansweredOpen, and came reports whether somebody opens it.
func awaitedOpen(t *testing.T, file string) (answer func(), came func() bool) {
	t.Helper()
	fd, err := unix.FanotifyInit(unix.FAN_CLASS_CONTENT|unix.FAN_CLOEXEC, unix.O_RDONLY)
	if err == nil {
		err = unix.FanotifyMark(fd, unix.FAN_MARK_ADD, unix.FAN_OPEN_PERM, unix.AT_FDCWD, file)
	}
	if err != nil {
		t.Fatalf("fanotify(7) has no permission events here: %v", err)
	}
	var once sync.Once
	return func() { once.Do(func() { unix.Close(fd) }) }, func() bool {
		n, _ := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return n > 0
	}
}

// over reports whether the program has ended.
func (p *Proc) over() bool { return isShut(p.done) }

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

// TestFaultFrozenReplace: a daemon that waits for its backing to remove a dead owner's lock
// file is not replaced, and serves on.
func TestFaultFrozenReplace(t *testing.T) {
	disk := newImage(t, 16)
	t.Setenv("STAGEFS_MOUNT_OPTS", "")
	m := disk.mount("--transport=threads")
	openDir(t, m.Back("D"))
	openDir(t, m.Back("E"))
	openFile(t, m.Back("E/f"), "x")
	owner := agent(t)
	owner.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	thaw := disk.freeze()
	defer thaw()
	owner.Kill()
	defer time.AfterFunc(patience, func() { t.Error("the daemon does not serve"); thaw() }).Stop()
	wantRefusal(t, "75", []string{"cannot be replaced", "backing", "try again", "serves on"}, "mount", "--replace", m.Path)
	if b, err := os.ReadFile(m.At("E/f")); err != nil || string(b) != "x" {
		t.Errorf("who only looks: %q, %v", b, err)
	}
	thaw()
	m.awaitFree("D")
	m.replace()
}
