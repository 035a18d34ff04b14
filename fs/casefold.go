package fs

import (
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// FoldsCase reports whether names in a directory that differ in case alone are the same
// file's, as far as that is known. Locks go by names as they are written.
func FoldsCase(dir string) bool {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	return foldsCase(fd)
}

func foldsCase(dir int) bool {
	flags, err := unix.IoctlGetUint32(dir, unix.FS_IOC_GETFLAGS)
	if err != nil {
		flags = 0 // the file system has none
	}
	return folds(fsType(dir), flags) || findsOtherCase(dir)
}

// foldingWithin returns those of some mounts within root, which is at a path, that
// foldsCase says of.
func foldingWithin(root int, at string, inside []MountEntry) (all []string) {
	for _, m := range inside {
		if byOpener(m.FSType) {
			continue
		}
		// Another file system's daemon may be dead, or wait for this one.
		found, _ := procid.Within(time.Second, func() bool {
			fd, err := openBeneath(root, split(strings.Trim(strings.TrimPrefix(m.Path, at), "/")), unix.O_RDONLY|unix.O_NONBLOCK)
			if err != nil {
				return false
			}
			defer unix.Close(fd)
			return foldsCase(fd)
		})
		if found {
			all = append(all, m.Path)
		}
	}
	return all
}

// findsOtherCase reports whether what a directory holds is found in it by a name that differs
// in case, and that it does not list: so it is with file systems of other machines, or of
// other systems, where the type does not tell. Of one that is empty nothing is known.
func findsOtherCase(dir int) bool {
	fd, err := openAt(dir, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOATIME, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	var other string
	err = eachEntry(fd, func(e dirEntry) bool {
		if other = otherCase(e.name); other == e.name {
			other = ""
		}
		return other == ""
	})
	var st unix.Statx_t
	if err != nil || other == "" || statAt(fd, other, &st) != nil {
		return false
	}
	if _, err = unix.Seek(fd, 0, unix.SEEK_SET); err != nil {
		return false
	}
	listed := false
	err = eachEntry(fd, func(e dirEntry) bool { listed = e.name == other; return !listed })
	return err == nil && !listed
}

// otherCase turns all letters of ASCII round.
func otherCase(name string) string {
	return strings.Map(func(r rune) rune {
		if r|0x20 >= 'a' && r|0x20 <= 'z' {
			r ^= 0x20
		}
		return r
	}, name)
}

// startsFolding reports whether a change of a directory's flags makes it one that folds. That
// would open a way past the locks in it, whoever it belongs to.
func startsFolding(dir int, flags uint32) bool {
	if flags&casefoldFlag == 0 {
		return false
	}
	now, err := unix.IoctlGetUint32(dir, unix.FS_IOC_GETFLAGS)
	return err == nil && now&casefoldFlag == 0
}

// casefoldFlag is that of chattr +F, FS_CASEFOLD_FL of linux/fs.h.
const casefoldFlag = 0x40000000

// folds is foldsCase by the type of a file system, and a directory's flags there.
func folds(fstype int64, flags uint32) bool {
	switch fstype {
	case unix.MSDOS_SUPER_MAGIC, unix.EXFAT_SUPER_MAGIC:
		return true
	}
	return flags&casefoldFlag != 0
}
