//go:build linux

package tests

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// errnoProbes make every call on every kind of file.
func errnoProbes() []probeCase {
	return []probeCase{
		{"every call on every kind", probeKinds},
		{"every call on every kind as a user", probeKindsAsUser},
		{"calls on descriptors", probeDescriptors},
		{"odd flags of open", probeOpenFlags},
	}
}

// kinds makes a file of each kind, or replaces it.
func (p *probe) kinds(sub string) []string {
	p.mkdir(sub, 0o777)
	p.file(sub+"/source", "source", 0o644)
	p.file(sub+"/file", "content", 0o644)
	p.file(sub+"/secret", "content", 0o600)
	p.file(sub+"/empty", "", 0o666)
	p.mkdir(sub+"/dir", 0o755)
	p.mkdir(sub+"/shut", 0o700)
	p.mkdir(sub+"/full", 0o777)
	p.file(sub+"/full/file", "x", 0o644)
	p.must(unix.Mknod(p.at(sub, "fifo"), unix.S_IFIFO|0o644, 0))
	p.must(unix.Mknod(p.at(sub, "sock"), unix.S_IFSOCK|0o644, 0))
	p.must(unix.Mknod(p.at(sub, "null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	p.must(unix.Mknod(p.at(sub, "block"), unix.S_IFBLK|0o600, int(unix.Mkdev(254, 0x12345))))
	p.must(unix.Symlink("file", p.at(sub, "link")))
	p.must(unix.Symlink("dir", p.at(sub, "dirlink")))
	p.must(unix.Symlink("nowhere", p.at(sub, "dangling")))
	return []string{"file", "secret", "empty", "dir", "shut", "full", "fifo", "sock", "null", "block", "link", "dirlink", "dangling", "none"}
}

func probeKinds(p *probe) {
	for _, kind := range p.kinds("list") {
		for i, suffix := range []string{"", "/", "/x", "/.", "/.."} {
			sub := fmt.Sprintf("%s-%d", kind, i)
			p.kinds(sub)
			p.tryCalls(kind+suffix, p.at(sub)+"/"+kind+suffix)
		}
	}
}

func probeKindsAsUser(p *probe) {
	for _, kind := range p.kinds("list") {
		p.kinds(kind + "-mine")
		p.must(unix.Chmod(p.at(kind+"-mine"), 0o1777))
		p.kinds(kind + "-theirs")
		p.must(unix.Chmod(p.at(kind+"-theirs"), 0o755))
		p.as(nobody, nobody, []int{1234}, func() {
			p.tryCalls("sticky "+kind, p.at(kind+"-mine")+"/"+kind)
			p.tryCalls("theirs "+kind, p.at(kind+"-theirs")+"/"+kind)
		})
	}
}

func probeDescriptors(p *probe) {
	p.file("file", "content", 0o644)
	p.mkdir("dir", 0o755)
	p.must(unix.Mknod(p.at("fifo"), unix.S_IFIFO|0o644, 0))
	for _, c := range []struct {
		name, path string
		flags      int
	}{
		{"reader", "file", unix.O_RDONLY},
		{"writer", "file", unix.O_WRONLY},
		{"both", "file", unix.O_RDWR},
		{"access mode 3", "file", 3},
		{"path", "file", unix.O_PATH},
		{"append", "file", unix.O_RDWR | unix.O_APPEND},
		{"directory", "dir", unix.O_RDONLY},
		{"path of a directory", "dir", unix.O_PATH},
		{"fifo", "fifo", unix.O_RDWR | unix.O_NONBLOCK},
	} {
		fd := p.open(c.path, c.flags)
		for _, call := range p.descriptorCalls(fd) {
			p.try(c.name+" "+call.name, call.do())
		}
		unix.Close(fd)
	}
	p.stat("file")
	p.content("file")
}

func (p *probe) descriptorCalls(fd int) []namedCall {
	buf := make([]byte, 4)
	return []namedCall{
		{"write", func() error { _, err := unix.Write(fd, []byte("data")); return err }},
		{"read", func() error { _, err := unix.Read(fd, buf); return err }},
		{"pread", func() error { _, err := unix.Pread(fd, buf, 0); return err }},
		{"pread before the beginning", func() error { _, err := unix.Pread(fd, buf, -1); return err }},
		{"pwrite", func() error { _, err := unix.Pwrite(fd, []byte("data"), 2); return err }},
		{"seek", func() error { _, err := unix.Seek(fd, 1, unix.SEEK_SET); return err }},
		{"ftruncate", func() error { return unix.Ftruncate(fd, 5) }},
		{"ftruncate below zero", func() error { return unix.Ftruncate(fd, -5) }},
		{"fchmod", func() error { return unix.Fchmod(fd, 0o700) }},
		{"fchown", func() error { return unix.Fchown(fd, 0, 0) }},
		{"futimens", func() error {
			return unix.UtimesNanoAt(fd, "", []unix.Timespec{{Sec: 1}, {Sec: 2}}, unix.AT_EMPTY_PATH)
		}},
		{"fsync", func() error { return unix.Fsync(fd) }},
		{"fdatasync", func() error { return unix.Fdatasync(fd) }},
		{"syncfs", func() error { return unix.Syncfs(fd) }},
		{"sync_file_range", func() error { return unix.SyncFileRange(fd, 0, 4, unix.SYNC_FILE_RANGE_WRITE) }},
		{"fallocate", func() error { return unix.Fallocate(fd, 0, 0, 6) }},
		{"punch", func() error { return unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 2) }},
		{"punch and grow", func() error { return unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE, 0, 2) }},
		{"fadvise", func() error { return unix.Fadvise(fd, 0, 0, unix.FADV_DONTNEED) }},
		{"getdents", func() error { _, err := unix.Getdents(fd, make([]byte, 1024)); return err }},
		{"getdents into little", func() error { _, err := unix.Getdents(fd, make([]byte, 1)); return err }},
		{"fsetxattr", func() error { return unix.Fsetxattr(fd, "trusted.k", []byte("v"), 0) }},
		{"fgetxattr", func() error { _, err := unix.Fgetxattr(fd, "trusted.k", buf); return err }},
		{"flistxattr", func() error { _, err := unix.Flistxattr(fd, make([]byte, 1024)); return err }},
		{"fremovexattr", func() error { return unix.Fremovexattr(fd, "trusted.k") }},
		{"fchdir", func() error { return p.inThread(func() error { return unix.Fchdir(fd) }) }},
		{"flock", func() error { return unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) }},
		{"setlk", func() error {
			return unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK})
		}},
		{"setlk to read", func() error {
			return unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &unix.Flock_t{Type: unix.F_RDLCK})
		}},
		{"mmap to read", func() error { return p.maps(fd, unix.PROT_READ, unix.MAP_SHARED) }},
		{"mmap to write", func() error { return p.maps(fd, unix.PROT_WRITE, unix.MAP_SHARED) }},
		{"mmap private", func() error { return p.maps(fd, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE) }},
		{"mmap to run", func() error { return p.maps(fd, unix.PROT_EXEC, unix.MAP_PRIVATE) }},
		{"openat", func() error {
			n, err := unix.Openat(fd, "new", unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o644)
			unix.Close(n)
			return err
		}},
		{"unlinkat", func() error { return unix.Unlinkat(fd, "new", 0) }},
		{"FIONREAD", func() error { _, err := unix.IoctlGetInt(fd, unix.TIOCINQ); return err }},
		{"FS_IOC_GETFLAGS", func() error { _, err := unix.IoctlGetInt(fd, unix.FS_IOC_GETFLAGS); return err }},
		{"FICLONE", func() error { return unix.IoctlFileClone(fd, fd) }},
		{"TCGETS", func() error { _, err := unix.IoctlGetTermios(fd, unix.TCGETS); return err }},
		{"reopen", func() error { return p.opens(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDWR) }},
	}
}

func (p *probe) maps(fd, prot, flags int) error {
	m, err := unix.Mmap(fd, 0, 4096, prot, flags)
	if err == nil {
		err = unix.Munmap(m)
	}
	return err
}

// inThread runs f on a thread that has its working directory alone.
func (p *probe) inThread(f func() error) (err error) {
	p.as(0, 0, nil, func() {
		if err = unix.Unshare(unix.CLONE_FS); err == nil {
			err = f()
		}
	})
	return err
}

func probeOpenFlags(p *probe) {
	p.file("file", "content", 0o644)
	p.mkdir("dir", 0o755)
	p.must(unix.Symlink("file", p.at("link")))
	for _, name := range []string{"file", "dir", "link", "none"} {
		for _, f := range []struct {
			name  string
			flags int
		}{
			{"trunc without write", unix.O_RDONLY | unix.O_TRUNC},
			{"noatime", unix.O_NOATIME},
			{"sync", unix.O_RDWR | unix.O_SYNC},
			{"dsync", unix.O_RDWR | unix.O_DSYNC},
			{"async", unix.O_RDWR | unix.O_ASYNC},
			{"direct", unix.O_RDWR | unix.O_DIRECT},
			{"append trunc", unix.O_RDWR | unix.O_APPEND | unix.O_TRUNC},
			{"neither to read nor to write", unix.O_ACCMODE},
			{"neither, append trunc", unix.O_ACCMODE | unix.O_APPEND | unix.O_TRUNC},
			{"tmpfile without write", unix.O_TMPFILE | unix.O_RDONLY},
			{"excl without creat", unix.O_RDONLY | unix.O_EXCL},
			{"creat nofollow", unix.O_CREAT | unix.O_NOFOLLOW | unix.O_WRONLY},
			{"path creat", unix.O_PATH | unix.O_CREAT},
			{"creat directory excl", unix.O_CREAT | unix.O_DIRECTORY | unix.O_EXCL},
			{"unknown", 1 << 30},
			{"directory for writing", unix.O_DIRECTORY | unix.O_WRONLY},
		} {
			p.try(name+" "+f.name, p.opens(p.at(name), f.flags))
		}
		for _, how := range []unix.OpenHow{
			{Resolve: unix.RESOLVE_NO_SYMLINKS},
			{Resolve: unix.RESOLVE_BENEATH},
			{Resolve: unix.RESOLVE_IN_ROOT},
			{Resolve: unix.RESOLVE_NO_XDEV},

			{Resolve: 1 << 20},
			{Flags: unix.O_CREAT, Mode: 0o17777},
			{Flags: 1 << 40},
			{Mode: 0o644},
		} {
			dir := p.open(".", unix.O_PATH)
			fd, err := unix.Openat2(dir, name, &how)
			p.try(fmt.Sprintf("%s openat2 %+v", name, how), err)
			unix.Close(fd)
			unix.Close(dir)
		}
		p.stat(name)
	}
}
