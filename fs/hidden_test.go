package fs

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestR7NoRoom: a hidden directory that cannot be made leaves no descriptor open.
func TestR7NoRoom(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	root, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(root)
	fs := &FS{back: backing{root: root}, uid: uint32(os.Getuid())}
	if _, err := fs.openHidden(strings.Repeat("x", 300), true); err != unix.ENAMETOOLONG {
		t.Errorf("openHidden() = %v, want ENAMETOOLONG", err)
	}
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range open {
		if to, _ := os.Readlink("/proc/self/fd/" + e.Name()); to == filepath.Join(dir, ControlDir) {
			t.Errorf("descriptor %s of %s is open", e.Name(), to)
		}
	}
}
