//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// limitProbes go to the limits of names, links, sizes and nesting.
func limitProbes() []probeCase {
	return []probeCase{
		{"names of 255 and 256 bytes", probeNameLengths},
		{"paths of 4095 and 4096 bytes", probePathLengths},
		{"symlink targets", probeTargets},
		{"chains of symlinks", probeChains},
		{"text busy", probeTextBusy},
		{"another file system", probeCrossDevice},
		{"file sizes", probeFileSizes},
		{"RLIMIT_FSIZE", probeSizeLimit},
		{"names of any bytes", probeOddNames},
		{"a deep tree", probeDeepTree},
		{linksProbe, probeManyLinks},
	}
}

// calls are all system calls that take a path, on the given one.
func (p *probe) calls(path string) []namedCall {
	other := p.at("other")
	ts := []unix.Timespec{{Sec: 1}, {Sec: 2}}
	return []namedCall{
		{"stat", func() error { var st unix.Stat_t; return unix.Stat(path, &st) }},
		{"lstat", func() error { var st unix.Stat_t; return unix.Lstat(path, &st) }},
		{"statx", func() error { var st unix.Statx_t; return unix.Statx(unix.AT_FDCWD, path, 0, statxAll, &st) }},
		{"statfs", func() error { var st unix.Statfs_t; return unix.Statfs(path, &st) }},
		{"access", func() error { return unix.Access(path, unix.F_OK) }},
		{"open", func() error { return p.opens(path, unix.O_RDONLY) }},
		{"open for writing", func() error { return p.opens(path, unix.O_WRONLY) }},
		{"open directory", func() error { return p.opens(path, unix.O_RDONLY|unix.O_DIRECTORY) }},
		{"open path", func() error { return p.opens(path, unix.O_PATH) }},
		{"open nofollow", func() error { return p.opens(path, unix.O_RDONLY|unix.O_NOFOLLOW) }},
		{"open tmpfile", func() error { return p.opens(path, unix.O_TMPFILE|unix.O_RDWR) }},
		{"readlink", func() error { _, err := unix.Readlink(path, make([]byte, 10)); return err }},
		{"truncate", func() error { return unix.Truncate(path, 3) }},
		{"chmod", func() error { return unix.Chmod(path, 0o755) }},
		{"chown", func() error { return unix.Chown(path, 0, 0) }},
		{"lchown", func() error { return unix.Lchown(path, 0, 0) }},
		{"utimensat", func() error { return unix.UtimesNanoAt(unix.AT_FDCWD, path, ts, 0) }},
		{"lutimens", func() error { return unix.UtimesNanoAt(unix.AT_FDCWD, path, ts, unix.AT_SYMLINK_NOFOLLOW) }},
		{"getxattr", func() error { _, err := unix.Getxattr(path, "user.none", nil); return err }},
		{"listxattr", func() error { _, err := unix.Listxattr(path, make([]byte, 4096)); return err }},
		{"setxattr", func() error { return unix.Setxattr(path, "trusted.k", []byte("v"), 0) }},
		{"removexattr", func() error { return unix.Removexattr(path, "trusted.k") }},
		{"chdir", func() error { return exec.Command("/bin/sh", "-c", `cd "$0"`, path).Run() }},
		{"exec", func() error { return exec.Command(path).Run() }},
		{"link from", func() error { return unix.Link(path, other) }},
		{"unlink other", func() error { return unix.Unlink(other) }},
		{"link follow from", func() error {
			return unix.Linkat(unix.AT_FDCWD, path, unix.AT_FDCWD, other, unix.AT_SYMLINK_FOLLOW)
		}},
		{"unlink other", func() error { return unix.Unlink(other) }},
		{"rename from", func() error { return unix.Rename(path, other) }},
		{"rename back", func() error { return unix.Rename(other, path) }},
		{"symlink at", func() error { return unix.Symlink("x", path) }},
		{"link at", func() error { return unix.Link(p.at("source"), path) }},
		{"mkdir", func() error { return unix.Mkdir(path, 0o755) }},
		{"mknod", func() error { return unix.Mknod(path, unix.S_IFIFO|0o644, 0) }},
		{"create", func() error { return p.opens(path, unix.O_CREAT|unix.O_WRONLY) }},
		{"create alone", func() error { return p.opens(path, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY) }},
		{"create truncated", func() error { return p.opens(path, unix.O_CREAT|unix.O_TRUNC|unix.O_WRONLY) }},
		{"create directory", func() error { return p.opens(path, unix.O_CREAT|unix.O_DIRECTORY) }},
		{"rename onto", func() error { return unix.Rename(p.at("source"), path) }},
		{"rename away", func() error { return unix.Rename(path, p.at("source")) }},
		{"rmdir", func() error { return unix.Rmdir(path) }},
		{"unlink", func() error { return unix.Unlink(path) }},
		{"rmdir again", func() error { return unix.Rmdir(path) }},
		{"unlink again", func() error { return unix.Unlink(path) }},
	}
}

type namedCall struct {
	name string
	do   func() error
}

// statxAll asks for all that statx(2) knows.
const statxAll = unix.STATX_BASIC_STATS | unix.STATX_BTIME

func (p *probe) opens(path string, flags int) error {
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC|unix.O_NONBLOCK, 0o644)
	if err == nil {
		err = unix.Close(fd)
	}
	return err
}

// tryCalls notes the answers of all calls on a path.
func (p *probe) tryCalls(label, path string) {
	for _, c := range p.calls(path) {
		err := c.do()
		var exit *exec.ExitError
		if e, ok := err.(*exec.ExitError); ok {
			exit = e
		}
		if exit != nil {
			p.note("%s %s: exit %d", label, c.name, exit.ExitCode())
			continue
		}
		p.try(label+" "+c.name, err)
	}
}

func probeNameLengths(p *probe) {
	p.file("source", "source", 0o644)
	for _, n := range []int{1, 254, 255, 256, 1000} {
		path := p.dir + "/" + strings.Repeat("n", n)
		p.tryCalls(fmt.Sprintf("name of %d", n), path)
		p.tryCalls(fmt.Sprintf("beneath a name of %d", n), path+"/x")
	}
	// Characters of several bytes count as bytes.
	p.tryCalls("name of 128 umlauts", p.dir+"/"+strings.Repeat("ü", 128))
	p.tryCalls("name of 127 umlauts", p.dir+"/"+strings.Repeat("ü", 127))
}

func probePathLengths(p *probe) {
	p.file("source", "source", 0o644)
	for _, n := range []int{4094, 4095, 4096, 4097, 8192} {
		fill := n - len(p.dir) - len("/file")
		path := p.dir + strings.Repeat("/.", fill/2) + strings.Repeat("/", fill%2) + "/file"
		if len(path) != n {
			p.note("BROKEN path of %d, want %d", len(path), n)
		}
		p.tryCalls(fmt.Sprintf("path of %d", n), path)
	}
	p.tryCalls("empty path", "")
}

func probeTargets(p *probe) {
	for _, n := range []int{0, 1, 59, 60, 255, 256, 4094, 4095, 4096} {
		name := fmt.Sprint("s", n)
		target := strings.Repeat("t", n)
		if !p.try(fmt.Sprintf("symlink to %d bytes", n), unix.Symlink(target, p.at(name))) {
			continue
		}
		buf := make([]byte, 8192)
		got, err := unix.Readlink(p.at(name), buf)
		p.try("readlink", err)
		p.note("%d bytes, the same: %v", got, string(buf[:max(got, 0)]) == target)
		got, err = unix.Readlink(p.at(name), buf[:10])
		p.note("readlink into 10 bytes: %d %s", got, errnoName(err))
		p.stat(name)
		p.try("open", p.opens(p.at(name), unix.O_RDONLY))
	}
	p.file("file", "x", 0o644)
	_, err := unix.Readlink(p.at("file"), make([]byte, 10))
	p.try("readlink of a file", err)
}

func probeChains(p *probe) {
	p.file("l0", "the end", 0o644)
	for i := 1; i <= 45; i++ {
		p.must(unix.Symlink(fmt.Sprint("l", i-1), p.at(fmt.Sprint("l", i))))
	}
	for _, n := range []int{39, 40, 41, 45} {
		p.content(fmt.Sprint("l", n))
	}
	p.must(unix.Symlink("self", p.at("self")))
	p.must(unix.Symlink("b", p.at("a")))
	p.must(unix.Symlink("a", p.at("b")))
	p.file("source", "source", 0o644)
	p.tryCalls("self", p.at("self"))
	p.must(unix.Symlink("self", p.at("self")))
	p.tryCalls("beneath self", p.at("self/x"))
	p.tryCalls("a loop of two", p.at("a"))
}

func probeTextBusy(p *probe) {
	b, err := os.ReadFile("/bin/sleep")
	p.must(err)
	path := p.file("sleep", string(b), 0o755)
	cmd := exec.Command(path, "100")
	p.must(cmd.Start())
	// It runs the file as soon as Start returns, which waits for execve(2).
	p.try("open running program for writing", p.opens(path, unix.O_WRONLY))
	p.try("open and truncate it", p.opens(path, unix.O_WRONLY|unix.O_TRUNC))
	p.try("truncate it", unix.Truncate(path, 0))
	p.try("open it for reading", p.opens(path, unix.O_RDONLY))
	p.try("chmod it", unix.Chmod(path, 0o700))
	p.try("rename it", unix.Rename(path, path+"2"))
	p.try("unlink it", unix.Unlink(path+"2"))
	cmd.Process.Kill()
	cmd.Wait()

	p.file("open", string(b), 0o755)
	fd := p.open("open", unix.O_WRONLY)
	p.try("exec of what is open for writing", exec.Command(p.at("open"), "0").Run())
	unix.Close(fd)
	p.try("exec afterwards", exec.Command(p.at("open"), "0").Run())
	p.try("open afterwards", p.opens(p.at("open"), unix.O_RDWR))
}

func probeCrossDevice(p *probe) {
	p.file("file", "x", 0o644)
	p.mkdir("dir", 0o755)
	shm, err := os.MkdirTemp("/dev/shm", "probe")
	p.must(err)
	defer os.RemoveAll(shm)
	p.must(os.WriteFile(shm+"/there", nil, 0o644))
	p.try("link out", unix.Link(p.at("file"), shm+"/file"))
	p.try("link in", unix.Link(shm+"/there", p.at("there")))
	p.try("rename out", unix.Rename(p.at("file"), shm+"/file"))
	p.try("rename in", unix.Rename(shm+"/there", p.at("there")))
	p.try("rename directory out", unix.Rename(p.at("dir"), shm+"/dir"))
	p.try("link onto a name there", unix.Link(p.at("file"), shm+"/there"))
}

func probeFileSizes(p *probe) {
	fd := p.open("file", unix.O_RDWR|unix.O_CREAT)
	defer unix.Close(fd)
	for _, size := range []int64{-1, 0, 1 << 31, 1 << 32, 1<<43 + 1, 1 << 44, 1 << 45, 1<<63 - 1} {
		p.try(fmt.Sprint("ftruncate ", size), unix.Ftruncate(fd, size))
		p.try(fmt.Sprint("truncate ", size), unix.Truncate(p.at("file"), size))
		p.stat("file")
	}
	p.must(unix.Ftruncate(fd, 0))
	for _, off := range []int64{-1, 1<<32 - 2, 1 << 43, 1 << 44, 1 << 46, 1<<63 - 3, 1<<63 - 1} {
		n, err := unix.Pwrite(fd, []byte("data"), off)
		p.note("pwrite at %d: %d %s", off, n, errnoName(err))
		n, err = unix.Pread(fd, make([]byte, 4), off)
		p.note("pread at %d: %d %s", off, n, errnoName(err))
	}
	p.stat("file")
	for _, at := range [][2]int64{{-1, 1}, {0, 0}, {0, -1}, {1 << 44, 1}, {1<<63 - 1, 1}, {1 << 62, 1<<62 + 1}} {
		p.try(fmt.Sprint("fallocate ", at), unix.Fallocate(fd, 0, at[0], at[1]))
	}
	for _, c := range []struct {
		whence int
		off    int64
	}{{unix.SEEK_SET, -1}, {unix.SEEK_SET, 1 << 43}, {unix.SEEK_CUR, -1 << 62}, {unix.SEEK_END, -1 << 62}, {unix.SEEK_END, 0}, {9, 0}, {unix.SEEK_DATA, -1}, {unix.SEEK_HOLE, 1 << 62}, {unix.SEEK_DATA, 1 << 62}} {
		off, err := unix.Seek(fd, c.off, c.whence)
		p.note("seek %d from %d: %d %s", c.off, c.whence, off, errnoName(err))
	}
	p.must(unix.Ftruncate(fd, 0))
}

func probeSizeLimit(p *probe) {
	signal.Ignore(syscall.SIGXFSZ)
	var old unix.Rlimit
	p.must(unix.Getrlimit(unix.RLIMIT_FSIZE, &old))
	p.must(unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 6000, Max: old.Max}))
	defer unix.Setrlimit(unix.RLIMIT_FSIZE, &old)
	fd := p.open("file", unix.O_RDWR|unix.O_CREAT)
	defer unix.Close(fd)
	for _, off := range []int64{0, 4096, 6000, 7000} {
		n, err := unix.Pwrite(fd, make([]byte, 4096), off)
		p.note("pwrite of 4096 at %d: %d %s", off, n, errnoName(err))
	}
	p.try("ftruncate 6000", unix.Ftruncate(fd, 6000))
	p.try("ftruncate 6001", unix.Ftruncate(fd, 6001))
	p.try("truncate 6001", unix.Truncate(p.at("file"), 6001))
	p.try("fallocate to 6001", unix.Fallocate(fd, 0, 0, 6001))
	p.try("fallocate to 6001, keep size", unix.Fallocate(fd, unix.FALLOC_FL_KEEP_SIZE, 0, 6001))
	p.stat("file")
	app := p.open("file", unix.O_WRONLY|unix.O_APPEND)
	n, err := unix.Write(app, []byte("more"))
	p.note("append: %d %s", n, errnoName(err))
	unix.Close(app)
	direct := p.open("direct", unix.O_WRONLY|unix.O_CREAT|unix.O_DIRECT)
	for range 2 {
		n, err = unix.Write(direct, alignedBuffer(4096))
		p.note("direct: %d %s", n, errnoName(err))
	}
	unix.Close(direct)
	from, to := int64(0), int64(5000)
	n, err = unix.CopyFileRange(fd, &from, fd, &to, 2000, 0)
	p.note("copy_file_range: %d %s", n, errnoName(err))
	p.stat("file")
}

func probeOddNames(p *probe) {
	names := []string{
		"\xff\xfe", "line\nbreak", "tab\t", "\x01", "ümlaut", "u\u0308mlaut", "CASE", "case", "Case", " ", "*",
		"a\\b", "-rf", "~", "...", "..x", "con", "x:y", "\x7f", "\xed\xa0\x80",
	}
	for _, name := range names {
		p.try("create "+fmt.Sprintf("%q", name), p.opens(p.dir+"/"+name, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY))
	}
	entries, err := os.ReadDir(p.dir)
	p.try("readdir", err)
	for _, e := range entries {
		p.note("%q", e.Name())
		var st unix.Stat_t
		p.must(unix.Lstat(p.dir+"/"+e.Name(), &st))
	}
	for _, name := range names {
		p.try("rename "+fmt.Sprintf("%q", name), unix.Rename(p.dir+"/"+name, p.dir+"/"+name+"\n\xfe"))
		p.try("unlink", unix.Unlink(p.dir+"/"+name+"\n\xfe"))
	}
	for _, name := range []string{".", "..", "./.", "../" + filepath.Base(p.dir), "x/..", "/", "//x"} {
		p.try("rmdir "+name, unix.Rmdir(p.dir+"/"+name))
		p.try("mkdir "+name, unix.Mkdir(p.dir+"/"+name, 0o777))
		p.try("unlink "+name, unix.Unlink(p.dir+"/"+name))
		p.try("create "+name, p.opens(p.dir+"/"+name, unix.O_CREAT|unix.O_WRONLY))
		p.try("rename "+name, unix.Rename(p.dir+"/"+name, p.at("y")))
	}
}

// probeDeepTree makes a tree that is deeper than a path is long.
func probeDeepTree(p *probe) {
	const depth = 2000
	fd := p.open(".", unix.O_RDONLY|unix.O_DIRECTORY)
	top := fd
	for i := range depth {
		if err := unix.Mkdirat(fd, "dir", 0o755); err != nil {
			p.note("BROKEN mkdir %d deep: %v", i, err)
			return
		}
		next, err := unix.Openat(fd, "dir", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			p.note("BROKEN open %d deep: %v", i, err)
			return
		}
		if fd != top {
			unix.Close(fd)
		}
		fd = next
	}
	file, err := unix.Openat(fd, "file", unix.O_CREAT|unix.O_WRONLY, 0o644)
	p.try("create at the bottom", err)
	unix.Close(file)
	unix.Close(fd)
	unix.Close(top)
	out, err := exec.Command("find", p.dir, "-name", "file", "-printf", "%d\n").CombinedOutput()
	p.note("find: %s %s", strings.TrimSpace(string(out)), errnoName(err))
	p.try("rename the top", unix.Rename(p.at("dir"), p.at("top")))
	out, err = exec.Command("rm", "-r", p.at("top")).CombinedOutput()
	p.note("rm -r: %s %s", strings.TrimSpace(string(out)), errnoName(err))
}

const (
	linksProbe  = "as many links as can be"
	linksBefore = 64_000 // are there already, or it would take long
)

// makeLinks makes those below the backing.
func makeLinks(t *testing.T, dir string) {
	t.Helper()
	f := filepath.Join(dir, "f")
	mustDo(t, os.WriteFile(f, []byte("content"), 0o644))
	for i := range linksBefore {
		mustDo(t, unix.Link(f, filepath.Join(dir, "l"+strconv.Itoa(i))))
	}
}

// probeManyLinks goes to the limit of links, 65,000 on ext4, and back.
func probeManyLinks(p *probe) {
	const more = 65_100
	made := linksBefore
	var err error
	for ; made < more && err == nil; made++ {
		err = unix.Link(p.at("f"), p.at("l"+strconv.Itoa(made)))
	}
	p.note("link %d: %s", made, errnoName(err))
	p.stat("l7")
	p.try("chmod", unix.Chmod(p.at("l1234"), 0o600))
	p.try("rename", unix.Rename(p.at("l0"), p.at("renamed")))
	p.try("one that is there", unix.Link(p.at("f"), p.at("l9")))
	p.stat("f")
	for i := range 100 {
		_ = unix.Unlink(p.at("l" + strconv.Itoa(i)))
	}
	p.stat("f")
	p.try("one more", unix.Link(p.at("renamed"), p.at("g")))
	p.stat("g")
	p.content("g")
}
