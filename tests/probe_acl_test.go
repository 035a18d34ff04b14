//go:build linux

package tests

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"
)

// aclProbes are about POSIX ACLs, acl(5).
func aclProbes() []probeCase {
	return []probeCase{
		{"ACLs grant and refuse", probeACLRights},
		{"ACLs and chmod", probeACLChmod},
		{"default ACLs", probeDefaultACL},
		{"ACLs that are not", probeBadACL},
		{"ACLs by others", probeACLOwner},
	}
}

const (
	aclAccess  = "system.posix_acl_access"
	aclDefault = "system.posix_acl_default"
)

// Tags of ACL entries, linux/posix_acl.h.
const (
	aclUserObj  = 0x01
	aclUser     = 0x02
	aclGroupObj = 0x04
	aclGroup    = 0x08
	aclMask     = 0x10
	aclOther    = 0x20
)

type aclEntry struct {
	tag, perm uint16
	id        uint32
}

// aclOf puts an ACL into the form of its extended attribute.
func aclOf(entries ...aclEntry) []byte {
	b := binary.LittleEndian.AppendUint32(nil, 2)
	for _, e := range entries {
		b = binary.LittleEndian.AppendUint16(b, e.tag)
		b = binary.LittleEndian.AppendUint16(b, e.perm)
		b = binary.LittleEndian.AppendUint32(b, e.id)
	}
	return b
}

const noID = 0xffffffff

func fullACL(owner, user, group, named, mask, other uint16) []byte {
	return aclOf(
		aclEntry{aclUserObj, owner, noID}, aclEntry{aclUser, user, nobody}, aclEntry{aclGroupObj, group, noID},
		aclEntry{aclGroup, named, 1234}, aclEntry{aclMask, mask, noID}, aclEntry{aclOther, other, noID},
	)
}

func (p *probe) acl(name string) {
	buf := make([]byte, 4096)
	for _, attr := range []string{aclAccess, aclDefault} {
		n, err := unix.Lgetxattr(p.at(name), attr, buf)
		p.note("%s of %s: %s %x", attr, name, errnoName(err), buf[:max(n, 0)])
	}
	p.stat(name)
}

func probeACLRights(p *probe) {
	for i, acl := range [][]byte{
		fullACL(7, 4, 0, 0, 7, 0), fullACL(7, 7, 0, 0, 4, 0), fullACL(7, 0, 7, 7, 7, 7), fullACL(0, 6, 4, 2, 7, 7), fullACL(6, 7, 7, 7, 0, 4),
	} {
		file, dir := fmt.Sprint("file", i), fmt.Sprint("dir", i)
		p.file(file, "#!/bin/sh\n", 0o600)
		p.mkdir(dir, 0o700)
		p.file(dir+"/inside", "x", 0o644)
		p.must(unix.Setxattr(p.at(file), aclAccess, acl, 0))
		p.must(unix.Setxattr(p.at(dir), aclAccess, acl, 0))
		p.acl(file)
		p.acl(dir)
		for _, who := range []struct {
			uid, gid int
			groups   []int
		}{{nobody, nobody, nil}, {7, 7, nil}, {7, 1234, nil}, {7, 7, []int{1234}}, {7, 0, nil}, {7, 0, []int{1234}}, {0, 0, nil}} {
			p.as(who.uid, who.gid, who.groups, func() {
				label := fmt.Sprint(i, " ", who, " ")
				p.try(label+"read", p.opens(p.at(file), unix.O_RDONLY))
				p.try(label+"write", p.opens(p.at(file), unix.O_WRONLY))
				p.try(label+"access x", unix.Access(p.at(file), unix.X_OK))
				p.try(label+"list", p.opens(p.at(dir), unix.O_RDONLY))
				p.try(label+"search", p.opens(p.at(dir, "inside"), unix.O_RDONLY))
				p.try(label+"create", p.opens(p.at(dir, "new"), unix.O_CREAT|unix.O_WRONLY))
				p.try(label+"remove", unix.Unlink(p.at(dir, "new")))
			})
		}
	}
}

func probeACLChmod(p *probe) {
	p.file("file", "x", 0o640)
	p.must(unix.Setxattr(p.at("file"), aclAccess, fullACL(6, 7, 5, 4, 7, 1), 0))
	p.acl("file")
	for _, mode := range []uint32{0o600, 0o644, 0o777, 0o070, 0o4755, 0o2775, 0} {
		p.try(fmt.Sprintf("chmod %o", mode), unix.Chmod(p.at("file"), mode))
		p.acl("file")
	}
	p.try("minimal ACL", unix.Setxattr(p.at("file"), aclAccess, aclOf(
		aclEntry{aclUserObj, 6, noID}, aclEntry{aclGroupObj, 4, noID}, aclEntry{aclOther, 0, noID}), 0))
	p.acl("file")
	p.try("removed", unix.Removexattr(p.at("file"), aclAccess))
	p.acl("file")
	p.try("removed again", unix.Removexattr(p.at("file"), aclAccess))
	p.try("default removed", unix.Removexattr(p.at("file"), aclDefault))
	p.try("chown", unix.Chown(p.at("file"), 5, 5))
	p.try("full ACL", unix.Setxattr(p.at("file"), aclAccess, fullACL(6, 7, 5, 4, 7, 1), 0))
	p.try("setgid and an ACL by another group", unix.Chmod(p.at("file"), 0o2770))
	p.as(5, 7, nil, func() {
		p.try("ACL clears setgid", unix.Setxattr(p.at("file"), aclAccess, fullACL(6, 7, 5, 4, 7, 1), 0))
	})
	p.acl("file")
	p.as(5, 5, nil, func() {
		p.try("chmod by the owner", unix.Chmod(p.at("file"), 0o2770))
		p.try("ACL by a member keeps setgid", unix.Setxattr(p.at("file"), aclAccess, fullACL(6, 7, 5, 4, 7, 1), 0))
	})
	p.acl("file")
}

func probeDefaultACL(p *probe) {
	defer unix.Umask(0)
	for i, acl := range [][]byte{
		fullACL(7, 7, 5, 4, 7, 0), fullACL(6, 6, 6, 6, 6, 6), fullACL(7, 0, 0, 0, 0, 0),
		aclOf(aclEntry{aclUserObj, 7, noID}, aclEntry{aclGroupObj, 7, noID}, aclEntry{aclOther, 5, noID}),
	} {
		for _, mode := range []uint32{0o777, 0o2777} {
			dir := fmt.Sprintf("dir%d-%o", i, mode)
			p.mkdir(dir, mode)
			p.must(unix.Chown(p.at(dir), 0, 1234))
			p.must(unix.Chmod(p.at(dir), mode))
			p.try("default ACL", unix.Setxattr(p.at(dir), aclDefault, acl, 0))
			for _, mask := range []int{0, 0o077} {
				unix.Umask(mask)
				prefix := fmt.Sprintf("mask%o-", mask)
				p.makeAll(dir, prefix+"root-", 0o777)
				p.as(nobody, nobody, nil, func() { p.makeAll(dir, prefix+"user-", 0o666) })
				for _, kind := range []string{"file", "dir", "fifo", "plain", "tmp"} {
					p.acl(dir + "/" + prefix + "root-" + kind)
					p.acl(dir + "/" + prefix + "user-" + kind)
				}
			}
			unix.Umask(0)
			p.must(unix.Removexattr(p.at(dir), aclDefault))
			p.makeAll(dir, "after-", 0o666)
		}
	}
}

func probeBadACL(p *probe) {
	p.file("file", "x", 0o640)
	p.mkdir("dir", 0o755)
	p.must(unix.Symlink("file", p.at("link")))
	for i, acl := range [][]byte{
		nil,
		{2, 0, 0, 0},
		{1, 0, 0, 0},
		{2, 0, 0, 0, 1},
		make([]byte, 100), make([]byte, 65536), make([]byte, 65537),
		aclOf(aclEntry{aclUserObj, 7, noID}),
		aclOf(aclEntry{aclUserObj, 7, noID}, aclEntry{aclUser, 7, 5}, aclEntry{aclGroupObj, 7, noID}, aclEntry{aclOther, 5, noID}),
		aclOf(aclEntry{aclOther, 7, noID}, aclEntry{aclGroupObj, 7, noID}, aclEntry{aclUserObj, 5, noID}),
		aclOf(aclEntry{aclUserObj, 9, noID}, aclEntry{aclGroupObj, 7, noID}, aclEntry{aclOther, 5, noID}),
	} {
		for _, name := range []string{"file", "dir", "link"} {
			for _, attr := range []string{aclAccess, aclDefault} {
				p.try(fmt.Sprint(name, " ", attr, " ", i), unix.Lsetxattr(p.at(name), attr, acl, 0))
			}
		}
	}
	p.try("default ACL of a file", unix.Setxattr(p.at("file"), aclDefault, fullACL(7, 7, 7, 7, 7, 7), 0))
	p.try("created twice", unix.Setxattr(p.at("dir"), aclDefault, fullACL(7, 7, 7, 7, 7, 7), unix.XATTR_REPLACE))
	p.try("replaced", unix.Setxattr(p.at("dir"), aclDefault, fullACL(7, 7, 7, 7, 7, 7), unix.XATTR_CREATE))
	many := []aclEntry{{aclUserObj, 7, noID}}
	for i := range 400 {
		many = append(many, aclEntry{aclUser, 7, uint32(i)})
	}
	many = append(many, aclEntry{aclGroupObj, 7, noID}, aclEntry{aclMask, 7, noID}, aclEntry{aclOther, 7, noID})
	// What fills more than a page is E2BIG in the kernel.
	for _, n := range []int{10, 200, 400} {
		short := append(append([]aclEntry{}, many[:n]...), many[401:]...)
		p.try(fmt.Sprint("ACL of ", len(short)), unix.Setxattr(p.at("file"), aclAccess, aclOf(short...), 0))
		p.acl("file")
	}
	_, err := unix.Getxattr(p.at("file"), aclAccess, make([]byte, 10))
	p.try("get into 10 bytes", err)
}

func probeACLOwner(p *probe) {
	p.file("theirs", "x", 0o666)
	p.file("own", "x", 0o600)
	p.mkdir("dir", 0o777)
	p.must(unix.Chown(p.at("own"), nobody, nobody))
	p.must(unix.Setxattr(p.at("theirs"), aclAccess, fullACL(7, 7, 7, 7, 7, 7), 0))
	p.as(nobody, nobody, nil, func() {
		for _, name := range []string{"theirs", "own", "dir"} {
			p.try("set access of "+name, unix.Setxattr(p.at(name), aclAccess, fullACL(7, 4, 5, 4, 7, 0), 0))
			p.try("set default of "+name, unix.Setxattr(p.at(name), aclDefault, fullACL(7, 4, 5, 4, 7, 0), 0))
			p.acl(name)
			p.try("remove access of "+name, unix.Removexattr(p.at(name), aclAccess))
			p.try("remove default of "+name, unix.Removexattr(p.at(name), aclDefault))
		}
	})
}
