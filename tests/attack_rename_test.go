//go:build linux

package tests

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestAttackRename attacks W3: strangers rename files within D, into it, out of it and onto
// each other, and write to them by whatever name, while another process acquires it.
func TestAttackRename(t *testing.T) {
	byTransport(t, func(t *testing.T, opts ...string) {
		m := mount(t, opts...)
		for _, p := range protocols() {
			if p.name != "create" && p.name != "flock" {
				continue
			}
			t.Run(p.name, func(t *testing.T) {
				dir, out := m.on(t).At("rename-"+p.name), m.At("out-"+p.name)
				for _, d := range []string{"rename-", "out-"} {
					openDir(t, m.Back(d+p.name))
					for _, f := range []string{"a", "b", "c", "x"} {
						openFile(t, m.Back(d+p.name, f), d+f)
					}
				}
				mustDo(t, os.Link(m.Back("out-"+p.name, "x"), m.Back("rename-"+p.name, "alias")))
				locker, b, c, d := agent(t), stranger(t), stranger(t), stranger(t)
				storms := []*storm{
					b.storm(
						[]string{"rename", dir + "/a", out + "/a1"}, []string{"rename", out + "/a1", dir + "/a"},
						[]string{"rename", dir + "/a", dir + "/b"}, []string{"put", out + "/n", "new", "creat"}, []string{"rename", out + "/n", dir + "/a"},
						[]string{"rename", dir + "/alias", out + "/alias"}, []string{"rename", out + "/alias", dir + "/alias"},
					),
					c.storm(
						[]string{"open", "h", out + "/c", "wronly"}, []string{"rename", out + "/c", dir + "/c1"}, []string{"pwrite", "h", "n", "40", "0"},
						[]string{"rename", dir + "/c1", dir + "/c"}, []string{"ftruncate", "h", "7"}, []string{"rename", dir + "/c", out + "/c"},
						[]string{"close", "h"}, []string{"rename", dir + "/c1", out + "/c"},
					),
					d.storm(
						[]string{"put", out + "/x", "evil", ""}, []string{"truncate", out + "/x", "2"}, []string{"chmod", out + "/x", "0666"},
						[]string{"put", out + "/alias", "evil", ""}, []string{"put", out + "/a1", "evil", ""}, []string{"put", dir + "/a", "evil", ""},
						[]string{"rename", out + "/x", out + "/y"}, []string{"rename", out + "/y", out + "/x"},
					),
				}
				won := 0
				for end := seconds(1); time.Now().Before(end) || won < 3; {
					if p.take(locker, dir, "l") == "ok" {
						won++
						still(t, m, "rename-"+p.name, p.name, 25, storms...)
						p.give(locker, dir, "l")
					}
					if t.Failed() {
						return
					}
					await(t, 15, storms...)
				}
				t.Logf("%d acquisitions; rivals: %v %v %v", won, storms[0].over(), storms[1].over(), storms[2].over())
			})
		}
	})
}

// TestM2RenameOnto: while files take each other's place by rename(2), there is always one
// by that name, and who has one open sees and changes no other.
func TestM2RenameOnto(t *testing.T) {
	byTransport(t, func(t *testing.T, opts ...string) {
		m := mount(t, opts...)
		openDir(t, m.Back("D"))
		openDir(t, m.Back("E"))
		renew := func(i int) {
			name := m.At(fmt.Sprintf("%c/new", "DE"[i%2]))
			mustDo(t, os.WriteFile(name, fmt.Append(nil, i), 0o600))
			mustDo(t, unix.Setxattr(name, "user.version", fmt.Append(nil, i), 0))
			mustDo(t, os.Rename(name, m.At("D/f")))
			var st unix.Stat_t
			mustDo(t, unix.Stat(m.At("D/f"), &st))
			if st.Nlink != 1 || st.Size != int64(len(fmt.Sprint(i))) {
				t.Errorf("version %d has %d links and %d bytes", i, st.Nlink, st.Size)
			}
		}
		renew(0)
		var all sync.WaitGroup
		over := seconds(2)
		looks := make([]int, 3)
		for i := range looks {
			all.Go(func() {
				for ; time.Now().Before(over) && !t.Failed(); looks[i]++ {
					if err := lookAtVersion(m.At("D/f")); err != nil {
						t.Error(err)
					}
				}
			})
		}
		renames := 1
		for ; time.Now().Before(over) && !t.Failed(); renames++ {
			renew(renames)
		}
		all.Wait()
		t.Logf("%d renames, looked at %v times", renames, looks)
	})
}

// lookAtVersion opens a file and sees whether all that it is told of it is of one.
func lookAtVersion(name string) error {
	var st, now unix.Stat_t
	if err := unix.Stat(name, &st); err != nil {
		return fmt.Errorf("stat: %w", err)
	}
	if _, err := unix.Getxattr(name, "user.version", make([]byte, 16)); err != nil {
		return fmt.Errorf("getxattr: %w", err)
	}
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	fd := int(f.Fd())
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("fstat: %w", err)
	}
	content, version := make([]byte, 16), make([]byte, 16)
	n, err := f.Read(content)
	if err != nil {
		return err
	}
	v, err := unix.Fgetxattr(fd, "user.version", version)
	if err != nil {
		return fmt.Errorf("fgetxattr: %w", err)
	}
	mode := uint32(0o600 + st.Ino%8)
	if err := errors.Join(unix.Fchmod(fd, mode), unix.Fstat(fd, &now)); err != nil {
		return fmt.Errorf("fchmod: %w", err)
	}
	if string(content[:n]) != string(version[:v]) || now.Ino != st.Ino || now.Mode&0o777 != mode {
		return fmt.Errorf("%q of inode %d has version %q, and mode %o of inode %d", content[:n], st.Ino, version[:v], now.Mode, now.Ino)
	}
	return nil
}
