package fs

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs/transport"
)

// A namesKernel can be told of names, or not.
type namesKernel struct {
	transport.Kernel
	tells bool
}

func (k namesKernel) TellsNames() bool { return k.tells }

// TestValidity: long only where nobody else changes the files, and the kernel can be told.
func TestValidity(t *testing.T) {
	for _, c := range []struct {
		dir   string
		tells bool
		want  time.Duration
	}{
		{"/dev/shm", true, time.Hour},
		{"/dev/shm", false, time.Minute}, // a kernel that can't be told
		{"/proc", true, time.Minute},     // what is there changes by itself
	} {
		fd, err := unix.Open(c.dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		if got := validity(fd, namesKernel{tells: c.tells}); got != c.want {
			t.Errorf("%s, %v: %v, want %v", c.dir, c.tells, got, c.want)
		}
	}
}
