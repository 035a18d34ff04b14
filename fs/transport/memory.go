package transport

import (
	"fmt"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// The kernel knows a place by its address. So that another process can have it
// at the same one, places lie where nothing else does, and no address is used
// twice.
const placesBase = 0x4000_0000_0000

const mapFixedNoreplace = 0x100000 // Linux 4.17

// nextMemory maps memory for one more place.
func (u *uring) nextMemory() ([]byte, error) {
	size := page + u.room
	mem, err := mapAt(placesBase+uintptr(u.given.Add(1)-1)*uintptr(size), size)
	if err != nil {
		if mem, err = mapAt(0, size); err == nil {
			u.fixed.Store(true)
		}
	}
	return mem, err
}

// mapAt maps memory at an address; 0: anywhere. Untouched pages take none: so who has
// room for the largest request uses what it gets.
func mapAt(addr uintptr, size int) ([]byte, error) {
	flags := uintptr(unix.MAP_PRIVATE | unix.MAP_ANONYMOUS | unix.MAP_NORESERVE)
	if addr != 0 {
		flags |= mapFixedNoreplace
	}
	got, _, errno := unix.Syscall6(unix.SYS_MMAP, addr, uintptr(size), unix.PROT_READ|unix.PROT_WRITE, flags, ^uintptr(0), 0)
	if errno != 0 {
		return nil, errno
	}
	mem := unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&got))), size)
	if addr != 0 && got != addr { // a kernel that knows the flag as a hint
		unmap(mem)
		return nil, unix.EEXIST
	}
	return mem, nil
}

func unmap(mem []byte) {
	unix.Syscall(unix.SYS_MUNMAP, uintptr(unsafe.Pointer(unsafe.SliceData(mem))), uintptr(len(mem)), 0)
}

// save notes what another process needs to go on with the place.
func (p *place) save(r *Parked) {
	r.Addr = uint64(uintptr(unsafe.Pointer(&p.mem[0])))
	r.Header = p.mem[:unsafe.Sizeof(uringHeader{})]
	r.Payload = p.payload[:p.header.entry.payload]
}

// restore makes what is in the place the request again that it was.
func (p *place) restore(h *fuse.InHeader) { *p.request() = *h }

// moveIn takes the places over that another process had.
func (u *uring) moveIn(all []*Parked) error {
	for _, r := range all {
		if r.Addr == 0 {
			continue
		}
		if r.Queue < 0 || r.Queue >= len(u.queues) || len(r.Payload) > u.room || len(r.Header) != int(unsafe.Sizeof(uringHeader{})) {
			return fmt.Errorf("buffers of a ring: a place of queue %d makes no sense", r.Queue)
		}
		mem, err := mapAt(uintptr(r.Addr), page+u.room)
		if err != nil {
			return fmt.Errorf("buffers of a ring: %w", err)
		}
		u.places.Add(1)
		r.place, r.queue = layOut(mem), u.queues[r.Queue]
		copy(mem, r.Header)
		copy(r.place.payload, r.Payload)
	}
	return nil
}
