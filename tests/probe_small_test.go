//go:build linux

package tests

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestM2SmallDisk runs probes in two small file systems, one below a mount and
// one by itself: without room, without inodes, and read-only.
func TestM2SmallDisk(t *testing.T) {
	for _, c := range smallProbes() {
		t.Run(c.name, func(t *testing.T) {
			served, bare := newImage(t, 8, "-N", "200"), newImage(t, 8, "-N", "200")
			base := filepath.Join(bare.Dir, "static")
			openDir(t, base)
			m := served.mount()
			for _, i := range []*image{served, bare} {
				dir := filepath.Join(i.Dir, "static", "p")
				openDir(t, dir)
				openFile(t, filepath.Join(dir, "f"), "content")
				openDir(t, filepath.Join(dir, "d"))
				mustDo(t, os.Symlink("f", filepath.Join(dir, "s")))
			}
			play := func(i *image, dir string) string {
				switch c.name {
				case "no room":
					i.fill()
				case "no inodes":
					i.fillNodes()
				case "read-only":
					i.remount("ro")
				}
				a := agent(t)
				defer a.Exit(1)
				return a.Get("probe", c.name, dir)
			}
			want, got := play(bare, filepath.Join(base, "p")), play(served, m.At("p"))
			if want != got {
				t.Errorf("noted differently from a plain directory (-want, +got):\n%s", diff(want, got))
			}
			if testing.Verbose() {
				t.Logf("both noted:\n%s", want)
			}
		})
	}
}

// smallProbes run on a file system that is full or read-only already.
func smallProbes() []probeCase {
	return []probeCase{
		{"no room", probeNoRoom},
		{"no inodes", probeNoInodes},
		{"read-only", probeReadOnly},
	}
}

func probeNoRoom(p *probe) {
	big := make([]byte, 64<<10)
	fd := p.open("f", unix.O_RDWR)
	defer unix.Close(fd)
	n, err := unix.Pwrite(fd, big, 0)
	p.note("write: %v %s", n > 0, errnoName(err))
	n, err = unix.Pwrite(fd, big, 1<<20)
	p.note("write further on: %v %s", n > 0, errnoName(err))
	p.try("fallocate", unix.Fallocate(fd, 0, 0, 1<<20))
	p.try("longer", unix.Ftruncate(fd, 1<<20))
	_, err = unix.Pwrite(fd, []byte("x"), 0)
	p.try("write over what is there", err)
	m, err := unix.Mmap(fd, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if p.try("map", err) {
		p.note("a store in a hole is lost: %v", bus(func() { m[512<<10] = 1 }))
		p.must(unix.Munmap(m))
	}
	p.try("xattr", unix.Setxattr(p.at("f"), "user.k", make([]byte, 3000), 0))
	p.try("mkdir", unix.Mkdir(p.at("new"), 0o755))
	p.try("long symlink", unix.Symlink(strings.Repeat("x", 2000), p.at("long")))
	p.note("an empty file: %s", errnoName(unix.Mknod(p.at("empty"), unix.S_IFREG|0o644, 0)))
	p.try("chmod", unix.Chmod(p.at("f"), 0o600))
	p.try("rename", unix.Rename(p.at("s"), p.at("s2")))
	p.try("fsync", unix.Fsync(fd))
	p.try("shorter", unix.Truncate(p.at("f"), 3))
	p.content("f")
	p.try("unlink", unix.Unlink(p.at("f")))
}

func probeNoInodes(p *probe) {
	p.try("create", p.opens(p.at("new"), unix.O_WRONLY|unix.O_CREAT))
	p.try("mkdir", unix.Mkdir(p.at("new"), 0o755))
	p.try("mknod", unix.Mknod(p.at("new"), unix.S_IFIFO|0o644, 0))
	p.try("symlink", unix.Symlink("x", p.at("new")))
	p.try("O_TMPFILE", p.opens(p.dir, unix.O_TMPFILE|unix.O_RDWR))
	p.try("whiteout", unix.Renameat2(unix.AT_FDCWD, p.at("f"), unix.AT_FDCWD, p.at("d/f"), unix.RENAME_WHITEOUT))
	p.try("link", unix.Link(p.at("f"), p.at("new")))
	p.try("write", os.WriteFile(p.at("f"), []byte("written"), 0o644))
	p.stat("f")
	p.stat("d/f")
	p.stat("new")
	p.try("unlink", unix.Unlink(p.at("s")))
	// It may take a moment until the kernel tells the daemon that nobody has
	// what was removed.
	err := error(unix.ENOSPC)
	for deadline := time.Now().Add(20 * time.Second); err == unix.ENOSPC && time.Now().Before(deadline); {
		err = p.opens(p.at("new2"), unix.O_WRONLY|unix.O_CREAT)
	}
	p.try("create in its place", err)
}

func probeReadOnly(p *probe) {
	for _, path := range []string{p.at("f"), p.at("d"), p.at("s"), p.at("none")} {
		for _, c := range p.calls(path) {
			// Which of several errors is told may differ: the mount itself
			// is not read-only, so the kernel looks at names first.
			p.note("%s %s works: %v", filepath.Base(path), c.name, c.do() == nil)
		}
	}
	p.content("f")
	p.as(nobody, nobody, nil, func() {
		p.try("write as nobody", p.opens(p.at("f"), unix.O_WRONLY))
		p.try("unlink as nobody", unix.Unlink(p.at("f")))
	})
	fd := p.open("f", unix.O_RDONLY)
	defer unix.Close(fd)
	own := "/proc/self/fd/" + strconv.Itoa(fd)
	p.try("open again to write", p.opens(own, unix.O_WRONLY))
	p.try("chattr", changeFlags(p.at("f"), nodumpFlag, 0))
	p.try("fchmod", unix.Fchmod(fd, 0o600))
	p.try("map", p.maps(fd, unix.PROT_READ, unix.MAP_SHARED))
}
