//go:build linux

package tests

import (
	"fmt"
	"hash/fnv"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

// markOf is the byte by which a daemon says that it serves a directory, or something
// in there.
func markOf(t *testing.T, dir string, around bool) string {
	t.Helper()
	var st unix.Statx_t
	mustDo(t, unix.Statx(unix.AT_FDCWD, dir, 0, unix.STATX_INO, &st))
	h := fnv.New64a()
	io.WriteString(h, fmt.Sprintf("inode %d:%d %d", st.Dev_major, st.Dev_minor, st.Ino))
	at := int64(1)<<62 | int64(h.Sum64()>>3)
	if around {
		at |= 1 << 61
	}
	return strconv.FormatInt(at, 10)
}

// forge has a user say what only daemons do, by a file.
func forge(t *testing.T, file, dir string, around, claim bool) *Agent {
	t.Helper()
	a := stranger(t)
	a.must("open", "h", file, "rdonly")
	if claim {
		a.must("flock", "h")
	}
	a.must("mark", "h", markOf(t, dir, around))
	return a
}

// TestM1OverlapForged: what any user can say of a directory keeps no other user's daemon
// from serving it.
func TestM1OverlapForged(t *testing.T) {
	need(t, "root", "fuse")
	own := filepath.Join(tempDir(t), "own")
	openDir(t, own)
	mustDo(t, os.Chown(own, nobody, nobody))
	for _, claim := range []bool{false, true} {
		for how, where := range map[string]func(dir string) (file string, of string, around bool){
			"around, elsewhere":      func(dir string) (string, string, bool) { return own, dir, true },
			"inside, elsewhere":      func(dir string) (string, string, bool) { return own, filepath.Dir(dir), false },
			"around, another's":      func(dir string) (string, string, bool) { return filepath.Join(dir, "a"), dir, true },
			"inside, another's":      func(dir string) (string, string, bool) { return filepath.Dir(dir), filepath.Dir(dir), false },
			"inside, the root":       func(string) (string, string, bool) { return "/", "/", false },
			"around, no directory":   func(dir string) (string, string, bool) { return filepath.Join(dir, "file"), dir, true },
			"around, in a child":     func(dir string) (string, string, bool) { return filepath.Join(own, "sub"), dir, true },
			"around, as by the root": func(dir string) (string, string, bool) { return "/", dir, true },
		} {
			t.Run(how+map[bool]string{true: ", claimed"}[claim], func(t *testing.T) {
				dir, _ := nested(t)
				openDir(t, filepath.Join(own, "sub"))
				mustDo(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o644))
				mustDo(t, os.Chown(filepath.Join(dir, "file"), nobody, nobody))
				file, of, around := where(dir)
				a := forge(t, file, of, around, claim)
				m := newMount(t, dir, dir)
				m.serve()
				m.wantLog("not believed")
				if claim {
					m.wantLog("process " + itoa(a.Pid))
				}
			})
		}
	}
}

// TestM1OverlapForgedBeside: nor does it hide a daemon that is there; and a user's own
// directory is its own to serve.
func TestM1OverlapForgedBeside(t *testing.T) {
	dir, sub := nested(t)
	own := filepath.Join(tempDir(t), "own")
	openDir(t, own)
	forge(t, own, dir, true, false)
	m := mountDir(t, sub, sub)
	forge(t, own, dir, true, false)
	refusesOverlap(t, m, dir)
	m.stop()
	mustDo(t, os.Chown(sub, nobody, nobody))
	a := forge(t, sub, dir, true, true)
	wantRefusal(t, "75", []string{"process " + itoa(a.Pid), "inside of"}, "mount", "--state-dir", m.State, dir)
	a.Kill()
	m = newMount(t, dir, dir)
	m.serve()
}
