//go:build linux

package tests

import (
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// timeProbes are about the three times of a file, and the fourth.
func timeProbes() []probeCase {
	return []probeCase{
		{"times to the nanosecond", probeNanoseconds},
		{"utimensat specials", probeUtimens},
		{"who may set times", probeTimesOfOthers},
		{"which calls change which times", probeTimeChanges},
		{"times of mapped writes", probeMappedTimes},
		{"times of mapped writes, of files that were empty", probeGrownTimes},
		{"attributes asked for one at a time", probeSingleAttributes},
		{"attributes that fsync and a refused chattr change", probeLateAttributes},
		{"atime of reads", probeAtime},
	}
}

func (p *probe) times(name string) (st unix.Stat_t) {
	p.must(unix.Lstat(p.at(name), &st))
	return st
}

func probeNanoseconds(p *probe) {
	p.file("file", "x", 0o644)
	p.mkdir("dir", 0o755)
	p.must(unix.Symlink("file", p.at("link")))
	for _, name := range []string{"file", "dir", "link"} {
		for _, ts := range []unix.Timespec{
			{Sec: 0, Nsec: 0},
			{Sec: 1, Nsec: 1},
			{Sec: -1, Nsec: 999999999},
			{Sec: 1234567890, Nsec: 123456789},
			{Sec: 1<<31 - 1},
			{Sec: 1 << 31},
			{Sec: 1<<32 + 5, Nsec: 7},
			{Sec: -1 << 31},
			{Sec: -1<<31 - 1},
			{Sec: 15032385535, Nsec: 999999999},
			{Sec: 15032385536},
			{Sec: 1 << 40},
		} {
			err := unix.UtimesNanoAt(unix.AT_FDCWD, p.at(name), []unix.Timespec{ts, {Sec: ts.Sec, Nsec: ts.Nsec / 2}}, unix.AT_SYMLINK_NOFOLLOW)
			st := p.times(name)
			p.note("%s %v: %s atime %v mtime %v", name, ts, errnoName(err), st.Atim, st.Mtim)
		}
	}
}

func probeUtimens(p *probe) {
	p.file("file", "x", 0o644)
	old := []unix.Timespec{{Sec: 100, Nsec: 1}, {Sec: 200, Nsec: 2}}
	for _, c := range []struct {
		name string
		ts   []unix.Timespec
	}{
		{"both omitted", []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Nsec: unix.UTIME_OMIT}}},
		{"atime omitted", []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Sec: 5}}},
		{"mtime omitted", []unix.Timespec{{Sec: 5}, {Nsec: unix.UTIME_OMIT}}},
		{"atime now", []unix.Timespec{{Nsec: unix.UTIME_NOW}, {Sec: 5}}},
		{"mtime now", []unix.Timespec{{Sec: 5}, {Nsec: unix.UTIME_NOW}}},
		{"both now", []unix.Timespec{{Nsec: unix.UTIME_NOW}, {Nsec: unix.UTIME_NOW}}},
		{"atime now, mtime omitted", []unix.Timespec{{Nsec: unix.UTIME_NOW}, {Nsec: unix.UTIME_OMIT}}},
		{"too many nanoseconds", []unix.Timespec{{Nsec: 1000000000}, {Sec: 5}}},
		{"none", nil},
	} {
		p.must(unix.UtimesNanoAt(unix.AT_FDCWD, p.at("file"), old, 0))
		before := p.times("file")
		for time.Since(time.Unix(before.Ctim.Sec, before.Ctim.Nsec)) < 10*time.Millisecond {
			time.Sleep(time.Millisecond) // so that now is another time
		}
		err := unix.UtimesNanoAt(unix.AT_FDCWD, p.at("file"), c.ts, 0)
		after := p.times("file")
		p.note("%s: %s atime %s mtime %s ctime changed %v", c.name, errnoName(err), when(after.Atim), when(after.Mtim), after.Ctim != before.Ctim)
	}
}

// when shows a time of the past as it is.
func when(ts unix.Timespec) string {
	if ago := time.Since(time.Unix(ts.Sec, ts.Nsec)); ago > -time.Minute && ago < time.Minute {
		return "now"
	}
	return fmt.Sprintf("%d.%09d", ts.Sec, ts.Nsec)
}

func probeTimesOfOthers(p *probe) {
	p.file("writable", "x", 0o666)
	p.file("readable", "x", 0o644)
	p.file("own", "x", 0o400)
	p.must(unix.Chown(p.at("own"), nobody, nobody))
	past := []unix.Timespec{{Sec: 5}, {Sec: 6}}
	now := []unix.Timespec{{Nsec: unix.UTIME_NOW}, {Nsec: unix.UTIME_NOW}}
	half := []unix.Timespec{{Nsec: unix.UTIME_NOW}, {Nsec: unix.UTIME_OMIT}}
	omit := []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Nsec: unix.UTIME_OMIT}}
	p.as(nobody, nobody, nil, func() {
		for _, name := range []string{"writable", "readable", "own"} {
			p.try(name+" past", unix.UtimesNanoAt(unix.AT_FDCWD, p.at(name), past, 0))
			p.try(name+" now", unix.UtimesNanoAt(unix.AT_FDCWD, p.at(name), now, 0))
			p.try(name+" atime now", unix.UtimesNanoAt(unix.AT_FDCWD, p.at(name), half, 0))
			p.try(name+" omit", unix.UtimesNanoAt(unix.AT_FDCWD, p.at(name), omit, 0))
			p.try(name+" null", unix.UtimesNanoAt(unix.AT_FDCWD, p.at(name), nil, 0))
		}
	})
}

// probeTimeChanges makes each call on files whose times are long ago, and notes
// which are not any more.
func probeTimeChanges(p *probe) {
	long := []unix.Timespec{{Sec: 1000}, {Sec: 1000}}
	p.mkdir("dir", 0o755)
	p.mkdir("dir2", 0o755)
	p.mkdir("dir/sub", 0o755)
	fd := -1
	watch := []string{"dir", "dir2", "dir/file", "dir/other"}
	for _, c := range []namedCall{
		{"create", func() error { return p.opens(p.at("dir/new"), unix.O_CREAT|unix.O_WRONLY) }},
		{"create again", func() error { return p.opens(p.at("dir/new"), unix.O_CREAT|unix.O_WRONLY) }},
		{"unlink new", func() error { return unix.Unlink(p.at("dir/new")) }},
		{"mkdir", func() error { return unix.Mkdir(p.at("dir/newdir"), 0o755) }},
		{"rmdir", func() error { return unix.Rmdir(p.at("dir/newdir")) }},
		{"symlink", func() error { return unix.Symlink("x", p.at("dir/symlink")) }},
		{"unlink symlink", func() error { return unix.Unlink(p.at("dir/symlink")) }},
		{"mknod", func() error { return unix.Mknod(p.at("dir/node"), unix.S_IFIFO|0o600, 0) }},
		{"unlink node", func() error { return unix.Unlink(p.at("dir/node")) }},
		{"link", func() error { return unix.Link(p.at("dir/file"), p.at("dir2/alias")) }},
		{"unlink alias", func() error { return unix.Unlink(p.at("dir2/alias")) }},
		{"rename", func() error { return unix.Rename(p.at("dir/file"), p.at("dir2/moved")) }},
		{"rename back", func() error { return unix.Rename(p.at("dir2/moved"), p.at("dir/file")) }},
		{"rename to itself", func() error { return unix.Rename(p.at("dir/file"), p.at("dir/file")) }},
		{"exchange", func() error {
			return unix.Renameat2(unix.AT_FDCWD, p.at("dir/file"), unix.AT_FDCWD, p.at("dir/other"), unix.RENAME_EXCHANGE)
		}},
		{"open to write", func() (err error) { fd, err = unix.Open(p.at("dir/file"), unix.O_RDWR, 0); return err }},
		{"write", func() error { _, err := unix.Write(fd, []byte("data")); return err }},
		{"write nothing", func() error { _, err := unix.Write(fd, nil); return err }},
		{"ftruncate", func() error { return unix.Ftruncate(fd, 2) }},
		{"ftruncate to the same", func() error { return unix.Ftruncate(fd, 2) }},
		{"truncate to the same", func() error { return unix.Truncate(p.at("dir/file"), 2) }},
		{"truncate", func() error { return unix.Truncate(p.at("dir/file"), 9000) }},
		{"fallocate", func() error { return unix.Fallocate(fd, 0, 0, 20000) }},
		{"fallocate what is there", func() error { return unix.Fallocate(fd, 0, 0, 20000) }},
		{"fallocate keeping size", func() error { return unix.Fallocate(fd, unix.FALLOC_FL_KEEP_SIZE, 0, 90000) }},
		{"punch", func() error { return unix.Fallocate(fd, unix.FALLOC_FL_KEEP_SIZE|unix.FALLOC_FL_PUNCH_HOLE, 0, 4096) }},
		{"zero", func() error { return unix.Fallocate(fd, unix.FALLOC_FL_ZERO_RANGE, 0, 4096) }},
		{"fchmod", func() error { return unix.Fchmod(fd, 0o640) }},
		{"chmod to the same", func() error { return unix.Chmod(p.at("dir/file"), 0o640) }},
		{"chown", func() error { return unix.Chown(p.at("dir/file"), 5, 5) }},
		{"chown to nobody new", func() error { return unix.Chown(p.at("dir/file"), -1, -1) }},
		{"setxattr", func() error { return unix.Setxattr(p.at("dir/file"), "user.k", []byte("v"), 0) }},
		{"removexattr", func() error { return unix.Removexattr(p.at("dir/file"), "user.k") }},
		{"removexattr of none", func() error { return unix.Removexattr(p.at("dir/file"), "user.k") }},
		{"utimens omitted", func() error {
			return unix.UtimesNanoAt(unix.AT_FDCWD, p.at("dir/file"), []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Nsec: unix.UTIME_OMIT}}, 0)
		}},
		{"fsync", func() error { return unix.Fsync(fd) }},
		{"close", func() error { return unix.Close(fd) }},
		{"truncating open", func() error { return p.opens(p.at("dir/file"), unix.O_WRONLY|unix.O_TRUNC) }},
		{"truncating open of nothing", func() error { return p.opens(p.at("dir/file"), unix.O_WRONLY|unix.O_TRUNC) }},
		{"creat", func() error { return p.opens(p.at("dir/file"), unix.O_WRONLY|unix.O_TRUNC|unix.O_CREAT) }},
		{"mapped write", func() error { return p.mapWrite("dir/other") }},
		{"rename onto", func() error { return unix.Rename(p.at("dir/other"), p.at("dir/file")) }},
	} {
		if _, err := os.Lstat(p.at("dir/file")); err != nil {
			p.file("dir/file", "content", 0o644)
		}
		if _, err := os.Lstat(p.at("dir/other")); err != nil {
			p.file("dir/other", "content", 0o644)
		}
		before := map[string]unix.Stat_t{}
		for _, name := range watch {
			p.must(unix.UtimesNanoAt(unix.AT_FDCWD, p.at(name), long, 0))
			before[name] = p.times(name)
		}
		awaitLater(before[watch[len(watch)-1]].Ctim)
		err := c.do()
		line := errnoName(err)
		for _, name := range watch {
			var st unix.Stat_t
			if unix.Lstat(p.at(name), &st) != nil {
				line += " no " + name
				continue
			}
			if st.Mtim != before[name].Mtim {
				line += fmt.Sprintf(" mtime of %s is %s", name, when(st.Mtim))
			}
			if st.Ctim != before[name].Ctim {
				line += fmt.Sprintf(" ctime of %s is %s", name, when(st.Ctim))
			}
		}
		p.note("%s: %s", c.name, line)
	}
}

// awaitLater returns when what is changed now gets a later time. The clock that file systems
// go by is behind by a tick, and by some where the machine is busy.
func awaitLater(t unix.Timespec) {
	for {
		var now unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &now); err != nil || now.Nano() > t.Nano() {
			return
		}
		time.Sleep(time.Millisecond)
	}
}

// lookAt asks for no atime, which mmap(2) changes.
func (p *probe) lookAt(name string) (st unix.Statx_t) {
	p.must(unix.Statx(unix.AT_FDCWD, p.at(name), 0, unix.STATX_MTIME|unix.STATX_CTIME|unix.STATX_BLOCKS|unix.STATX_SIZE, &st))
	return st
}

func (p *probe) mapWrite(name string) error {
	fd := p.open(name, unix.O_RDWR)
	defer unix.Close(fd)
	m, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	m[0]++
	if err := unix.Msync(m, unix.MS_SYNC); err != nil {
		return err
	}
	return unix.Munmap(m)
}

// probeMappedTimes writes through a mapping to a file whose attributes the kernel
// was asked for shortly before the open, and looks at once: while the mapping is
// there, and when all is closed.
func probeMappedTimes(p *probe) {
	for _, flags := range []int{unix.O_RDWR, unix.O_RDWR | unix.O_CREAT} {
		name := fmt.Sprintf("mapped%o", flags)
		p.file(name, strings.Repeat("x", 8192), 0o644)
		p.must(unix.Truncate(p.at(name), 1<<20)) // a hole, that a write fills
		for i := range 2 {
			before := p.lookAt(name)
			awaitLater(unix.Timespec{Sec: before.Ctime.Sec, Nsec: int64(before.Ctime.Nsec)})
			note := func(when string) {
				after := p.lookAt(name)
				p.note("%o %d %s: mtime changed %v, ctime %v, grew by %d", flags, i, when,
					after.Mtime != before.Mtime, after.Ctime != before.Ctime, after.Blocks-before.Blocks)
			}
			p.mapped(name, flags, func(m []byte) {
				m[(1+i)<<16]++
				p.must(unix.Msync(m, unix.MS_SYNC))
				note("mapped")
			})
			note("closed")
		}
	}
}

// probeGrownTimes writes through a mapping to a file that was made empty and got
// longer in several ways, with a look in between or without one.
func probeGrownTimes(p *probe) {
	const size = 8192
	p.file("source", strings.Repeat("s", size), 0o644)
	source := p.open("source", unix.O_RDONLY)
	defer unix.Close(source)
	for _, grow := range []struct {
		name string
		do   func(name string, fd int) error
	}{
		{"ftruncate", func(name string, fd int) error { return unix.Ftruncate(fd, size) }},
		{"truncate", func(name string, fd int) error { return unix.Truncate(p.at(name), size) }},
		{"pwrite", func(name string, fd int) error {
			_, err := unix.Pwrite(fd, make([]byte, size), 0)
			return err
		}},
		{"a write of another descriptor", func(name string, fd int) error {
			other := p.open(name, unix.O_WRONLY|unix.O_APPEND)
			defer unix.Close(other)
			_, err := unix.Write(other, make([]byte, size))
			return err
		}},
		{"fallocate", func(name string, fd int) error { return unix.Fallocate(fd, 0, 0, size) }},
		{"copy_file_range", func(name string, fd int) error {
			from := int64(0)
			_, err := unix.CopyFileRange(source, &from, fd, nil, size, 0)
			return err
		}},
		{"sendfile", func(name string, fd int) error {
			from := int64(0)
			_, err := unix.Sendfile(fd, source, &from, size)
			return err
		}},
	} {
		for _, looks := range []bool{false, true} {
			name := fmt.Sprintf("%s %v", grow.name, looks)
			fd := p.open(name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL)
			err := grow.do(name, fd)
			m, mapErr := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			p.must(mapErr)
			if looks {
				p.lookAt(name)
			}
			time.Sleep(20 * time.Millisecond) // so that now is another time
			began := time.Now().Add(-10 * time.Millisecond)
			now := func(ts unix.StatxTimestamp) bool { return time.Unix(ts.Sec, int64(ts.Nsec)).After(began) }
			m[5000]++
			p.must(unix.Msync(m, unix.MS_SYNC))
			st := p.lookAt(name)
			p.note("%s: %v, of %d bytes in %d blocks, written to by the mapping: mtime %v, ctime %v", name, err, st.Size, st.Blocks,
				now(st.Mtime), now(st.Ctime))
			p.must(unix.Munmap(m))
			unix.Close(fd)
		}
	}
}

// probeSingleAttributes makes changes between statx(2) calls for a single
// attribute: the kernel forgets some of them with a change, and answers others
// from what it knows.
func probeSingleAttributes(p *probe) {
	look := func(name string, mask int) (st unix.Statx_t) {
		p.must(unix.Statx(unix.AT_FDCWD, p.at(name), 0, mask, &st))
		return st
	}
	recent := func(t unix.StatxTimestamp) bool { return t.Sec != 1000 }
	for _, c := range []namedCall{
		{"a large attribute", func() error { return unix.Setxattr(p.at("f"), "user.a", make([]byte, 3000), 0) }},
		{"a smaller one", func() error { return unix.Setxattr(p.at("f"), "user.a", make([]byte, 3), 0) }},
		{"another large one", func() error { return unix.Setxattr(p.at("f"), "user.b", make([]byte, 3000), 0) }},
		{"none any more", func() error { return unix.Removexattr(p.at("f"), "user.b") }},
		{"a copy", func() error {
			from, to := p.open("f", unix.O_RDONLY), p.open("g", unix.O_WRONLY)
			defer unix.Close(from)
			defer unix.Close(to)
			_, err := unix.CopyFileRange(from, nil, to, nil, 5000, 0)
			return err
		}},
		{"a truncation", func() error { return unix.Truncate(p.at("g"), 5) }},
		{"a mode", func() error { return unix.Chmod(p.at("g"), 0o4711) }},
		{"an owner", func() error { return unix.Chown(p.at("g"), 5, 6) }},
		{"a name", func() error { return unix.Link(p.at("g"), p.at("h")) }},
		{"no name", func() error { return unix.Unlink(p.at("h")) }},
	} {
		for _, name := range []string{"f", "g"} {
			if _, err := os.Lstat(p.at(name)); err != nil {
				p.file(name, strings.Repeat("x", 6000), 0o644)
				fd := p.open(name, unix.O_RDONLY)
				p.must(unix.Fsync(fd)) // its blocks are known from here on
				p.must(unix.Close(fd))
			}
			p.must(unix.UtimesNanoAt(unix.AT_FDCWD, p.at(name), []unix.Timespec{{Sec: 1000}, {Sec: 1000}}, 0))
			look(name, unix.STATX_BASIC_STATS)
		}
		err := c.do()
		line := errnoName(err)
		for _, name := range []string{"f", "g"} {
			line += fmt.Sprintf(" %s: blocks %d mode %o links %d owner %d:%d size %d atime %v mtime %v", name,
				look(name, unix.STATX_BLOCKS).Blocks, look(name, unix.STATX_MODE).Mode, look(name, unix.STATX_NLINK).Nlink,
				look(name, unix.STATX_UID).Uid, look(name, unix.STATX_GID).Gid, look(name, unix.STATX_SIZE).Size,
				recent(look(name, unix.STATX_ATIME).Atime), recent(look(name, unix.STATX_MTIME).Mtime))
		}
		p.note("%s: %s", c.name, line)
	}
}

// probeLateAttributes has ext4 find only while it writes that a file of many pieces
// takes a block more, and set a ctime before it says no: without extents it stores no
// such file.
func probeLateAttributes(p *probe) {
	p.file("f", "", 0o644)
	fd := p.open("f", unix.O_WRONLY)
	for i := range 12 {
		_, err := unix.Pwrite(fd, make([]byte, 4096), int64(11-i)<<15)
		p.must(err)
	}
	p.must(unix.Close(fd))
	p.times("f")
	fd = p.open("f", unix.O_RDONLY)
	defer unix.Close(fd)
	p.must(unix.Fsync(fd))
	before := p.times("f")
	p.note("blocks %d", before.Blocks)
	time.Sleep(20 * time.Millisecond) // so that now is another time
	err := unix.IoctlSetPointerInt(fd, unix.FS_IOC_SETFLAGS, 0)
	p.note("no flags: %s, ctime changed: %v", errnoName(err), p.times("f").Ctim != before.Ctim)
}

// mapped calls f with a file mapped, whose descriptor is closed already.
func (p *probe) mapped(name string, flags int, f func(m []byte)) {
	fd := p.open(name, flags)
	m, err := unix.Mmap(fd, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	p.must(unix.Close(fd))
	p.must(err)
	f(m)
	p.must(unix.Munmap(m))
}

// probeAtime reads with an atime that is older, and younger, than the mtime;
// the file system is usually mounted with relatime, mount(8). Each file is read
// once: what the kernel has cached is read without the daemon.
func probeAtime(p *probe) {
	now := time.Now().Unix()
	for i, at := range [][]unix.Timespec{
		{{Sec: now - 2000}, {Sec: now - 1000}},
		{{Sec: now - 1000}, {Sec: now - 2000}},
		{{Sec: now - 200000}, {Sec: now - 300000}},
	} {
		for _, r := range []struct {
			name string
			do   func(path string) error
		}{
			{"open and read", func(path string) error { _, err := os.ReadFile(path); return err }},
			{"read without atime", func(path string) error { return readWith(path, unix.O_NOATIME) }},
			{"open only", func(path string) error { return p.opens(path, unix.O_RDONLY) }},
			{"direct", func(path string) error { return readWith(path, unix.O_DIRECT) }},
			{"readdir", func(path string) error { _, err := os.ReadDir(path); return err }},
			{"readdir without atime", func(path string) error { return listWith(path, unix.O_NOATIME) }},
			{"readlink", func(path string) error { _, err := os.Readlink(path); return err }},
		} {
			name := fmt.Sprintf("%s-%d", strings.ReplaceAll(r.name, " ", "-"), i)
			switch r.name {
			case "readdir", "readdir without atime":
				p.mkdir(name, 0o755)
			case "readlink":
				p.must(unix.Symlink("x", p.at(name)))
			default:
				p.file(name, strings.Repeat("content", 1000), 0o644)
			}
			p.must(unix.UtimesNanoAt(unix.AT_FDCWD, p.at(name), at, unix.AT_SYMLINK_NOFOLLOW))
			before := p.times(name)
			err := r.do(p.at(name))
			p.note("%s: %s changed %v", name, errnoName(err), p.times(name).Atim != before.Atim)
		}
	}
}

func readWith(path string, flags int) error {
	fd, err := unix.Open(path, unix.O_RDONLY|flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	_, err = unix.Read(fd, alignedBuffer(4096))
	return err
}

func listWith(path string, flags int) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	_, err = unix.Getdents(fd, make([]byte, 4096))
	return err
}
