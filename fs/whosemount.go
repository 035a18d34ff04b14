package fs

import (
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// A dead mount may be another daemon's, which had another state: what others did then is
// in the directory, and not in this state. So each state notes by which mount its
// directory is served.

// A mountName tells a mount from all others.
type mountName struct {
	boot  string
	dev   string // of its file system; used again when that is gone
	space string // the mount namespace: another one has a copy of the mount
	id    string // within that, unique for the boot; "-" before Linux 6.8, "" if that can't be told
}

// unknownMount is noted while a mount is being made.
const unknownMount = "?"

func (n mountName) String() string { return strings.Join([]string{n.boot, n.dev, n.space, n.id}, " ") }

// nameOfMount names the mount at path, of the file system dev.
func nameOfMount(path string, dev uint64) (mountName, error) {
	where, err := world()
	if err != nil {
		return mountName{}, err
	}
	space, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return mountName{}, err
	}
	return mountName{bootOf(where), strconv.FormatUint(dev, 16), space, uniqueMountID(path)}, nil
}

// uniqueMountID asks nothing of a daemon.
func uniqueMountID(path string) string {
	const mask = unix.STATX_MNT_ID_UNIQUE
	var st unix.Statx_t
	if unix.Statx(unix.AT_FDCWD, path, unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT, mask, &st) != nil || st.Mask&mask == 0 {
		return "-"
	}
	return strconv.FormatUint(st.Mnt_id, 10)
}

// is reports whether this may be the mount that was noted so.
func (n mountName) is(noted string) bool {
	f := strings.Fields(noted)
	switch {
	case len(f) == 0 || f[0] != n.boot:
		return false // no mount outlives a boot
	case len(f) < 4:
		return true
	}
	was := mountName{f[0], f[1], f[2], f[3]}
	return was.dev == n.dev && (was.space != n.space || n.id == "" || was.id == n.id)
}

// another reports whether the dead mount is another one than that which a state has noted.
func (d *deadMount) another(noted string) bool {
	if d == nil || d.cleared || d.gone {
		return false
	}
	n, err := nameOfMount(d.path, d.entry.device())
	if d.husks > 0 { // one of those below it may be that one
		n.id = ""
	}
	return err == nil && !n.is(noted)
}

// expectMount has whatever mount there is next count as this state's, until noteMount:
// unless the dead one is not, and what follows from that is not written down yet.
func (s *Server) expectMount() {
	if where, err := world(); err == nil && !s.store.Another() {
		s.noteMountAs(bootOf(where) + " " + unknownMount)
	}
}

// noteMount notes by which mount the directory is served.
func (s *Server) noteMount() {
	if n, err := nameOfMount(s.mountpoint, s.fs.mountDev); err == nil {
		s.noteMountAs(n.String())
	}
}

func (s *Server) noteMountAs(line string) {
	if err := s.store.NoteMount(line); err != nil {
		s.fs.log.Info("a daemon with another state will not be noticed", "err", err)
	}
}
