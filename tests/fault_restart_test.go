//go:build linux

package tests

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// restated changes the lines of what the daemon has recorded, and says how many.
func (m *Mount) restated(change func(string) string) (n int) {
	m.t.Helper()
	files, _ := filepath.Glob(filepath.Join(m.State, "*.[jl]o*.*"))
	for _, file := range files {
		b, err := os.ReadFile(file)
		mustDo(m.t, err)
		var out bytes.Buffer
		for line := range strings.Lines(string(b)) {
			if now := change(line); now != line {
				n++
				line = now
				sum, rest, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
				if _, err := strconv.ParseUint(sum, 16, 32); len(sum) == 8 && err == nil {
					line = fmt.Sprintf("%08x %s\n", crc32.Checksum([]byte(rest), crc32.MakeTable(crc32.Castagnoli)), rest)
				}
			}
			out.WriteString(line)
		}
		mustDo(m.t, os.WriteFile(file, out.Bytes(), 0o600))
	}
	return n
}

// TestFaultNewerState: a daemon that does not understand what another one has
// recorded refuses to start and says what to do. The one that does has all of it
// afterwards: the locks, and what is still open past the dead mount.
func TestFaultNewerState(t *testing.T) {
	for _, c := range []struct{ name, old, now string }{
		{"kind", `"kind":0`, `"kind":7`},
		{"header", "stagefs-locks 1", "stagefs-locks 2"},
		{"line", "P ", "Q "},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := mountOver(t)
			needPassthrough(m)
			a, writer, rival := agent(t), agent(t), stranger(t)
			a.must("mkdir", m.At("A"))
			mustDo(t, os.Mkdir(m.At("keep"), 0o777))
			openDir(t, m.At("D"))
			m.Ctl("release D")
			writer.must("open", "h", m.At("D/file"), "rdwr,creat")
			before := m.Locks()
			m.kill()
			swap := func(old, now string) int {
				return m.restated(func(line string) string { return strings.Replace(line, old, now, 1) })
			}
			if swap(c.old, c.now) == 0 {
				t.Fatalf("nothing recorded has %q", c.old)
			}
			for range 2 {
				wantRefusal(t, "69", []string{"newer version", "move these files away"}, "mount", "--state-dir", m.State, m.Dir)
			}
			swap(c.now, c.old)
			m.start(nil)
			m.awaitReady()
			after := m.Locks()
			for dir, row := range before {
				if after[dir].Token != row.Token || after[dir].Pid != row.Pid {
					t.Errorf("%s: %+v, want %+v", dir, after[dir], row)
				}
			}
			rival.want("EBUSY", "mkdir", m.At("A/x"))
			rival.want("EEXIST", lockIt(m)...)
			writer.Try("close", "h")
			eventually(t, "what nobody writes to can be had", func() bool { return rival.Try(lockIt(m)...) == "ok" })
		})
	}
}

// TestFaultNewerStateReplace: nor does a program that is to go on in the place of a
// newer version's daemon touch what it does not understand.
func TestFaultNewerStateReplace(t *testing.T) {
	for _, c := range []struct{ name, old, now string }{
		{"header", "stagefs-locks 1", "stagefs-locks 2"},
		{"line", "P ", "Q "},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := mountOver(t)
			a := agent(t)
			a.must("mkdir", m.At("A"))
			before := m.Locks()
			swap := func(old, now string) int {
				return m.restated(func(line string) string { return strings.Replace(line, old, now, 1) })
			}
			if swap(c.old, c.now) == 0 {
				t.Fatalf("nothing recorded has %q", c.old)
			}
			m.wantStatus(69, "", "mount", "--replace", m.Path)
			<-m.gone
			wantRefusal(t, "69", []string{"newer version", "move these files away"}, "mount", "--state-dir", m.State, m.Dir)
			swap(c.now, c.old)
			m.start(nil)
			m.awaitReady()
			if after := m.Locks(); after["A"].Token != before["A"].Token || after["A"].Pid != before["A"].Pid {
				t.Errorf("locks: %+v, want %+v", after, before)
			}
		})
	}
}

// TestFaultRestartDescriptors: daemons that are short of descriptors when they
// start do not start, or serve what there is; whoever has been tried, the next
// one gives each owner back what it had.
func TestFaultRestartDescriptors(t *testing.T) {
	m := mountOver(t)
	var owners []*Agent
	for i := range 40 {
		a := agent(t)
		a.must("mkdir", m.At("D"+itoa(i)))
		if i%2 == 0 {
			a.must("creat", m.At("D"+itoa(i), "devserver"), "wronly,creat,excl")
		}
		owners = append(owners, a)
	}
	before := m.Locks()
	m.kill()
	ended := map[string]int{}
	for _, files := range []int{16, 20, 24, 28, 34, 40, 50, 60, 80, 100} {
		cmd := exec.Command("/bin/sh", "-c", `ulimit -n "$1"; exec timeout -s KILL 2 "$2" mount --state-dir "$3" "$4"`,
			"sh", itoa(files), stagefsBin(), m.State, m.Dir)
		r := runCmd(t, cmd)
		ended[itoa(r.Status)]++
	}
	t.Logf("%v", ended)
	m.start(nil)
	m.awaitReady()
	after := m.Locks()
	for dir, row := range before {
		if after[dir].Token != row.Token || after[dir].Pid != row.Pid {
			t.Errorf("%s: token %d of pid %d, want %d of %d", dir, after[dir].Token, after[dir].Pid, row.Token, row.Pid)
		}
	}
	for i, a := range owners {
		a.must("put", m.At("D"+itoa(i), "more"), "x", "creat")
	}
}

// TestFaultStartDescriptors: a daemon in the background that is short of descriptors
// serves, or says so and leaves no mount: who started it hears one or the other.
func TestFaultStartDescriptors(t *testing.T) {
	need(t, "root", "fuse")
	for files := 16; files <= 26; files++ {
		dir := staticDir(t)
		m := newMount(t, dir, dir)
		cmd := exec.Command("/bin/sh", "-c", `ulimit -n "$1"; exec timeout 10 "$2" mount -d --state-dir "$3" "$4"`,
			"sh", itoa(files), stagefsBin(), m.State, m.Dir)
		r := runCmd(t, cmd)
		mounted := mountedAt(m.Dir)
		switch {
		case r.Status == 0 && mounted:
			run(t, stagefsBin(), "umount", m.Dir)
		case r.Status == 71 && !mounted && strings.Contains(r.Err, "ulimit -Hn"):
		default:
			unix.Unmount(m.Dir, unix.MNT_DETACH)
			t.Errorf("with %d descriptors: %v, mounted: %v", files, r, mounted)
		}
	}
}

// TestFaultRestartOwners: a daemon whose limit on descriptors can't be raised gives out
// no more locks than the next one, which has that limit as well, can restore.
func TestFaultRestartOwners(t *testing.T) {
	need(t, "root", "fuse", "setpriv", "perl")
	dir := staticDir(t)
	m := newMount(t, dir, dir)
	m.cmdBin = filepath.Join(tempDir(t), "limited")
	writeProgram(t, m.cmdBin, []byte("#!/bin/sh\nulimit -n 200\nexec setpriv --bounding-set=-sys_resource "+stagefsBin()+" \"$@\"\n"))
	m.serve()
	const owners = 220
	cmd := exec.Command("perl", "-e", `
$| = 1;
for my $i (1 .. shift) {
	pipe(my $r, my $w);
	defined(my $pid = fork()) or die;
	if (!$pid) {
		my $got = mkdir("O$i") ? "got" : $!{ENFILE} ? "full" : "failed: $!";
		syswrite($w, "$got\n");
		sleep;
	}
	push @all, $pid;
	print scalar <$r>;
}
print "done\n";
<STDIN>;
kill 9, @all`, itoa(owners))
	cmd.Dir = m.Path
	in, err := cmd.StdinPipe()
	mustDo(t, err)
	out, err := os.Create(filepath.Join(tempDir(t), "out"))
	mustDo(t, err)
	defer out.Close()
	cmd.Stdout = out
	crowd := startCmd(t, cmd)
	t.Cleanup(func() { in.Close(); crowd.Wait() })
	said := func() string { b, _ := os.ReadFile(out.Name()); return string(b) }
	eventually(t, "each has tried", func() bool { return strings.HasSuffix(said(), "done\n") })
	got, full := strings.Count(said(), "got\n"), strings.Count(said(), "full\n")
	if got < owners/3 || full == 0 || got+full != owners {
		t.Errorf("%d of %d have a lock, %d heard ENFILE: %s", got, owners, full, said())
	}
	before := m.Locks()
	m.restart(nil)
	if after := m.Locks(); len(after) != len(before) {
		t.Errorf("%d locks after a restart, want %d", len(after), len(before))
	}
	in.Close()
	crowd.Wait()
	eventually(t, "the locks end with their owners", func() bool { return len(m.Locks()) == 0 })
}

// TestFaultRestartUnreadable: what a new daemon cannot look at, because its disk
// is bad there, still is who had it: it ends as any lock does.
func TestFaultRestartUnreadable(t *testing.T) {
	need(t, "debugfs")
	disk := newImage(t, 8)
	loop := strings.TrimSpace(run(t, "losetup", "-f", "--show", disk.file).Out)
	t.Cleanup(func() { run(t, "losetup", "-d", loop) })
	again := func() { mustDo(t, unix.Mount(loop, disk.Dir, "ext4", 0, "")) }
	mustDo(t, unix.Unmount(disk.Dir, 0))
	again()
	m := disk.mount()
	holder, rival := agent(t), stranger(t)
	openDir(t, m.Back("D"))
	holder.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	holder.must("mkdir", m.At("E"))
	before := m.Locks()
	if r := run(t, stagefsBin(), "umount", m.Path); r.Status != 0 {
		t.Fatal(r)
	}
	<-m.gone
	mustDo(t, unix.Unmount(disk.Dir, 0))
	for _, dir := range []string{"D", "E"} { // one that has no link is a bad one
		if r := run(t, "debugfs", "-w", "-R", "sif /static/"+dir+" links_count 0", loop); r.Status != 0 {
			t.Fatal(r)
		}
	}
	again()
	if _, err := os.Stat(m.Back("E")); err == nil || os.IsNotExist(err) {
		t.Fatalf("stat of what is damaged: %v", err)
	}
	m.start(nil)
	m.awaitReady()
	after := m.Locks()
	for dir, row := range before {
		if after[dir].Token != row.Token || after[dir].Pid != row.Pid {
			t.Errorf("%s: token %d of pid %d, want %d of %d", dir, after[dir].Token, after[dir].Pid, row.Token, row.Pid)
		}
	}
	rival.Try("mkdir", m.At("E/x"))
	holder.Kill()
	m.awaitFree("D")
	m.awaitFree("E")
}
