package fs

import (
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// kernelTypes are file systems that hold no files of anybody's, but what the
// kernel shows or takes there. The daemon and all others need them as they are:
// over /proc, for one, it would wait for itself.
func kernelTypes() []string {
	return []string{
		"proc", "sysfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "bpf", "configfs", "debugfs", "tracefs", "securityfs", "selinuxfs",
		"smackfs", "pstore", "efivarfs", "mqueue", "fusectl", "binfmt_misc", "rpc_pipefs", "nsfs",
	}
}

// IsKernelType reports whether a directory on such a file system can neither be
// served nor be a mountpoint.
func IsKernelType(fstype string) bool { return slices.Contains(kernelTypes(), fstype) }

// byOpener reports whether the kernel goes by the rights of who opens a file, on a file
// system of its own, and not only by the file's mode.
func byOpener(fstype string) bool {
	return IsKernelType(fstype) && fstype != "devtmpfs" && fstype != "devpts"
}

// mayEnter returns EACCES if what is in an open directory, which another file system is
// mounted on, is one that byOpener is about.
func mayEnter(dir int, name string) error {
	fd, err := openAt(dir, name, unix.O_PATH, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	switch uint32(fsType(fd)) {
	case 0, // it cannot be told
		unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP_SUPER_MAGIC, unix.CGROUP2_SUPER_MAGIC, unix.BPF_FS_MAGIC, configFSMagic,
		unix.DEBUGFS_MAGIC, unix.TRACEFS_MAGIC, unix.SECURITYFS_MAGIC, unix.SELINUX_MAGIC, unix.SMACK_MAGIC, unix.PSTOREFS_MAGIC,
		unix.EFIVARFS_MAGIC, mqueueMagic, fusectlMagic, unix.BINFMTFS_MAGIC, rpcPipeFSMagic, unix.NSFS_MAGIC:
		return unix.EACCES
	}
	return nil
}

const ( // of the kernel's sources
	configFSMagic  = 0x62656570
	mqueueMagic    = 0x19800202
	fusectlMagic   = 0x65735543
	rpcPipeFSMagic = 0x67596969
)

// kernelType returns the type of the file system that fd is on, if it is one of
// kernelTypes, and "" if not.
func kernelType(fd int) (string, error) {
	var st unix.Statx_t
	if err := statAt(fd, "", &st); err != nil {
		return "", err
	}
	mounts, err := ReadMounts()
	if err != nil {
		return "", err
	}
	dev := devName(&st)
	for _, m := range mounts {
		if m.Dev == dev && IsKernelType(m.FSType) {
			return m.FSType, nil
		}
	}
	return "", nil
}

// checkPlace refuses mountpoints that would take from the system what it needs.
func checkPlace(at string) error {
	switch at {
	case "/":
		return fmt.Errorf("%s: %w: it is the root of all processes, beneath the mount", at, ErrNeeded)
	case "/run":
		return fmt.Errorf("%s: %w: services keep their sockets there", at, ErrNeeded)
	}
	return nil
}

// checkPlaceType refuses a mountpoint on a file system of the kernel's own.
func checkPlaceType(at string) error {
	fd, err := unix.Open(at, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: at, Err: err}
	}
	defer unix.Close(fd)
	fstype, err := kernelType(fd)
	if err == nil && fstype != "" {
		err = fmt.Errorf("%s: %w: it is on %s", at, ErrNeeded, fstype)
	}
	return err
}
