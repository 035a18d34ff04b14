//go:build linux

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// A mountUser is one thing that keeps a mount busy.
type mountUser struct {
	pid  int
	comm string
	what string // how it uses path: "its working directory is", "it has open", …
	path string
	seen bool // or it could not be looked at
}

func (u mountUser) wasSeen() bool { return u.seen }

// hasEnded reports whether the process has: the kernel may let go a moment later.
func (u mountUser) hasEnded() bool { return u.pid != 0 && unix.Kill(u.pid, 0) == unix.ESRCH }

func (u mountUser) String() string {
	if u.pid == 0 {
		return fmt.Sprintf("%s %s", u.what, quote(u.path))
	}
	return fmt.Sprintf("process %d (%s): %s %s", u.pid, quote(u.comm), u.what, quote(u.path))
}

// mountUsers looks through /proc for who is inside the mount: a process counts
// once, with the first thing found. The mount itself is never touched, since it
// may hang.
//
// A path does not tell whether something lies in the mount or in the backing
// below it: over itself, both have the same. The id of the mount does.
func mountUsers(mount *fs.MountEntry) []mountUser {
	var users []mountUser
	mounts, _ := fs.ReadMounts()
	for _, m := range mounts {
		if m.ID != mount.ID && m.Path != mount.Path && below(m.Path, mount.Path) {
			users = append(users, mountUser{what: "another mount, at", path: m.Path, seen: true})
		}
	}
	procs, _ := filepath.Glob("/proc/[0-9]*")
	within := insideTime
	for _, proc := range procs {
		pid, err := strconv.Atoi(filepath.Base(proc))
		if err != nil {
			continue
		}
		began := time.Now()
		what, path, seen := useInTime(proc, mount, within)
		if time.Since(began) >= within {
			within = lessTime(within)
		}
		if what == "" {
			continue
		}
		comm, _ := os.ReadFile(proc + "/comm")
		users = append(users, mountUser{pid, strings.TrimSuffix(string(comm), "\n"), what, path, seen})
	}
	return users
}

// insideTime is how long the look at one process may take.
const insideTime = time.Second

// lessTime is how long the next one may take if one has taken all of its time: a crowd of
// such would take minutes.
func lessTime(within time.Duration) time.Duration { return max(within/2, insideTime/16) }

// useInTime tells how the process below proc uses the mount, "" if it does not. The
// looks wait for a process that is in execve(2) until that has closed what it has to,
// and for one that is about to unmap something: perhaps of this mount.
func useInTime(proc string, mount *fs.MountEntry, within time.Duration) (what, path string, seen bool) {
	type use struct{ what, path string }
	look := func(of func(string, *fs.MountEntry) (what, path string)) (u use, ok bool) {
		return procid.Within(within, func() (u use) {
			u.what, u.path = of(proc, mount)
			return u
		})
	}
	u, ok := look(useOf)
	if !ok {
		return "it is in execve(2), and may close what it has open in", mount.Path, false
	}
	if u.what == "" {
		if u, ok = look(mappingOf); !ok {
			return "it changes what it has mapped, and may have mapped something in", mount.Path, false
		}
	}
	return u.what, u.path, true
}

// useOf tells how a process uses the mount, but for what it has mapped.
func useOf(proc string, mount *fs.MountEntry) (what, path string) {
	for _, link := range []struct{ name, what string }{
		{"/cwd", "its working directory is"},
		{"/root", "its root directory is"},
		{"/exe", "it runs"},
	} {
		if path, err := os.Readlink(proc + link.name); err == nil && below(path, mount.Path) && fs.OnMount(proc+link.name, mount.ID) {
			return link.what, path
		}
	}
	fds, _ := os.ReadDir(proc + "/fd")
	for _, fd := range fds {
		link := proc + "/fd/" + fd.Name()
		if path, err := os.Readlink(link); err == nil && below(path, mount.Path) && fs.OnMount(link, mount.ID) {
			return "it has open", path
		}
	}
	return "", ""
}

// mappingOf tells what a process has mapped of the mount.
func mappingOf(proc string, mount *fs.MountEntry) (what, path string) {
	maps, _ := os.ReadFile(proc + "/maps")
	for line := range strings.Lines(string(maps)) {
		// The path is the sixth field and may hold blanks.
		if i := strings.IndexByte(line, '/'); i >= 0 {
			if path := strings.TrimSuffix(line[i:], "\n"); below(path, mount.Path) && path != mount.Path {
				return "it has mapped", path
			}
		}
	}
	return "", ""
}
