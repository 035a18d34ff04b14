//go:build linux

package tests

import (
	"bufio"
	"fmt"
	"os/exec"
	"strings"
	"testing"
)

// readOn opens and maps files, and looks at them whenever it is told to.
const readOn = `
import mmap, os, sys
def files():
    return [os.open(sys.argv[1] + f, os.O_RDONLY) for f in ("/f", "/sub/f", "/big")]
opened = files()
mapped = [mmap.mmap(fd, 0, prot=mmap.PROT_READ) for fd in files()]
while True:
    print("ready", flush=True)
    if not sys.stdin.readline():
        break
    for fd, m in zip(opened, mapped):
        size, got = os.fstat(fd).st_size, len(os.pread(fd, 1 << 20, 0))
        assert size == got == len(m) and m[0] == m[-1] == ord("x"), (size, got)
`

// TestR7ReadOn: what a dead owner has made is read on by who has it open or mapped, when it
// is put aside, when that is deleted, and when it is put back (C5).
func TestR7ReadOn(t *testing.T) {
	need(t, "python3")
	for _, policy := range []string{"destroy", "quarantine"} {
		m := mount(t, "--on-crash", policy)
		for _, dir := range []string{"made", "old"} {
			t.Run(policy+", "+dir, func(t *testing.T) {
				m := m.on(t)
				a := agent(t)
				if dir == "old" {
					openDir(t, m.Back(dir))
					openFile(t, m.Back(dir, "was"), "")
					a.must("creat", m.At(dir, "devserver"), "wronly,creat,excl")
				} else {
					a.must("mkdir", m.At(dir))
				}
				a.must("mkdir", m.At(dir, "sub"))
				a.must("put", m.At(dir, "f"), "x", "wronly,creat")
				a.must("put", m.At(dir, "sub/f"), "xx", "wronly,creat")
				if got := a.Get("sh", "head -c 300000 /dev/zero | tr '\\0' x >"+m.At(dir, "big")); got != "0 " {
					t.Fatal(got)
				}
				cmd := exec.Command("python3", "-c", readOn, m.At(dir))
				in, err := cmd.StdinPipe()
				mustDo(t, err)
				start, out := linesOf(t, cmd)
				p := start()
				wantReady(t, out, "before")
				a.Kill()
				m.awaitFree(dir)
				fmt.Fprintln(in)
				wantReady(t, out, "when it was put aside")
				m.on(t).replace()
				fmt.Fprintln(in)
				wantReady(t, out, "after an upgrade")
				if policy == "destroy" {
					eventually(t, "the trash is empty", func() bool { return !exists(m.Back(".stagefs")) })
				} else if r := run(t, stagefsBin(), "quarantine", "--restore", m.quarantine()[0].ID, m.Path); r.Status != 0 {
					t.Error(r)
				}
				fmt.Fprintln(in)
				wantReady(t, out, "in the end")
				in.Close()
				if r := p.Wait(); r.Status != 0 {
					t.Error(r)
				}
			})
		}
	}
}

func wantReady(t *testing.T, out *bufio.Reader, when string) {
	t.Helper()
	if line, err := out.ReadString('\n'); strings.TrimSpace(line) != "ready" {
		t.Fatalf("%s: %q, %v", when, line, err)
	}
}

// TestR7NamedOutside: a file that a dead owner has made, and that has a name outside of what
// is put aside, is found, read and changed by that.
func TestR7NamedOutside(t *testing.T) {
	m := mount(t, "--on-crash", "quarantine")
	openDir(t, m.Back("out"))
	a, b := agent(t), agent(t)
	a.must("mkdir", m.At("D"))
	a.must("mkdir", m.At("D/sub"))
	uses := [][]string{
		{"stat"}, {"read"}, {"chmod", "600"}, {"truncate", "1"}, {"utimens"},
		{"setxattr", "user.x", "1"}, {"put", "more", "wronly,append"}, {"link", m.At("out/further")},
	}
	for i, use := range uses {
		name := itoa(i) + use[0]
		a.must("put", m.At("D/sub", name), "content", "wronly,creat")
		a.must("link", m.At("D/sub", name), m.At("out", name))
		b.must("stat", m.At("D/sub", name))
		b.must("stat", m.At("out", name))
	}
	a.Kill()
	m.awaitFree("D")
	for i, use := range uses {
		if s := b.Try(append([]string{use[0], m.At("out", itoa(i)+use[0])}, use[1:]...)...); s != "ok" {
			t.Errorf("%s: %s", strings.Join(use, " "), s)
		}
	}
}
