//go:build linux

package tests

import (
	"os"
	"testing"
)

// TestR7NamesKnown: names that the kernel remembers of what was put aside, where it
// cannot be told of names as well, lead nowhere: nobody writes to what is aside, who
// looks is told that it is gone, also where nobody may write what is free (W4), and
// it can be made anew.
func TestR7NamesKnown(t *testing.T) {
	for _, unlocked := range []string{"allow", "deny"} {
		for _, transport := range []string{"auto", "fuse"} {
			t.Run(unlocked+" "+transport, func(t *testing.T) {
				m := mount(t, "--on-crash", "quarantine", "--unlocked", unlocked, "--transport", transport)
				b := agent(t)
				for _, try := range [][]string{
					{"put", m.At("D/f"), "new", "wronly,trunc"},
					{"put", m.At("D/sub/f"), "new", "wronly"},
					{"put", m.At("D/none"), "new", "wronly,creat"},
					{"chmod", m.At("D"), "0700"},
					{"chmod", m.At("D/f"), "0600"},
					{"rename", m.At("D/g"), m.At("D/h")},
					{"unlink", m.At("D/f")},
				} {
					a, inside := agent(t), agent(t)
					a.must("mkdir", m.At("D"))
					a.must("mkdir", m.At("D/sub"))
					for _, f := range []string{"f", "g", "sub/f"} {
						a.must("put", m.At("D", f), "old", "wronly,creat")
					}
					inside.must("chdir", m.At("D"))
					for _, name := range []string{"", "f", "g", "h", "none", "sub/f"} {
						b.Try("stat", m.At("D", name))
					}
					a.Kill()
					m.awaitFree("D")
					eventually(t, "D is put aside", func() bool { return len(m.quarantine()) == 1 })
					b.want("ENOENT", try...)
					inside.want("ESTALE", "put", "f", "new", "wronly,trunc")
					all := m.quarantine()
					wantTree(t, m.Back(".stagefs/quarantine", all[0].ID, "content"), []string{"f=old", "g=old", "sub/", "sub/f=old"})
					m.wantStatus(0, "", "quarantine", "--delete-older", "0s", m.Path)
				}
				m.wantStatus(0, "", "run", m.At("D"), "sh", "-c", `cd "$STAGEFS_LOCK" && echo new >f && mkdir sub && echo new >sub/f`)
				wantTree(t, m.Back("D"), []string{"f=new\n", "sub/", "sub/f=new\n"})
			})
		}
	}
}

// TestR4OtherName: who opens a lock file that went with its owner by another name, which
// nobody had looked up before, gets the file.
func TestR4OtherName(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	openDir(t, m.Back("E"))
	a, b := agent(t), agent(t)
	a.must("creat", m.At("D/plain"), "wronly,creat,excl")
	a.must("rename", m.At("D/plain"), m.At("D/devserver.lock"))
	m.wantOwner("D", a.Pid)
	b.must("open", "seen", m.At("D/devserver.lock"), "rdonly")
	mustDo(t, os.Link(m.Back("D/devserver.lock"), m.Back("E/file")))
	a.Kill()
	m.awaitFree("D")
	b.must("open", "h", m.At("E/file"), "rdwr")
	b.must("write", "h", "content")
	b.must("close", "h")
	if got, err := os.ReadFile(m.Back("E/file")); string(got) != "content" {
		t.Errorf("E/file has %q, %v, want what was written", got, err)
	}
}
