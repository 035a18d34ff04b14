//go:build linux

package tests

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"runtime/debug"
	"strings"

	"golang.org/x/sys/unix"
)

// dataProbes are about what files hold, by all ways that lead to it.
func dataProbes() []probeCase {
	return []probeCase{
		{"holes", probeHoles},
		{"fallocate modes", probeFallocate},
		{"copy_file_range", probeCopyRange},
		{"O_DIRECT and the page cache", probeDirect},
		{"a mapping of an O_DIRECT descriptor", probeDirectMapping},
		{"mappings and system calls", probeMapping},
		{"mappings of two processes", probeTwoMappings},
		{"splice, tee and sendfile", probeSplice},
		{"statx", probeStatx},
		{"limits of xattrs", probeXattrLimits},
		{"programs, scripts and libraries", probeExec},
	}
}

func probeHoles(p *probe) {
	fd := p.open("f", unix.O_RDWR|unix.O_CREAT)
	defer unix.Close(fd)
	seek := func(where string) {
		for _, at := range []int64{0, 1, 4095, 4096, 8192, 65536, 65537, 1 << 20, 1<<20 + 4096, 2<<20 - 1, 2 << 20, -1} {
			data, derr := unix.Seek(fd, at, unix.SEEK_DATA)
			hole, herr := unix.Seek(fd, at, unix.SEEK_HOLE)
			p.note("%s, %d: data %d %s, hole %d %s", where, at, data, errnoName(derr), hole, errnoName(herr))
		}
	}
	seek("empty")
	_, err := unix.Pwrite(fd, bytes.Repeat([]byte("x"), 4096), 65536)
	p.try("write", err)
	seek("one block")
	p.try("longer", unix.Ftruncate(fd, 2<<20))
	seek("longer")
	_, err = unix.Pwrite(fd, bytes.Repeat([]byte("y"), 4096), 1<<20)
	p.try("write", err)
	p.try("punch", unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 65536, 4096))
	seek("punched")
	p.try("fsync", unix.Fsync(fd))
	var st unix.Stat_t
	p.must(unix.Fstat(fd, &st))
	p.note("%d blocks", st.Blocks)
	p.content("f")
	at, err := unix.Seek(fd, 0, 99)
	p.note("whence 99: %d %s", at, errnoName(err))
}

func probeFallocate(p *probe) {
	modes := map[string]uint32{
		"plain": 0, "keep size": unix.FALLOC_FL_KEEP_SIZE, "punch": unix.FALLOC_FL_PUNCH_HOLE,
		"punch, keep size": unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE,
		"zero":             unix.FALLOC_FL_ZERO_RANGE,
		"zero, keep size":  unix.FALLOC_FL_ZERO_RANGE | unix.FALLOC_FL_KEEP_SIZE,
		"zero and punch":   unix.FALLOC_FL_ZERO_RANGE | unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE,
		"unknown":          0x1000,
	} // Without collapsing and inserting: the kernel's FUSE cannot.
	names := []string{"plain", "keep size", "punch", "punch, keep size", "zero", "zero, keep size", "zero and punch", "unknown"}
	for _, name := range names {
		for _, r := range [][2]int64{{0, 4096}, {100, 5000}, {8000, 9000}, {20000, 100}, {-1, 10}, {0, 0}, {0, -1}, {1 << 62, 1 << 62}} {
			p.file("f", strings.Repeat("content.", 1250), 0o644)
			fd := p.open("f", unix.O_RDWR)
			p.try(fmt.Sprintf("%s %v", name, r), unix.Fallocate(fd, modes[name], r[0], r[1]))
			unix.Close(fd)
			p.stat("f")
			p.content("f")
		}
	}
	p.must(unix.Mkfifo(p.at("fifo"), 0o644))
	fd := p.open("f", unix.O_RDONLY)
	p.try("of one opened to read", unix.Fallocate(fd, 0, 0, 10))
	unix.Close(fd)
	fd = p.open("fifo", unix.O_RDWR)
	p.note("of a fifo fails: %v", unix.Fallocate(fd, 0, 0, 10) != nil)
	unix.Close(fd)
}

func probeCopyRange(p *probe) {
	content := bytes.Repeat([]byte("0123456789abcdef"), 100_000)
	p.must(os.WriteFile(p.at("src"), content, 0o644))
	p.mkdir("dir", 0o755)
	p.must(unix.Mkfifo(p.at("fifo"), 0o644))
	whole := func(what string, src, dst, flags int, from, to *int64, size int) {
		n, err := unix.CopyFileRange(src, from, dst, to, size, flags)
		var at [2]int64
		if from != nil {
			at[0] = *from
		}
		if to != nil {
			at[1] = *to
		}
		p.note("%s: %d %s, now at %v", what, n, errnoName(err), at)
	}
	at := func(off int64) *int64 { return &off }
	src, dst := p.open("src", unix.O_RDWR), p.open("dst", unix.O_RDWR|unix.O_CREAT)
	defer unix.Close(src)
	defer unix.Close(dst)
	whole("all", src, dst, 0, at(0), at(0), len(content))
	p.content("dst")
	whole("positions", src, dst, 0, nil, nil, 1000)
	whole("and on", src, dst, 0, nil, nil, 1000)
	p.content("dst")
	whole("past the end", src, dst, 0, at(int64(len(content))), at(0), 10)
	whole("over the end", src, dst, 0, at(int64(len(content))-5), at(3), 10)
	whole("beyond the end", src, dst, 0, at(0), at(5_000_000), 4096)
	whole("nothing", src, dst, 0, at(0), at(0), 0)
	whole("flags", src, dst, 1, at(0), at(0), 10)
	whole("before the start", src, dst, 0, at(-1), at(0), 10)
	whole("to before the start", src, dst, 0, at(0), at(-1), 10)
	whole("overlapping", src, src, 0, at(0), at(100), 1000)
	whole("within", src, src, 0, at(0), at(5000), 1000)
	p.content("src")
	p.content("dst")
	p.stat("dst")
	for name, flags := range map[string][2]int{
		"dst read-only": {unix.O_RDONLY, unix.O_RDONLY}, "src write-only": {unix.O_WRONLY, unix.O_WRONLY},
		"dst appends": {unix.O_RDONLY, unix.O_WRONLY | unix.O_APPEND},
	} {
		a, b := p.open("src", flags[0]), p.open("dst", flags[1])
		n, err := unix.CopyFileRange(a, at(0), b, at(0), 10, 0)
		if n != -1 || err != unix.EBADF {
			p.note("%s: %d %s", name, n, errnoName(err))
		}
		unix.Close(a)
		unix.Close(b)
	}
	dir, fifo := p.open("dir", unix.O_RDONLY), p.open("fifo", unix.O_RDWR)
	defer unix.Close(dir)
	defer unix.Close(fifo)
	whole("a directory", dir, dst, 0, at(0), at(0), 10)
	whole("a fifo", fifo, dst, 0, nil, at(0), 10)
	whole("to a fifo", src, fifo, 0, at(0), nil, 10)
	mem, err := unix.MemfdCreate("other", unix.MFD_CLOEXEC)
	p.must(err)
	defer unix.Close(mem)
	whole("to another file system", src, mem, 0, at(0), at(0), 10)
	whole("from another file system", mem, dst, 0, at(0), at(0), 10)
	p.content("dst")
}

func probeDirect(p *probe) {
	const size = 8192
	page := func() []byte {
		b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
		p.must(err)
		return b
	}
	buf := page()
	direct, cached := p.open("f", unix.O_RDWR|unix.O_CREAT|unix.O_DIRECT), p.open("f", unix.O_RDWR)
	defer unix.Close(direct)
	defer unix.Close(cached)
	fill := func(c byte) []byte {
		for i := range buf {
			buf[i] = c
		}
		return buf
	}
	io := func(what string, n int, err error) { p.note("%s: %d %s", what, n, errnoName(err)) }
	n, err := unix.Pwrite(direct, fill('a'), 0)
	io("direct write", n, err)
	p.content("f")
	n, err = unix.Pwrite(cached, bytes.Repeat([]byte("b"), 100), 50)
	io("cached write", n, err)
	n, err = unix.Pread(direct, fill(0), 0)
	io("direct read", n, err)
	p.note("%s", brief(buf))
	m, err := unix.Mmap(cached, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	p.try("map", err)
	copy(m[4096:], "mapped")
	n, err = unix.Pread(direct, fill(0), 0)
	io("direct read of what is mapped", n, err)
	p.note("%s", brief(buf))
	n, err = unix.Pwrite(direct, fill('c'), 4096)
	io("direct write over what is mapped", n, err)
	p.note("mapped %q", m[4090:4110])
	p.must(unix.Munmap(m))
	for _, c := range []struct{ from, size, at int }{{0, 1000, 0}, {0, 4096, 100}, {0, 512, 512}, {512, 512, 1024}, {0, 4096, 1 << 20}} {
		n, err = unix.Pread(direct, buf[c.from:c.from+c.size], int64(c.at))
		io(fmt.Sprintf("direct read of %v", c), n, err)
		n, err = unix.Pwrite(direct, buf[c.from:c.from+c.size], int64(c.at))
		io(fmt.Sprintf("direct write of %v", c), n, err)
	}
	p.content("f")
	p.must(os.WriteFile(p.at("g"), buf, 0o644))
	writer := p.open("g", unix.O_RDWR) // beside one with O_DIRECT alone, any memory will do
	defer unix.Close(writer)
	only := p.open("g", unix.O_RDONLY|unix.O_DIRECT)
	defer unix.Close(only)
	n, err = unix.Pread(only, buf[1:4097], 0)
	io("direct read to odd memory", n, err)
}

// probeDirectMapping maps files that end within a sector, by descriptors with
// O_DIRECT, whose rules are not those of a mapping.
func probeDirectMapping(p *probe) {
	for _, read := range []bool{false, true} {
		p.must(os.WriteFile(p.at("f"), bytes.Repeat([]byte("a"), 5000), 0o644))
		reader := -1
		if read { // whoever has it open then decides how it is reached
			reader = p.open("f", unix.O_RDONLY)
		}
		fd := p.open("f", unix.O_RDWR|unix.O_DIRECT)
		m, err := unix.Mmap(fd, 0, 5000, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if !p.try("map", err) {
			return
		}
		copy(m[4096:], "mapped")
		p.try("msync", unix.Msync(m, unix.MS_SYNC))
		p.must(unix.Munmap(m))
		p.try("fsync", unix.Fsync(fd))
		unix.Close(fd)
		unix.Close(reader)
		fd = p.open("f", unix.O_RDONLY)
		p.try("drop pages", unix.Fadvise(fd, 0, 0, unix.FADV_DONTNEED))
		unix.Close(fd)
		p.content("f")
	}
}

// bus reports whether f met a page that a mapping has lost.
func bus(f func()) (lost bool) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() { lost = recover() != nil }()
	f()
	return false
}

func probeMapping(p *probe) {
	p.must(os.WriteFile(p.at("f"), bytes.Repeat([]byte("x"), 10_000), 0o644))
	fd := p.open("f", unix.O_RDWR)
	defer unix.Close(fd)
	shared, err := unix.Mmap(fd, 0, 16384, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if !p.try("map", err) {
		return
	}
	private, err := unix.Mmap(fd, 0, 16384, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	p.try("map privately", err)
	other := p.open("f", unix.O_RDWR)
	defer unix.Close(other)
	_, err = unix.Pwrite(other, []byte("written"), 10)
	p.try("write", err)
	p.note("mapped: %q, privately %q", shared[5:20], private[5:20])
	copy(shared[20:], "stored")
	copy(private[30:], "private")
	b := make([]byte, 40)
	_, err = unix.Pread(other, b, 0)
	p.try("read", err)
	p.note("read %q", b)
	p.content("f")
	p.note("the rest of the last page: %v", bytes.Equal(shared[10_000:12_288], make([]byte, 2288)))
	p.note("after the end is lost: %v", bus(func() { shared[12_288]++ }))
	p.try("longer", unix.Ftruncate(fd, 14_000))
	p.note("is there: %v", !bus(func() { shared[12_288]++ }))
	shared[10_001] = 'e'
	p.try("shorter", unix.Ftruncate(other, 4096))
	p.note("is lost: %v %v", bus(func() { shared[5000]++ }), bus(func() { private[5000]++ }))
	p.try("longer", unix.Ftruncate(other, 8192))
	p.note("zeroes: %v", !bus(func() { p.note("%q", shared[5000:5010]) }))
	p.try("punch", unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4096))
	p.note("punched: %q, privately %q", shared[5:20], private[30:40])
	copy(shared, "last")
	p.try("msync", unix.Msync(shared, unix.MS_SYNC))
	p.must(unix.Munmap(shared))
	p.must(unix.Munmap(private))
	p.stat("f")
	p.content("f")
}

// probeTwoMappings has another process map, store and read what this one does.
func probeTwoMappings(p *probe) {
	p.must(os.WriteFile(p.at("f"), bytes.Repeat([]byte("."), 8192), 0o644))
	cmd := exec.Command("python3", "-c", `
import mmap, os, sys
f = os.open(sys.argv[1], os.O_RDWR)
m = mmap.mmap(f, 8192)
print("ready", flush=True)
for line in sys.stdin:
    what, at, text = line.split()
    at = int(at)
    if what == "store": m[at:at+len(text)] = text.encode(); print("ok", flush=True)
    elif what == "write": print(os.pwrite(f, text.encode(), at), flush=True)
    elif what == "look": print(m[at:at+int(text)], flush=True)
    elif what == "read": print(os.pread(f, int(text), at), flush=True)
    elif what == "cut": os.ftruncate(f, at); print("ok", flush=True)
    elif what == "size": print(os.fstat(f).st_size, flush=True)
`, p.at("f"))
	in, err := cmd.StdinPipe()
	p.must(err)
	out, err := cmd.StdoutPipe()
	p.must(err)
	p.must(cmd.Start())
	answers := bufio.NewScanner(out)
	ask := func(line string) {
		if line != "" {
			fmt.Fprintln(in, line)
		}
		if answers.Scan(); line != "" {
			p.note("%s: %s", line, answers.Text())
		}
	}
	ask("")
	fd := p.open("f", unix.O_RDWR)
	m, err := unix.Mmap(fd, 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	p.try("map", err)
	ask("store 100 theirs")
	p.note("mapped %q", m[95:110])
	copy(m[200:], "mine")
	ask("look 195 15")
	ask("read 195 15")
	ask("write 300 written")
	p.note("mapped %q", m[295:310])
	_, err = unix.Pwrite(fd, []byte("here"), 400)
	p.try("write", err)
	ask("look 395 15")
	p.content("f")
	ask("cut 4096 x")
	p.note("is lost: %v", bus(func() { m[5000]++ }))
	p.try("longer", unix.Ftruncate(fd, 6000))
	ask("size 0 x")
	ask("look 4090 10")
	unix.Close(fd)
	copy(m[500:], "after close")
	ask("look 495 20")
	ask("read 495 20")
	p.must(unix.Munmap(m))
	in.Close()
	p.must(cmd.Wait())
	p.content("f")
}

func probeSplice(p *probe) {
	content := bytes.Repeat([]byte("0123456789"), 20_000)
	p.must(os.WriteFile(p.at("src"), content, 0o644))
	src, dst := p.open("src", unix.O_RDONLY), p.open("dst", unix.O_RDWR|unix.O_CREAT)
	defer unix.Close(src)
	defer unix.Close(dst)
	var a, b [2]int
	p.must(unix.Pipe2(a[:], unix.O_CLOEXEC))
	p.must(unix.Pipe2(b[:], unix.O_CLOEXEC))
	for _, fd := range []int{a[0], a[1], b[0], b[1]} {
		defer unix.Close(fd)
	}
	io := func(what string, n int64, err error) { p.note("%s: %d %s", what, n, errnoName(err)) }
	off := int64(5)
	n, err := unix.Splice(src, &off, a[1], nil, 10_000, 0)
	io("splice from a file", n, err)
	n, err = unix.Tee(a[0], b[1], 10_000, 0)
	io("tee", n, err)
	to := int64(100)
	n, err = unix.Splice(a[0], nil, dst, &to, 10_000, 0)
	io("splice to a file", n, err)
	n, err = unix.Splice(b[0], nil, dst, nil, 5000, unix.SPLICE_F_MOVE)
	io("splice at its position", n, err)
	p.content("dst")
	size, err := unix.Vmsplice(a[1], []unix.Iovec{{Base: &content[0], Len: 300}}, 0)
	io("vmsplice", int64(size), err)
	appends := p.open("dst", unix.O_WRONLY|unix.O_APPEND)
	defer unix.Close(appends)
	_, err = unix.Splice(a[0], nil, appends, nil, 300, 0)
	p.try("splice to one that appends", err)
	n, err = unix.Splice(a[0], nil, dst, nil, 300, unix.SPLICE_F_NONBLOCK)
	io("splice", n, err)
	from := int64(7)
	sent, err := unix.Sendfile(dst, src, &from, 60_000)
	io("sendfile", int64(sent), err)
	sent, err = unix.Sendfile(b[1], dst, nil, 10)
	io("sendfile from the end", int64(sent), err)
	sent, err = unix.Sendfile(src, dst, nil, 10)
	io("sendfile to one opened to read", int64(sent), err)
	p.content("dst")
	p.stat("dst")
}

func probeStatx(p *probe) {
	p.file("f", "content", 0o644)
	p.mkdir("d", 0o755)
	p.must(os.Symlink("f", p.at("s")))
	p.must(unix.Mkfifo(p.at("fifo"), 0o600))
	get := func(name string) (st unix.Statx_t) {
		p.must(unix.Statx(unix.AT_FDCWD, p.at(name), unix.AT_SYMLINK_NOFOLLOW, unix.STATX_BASIC_STATS|unix.STATX_BTIME, &st))
		return st
	}
	for _, name := range []string{"f", "d", "s", "fifo"} {
		first := get(name)
		p.note("%s: mask %#x mode %o links %d owner %d:%d size %d blksize %d", name,
			first.Mask&(unix.STATX_BASIC_STATS|unix.STATX_BTIME), first.Mode, first.Nlink, first.Uid, first.Gid, first.Size, first.Blksize)
		p.note("born when it was made: %v", first.Btime == first.Ctime || first.Btime.Sec <= first.Ctime.Sec && first.Btime.Sec >= first.Ctime.Sec-2)
		p.must(unix.Lchown(p.at(name), 0, 7))
		p.must(unix.Rename(p.at(name), p.at(name+".new")))
		later := get(name + ".new")
		p.note("birth stays: %v, ctime went on: %v, inode stays: %v", first.Btime == later.Btime,
			later.Ctime.Sec > first.Ctime.Sec || later.Ctime.Nsec >= first.Ctime.Nsec, first.Ino == later.Ino)
	}
	var st unix.Statx_t
	for _, flags := range []int{unix.AT_STATX_DONT_SYNC, unix.AT_STATX_FORCE_SYNC, 0x6000, unix.AT_EMPTY_PATH, 1 << 20} {
		p.try("flags "+hex(flags), unix.Statx(unix.AT_FDCWD, p.at("f.new"), flags, unix.STATX_SIZE, &st))
	}
	p.try("reserved mask", unix.Statx(unix.AT_FDCWD, p.at("f.new"), 0, 1<<31, &st))
	fd := p.open("f.new", unix.O_PATH)
	defer unix.Close(fd)
	p.try("of a descriptor", unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_ALL, &st))
	p.note("size %d", st.Size)
}

func probeXattrLimits(p *probe) {
	path := p.file("f", "content", 0o644)
	p.must(os.Symlink("f", p.at("s")))
	name := func(n int) string { return "user." + strings.Repeat("n", n-5) }
	for _, n := range []int{5, 6, 255, 256} {
		p.try(fmt.Sprintf("name of %d", n), unix.Setxattr(path, name(n), []byte("v"), 0))
	}
	for _, size := range []int{0, 1, 1000, 3000, 65536, 65537} {
		err := unix.Setxattr(path, "user.size", make([]byte, size), 0)
		p.try(fmt.Sprintf("value of %d", size), err)
		n, err := unix.Getxattr(path, "user.size", nil)
		p.note("size %d %s", n, errnoName(err))
	}
	p.try("create one that is there", unix.Setxattr(path, "user.size", []byte("x"), unix.XATTR_CREATE))
	p.try("replace one that is not", unix.Setxattr(path, "user.none", []byte("x"), unix.XATTR_REPLACE))
	p.try("both", unix.Setxattr(path, "user.both", []byte("x"), unix.XATTR_CREATE|unix.XATTR_REPLACE))
	p.try("unknown flag", unix.Setxattr(path, "user.both", []byte("x"), 4))
	for _, name := range []string{"", "user", "user.", "none.x", "system.x", "security.x", "trusted.x", "user.\xff\n"} {
		p.try(fmt.Sprintf("set %q", name), unix.Setxattr(path, name, []byte("v"), 0))
		_, err := unix.Getxattr(path, name, make([]byte, 10))
		p.try("get", err)
		p.try("set of a link", unix.Lsetxattr(p.at("s"), name, []byte("v"), 0))
		p.as(nobody, nobody, nil, func() {
			_, err := unix.Getxattr(path, name, make([]byte, 10))
			p.try("get as nobody", err)
			p.try("set as nobody", unix.Setxattr(path, name, []byte("v"), 0))
		})
	}
	p.mkdir("shut", 0o700)
	fd := p.open("f", unix.O_RDONLY)
	defer unix.Close(fd)
	p.must(os.Rename(path, p.at("shut", "f")))
	p.as(nobody, nobody, nil, func() {
		for _, name := range []string{"user.x", "system.x", "security.x", "trusted.x"} {
			_, err := unix.Getxattr(fmt.Sprintf("/proc/self/fd/%d", fd), name, nil)
			p.try("get "+name+" of an open file where nobody may search", err)
		}
	})
	p.must(os.Rename(p.at("shut", "f"), path))
	list := make([]byte, 10_000)
	n, err := unix.Listxattr(path, list)
	p.note("list: %q %s", list[:max(n, 0)], errnoName(err))
	_, err = unix.Listxattr(path, list[:5])
	p.try("short list", err)
	_, err = unix.Getxattr(path, "security.x", nil)
	p.try("size", err)
	p.must(unix.Setxattr(path, "user.size", []byte("four"), 0))
	_, err = unix.Getxattr(path, "user.size", list[:3])
	p.try("short value", err)
	p.as(nobody, nobody, nil, func() {
		n, err := unix.Listxattr(path, list)
		p.note("list as nobody: %q %s", list[:max(n, 0)], errnoName(err))
	})
	made := 0
	for ; made < 10_000 && err != unix.ENOSPC; made++ {
		err = unix.Setxattr(path, fmt.Sprintf("user.many%d", made), []byte("value"), 0)
	}
	p.note("%d of them: %s", made, errnoName(err))
}

func probeExec(p *probe) {
	run := func(name string, args ...string) {
		out, err := exec.Command(p.at(name), args...).CombinedOutput()
		p.note("%s: %q %v", name, out, err)
	}
	sh, err := os.ReadFile("/bin/sh")
	p.must(err)
	p.must(os.WriteFile(p.at("sh"), sh, 0o755))
	run("sh", "-c", "echo a program")
	run("sh", "-c", "exit 3")
	p.file("script", "#!/bin/sh\necho script $#\n", 0o755)
	run("script", "1", "2")
	p.file("own", "#!"+p.at("sh")+"\necho by an interpreter in the mount\n", 0o755)
	run("own")
	p.file("none", "#!"+p.at("missing")+"\n", 0o755)
	run("none")
	p.must(unix.Unlink(p.at("own"))) // they name the directory
	p.must(unix.Unlink(p.at("none")))
	p.file("plain", "#!/bin/sh\n", 0o644)
	run("plain")
	p.file("garbage", "\x7fELF garbage", 0o755)
	run("garbage")
	p.file("empty", "", 0o755)
	run("empty")
	p.mkdir("dir", 0o755)
	run("dir")
	// A shared library, through the loader.
	cmd := exec.Command("python3", "-c", `
import ctypes, shutil, sys
real = [l.split()[-1] for l in open("/proc/self/maps") if "/libc.so" in l or "/libc-" in l][0]
shutil.copy(real, sys.argv[1])
lib = ctypes.CDLL(sys.argv[1])
print(lib.abs(-7))
`, p.at("lib.so"))
	out, err := cmd.CombinedOutput()
	p.note("library: %q %v", out, err)
	// While it runs it cannot be written, and can be replaced.
	c := exec.Command(p.at("sh"), "-c", "read x; echo $x")
	in, err := c.StdinPipe()
	p.must(err)
	p.must(c.Start())
	p.try("write to it", p.opens(p.at("sh"), unix.O_WRONLY))
	p.try("truncate it", unix.Truncate(p.at("sh"), 0))
	p.try("replace it", unix.Rename(p.file("new", "#!/bin/sh\necho new\n", 0o755), p.at("sh")))
	in.Close()
	c.Wait()
	run("sh")
}
