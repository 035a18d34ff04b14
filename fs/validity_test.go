package fs

import (
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs/transport"
)

// A namesKernel can be told of names, or not.
type namesKernel struct {
	transport.Kernel
	status fuse.Status
}

func (k namesKernel) ForgetNames() fuse.Status { return k.status }

// TestValidity: long only where nobody else changes the files, and the kernel can be told.
func TestValidity(t *testing.T) {
	for _, c := range []struct {
		dir    string
		status fuse.Status
		want   time.Duration
	}{
		{"/dev/shm", fuse.OK, time.Hour},
		{"/dev/shm", fuse.ENOSYS, time.Minute}, // a kernel that can't be told
		{"/proc", fuse.OK, time.Minute},        // what is there changes by itself
	} {
		fd, err := unix.Open(c.dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		if got := validity(fd, namesKernel{status: c.status}); got != c.want {
			t.Errorf("%s, %v: %v, want %v", c.dir, c.status, got, c.want)
		}
	}
}
