package fs

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Connection is the kernel's number of its connection to the daemon of the mount.
func (m *MountEntry) Connection() string {
	_, minor, _ := strings.Cut(m.Dev, ":")
	return minor
}

// Abort ends the kernel's connection of a number to a daemon, as the daemon's death
// does: whoever waits for an answer hears ECONNABORTED. Only root may.
func Abort(connection string) error {
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
	fd, err := unix.Openat(all, connection+"/abort", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT {
		return nil // it has ended
	}
	if err != nil {
		return fmt.Errorf("connection %s: %w", connection, err)
	}
	defer unix.Close(fd)
	_, err = unix.Write(fd, []byte("1"))
	return err
}
