//go:build linux

package tests

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// A quota is a limit on the space of all that is in an image.
type quota struct {
	*image
	hog *os.File
}

// newQuota makes an image with room for so much: a subvolume of btrfs, whose limits
// need no further support in the kernel. They hold for root, too.
func newQuota(t *testing.T, limit string) *quota {
	t.Helper()
	need(t, "root", "fuse", "mkfs.btrfs", "btrfs", "losetup")
	disk, err := imageBy(t, 256, "loop", "mkfs.btrfs", "-q")
	if err != nil {
		t.Skip(err)
	}
	top := disk.Dir
	q := &quota{image: &image{t: t, file: disk.file, Dir: filepath.Join(top, "sub")}}
	for _, argv := range [][]string{
		{"btrfs", "quota", "enable", top},
		{"btrfs", "subvolume", "create", q.Dir},
		{"btrfs", "qgroup", "limit", limit, q.Dir},
	} {
		if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
			t.Skipf("no quota can be had here: %q: %v: %s", argv, err, out)
		}
	}
	q.hog, err = os.Create(filepath.Join(q.Dir, "hog"))
	mustDo(t, err)
	t.Cleanup(func() { q.hog.Close() })
	return q
}

// exhaust uses up what is left, to the last file that could be made.
func (q *quota) exhaust() {
	q.t.Helper()
	for range 1000 {
		for size := 1 << 20; size >= 4096; size /= 2 {
			for b := make([]byte, size); ; {
				if _, err := q.hog.Write(b); errors.Is(err, unix.EDQUOT) {
					break
				} else if err != nil {
					q.t.Fatal("filling up: ", err)
				}
			}
		}
		// What was set aside for more than it took counts until now.
		mustDo(q.t, unix.Syncfs(int(q.hog.Fd())))
		err := unix.Mkdir(filepath.Join(q.Dir, "none"), 0o777)
		if errors.Is(err, unix.EDQUOT) {
			return
		}
		mustDo(q.t, err)
		mustDo(q.t, unix.Rmdir(filepath.Join(q.Dir, "none")))
	}
	q.t.Fatal("the limit is never reached")
}

// lift takes the limit away.
func (q *quota) lift() {
	q.t.Helper()
	if r := run(q.t, "btrfs", "qgroup", "limit", "none", q.Dir); r.Status != 0 {
		q.t.Fatalf("btrfs qgroup limit none: %v", r)
	}
}

// TestFaultQuota: who is over quota hears of the mount what he hears of the bare
// directory, for his files, for a lock file, and for a candidate that wins; he
// holds nothing by what failed. What is held can be released, and with room
// again the same calls succeed.
func TestFaultQuota(t *testing.T) {
	for _, opts := range [][]string{nil, {"--no-passthrough"}} {
		t.Run(strings.Join(opts, ""), func(t *testing.T) {
			disk := newQuota(t, "4M")
			m := disk.mount(opts...)
			openDir(t, m.Back("D"))
			bare := filepath.Join(disk.Dir, "bare")
			openDir(t, bare)
			openFile(t, filepath.Join(bare, "devserver.lock.tmp"), "")
			a, holder, rival := stranger(t), agent(t), agent(t)
			holder.must("mkdir", m.At("held"))
			holder.must("put", m.At("held/devserver"), "x", "creat,excl")
			a.must("open", "f", m.At("f"), "rdwr,creat")
			lock := m.At("D/devserver.lock")
			rival.must("put", lock, "x", "creat,excl")
			u := m.At("D", candidateNames(t, a.Pid)["lockfile"])
			a.must("put", u, "4711\n", "creat,excl")
			rival.must("unlink", lock)
			const block = 8 << 10
			written := 0
			for ; ; written++ {
				got := a.Try("pwrite", "f", string(rune('a'+written%26)), itoa(block), itoa(written*block))
				if got == "EDQUOT" {
					break
				}
				if got != "ok" || written > 1024 {
					t.Fatalf("write number %d = %s, want EDQUOT in the end", written, got)
				}
			}
			disk.exhaust()
			before := digest(t, m.Dir)
			ways := lockWays(lock)
			for way, call := range lockWays(filepath.Join(bare, "devserver.lock")) {
				a.want("EDQUOT", call[0]...)
				if way != "link" && way != "rename" {
					a.want("EDQUOT", ways[way][0]...)
					m.wantFree("D")
				}
			}
			a.want("EDQUOT", "link", u, lock)
			m.wantFree("D")
			a.want("EDQUOT", "rename", u, lock)
			m.wantFree("D")
			rival.want("EDQUOT", "creat", lock, "wronly,creat,excl") // root, too
			m.wantFree("D")
			a.want("EDQUOT", "creat", m.At("D/plain"), "wronly,creat")
			a.want("EDQUOT", "mkdir", m.At("E"))
			m.wantFree("E")
			if after := digest(t, m.Dir); after != before {
				t.Errorf("what failed left something:\n%s", diff(before, after))
			}
			a.want("EDQUOT", "pwrite", "f", "x", itoa(block), itoa(written*block))
			wantBlocks(t, m.Back("f"), written, block)
			a.mustCommand(m, "acquire D") // which needs no file
			rival.want("EEXIST", "creat", lock, "wronly,creat,excl")
			a.mustCommand(m, "release D")
			m.wantOwner("held", holder.Pid)
			holder.must("unlink", m.At("held/devserver"))
			m.wantFree("held")
			disk.lift()
			if got := a.Get("read", u); got != "4711\n" {
				t.Errorf("the candidate: %q", got)
			}
			a.must("link", u, lock)
			m.wantOwner("D", a.Pid)
			a.must("pwrite", "f", string(rune('a'+written%26)), itoa(block), itoa(written*block))
			a.must("close", "f")
			wantBlocks(t, m.Back("f"), written+1, block)
			a.must("unlink", lock)
			a.must("unlink", u)
			m.wantFree("D")
		})
	}
}
