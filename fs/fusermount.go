package fs

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// mountAsUser mounts with the help of fusermount3, which is root's, and returns
// the descriptor of the connection that it passes on. flags are of mount(2).
func mountAsUser(o *Options, mountpoint string, flags uintptr) (int, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("socketpair: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "fusermount3"), os.NewFile(uintptr(pair[1]), "fusermount3")
	defer ours.Close()
	opts := []string{
		"default_permissions", "subtype=stagefs", fmt.Sprintf("max_read=%d", maxWrite),
		"fsname=" + strings.NewReplacer(`\`, `\\`, ",", `\,`).Replace(o.Dir),
	}
	opts = append(opts, forUser(flags)...)
	if conf, err := os.ReadFile("/etc/fuse.conf"); err == nil && UserAllowOther(string(conf)) {
		opts = append(opts, "allow_other")
	}
	var said bytes.Buffer
	cmd := fusermountCommand("-o", strings.Join(opts, ","), "--", mountpoint)
	cmd.Env = append(os.Environ(), "_FUSE_COMMFD=3")
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Stderr = &said
	err = cmd.Run()
	theirs.Close()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit) && exit.ExitCode() < 0:
		ours.Close() // and so the descriptor that it has passed on, perhaps
		if dead, _ := FindDead(mountpoint); dead {
			_ = fusermount(mountpoint, true) // what it had mounted already
		}
		return -1, fmt.Errorf("%s: %w (%w)", mountpoint, ErrHelperKilled, err)
	case errors.Is(err, exec.ErrNotFound):
		return -1, fmt.Errorf("%s: %w: fusermount3 is missing; install fuse3", mountpoint, ErrNoFuse)
	case err != nil && said.Len() == 0: // it could not be run
		return -1, fmt.Errorf("%s: %w: fusermount3: %w", mountpoint, ErrNoFuse, err)
	case err != nil:
		return -1, fmt.Errorf("%s: %w: %s", mountpoint, ErrNoFuse, bytes.TrimSpace(said.Bytes()))
	}
	control := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(int(ours.Fd()), make([]byte, 1), control, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("fusermount3: %w", err)
	}
	messages, err := unix.ParseSocketControlMessage(control[:n])
	if err == nil && len(messages) == 1 {
		if fds, err := unix.ParseUnixRights(&messages[0]); err == nil && len(fds) == 1 {
			return fds[0], nil
		}
	}
	return -1, fmt.Errorf("%s: %w: fusermount3 passed no descriptor", mountpoint, ErrNoFuse)
}

// LookFusermount returns the path of fusermount3. As for execvp(3), no PATH stands for
// /bin and /usr/bin: mount(8) takes it away from what it runs for an ordinary user.
func LookFusermount() (string, error) {
	path, err := exec.LookPath("fusermount3")
	if _, ok := os.LookupEnv("PATH"); err != nil && !ok {
		for _, dir := range []string{"/bin/", "/usr/bin/"} {
			if path, err = exec.LookPath(dir + "fusermount3"); err == nil {
				break
			}
		}
	}
	return path, err
}

func fusermountCommand(args ...string) *exec.Cmd {
	path, err := LookFusermount()
	if err != nil {
		path = "fusermount3" // Run says what is wrong
	}
	return exec.Command(path, args...)
}

// UserAllowOther reports whether fusermount3 lets ordinary users open their mounts to
// others, by the text of /etc/fuse.conf.
func UserAllowOther(conf string) bool {
	return slices.ContainsFunc(strings.Split(conf, "\n"), func(line string) bool { return strings.TrimSpace(line) == "user_allow_other" })
}
