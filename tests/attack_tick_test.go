//go:build linux

package tests

import (
	"strings"
	"syscall"
	"testing"
)

// sameTick is a program that takes a lock in a process of a certain number, kills it,
// and takes another one in a process of the same number that began in the same tick
// of the kernel's clock. The daemon is stopped between the two, and so learns of both
// at once.
const sameTick = `
import ctypes, os, signal, struct, sys, time
at, daemon = sys.argv[1], int(sys.argv[2])
libc = ctypes.CDLL(None, use_errno=True)
def clone(number):
    number = ctypes.c_int(number)
    args = struct.pack("=11Q", 0, 0, 0, 0, 17, 0, 0, 0, ctypes.addressof(number), 1, 0)
    return libc.syscall(435, args, len(args)) # clone3(2)
def child(d, tell):
    libc.prctl(1, 9, 0, 0, 0) # PR_SET_PDEATHSIG
    os.mkdir(d)
    os.close(os.open(d + "/f", os.O_CREAT | os.O_WRONLY))
    os.write(tell, b"x")
    while True:
        signal.pause()
def start(pid):
    with open("/proc/%d/stat" % pid) as s:
        return s.read().rpartition(")")[2].split()[19]
def end(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 0
number = os.fork() # which is free from now on
if number == 0:
    os._exit(0)
os.waitpid(number, 0)
hits, pid = 0, 0
over = time.monotonic() + 6
try:
    for i in range(200):
        if hits == 20 or time.monotonic() > over:
            break
        first, second = "%s/first%d" % (at, i), "%s/second%d" % (at, i)
        told, tell = os.pipe()
        others = [] # whose ends are carried out at the same time
        for n in range(5):
            others.append(os.fork())
            if others[n] == 0:
                child("%s/other%d.%d" % (at, i, n), tell)
            os.read(told, 1)
        time.sleep(.01 - time.clock_gettime(time.CLOCK_BOOTTIME) % .01) # a tick begins
        pid = clone(number)
        if pid < 0: # somebody else has the number
            for other in others:
                end(other)
            continue
        if pid == 0:
            child(first, tell)
        os.read(told, 1)
        began = start(pid)
        os.kill(daemon, signal.SIGSTOP)
        for other in others:
            os.kill(other, signal.SIGKILL)
        end(pid)
        pid = clone(number)
        if pid == 0:
            child(second, tell)
        os.kill(daemon, signal.SIGCONT)
        for other in others:
            os.waitpid(other, 0)
        if pid < 0:
            continue
        os.close(tell)
        os.read(told, 1)
        os.close(told)
        late = time.monotonic() + float(sys.argv[3])
        while os.path.exists(first): # the end of its lock has not been carried out
            if time.monotonic() > late:
                sys.exit("%s: what the dead process made is there" % first)
            time.sleep(.001)
        if start(pid) == began:
            hits += 1
            if not os.path.exists(second + "/f"):
                sys.exit("%s: what the new process made is gone" % second)
            try:
                os.mkdir(second + "/stranger")
                sys.exit("%s: its lock has ended" % second)
            except OSError:
                pass
        pid = end(pid)
finally:
    if pid > 0:
        os.kill(pid, signal.SIGKILL)
print(hits)
`

// TestH1AttackTick: a process that has number and start time of a dead owner loses
// nothing by what becomes of that one's locks.
func TestH1AttackTick(t *testing.T) {
	need(t, "root", "fuse", "python3")
	m := mount(t, "--on-crash=destroy")
	daemon := m.daemon()
	t.Cleanup(func() { syscall.Kill(daemon, syscall.SIGCONT) })
	wantTicks(t, sameTick, m.Path, itoa(daemon), itoa(int(patience.Seconds())))
}

// wantTicks runs a program that says how often processes of the same number began in the
// same tick, and fails if one of them was taken for another.
func wantTicks(t *testing.T, program string, args ...string) {
	t.Helper()
	r := run(t, "python3", append([]string{"-c", program}, args...)...)
	if r.Status != 0 {
		t.Fatal(r)
	}
	hits := strings.TrimSpace(r.Out)
	t.Logf("%s times in the same tick", hits)
	if hits == "0" {
		t.Skip("no processes of the same number began in the same tick")
	}
}

// sameTickHolder has a child of a lock's owner write something, and then, in processes that
// have its number and began in the same tick, a stranger elsewhere, and one where the lock is.
const sameTickHolder = `
import ctypes, errno, os, signal, struct, sys, time
at = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)
number = ctypes.c_int(os.fork()) # which is free from now on
if number.value == 0:
    os._exit(0)
os.waitpid(number.value, 0)
def clone(path):
    """opens a file in a process of that number, and returns what came of it, and when that began"""
    args = struct.pack("=11Q", 0, 0, 0, 0, 17, 0, 0, 0, ctypes.addressof(number), 1, 0)
    told, tell = os.pipe()
    pid = libc.syscall(435, args, len(args)) # clone3(2)
    if pid == 0:
        try:
            os.open(path, os.O_WRONLY)
            os.write(tell, b"0")
        except OSError as e:
            os.write(tell, b"%d" % e.errno)
        signal.pause()
    if pid < 0: # somebody else has the number
        os.close(told)
        os.close(tell)
        return -1, -1
    said = int(os.read(told, 9))
    with open("/proc/%d/stat" % pid) as s:
        began = s.read().rpartition(")")[2].split()[19]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(told)
    os.close(tell)
    return said, began
held, free = at + "/held/f", at + "/free"
os.close(os.open(free, os.O_CREAT | os.O_WRONLY))
asked, ask = os.pipe()
told, tell = os.pipe()
owner = os.fork()
if owner == 0:
    libc.prctl(1, 9, 0, 0, 0) # PR_SET_PDEATHSIG
    os.mkdir(at + "/held")
    os.close(os.open(held, os.O_CREAT | os.O_WRONLY))
    os.write(tell, b"x")
    while os.read(asked, 1):
        os.write(tell, ("%s %s" % clone(held)).encode())
os.read(told, 1)
hits, over = 0, time.monotonic() + 2
while hits < 5 and time.monotonic() < over:
    time.sleep(.01 - time.clock_gettime(time.CLOCK_BOOTTIME) % .01) # a tick begins
    os.write(ask, b"x")
    said, first = os.read(told, 99).decode().split()
    clone(free)
    stranger, last = clone(held)
    if said != "0" or first != last:
        continue
    hits += 1
    if stranger != errno.EBUSY:
        sys.exit("who has the number of a dead holder opens what is held: %d, want EBUSY" % stranger)
os.kill(owner, signal.SIGKILL)
print(hits)
`

// TestH1AttackTickHolder: a process that has number and start time of a dead holder is none,
// also if another one has had them since.
func TestH1AttackTickHolder(t *testing.T) {
	need(t, "root", "fuse", "python3")
	m := mount(t)
	wantTicks(t, sameTickHolder, m.Path)
}
