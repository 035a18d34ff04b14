//go:build linux

package tests

import (
	"bytes"
	"encoding/binary"
	"os"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
)

// flagProbes are about chattr(1): immutable files, files that may only grow,
// and who may say so.
func flagProbes() []probeCase {
	return []probeCase{
		{"immutable files", probeImmutable},
		{"files that may only grow", probeAppendOnly},
		{"directories with flags", probeFlaggedDirs},
		{"who may set flags", probeFlagRights},
		{"flags by FS_IOC_FSSETXATTR", probeFSXattr},
		{"flags of suid files", probeSuidFlags},
		{"other ioctls", probeOtherIoctls},
	}
}

const (
	immutableFlag = 0x10
	appendFlag    = 0x20
	nodumpFlag    = 0x40
	noatimeFlag   = 0x80
)

// flags returns a file's flags that are the same wherever it is.
func fileFlags(path string) (int, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	return unix.IoctlGetInt(fd, unix.FS_IOC_GETFLAGS)
}

// changeFlags sets flags and clears others.
func changeFlags(path string, set, clear int) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	flags, err := unix.IoctlGetInt(fd, unix.FS_IOC_GETFLAGS)
	if err != nil {
		return err
	}
	return unix.IoctlSetPointerInt(fd, unix.FS_IOC_SETFLAGS, flags&^clear|set)
}

func (p *probe) showFlags(name string) {
	flags, err := fileFlags(p.at(name))
	p.note("flags of %s: %s %#x", name, errnoName(err), flags)
}

// changes tries all that changes a file.
func (p *probe) changes(name string) {
	path := p.at(name)
	for _, flags := range []int{
		unix.O_RDONLY, unix.O_WRONLY, unix.O_RDWR, unix.O_WRONLY | unix.O_APPEND, unix.O_RDWR | unix.O_APPEND,
		unix.O_WRONLY | unix.O_TRUNC, unix.O_WRONLY | unix.O_APPEND | unix.O_TRUNC, unix.O_RDONLY | unix.O_TRUNC,
		unix.O_WRONLY | unix.O_CREAT, unix.O_WRONLY | unix.O_CREAT | unix.O_APPEND,
	} {
		fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0o600)
		if !p.try("open "+name+" "+hex(flags), err) {
			continue
		}
		_, err = unix.Write(fd, []byte("more "))
		p.try("write", err)
		_, err = unix.Pwrite(fd, []byte("X"), 0)
		p.try("pwrite", err)
		p.try("ftruncate", unix.Ftruncate(fd, 1))
		p.try("fallocate", unix.Fallocate(fd, 0, 0, 50))
		p.try("punch", unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 1))
		unix.Close(fd)
	}
	p.try("truncate", unix.Truncate(path, 1))
	p.try("chmod", unix.Chmod(path, 0o640))
	p.try("chown", unix.Chown(path, 1, 1))
	p.try("touch", unix.UtimesNanoAt(unix.AT_FDCWD, path, nil, 0))
	p.try("utimens", unix.UtimesNanoAt(unix.AT_FDCWD, path, []unix.Timespec{{Sec: 1}, {Sec: 2}}, 0))
	p.try("setxattr", unix.Setxattr(path, "user.k", []byte("v"), 0))
	p.try("setxattr trusted", unix.Setxattr(path, "trusted.k", []byte("v"), 0))
	p.try("link", unix.Link(path, path+".link"))
	p.try("rename", unix.Rename(path, path+".renamed"))
	p.try("rename over", unix.Rename(p.file(name+".other", "other", 0o644), path))
	p.try("unlink", unix.Unlink(path))
	p.stat(name)
	p.content(name)
}

func hex(n int) string { return strconv.FormatInt(int64(n), 16) }

func probeImmutable(p *probe) {
	p.file("f", "content", 0o644)
	before := p.open("f", unix.O_RDWR)
	p.try("chattr", changeFlags(p.at("f"), immutableFlag, 0))
	p.showFlags("f")
	_, err := unix.Write(before, []byte("CON"))
	p.try("write to one that was open", err)
	p.try("ftruncate", unix.Ftruncate(before, 3))
	unix.Close(before)
	p.changes("f")
	p.try("chattr back", changeFlags(p.at("f"), 0, immutableFlag))
	p.showFlags("f")
	p.must(os.WriteFile(p.at("f"), []byte("free again"), 0o644))
	p.content("f")
}

func probeAppendOnly(p *probe) {
	p.file("g", "content ", 0o644)
	before := p.open("g", unix.O_RDWR)
	p.try("chattr", changeFlags(p.at("g"), appendFlag, 0))
	_, err := unix.Write(before, []byte("CON"))
	p.try("write to one that was open", err)
	p.try("ftruncate", unix.Ftruncate(before, 3))
	unix.Close(before)
	p.content("g")
	p.must(changeFlags(p.at("g"), 0, appendFlag))

	p.file("f", "content ", 0o644)
	p.try("chattr", changeFlags(p.at("f"), appendFlag, 0))
	p.showFlags("f")
	p.changes("f")

	// Nothing but its end can be written, whatever becomes of the descriptor:
	// FUSE does not let a file system forbid this fcntl(2).
	fd := p.open("f", unix.O_RDWR|unix.O_APPEND)
	_, err = unix.FcntlInt(uintptr(fd), unix.F_SETFL, 0)
	if err == nil {
		_, err = unix.Pwrite(fd, []byte("OVERWRITTEN"), 0)
		p.must(err)
	}
	unix.Close(fd)
	b, err := os.ReadFile(p.at("f"))
	p.must(err)
	p.note("still begins with the content: %v", bytes.HasPrefix(b, []byte("content ")))
	p.try("chattr back", changeFlags(p.at("f"), 0, appendFlag))
	p.must(os.WriteFile(p.at("f"), []byte("free again"), 0o644))
	p.content("f")
}

func probeFlaggedDirs(p *probe) {
	for _, flag := range []int{immutableFlag, appendFlag} {
		d := "d" + hex(flag)
		p.mkdir(d, 0o755)
		p.file(d+"/f", "content", 0o644)
		p.try("chattr", changeFlags(p.at(d), flag, 0))
		p.showFlags(d)
		p.try("create", unix.Mknod(p.at(d, "new"), unix.S_IFREG|0o644, 0))
		p.try("open to create", p.opens(p.at(d, "new2"), unix.O_WRONLY|unix.O_CREAT))
		p.try("mkdir", unix.Mkdir(p.at(d, "sub"), 0o755))
		p.try("symlink", unix.Symlink("x", p.at(d, "sym")))
		p.try("link", unix.Link(p.at(d, "f"), p.at(d, "l")))
		p.try("rename", unix.Rename(p.at(d, "f"), p.at(d, "g")))
		p.try("write", os.WriteFile(p.at(d, "f"), []byte("written"), 0o644))
		p.try("unlink", unix.Unlink(p.at(d, "f")))
		p.try("chmod", unix.Chmod(p.at(d), 0o700))
		p.try("rmdir", unix.Rmdir(p.at(d)))
		p.try("rename it", unix.Rename(p.at(d), p.at("else")))
		p.stat(d)
		p.try("chattr back", changeFlags(p.at(d), 0, flag))
		p.try("unlink", unix.Unlink(p.at(d, "f")))
	}
}

func probeFlagRights(p *probe) {
	p.file("roots", "x", 0o666)
	p.file("own", "x", 0o600)
	p.must(unix.Chown(p.at("own"), nobody, nobody))
	p.mkdir("dir", 0o777)
	p.as(nobody, nobody, nil, func() {
		for _, name := range []string{"roots", "own", "dir"} {
			for _, flag := range []int{nodumpFlag, noatimeFlag, appendFlag, immutableFlag} {
				p.try(name+" "+hex(flag), changeFlags(p.at(name), flag, 0))
			}
		}
	})
	for _, name := range []string{"roots", "own", "dir"} {
		p.showFlags(name)
	}
	p.try("a fifo", unix.Mkfifo(p.at("fifo"), 0o666))
	p.try("its flags", changeFlags(p.at("fifo"), nodumpFlag, 0))
	p.try("unknown flags", changeFlags(p.at("roots"), 0x40000, 0))
	p.showFlags("roots")
}

// probeFSXattr uses struct fsxattr of linux/fs.h.
func probeFSXattr(p *probe) {
	const get, set = 0x801c581f, 0x401c5820
	p.file("f", "x", 0o666)
	call := func(req uintptr, b *[28]byte) error {
		fd := p.open("f", unix.O_RDONLY)
		defer unix.Close(fd)
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), req, uintptr(unsafe.Pointer(b))); errno != 0 {
			return errno
		}
		return nil
	}
	var b [28]byte
	p.try("get", call(get, &b))
	p.note("%x", b)
	binary.NativeEndian.PutUint32(b[:], binary.NativeEndian.Uint32(b[:])|0x80) // FS_XFLAG_NODUMP
	p.try("set", call(set, &b))
	p.try("get", call(get, &b))
	p.note("%x", b)
	binary.NativeEndian.PutUint32(b[:], 0x8) // FS_XFLAG_IMMUTABLE
	p.as(nobody, nobody, nil, func() { p.try("set as nobody", call(set, &b)) })
	binary.NativeEndian.PutUint32(b[12:], 7)
	p.try("a project", call(set, &b))
	p.showFlags("f")
	p.must(changeFlags(p.at("f"), 0, immutableFlag))
}

func probeSuidFlags(p *probe) {
	p.file("f", "x", 0o755)
	p.mkdir("d", 0o755)
	for _, name := range []string{"f", "d"} {
		for _, who := range []int{nobody, 0} {
			p.must(unix.Chown(p.at(name), nobody, nobody))
			p.must(unix.Chmod(p.at(name), 0o6755))
			p.as(who, who, nil, func() {
				fd := p.open(name, unix.O_RDONLY)
				defer unix.Close(fd)
				var b [28]byte
				p.try("get", ioctlAt(fd, 0x801c581f, uintptr(unsafe.Pointer(&b[0]))))
				b[0] ^= 0x80 // FS_XFLAG_NODUMP
				p.try("set", ioctlAt(fd, 0x401c5820, uintptr(unsafe.Pointer(&b[0]))))
			})
			p.stat(name)
		}
	}
}

// probeOtherIoctls: none that is not known reaches the file system.
func probeOtherIoctls(p *probe) {
	p.file("f", "x", 0o666)
	fd := p.open("f", unix.O_RDWR)
	defer unix.Close(fd)
	version, err := unix.IoctlGetInt(fd, 0x80087601)
	p.note("FS_IOC_GETVERSION: %s, a number: %v", errnoName(err), version != 0)
	p.mkdir("d", 0o755)
	for _, name := range []string{"f", "d"} {
		fd := p.open(name, unix.O_RDONLY)
		room := [4]uint32{1: 0xaaaaaaaa, 2: 0xaaaaaaaa} // programs have an int for it
		p.try(name+": FS_IOC_GETVERSION", ioctlAt(fd, 0x80087601, uintptr(unsafe.Pointer(&room[0]))))
		p.note("behind it: %x", room[1:])
		unix.Close(fd)
	}
	p.try("FS_IOC_SETFLAGS at address 0", ioctlAt(fd, unix.FS_IOC_SETFLAGS, 0))
	p.try("FS_IOC_GETFLAGS at address 0", ioctlAt(fd, unix.FS_IOC_GETFLAGS, 0))
	p.try("TCGETS", ioctlAt(fd, unix.TCGETS, 0))
	p.showFlags("f")
}

func ioctlAt(fd int, req, arg uintptr) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), req, arg); errno != 0 {
		return errno
	}
	return nil
}
