package fs

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// waysUnder returns what reaches the backing past the mount that is about to
// be made over it (M5): working directories, roots and descriptors of
// processes, and other mounts of the same directory. What is open on a dead
// mount over it reaches nothing.
func waysUnder(root int, dir string, dead *deadMount) ([]string, error) {
	path, err := absoluteOf(dir)
	if err != nil {
		return nil, err
	}
	pids, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var ways []string
	patience := time.Second
	for _, e := range pids {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		found, ok := waysInTime(pid, path, dead, patience)
		if !ok {
			patience = lessPatience // one of them is enough to wait for
		}
		ways = append(ways, found...)
	}
	mounts, err := mountsUnder(root, path)
	return append(ways, mounts...), err
}

// lessPatience is how long the look at each further process may take.
const lessPatience = 50 * time.Millisecond

// waysInTime is waysOf, which waits for a process that is in execve(2) until that
// has closed what it has to: perhaps on a file system that hangs.
func waysInTime(pid int, path string, dead *deadMount, patience time.Duration) (ways []string, ok bool) {
	ways, ok = procid.Within(patience, func() []string { return waysOf(pid, path, dead) })
	if ok {
		return ways, true
	}
	if dead != nil {
		return nil, false // the first mount had looked
	}
	return []string{fmt.Sprintf("pid %d (%s) is in execve(2) and can't be looked at", pid, comm(pid))}, false
}

// waysOf looks at one process. What cannot be read belongs to somebody whose
// processes the mount does not serve anyway, or is gone.
func waysOf(pid int, path string, dead *deadMount) []string {
	var ways []string
	look := func(what, link string) {
		target, err := os.Readlink(link)
		if err == nil && within(target, path) && (dead == nil || !onMount(link, dead.entry.ID)) {
			ways = append(ways, fmt.Sprintf("pid %d (%s) has %s %s", pid, comm(pid), what, plain(target)))
		}
	}
	proc := "/proc/" + strconv.Itoa(pid)
	look("its working directory at", proc+"/cwd")
	look("its root at", proc+"/root")
	fds, err := os.ReadDir(proc + "/fd")
	if err != nil {
		return ways
	}
	for _, fd := range fds {
		look("descriptor "+fd.Name()+" open on", filepath.Join(proc, "fd", fd.Name()))
	}
	return ways
}

func comm(pid int) string {
	b, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/comm")
	return plain(strings.TrimSuffix(string(b), "\n"))
}

// mountsUnder looks for bind mounts of the backing, or of a directory in it.
func mountsUnder(root int, path string) ([]string, error) {
	var st unix.Statx_t
	if err := statAt(root, "", &st); err != nil {
		return nil, err
	}
	dev := fmt.Sprintf("%d:%d", st.Dev_major, st.Dev_minor)
	mounts, err := ReadMounts()
	if err != nil {
		return nil, err
	}
	// Where in its file system is the backing? At the path below the root of
	// the mount that it is reached by.
	var by MountEntry
	for _, m := range mounts {
		if m.Dev == dev && within(path, m.Path) && len(m.Path) >= len(by.Path) {
			by = m
		}
	}
	if by.Path == "" {
		return nil, nil
	}
	inside := filepath.Join(by.Root, strings.TrimPrefix(path, by.Path))
	var ways []string
	for _, m := range mounts {
		if m.Dev == dev && m != by && within(m.Root, inside) {
			ways = append(ways, fmt.Sprintf("it is mounted at %s too", plain(m.Path)))
		}
	}
	return ways, nil
}
