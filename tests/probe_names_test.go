//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// nameProbes are about names that come, go and are listed.
func nameProbes() []probeCase {
	return []probeCase{
		{"rename flags on all kinds", probeRenames},
		{"O_TMPFILE and linkat", probeTmpfile},
		{"positions in a directory", probeSeekdir},
		{"8000 entries", probeManyEntries},
		{"a directory that is gone", probeRemovedDir},
		{"a file that is gone", probeUnlinkedFile},
		{"file handles", probeHandles},
		{"inotify", probeInotify},
	}
}

// probeRenames renames each kind of file onto each, with all flags.
func probeRenames(p *probe) {
	kinds := []string{"file", "symlink", "fifo", "empty", "full", "missing"}
	put := func(path, kind string) {
		p.must(os.RemoveAll(path))
		switch kind {
		case "file":
			p.must(os.WriteFile(path, []byte("content"), 0o644))
		case "symlink":
			p.must(os.Symlink("target", path))
		case "fifo":
			p.must(unix.Mkfifo(path, 0o644))
		case "empty", "full":
			p.must(os.Mkdir(path, 0o755))
			if kind == "full" {
				p.must(os.WriteFile(path+"/in", []byte("in"), 0o644))
			}
		}
	}
	tell := func(path string) string {
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return errnoName(err)
		}
		return fmt.Sprintf("%o/%d/%d", st.Mode, st.Nlink, st.Rdev)
	}
	flags := []uint{
		0, unix.RENAME_NOREPLACE, unix.RENAME_EXCHANGE, unix.RENAME_WHITEOUT,
		unix.RENAME_NOREPLACE | unix.RENAME_WHITEOUT, unix.RENAME_NOREPLACE | unix.RENAME_EXCHANGE,
		unix.RENAME_EXCHANGE | unix.RENAME_WHITEOUT, 8, 1 << 31,
	}
	p.mkdir("d", 0o755)
	for _, from := range kinds {
		for _, to := range kinds {
			for _, f := range flags {
				a, b := p.at("a"), p.at("d/b")
				put(a, from)
				put(b, to)
				err := unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, f)
				p.note("%s to %s, flags %x: %s, now %s, %s", from, to, f, errnoName(err), tell(a), tell(b))
			}
		}
	}
	put(p.at("a"), "full")
	for _, f := range flags {
		p.try("into itself", unix.Renameat2(unix.AT_FDCWD, p.at("a"), unix.AT_FDCWD, p.at("a/x"), f))
		p.try("onto itself", unix.Renameat2(unix.AT_FDCWD, p.at("a"), unix.AT_FDCWD, p.at("a"), f))
		p.try("onto its parent", unix.Renameat2(unix.AT_FDCWD, p.at("a/in"), unix.AT_FDCWD, p.at("a"), f))
		p.try("of a dot", unix.Renameat2(unix.AT_FDCWD, p.at("a")+"/.", unix.AT_FDCWD, p.at("z"), f))
		p.try("onto dots", unix.Renameat2(unix.AT_FDCWD, p.at("a/in"), unix.AT_FDCWD, p.at("a")+"/..", f))
	}
	p.must(os.Link(p.at("a/in"), p.at("a/same")))
	for _, f := range flags[:3] {
		p.try("two names of one file", unix.Renameat2(unix.AT_FDCWD, p.at("a/in"), unix.AT_FDCWD, p.at("a/same"), f))
	}
	p.stat("a/in")
	p.stat("a/same")
}

func probeTmpfile(p *probe) {
	p.mkdir("setgid", 0o777)
	p.must(unix.Chown(p.at("setgid"), 0, 1234))
	p.must(unix.Chmod(p.at("setgid"), 0o2777))
	p.file("f", "x", 0o666)
	open := func(dir string, flags int, mode uint32) int {
		fd, err := unix.Open(p.at(dir), unix.O_TMPFILE|flags|unix.O_CLOEXEC, mode)
		p.try("open in "+dir+" "+hex(flags), err)
		return fd
	}
	own := func(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }
	tell := func(fd int) {
		var st unix.Stat_t
		p.must(unix.Fstat(fd, &st))
		p.note("mode %o owner %d:%d links %d size %d", st.Mode, st.Uid, st.Gid, st.Nlink, st.Size)
	}
	for _, c := range []struct {
		dir   string
		flags int
	}{{"", unix.O_RDONLY}, {"f", unix.O_RDWR}, {"none", unix.O_RDWR}, {"", unix.O_RDWR | unix.O_CREAT}} {
		if fd := open(c.dir, c.flags, 0o600); fd >= 0 {
			unix.Close(fd)
		}
	}
	for i, c := range []struct {
		dir   string
		flags int
		mode  uint32
		uid   int
	}{
		{"", unix.O_RDWR, 0o666, 0},
		{"", unix.O_WRONLY, 0o4751, 0},
		{"setgid", unix.O_RDWR, 0o2755, nobody},
		{"", unix.O_RDWR | unix.O_EXCL, 0o600, 0},
		{"", unix.O_RDWR, 0, nobody},
		{"setgid", unix.O_WRONLY | unix.O_APPEND, 0o600, 0},
	} {
		p.as(c.uid, c.uid, nil, func() {
			fd := open(c.dir, c.flags, c.mode)
			if fd < 0 {
				return
			}
			defer unix.Close(fd)
			tell(fd)
			_, err := unix.Write(fd, []byte("hello"))
			p.try("write", err)
			n := strconv.Itoa(i)
			p.try("linkat AT_EMPTY_PATH", unix.Linkat(fd, "", unix.AT_FDCWD, p.at("e"+n), unix.AT_EMPTY_PATH))
			p.try("linkat by proc", unix.Linkat(unix.AT_FDCWD, own(fd), unix.AT_FDCWD, p.at("p"+n), unix.AT_SYMLINK_FOLLOW))
			p.try("linkat by proc onto it", unix.Linkat(unix.AT_FDCWD, own(fd), unix.AT_FDCWD, p.at("p"+n), unix.AT_SYMLINK_FOLLOW))
			_, err = unix.Write(fd, []byte(" again"))
			p.try("write", err)
			p.try("ftruncate", unix.Ftruncate(fd, 8))
			p.try("fchmod", unix.Fchmod(fd, 0o640))
			tell(fd)
			if again, err := unix.Open(own(fd), unix.O_RDWR|unix.O_CLOEXEC, 0); p.try("open again", err) {
				unix.Close(again)
			}
		})
		for _, name := range []string{"e", "p"} {
			p.stat(name + strconv.Itoa(i))
			p.content(name + strconv.Itoa(i))
		}
	}
	// Its last name goes and it gets another: not on any file system.
	fd := open("", unix.O_RDWR, 0o600)
	p.try("link", unix.Linkat(unix.AT_FDCWD, own(fd), unix.AT_FDCWD, p.at("once"), unix.AT_SYMLINK_FOLLOW))
	p.try("unlink", unix.Unlink(p.at("once")))
	p.try("link again", unix.Linkat(unix.AT_FDCWD, own(fd), unix.AT_FDCWD, p.at("twice"), unix.AT_SYMLINK_FOLLOW))
	tell(fd)
	unix.Close(fd)
}

// listFrom returns the names that a directory shows from its position on.
func listFrom(fd int) (names []string, err error) {
	buf := make([]byte, 1024)
	for {
		n, err := unix.ReadDirent(fd, buf)
		if n <= 0 || err != nil {
			return names, err
		}
		_, _, names = unix.ParseDirent(buf[:n], -1, names)
	}
}

// probeSeekdir reads a directory from positions that it told, while names come
// and go: what stays is seen once.
func probeSeekdir(p *probe) {
	p.mkdir("d", 0o755)
	const files = 300
	for i := range files {
		p.must(unix.Mknod(p.at("d", "stays"+strconv.Itoa(i)), unix.S_IFREG|0o644, 0))
		p.must(unix.Mknod(p.at("d", "goes"+strconv.Itoa(i)), unix.S_IFREG|0o644, 0))
	}
	fd := p.open("d", unix.O_RDONLY|unix.O_DIRECTORY)
	defer unix.Close(fd)
	all, err := listFrom(fd)
	p.try("listing", err)
	p.note("%d names", len(all))
	rest, err := listFrom(fd)
	p.note("at the end: %d, %s", len(rest), errnoName(err))

	// The position after each of the first blocks, and what follows there.
	_, err = unix.Seek(fd, 0, unix.SEEK_SET)
	p.try("rewind", err)
	var seen []string
	buf := make([]byte, 512)
	for range 5 {
		n, err := unix.ReadDirent(fd, buf)
		p.must(err)
		_, _, seen = unix.ParseDirent(buf[:n], -1, seen)
	}
	at, err := unix.Seek(fd, 0, unix.SEEK_CUR)
	p.try("telldir", err)
	rest, err = listFrom(fd)
	p.note("all after it: %v, %s", sameNames(all, append(seen, rest...)), errnoName(err))
	for i := range files {
		p.must(unix.Unlink(p.at("d", "goes"+strconv.Itoa(i))))
		p.must(unix.Mknod(p.at("d", "new"+strconv.Itoa(i)), unix.S_IFREG|0o644, 0))
	}
	_, err = unix.Seek(fd, at, unix.SEEK_SET)
	p.try("seekdir", err)
	again, err := listFrom(fd)
	p.try("listing", err)
	counts := make(map[string]int)
	for _, name := range append(seen, again...) {
		counts[name]++
	}
	lost, twice := 0, 0
	for i := range files {
		switch n := counts["stays"+strconv.Itoa(i)]; {
		case n == 0:
			lost++
		case n > 1:
			twice++
		}
	}
	p.note("of those that stay %d are lost, %d seen twice", lost, twice)

	// Everything is removed while it is listed, as rm -r does it.
	_, err = unix.Seek(fd, 0, unix.SEEK_SET)
	p.try("rewind", err)
	removed := 0
	for {
		n, err := unix.ReadDirent(fd, buf)
		if n <= 0 {
			p.try("last", err)
			break
		}
		var names []string
		_, _, names = unix.ParseDirent(buf[:n], -1, nil)
		for _, name := range names {
			if unix.Unlink(p.at("d", name)) == nil {
				removed++
			}
		}
	}
	p.note("removed %d", removed)
	p.try("rmdir", unix.Rmdir(p.at("d")))
}

func sameNames(a, b []string) bool {
	a, b = slices.Clone(a), slices.Clone(b)
	slices.Sort(a)
	slices.Sort(b)
	return slices.Equal(a, b)
}

func probeManyEntries(p *probe) {
	const files = 8_000
	p.mkdir("d", 0o755)
	for i := range files {
		p.must(unix.Mknod(p.at("d", strconv.Itoa(i)), unix.S_IFREG|0o644, 0))
	}
	count := func() {
		entries, err := os.ReadDir(p.at("d"))
		p.note("%d entries, %s", len(entries), errnoName(err))
	}
	count()
	count()
	p.try("rmdir", unix.Rmdir(p.at("d")))
	p.stat("d/7999")
	p.stat("d/8000")
	for i := 0; i < files; i += 2 {
		p.must(unix.Unlink(p.at("d", strconv.Itoa(i))))
	}
	count()
	out, err := exec.Command("rm", "-r", p.at("d")).CombinedOutput()
	p.note("rm -r: %q %v", out, err)
	p.stat("d")
}

func probeRemovedDir(p *probe) {
	p.mkdir("d", 0o755)
	fd := p.open("d", unix.O_RDONLY|unix.O_DIRECTORY)
	defer unix.Close(fd)
	p.must(unix.Rmdir(p.at("d")))
	var st unix.Stat_t
	p.try("fstat", unix.Fstat(fd, &st))
	p.note("links %d", st.Nlink)
	made, err := unix.Openat(fd, "f", unix.O_CREAT|unix.O_WRONLY, 0o644)
	p.try("create", err)
	p.note("made %v", made >= 0)
	p.try("mkdir", unix.Mkdirat(fd, "sub", 0o755))
	p.try("symlink", unix.Symlinkat("x", fd, "s"))
	p.try("mknod", unix.Mknodat(fd, "n", unix.S_IFIFO|0o644, 0))
	p.file("file", "x", 0o644)
	p.try("link", unix.Linkat(unix.AT_FDCWD, p.at("file"), fd, "l", 0))
	p.try("rename into", unix.Renameat(unix.AT_FDCWD, p.at("file"), fd, "r"))
	_, err = unix.Openat(fd, "none", unix.O_RDONLY, 0)
	p.try("open", err)
	_, err = unix.Openat(fd, ".", unix.O_TMPFILE|unix.O_RDWR, 0o600)
	p.try("O_TMPFILE", err)
	up, err := unix.Openat(fd, "..", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	p.try("open ..", err)
	unix.Close(up)
	p.try("fchmod", unix.Fchmod(fd, 0o700))
	p.try("fsetxattr", unix.Fsetxattr(fd, "user.k", []byte("v"), 0))
	names, err := listFrom(fd)
	p.note("listing: %v %s", names, errnoName(err))
	p.try("fsync", unix.Fsync(fd))

	p.mkdir("cwd", 0o755)
	for _, cmd := range []string{
		"pwd -P", "/bin/pwd", "ls -A .", "ls -A ..", "echo x >new", "mkdir sub", "cd .. && pwd", "stat -c %h .",
		"mkdir ../cwd && echo x >new", "rmdir ../cwd",
	} {
		c := exec.Command("sh", "-c", `cd "$1" && rmdir "$1" && eval "$2"; echo $?`, "sh", p.at("cwd"), cmd)
		c.Env = append(os.Environ(), "LC_ALL=C")
		out, err := c.CombinedOutput()
		p.note("%s: %s %v", cmd, out, err)
		p.must(os.MkdirAll(p.at("cwd"), 0o755))
	}
}

func probeUnlinkedFile(p *probe) {
	p.file("f", "content", 0o644)
	fd := p.open("f", unix.O_RDWR)
	defer unix.Close(fd)
	path := p.open("f", unix.O_PATH)
	defer unix.Close(path)
	p.must(unix.Unlink(p.at("f")))
	own := "/proc/self/fd/" + strconv.Itoa(fd)
	for _, c := range []namedCall{
		{"pwrite", func() error { _, err := unix.Pwrite(fd, []byte("new"), 3); return err }},
		{"ftruncate", func() error { return unix.Ftruncate(fd, 6) }},
		{"fchmod", func() error { return unix.Fchmod(fd, 0o600) }},
		{"fchown", func() error { return unix.Fchown(fd, 1, 2) }},
		{"futimens", func() error { return unix.UtimesNanoAt(unix.AT_FDCWD, own, nil, 0) }},
		{"fsetxattr", func() error { return unix.Fsetxattr(fd, "user.k", []byte("v"), 0) }},
		{"fallocate", func() error { return unix.Fallocate(fd, 0, 0, 100) }},
		{"link by proc", func() error {
			return unix.Linkat(unix.AT_FDCWD, own, unix.AT_FDCWD, p.at("l"), unix.AT_SYMLINK_FOLLOW)
		}},
		{"link by AT_EMPTY_PATH", func() error { return unix.Linkat(fd, "", unix.AT_FDCWD, p.at("l"), unix.AT_EMPTY_PATH) }},
		{"open again", func() error { return p.opens(own, unix.O_RDWR) }},
		{"open again to truncate", func() error { return p.opens(own, unix.O_WRONLY|unix.O_TRUNC) }},
		{"truncate again", func() error { return unix.Truncate(own, 9) }},
		{"open by path descriptor", func() error { return p.opens("/proc/self/fd/"+strconv.Itoa(path), unix.O_RDONLY) }},
		{"map", func() error { return p.maps(fd, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED) }},
		{"fsync", func() error { return unix.Fsync(fd) }},
	} {
		p.try(c.name, c.do())
		var st unix.Stat_t
		p.must(unix.Fstat(fd, &st))
		p.note("mode %o owner %d:%d links %d size %d", st.Mode, st.Uid, st.Gid, st.Nlink, st.Size)
	}
	b := make([]byte, 200)
	n, err := unix.Pread(fd, b, 0)
	p.note("read %q %s", b[:max(n, 0)], errnoName(err))
	p.file("f", "another", 0o644)
	p.content("f")
	p.try("rename over an open one", unix.Rename(p.file("g", "third", 0o644), p.at("f")))
	p.content("f")
}

func probeHandles(p *probe) {
	p.mkdir("d", 0o755)
	p.file("d/f", "content", 0o644)
	at := p.open("d", unix.O_RDONLY|unix.O_DIRECTORY)
	defer unix.Close(at)
	for _, name := range []string{"d/f", "d"} {
		keep := p.open(name, unix.O_RDONLY)
		h, _, err := unix.NameToHandleAt(unix.AT_FDCWD, p.at(name), 0)
		if !p.try("name_to_handle_at "+name, err) {
			continue
		}
		fd, err := unix.OpenByHandleAt(at, h, unix.O_RDONLY)
		if p.try("open_by_handle_at", err) {
			var a, b unix.Stat_t
			p.must(unix.Fstat(fd, &a))
			p.must(unix.Stat(p.at(name), &b))
			p.note("the same: %v", a.Ino == b.Ino && a.Dev == b.Dev)
			unix.Close(fd)
		}
		p.as(nobody, nobody, nil, func() {
			_, err := unix.OpenByHandleAt(at, h, unix.O_RDONLY)
			p.try("as nobody", err)
		})
		unix.Close(keep)
	}
	h, _, err := unix.NameToHandleAt(unix.AT_FDCWD, p.at("d/f"), 0)
	p.must(err)
	p.must(unix.Unlink(p.at("d/f")))
	for end := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		fd, open := unix.OpenByHandleAt(at, h, unix.O_RDONLY)
		if err = open; err != nil || time.Now().After(end) {
			break
		}
		unix.Close(fd) // the kernel tells a mount of a close later, and keeps the file till then
	}
	p.try("of a file that is gone", err)
	_, _, err = unix.NameToHandleAt(unix.AT_FDCWD, p.at("none"), 0)
	p.try("of none", err)
}

// probeInotify notes the events of a directory and of a file in it.
func probeInotify(p *probe) {
	p.mkdir("d", 0o755)
	p.file("d/f", "content", 0o644)
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	p.must(err)
	defer unix.Close(fd)
	watches := make(map[int32]string)
	for _, name := range []string{"d", "d/f"} {
		wd, err := unix.InotifyAddWatch(fd, p.at(name), unix.IN_ALL_EVENTS)
		p.must(err)
		watches[int32(wd)] = name
	}
	events := func(what string) {
		buf := make([]byte, 64<<10)
		n, _ := unix.Read(fd, buf)
		p.note("%s:", what)
		for b := buf[:max(n, 0)]; len(b) >= unix.SizeofInotifyEvent; {
			wd, mask, size := int32(le32(b)), le32(b[4:]), le32(b[12:])
			name := strings.TrimRight(string(b[16:16+size]), "\x00")
			p.note("  %s %x %q", watches[wd], mask, name)
			b = b[16+size:]
		}
	}
	p.must(os.WriteFile(p.at("d/new"), []byte("x"), 0o644))
	events("create and write")
	_, err = os.ReadFile(p.at("d/f"))
	p.must(err)
	events("read")
	p.must(os.WriteFile(p.at("d/f"), []byte("x"), 0o644))
	events("write over")
	p.must(unix.Chmod(p.at("d/f"), 0o600))
	p.must(unix.Setxattr(p.at("d/f"), "user.k", []byte("v"), 0))
	p.must(unix.Truncate(p.at("d/f"), 0))
	events("attributes")
	p.must(unix.Link(p.at("d/f"), p.at("d/l")))
	p.must(unix.Rename(p.at("d/new"), p.at("d/newer")))
	p.must(unix.Rename(p.at("d/newer"), p.at("out")))
	p.must(unix.Mkdir(p.at("d/sub"), 0o755))
	p.must(unix.Symlink("x", p.at("d/sym")))
	events("names")
	_, err = os.ReadDir(p.at("d"))
	p.must(err)
	events("listing")
	for _, name := range []string{"l", "f", "sym"} {
		p.must(unix.Unlink(p.at("d", name)))
	}
	p.must(unix.Rmdir(p.at("d/sub")))
	events("removals")
	p.must(unix.Rename(p.at("d"), p.at("moved")))
	p.must(unix.Rmdir(p.at("moved")))
	events("itself")
}

func le32(b []byte) uint32 {
	return uint32(b[0]) | uint32(b[1])<<8 | uint32(b[2])<<16 | uint32(b[3])<<24
}
