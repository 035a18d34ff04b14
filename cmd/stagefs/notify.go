//go:build linux

package main

import (
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// envNotify names the socket at which a service manager waits for news, sd_notify(3).
const envNotify = "NOTIFY_SOCKET"

// notifyReady tells a service manager, if one waits for it, that the mount answers.
func notifyReady() error {
	name := os.Getenv(envNotify)
	if name == "" {
		return nil
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	// Go's name for an abstract one is the manager's, too.
	return os.NewSyscallError("sendto", undisturbed(func() error {
		return unix.Sendto(fd, []byte("READY=1"), unix.MSG_NOSIGNAL, &unix.SockaddrUnix{Name: name})
	}))
}

// unnotified is the environment of a daemon that a service's own program has put into the
// background: whether the service is ready is not for that daemon to say.
func unnotified() []string {
	return slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, envNotify+"=") })
}
