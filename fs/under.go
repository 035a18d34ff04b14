package fs

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// waysUnder returns what reaches the backing past the mount that is about to
// be made over it (M5): working directories, roots and descriptors of
// processes, and other mounts of the same directory. What is open on a dead
// mount over it reaches nothing.
func waysUnder(root int, dir string, dead *deadMount) ([]string, error) {
	path, err := AbsoluteOf(dir)
	if err != nil {
		return nil, err
	}
	pids, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var ways []string
	var late []lateLook
	patience := time.Second
	for _, e := range pids {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		look := lateLook{pid, make(chan []string, 1)}
		go func() { look.ways <- waysOf(pid, path, dead) }()
		found, ok := look.until(time.Now().Add(patience))
		if !ok {
			patience = lessPatience // one of them is enough to wait for
			late = append(late, look)
		}
		ways = append(ways, found...)
	}
	end := time.Now().Add(lateTime)
	for _, look := range late {
		found, ok := look.until(end)
		if !ok && dead == nil { // else the first mount had looked
			found = []string{fmt.Sprintf("pid %d (%s) can't be looked at: it may be in execve(2), waiting for a file system that hangs", look.pid, comm(look.pid))}
		}
		ways = append(ways, found...)
	}
	mounts, err := mountsUnder(root, path)
	return append(ways, mounts...), err
}

const (
	// lessPatience is how long the look at each further process may take at first.
	lessPatience = 50 * time.Millisecond
	// lateTime is how long those are waited for at last that took longer: on a
	// machine with too much to do all may.
	lateTime = 2 * time.Second
)

// A lateLook is a look at a process, which waits as long as that one is in execve(2),
// until that has closed what it has to: perhaps on a file system that hangs.
type lateLook struct {
	pid  int
	ways chan []string
}

// until returns what was found, or false if that is not known at a time.
func (l lateLook) until(end time.Time) (ways []string, ok bool) {
	select {
	case ways = <-l.ways:
		return ways, true
	default:
	}
	t := time.NewTimer(time.Until(end))
	defer t.Stop()
	select {
	case ways = <-l.ways:
		return ways, true
	case <-t.C:
		return nil, false
	}
}

// waysOf looks at one process. What cannot be read belongs to somebody whose
// processes the mount does not serve anyway, or is gone.
func waysOf(pid int, path string, dead *deadMount) []string {
	var ways []string
	look := func(what, link string) {
		target, err := os.Readlink(link)
		if err == nil && within(target, path) && (dead == nil || !OnMount(link, dead.entry.ID)) {
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
	dev := devName(&st)
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
