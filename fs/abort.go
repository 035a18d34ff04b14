package fs

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Abort ends the kernel's connection to the daemon of a mount, as the daemon's death
// does: whoever waits for an answer hears ECONNABORTED. Only root may.
func Abort(m *MountEntry) error {
	_, minor, _ := strings.Cut(m.Dev, ":")
	// Nobody need have it mounted anywhere.
	ctx, err := unix.Fsopen("fusectl", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("fsopen", err)
	}
	defer unix.Close(ctx)
	if err := unix.FsconfigCreate(ctx); err != nil {
		return os.NewSyscallError("fsconfig", err)
	}
	all, err := unix.Fsmount(ctx, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("fsmount", err)
	}
	defer unix.Close(all)
	fd, err := unix.Openat(all, minor+"/abort", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT {
		return nil // it has ended
	}
	if err != nil {
		return fmt.Errorf("the connection of %s: %w", plain(m.Path), err)
	}
	defer unix.Close(fd)
	_, err = unix.Write(fd, []byte("1"))
	return err
}
