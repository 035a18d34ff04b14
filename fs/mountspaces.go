package fs

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Mount namespaces other than the daemon's, such as those of containers, are seen from
// Linux 6.12 on, and only by root outside of all containers.

// mountedOnElsewhere reports whether in another mount namespace something is mounted on a
// mount of a device. It asks nothing of any file system.
func mountedOnElsewhere(dev uint64) bool {
	const next, prev = 0x8010b70b, 0x8010b70c // NS_MNT_GET_NEXT, NS_MNT_GET_PREV of ioctl_nsfs(2)
	for _, way := range []uintptr{next, prev} {
		ns, err := unix.Open("/proc/self/ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		for err == nil {
			var info struct {
				size, mounts uint32
				id           uint64
			}
			fd, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(ns), way, uintptr(unsafe.Pointer(&info)))
			unix.Close(ns)
			if errno != 0 { // ENOENT: that was the last one
				break
			}
			if ns = int(fd); mountedOnIn(info.id, dev) {
				unix.Close(ns)
				return true
			}
		}
	}
	return false
}

// mountRequest is struct mnt_id_req of listmount(2) and statmount(2).
type mountRequest struct {
	size, _       uint32
	id, param, ns uint64
}

// mountedOnIn is mountedOnElsewhere in one namespace.
func mountedOnIn(ns, dev uint64) bool {
	const basic = 1<<0 | 1<<1                           // STATMOUNT_SB_BASIC, STATMOUNT_MNT_BASIC
	r := mountRequest{size: 32, id: ^uint64(0), ns: ns} // LSMT_ROOT
	on, parents := make(map[uint64]bool), make(map[uint64]bool)
	for {
		var ids [256]uint64
		n, _, errno := unix.Syscall6(unix.SYS_LISTMOUNT, uintptr(unsafe.Pointer(&r)), uintptr(unsafe.Pointer(&ids)), uintptr(len(ids)), 0, 0, 0)
		if errno != 0 || n == 0 {
			break
		}
		for _, id := range ids[:n] {
			var st struct { // struct statmount
				_            [2]uint32
				_            uint64
				major, minor uint32
				_            [2]uint64
				_, parent    uint64
				_            [456]byte
			}
			one := mountRequest{size: r.size, id: id, param: basic, ns: ns}
			_, _, errno := unix.Syscall6(unix.SYS_STATMOUNT, uintptr(unsafe.Pointer(&one)), uintptr(unsafe.Pointer(&st)), unsafe.Sizeof(st), 0, 0, 0)
			if errno != 0 {
				continue // it is gone
			}
			parents[st.parent] = true
			if uint64(st.major)<<20|uint64(st.minor) == dev {
				on[id] = true
			}
		}
		r.param = ids[n-1] // go on behind it
	}
	for id := range on {
		if parents[id] {
			return true
		}
	}
	return false
}
