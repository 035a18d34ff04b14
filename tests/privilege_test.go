//go:build linux

package tests

import (
	"os/exec"
	"testing"
)

// privileges prints what becomes of suid and sgid bits and of capabilities, for
// each way to change a file, each caller and each mode.
const privileges = `
import ctypes, json, mmap, os, stat, struct, sys
top = sys.argv[1]
source, back = top + "/source", sys.argv[2]
CAP = bytes.fromhex("0100000200200000000000000000000000000000")
ACL = struct.pack("<I" + 5 * "HHI", 2, 1, 6, 0xffffffff, 2, 6, 1001, 4, 5, 0xffffffff, 16, 7, 0xffffffff, 32, 4, 0xffffffff)
FSETID = 1 << 4
ALL = next(int(line.split()[1], 16) for line in open("/proc/self/status") if line.startswith("CapPrm"))
libc = ctypes.CDLL(None, use_errno=True)

def become(uid, gid, groups, caps):
    libc.prctl(8, 1, 0, 0, 0) # PR_SET_KEEPCAPS
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    if caps == "userns":
        libc.prctl(4, 1, 0, 0, 0) # PR_SET_DUMPABLE
        if libc.unshare(0x10000000) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        for name, text in ("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1"):
            with open("/proc/self/" + name, "w") as f:
                f.write(text)
        return
    low, high = caps & 0xffffffff, caps >> 32
    data = struct.pack("IIIIII", low, low, 0, high, high, 0)
    if libc.capset(struct.pack("II", 0x20080522, 0), data) != 0:
        raise OSError(ctypes.get_errno(), "capset")

def opened(flags, f):
    def op(mode):
        fd = os.open(path, flags)
        f(fd)
        os.close(fd)
    return op

def from_source(copy):
    def f(fd):
        src = os.open(source, os.O_RDONLY)
        copy(src, fd)
        os.close(src)
    return f

def held(mode):
    fd = os.open(path, os.O_WRONLY)
    if os.getuid() in (0, os.fstat(fd).st_uid):
        os.chmod(path, mode)
    os.write(fd, b"x")
    os.close(fd)

def mapped(mode):
    os.truncate(path, 4096)
    if os.getuid() in (0, os.stat(path).st_uid):
        os.chmod(path, mode)
    fd = os.open(path, os.O_RDWR)
    m = mmap.mmap(fd, 4096)
    m[0] = 65
    m.flush()
    os.close(fd)

W = os.O_WRONLY
ops = {
    "write": opened(W, lambda fd: os.write(fd, b"x")),
    "write nothing": opened(W, lambda fd: os.write(fd, b"")),
    "rdwr": opened(os.O_RDWR, lambda fd: os.write(fd, b"x")),
    "append": opened(W | os.O_APPEND, lambda fd: os.write(fd, b"x")),
    "direct": opened(W | os.O_DIRECT, lambda fd: os.write(fd, mmap.mmap(-1, 4096))),
    "truncate": lambda mode: os.truncate(path, 1),
    "truncate too far": lambda mode: os.truncate(path, 1 << 60),
    "ftruncate": opened(W, lambda fd: os.ftruncate(fd, 1)),
    "O_TRUNC": opened(W | os.O_TRUNC, lambda fd: None),
    "fallocate": opened(W, lambda fd: os.posix_fallocate(fd, 0, 8192)),
    "copy_file_range": opened(W, from_source(lambda s, d: os.copy_file_range(s, d, 3))),
    "sendfile": opened(W, from_source(lambda s, d: os.sendfile(d, s, 0, 3))),
    "chgrp": lambda mode: os.chown(path, -1, os.getgid()),
    "chown to the owner": lambda mode: os.chown(path, os.stat(path).st_uid, -1),
    "ACL": lambda mode: os.setxattr(path, "system.posix_acl_access", ACL),
    "set while open": held,
    "mapped": mapped,
}

# Of what the kernel knows, one may ask for the mode alone: then it asks nobody.
def mode_alone():
    st = ctypes.create_string_buffer(256)
    if libc.statx(-100, os.fsencode(path), 0, 2, st) != 0: # AT_FDCWD, STATX_MODE
        raise OSError(ctypes.get_errno(), "statx")
    return struct.unpack_from("H", st, 28)[0]

def make(owner, mode, cap, kind):
    os.mknod(path, kind | 0o600)
    if kind == stat.S_IFREG:
        with open(path, "w") as f:
            f.write("content")
    os.chown(path, *owner)
    os.chmod(path, mode)
    if cap:
        os.setxattr(path, "security.capability", CAP)

def errno_of(op, mode):
    try:
        ops[op](mode)
        return 0
    except OSError as e:
        return e.errno

# One process becomes the caller, and has a file for each case: to fork is slow.
def play(who, owner, cases):
    global path
    files = [f"/file{n}" for n in range(len(cases))]
    for name, (op, mode, cap, kind) in zip(files, cases):
        path = top + name
        make(owner, mode, cap, kind)
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        if who:
            become(*who)
        errnos = []
        for name, (op, mode, cap, kind) in zip(files, cases):
            path = top + name
            errnos.append(errno_of(op, mode))
        with os.fdopen(w, "w") as f:
            json.dump(errnos, f)
        os._exit(0)
    os.close(w)
    with os.fdopen(r) as f:
        errnos = json.load(f)
    os.waitpid(pid, 0)
    for name, (op, mode, cap, kind), errno in zip(files, cases, errnos):
        path = top + name
        # What the kernel has in its cache does not show what a call that failed has done.
        alone, now, behind = mode_alone(), os.stat(path).st_mode, os.stat(back + name).st_mode
        print(op, who, owner, oct(mode), cap, oct(kind), ":", errno, oct(alone & 0o7777), oct(now & 0o7777), oct(behind & 0o7777), os.listxattr(path))
        os.unlink(path)

with open(source, "w") as f:
    f.write("source")
os.chmod(source, 0o644)
callers = [
    (None, (0, 0)),
    ((1000, 1000, [], 0), (1000, 1000)),
    ((1000, 1000, [2000], 0), (1000, 2000)),
    ((1000, 1000, [], 0), (1000, 2000)),
    ((1001, 1001, [], 0), (1000, 2000)),
    ((1000, 1000, [], FSETID), (1000, 2000)),
    ((1000, 1000, [], "userns"), (1000, 2000)),
    ((0, 0, [], ALL & ~FSETID), (1000, 2000)),
]
cases = []
for mode in 0o4777, 0o2777, 0o6777, 0o2767, 0o6767, 0o6666, 0o777:
    for cap in False, True:
        # The kernel takes capabilities before it asks whether the size can be.
        cases += [(op, mode, cap, stat.S_IFREG) for op in ops if not (cap and op == "truncate too far")]
    for kind in stat.S_IFIFO, stat.S_IFCHR, stat.S_IFSOCK:
        cases += [(op, mode, False, kind) for op in ("chgrp", "chown to the owner")]
for who, owner in callers:
    play(who, owner, cases)
`

// TestM2Privileges: whoever changes a file takes away its suid and sgid bits and
// its capabilities, as on the backing.
func TestM2Privileges(t *testing.T) {
	need(t, "root", "fuse", "python3")
	outcome := func(dir, back string) string {
		out, err := exec.Command("python3", "-c", privileges, dir, back).CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return string(out)
	}
	plain := staticDir(t)
	want := outcome(plain, plain)
	for _, opts := range [][]string{nil, {"--no-passthrough"}} {
		m := mount(t, opts...)
		if got := outcome(m.Path, m.Back()); got != want {
			t.Errorf("with options %q:\n%s", opts, diff(want, got))
		}
	}
}
