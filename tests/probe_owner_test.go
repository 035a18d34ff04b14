//go:build linux

package tests

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// ownerProbes are about who owns what is made, and who may do what.
func ownerProbes() []probeCase {
	return []probeCase{
		{"what is made belongs to the caller", probeNewOwners},
		{"umask", probeUmask},
		{"supplementary groups", probeGroups},
		{"chmod and chown by others", probeChangeOwner},
		{"sticky directories", probeSticky},
		{"access with real and effective ids", probeAccess},
		{"protected links", probeProtected},
	}
}

// makeAll makes one of each kind in a directory.
func (p *probe) makeAll(dir, prefix string, mode uint32) {
	at := func(kind string) string { return p.at(dir, prefix+kind) }
	fd, err := unix.Open(at("file"), unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_CLOEXEC, mode)
	p.try(dir+" create "+prefix, err)
	unix.Close(fd)
	p.try(dir+" mkdir "+prefix, unix.Mkdir(at("dir"), mode))
	p.try(dir+" fifo "+prefix, unix.Mknod(at("fifo"), unix.S_IFIFO|mode, 0))
	p.try(dir+" socket "+prefix, unix.Mknod(at("sock"), unix.S_IFSOCK|mode, 0))
	p.try(dir+" mknod "+prefix, unix.Mknod(at("plain"), unix.S_IFREG|mode, 0))
	p.try(dir+" device "+prefix, unix.Mknod(at("null"), unix.S_IFCHR|mode, int(unix.Mkdev(1, 3))))
	p.try(dir+" symlink "+prefix, unix.Symlink("x", at("link")))
	fd, err = unix.Open(p.at(dir), unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, mode)
	if p.try(dir+" tmpfile "+prefix, err) {
		p.try(dir+" linkat "+prefix, unix.Linkat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", fd), unix.AT_FDCWD, at("tmp"), unix.AT_SYMLINK_FOLLOW))
		unix.Close(fd)
	}
	for _, kind := range []string{"file", "dir", "fifo", "sock", "plain", "null", "link", "tmp"} {
		p.stat(dir + "/" + prefix + kind)
	}
}

func probeNewOwners(p *probe) {
	for _, d := range []struct {
		name     string
		mode     uint32
		uid, gid int
	}{
		{"open", 0o777, 0, 0},
		{"shut", 0o755, 0, 0},
		{"setgid", 0o2777, 0, 1234},
		{"setgid-own", 0o2777, 0, nobody},
		{"setuid", 0o4777, 5, 5},
		{"group", 0o775, 0, 1234},
		{"group-setgid", 0o2775, 0, 1234},
	} {
		p.mkdir(d.name, d.mode)
		p.must(unix.Chown(p.at(d.name), d.uid, d.gid))
		p.must(unix.Chmod(p.at(d.name), d.mode))
		p.makeAll(d.name, "root-", 0o6777)
		p.as(nobody, nobody, nil, func() { p.makeAll(d.name, "nobody-", 0o6777) })
		p.as(nobody, nobody, []int{1234}, func() { p.makeAll(d.name, "member-", 0o7777) })
		p.as(7, 1234, nil, func() { p.makeAll(d.name, "of-", 0o2770) })
		p.as(0, 5, nil, func() { p.makeAll(d.name, "root5-", 0o2710) })
		p.as(7, 0, nil, func() { p.makeAll(d.name, "gid0-", 0o2710) })
	}
}

func probeUmask(p *probe) {
	defer unix.Umask(0)
	for _, mask := range []int{0, 0o022, 0o027, 0o077, 0o777, 0o111} {
		unix.Umask(mask)
		dir := fmt.Sprintf("mask%o", mask)
		p.must(unix.Mkdir(p.at(dir), 0o777))
		p.must(unix.Chmod(p.at(dir), 0o777))
		p.makeAll(dir, "root-", 0o7777)
		p.as(nobody, nobody, nil, func() {
			unix.Umask(mask) // threads share it, umask(2)
			p.makeAll(dir, "nobody-", 0o666)
		})
	}
}

func probeGroups(p *probe) {
	p.mkdir("dir", 0o770)
	p.must(unix.Chown(p.at("dir"), 0, 1234))
	p.file("dir/file", "x", 0o660)
	p.must(unix.Chown(p.at("dir/file"), 0, 4321))
	p.file("dir/none", "x", 0o606)
	p.must(unix.Chown(p.at("dir/none"), 0, 1234))
	for _, groups := range [][]int{nil, {1234}, {4321}, {1234, 4321}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 1234, 4321}} {
		p.as(nobody, nobody, groups, func() {
			label := fmt.Sprint(groups, " ")
			p.try(label+"read", p.opens(p.at("dir/file"), unix.O_RDONLY))
			p.try(label+"write", p.opens(p.at("dir/file"), unix.O_RDWR))
			p.try(label+"read none", p.opens(p.at("dir/none"), unix.O_RDONLY))
			p.try(label+"create", p.opens(p.at("dir/new"), unix.O_CREAT|unix.O_WRONLY))
			p.try(label+"unlink", unix.Unlink(p.at("dir/new")))
			own := p.at("dir/own")
			p.try(label+"own", p.opens(own, unix.O_CREAT|unix.O_WRONLY))
			p.try(label+"chgrp to a group of one's own", unix.Chown(own, -1, 1234))
			p.try(label+"chgrp to another", unix.Chown(own, -1, 4321))
			p.try(label+"chgrp to a foreign one", unix.Chown(own, -1, 999))
			p.try(label+"chmod setgid", unix.Chmod(own, 0o2755))
			p.stat("dir/own")
			p.try(label+"unlink own", unix.Unlink(own))
		})
	}
}

func probeChangeOwner(p *probe) {
	p.mkdir("dir", 0o777)
	for i, mode := range []uint32{0o644, 0o666, 0o6755, 0o2644, 0o7777} {
		file := fmt.Sprint("dir/own", i)
		p.file(file, "x", mode)
		p.must(unix.Chown(p.at(file), nobody, 1234))
		p.must(unix.Chmod(p.at(file), mode))
		p.as(nobody, nobody, []int{55}, func() {
			for _, c := range []namedCall{
				{"chmod 0600", func() error { return unix.Chmod(p.at(file), 0o600) }},
				{"chmod 6755", func() error { return unix.Chmod(p.at(file), 0o6755) }},
				{"chmod 7777", func() error { return unix.Chmod(p.at(file), 0o7777) }},
				{"chgrp to own", func() error { return unix.Chown(p.at(file), -1, nobody) }},
				{"chmod 2755", func() error { return unix.Chmod(p.at(file), 0o2755) }},
				{"chgrp to 55", func() error { return unix.Chown(p.at(file), -1, 55) }},
				{"chmod 6777", func() error { return unix.Chmod(p.at(file), 0o6777) }},
				{"chown to self", func() error { return unix.Chown(p.at(file), nobody, -1) }},
				{"chown to neither", func() error { return unix.Chown(p.at(file), -1, -1) }},
				{"chown away", func() error { return unix.Chown(p.at(file), 7, -1) }},
				{"chgrp away", func() error { return unix.Chown(p.at(file), -1, 7) }},
			} {
				p.try(c.name, c.do())
				p.stat(file)
			}
		})
		p.as(7, nobody, nil, func() {
			p.try("chmod by another", unix.Chmod(p.at(file), 0o777))
			p.try("chown by another", unix.Chown(p.at(file), 7, 7))
			p.try("chown to neither by another", unix.Chown(p.at(file), -1, -1))
		})
		for _, privileges := range []uint32{0o4755, 0o2755, 0o2644, 0o6777} {
			p.must(unix.Chmod(p.at(file), privileges))
			p.as(7, 7, nil, func() {
				p.try(fmt.Sprintf("chown of %o to neither by another", privileges), unix.Chown(p.at(file), -1, -1))
			})
			p.stat(file)
		}
		for _, ids := range [][2]int{{-1, -1}, {0, -1}, {-1, 0}, {1, 1}, {nobody, nobody}} {
			p.must(unix.Chmod(p.at(file), mode))
			p.try(fmt.Sprint("chown by root ", ids), unix.Chown(p.at(file), ids[0], ids[1]))
			p.stat(file)
		}
	}
	p.try("chown of a directory", unix.Chown(p.at("dir"), 1, 1))
	p.must(unix.Chmod(p.at("dir"), 0o6777))
	p.try("chown of a setgid directory", unix.Chown(p.at("dir"), 2, 2))
	p.stat("dir")
	p.must(unix.Symlink("dir", p.at("link")))
	p.try("lchown", unix.Lchown(p.at("link"), 9, 9))
	p.stat("link")
	p.try("fchmodat2 of a symlink", unix.Fchmodat(unix.AT_FDCWD, p.at("link"), 0o700, unix.AT_SYMLINK_NOFOLLOW))
	for _, id := range []int{1<<31 - 1, 1 << 31, 1<<32 - 2} {
		p.try(fmt.Sprint("chown to ", id), unix.Chown(p.at("dir"), id, id))
		p.stat("dir")
	}
}

func probeSticky(p *probe) {
	for _, d := range []struct {
		name string
		mode uint32
		uid  int
	}{{"roots", 0o1777, 0}, {"nobodys", 0o1777, nobody}, {"plain", 0o777, 0}} {
		p.mkdir(d.name, d.mode)
		p.must(unix.Chown(p.at(d.name), d.uid, 0))
		p.must(unix.Chmod(p.at(d.name), d.mode))
		for _, owner := range []int{0, 7, nobody} {
			for _, kind := range []string{"file", "dir"} {
				for _, op := range []string{"remove", "rename", "onto", "exchange"} {
					name := fmt.Sprintf("%s/%d-%s-%s", d.name, owner, kind, op)
					if kind == "dir" {
						p.mkdir(name, 0o777)
					} else {
						p.file(name, "x", 0o666)
					}
					p.must(unix.Lchown(p.at(name), owner, owner))
					other := name + "-mine"
					if kind == "dir" {
						p.mkdir(other, 0o777)
					} else {
						p.file(other, "x", 0o666)
					}
					p.must(unix.Lchown(p.at(other), nobody, nobody))
					p.as(nobody, nobody, nil, func() {
						var err error
						switch {
						case op == "remove" && kind == "dir":
							err = unix.Rmdir(p.at(name))
						case op == "remove":
							err = unix.Unlink(p.at(name))
						case op == "rename":
							err = unix.Rename(p.at(name), p.at(name)+"-new")
						case op == "onto":
							err = unix.Rename(p.at(other), p.at(name))
						default:
							err = unix.Renameat2(unix.AT_FDCWD, p.at(other), unix.AT_FDCWD, p.at(name), unix.RENAME_EXCHANGE)
						}
						p.try(name, err)
					})
				}
			}
		}
	}
}

func probeAccess(p *probe) {
	for _, mode := range []uint32{0, 0o400, 0o200, 0o100, 0o040, 0o004, 0o007, 0o777, 0o111} {
		file, dir := fmt.Sprintf("file%o", mode), fmt.Sprintf("dir%o", mode)
		p.file(file, "#!/bin/true\n", mode)
		p.mkdir(dir, mode)
		check := func(label string) {
			for _, name := range []string{file, dir} {
				for _, how := range []uint32{unix.F_OK, unix.R_OK, unix.W_OK, unix.X_OK, 7} {
					p.try(fmt.Sprintf("%s access %s %o", label, name, how), unix.Access(p.at(name), how))
					p.try(fmt.Sprintf("%s eaccess %s %o", label, name, how), unix.Faccessat2(unix.AT_FDCWD, p.at(name), how, unix.AT_EACCESS))
				}
			}
		}
		check("root")
		p.as(nobody, nobody, nil, func() { check("nobody") })
		p.as(nobody, 0, nil, func() { check("group") })
		p.inThread(func() error {
			_, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, nobody, 0, 0)
			if errno != 0 {
				return errno
			}
			check("real id nobody")
			return nil
		})
	}
}

// probeProtected is about what sysctl fs.protected_* forbid.
func probeProtected(p *probe) {
	p.mkdir("tmp", 0o1777)
	p.file("tmp/roots", "x", 0o666)
	p.file("tmp/secret", "x", 0o600)
	p.must(unix.Mknod(p.at("tmp/fifo"), unix.S_IFIFO|0o666, 0))
	p.must(unix.Symlink("roots", p.at("tmp/link")))
	p.as(nobody, nobody, nil, func() {
		p.try("create of another's file", p.opens(p.at("tmp/roots"), unix.O_CREAT|unix.O_RDWR))
		p.try("open of another's file", p.opens(p.at("tmp/roots"), unix.O_RDWR))
		p.try("create of another's fifo", p.opens(p.at("tmp/fifo"), unix.O_CREAT|unix.O_RDWR))
		p.try("follow another's symlink", p.opens(p.at("tmp/link"), unix.O_RDONLY))
		p.try("link to what one can't read", unix.Link(p.at("tmp/secret"), p.at("tmp/stolen")))
		p.try("link to what one can write", unix.Link(p.at("tmp/roots"), p.at("tmp/alias")))
		p.try("symlink of one's own", unix.Symlink("roots", p.at("tmp/mine")))
		p.try("follow it", p.opens(p.at("tmp/mine"), unix.O_RDONLY))
	})
	p.try("root follows another's symlink", p.opens(p.at("tmp/mine"), unix.O_RDONLY))
}
