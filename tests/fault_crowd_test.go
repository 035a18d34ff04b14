//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// forkedCrowd forks $n processes which all want D, in one of three protocols; each
// that has it looks whether it is alone, notes its turn, and leaves it. They
// are copies of one small process, so that ten thousand find room.
const forkedCrowd = `
use Errno;
use Fcntl qw(:flock :DEFAULT);
my ($by, $n, $witness, $idle) = @ARGV;
$| = 1;
sub turn {
	return if $idle;
	mkdir "$witness/in" or print STDERR "two at once: $!\n";
	sysopen(my $t, "D/turns", O_WRONLY|O_APPEND) or die "turns: $!";
	syswrite($t, "x") == 1 or die "turns: $!";
	rmdir "$witness/in" or print STDERR "two at once: $!\n";
}
sub one {
	if ($by eq "mkdir") {
		select(undef, undef, undef, 1 + rand) until mkdir "D/devserver.lock";
		turn();
		rmdir "D/devserver.lock" or die "rmdir: $!";
		return;
	}
	my $l;
	until (sysopen($l, "D/devserver", O_RDWR)) {
		$!{ENFILE} or die "open: $!"; # as many have it open as the daemon may
		select(undef, undef, undef, 0.2 + rand);
	}
	if ($by eq "flock") {
		flock($l, LOCK_EX) or die "flock: $!";
	} else {
		my $whole = pack("s s x4 q q i x4", F_WRLCK, 0, 0, 0, 0);
		fcntl($l, F_SETLKW, $whole) or die "fcntl: $!";
	}
	turn();
}
for (1 .. $n) {
	my $pid = fork;
	defined $pid or die "fork: $!";
	next if $pid;
	eval { one(); 1 } or print STDERR $@;
	syscall(231, 0); # exit_group
}
print "started\n";
my $failed = 0;
while (wait != -1) { $failed++ if $? }
print "$failed failed\n";
`

// TestFaultCrowdForked: very many processes, each with one thing to do in one
// directory, all have their turn, one at a time, whatever protocol they speak;
// or are killed, and gone. Meanwhile others create files as ever.
func TestFaultCrowdForked(t *testing.T) {
	need(t, "root", "fuse", "perl")
	n := *crowdFlag
	for _, transport := range transports[:2] {
		for _, by := range []string{"flock", "fcntl", "mkdir"} {
			t.Run(transport+" "+by, func(t *testing.T) {
				m, crowd, said, release := mountCrowd(t, transport, by, n)
				beside := m.createMeanwhile(t, 100, nil)
				threads, files, memory := threadsOf(t, m.cmd.Process.Pid), m.openFiles(), m.resident()
				began := time.Now()
				release()
				turns := m.createMeanwhile(t, 0, crowd.done)
				took := time.Since(began)
				if r := crowd.Wait(); r.Status != 0 || r.Err != "" || said() != "started\n0 failed\n" {
					t.Errorf("the crowd: %.2000v", r)
				}
				if b, err := os.ReadFile(m.Back("D/turns")); len(b) != n {
					t.Errorf("%d turns, %v, want %d", len(b), err, n)
				}
				m.awaitFree("D")
				eventually(t, "nobody waits", func() bool { return len(m.Listing().Waiters) == 0 })
				t.Logf("%d processes: %d threads, %d descriptors, %d MiB; all had it %v after its release; create beside them while they wait: median %v, worst %v; during the turns: %d, median %v, worst %v; then %d threads, %d descriptors, %d MiB",
					n, threads, files, memory>>20, took.Round(time.Millisecond), beside[len(beside)/2], beside[len(beside)-1],
					len(turns), turns[len(turns)/2], turns[len(turns)-1], threadsOf(t, m.cmd.Process.Pid), m.openFiles(), m.resident()>>20)
				if threads > 200 {
					t.Errorf("the daemon has %d threads", threads)
				}
			})
			if by == "mkdir" {
				continue // who only asks now and then leaves nothing to clear
			}
			t.Run(transport+" "+by+" killed", func(t *testing.T) {
				m, crowd, _, release := mountCrowd(t, transport, by, n)
				began := time.Now()
				killGroup(t, crowd)
				m.awaitLine(0)
				t.Logf("%d processes that were killed are gone after %v", n, time.Since(began).Round(time.Millisecond))
				release()
				m.awaitFree("D")
				agent(t).must("creat", m.At("D", "devserver.lock"), "wronly,creat,excl")
			})
		}
	}
}

// TestFaultCrowdSiblings: the lock of one of a crowd that changes nothing, and exits with
// status 0, may be their parent's for a moment (R5). That costs no more than else: not each
// of them tries from then on at whatever ends.
func TestFaultCrowdSiblings(t *testing.T) {
	need(t, "root", "fuse", "perl")
	const n = 300
	for _, transport := range transports[:2] {
		t.Run(transport, func(t *testing.T) {
			cost := func(more ...string) int {
				m, crowd, said, release := mountCrowd(t, transport, "flock", n, more...)
				before := processorTicks(t, m.daemon())
				release()
				if r := crowd.Wait(); r.Status != 0 || r.Err != "" || said() != "started\n0 failed\n" {
					t.Errorf("the crowd: %.2000v", r)
				}
				return processorTicks(t, m.daemon()) - before
			}
			idle, busy := cost("idle"), cost()
			t.Logf("%d processes took the daemon %d ticks of a processor, and as many that change something %d", n, idle, busy)
			if idle > 3*busy {
				t.Error("it costs more to change nothing")
			}
		})
	}
}

// TestFaultCrowdReplaced: a daemon for which very many wait is replaced, and needs no more
// memory for them than before.
func TestFaultCrowdReplaced(t *testing.T) {
	need(t, "root", "fuse", "perl")
	const n = 500
	for _, transport := range transports[:2] {
		t.Run(transport, func(t *testing.T) {
			m, crowd, said, release := mountCrowd(t, transport, "flock", n, "idle")
			before := statm(t, m.daemon(), 5)
			m.replace()
			if more := statm(t, m.daemon(), 5) - before; more > n*256<<10 {
				t.Errorf("the next program takes %d MiB more", more>>20)
			}
			release()
			if r := crowd.Wait(); r.Status != 0 || r.Err != "" || said() != "started\n0 failed\n" {
				t.Errorf("the crowd: %.2000v", r)
			}
		})
	}
}

// processorTicks returns how long a process has run so far.
func processorTicks(t *testing.T, pid int) int {
	t.Helper()
	f := statFields(fmt.Sprintf("/proc/%d/stat", pid))
	if f == nil {
		t.Fatalf("process %d is not there", pid)
	}
	return atoi(f[11]) + atoi(f[12])
}

// mountCrowd makes a mount in which n processes want D, which an agent holds until
// release.
func mountCrowd(t *testing.T, transport, by string, n int, more ...string) (m *Mount, crowd *Proc, said func() string, release func()) {
	m = mountBy(t, transport)
	openDir(t, m.Back("D"))
	for _, name := range []string{"D/devserver", "D/turns"} {
		mustDo(t, os.WriteFile(m.Back(name), nil, 0o666))
	}
	holder := agent(t)
	if by == "mkdir" {
		holder.must("mkdir", m.At("D/devserver.lock"))
		release = func() { holder.must("rmdir", m.At("D/devserver.lock")) }
	} else {
		holder.must("open", "l", m.At("D/devserver"), "rdwr")
		take := []string{"flock", "l"}
		if by == "fcntl" {
			take = []string{"setlk", "l", "wr"}
		}
		holder.must(take...)
		release = func() { holder.must("close", "l") }
	}
	out, err := os.Create(tempDir(t) + "/out")
	mustDo(t, err)
	t.Cleanup(func() { out.Close() })
	said = func() string { b, _ := os.ReadFile(out.Name()); return string(b) }
	cmd := exec.Command("perl", append([]string{"-e", forkedCrowd, by, itoa(n), tempDir(t)}, more...)...)
	cmd.Dir = m.Path
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Stdout = out
	crowd = startCmd(t, cmd)
	began := time.Now()
	t.Cleanup(func() {
		if t.Failed() {
			crowd.Kill()
			t.Logf("the crowd: %.2000v", crowd.Wait())
		}
	})
	if by != "mkdir" {
		var limit unix.Rlimit
		mustDo(t, unix.Prlimit(m.cmd.Process.Pid, unix.RLIMIT_NOFILE, nil, &limit))
		// Half of them are for files; a few are open otherwise.
		all := min(n, int(limit.Cur/2)-50)
		for end := time.Now().Add(patience + time.Duration(n)*20*time.Millisecond); len(m.Listing().Waiters) < all; time.Sleep(50 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%d of %d wait", len(m.Listing().Waiters), all)
			}
		}
	} else {
		for end := time.Now().Add(patience + time.Duration(n)*10*time.Millisecond); ; time.Sleep(10 * time.Millisecond) {
			if said() != "" {
				break
			} else if time.Now().After(end) {
				t.Fatal("the crowd does not start")
			}
		}
	}
	t.Logf("%d processes want it after %v", n, time.Since(began).Round(time.Millisecond))
	return m, crowd, said, release
}

// createMeanwhile has another user create files elsewhere, so many or until done,
// and returns how long each took, in order.
func (m *Mount) createMeanwhile(t *testing.T, n int, done <-chan struct{}) (took []time.Duration) {
	t.Helper()
	other := stranger(t)
	dir := m.Back("other" + itoa(int(monotonic())))
	openDir(t, dir)
	dir = m.At(dir[len(m.Dir):])
	end := time.Now().Add(patience + time.Duration(*crowdFlag)*50*time.Millisecond)
	for over := false; !over; {
		began := time.Now()
		other.must("put", dir+"/"+itoa(len(took)), "x", "wronly,creat")
		took = append(took, time.Since(began))
		select {
		case <-done:
			over = true
		default:
			over = len(took) == n
			if time.Now().After(end) {
				t.Fatalf("%d still wait", len(m.Listing().Waiters))
			}
		}
	}
	slices.Sort(took)
	return took
}
