//go:build linux

package procid

import (
	"bytes"
	"slices"
	"strings"
)

// markReapers fills in Reaper for as, the nearest ancestors of child. It reads
// the state of now: a name changes with exec, a cgroup when a manager moves a
// process. An ancestor that is gone may come out either way, for the dead
// inherit nothing.
func markReapers(as []Ancestor, child ID) {
	below := cgroup(child.Pid)
	for i := range as {
		a := &as[i]
		own := cgroup(a.ID.Pid)
		crossed := own != "" && below != "" && own != below
		a.Reaper = a.ID.Pid == 1 || crossed || isReaper(a.ID.Pid)
		if own != "" {
			below = own
		}
	}
}

// isReaper reports whether the process has a reaper's name or is pid 1 of its
// own pid namespace: the first process of a container.
func isReaper(pid int) bool {
	st, err := readStatus(pid)
	return err == nil && (st.nsPid == 1 || isReaperName(st.name))
}

// isReaperName reports whether a process of that name (at most 15 bytes, as
// proc(5) has it) is known to adopt or supervise others. A process that takes
// such a name only forgoes an inheritance.
func isReaperName(name string) bool {
	switch name {
	case "systemd", "init", "containerd-shim", "conmon", "tini", "docker-init", "dumb-init", "catatonit", "supervisord":
		return true
	case "kthreadd": // whose children are what the kernel starts: a handler of core dumps, or for an empty cgroup
		return true
	}
	return slices.ContainsFunc([]string{"containerd-shim-", "s6-", "runsv", "kworker/"}, func(prefix string) bool {
		return strings.HasPrefix(name, prefix)
	})
}

// cgroup returns where the service manager has put a process: its path in the
// unified hierarchy and in systemd's own one of version 1. Resource controllers
// of version 1 say nothing about services. It returns "" when the process is
// gone, or in no such hierarchy.
func cgroup(pid int) string {
	var buf [8192]byte
	b, err := readProc(pid, "cgroup", buf[:])
	if err != nil {
		return ""
	}
	return parseCgroup(b)
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
