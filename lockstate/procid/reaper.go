//go:build linux

package procid

import (
	"bytes"
	"cmp"
	"slices"
	"strings"
)

// markReapers fills in Reaper for as, the nearest ancestors of child. It reads
// the state of now: a name changes with exec, a cgroup when a manager moves a
// process. An ancestor that is gone may come out either way, for the dead
// inherit nothing. The error is why it can't be said of all now, of whom some pass for
// reapers then.
func markReapers(as []Ancestor, child ID) error {
	below, short := cgroup(child.Pid)
	for i := range as {
		a := &as[i]
		own, err := cgroup(a.ID.Pid)
		crossed := own != "" && below != "" && own != below
		is, bad := isReaper(a.ID.Pid)
		short = cmp.Or(short, err, bad)
		a.Reaper = a.ID.Pid == 1 || crossed || is || short != nil
		if own != "" {
			below = own
		}
	}
	return short
}

// isReaper reports whether the process has a reaper's name or is pid 1 of its
// own pid namespace: the first process of a container. The error is why that can't be
// said now.
func isReaper(pid int) (bool, error) {
	st, err := readStatus(pid)
	if IsShort(err) {
		return false, err
	}
	return err == nil && (st.nsPid == 1 || isReaperName(st.name)), nil
}

// isReaperName reports whether a process of that name (at most 15 bytes, as
// proc(5) has it) is known to adopt or supervise others, or to fork for each
// session or job: what one of those has left must not be every later one's. A
// process that takes such a name only forgoes an inheritance.
func isReaperName(name string) bool {
	switch name {
	case "systemd", "init", "containerd-shim", "conmon", "tini", "docker-init", "dumb-init", "catatonit", "supervisord":
		return true
	case "cron", "crond", "atd", "dropbear", "smbd", "vsftpd", "proftpd", "pure-ftpd":
		return true
	case "kthreadd": // whose children are what the kernel starts: a handler of core dumps, or for an empty cgroup
		return true
	}
	return slices.ContainsFunc([]string{"containerd-shim-", "s6-", "runsv", "sshd", "kworker/"}, func(prefix string) bool {
		return strings.HasPrefix(name, prefix)
	})
}

// cgroup returns where the service manager has put a process: its path in the
// unified hierarchy and in systemd's own one of version 1. Resource controllers
// of version 1 say nothing about services. It returns "" when the process is
// gone, or in no such hierarchy. The error is why it can't be said now.
func cgroup(pid int) (string, error) {
	var buf [8192]byte
	b, err := readProc(pid, "cgroup", buf[:])
	switch {
	case IsShort(err):
		return "", err
	case err != nil:
		return "", nil
	}
	return parseCgroup(b), nil
}

func parseCgroup(b []byte) string {
	var found strings.Builder
	for line := range bytes.Lines(b) {
		_, rest, _ := bytes.Cut(line, []byte(":"))
		controllers, path, ok := bytes.Cut(rest, []byte(":"))
		if ok && (len(controllers) == 0 || string(controllers) == "name=systemd") {
			found.Write(path)
		}
	}
	return found.String()
}
