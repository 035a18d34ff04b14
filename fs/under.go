package fs

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// waysUnder returns what reaches the backing past the mount that is about to
// be made over it (M5): working directories, roots, descriptors and mappings of
// processes, and other mounts. What is open on a dead mount over it reaches nothing.
func waysUnder(dir string, dead *deadMount) ([]string, error) {
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
	all := len(ways)
	ways = slices.DeleteFunc(ways, func(w string) bool { return w == unseen })
	if n := all - len(ways); n > 0 && os.Geteuid() == 0 && !mayItself(unix.CAP_SYS_PTRACE) && dead == nil { // as above
		ways = append(ways, fmt.Sprintf("%d processes can't be looked at without CAP_SYS_PTRACE", n))
	}
	mounts, err := mountsUnder(path)
	return append(ways, mounts...), err
}

// unseen stands for the ways of a process that this one may not look at.
const unseen = ""

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

// waysOf looks at one process. What an ordinary user cannot read belongs to somebody
// whose processes the mount does not serve anyway.
func waysOf(pid int, path string, dead *deadMount) []string {
	var ways []string
	look := func(what, link string) {
		target, err := os.Readlink(link)
		if err == nil && within(target, path) && (dead == nil || !OnMount(link, dead.entry.ID)) && !elsewhere(pid, link, target) {
			ways = append(ways, fmt.Sprintf("pid %d (%s) has %s %s", pid, comm(pid), what, plain(target)))
		}
	}
	proc := "/proc/" + strconv.Itoa(pid)
	if _, err := os.Readlink(proc + "/cwd"); errors.Is(err, os.ErrPermission) {
		return []string{unseen}
	}
	look("its working directory at", proc+"/cwd")
	look("its root at", proc+"/root")
	fds, err := os.ReadDir(proc + "/fd")
	if procid.IsShort(err) {
		ways = append(ways, fmt.Sprintf("what pid %d (%s) has open can't be looked at: %v", pid, comm(pid), err))
	}
	for _, fd := range fds {
		look("descriptor "+fd.Name()+" open on", filepath.Join(proc, "fd", fd.Name()))
	}
	maps, err := os.Open(proc + "/maps")
	if procid.IsShort(err) {
		ways = append(ways, fmt.Sprintf("what pid %d (%s) has mapped can't be looked at: %v", pid, comm(pid), err))
	}
	if err != nil {
		return ways
	}
	defer maps.Close()
	buf := mapsBufs.Get().(*[]byte)
	defer mapsBufs.Put(buf)
	lines := bufio.NewScanner(maps)
	lines.Buffer(*buf, 1<<20)
	for lines.Scan() {
		// proc_pid_maps(5): addresses, permissions …
		if at, of, _ := bytes.Cut(lines.Bytes(), []byte(" ")); len(of) > 4 && of[1] == 'w' && of[3] == 's' {
			look("a writable mapping of", filepath.Join(proc, "map_files", string(at)))
		}
	}
	return ways
}

// mapsBufs: memory that was never touched is what a look at all mappings of a machine
// would cost most.
var mapsBufs = sync.Pool{New: func() any { return new(make([]byte, 8<<10)) }}

// elsewhere reports whether a link of a process leads to something else than what has
// its path here, as it may in another mount namespace (a container, PrivateTmp), or, as
// far as it can tell, to nothing any more.
func elsewhere(pid int, link, target string) bool {
	own, err := os.Readlink("/proc/self/ns/mnt")
	theirs, err2 := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", pid))
	if err != nil || err2 != nil || own == theirs {
		return errors.Is(err2, os.ErrNotExist) // it has ended
	}
	there, err := os.Stat(link)
	if err != nil {
		return errors.Is(err, os.ErrNotExist) // it was closed meanwhile
	}
	here, err := os.Lstat(target)
	return errors.Is(err, os.ErrNotExist) || err == nil && !os.SameFile(here, there)
}

func comm(pid int) string {
	b, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/comm")
	return plain(strings.TrimSuffix(string(b), "\n"))
}

// mountsUnder looks for other ways by which mounts lead to the backing, to what is
// mounted inside of it, or to a directory in these.
func mountsUnder(path string) (ways []string, err error) {
	all, err := ReadMounts()
	if err != nil {
		return nil, err
	}
	mounts := slices.DeleteFunc(slices.Clone(all), func(m MountEntry) bool { // what is on a dead mount goes with it
		for at := &m; at != nil; at = mountByID(all, at.Parent) {
			if at.Path == path && at.IsStagefs() {
				return true
			}
			if at.Parent == at.ID {
				break
			}
		}
		return false
	})
	type tree struct {
		path, inside string // where it is, and where in its file system
		on           MountEntry
	}
	on, inside := mountBeneath(mounts, path)
	trees := []tree{{path, inside, on}}
	for _, m := range mounts {
		if m.Path != path && within(m.Path, path) {
			trees = append(trees, tree{m.Path, m.Root, m})
		}
	}
	for _, t := range trees {
		for _, m := range mounts {
			which, at := t.path, m.Path
			switch {
			case m.ID == t.on.ID || m.Dev != t.on.Dev:
				continue
			case within(m.Root, t.inside):
				which = filepath.Join(which, strings.TrimPrefix(m.Root, t.inside))
			case within(t.inside, m.Root):
				at = filepath.Join(at, strings.TrimPrefix(t.inside, m.Root))
			default:
				continue
			}
			told := within(at, path) && (m.ID == on.ID || at < t.path) // the other way round
			if !told && MountOf(mounts, at).ID == m.ID {
				ways = append(ways, fmt.Sprintf("%s is at %s too, by another mount", plain(which), plain(at)))
			}
		}
	}
	return ways, nil
}
