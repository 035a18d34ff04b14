package fs

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// A MountEntry is one line of /proc/self/mountinfo.
type MountEntry struct {
	ID        int
	Parent    int    // of the mount that it is mounted on
	Dev       string // major:minor
	Root      string // which directory of the file system is mounted
	Path      string // where
	Options   string // of the mount: "rw,nosuid"
	FSType    string
	Source    string
	FSOptions string // of the file system

	Propagation string // such as "shared:7 master:2", see proc_pid_mountinfo(5); "": private
}

// mountType is the type of a stagefs mount in mount tables.
const mountType = "fuse.stagefs"

// IsStagefs reports whether it is a stagefs mount, a dead one perhaps.
func (m *MountEntry) IsStagefs() bool { return m.FSType == mountType }

// shared reports whether what is mounted on m comes to its peers, too.
func (m *MountEntry) shared() bool { return strings.Contains(m.Propagation, "shared:") }

// propagation returns the flag of mount(2) that makes m what it is, if it isn't shared.
func (m *MountEntry) propagation() uintptr {
	switch {
	case strings.Contains(m.Propagation, "master:"):
		return unix.MS_SLAVE
	case m.Propagation == "unbindable":
		return unix.MS_UNBINDABLE
	}
	return unix.MS_PRIVATE
}

// TopMount returns what is mounted exactly at a path, nil if nothing is: of several, the
// last one, which covers the others.
func TopMount(mounts []MountEntry, path string) *MountEntry {
	for i := len(mounts) - 1; i >= 0; i-- {
		if mounts[i].Path == path {
			return &mounts[i]
		}
	}
	return nil
}

// MountOf returns the mount that an absolute path is on, the zero MountEntry if that
// can't be told.
func MountOf(mounts []MountEntry, path string) (on MountEntry) {
	for _, m := range mounts {
		// Of mounts on the same point the later one is on top.
		if within(path, m.Path) && len(m.Path) >= len(on.Path) {
			on = m
		}
	}
	return on
}

// mountByID returns the mount that the kernel gave an id, nil if there is none.
func mountByID(mounts []MountEntry, id int) *MountEntry {
	if i := slices.IndexFunc(mounts, func(m MountEntry) bool { return m.ID == id }); i >= 0 {
		return &mounts[i]
	}
	return nil
}

// mountedOn returns the mounts that lie right on those that on reports.
func mountedOn(mounts []MountEntry, on func(*MountEntry) bool) (all []MountEntry) {
	under := make(map[int]bool) // by ID
	for i := range mounts {
		under[mounts[i].ID] = on(&mounts[i])
	}
	for _, m := range mounts {
		if under[m.Parent] {
			all = append(all, m)
		}
	}
	return all
}

// ReadMounts reads the mount table: it knows dead and hanging mounts too, and
// touches none. Of mounts at one path, later ones cover earlier ones.
func ReadMounts() ([]MountEntry, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	return ParseMounts(string(b)), nil
}

// ParseMounts reads lines as proc_pid_mountinfo(5) describes them, and returns them in
// the order of [ReadMounts]. It skips those that are not.
func ParseMounts(text string) []MountEntry {
	var all []MountEntry
	for line := range strings.Lines(text) {
		left, right, ok := strings.Cut(line, " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if !ok || len(l) < 6 || len(r) < 3 {
			continue
		}
		id, err := strconv.Atoi(l[0])
		parent, bad := strconv.Atoi(l[1])
		if err != nil || bad != nil {
			continue
		}
		all = append(all, MountEntry{
			ID: id, Parent: parent, Dev: l[2], Root: unescape(l[3]), Path: unescape(l[4]), Options: l[5],
			FSType: r[0], Source: unescape(r[1]), FSOptions: r[2], Propagation: strings.Join(l[6:], " "),
		})
	}
	return stacked(all)
}

// stacked returns mounts in an order in which none comes before the one that it is on.
// The kernel has them by age, and one that was made beneath another is the younger one.
func stacked(mounts []MountEntry) []MountEntry {
	at := make(map[int]int, len(mounts)) // by ID
	for i, m := range mounts {
		at[m.ID] = i
	}
	early := func(m MountEntry) bool { on, there := at[m.Parent]; return there && on > at[m.ID] }
	if !slices.ContainsFunc(mounts, early) {
		return mounts
	}
	all := make([]MountEntry, 0, len(mounts))
	put := make([]bool, len(mounts))
	var add func(i int)
	add = func(i int) {
		if put[i] {
			return
		}
		put[i] = true
		if on, there := at[mounts[i].Parent]; there {
			add(on)
		}
		all = append(all, mounts[i])
	}
	for i := range mounts {
		add(i)
	}
	return all
}

// unescape undoes the octal escapes of the mount table.
func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// mountAt returns what the kernel calls the mount at a path, and its device; 0
// if there is none.
func mountAt(path string) (id int, dev uint64, err error) {
	mounts, err := ReadMounts()
	if m := TopMount(mounts, path); m != nil {
		return m.ID, m.device(), nil
	}
	return 0, 0, err
}

// devOf returns the device of a mount, 0 if it is gone.
func devOf(id int) (uint64, error) {
	mounts, err := ReadMounts()
	if m := mountByID(mounts, id); m != nil {
		return m.device(), nil
	}
	return 0, err
}

// mountIDOf returns the ID of the mount that a descriptor is on, 0 if that can't be told.
func mountIDOf(fd int) int {
	id, _ := strconv.Atoi(DescriptorInfo(procPath(fd))["mnt_id"])
	return id
}

// hexDevice writes a device as proc_locks(5) and proc_pid_maps(5) do.
func hexDevice(dev uint64) string { return fmt.Sprintf("%02x:%02x", dev>>20, dev&0xfffff) }

// device is the number of the mount's device as in an identity.
func (m *MountEntry) device() uint64 {
	major, minor, _ := strings.Cut(m.Dev, ":")
	a, _ := strconv.ParseUint(major, 10, 12)
	b, _ := strconv.ParseUint(minor, 10, 20)
	return a<<20 | b
}

// Mounts returns the stagefs mounts, dead ones included; the source of one is its
// static directory.
func Mounts() ([]MountEntry, error) {
	mounts, err := ReadMounts()
	return slices.DeleteFunc(mounts, func(m MountEntry) bool { return !m.IsStagefs() }), err
}

// FindMount returns the innermost stagefs mount at or above path, and path
// relative to it. It returns [ErrNoMount] if there is none, or another mount
// lies between.
func FindMount(path string) (mountpoint, rel string, err error) {
	abs, err := AbsoluteOf(path)
	if err != nil {
		return "", "", err
	}
	lines, err := ReadMounts()
	if err != nil {
		return "", "", err
	}
	on := MountOf(lines, abs)
	if !on.IsStagefs() {
		return "", "", fmt.Errorf("%s: %w", path, ErrNoMount)
	}
	if rel, err = filepath.Rel(on.Path, abs); err != nil {
		return "", "", err
	}
	return on.Path, rel, nil
}

// AbsoluteOf resolves the symlinks of a path that need not exist, or that a dead
// mount hides. It asks nothing of what is at its end: that may be the root of a mount
// whose daemon does not answer.
func AbsoluteOf(path string) (string, error) {
	return follow(path, func(string, string) bool { return false })
}

// LeadsTo returns the stagefs mount that a path leads into, nil if there is none. It
// asks nothing of such a mount.
func LeadsTo(path string) (mount *MountEntry) {
	LeadsThrough(path, func(m *MountEntry, _ bool) bool {
		mount = m
		return false
	})
	return mount
}

// LeadsThrough calls enter for each stagefs mount that a path leads into, by way of
// symlinks in another one perhaps, once and before it asks anything of that; ends: the path
// ends there, and nothing is asked. It goes on while enter reports true.
func LeadsThrough(path string, enter func(mount *MountEntry, ends bool) bool) {
	mounts, err := ReadMounts()
	if err != nil {
		return
	}
	entered := make(map[int]bool) // by ID
	follow(path, func(at, then string) bool {
		m := TopMount(mounts, at)
		if m == nil || !m.IsStagefs() || then == ".." || entered[m.ID] {
			return false
		}
		entered[m.ID] = true
		return !enter(m, then == "")
	})
}

// follow goes along a path and the symlinks on it to where it leads, or until stop
// reports true of a place, which it asks nothing of. then is the name that follows there,
// "" at the end of the path.
func follow(path string, stop func(at, then string) bool) (string, error) {
	if !filepath.IsAbs(path) {
		wd, err := syscall.Getwd() // os.Getwd looks at the directory
		if err != nil {
			return "", os.NewSyscallError("getwd", err)
		}
		path = wd + "/" + path
	}
	const maxLinks = 40 // as in the kernel
	at, rest := "/", strings.Split(path, "/")
	for links := 0; len(rest) > 0; {
		next := filepath.Join(at, rest[0]) // also if that is "..": no symlink is left in at
		rest = rest[1:]
		if stop(next, firstName(rest)) {
			return next, nil
		}
		target, err := os.Readlink(next)
		if err != nil {
			at = next
			continue
		}
		if links++; links > maxLinks {
			return filepath.Clean(path), nil // whoever opens it hears why
		}
		if strings.HasPrefix(target, "/") {
			at = "/"
		}
		rest = append(strings.Split(target, "/"), rest...)
	}
	return at, nil
}

// firstName returns the first of the elements of a path that leads elsewhere, "" if none does.
func firstName(path []string) string {
	for _, name := range path {
		if name != "" && name != "." {
			return name
		}
	}
	return ""
}

// Abs makes a path an absolute one that leads to the same: unlike for [filepath.Abs],
// a ".." behind a symlink, or in a working directory whose name has one, is the parent
// of where that leads.
func Abs(path string) (string, error) {
	up := strings.LastIndex("/"+path+"/", "/../")
	if up < 0 {
		return filepath.Abs(path)
	}
	up += len("..")
	parent, err := AbsoluteOf(path[:up])
	return filepath.Join(parent, path[up:]), err
}
