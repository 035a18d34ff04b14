//go:build linux

// Command floor shows a directory through FUSE as libfuse's passthrough_hp does: with a
// descriptor for each file, and the same system calls for each request. It locks nothing,
// checks nothing, has no extended attributes, and takes no requests but those that the
// benchmark makes of single files. Requests come to it as to stagefs, so that the benchmark tells what Go and the
// transport cost from what is stagefs's own.
package main

import (
	"fmt"
	"os"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs/transport"
)

const maxWrite = 1 << 20

func main() {
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: floor TRANSPORT DIR MOUNTPOINT")
		os.Exit(64)
	}
	if err := serve(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, "floor:", err)
		os.Exit(1)
	}
}

// serve returns when it was unmounted.
func serve(want, dir, mountpoint string) error {
	root, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	unix.Umask(0)
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("/dev/fuse: %w", err)
	}
	data := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other,max_read=%d", fd, maxWrite)
	if err := unix.Mount(dir, mountpoint, "fuse.floor", unix.MS_NOSUID|unix.MS_NODEV, data); err != nil {
		return fmt.Errorf("mount %s: %w", mountpoint, err)
	}
	f := newFloor(root)
	t, note, err := transport.Start(fd, transport.Options{
		FS: f, Want: want,
		Mount: &fuse.MountOptions{
			Name: "floor", MaxWrite: maxWrite, MaxBackground: 64,
			ExtraCapabilities:  fuse.CAP_ATOMIC_O_TRUNC | fuse.CAP_PASSTHROUGH,
			DisableReadDirPlus: true,
		},
		Attach: func(k transport.Kernel) { f.kernel = k },
		Files:  func() []uint64 { return nil },
		Lines:  func() uint64 { return 0 },
		Hurry:  func() bool { return false },
	})
	if err != nil {
		unix.Unmount(mountpoint, unix.MNT_DETACH)
		return err
	}
	if note != "" {
		fmt.Fprintln(os.Stderr, note)
	}
	t.Serve()
	return nil
}
