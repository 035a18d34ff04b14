package fs

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// Of a file that an earlier daemon served, the lock table knows that somebody may write
// to it, but not who: the kernel told that one. Who opened another one may be dead, and
// others have the descriptor. The listing names those in whose descriptors or mappings
// such a file is seen (R8). Nothing is decided by that: others may have it open whom
// /proc does not show.

// openers remembers who was seen.
type openers struct {
	mu   sync.Mutex
	at   time.Time
	seen map[*lockstate.Handle][]procid.ID
}

// openersTime is for how long: anybody may read the listing, again and again, and it
// takes a look at all processes.
const openersTime = time.Second

// A servedFile is a file as the processes show it that have it open.
type servedFile struct {
	handle *lockstate.Handle
	ino    string
	path   string // below the mountpoint, of which nothing is left to see perhaps
	before bool   // it was opened through a mount that is no more
}

// isUnknown reports whether it is not known who opened what a handle is of.
func isUnknown(h *lockstate.Handle) bool { return h.Owner().ID().Pid == 0 }

// hasLost reports whether who opened it is not known, or dead.
func (fs *FS) hasLost(h *lockstate.Handle) bool {
	return isUnknown(h) || !fs.procs.Alive(h.Owner().ID())
}

// openersOf returns the processes that are seen to have the file of a handle open that
// has lost who opened it.
func (fs *FS) openersOf(h *lockstate.Handle) []procid.ID {
	if !fs.hasLost(h) {
		return nil
	}
	o := &fs.openers
	o.mu.Lock()
	defer o.mu.Unlock()
	if time.Since(o.at) > openersTime {
		o.seen = fs.findOpeners()
		o.at = time.Now()
	}
	return o.seen[h]
}

func (fs *FS) findOpeners() map[*lockstate.Handle][]procid.ID {
	files := make(map[string][]servedFile) // by the last element of the path
	for _, h := range fs.handles.writers() {
		if !fs.hasLost(h.lock) {
			continue
		}
		if dirs, name := h.node.covering(); len(dirs) > 0 {
			f := servedFile{h.lock, strconv.FormatUint(h.node.shownIno(), 10), join(fs.table.Path(dirs[0]), name), isUnknown(h.lock)}
			files[name] = append(files[name], f)
		}
	}
	seen := make(map[*lockstate.Handle][]procid.ID)
	if len(files) == 0 {
		return seen
	}
	err := eachProcess(func(pid int) bool {
		// What one has open that is in execve(2) is not known.
		open, _ := procid.Soon(fs.procs, pid, func() []*lockstate.Handle { return fs.openIn(pid, files) }, nil)
		if len(open) == 0 {
			return true
		}
		if p, err := fs.procs.ByPid(pid); err == nil {
			for _, h := range open {
				seen[h] = append(seen[h], p.ID())
			}
		}
		return true
	})
	if err != nil {
		fs.log.Warn("cannot look who has files open", "err", err)
	}
	return seen
}

// openIn returns those of some files that a process has open for writing, or mapped so:
// what was opened before, through another mount than this one.
func (fs *FS) openIn(pid int, files map[string][]servedFile) (open []*lockstate.Handle) {
	found := func(path, ino string, here, toWrite bool) {
		for _, f := range files[filepath.Base(path)] {
			if toWrite && !(here && f.before) && strings.HasSuffix(path, "/"+f.path) && (ino == "" || ino == f.ino) && !slices.Contains(open, f.handle) {
				open = append(open, f.handle)
			}
		}
	}
	proc := fmt.Sprintf("/proc/%d/", pid)
	fds, _ := os.ReadDir(proc + "fd")
	for _, fd := range fds {
		link := proc + "fd/" + fd.Name()
		path, err := os.Readlink(link)
		if err != nil || len(files[filepath.Base(path)]) == 0 {
			continue
		}
		info := DescriptorInfo(link)
		flags, err := strconv.ParseUint(info["flags"], 8, 32)
		found(path, info["ino"], info["mnt_id"] == strconv.Itoa(fs.mountID), err == nil && writes(uint32(flags)))
	}
	dev := hexDevice(fs.mountDev)
	maps, _ := os.ReadFile(proc + "maps")
	for line := range strings.Lines(string(maps)) {
		// proc_pid_maps(5): addresses, permissions, offset, device, inode, path
		var of [5]string
		path := strings.TrimSuffix(line, "\n")
		for i := range of {
			of[i], path, _ = strings.Cut(path, " ")
		}
		found(strings.TrimLeft(path, " "), of[4], of[3] == dev, strings.Contains(of[1], "w") && strings.HasSuffix(of[1], "s"))
	}
	return open
}
