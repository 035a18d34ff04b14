package fs

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// kernelTypes are file systems that hold no files of anybody's, but what the
// kernel shows or takes there. The daemon and all others need them as they are:
// over /proc, for one, it would wait for itself. With each is what statfs(2) calls it if
// the kernel goes by the rights of who opens a file there, and not only by the file's
// mode; else 0.
var kernelTypes = map[string]int64{
	"proc": unix.PROC_SUPER_MAGIC, "sysfs": unix.SYSFS_MAGIC, "devtmpfs": 0, "devpts": 0,
	"cgroup": unix.CGROUP_SUPER_MAGIC, "cgroup2": unix.CGROUP2_SUPER_MAGIC, "bpf": unix.BPF_FS_MAGIC, "configfs": configFSMagic,
	"debugfs": unix.DEBUGFS_MAGIC, "tracefs": unix.TRACEFS_MAGIC, "securityfs": unix.SECURITYFS_MAGIC,
	"selinuxfs": unix.SELINUX_MAGIC, "smackfs": unix.SMACK_MAGIC, "pstore": unix.PSTOREFS_MAGIC, "efivarfs": unix.EFIVARFS_MAGIC,
	"mqueue": mqueueMagic, "fusectl": fusectlMagic, "binfmt_misc": unix.BINFMTFS_MAGIC, "rpc_pipefs": rpcPipeFSMagic,
	"nsfs": unix.NSFS_MAGIC,
}

const ( // of the kernel's sources
	configFSMagic  = 0x62656570
	mqueueMagic    = 0x19800202
	fusectlMagic   = 0x65735543
	rpcPipeFSMagic = 0x67596969
)

// IsKernelType reports whether a directory on such a file system can neither be
// served nor be a mountpoint.
func IsKernelType(fstype string) bool {
	_, is := kernelTypes[fstype]
	return is
}

// byOpener reports whether the kernel goes by the rights of who opens a file, on a file
// system of its own.
func byOpener(fstype string) bool { return kernelTypes[fstype] != 0 }

// mayEnter returns EACCES if what is in an open directory, which another file system is
// mounted on, is one that byOpener is about, or it cannot be told.
func mayEnter(dir int, name string) error {
	fd, err := openAt(dir, name, unix.O_PATH, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	kind := int64(uint32(fsType(fd))) // 0, where it cannot be told, is among them
	for _, magic := range kernelTypes {
		if magic == kind {
			return unix.EACCES
		}
	}
	return nil
}

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
