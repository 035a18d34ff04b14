//go:build linux

package tests

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// TestM1Moved: who may write above DIR, and exchanges it for a symlink again and again
// while it is mounted, gets it over nothing that the symlink names.
func TestM1Moved(t *testing.T) {
	need(t, "root", "fuse")
	base := tempDir(t)
	at := func(name string) string { return filepath.Join(base, name) }
	for _, name := range []string{"static", "victim"} {
		mustDo(t, os.Mkdir(at(name), 0o755))
		openFile(t, at(name+"/who"), name)
	}
	mustDo(t, os.Symlink(at("victim"), at("other")))
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				_ = unix.Renameat2(unix.AT_FDCWD, at("static"), unix.AT_FDCWD, at("other"), unix.RENAME_EXCHANGE)
			}
		}
	}()
	defer func() { close(stop); <-stopped }()
	said := make(map[string]int)
	for i := range 12 {
		r := run(t, stagefsBin(), "mount", "-d", "--state-dir", at("state"+itoa(i)), at("static"))
		what := "failed"
		if r.Status == 0 {
			what = "mounted"
		} else if r.Status != 73 && r.Status != 66 {
			t.Errorf("round %d: %v", i, r)
		}
		for mnt := range mountsBelow(base) {
			want := "static"
			if mnt == at("victim") { // the symlink was followed from the first
				want = "victim"
			}
			what += " at " + want
			if got, err := os.ReadFile(filepath.Join(mnt, "who")); string(got) != want {
				t.Errorf("round %d: at %s is %q, %v, after %v", i, mnt, got, err, r)
			}
		}
		// Each is at another path a moment later.
		eventually(t, "all unmounted", func() bool {
			left := mountsBelow(base)
			for mnt := range left {
				run(t, stagefsBin(), "umount", "-l", mnt)
			}
			return len(left) == 0
		})
		said[what]++
	}
	t.Log(said)
}
