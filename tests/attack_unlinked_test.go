//go:build linux

package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// unlinkRace has one process remove a file just when another acquires the directory
// above and writes the file anew. The first gets little of the processor, so that it is
// often still in unlink(2) when that has been answered.
const unlinkRace = `
import os, random, sys, time
d, rounds = sys.argv[1], int(sys.argv[2])
sub, lock = d + "/sub", d + "/devserver"
f = sub + "/f"
cpus = sorted(os.sched_getaffinity(0))
def child(run):
    pid = os.fork()
    if pid == 0:
        try:
            run()
        except BaseException as e:
            print(repr(e), flush=True)
        os._exit(0)
    return pid
def busy():
    os.sched_setaffinity(0, {cpus[-1]})
    while True:
        pass
go, told = os.pipe()
back, tell = os.pipe()
def remover():
    os.sched_setaffinity(0, {cpus[-1]})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while os.read(go, 1):
        try:
            os.unlink(f)
            os.write(tell, b"u")
        except OSError:
            os.write(tell, b"e")
def stager():
    os.sched_setaffinity(0, {cpus[0]})
    lost = 0
    for _ in range(rounds):
        os.close(os.open(f, os.O_CREAT | os.O_WRONLY, 0o666))
        os.write(told, b"x")
        until = time.monotonic() + random.random() * 0.02
        while time.monotonic() < until:
            pass
        os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        if random.random() < 0.5:
            os.path.exists(f)
        h = os.open(f, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o666)
        os.write(h, b"new")
        os.close(h)
        gone = 0
        try:
            os.utime(f)
        except OSError:
            gone = 1
        os.read(back, 1)
        try:
            with open(f, "rb") as h:
                gone |= h.read() != b"new"
        except OSError:
            gone = 1
        lost += gone
        os.unlink(lock)
    print("lost", lost, "of", rounds)
    sys.stdout.flush()
children = [child(busy), child(remover)]
s = child(stager)
os.waitpid(s, 0)
for c in children:
    os.kill(c, 9)
    os.waitpid(c, 0)
`

// TestW3AttackUnlinked: a removal that was admitted before an acquisition takes nothing
// from the new holder, though who called it has not returned from it yet.
func TestW3AttackUnlinked(t *testing.T) {
	need(t, "python3")
	m := mount(t)
	mustDo(t, os.MkdirAll(m.Back("D/sub"), 0o777))
	prog := filepath.Join(tempDir(t), "race.py")
	mustDo(t, os.WriteFile(prog, []byte(unlinkRace), 0o644))
	const rounds = 150
	cmd := command("python3", prog, m.At("D"), fmt.Sprint(rounds))
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if got := strings.TrimSpace(string(out)); err != nil || got != fmt.Sprintf("lost 0 of %d", rounds) {
		t.Errorf("%s, %v", got, err)
	}
}

// TestW3Nameless: what has no name any more is reached by a descriptor as ever.
func TestW3Nameless(t *testing.T) {
	need(t, "python3")
	m := mount(t)
	mustDo(t, os.MkdirAll(m.Back("D"), 0o777))
	prog := filepath.Join(tempDir(t), "nameless.py")
	mustDo(t, os.WriteFile(prog, []byte(`
import os, sys
p = sys.argv[1] + "/f"
for path in (False, True):
    fd = os.open(p, os.O_CREAT | os.O_RDWR)
    os.write(fd, b"content")
    if path:
        os.close(fd)
        fd = os.open(p, os.O_PATH)
    os.unlink(p)
    again = "/proc/self/fd/%d" % fd
    for _ in range(3):
        h = os.open(again, os.O_RDWR)
        assert os.read(h, 100) == b"content"
        os.close(h)
        os.chmod(again, 0o600)
        os.utime(again, (1, 1))
        os.setxattr(again, "user.x", b"1")
        assert os.stat(again).st_mtime == 1
        os.truncate(again, 7)
    if not path:
        os.fchmod(fd, 0o640)
        assert os.fstat(fd).st_mode & 0o777 == 0o640
    os.close(fd)
os.mkdir(p)
d = os.open(p, os.O_RDONLY)
os.rmdir(p)
os.mkfifo(p)
fifo = os.open(p, os.O_RDWR)
os.unlink(p)
for fd in (d, fifo):
    os.fchmod(fd, 0o700)
    os.fchown(fd, 1, 1)
    os.utime(fd, (1, 1))
    s = os.fstat(fd)
    assert s.st_mode & 0o777 == 0o700 and s.st_uid == 1 and s.st_mtime == 1
print("ok")
`), 0o644))
	out, err := command("python3", prog, m.At("D")).CombinedOutput()
	if strings.TrimSpace(string(out)) != "ok" || err != nil {
		t.Errorf("%s%v", out, err)
	}
}
