//go:build linux

package tests

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// needPassthrough skips the test where the kernel cannot go to the backing
// itself, or is not to.
func needPassthrough(m *Mount) {
	m.t.Helper()
	if m.metric("passthrough") == 0 {
		m.t.Skip("no passthrough here")
	}
}

// TestPassthroughMetric: metrics tell whether data passes the daemon by, which then hears of
// no write.
func TestPassthroughMetric(t *testing.T) {
	for _, opts := range [][]string{nil, {"--no-passthrough"}} {
		m := mount(t, opts...)
		a := agent(t)
		a.must("open", "h", m.At("file"), "rdwr,creat")
		before := m.requests()["write"]
		a.must("write", "h", "content")
		want := 0
		if m.requests()["write"] == before {
			want = 1
		}
		if got := m.metric("passthrough"); got != want {
			t.Errorf("%q: stagefs_passthrough is %d, want %d", opts, got, want)
		}
	}
}

// lockIt is how an agent takes D.
func lockIt(m *Mount) []string { return []string{"creat", m.At("D/devserver"), "wronly,creat,excl"} }

// TestW3Mapping: a writable mapping whose descriptor is closed stands in the way
// of an acquisition, and is listed, until it is gone: by munmap(2) or a kill. Also one
// of a descriptor by which read(2) and write(2) go through the daemon.
func TestW3Mapping(t *testing.T) {
	for _, end := range []string{"munmap", "kill", "rename", "unlink", "munmap,append", "kill,direct"} {
		t.Run(end, func(t *testing.T) {
			end, flag, _ := strings.Cut(end, ",")
			m := mount(t)
			openDir(t, m.Back("D"))
			openFile(t, m.Back("D/file"), "content of the file")
			a, b := agent(t), agent(t)
			a.must("open", "h", m.At("D/file"), strings.TrimSuffix("rdwr,"+flag, ","))
			a.must("mmap", "map", "h")
			a.must("close", "h")
			b.want("EEXIST", lockIt(m)...)
			b.want("EEXIST", lockIt(m)...) // also when asked a second time
			a.must("poke", "map", "CONTENT")
			switch end {
			case "munmap":
				a.must("munmap", "map")
			case "kill":
				a.Kill()
			case "rename": // what is mapped is not beneath D any more
				b.must("rename", m.At("D/file"), m.At("file"))
			case "unlink":
				b.must("unlink", m.At("D/file"))
			}
			b.must(lockIt(m)...)
			if end == "rename" {
				openDir(t, m.Back("E"))
				b.want("EBUSY", "rename", m.At("file"), m.At("D/again"))
				b.must("rename", m.At("file"), m.At("E/again"))
				b.want("EEXIST", "creat", m.At("E/devserver"), "wronly,creat,excl")
				a.must("munmap", "map")
				b.must("rename", m.At("E/again"), m.At("D/again"))
			}
			b.must("unlink", m.At("D/devserver"))
		})
	}
}

// TestR8Mapping: the listing shows a mapping that is left.
func TestR8Mapping(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	openFile(t, m.Back("D/file"), "content of the file")
	a := agent(t)
	a.must(lockIt(m)...)
	a.must("open", "h", m.At("D/file"), "rdwr")
	a.must("mmap", "map", "h")
	a.must("close", "h")
	a.must("unlink", m.At("D/devserver"))
	m.awaitFree("D")
	found := m.Listing().Blockers
	if len(found) != 1 || found[0].Pid != a.Pid || found[0].Path != "D/file" {
		t.Errorf("blockers: %+v, want pid %d with D/file", found, a.Pid)
	}
	a.must("munmap", "map")
	agent(t).must(lockIt(m)...)
	if n := len(m.Listing().Blockers); n != 0 {
		t.Errorf("%d blockers after munmap, want 0", n)
	}
}

// TestR8Restart: also of files that were open when the daemon was killed, the listing
// shows who has them, by a descriptor or a mapping alone.
func TestR8Restart(t *testing.T) {
	m := mountOver(t)
	needPassthrough(m)
	openDir(t, m.At("D"))
	if s := m.Ctl("release D"); s != "ok" {
		t.Fatal(s)
	}
	openFile(t, m.At("D/file"), "content of the file")
	openFile(t, m.At("D/other file"), "content of the file")
	a := agent(t)
	opened, mapped := a.Child(), a.Child()
	a.must(lockIt(m)...)
	opened.must("open", "h", m.At("D/file"), "wronly")
	mapped.must("open", "h", m.At("D/other file"), "rdwr")
	mapped.must("mmap", "map", "h")
	mapped.must("close", "h")
	mapped.must("open", "read", m.At("D/file"), "rdonly")
	reader, err := os.Open(m.At("D/file")) // a mapping that only reads is in nobody's way
	mustDo(t, err)
	page, err := unix.Mmap(int(reader.Fd()), 0, os.Getpagesize(), unix.PROT_READ, unix.MAP_SHARED)
	mustDo(t, err)
	defer unix.Munmap(page)
	mustDo(t, reader.Close())
	m.restart(nil)
	a.must("unlink", m.At("D/devserver"))
	b := agent(t)
	b.want("EEXIST", lockIt(m)...)
	want := map[string]int{"D/file": opened.Pid, "D/other file": mapped.Pid}
	found := m.Listing().Blockers
	for _, is := range found {
		if want[is.Path] != is.Pid || is.Cmd == "" {
			t.Errorf("blocker %+v, want pid %d", is, want[is.Path])
		}
	}
	if len(found) != len(want) {
		t.Errorf("blockers: %+v, want %v", found, want)
	}
	opened.Kill()
	mapped.must("munmap", "map")
	b.must(lockIt(m)...)
}

// mapper maps what it is told to, closes the descriptors and says so; the second
// argument says what it does then.
const mapper = `
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
how, paths = sys.argv[1], sys.argv[2:]
at = []
for p in paths:
    fd = os.open(p, os.O_RDWR)
    a = libc.mmap(None, 4096, 1 if how == "mprotect" else 3, 1, fd, 0)
    if a in (None, ctypes.c_void_p(-1).value):
        sys.exit("mmap: " + os.strerror(ctypes.get_errno()))
    os.close(fd)
    at.append(a)
if how == "fork":
    if os.fork():
        os._exit(0)
if how == "mremap":
    at = [libc.mremap(a, 4096, 8192, 1) for a in at]
print("mapped", flush=True)
sys.stdin.readline()
if how == "mprotect":
    for a in at:
        libc.mprotect(a, 4096, 3)
for a in at:
    ctypes.memset(a, 0x58, 1)
print("written", flush=True)
sys.stdin.readline()
`

// TestW3Mapped: the mapping stands in the way wherever it went: to a forked
// child whose parent is dead, elsewhere by mremap(2), or first for reading only.
func TestW3Mapped(t *testing.T) {
	for _, how := range []string{"fork", "mremap", "mprotect"} {
		t.Run(how, func(t *testing.T) {
			need(t, "python3")
			m := mount(t)
			openDir(t, m.Back("D"))
			openFile(t, m.Back("D/file"), "content of the file")
			cmd := exec.Command("python3", "-c", mapper, how, m.At("D/file"))
			in, out := pipes(t, cmd)
			startCmd(t, cmd)
			out("mapped")
			b := agent(t)
			b.want("EEXIST", lockIt(m)...)
			fmt.Fprintln(in)
			out("written")
			b.want("EEXIST", lockIt(m)...)
			if got := b.Get("read", m.At("D/file")); got != "Xontent of the file" {
				t.Errorf("the file is %q after a write to the mapping", got)
			}
			in.Close() // it ends
			eventually(t, "D can be acquired", func() bool { return b.Try(lockIt(m)...) == "ok" })
		})
	}
}

// pipes returns the command's standard input, and what waits for a line of its
// output.
func pipes(t *testing.T, cmd *exec.Cmd) (*os.File, func(want string)) {
	t.Helper()
	r, in, err := os.Pipe()
	mustDo(t, err)
	o, w, err := os.Pipe()
	mustDo(t, err)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = r, w, os.Stderr
	t.Cleanup(func() {
		for _, f := range []*os.File{r, in, o, w} {
			f.Close()
		}
	})
	lines := bufio.NewScanner(o)
	return in, func(want string) {
		t.Helper()
		if !lines.Scan() || lines.Text() != want {
			t.Fatalf("it says %q, want %q", lines.Text(), want)
		}
	}
}

// TestW3ManyMappings: thousands of files that are mapped and closed all stand in
// the way, and cost the daemon no descriptor each.
func TestW3ManyMappings(t *testing.T) {
	need(t, "python3")
	const files = 3000
	m := mount(t)
	needPassthrough(m)
	openDir(t, m.Back("D"))
	args := []string{"-c", mapper, "many"}
	for i := range files {
		path := fmt.Sprintf("D/%d", i)
		openFile(t, m.Back(path), "content")
		args = append(args, m.At(path))
	}
	cmd := exec.Command("python3", args...)
	in, out := pipes(t, cmd)
	startCmd(t, cmd)
	out("mapped")
	eventually(t, "all linger", func() bool { return m.metric("lingering") == files })
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", m.cmd.Process.Pid))
	mustDo(t, err)
	if len(fds) > 200 {
		t.Errorf("the daemon has %d descriptors open for %d mapped files", len(fds), files)
	}
	b := agent(t)
	b.want("EEXIST", lockIt(m)...)
	in.Close()
	eventually(t, "D can be acquired", func() bool { return b.Try(lockIt(m)...) == "ok" })
	if n := m.metric("lingering"); n != 0 {
		t.Errorf("%d files linger still", n)
	}
}

// TestW3OpenRace: strangers open, map, close and write files of a directory
// while another process acquires it: what it holds stands still.
func TestW3OpenRace(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	openFile(t, m.Back("D/file"), "content of the file")
	file, locker := m.At("D/file"), agent(t)
	rival := func(a *Agent, flags string) *storm {
		return a.storm([]string{"open", "h", file, flags}, []string{"mmap", "m", "h"}, []string{"close", "h"},
			[]string{"poke", "m", "RIVAL"}, []string{"munmap", "m"})
	}
	storms := []*storm{rival(stranger(t), "rdwr"), rival(agent(t), "rdwr")}
	for range 5 {
		locker.must("until", "creat", m.At("D/devserver"), "wronly,creat,excl")
		still(t, m, "D", "while it is held", 10, storms...)
		locker.must("unlink", m.At("D/devserver"))
		await(t, 10, storms...)
	}
	for _, s := range storms {
		for what := range s.over() {
			if what == "open EAGAIN" || what == "open EWOULDBLOCK" || what == "open EIO" {
				t.Errorf("a rival saw %q", what)
			}
		}
	}
}

// TestW3Crash: what passed the daemon goes on after its death; the next daemon
// knows of it.
func TestW3Crash(t *testing.T) {
	for _, flags := range []string{"rdwr", "rdwr,append", "rdwr,direct"} {
		t.Run(flags, func(t *testing.T) {
			m := mountOver(t)
			needPassthrough(m)
			a, b := agent(t), agent(t)
			mustDo(t, os.Mkdir(m.At("keep"), 0o777)) // the test's own lock: D stays free
			openDir(t, m.At("D"))
			b.must("put", m.At("D/file"), "content of the file", "creat")
			a.must("open", "first", m.At("D/file"), "rdwr") // with direct alone, it would not pass
			a.must("open", "h", m.At("D/file"), flags)
			a.must("close", "first")
			a.must("mmap", "map", "h")
			m.kill()
			m.start(nil)
			m.awaitReady()
			a.must("poke", "map", "CONTENT")
			b.want("EEXIST", lockIt(m)...)
			a.Try("close", "h")
			b.want("EEXIST", lockIt(m)...)
			a.must("munmap", "map")
			b.must(lockIt(m)...)
		})
	}
}

// TestW3CrashUntyped: likewise beneath directories of a file system that has no types in them.
func TestW3CrashUntyped(t *testing.T) {
	m := newImage(t, 64, "-O", "^filetype").mount()
	needPassthrough(m)
	a, b := agent(t), agent(t)
	mustDo(t, os.Mkdir(m.At("keep"), 0o777))
	openDir(t, m.Back("D"))
	openDir(t, m.Back("D/sub"))
	a.must("open", "h", m.At("D/sub/file"), "rdwr,creat")
	m.kill()
	m.start(nil)
	m.awaitReady()
	b.want("EEXIST", lockIt(m)...)
	a.Try("close", "h")
	eventually(t, "what nobody writes to can be had", func() bool { return b.Try(lockIt(m)...) == "ok" })
}

// TestM2BusyExecutable: what is mapped writable cannot be executed, and what is
// executed cannot be opened for writing.
func TestM2BusyExecutable(t *testing.T) {
	m := mount(t)
	sleep, err := exec.LookPath("sleep")
	mustDo(t, err)
	data, err := os.ReadFile(sleep)
	mustDo(t, err)
	openDir(t, m.Back("D"))
	path := m.At("D/sleep")
	writeProgram(t, path, data)
	a := agent(t)
	a.must("open", "h", path, "rdwr")
	if err := exec.Command(path, "0").Run(); err == nil {
		t.Errorf("it was executed while it was open for writing")
	}
	a.must("mmap", "map", "h")
	a.must("close", "h")
	if err := exec.Command(path, "0").Run(); err == nil {
		t.Errorf("it was executed while it was mapped writable")
	}
	a.must("munmap", "map")
	p := startCmd(t, exec.Command(path, "60"))
	a.want("ETXTBSY", "open", "h", path, "wronly")
	p.Kill()

	// Nor does a writer that has closed it keep anybody from that, while another has
	// it open by which nothing can be written.
	a.must("open", "emptied", path, "rdonly,trunc")
	a.must("open", "h", path, "rdwr")
	a.must("write", "h", "#!/bin/true\n")
	a.must("close", "h")
	if err := exec.Command(path).Run(); err != nil {
		t.Errorf("what nobody has open for writing was not executed: %v", err)
	}
}

// TestW3CrashMoved: where files are still open is recorded wherever a rename
// took them, and however long ago they were opened.
func TestW3CrashMoved(t *testing.T) {
	m := mountOver(t, "--depth", "2")
	a := agent(t)
	for _, d := range []string{"b", "b/from", "b/dir", "b/dir/sub", "other"} {
		a.must("mkdir", m.At(d))
		m.Ctl("release " + d)
	}
	for name, path := range map[string]string{"file": "b/from/f", "deep": "b/dir/sub/f", "top": "b/f", "still": "b/from/still"} {
		a.must("open", name, m.At(path), "rdwr,creat")
	}
	time.Sleep(2500 * time.Millisecond) // longer than a directory stays recorded after the last close
	a.must("rename", m.At("b/from/f"), m.At("other/f"))
	a.must("rename", m.At("b/dir"), m.At("other/dir"))
	time.Sleep(2500 * time.Millisecond)
	m.restart(nil, "--depth", "2")
	b := agent(t)
	for _, dir := range []string{"b/from", "other", "other/dir", "other/dir/sub", "b"} {
		b.want("EBUSY", "put", m.control("ctl"), "acquire "+dir+"\n", "wronly")
	}
	a.Kill()
	for _, dir := range []string{"b/from", "other/dir"} {
		eventually(t, dir+" can be had", func() bool { return b.Try("put", m.control("ctl"), "acquire "+dir+"\n", "wronly") == "ok" })
	}
}

// TestW6Passing: what a reader from before a lease stands in the way of is refused to
// the holder, who is told who that is.
func TestW6Passing(t *testing.T) {
	m := mount(t)
	needPassthrough(m)
	openDir(t, m.Back("D"))
	openFile(t, m.Back("D/big"), strings.Repeat("x", 300<<10))
	reader, holder := agent(t), agent(t)
	reader.must("open", "h", m.At("D/big"), "rdonly")
	holder.mustCommand(m, "acquire D client=c7 ttl=1h")
	holder.want("EBUSY", "open", "h", m.At("D/big"), "rdwr")
	found := m.Denials()
	if len(found) != 1 || found[0].Pid != holder.Pid || found[0].Op != "open" || found[0].Path != "D/big" || found[0].Errno != "EBUSY" {
		t.Errorf("denials: %+v, want the one of pid %d", found, holder.Pid)
	}
	m.wantWhy("D/big", fmt.Sprintf("pid %d opened it for reading", reader.Pid))
	holder.must("open", "w", m.At("D/big"), "wronly")
	holder.must("pwrite", "w", "y", "1", "0")
	holder.must("close", "w")
	reader.must("close", "h")
	holder.must("open", "h", m.At("D/big"), "rdwr")
}

// TestM2DirectByFcntl: what fcntl(2) makes of O_DIRECT after the open counts where
// data goes through the daemon.
func TestM2DirectByFcntl(t *testing.T) {
	m := mount(t, "--no-passthrough")
	fd, err := unix.Open(m.At("f"), unix.O_RDWR|unix.O_CREAT, 0o666)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	for _, c := range []struct {
		flags int
		want  error
	}{{unix.O_DIRECT, unix.EINVAL}, {0, nil}} {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFL, c.flags); err != nil {
			t.Fatal(err)
		}
		if _, err := unix.Pwrite(fd, alignedBuffer(1000), 3); err != c.want {
			t.Errorf("pwrite of 1000 bytes at 3 with flags %#x = %v, want %v", c.flags, err, c.want)
		}
	}
}

// TestM2FcntlTakesOff: who opens a file with O_DIRECT or O_APPEND, and takes that off
// with fcntl(2), writes where and how much it likes, as dd(1) does with the last block.
// At the end of the file nothing is read from any offset.
func TestM2FcntlTakesOff(t *testing.T) {
	for _, options := range [][]string{nil, {"--no-passthrough"}} {
		t.Run(fmt.Sprint(options), func(t *testing.T) {
			m := mount(t, options...)
			tail := strings.Repeat("t", 500)
			for name, flag := range map[string]int{"direct": unix.O_DIRECT, "append": unix.O_APPEND} {
				fd, err := unix.Open(m.At(name), unix.O_RDWR|unix.O_CREAT|flag, 0o666)
				mustDo(t, err)
				defer unix.Close(fd)
				block := alignedBuffer(4096)
				_, err = unix.Pwrite(fd, block, 0)
				mustDo(t, err)
				_, err = unix.FcntlInt(uintptr(fd), unix.F_SETFL, 0)
				mustDo(t, err)
				for _, at := range []int64{4096, 0} {
					if _, err := unix.Pwrite(fd, []byte(tail), at); err != nil {
						t.Errorf("%s taken off: pwrite of 500 bytes at %d = %v", name, at, err)
					}
				}
				_, err = unix.FcntlInt(uintptr(fd), unix.F_SETFL, flag)
				mustDo(t, err)
				if n, err := unix.Pread(fd, block, 4596); n != 0 || err != nil {
					t.Errorf("%s: pread at the end = %d, %v, want 0", name, n, err)
				}
				want := tail + strings.Repeat("\x00", 4096-500) + tail
				if got, err := os.ReadFile(m.Back(name)); string(got) != want {
					t.Errorf("%s: %d bytes that begin with %.20q, %v; want %d with %.20q", name, len(got), got, err, len(want), want)
				}
			}
			r := run(t, "dd", "if=/dev/zero", "of="+m.At("dd"), "bs=64k", "count=100500", "iflag=count_bytes", "oflag=direct")
			if got, err := os.Stat(m.Back("dd")); r.Status != 0 || err != nil || got.Size() != 100500 {
				t.Errorf("dd oflag=direct: %v, %v", r, err)
			}
			if r := run(t, "dd", "if="+m.At("dd"), "of=/dev/null", "bs=64k", "iflag=direct"); r.Status != 0 {
				t.Errorf("dd iflag=direct: %v", r)
			}
		})
	}
}
