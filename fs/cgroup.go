package fs

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// cgroupOf returns the cgroup of a process as "CONTROLLERS:PATH", in the
// hierarchy of version 2 if it has one of its own there, else in one that is for
// telling processes apart. The root is nobody's own: errNoCgroup.
func cgroupOf(pid int) (id string, err error) {
	b, err := cgroupsOf(pid)
	if err != nil {
		return "", err
	}
	for _, want := range []string{"", "name=systemd", "pids"} {
		for line := range strings.Lines(b) {
			_, id, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ":")
			if controllers, path, _ := strings.Cut(id, ":"); controllers == want && path != "/" && path != "" {
				return id, nil
			}
		}
	}
	return "", errNoCgroup
}

// cgroupsOf returns the lines that tell of the cgroups of a process.
// In the hierarchies of version 1 the kernel shows a thread that has ended in the
// root, also the first one of a process that lives: another one tells then.
func cgroupsOf(pid int) (lines string, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return "", err
	}
	lines = string(b)
	if all := strings.Count(lines, "\n"); all <= 1 || strings.Count(lines, ":/\n") < all-1 {
		return lines, nil // mostly
	}
	tid, err := procid.RunningThread(pid)
	if tid != 0 && tid != pid {
		b, err = os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/cgroup", pid, tid))
		lines = string(b)
	}
	return lines, err
}

// inCgroup reports whether a process is in a cgroup or one within it.
func inCgroup(pid int, id string) (in bool, err error) {
	lines, err := cgroupsOf(pid)
	for line := range strings.Lines(lines) {
		_, its, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ":")
		if its == id || strings.HasPrefix(its, id+"/") {
			return true, nil
		}
	}
	return false, err
}

// cgroupBorn returns the inode number of the cgroup that has a path now, which no
// other one had in this boot; 0 if its hierarchy cannot be seen from here.
func cgroupBorn(id string) (born uint64, err error) {
	_, born, err = cgroupDir(id)
	return born, err
}

// cgroupDir returns where a cgroup is seen, if it is, and its inode number.
func cgroupDir(id string) (dir string, ino uint64, err error) {
	mounts, err := ReadMounts()
	if err != nil {
		return "", 0, err
	}
	controllers, path, _ := strings.Cut(id, ":")
	for _, m := range mounts {
		if !within(path, m.Root) || !m.isCgroup(controllers) {
			continue
		}
		// Something else may be mounted over it.
		dir := filepath.Join(m.Path, strings.TrimPrefix(path, m.Root))
		var fs unix.Statfs_t
		var st unix.Stat_t
		if unix.Statfs(dir, &fs) == nil && (fs.Type == unix.CGROUP2_SUPER_MAGIC || fs.Type == unix.CGROUP_SUPER_MAGIC) &&
			unix.Stat(dir, &st) == nil {
			return dir, st.Ino, nil
		}
	}
	return "", 0, nil
}

// Frozen returns the file that thaws the cgroup of a process, or one around it, if that
// is frozen, and what to write there; else "". Nothing else shows that the process does
// not run.
func Frozen(pid int) (file, thaw string) {
	lines, _ := cgroupsOf(pid)
	for line := range strings.Lines(lines) {
		_, id, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ":")
		controllers, _, _ := strings.Cut(id, ":")
		state, file, thaw := "cgroup.freeze", "cgroup.freeze", "0"
		switch controllers {
		case "":
		case "freezer":
			state, file, thaw = "freezer.self_freezing", "freezer.state", "THAWED"
		default:
			continue
		}
		for dir, _, _ := cgroupDir(id); dir != ""; dir = filepath.Dir(dir) {
			b, err := os.ReadFile(filepath.Join(dir, state))
			if err != nil {
				break // the root has none
			}
			if strings.TrimSpace(string(b)) == "1" {
				return filepath.Join(dir, file), thaw
			}
		}
	}
	return "", ""
}

// isCgroup reports whether a mount shows a hierarchy of cgroups.
func (m *MountEntry) isCgroup(controllers string) bool {
	if controllers == "" {
		return m.FSType == "cgroup2"
	}
	return m.FSType == "cgroup" && slices.Contains(strings.Split(m.FSOptions, ","), controllers)
}
