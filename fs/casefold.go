package fs

import (
	"golang.org/x/sys/unix"
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
	return folds(fsType(dir), flags)
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
